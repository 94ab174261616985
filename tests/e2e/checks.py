"""The operator and the trainer on a live cluster. checks.py [GROUP...]: started by run.sh.

Groups: install, quickstart, faults, layouts-short, admission, gangs, neighbours, reports, roles-short, boards; all of
them without arguments. And layouts, roles and examples, by name only."""
import sys

from boards import boards
from examples import examples
from neighbours import neighbours, reports
from roles import roles
from world import *


# ---- installation

def install():
    helm = COMPONENTS / "bin/helm"
    if "REUSE" in os.environ:
        run(helm, "uninstall", "trireme", "--namespace", SYSTEM, "--wait", ok=False)
    run(helm, "install", "trireme", ROOT / "charts/trireme", "--namespace", SYSTEM, "--create-namespace", "--wait",
        "--timeout", "240s", timeout=300)
    pods = kube.list("pods", SYSTEM, "app.kubernetes.io/component!=test")
    need(len(pods) == 2, f"{len(pods)} operator pods")
    return f"{len(pods)} replicas on {sorted(p['spec']['nodeName'] for p in pods)}"


def helm_test():
    run(COMPONENTS / "bin/helm", "test", "trireme", "--namespace", SYSTEM, "--timeout", "120s", timeout=200)


def one_leader():
    name = wait("a leader", leader)
    text = [
        kubectl("get", "--raw", f"/api/v1/namespaces/{SYSTEM}/pods/{p['metadata']['name']}:8080/proxy/metrics").stdout
        for p in kube.list("pods", SYSTEM)
    ]
    need(sum("\ntrireme_job_" in t for t in text) <= 1, "several replicas say that they lead")
    return name


def operator_image():
    config = json.load(open(COMPONENTS / "images/current/operator.json"))
    user = config["Docker"]["config"]["User"] if "Docker" in config else config["OCIv1"]["config"]["User"]
    need(user and not user.startswith("0"), f"the image's user is '{user}'")
    size = int((COMPONENTS / "images/current/operator.mb").read_text())
    need(size <= 40, f"{size} MB over its base, wanted at most 40")
    name = kube.list("pods", SYSTEM)[0]["metadata"]["name"]
    tried = kubectl("-n", SYSTEM, "exec", name, "--", "touch", "/tried", ok=False)
    need(tried.returncode != 0 and "ead-only" in tried.stderr, f"its root can be written: {tried.stderr}")
    return f"{size} MB over its base, user {user}, read-only root"


# ---- the example as it is, but for its length, as two pods

def quickstart_manifest(steps):
    documents = copy.deepcopy(QUICKSTART)
    job = documents[0]
    spec = job["spec"]
    spec["roles"]["actor"]["replicas"] = 2
    pod_spec = spec["roles"]["actor"]["template"]["spec"]
    spread_over_nodes(pod_spec, "quickstart")
    pod_spec["containers"][0]["resources"]["requests"] = {"cpu": "100m", "memory": "512Mi"}
    warm = pod_spec["initContainers"][2]["command"]
    warm += ["sft.max_num_steps=40"]
    spec["config"]["overrides"][0] = "policy.model_name=/data/sft/step_40/policy/weights"
    spec["config"]["overrides"] += [
        f"grpo.max_num_steps={steps}", "grpo.use_dynamic_sampling=false", "grpo.batch_multiplier=1",
        "grpo.val_period=4", "grpo.max_val_samples=64", "checkpointing.save_period=4", "grpo.num_prompts_per_step=16",
        "policy.train_global_batch_size=64"
    ]
    documents[1]["spec"]["accessModes"] = ["ReadWriteMany"]
    path = STATE / "quickstart.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


def quickstart(records, steps=12):
    make_volume("quickstart")
    kubectl("apply", "-f", quickstart_manifest(steps))
    # The second rank stands still until the status shows a step in between: whatever the machine's speed, progress has
    # to be seen moving.
    wait_step("quickstart", 3, 900)
    second = rank_process("quickstart-actor-1-a1")
    kill(second, signal.SIGSTOP)
    try:
        records.jobs.wait(
            "a step between the first and the last in the status",
            lambda k, o: o["metadata"]["name"] == "quickstart"
            and 0 < o.get("status", {}).get("progress", {}).get("step", 0) < steps,
            90,
        )
    finally:
        kill(second, signal.SIGCONT)
    job = records.wait_end("quickstart", 900)
    need(job["status"]["attempt"] == 1,
         f"it took {job['status']['attempt']} attempts: {job['status'].get('lastFailure')}")
    return f"reward {job['status']['progress'].get('reward'):.3f}, step {job['status']['progress']['step']}"


def quickstart_phases(records):
    phases = records.phases("quickstart")
    need(phases == ["Queued", "Starting", "Running", "Complete"], f"phases {phases}")
    return " -> ".join(phases)


def quickstart_progress(records, steps=12):
    rows = [o["status"]["progress"] for _, _, o in records.jobs.of("quickstart") if o.get("status", {}).get("progress")]
    seen = [r["step"] for r in rows]
    need(seen == sorted(seen), f"steps went back: {seen}")
    need([s for s in seen if 0 < s < steps] and seen[-1] == steps, f"steps seen in the status: {sorted(set(seen))}")
    last = rows[-1]
    for field in ("reward", "stepSeconds", "tokensPerSecond", "responseLength", "lastCheckpointStep",
                  "validationAccuracy"):
        need(isinstance(last.get(field), (int, float)), f"status.progress.{field} is {last.get(field)}")
    need(last["lastCheckpointStep"] == steps and last["maxSteps"] == steps, f"progress at the end: {last}")
    need(last["stepSeconds"] > 0 and last["tokensPerSecond"] > 0 and last["phaseSeconds"],
         f"progress at the end: {last}")
    return f"steps {sorted(set(seen))}"


def quickstart_columns(records):
    table = kubectl("get", "rljob", "quickstart").stdout.splitlines()
    for word in ("PHASE", "STEP", "REWARD"):
        need(word in table[0], f"column {word} is missing: {table[0]}")
    need("Complete" in table[1] and " 12 " in table[1], table[1])
    return " ".join(table[1].split())


def quickstart_conditions(records):
    job = kube.get("rljobs", "quickstart")
    got = {c["type"]: c["status"] for c in job["status"]["conditions"]}
    wanted = {
        "Accepted": "True", "GangScheduled": "True", "Running": "False", "Progressing": "False", "Complete": "True"
    }
    need({k: got.get(k) for k in wanted} == wanted and got.get("Failed") != "True", f"conditions {got}")
    need(job["status"]["observedGeneration"] == job["metadata"]["generation"] and job["status"]["completionTime"],
         f"status {job['status']}")
    roles = job["status"]["roles"][0]
    need(roles["desired"] == 2 and roles["succeeded"] == 2 and roles["worldSize"] == 2, f"roles {roles}")


def quickstart_pods(records):
    made = records.made_pods("quickstart")
    need(sorted(made) == ["quickstart-actor-0-a1", "quickstart-actor-1-a1"], f"pods made: {made}")
    nodes = {o["spec"].get("nodeName") for _, _, o in records.pods.of(lambda o: o["metadata"]["name"] in made)} - {None}
    need(len(nodes) == 2, f"on {nodes}")
    ready = [
        o for _, _, o in records.pods.of(made[0])
        if any(c["type"] == "Ready" and c["status"] == "True" for c in o.get("status", {}).get("conditions", []))
    ]
    need(ready, "never ready")
    return f"two pods, each made once, on {sorted(nodes)}"


def quickstart_model(records):
    path = volume_folder("quickstart") / "grpo/step_12/policy/weights"
    need((path / "model.safetensors").stat().st_size > 0 and (path / "config.json").exists(), f"{path} is not a model")
    done = [
        str(p.relative_to(volume_folder("quickstart"))) for p in sorted(volume_folder("quickstart").glob("*/.done"))
    ]
    need(done == ["model/.done", "sft/.done", "task/.done"], f"markers {done}")
    logs = (
        kubectl("logs", "quickstart-actor-1-a1", "-c", "task").stdout
        + kubectl("logs", "quickstart-actor-1-a1", "-c", "task").stderr
    )
    need("problems" not in logs, "the second pod prepared the task, too")
    return f"{(path / 'model.safetensors').stat().st_size} bytes"


def quickstart_tidy(records):
    """What an attempt needed goes with its end; what ended well keeps its logs."""
    gone = lambda: not [s for s in kube.list("services") if s["metadata"]["name"].startswith("quickstart-")]
    wait("the attempt's Service to go", gone)
    wait("its ConfigMap to go", lambda: not [
        c for c in kube.list("configmaps") if c["metadata"]["name"].startswith("quickstart-")])
    need(len(kube.list("pods", selector="trireme.dev/job=quickstart")) == 2, "the logs of the pods are gone")
    for reason in ("Accepted", "Starting", "Running", "Complete"):
        wait(f"the event {reason}", lambda: reason in records.reasons("quickstart"), 60,
             lambda: records.reasons("quickstart"))


def leaves_nothing(records, name):
    """Deleting a job leaves no object of it."""
    kube.delete("rljobs", name)
    def left():
        found = []
        for kind in ("rljobs", "pods", "services", "configmaps", "networkpolicies", "podgroups", "workloads"):
            try:
                found += [
                    f"{kind}/{o['metadata']['name']}" for o in kube.list(kind) if o["metadata"]["name"].startswith(name)
                ]
            except ApiError as error:
                need(error.status == 404, str(error))
        return found
    wait(f"everything of {name} to go", lambda: not left(), 120)


# ---- faults: every disturbed run ends with the weights of the undisturbed one

class Faults:
    calm, steps, job = "calm", STEPS, staticmethod(small_job)

    def __init__(self, records):
        self.records = records
        self.reference = None

    def undisturbed(self):
        submit(self.job(self.calm))
        self.records.wait_end(self.calm)
        need(
            self.records.phases(self.calm) == ["Queued", "Starting", "Running", "Complete"],
            f"phases {self.records.phases(self.calm)}")
        self.reference = result_of(self.calm, self.steps)
        return self.reference

    def begin(self, name, step=6, **changes):
        need(self.reference, "the undisturbed run has no result")
        # One that was killed starts again: admission is served by those that are ready.
        wait(
            "the operator's replicas to be ready",
            lambda: (kube.get("deployments", "trireme-operator", "trireme-system").get("status") or {}).get(
                "readyReplicas"
            )
            == 2,
        )
        submit(self.job(name, **changes), like=self.calm)
        wait_step(name, step)
        need(logged_steps(name) < self.steps, "the run was over before it could be disturbed")

    def end(self, name, attempts, counted, free, reason=None):
        job = self.records.wait_end(name)
        status = job["status"]
        result = result_of(name, self.steps)
        need(result == self.reference, f"result {result}, undisturbed {self.reference}")
        got = (status["attempt"], status.get("restarts", 0), status.get("freeRestarts", 0))
        need(
            got == (attempts, counted, free),
            f"attempt, restarts, free restarts: {got}, wanted {(attempts, counted, free)}; {status.get('lastFailure')}")
        if reason:
            need(status["lastFailure"]["reason"] == reason, f"lastFailure {status['lastFailure']}")
        wanted = sorted(f"{name}-actor-{rank}-a{attempt}" for attempt in range(1, attempts + 1) for rank in (0, 1))
        need(sorted(self.records.made_pods(name)) == wanted, f"pods made: {self.records.made_pods(name)}")
        leaves_nothing(self.records, name)
        return status

    def overlap(self, name):
        """No pod of an attempt is made before every pod of the one before has ended or gone."""
        alive, uid_attempt = {}, {}
        for _, kind, o in self.records.pods.of(
                lambda o: o["metadata"].get("labels", {}).get("trireme.dev/job") == name):
            uid, attempt = o["metadata"]["uid"], int(o["metadata"]["labels"]["trireme.dev/attempt"])
            uid_attempt[uid] = attempt
            alive[uid] = kind != "DELETED" and o["status"].get("phase") not in ("Succeeded", "Failed")
            attempts = {uid_attempt[u] for u, is_alive in alive.items() if is_alive}
            need(len(attempts) <= 1, f"attempts {sorted(attempts)} alive at once")

    def worker_killed(self):
        self.begin("killed")
        kill(rank_process("killed-actor-1-a1"))
        self.records.wait_attempt("killed", 2, "Running")
        status = self.end("killed", 2, 1, 0)
        failure = status["lastFailure"]
        need((failure["role"], failure["rank"], failure.get("exitCode"), failure["attempt"]) == ("actor", 1, 137, 1),
             f"lastFailure {failure}")
        self.overlap("killed")
        return f"{failure['message']}"

    def pod_deleted(self, name="deleted"):
        self.begin(name)
        kube.delete("pods", f"{name}-actor-1-a1")
        status = self.end(name, 2, 0, 1)
        self.overlap(name)
        return status["lastFailure"]["message"]

    def pod_deleted_hard(self):
        self.begin("forced")
        kube.delete("pods", "forced-actor-0-a1", gracePeriodSeconds=0)
        status = self.end("forced", 2, 0, 1)
        return status["lastFailure"]["message"]

    def node_lost(self, name="nodeless"):
        """A node loses power: nothing is started beside the pod on it before somebody says that it is off."""
        self.begin(name, failurePolicy={"terminationTimeoutSeconds": 10}, health={"nodeNotReadyGraceSeconds": 20})
        node = pod(f"{name}-actor-1-a1")["spec"]["nodeName"]
        off = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
        try:
            cluster("stop-node", node[-1])
            held = self.records.jobs.wait(
                "the pod that does not go in the status",
                lambda k, o: o["metadata"]["name"] == name and o.get("status", {}).get("waiting") == "PodNotGone",
                180)[2]
            said = condition(held, "Terminating")
            need(said["status"] == "True" and f"{name}-actor-1-a1" in said["message"] and node in said["message"],
                 f"condition {said}")
            time.sleep(15)
            need(not [n for n in self.records.made_pods(name) if n.endswith("-a2")],
                 "a second writer was started")
            kube.merge("nodes", node,
                       {"spec": {"taints": kube.get("nodes", node, None)["spec"].get("taints", []) + [off]}}, None)
            self.records.wait_attempt(name, 2, "Running")
            status = self.end(name, 2, 0, 1, "NodeLost")
            need(status["lastFailure"]["node"] == node, f"lastFailure {status['lastFailure']}")
            used = {
                o["spec"].get("nodeName")
                for _, _, o in self.records.pods.of(
                    lambda o: o["metadata"]["name"].startswith(f"{name}-") and o["metadata"]["name"].endswith("a2"))
            } - {None}
            need(node not in used and len(used) == 2, f"attempt 2 ran on {used}")
        finally:
            taints = [t for t in kube.get("nodes", node, None)["spec"].get("taints", []) if t["key"] != off["key"]]
            kube.merge("nodes", node, {"spec": {"taints": taints}}, None)
            cluster("start-node", node[-1])
        return f"{node} stopped; attempt 2 on {sorted(used)}"

    def operator_restarted(self):
        self.begin("steady")
        begin = time.monotonic()
        kube.delete("pods", leader(), SYSTEM)
        wait(
            "another leader",
            lambda: any(
                t > begin and k == "MODIFIED" and o["spec"].get("holderIdentity")
                for t, k, o in self.records.leases.of("trireme-operator")
            ),
        )
        self.end("steady", 1, 0, 0)
        released = [
            t for t, _, o in self.records.leases.of("trireme-operator")
            if t > begin and not o["spec"].get("holderIdentity")
        ]
        need(released, "the lease was not given up")
        taken = next(t for t, _, o in self.records.leases.of("trireme-operator")
                     if t > released[0] and o["spec"].get("holderIdentity"))
        need(taken - released[0] < 30, f"taken over {taken - released[0]:.1f} s after the release")
        return f"lease taken {taken - released[0]:.2f} s after its release"

    def leader_killed(self):
        """kill -9 of the leader while the job's first objects are being made."""
        need(self.reference, "the undisturbed run has no result")
        name = leader()
        victims = processes(pod(name, SYSTEM), "trireme-operator")
        need(victims, f"no process of {name}")
        submit(small_job("orphan"), like="calm")
        self.records.jobs.wait("a status of orphan",
                               lambda k, o: o["metadata"]["name"] == "orphan" and o.get("status", {}).get("phase"), 180)
        begin = time.monotonic()
        for victim in victims:
            kill(victim)
        self.end("orphan", 1, 0, 0)
        holders = [(t, o["spec"].get("holderIdentity")) for t, _, o in self.records.leases.of("trireme-operator")]
        before = [h for t, h in holders if t <= begin][-1]
        taken = next((t for t, h in holders if t > begin and h and h != before), None)
        need(taken, "nobody took the lease over")
        need(taken - begin < 45, f"taken over after {taken - begin:.1f} s")
        return f"taken over {taken - begin:.1f} s after the kill"

    def apiserver_restarted(self):
        self.begin("headless")
        cluster("stop-apiserver")
        time.sleep(3)
        cluster("start-apiserver")
        self.end("headless", 1, 0, 0)

    def etcd_stalled(self):
        """The data store stands still for longer than a lease is held: nobody leads meanwhile, and the run does not
        notice."""
        self.begin("stalled")
        etcd, begin = int((STATE / "etcd.pid").read_text()), time.monotonic()
        starts = operator_starts()
        kill(etcd, signal.SIGSTOP)
        try:
            time.sleep(18)
        finally:
            kill(etcd, signal.SIGCONT)
        wait("a leader", leader)
        self.end("stalled", 1, 0, 0)
        renewed = [
            t for t, _, o in self.records.leases.of("trireme-operator")
            if t > begin + 18 and o["spec"].get("holderIdentity")
        ]
        need(renewed, "nobody leads")
        # Whoever lost its lease stands by again: its webhook never stops.
        need(operator_starts() == starts, f"containers of the operator, starts: {starts}, then {operator_starts()}")
        return f"a leader {renewed[0] - begin - 18:.1f} s after the 18 s"

    def hang(self):
        self.begin("stuck", health={"heartbeatTimeoutSeconds": 40})
        kill(rank_process("stuck-actor-1-a1"), signal.SIGSTOP)
        status = self.end("stuck", 2, 1, 0, "Hung")
        need(not status["lastFailure"].get("logTail"), f"lastFailure {status['lastFailure']}")
        return status["lastFailure"]["message"]

    def suspended(self):
        self.begin("paused")
        kube.merge("rljobs", "paused", {"spec": {"suspend": True}})
        self.records.wait_phase("paused", "Suspended")
        wait("its pods to go", lambda: not kube.list("pods", selector="trireme.dev/job=paused"))
        need(condition(kube.get("rljobs", "paused"), "Suspended")["status"] == "True", "condition Suspended")
        kept = logged_steps("paused")
        kube.merge("rljobs", "paused", {"spec": {"suspend": False}})
        job = self.records.wait_end("paused")
        need(result_of("paused") == self.reference, f"result {result_of('paused')}, undisturbed {self.reference}")
        need(job["status"].get("restarts", 0) == 0, f"restarts {job['status'].get('restarts')}")
        leaves_nothing(self.records, "paused")
        return f"suspended after step {kept}"

    def bad_configuration(self):
        job = small_job("typo", overrides=["grpo.num_prompts_per_stepp=3"])
        submit(job)
        job = self.records.wait_phase("typo", ("Failed", "Complete"))
        failure = job["status"]["lastFailure"]
        need(job["status"]["phase"] == "Failed" and job["status"]["attempt"] == 1,
             f"phase {job['status']['phase']}, attempt {job['status']['attempt']}")
        need(failure["exitCode"] == 10 and "num_prompts_per_stepp" in failure.get("logTail", ""),
             f"lastFailure {failure}")
        leaves_nothing(self.records, "typo")
        return failure["logTail"].strip().splitlines()[-1][:160]

    def running_deleted(self):
        self.begin("gone", step=3)
        leaves_nothing(self.records, "gone")

    def unplaceable(self):
        """A gang that cannot be placed is released with the reason, and nothing of it runs."""
        job = small_job("huge", scheduling={"schedulingTimeoutSeconds": 10})
        job["spec"]["roles"]["actor"]["replicas"] = 4  # one pod on a node, three nodes
        submit(job, like="calm")
        def released(kind, o):
            gang = next((c for c in o.get("status", {}).get("conditions", []) if c["type"] == "GangScheduled"), {})
            return o["metadata"]["name"] == "huge" and gang.get("reason") == "SchedulingTimeout"
        change = self.records.jobs.wait("the release of huge", released, 120)
        wait("its pods to go", lambda: not kube.list("pods", selector="trireme.dev/job=huge"))
        need(not [1 for _, _, o in self.records.pods.of(lambda o: o["metadata"]["name"].startswith("huge-"))
                  if any(c.get("started") for c in o["status"].get("containerStatuses", []))], "a part of the gang ran")
        leaves_nothing(self.records, "huge")
        return condition(change[2], "GangScheduled")["message"][:200]

    def expired(self):
        job = small_job("shortlived", steps=2, ttlSecondsAfterFinished=1)
        submit(job, like="calm")
        self.records.wait_end("shortlived")
        self.records.jobs.wait("the deletion of shortlived",
                               lambda k, o: k == "DELETED" and o["metadata"]["name"] == "shortlived", 120)


# ---- a model split over the two processes of a pod, and its data over two pods

def split_run(records):
    submit(split_job("split"))
    records.wait_end("split")
    need(records.phases("split")[-1] == "Complete", f"phases {records.phases('split')}")
    return f"tp 2 x dp 2, {equal_bits('split')}"


def split_rank_killed(records):
    submit(split_job("split-killed"), like="split")
    wait_step("split-killed", 4)
    kill(rank_process("split-killed-actor-1-a1"))
    job = records.wait_end("split-killed")
    need(job["status"]["phase"] == "Complete" and job["status"]["attempt"] == 2, f"status {job['status']}")
    need(result_of("split-killed", SPLIT_STEPS) == result_of("split", SPLIT_STEPS), "other weights or moments")
    return job["status"]["lastFailure"]["message"]


class Stages(Faults):
    """TP2 PP2 as two pods of two processes: each node has a stage, between them go rows of every micro-batch."""
    calm, steps = "stages", 16

    @staticmethod
    def job(name, **changes):
        job = split_job(name, Stages.steps)
        job["spec"]["config"]["overrides"].append("policy.megatron_cfg.pipeline_model_parallel_size=2")
        job["spec"]["roles"]["actor"]["parallelism"] = {"tp": 2, "pp": 2}
        for key, value in changes.items():
            job["spec"].setdefault(key, {}).update(value)
        return job

    def undisturbed(self):
        super().undisturbed()
        rows = [json.loads(line) for line in (volume_folder(self.calm) / "logs/train.jsonl").read_text().splitlines()]
        rows = [row for row in rows if "train/loss" in row]
        differing = sum(row["train/logprob_mismatch_tokens"] for row in rows)
        waits = [row["performance/pipeline_bubble_s"] for row in rows]
        need(len(rows) == self.steps and differing == 0 and all(seconds > 0 for seconds in waits),
             f"{len(rows)} steps, {differing} tokens with other bits, bubbles {waits}")
        return self.reference

    def rank_killed(self):
        self.begin("stages-killed")
        kill(rank_process("stages-killed-actor-1-a1"))
        status = self.end("stages-killed", 2, 1, 0)
        failure = status["lastFailure"]
        named = [rank for rank in (2, 3) if f"rank {rank} failed first" in failure["message"]]
        need(failure["rank"] == 1 and failure.get("exitCode") == 137 and named, f"lastFailure {failure}")
        self.overlap("stages-killed")
        return failure["message"]

    def stage_deleted(self):
        return self.pod_deleted("stages-deleted")

    def stage_lost(self):
        return self.node_lost("stages-off")


# ---- admission

def refused(job, *words):
    try:
        kube.call("POST", Kube.path("rljobs") + "?dryRun=All", job)
    except ApiError as error:
        for word in words:
            need(word in error.message, f"'{word}' is not in: {error.message}")
        return error.message
    raise AssertionError("it was accepted")


def impossible_layout():
    job = small_job("bad")
    actor = job["spec"]["roles"]["actor"]
    actor.update({"replicas": 2, "gpusPerPod": 8, "processesPerPod": 8, "parallelism": {"tp": 3}})
    return refused(job, "denied the request", "tp 3 does not divide", "legal values of tp here: 1, 2, 4, 8")[:300]


def wide_tensor_parallel():
    """A rule of the schema forbids this too; the user is told more than the rule can say."""
    job = small_job("bad")
    job["spec"]["roles"]["actor"].update(
        {"replicas": 2, "gpusPerPod": 4, "processesPerPod": 4, "parallelism": {"tp": 8}})
    return refused(job, "denied the request", "legal values of tp here: 1, 2, 4")[:300]


def unknown_field():
    job = small_job("bad")
    job["spec"]["roles"]["actor"]["replica"] = 2
    done = subprocess.run([COMPONENTS / "bin/kubectl", "create", "--validate=strict", "-f", "-"],
                          input=yaml.safe_dump(job), capture_output=True, text=True, timeout=60)
    need(done.returncode != 0 and "replica" in done.stderr, f"accepted: {done.stdout}{done.stderr}")
    return done.stderr.strip()[:200]


def stages_of_generation():
    job = small_job("bad")
    job["spec"]["roles"]["generation"] = {"replicas": 1, "processesPerPod": 2, "parallelism": {"pp": 2}}
    told = refused(job, "denied the request", "spec.roles.generation.parallelism.pp: is 2, but the ranks of an engine")
    job["spec"]["roles"]["generation"] = {"replicas": 1, "processesPerPod": 3, "parallelism": {"tp": 2}}
    refused(job, "denied the request", "spec.roles.generation.parallelism.tp: tp 2 does not divide")
    return told[:200]


def layouts(records, short):
    check("a split model on two nodes: equal bits", split_run, records)
    if not short:
        check("kill -9 of one of its ranks: same weights", split_rank_killed, records)
    stages = Stages(records)
    check("two stages on two nodes: equal bits", stages.undisturbed)
    check("kill -9 of a rank of a stage: same weights", stages.rank_killed)
    if not short:
        check("a stage's pod deleted: same weights", stages.stage_deleted)
        check("a stage's node stopped: same weights", stages.stage_lost)


def impossible_critic():
    job = small_job("bad")
    job["spec"]["roles"]["critic"] = {}
    told = refused(job, "denied the request", "spec.roles.critic: is for algorithm PPO only, not GRPO")
    job["spec"]["algorithm"] = "PPO"
    job["spec"]["roles"]["critic"] = {"processesPerPod": 2, "parallelism": {"tp": 4}}
    refused(job, "denied the request", "spec.roles.critic.parallelism.tp: tp 4 does not divide")
    return told[:200]


def examples_accepted():
    names = []
    for path in sorted((ROOT / "examples").glob("*.rljob.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] == "RLJob":
                document["metadata"]["name"] += "-dry"
                try:
                    kube.call("POST", Kube.path("rljobs") + "?dryRun=All", document)
                except ApiError as error:
                    need(False, f"{path.name}: {error.message}")
                names.append(path.name.split(".")[0])
    return ", ".join(names)


def running_unchangeable():
    submit(small_job("fixed", scheduling={"schedulingTimeoutSeconds": 0}),
           like="calm" if volume_folder("calm").exists() else None)
    try:
        kube.merge("rljobs", "fixed", {"spec": {"roles": {"actor": {"replicas": 3}}}})
    except ApiError as error:
        need("suspend" in error.message, error.message)
        return error.message[:200]
    finally:
        kube.delete("rljobs", "fixed")
    raise AssertionError("the size of a running job was changed")


def rules_without_webhook():
    """The schema's own rules hold when the webhooks are not there."""
    kinds = {
        "validatingwebhookconfigurations": "trireme-validating", "mutatingwebhookconfigurations": "trireme-mutating"
    }
    saved = {kind: kube.get(kind, name, None) for kind, name in kinds.items()}
    for kind, name in kinds.items():
        kube.delete(kind, name, None)
    try:
        job = small_job("bad")
        job["spec"]["roles"]["actor"].update({"gpusPerPod": 4, "processesPerPod": 4, "parallelism": {"tp": 8}})
        # The API server may ask a webhook for a moment after it was deleted.
        message = wait(
            "the schema's own answer",
            lambda: (lambda said: "denied the request" not in said and said)(refused(job, "tp")),
            30,
        )
        need("legal values" not in message, f"who said that? {message}")
        job = small_job("bad")
        job["spec"]["roles"]["critic"] = {}
        refused(job, "a critic role is for algorithm PPO only")
        job = small_job("bad")
        job["spec"]["roles"]["generation"] = {"processesPerPod": 2, "parallelism": {"pp": 2}}
        refused(job, "the ranks of an engine split the model by tp and ep only")
        return message[:200]
    finally:
        for kind, o in saved.items():
            for key in ("resourceVersion", "uid", "creationTimestamp", "generation", "managedFields"):
                o["metadata"].pop(key, None)
            kube.create(kind, o, None)


# ---- gangs of Kubernetes

def gang_objects(records):
    submit(small_job("ganged", steps=4), like="calm" if volume_folder("calm").exists() else None)
    group = wait(
        "its PodGroup",
        lambda: next((o for o in kube.list("podgroups") if o["metadata"]["name"].startswith("ganged")), None),
        60,
    )
    pods = wait(
        "its pods",
        lambda: (lambda found: found if len(found) == 2 else None)(
            kube.list("pods", selector="trireme.dev/job=ganged")
        ),
        60,
    )
    for p in pods:
        need(p["spec"].get("schedulingGroup"), f"{p['metadata']['name']} is in no group")
    records.wait_end("ganged")
    need(group["spec"]["schedulingPolicy"]["gang"]["minCount"] == 2, f"group {group['spec']}")
    leaves_nothing(records, "ganged")


def gang_or_nothing(records):
    """Two jobs that fit one after the other, but not together: the second waits as a whole, with none of its pods
    placed, and then runs."""
    nodes = [n for n in kube.list("nodes", None)]
    cpu = min(float(n["status"]["allocatable"]["cpu"]) for n in nodes)
    def big(name):
        job = small_job(name, steps=10, scheduling={"schedulingTimeoutSeconds": 0})
        job["spec"]["roles"]["actor"]["template"]["spec"]["containers"][0]["resources"]["requests"][
            "cpu"
        ] = f"{int(cpu * 600)}m"
        return job
    for name in ("first", "second"):
        submit(big(name), like="calm" if volume_folder("calm").exists() else None)
    for name in ("first", "second"):
        records.wait_end(name)
    events = []
    placed = {"first": set(), "second": set()}
    for _, kind, o in records.pods.of(lambda o: o["metadata"].get("labels", {}).get("trireme.dev/job") in placed):
        name = o["metadata"]["labels"]["trireme.dev/job"]
        if o["spec"].get("nodeName"):
            placed[name].add(o["metadata"]["uid"])
        so_far = {n: len(placed[n]) for n in placed}  # ever placed: pods get their nodes one by one, a gang at a time
        if not events or events[-1] != so_far:
            events.append(so_far)
    need(not [e for e in events if e["first"] == 1 and e["second"] == 1], f"half of each gang was placed: {events}")
    for name in placed:
        need(records.phases(name)[-1] == "Complete" and len(placed[name]) == 2, f"{name}: {records.phases(name)}")
        leaves_nothing(records, name)
    return f"pods placed over time {[(e['first'], e['second']) for e in events]}"


def main():
    groups = sys.argv[1:] or [
        "install", "quickstart", "faults", "layouts-short", "admission", "gangs", "neighbours", "reports",
        "roles-short", "boards"
    ]
    if "install" in groups:
        if check("helm install: two replicas become ready", install):
            check("helm test", helm_test)
            check("one replica leads", one_leader)
            check("operator image: size, user, read-only root", operator_image)
        else:
            return finish()
    if "REUSE" in os.environ:
        clean()
    records = Records()
    if "quickstart" in groups:
        check("quickstart as two pods: Complete", quickstart, records)
        for name, function in (
            ("phases in order", quickstart_phases),
            ("progress moves, all fields", quickstart_progress),
            ("printer columns", quickstart_columns),
            ("conditions", quickstart_conditions),
            ("pods", quickstart_pods),
            ("model on the volume, prepared once", quickstart_model),
            ("tidy end, events", quickstart_tidy),
        ):
            check(f"quickstart: {name}", function, records)
        check("quickstart: deletion leaves nothing", leaves_nothing, records, "quickstart")
    faults = Faults(records)
    if "faults" in groups:
        check("undisturbed run", faults.undisturbed)
        for name, function in (
            ("kill -9 of a worker", faults.worker_killed),
            ("a pod deleted", faults.pod_deleted),
            ("rank 0's pod deleted by force", faults.pod_deleted_hard),
            ("the operator's leader deleted", faults.operator_restarted),
            ("kill -9 of the leader while it creates", faults.leader_killed),
            ("a node stopped", faults.node_lost),
            ("the API server killed", faults.apiserver_restarted),
            ("etcd stands still for 18 s", faults.etcd_stalled),
            ("a rank stopped: hang", faults.hang),
            ("suspend and resume", faults.suspended),
        ):
            check(f"{name}: same weights", function)
        for name, function in (
            ("a mistake in the configuration fails at once", faults.bad_configuration),
            ("a running job deleted leaves nothing", faults.running_deleted),
            ("a gang that cannot be placed is released", faults.unplaceable),
            ("time to live", faults.expired),
        ):
            check(name, function)
    if "layouts" in groups or "layouts-short" in groups:
        layouts(records, short="layouts" not in groups)
    if "admission" in groups:
        for name, function in (
            ("an impossible layout is refused", impossible_layout),
            ("tensor parallel over pods is refused", wide_tensor_parallel),
            ("an unknown field is refused", unknown_field),
            ("generation pods with stages, or half an engine, are refused", stages_of_generation),
            ("a critic without PPO, or split, is refused", impossible_critic),
            ("the examples are accepted", examples_accepted),
            ("a running job keeps its size", running_unchangeable),
            ("the schema's rules hold without the webhook", rules_without_webhook),
        ):
            check(f"admission: {name}", function)
    if "gangs" in groups:
        check("gangs: objects of Kubernetes' own gang scheduling", gang_objects, records)
        check("gangs: all pods or none", gang_or_nothing, records)
    if "neighbours" in groups:
        neighbours(records)
    if "reports" in groups:
        reports(records)
    if "roles" in groups or "roles-short" in groups:
        roles(records, short="roles" not in groups)
    if "examples" in groups:
        examples(records)
    if "boards" in groups:
        boards(records)
    return finish()


if __name__ == "__main__":
    sys.exit(main())
