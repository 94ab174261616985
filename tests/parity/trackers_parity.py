#!/usr/bin/env python3
"""Reads what our trackers write with the trackers' own packages.

    python3 -m venv build/trackers-venv && build/trackers-venv/bin/pip install wandb tensorboard mlflow
    build/trackers-venv/bin/python tests/parity/trackers_parity.py --driver build/cpu/tests/trackers_test

TensorBoard's reader must give every scalar, W&B's messages must parse with all checksums right, and an MLflow server
started here must hold every step.
"""
import argparse
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib

STEPS = 500


def check(what, holds):
    print(("ok    " if holds else "WRONG ") + what)
    if not holds:
        sys.exit(1)


def tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    scalars = events.Scalars("train/reward")
    check("TensorBoard reads every step", [s.step for s in scalars] == list(range(1, STEPS + 1)))
    check("TensorBoard reads the values", all(abs(s.value - 1 / s.step) < 1e-6 for s in scalars))
    check("TensorBoard shows the configuration", "config" in events.Tags()["tensors"])


def wandb_records(path):
    from wandb.proto import wandb_internal_pb2

    data, at, joined = path.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        crc, length, kind = struct.unpack("<IHB", data[at : at + 7])
        piece = data[at + 7 : at + 7 + length]
        if zlib.crc32(data[at + 6 : at + 7] + piece) != crc:
            check(f"W&B's checksum at byte {at}", False)
        at += 7 + length
        joined += piece
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(joined)
            joined = b""
            yield record


def wandb(folder):
    (path,) = folder.rglob("*.wandb")
    records = list(wandb_records(path))
    kinds = [r.WhichOneof("record_type") for r in records]
    check("W&B reads every record", kinds == ["header", "run"] + ["history"] * STEPS + ["exit"])
    rows = [{i.nested_key[0]: json.loads(i.value_json) for i in r.history.item}
            for r in records if r.HasField("history")]
    check("W&B reads the values", all(row["train/reward"] == 1 / row["_step"] for row in rows))
    config = {u.key: json.loads(u.value_json) for u in records[1].run.config.update}
    check("W&B reads the configuration", config["grpo"] == {"seed": 7} and records[1].run.project == "sums")


class MlflowServer:
    """MLflow's own server on a free port, over a data base in `folder`."""

    def __init__(self, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{port}"
        store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port),
             "--workers", "1", *store],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(self.uri + "/health", timeout=2)
                return
            except OSError:
                time.sleep(0.5)
        check("MLflow's server starts", False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait()


def mlflow(uri):
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("sums & more")
    (run,) = client.search_runs([experiment.experiment_id])
    check("MLflow's run has ended well", run.info.status == "FINISHED" and run.info.run_name == "first")
    history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "train/reward")}
    check("MLflow holds every step", history == {step: 1 / step for step in range(1, STEPS + 1)})
    check("MLflow holds the configuration", run.data.params["grpo.seed"] == "7")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with MlflowServer(folder) as server:
            subprocess.run(
                [arguments.driver, "--gtest_filter=Trackers.WriteForTheirOwnReaders"],
                env={**os.environ, "TRIREME_WRITE_TRACKERS": name, "TRIREME_MLFLOW_URI": server.uri},
                check=True,
                stdout=subprocess.DEVNULL,
            )
            mlflow(server.uri)
        tensorboard(folder / "tensorboard")
        wandb(folder / "wandb")


main()
