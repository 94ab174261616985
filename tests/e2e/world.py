"""What the checks of a live cluster share: the table of results, jobs and their volumes, processes of pods."""
import copy
import hashlib
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import traceback

import yaml

from kube import ApiError, Kube, Recorder

ROOT = pathlib.Path(__file__).resolve().parents[2]
STATE = pathlib.Path(os.environ["STATE"])
COMPONENTS = pathlib.Path(os.environ["COMPONENTS"])
KUBECONFIG = os.environ["KUBECONFIG"]
SYSTEM = "trireme-system"
kube = Kube(KUBECONFIG)
results = []


def need(holds, message):
    if not holds:
        raise AssertionError(message)


def check(name, function, *arguments):
    """Runs one check; what it returns is a note for the table. ONLY=PATTERN in the environment: just those, and what
    others build on."""
    if not re.search(os.environ.get("ONLY", ""), name) and not re.search("undisturbed|live run", name):
        return True
    begin = time.monotonic()
    try:
        note = function(*arguments)
        results.append((name, "ok", time.monotonic() - begin, note or ""))
    except Exception as error:  # noqa: BLE001: a check may fail in any way, and the others go on
        if not isinstance(error, AssertionError):
            traceback.print_exc()
        results.append((name, "FAILED", time.monotonic() - begin, str(error)))
    name, result, seconds, note = results[-1]
    print(f"{result:6}  {seconds:6.1f} s  {name}{': ' + str(note) if note else ''}", flush=True)
    return result == "ok"


def finish():
    width = max([len(r[0]) for r in results] + [5])
    print(f"\n{'check':{width}}  result   seconds")
    for name, result, seconds, _ in results:
        print(f"{name:{width}}  {result:6}  {seconds:8.1f}")
    failed = sum(r[1] != "ok" for r in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


def run(*command, ok=True, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True,
                          timeout=options.pop("timeout", 300), **options)
    if ok and done.returncode != 0:
        raise AssertionError(
            f"{' '.join(map(str, command))[:200]}: exit code {done.returncode}: {(done.stderr + done.stdout)[-600:]}")
    return done


def kubectl(*arguments, ok=True, **options):
    return run(COMPONENTS / "bin/kubectl", *arguments, ok=ok, **options)


def wait(what, condition, seconds=180, seen=lambda: ""):
    """Polls for something that stays true once it is; what is `seen` instead is told. A server that does not answer
    just then is asked again."""
    end = time.monotonic() + seconds
    while True:
        value, trouble = None, ""
        try:
            value = condition()
        except (OSError, http.client.HTTPException) as error:
            trouble = repr(error)
        except ApiError as error:
            if error.status < 500 and error.status != 429:
                raise
            trouble = repr(error)
        if value:
            return value
        if time.monotonic() >= end:
            raise AssertionError(f"{what}: not within {seconds} s {seen()} {trouble}")
        time.sleep(0.1)


# ---- jobs

QUICKSTART = list(yaml.safe_load_all((ROOT / "examples/quickstart.rljob.yaml").read_text()))


def volume_folder(name):
    return STATE / "volumes" / name


def make_volume(name, like=None):
    """A ReadWriteMany volume and its claim; `like`: with what the named one's init containers had prepared."""
    folder = volume_folder(name)
    folder.mkdir(parents=True)
    if like:
        for part in ("task", "model"):
            shutil.copytree(volume_folder(like) / part, folder / part)
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, 65532, 65532)
    folder.chmod(0o777)
    kube.create("persistentvolumes", {
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
        "spec": {"capacity": {"storage": "2Gi"}, "accessModes": ["ReadWriteMany"], "hostPath": {"path": str(folder)},
                 "persistentVolumeReclaimPolicy": "Retain", "claimRef": {"namespace": "default", "name": name}}})


def make_claim(name):
    kube.create("persistentvolumeclaims", {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteMany"], "volumeName": name, "resources": {"requests": {"storage": "2Gi"}}}})


def clean():
    """Jobs and volumes of an earlier run on the same cluster."""
    for kind in ("rljobs", "persistentvolumeclaims"):
        for o in kube.list(kind):
            kube.delete(kind, o["metadata"]["name"])
    for o in kube.list("persistentvolumes", None):
        kube.delete("persistentvolumes", o["metadata"]["name"], None)
    wait("the volumes of an earlier run to go",
         lambda: not kube.list("persistentvolumes", None) and not kube.list("pods") and not kube.list("rljobs"))
    shutil.rmtree(STATE / "volumes", ignore_errors=True)


TINY_MODEL = [
    "--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--intermediate", "48"
]
TINY_TASK = ["--smallest", "0", "--largest", "19", "--warm-start", "50", "--held-out", "20"]
STEPS = 40


def small_job(name, steps=STEPS, overrides=(), **changes):
    """The quickstart cut down to a model of some thousand parameters and half a minute, as two pods on two nodes."""
    job = copy.deepcopy(QUICKSTART[0])
    job["metadata"]["name"] = name
    spec = job["spec"]
    spec["config"]["overrides"] = [
        "policy.model_name=/data/model", "data.train.data_path=/data/task/train.jsonl",
        "data.validation.data_path=/data/task/held_out.jsonl", "logger.log_dir=/data/logs", "grpo.seed=1",
        f"grpo.max_num_steps={steps}", "grpo.use_dynamic_sampling=false", "grpo.batch_multiplier=1",
        "grpo.num_prompts_per_step=32", "grpo.num_generations_per_prompt=8", "policy.train_global_batch_size=64",
        "policy.train_micro_batch_size=8", "grpo.val_period=10", "grpo.max_val_samples=20",
        "checkpointing.save_period=2", "checkpointing.keep_top_k=0", "policy.generation.max_running_samples=32",
        "policy.generation.kv_cache_tokens=4096", "policy.generation.max_new_tokens=24", "logger.report=false",
        *overrides
    ]
    actor = spec["roles"]["actor"]
    actor["replicas"] = 2
    pod = actor["template"]["spec"]
    pod["initContainers"] = pod["initContainers"][:2]
    pod["initContainers"][0]["command"] = [
        "trireme", "once", "/data/task/.done", "--", "init-task", "addition", "--out", "/data/task", *TINY_TASK
    ]
    pod["initContainers"][1]["command"] = [
        "trireme", "once", "/data/model/.done", "--", "init-model", "--out", "/data/model", *TINY_MODEL
    ]
    pod["containers"][0]["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}}
    pod["volumes"][0]["persistentVolumeClaim"]["claimName"] = name
    spread_over_nodes(pod, name)
    for key, value in changes.items():
        if isinstance(value, dict):
            spec.setdefault(key, {}).update(value)
        else:
            spec[key] = value
    return job


SPLIT_STEPS = 8


def split_job(name, steps=SPLIT_STEPS):
    """The same, split by tensor ranks over the two processes of each pod."""
    job = small_job(name, steps, (
        "cluster.device=cpu", "policy.megatron_cfg.enabled=true", "policy.megatron_cfg.tensor_model_parallel_size=2",
        "grpo.num_prompts_per_step=8", "grpo.val_period=0", "policy.train_global_batch_size=32"))
    actor = job["spec"]["roles"]["actor"]
    actor.update({"processesPerPod": 2, "parallelism": {"tp": 2}})
    init_model = actor["template"]["spec"]["initContainers"][1]["command"]
    init_model[init_model.index("--kv-heads") + 1] = "2"
    return job


def equal_bits(name, steps=SPLIT_STEPS):
    """Every step is logged, and no token that was sampled has other bits in the loss; how many were compared."""
    rows = [json.loads(line) for line in (volume_folder(name) / "logs/train.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "train/loss" in row]
    compared = sum(row["train/logprob_compared_tokens"] for row in rows)
    differing = sum(row["train/logprob_mismatch_tokens"] for row in rows)
    need(len(rows) == steps and compared > 0 and differing == 0,
         f"{len(rows)} steps, {differing} of {compared} tokens with other bits")
    return f"{int(differing)} of {int(compared)} tokens with other bits"


def spread_over_nodes(pod, name):
    pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"trireme.dev/job": name}}}]}}


def submit(job, like=None):
    name = job["metadata"]["name"]
    make_volume(name, like)
    make_claim(name)
    return kube.create("rljobs", job)


def logged_steps(name):
    """Steps in the run's log on the volume."""
    path = volume_folder(name) / "logs/train.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_step(name, step, seconds=240):
    wait(f"step {step} of {name}", lambda: logged_steps(name) >= step, seconds)


def result_of(name, step=STEPS):
    """Hash of the weights and the optimizer's moments after a step."""
    folder = volume_folder(name) / f"grpo/step_{step}/policy"
    files = sorted((folder / "weights").glob("*.safetensors")) + sorted((folder / "optimizer").glob("*.safetensors"))
    need((folder / "weights/model.safetensors").exists(), f"there is no {folder}/weights/model.safetensors")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


class Records:
    """Everything that happens to the kinds the checks talk about, from now on."""

    def __init__(self):
        self.jobs, self.pods = Recorder(kube, "rljobs"), Recorder(kube, "pods")
        self.services, self.configmaps = Recorder(kube, "services"), Recorder(kube, "configmaps")
        self.events, self.leases = Recorder(kube, "events"), Recorder(kube, "leases", SYSTEM)

    def phases(self, name):
        """Phases in order, without repetition of neighbours."""
        seen = []
        for _, _, job in self.jobs.of(name):
            phase = job.get("status", {}).get("phase", "")
            if phase and (not seen or seen[-1] != phase):
                seen.append(phase)
        return seen

    def wait_phase(self, name, phases, seconds=300):
        phases = (phases,) if isinstance(phases, str) else phases
        def reached(kind, job):
            phase = job.get("status", {}).get("phase")
            return job["metadata"]["name"] == name and kind != "DELETED" and phase in phases
        return self.jobs.wait(
            f"phase {' or '.join(phases)} of {name} ({' '.join(self.phases(name)) or 'nothing yet'} so far)", reached,
            seconds)[2]

    def wait_attempt(self, name, attempt, phase, seconds=300):
        def reached(kind, job):
            status = job.get("status", {})
            return job["metadata"]["name"] == name and status.get("attempt") == attempt and status.get("phase") == phase
        return self.jobs.wait(f"phase {phase} of attempt {attempt} of {name}", reached, seconds)[2]

    def wait_end(self, name, seconds=420):
        job = self.wait_phase(name, ("Complete", "Failed"), seconds)
        need(job["status"]["phase"] == "Complete",
             f"{name} failed: {[c for c in job['status']['conditions'] if c['type'] == 'Failed']}")
        return job

    def made_pods(self, name):
        return [
            o["metadata"]["name"]
            for _, kind, o in self.pods.of(lambda o: o["metadata"].get("labels", {}).get("trireme.dev/job") == name)
            if kind == "ADDED"
        ]

    def reasons(self, name):
        return [e["reason"] for _, _, e in self.events.of(lambda e: e["involvedObject"]["name"] == name)]


def condition(job, kind):
    return next((c for c in job["status"].get("conditions", []) if c["type"] == kind), None)


# ---- processes and nodes

def pod(name, namespace="default"):
    return kube.get("pods", name, namespace)


def processes(pod_object, word):
    """Processes of a pod whose command line contains the word, by their cgroup; as seen on this machine."""
    uid = pod_object["metadata"]["uid"]
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = lambda: (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if uid in (folder / "cgroup").read_text() and word in command():
                found.append(int(folder.name))
        except (OSError, UnicodeDecodeError):
            pass
    return sorted(found)


def rank_process(pod_name):
    """The one rank's process of a pod: the launcher's child."""
    trainers = lambda: processes(pod(pod_name), "trireme train ") + processes(pod(pod_name), "/trireme train")
    found = wait(f"the trainer of {pod_name}", lambda: [p for p in trainers() if p])
    return found[-1]


def kill(pid, number=signal.SIGKILL):
    os.kill(pid, number)


def cluster(*arguments):
    environment = {k: v for k, v in os.environ.items() if k not in ("STATE", "COMPONENTS")}
    return run(ROOT / "tests/e2e/cluster.sh", *arguments, env=environment)


def leader():
    """Name of the pod that holds the lease, or None."""
    lease = kube.get("leases", "trireme-operator", SYSTEM)
    holder = (lease or {}).get("spec", {}).get("holderIdentity") or ""
    return holder.split("_")[0] or None


def operator_starts():
    """Restarts of each of the operator's pods."""
    return {
        p["metadata"]["name"]: sum(c.get("restartCount", 0) for c in p.get("status", {}).get("containerStatuses", []))
        for p in kube.list("pods", SYSTEM, "app.kubernetes.io/component!=test")
    }


__all__ = [n for n in dir() if not n.startswith("_")]
