"""Groups `neighbours` and `reports` of checks.py: an operator that one can share a cluster with.

neighbours: other people's pods, a quota, a silent kubelet, an image that is not there, a crashing reward pod.
reports: the path from trainers to operator, missing from the start, cut under two runs, beside slow clients and
junk."""
import collections
import concurrent.futures
import sys

from world import *

LONG = 200  # steps: some minutes
SLOW = 100  # connections of each node; 64 of one address may be


def namespace(name):
    if not kube.get("namespaces", name, None):
        kube.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}, None)


def like():
    return "calm" if volume_folder("calm").exists() else None


def begin(name, step=3, steps=LONG, **changes):
    submit(small_job(name, steps=steps, **changes), like=like())
    wait_step(name, step)


def status_of(name):
    return kube.get("rljobs", name)["status"]


def untouched(name):
    """Still in its first attempt, and nothing has happened to it."""
    status = status_of(name)
    need(
        status["attempt"] == 1 and not status.get("lastFailure") and not status.get("restarts")
        and not status.get("freeRestarts"), f"{name}: {status}")
    return status


def remove(name):
    kube.delete("rljobs", name)
    wait(f"the pods of {name} to go", lambda: not kube.list("pods", selector=f"trireme.dev/job={name}"), 120)


def foreign_labels(records):
    """Pods of another namespace under the job's own labels: of attempt 9999, and one that fails with the exit code of a
    mistake in the configuration."""
    namespace("others")
    begin("copied")
    mine = pod("copied-actor-1-a1")
    container = mine["spec"]["containers"][0]
    for name, attempt, command in (("copied-actor-1-a9999", "9999", "sleep 600"),
                                   ("copied-actor-1-a1", "1", "exit 10")):
        kube.create(
            "pods", {
                "apiVersion": "v1", "kind": "Pod", "metadata": {
                    "name": name, "labels": {**mine["metadata"]["labels"], "trireme.dev/attempt": attempt}
                }, "spec": {
                    "restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [{
                        "name": "trainer", "image": container["image"], "imagePullPolicy": "IfNotPresent",
                        "command": ["sh", "-c", command]
                    }]
                }
            }, "others")
    wait("the foreign pod to fail", lambda: pod("copied-actor-1-a1", "others")["status"].get("phase") == "Failed", 120)
    time.sleep(10)
    status = untouched("copied")
    need(status["phase"] == "Running" and status["roles"][0]["created"] == 2, f"status {status}")
    for p in kube.list("pods", "others"):
        need("deletionTimestamp" not in p["metadata"], "the operator deletes other people's pods")
        kube.delete("pods", p["metadata"]["name"], "others", gracePeriodSeconds=0)
    remove("copied")


def quota(records):
    """Six pods may be; two jobs of four have three each. They fit one after the other, and both end without a
    restart."""
    def limit(pods):
        return {
            "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "pods"},
            "spec": {"hard": {"pods": str(pods)}}
        }
    def job(name):
        made = small_job(name, steps=4, scheduling={"backend": "None", "schedulingTimeoutSeconds": 20})
        made["spec"]["roles"]["actor"]["replicas"] = 4
        made["spec"]["roles"]["actor"]["template"]["spec"].pop("affinity")
        return made

    wait("the pods of earlier checks to go",
         lambda: not [p for p in kube.list("pods") if p["status"].get("phase") in ("Pending", "Running")], 120)
    kube.create("resourcequotas", limit(3))
    try:
        submit(job("half"), like=like())
        wait("three of four pods", lambda: len(kube.list("pods", selector="trireme.dev/job=half")) == 3, 60)
        told = records.jobs.wait(
            "the refusal in the status",
            lambda k, o: o["metadata"]["name"] == "half" and o.get("status", {}).get("waiting") == "QuotaExceeded", 60)
        kube.merge("resourcequotas", "pods", {"spec": {"hard": {"pods": "6"}}})
        submit(job("other"), like=like())
        for name in ("half", "other"):
            status = records.wait_end(name, 600)["status"]
            need(not status.get("restarts") and not status.get("freeRestarts"), f"{name}: {status}")
        need("QuotaExceeded" in records.reasons("half"), f"events {records.reasons('half')}")
        logs = "".join(
            kubectl("-n", SYSTEM, "logs", p["metadata"]["name"], "--since=15m").stdout
            for p in kube.list("pods", SYSTEM))
        need(
            logs.count("exceeded quota") < 40,
            f"{logs.count('exceeded quota')} lines about the quota in the operator's logs")
    finally:
        kube.delete("resourcequotas", "pods")
    for name in ("half", "other"):
        remove(name)
    return condition(told[2], "GangScheduled")["message"][:200]


class NoReports:
    """The status Service leads nowhere."""
    def __enter__(self):
        self.selector = kube.get("services", "trireme-status", SYSTEM)["spec"]["selector"]
        kube.merge("services", "trireme-status", {"spec": {"selector": {"nobody": "here"}}}, SYSTEM)

    def __exit__(self, *_):
        kube.merge("services", "trireme-status", {"spec": {"selector": {**self.selector, "nobody": None}}}, SYSTEM)


def reports_never(records):
    """Limits of 20 s, and no report ever arrives: the run goes on, and the status says why it shows no step."""
    with NoReports():
        submit(small_job("mute", steps=10 * LONG, health={"startupDeadlineSeconds": 20, "heartbeatTimeoutSeconds": 20}),
               like=like())
        records.wait_attempt("mute", 1, "Running")
        steps = logged_steps("mute")
        time.sleep(60)
        status = untouched("mute")
        need(logged_steps("mute") > steps, "it does not train")
        said = condition({"status": status}, "Progressing")
        need((said["status"], said["reason"]) == ("Unknown", "NoReports"), f"condition {said}")
    wait("a report after all", lambda: (status_of("mute").get("progress") or {}).get("step"), 120)
    untouched("mute")
    remove("mute")
    return said["message"][:200]


def reports_cut(records):
    """The path breaks for 60 s under two runs with limits of 20 s: that is nobody's hang."""
    for name in ("left", "right"):
        begin(name, steps=20 * LONG, health={"heartbeatTimeoutSeconds": 20})
    for name in ("left", "right"):
        # A step in the log is no report yet, and a run that was never heard waits for its start instead.
        wait(f"a report of {name}", lambda: (status_of(name).get("progress") or {}).get("step"), 180)
    with NoReports():
        for name in ("left", "right"):
            wait(f"ReportsLost of {name}", lambda:
                 (condition(kube.get("rljobs", name), "Progressing") or {}).get("reason") == "ReportsLost", 90,
                 lambda: status_of(name))
        time.sleep(40)
        for name in ("left", "right"):
            untouched(name)
    for name in ("left", "right"):
        wait(f"reports of {name} again",
             lambda: condition(kube.get("rljobs", name), "Progressing")["reason"] == "Reporting", 180)
        untouched(name)
        remove(name)


def slow_clients(records):
    """For 30 s every node has 100 slow connections and junk at the status Service; the limit of a silent run is 40 s.
    No report comes so late that the run is restarted or called silent, and the leader stays."""
    begin("reporting", steps=10 * LONG, health={"heartbeatTimeoutSeconds": 40})
    reported = lambda: (status_of("reporting").get("progress") or {}).get("step", 0)
    first = wait("a report", reported, 180)
    leads, starts = leader(), operator_starts()
    spec = kube.get("services", "trireme-status", SYSTEM)["spec"]
    nodes = [n["metadata"]["name"] for n in kube.list("nodes", None)]
    begun = time.monotonic()  # of the recordings, too

    def attack(node):
        return json.loads(
            cluster("exec-node", node[-1], sys.executable, ROOT / "tests/e2e/slow_clients.py", spec["clusterIP"],
                    spec["ports"][0]["port"], 30, SLOW).stdout)

    with concurrent.futures.ThreadPoolExecutor(len(nodes)) as pool:
        came = sum((collections.Counter(told) for told in pool.map(attack, nodes)), collections.Counter())
    took = time.monotonic() - begun
    last = reported()
    status = untouched("reporting")
    need(status["phase"] == "Running" and last > first, f"step {first} -> {last}, status {status}")
    heard = [(at, o) for at, _, o in records.jobs.of("reporting") if at >= begun]
    reasons = {condition(o, "Progressing")["reason"] for _, o in heard}
    need(reasons == {"Reporting"}, f"Progressing was {reasons}")
    need(leader() == leads and operator_starts() == starts,
         f"leader {leads} -> {leader()}, restarts {starts} -> {operator_starts()}")
    junk = {code: n for code, n in came.items() if code not in ("opened", "closed")}
    need(came["opened"] >= len(nodes) * SLOW // 2 and came["closed"] > 0, f"no flood: {dict(came)}")
    need(sum(n for code, n in junk.items() if code.startswith("4")) > 20, f"junk was not answered: {junk}")
    need(not [code for code in junk if code.startswith("2")], f"junk was taken for a report: {junk}")
    remove("reporting")
    gap = max((b - a for (a, _), (b, _) in zip(heard, heard[1:])), default=0.0)
    return (f"{took:.0f} s, steps {first} to {last}, at most {gap:.1f} s between two news of it; {came['opened']} slow "
            f"connections, {sum(junk.values())} junk requests")


def kubelet(node, signal_name):
    cluster("exec-node", node[-1], "bash", "-c", f"kill -{signal_name} $(pgrep -x kubelet)")


def node_ready(name):
    return next(c["status"] for c in kube.get("nodes", name, None)["status"]["conditions"]
                if c["type"] == "Ready") == "True"


def silent_kubelet(records):
    """A kubelet stands still for 60 s, the ranks do not."""
    begin("patient", steps=10 * LONG)
    node = pod("patient-actor-1-a1")["spec"]["nodeName"]
    kubelet(node, "STOP")
    try:
        wait(f"{node} to be NotReady", lambda: not node_ready(node), 90)
        time.sleep(60)
        untouched("patient")
    finally:
        kubelet(node, "CONT")
    wait(f"{node} to be ready", lambda: node_ready(node), 90)
    time.sleep(5)
    status = untouched("patient")
    need(status["phase"] == "Running", f"phase {status['phase']}")
    remove("patient")
    return f"{node} was NotReady for 60 s"


def image_typo(records):
    job = small_job("misspelt", image="registry.invalid/trireme/trainre:1")
    pod_spec = job["spec"]["roles"]["actor"]["template"]["spec"]
    for container in pod_spec["initContainers"] + pod_spec["containers"]:
        container.pop("image", None)
        container["imagePullPolicy"] = "IfNotPresent"
    submit(job, like=like())
    begun = time.monotonic()
    records.jobs.wait(
        "the reason in the status",
        lambda k, o: o["metadata"]["name"] == "misspelt" and o.get("status", {}).get("waiting") == "ErrImagePull", 180)
    table = kubectl("get", "rljob", "misspelt").stdout.splitlines()
    need("WAITING" in table[0] and "ErrImagePull" in table[1], "\n".join(table))
    status = records.wait_phase("misspelt", ("Failed", "Complete"), 300)["status"]
    took = time.monotonic() - begun
    failure = status["lastFailure"]
    need((status["phase"], status["attempt"], failure["reason"]) == ("Failed", 1, "ErrImagePull"), f"status {status}")
    need("trainre" in failure["message"] and not failure.get("logTail"), f"lastFailure {failure}")
    need("ErrImagePull" in records.reasons("misspelt"), f"events {records.reasons('misspelt')}")
    table = kubectl("get", "rljob", "misspelt").stdout.splitlines()
    need("FAILURE" in table[0] and "ErrImagePull" in table[1], "\n".join(table))
    remove("misspelt")
    return f"Failed after {took:.0f} s: {failure['message'][:150]}"


def crashing_rewards(records):
    job = small_job("crashy", steps=10 * LONG)
    image = job["spec"].get("image") or pod_image()
    job["spec"]["roles"]["reward"] = {
        "replicas": 1, "port": 8000, "template": {
            "spec": {
                "containers": [{
                    "name": "reward", "image": image, "imagePullPolicy": "IfNotPresent",
                    "command": ["sh", "-c", "sleep 5; echo last words; exit 3"]
                }]
            }
        }
    }
    submit(job, like=like())
    wait_step("crashy", 3)
    name = "crashy-reward-0-a1"
    made = lambda: len([n for n in records.made_pods("crashy") if n == name or n.startswith(name + "-i")])
    wait("the third reward pod", lambda: made() >= 3, 180)
    status = status_of("crashy")
    need(status["attempt"] == 1 and not status.get("restarts") and not status.get("freeRestarts"), f"status {status}")
    rewards = next(r for r in status["roles"] if r["name"] == "reward")
    need(rewards.get("restarts", 0) >= 2, f"roles {status['roles']}")
    failure = status["lastFailure"]
    need((failure["action"], failure["exitCode"], failure["logTail"].strip()) == ("ReplacePod", 3, "last words"),
         f"lastFailure {failure}")
    need("PodReplaced" in records.reasons("crashy"), f"events {records.reasons('crashy')}")
    need(
        sorted(n for n in records.made_pods("crashy") if "actor" in n) == ["crashy-actor-0-a1", "crashy-actor-1-a1"],
        f"pods made: {records.made_pods('crashy')}")
    remove("crashy")
    return f"{made()} reward pods, one attempt"


def pod_image():
    return QUICKSTART[0]["spec"]["roles"]["actor"]["template"]["spec"]["containers"][0].get(
        "image") or "docker.io/trireme/trainer:0.1.0"


def neighbours(records):
    for name, function in (
        ("foreign pods under a job's labels", foreign_labels),
        ("two jobs and a quota for one and a half", quota),
        ("a kubelet silent for 60 s", silent_kubelet),
        ("an image that does not exist", image_typo),
        ("a reward pod that crashes", crashing_rewards),
    ):
        check(f"neighbours: {name}", function, records)


def reports(records):
    for name, function in (
        ("reports that never come", reports_never),
        ("the report path cut under two runs", reports_cut),
        ("slow clients and junk beside a run that reports", slow_clients),
    ):
        check(f"reports: {name}", function, records)
