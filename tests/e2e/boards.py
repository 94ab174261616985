"""Every query of the boards against a real Prometheus that scrapes a live run: none may come back empty."""
import glob
import re
import threading
import urllib.parse
import urllib.request

from roles import critic_job, roles_job
from world import *

PROMETHEUS = "http://127.0.0.1:9090"
OPERATOR_JOB = "trireme-metrics"


class Prometheus:
    """Scrapes operator and trainers; targets are kept in a file as pods come and go (Debian's build has no Kubernetes
    discovery). Labels are those of the chart's ServiceMonitor and PodMonitor."""

    def __init__(self, records):
        self.records = records
        self.folder = STATE / "prometheus"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        rendered = run(COMPONENTS / "bin/helm", "template", "trireme", ROOT / "charts/trireme", "--namespace", SYSTEM,
                       "--kube-version", "1.34.0", "--set", "rules.enabled=true", "--show-only",
                       "templates/prometheusrule.yaml").stdout
        rules = yaml.safe_load(rendered)["spec"]
        for group in rules["groups"]:
            group["interval"] = "2s"
        (self.folder / "rules.yaml").write_text(yaml.safe_dump(rules, sort_keys=False, width=1000))
        (self.folder / "config.yaml").write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "2s"},
                    "rule_files": ["rules.yaml"],
                    "scrape_configs": [
                        {
                            "job_name": OPERATOR_JOB,
                            "honor_labels": True,
                            "file_sd_configs": [{"files": ["operator.json"], "refresh_interval": "1s"}],
                        },
                        {
                            "job_name": "trireme-trainers",
                            "file_sd_configs": [{"files": ["trainers.json"], "refresh_interval": "1s"}],
                        },
                    ],
                }
            )
        )
        self.write_targets()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.follow, daemon=True)
        self.thread.start()
        log = open(STATE / "logs/prometheus.log", "w")
        self.process = subprocess.Popen([
            os.environ["PROMETHEUS"], f"--config.file={self.folder}/config.yaml",
            f"--storage.tsdb.path={self.folder}/data", "--web.listen-address=127.0.0.1:9090"
        ], stdout=log, stderr=log)
        wait("Prometheus", self.ready, 60)

    def ready(self):
        try:
            return urllib.request.urlopen(PROMETHEUS + "/-/ready", timeout=5).status == 200
        except OSError:
            return False

    def write_targets(self):
        operator = [
            {"targets": [f"{p['status']['podIP']}:8080"], "labels": {"namespace": SYSTEM, "pod": p["metadata"]["name"]}}
            for p in kube.list("pods", SYSTEM)
            if p["status"].get("podIP")
        ]
        trainers = [
            {
                "targets": [f"{p['status']['podIP']}:9400"],
                "labels": {
                    "namespace": "default",
                    "job": p["metadata"]["labels"]["trireme.dev/job"],
                    "attempt": p["metadata"]["labels"]["trireme.dev/attempt"],
                },
            }
            for p in kube.list("pods", selector="trireme.dev/role=actor,trireme.dev/rank=0")
            if p["status"].get("podIP") and p["status"]["phase"] == "Running"
        ]
        for name, targets in (("operator", operator), ("trainers", trainers)):
            path = self.folder / f"{name}.json"
            path.with_suffix(".new").write_text(json.dumps(targets))
            path.with_suffix(".new").rename(path)

    def follow(self):
        while not self.stopped.wait(1):
            try:
                self.write_targets()
            except Exception:  # noqa: BLE001: the API server may be away for a moment
                pass

    def query_range(self, expression, begin, end):
        query = urllib.parse.urlencode({"query": expression, "start": begin, "end": end, "step": 1})
        answer = json.load(urllib.request.urlopen(f"{PROMETHEUS}/api/v1/query_range?{query}", timeout=60))
        return answer["data"]["result"]

    def stop(self):
        self.stopped.set()
        self.process.terminate()
        self.process.wait(30)


def filled(expression, job):
    values = {"namespace": "default", "job": job, "operator": OPERATOR_JOB, "__rate_interval": "15s"}
    # A run of a minute: what looks at an hour in steps of a minute gets finer steps.
    expression = expression.replace("[1h:1m]", "[1h:2s]")
    return re.sub(r"\$(\w+)", lambda m: values[m.group(1)], expression)


def board_queries():
    """Of each query its board, panel, expression, and the run that has what it shows."""
    for path in sorted(glob.glob(str(ROOT / "charts/trireme/dashboards/*.json"))):
        board = json.load(open(path))
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                expression = target["expr"]
                if "trireme_expert_" in expression:
                    continue  # the runs' models are dense
                job = "charted"
                if panel.get("description", "").startswith("PPO only"):
                    job = "charted-ppo"
                elif "trireme_engines" in expression or "trireme_weight_transfer" in expression:
                    job = "charted-engines"
                yield board["uid"], panel["title"], expression, job


def live_run(records, prometheus, results_out):
    """A run with a reference model for KL, validation, checkpoints, carry-over and a restart; before it one with pods
    that generate and one of PPO, for what only these have."""
    begin = time.time()
    submit(roles_job("charted-engines", 12))
    submit(critic_job("charted-ppo"))
    for name in ("charted-engines", "charted-ppo"):
        records.wait_end(name)
    submit(
        small_job("charted", steps=60,
                  overrides=["loss_fn.reference_policy_kl_penalty=0.01", "checkpointing.save_period=5",
                             "grpo.async_grpo.enabled=true", "grpo.async_grpo.in_flight_weight_updates=true",
                             "loss_fn.use_importance_sampling_correction=true"]),
        like="calm" if volume_folder("calm").exists() else None)
    wait_step("charted", 8)
    kill(rank_process("charted-actor-1-a1"))
    records.wait_attempt("charted", 2, "Running")
    wait_step("charted", 30)
    job = records.wait_end("charted")
    need(job["status"]["attempt"] == 2, f"attempt {job['status']['attempt']}")
    time.sleep(8)  # the last scrapes, of which some may be late, and the rules' evaluation
    results_out["window"] = (begin, time.time())
    return f"{len(prometheus.query_range('up', begin, time.time()))} targets scraped"


def panels(prometheus, window, uid):
    empty, count = [], 0
    for board, title, expression, job in board_queries():
        if board != uid:
            continue
        count += 1
        found = prometheus.query_range(filled(expression, job), *window)
        values = [v for series in found for v in series["values"] if v[1] != "NaN"]
        if not values:
            empty.append(f"{title}: {expression[:120]}")
    need(not empty, f"{len(empty)} of {count} queries are empty: " + "; ".join(empty))
    return f"{count} queries"


def figures(prometheus, window, records):
    """What Prometheus, the status and the run's own log say is the same."""
    last = [json.loads(line) for line in (volume_folder("charted") / "logs/train.jsonl").read_text().splitlines()][-1]
    status = kube.get("rljobs", "charted")["status"]["progress"]
    step = max(
        float(v[1]) for s in prometheus.query_range('max(trireme_job_step{job="charted"})', *window)
        for v in s["values"])
    need(step == status["step"] == 60, f"step: Prometheus {step}, status {status['step']}")
    reward = next((v for k, v in last.items() if k.endswith("reward") or k.endswith("reward_mean")), None)
    need(reward is None or abs(reward - status["reward"]) < 1e-4, f"reward: log {reward}, status {status['reward']}")
    records_found = {s["metric"]["__name__"] for s in prometheus.query_range('{__name__=~"rljob:.*"}', *window)}
    need(records_found, "no recording rule gave anything")
    return f"records {sorted(records_found)}"


def schema():
    said = (STATE / "board_schema").read_text().strip()
    need("fit Grafana's schema" in said and "do not" not in said or "npm is missing" in said, said[-1500:])
    return said.splitlines()[-1]


def boards(records):
    check("boards: the JSON fits Grafana's published types", schema)
    prometheus = Prometheus(records)
    try:
        state = {}
        if check("boards: a live run with a restart under Prometheus", live_run, records, prometheus, state):
            for uid in ("trireme-rljob", "trireme-fleet", "trireme-operator"):
                check(f"boards: every query of {uid}", panels, prometheus, state["window"], uid)
            check("boards: Prometheus, status and log agree", figures, prometheus, state["window"], records)
            leaves_nothing_of(records)
    finally:
        prometheus.stop()


def leaves_nothing_of(records):
    for name in ("charted", "charted-engines", "charted-ppo"):
        kube.delete("rljobs", name)
