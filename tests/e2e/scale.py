"""Many RLJobs on kwok's nodes: what the operator costs, and how fast it creates next to a bare loop. Started by
scale.sh; figures go to stdout."""
import base64
import concurrent.futures
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid

import kueue
from world import *

JOBS, PODS, GROUPS = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or ["many", "wide", "kueue", "made", "held"]
PKI, LOGS, ADDRESS, OPERATOR = (os.environ[k] for k in ("PKI", "LOGS", "ADDRESS", "OPERATOR"))
METRICS = "http://127.0.0.1:18080/metrics"
TICK = os.sysconf("SC_CLK_TCK")


def say(text):
    print(text, flush=True)


def rljob(name, namespace, replicas=PODS, **more):
    return {
        "apiVersion": "trireme.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": name, "namespace": namespace},
        "spec": {
            **more, "algorithm": "GRPO", "model": {"source": "/data/model"},
            "config": {"path": "configs/quickstart.yaml"}, "health": {"startupDeadlineSeconds": 86400}, "roles": {
                "actor": {
                    "replicas": replicas, "gpusPerPod": 0, "processesPerPod": 1, "template": {
                        "spec": {
                            "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
                            "containers": [{"name": "trainer", "resources": {"requests": {"cpu": "100m"}}}]
                        }
                    }
                }
            }
        }
    }


def load(lines, name):
    path = STATE / f"{name}.jsonl"
    with open(path, "w") as out:
        for line in lines:
            out.write(json.dumps(line) + "\n")
    done = run(COMPONENTS / "bin/load", "-server", f"https://{ADDRESS}:6443", "-pki", PKI, "-connections", "64", path,
               timeout=3600)
    return json.loads(done.stdout)


def namespace(name):
    kube.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}, None)
    wait("its service account", lambda: kube.raw("GET", f"/api/v1/namespaces/{name}/serviceaccounts/default")[0] == 200)


def nodes(count):
    resources = {"cpu": "96", "memory": "1Ti", "pods": "250"}
    there = {n["metadata"]["name"] for n in kube.list("nodes", None)}
    body = lambda i: {
        "apiVersion": "v1", "kind": "Node", "metadata": {
            "name": f"fake-{i:04}", "annotations": {"kwok.x-k8s.io/node": "fake", "node.alpha.kubernetes.io/ttl": "0"},
            "labels": {"kubernetes.io/hostname": f"fake-{i:04}", "type": "kwok"}
        }, "spec": {"taints": [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": resources, "capacity": resources}
    }
    load(({"path": "/api/v1/nodes", "body": body(i)} for i in range(count) if f"fake-{i:04}" not in there), "nodes")
    ready = lambda: sum(
        any(c["type"] == "Ready" and c["status"] == "True" for c in n["status"].get("conditions", []))
        for n in kube.list("nodes", None)) >= count
    wait(f"{count} nodes", ready, 600)


class Process:
    def __init__(self, name, *command):
        self.log = open(f"{LOGS}/{name}.log", "a")
        self.process = subprocess.Popen([str(c) for c in command], stdout=self.log, stderr=self.log,
                                        start_new_session=True)
        (STATE / f"{name}.pid").write_text(str(self.process.pid))
        self.name = name

    def cpu(self):
        fields = open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def memory(self, key):
        return int(re.search(rf"^{key}:\s+(\d+) kB",
                             open(f"/proc/{self.process.pid}/status").read(), re.M).group(1)) / 1024

    def stop(self):
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        (STATE / f"{self.name}.pid").unlink(missing_ok=True)
        return time.monotonic() - begin


def start_operator(*flags):
    return Process("operator", OPERATOR, "--kubeconfig", KUBECONFIG, "--operator-namespace", "default", "--pod-name",
                   "scale", "--address", "127.0.0.1", "--metrics-port", "18080", "--health-port", "18081",
                   "--status-port", "18090", "--webhook-port", "-1", "--no-leader-elect", *flags,
                   *os.environ.get("OPERATOR_FLAGS", "").split())


def metrics():
    import urllib.request
    return urllib.request.urlopen(METRICS, timeout=60).read().decode()


def metric(text, name, labels=""):
    return sum(
        float(m)
        for m in re.findall(rf"^{name}\{{[^}}]*{labels}[^}}]*\}} ([0-9.e+-]+)$|^{name} ([0-9.e+-]+)$", text, re.M)
        for m in m if m)


def quantile(text, name, q):
    buckets = {}
    for bound, value in re.findall(rf'^{name}_bucket\{{[^}}]*le="([^"]+)"[^}}]*\}} ([0-9.e+-]+)$', text, re.M):
        buckets[float(bound.replace("+Inf",
                                    "inf"))] = buckets.get(float(bound.replace("+Inf", "inf")), 0) + float(value)
    total = buckets[float("inf")]
    return next(bound for bound, value in sorted(buckets.items()) if value >= q * total)


def stored(resource):
    text = kube.raw("GET", "/metrics")[1]
    found = re.search(rf'^apiserver_(?:storage|resource)_objects\{{[^}}]*resource="{resource}"[^}}]*\}} (\S+)', text,
                      re.M)
    return int(float(found.group(1))) if found else 0


def count(kind, ns):
    """Without fetching them: the server says how many are left after one."""
    answer = kube.call("GET", Kube.path(kind, "", ns) + "?limit=1")
    return len(answer["items"]) + answer["metadata"].get("remainingItemCount", 0)


def strip(o, ns, owners):
    meta = {k: v for k, v in o["metadata"].items() if k in ("name", "labels", "annotations")}
    meta["namespace"] = ns
    spec = {
        k: v
        for k, v in o.get("spec", {}).items()
        if k not in ("nodeName", "clusterIP", "clusterIPs", "serviceAccount", "ipFamilies", "ipFamilyPolicy")
    }
    if o["kind"] == "Service":
        spec["clusterIP"] = "None"
    body = {"apiVersion": "v1", "kind": o["kind"], "metadata": meta}
    if o["kind"] == "ConfigMap":
        body["data"], body["immutable"] = o["data"], o.get("immutable", False)
    else:
        body["spec"] = spec
    # As the operator's own: with an owner, of which the garbage collector keeps track.
    meta["ownerReferences"] = [{**owner, "uid": owners[owner["name"]]} for owner in o["metadata"]["ownerReferences"]]
    return body


def objects_of(ns):
    """What the operator made in a namespace, as (kind, wave, object): service and config map of a job before its
    pods."""
    out = []
    for kind, wave in (("services", 0), ("configmaps", 1), ("pods", 2)):
        for o in kube.list(kind, ns):
            o["kind"] = {"services": "Service", "configmaps": "ConfigMap", "pods": "Pod"}[kind]
            if o["metadata"]["name"] != "kube-root-ca.crt":
                out.append((kind, wave, o))
    return out


def post_jobs(ns, jobs, replicas, **more):
    namespace(ns)
    return load(({"path": Kube.path("rljobs", "", ns), "body": rljob(f"job-{i}", ns, replicas, **more)}
                 for i in range(jobs)), f"rljobs-{ns}")


def by_operator(ns, jobs, replicas):
    """Seconds from its workers' start to the last pod's creation (what the lists before that take is measured
    elsewhere), its CPU and requests. RLJobs are there before."""
    post_jobs(ns, jobs, replicas)
    open(f"{LOGS}/operator.log", "w").close()
    operator = start_operator("--namespace", ns)
    limit = time.monotonic() + 1800
    while (there := count("pods", ns)) < jobs * replicas:
        need(time.monotonic() < limit, f"{there} of {jobs * replicas} pods after 1800 s")
        time.sleep(0.5 if there < 0.8 * jobs * replicas else 0.1)  # each look costs the API server some milliseconds
    end, cpu = time.time(), operator.cpu()
    text = metrics()
    requests = ", ".join(f"{int(metric(text, 'rest_client_requests_total', f'method=.{verb}.'))} {verb}"
                         for verb in ("GET", "POST", "PATCH"))
    line = re.search(r"^(\S+Z) .*leading as", open(f"{LOGS}/operator.log").read(), re.M)
    seconds = end - datetime.datetime.fromisoformat(line.group(1).replace("Z", "+00:00")).timestamp()
    in_flight = metric(text, "rest_client_request_duration_seconds_sum") / seconds
    made = objects_of(ns)
    operator.stop()
    return made, seconds, f"CPU {cpu:.1f} s, {requests}, {in_flight:.0f} in flight on average"


def by_loop(made, ns, jobs, replicas):
    """Seconds of the loop for the same objects, of jobs that are nobody's work."""
    post_jobs(ns, jobs, replicas, managedBy="kueue.x-k8s.io/multikueue")
    owners = {o["metadata"]["name"]: o["metadata"]["uid"] for o in kube.list("rljobs", ns)}
    return load(({"path": Kube.path(kind, "", ns), "wave": wave, "body": strip(o, ns, owners)}
                 for kind, wave, o in made), f"bare-{ns}")


def create_rate(jobs, replicas, label):
    """The operator against the loop over 64 connections: one after the other, then the other way round, since the
    machine has other work too."""
    ratios, made = [], None
    for repeat in range(2):
        ours, theirs = f"{label}-{repeat}", f"{label}-{repeat}-bare"
        if repeat == 1:
            loop = by_loop(made, theirs, jobs, replicas)
            settle(replicas * jobs, theirs)
        made, seconds, cost = by_operator(ours, jobs, replicas)
        settle(replicas * jobs, ours)
        if repeat == 0:
            loop = by_loop(made, theirs, jobs, replicas)
            settle(replicas * jobs, theirs)
        ratios.append(seconds / loop["seconds"])
        say(f"  {label}: operator {seconds:.2f} s ({cost}), loop of the same {loop['objects']} objects "
            f"{loop['seconds']:.2f} s, ratio {ratios[-1]:.2f}")
    return ratios


def settle(pods, ns):
    """Until the scheduler and kwok are done with the pods of a namespace: they work for nobody's figures."""
    end = time.monotonic() + 900
    pending = Kube.path("pods", "", ns) + "?fieldSelector=status.phase%3DPending&limit=1"
    while kube.call("GET", pending)["items"] or count("pods", ns) < pods:
        need(time.monotonic() < end, f"pods of {ns} are pending after 900 s")
        time.sleep(2)


def clear():
    mine = [
        n["metadata"]["name"] for n in kube.list("namespaces", None)
        if re.match("many-|wide-|made|held", n["metadata"]["name"])
    ]
    for ns in mine:
        kube.delete("namespaces", ns, None)
    wait("the namespaces of the other groups to go", lambda: not any(kube.get("namespaces", ns, None) for ns in mine),
         2400)


def wanted(what, value, limit, unit=""):
    say(f"  {what} {value:.2f}{unit}, wanted <= {limit}{unit}")
    return [] if value <= limit else [f"{what} is {value:.2f}{unit}, wanted at most {limit}{unit}"]


def creates(jobs, replicas, label):
    ratios = create_rate(jobs, replicas, label)
    missed = wanted("mean ratio", sum(ratios) / len(ratios), 1.25)
    need(not missed, "; ".join(missed))
    return "ratios " + ", ".join(f"{r:.2f}" for r in ratios)


def made():
    """JOBS jobs posted while the operator runs, until all of their pods are placed."""
    ns = "made"
    namespace(ns)
    operator = start_operator("--namespace", ns)
    wait("the operator's metrics", _up, 60)
    begin = time.monotonic()
    # One scheduler is slower than the operator here: gangs wait for it as long as it takes.
    waits = {"scheduling": {"schedulingTimeoutSeconds": 0}}
    posted = load(({"path": Kube.path("rljobs", "", ns), "body": rljob(f"job-{i}", ns, **waits)} for i in range(JOBS)),
                  "rljobs-made")
    say(f"  {posted['objects']} RLJobs posted in {posted['seconds']:.1f} s")
    while True:
        there = count("pods", ns)
        if there >= JOBS * PODS:
            break
        need(time.monotonic() - begin < 3000, f"{there} of {JOBS * PODS} pods")
        time.sleep(0.5)
    seconds = time.monotonic() - begin
    text = metrics()
    say(f"  {JOBS * PODS} pods created after {seconds:.1f} s ({JOBS * PODS / seconds:.0f} pods/s), "
        f"operator CPU {operator.cpu():.1f} s")
    p50, p95, p99 = (quantile(text, "controller_runtime_reconcile_time_seconds", q) for q in (0.5, 0.95, 0.99))
    say(f"  reconcile time: p50 <= {p50:g} s, p95 <= {p95:g} s, p99 <= {p99:g} s")
    wait("every job to be placed", lambda: metric(metrics(), "trireme_jobs", 'phase="Starting"') >= JOBS, 3000)
    seconds, peak = time.monotonic() - begin, operator.memory("VmHWM")
    operator.stop()
    missed = wanted("peak RSS", peak, 120, " MiB")
    need(not missed, "; ".join(missed))
    return f"every job Starting after {seconds:.1f} s, peak RSS {peak:.0f} MiB"


def etcd(verb, body):
    import urllib.request
    request = urllib.request.Request(f"http://127.0.0.1:2379/v3/kv/{verb}",
                                     json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=60).read())


def coded(text):
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


FOLDERS = ("trireme.dev/rljobs", "pods", "services/specs", "configmaps", "networkpolicies")


def copy_jobs(ns, name, copies):
    """Copies of a job and its objects, under other names and uids of the same length, written to etcd as the API server
    would have stored them: what creating them costs, in which everybody else has a part, is measured elsewhere."""
    stored = {}
    for folder in FOLDERS:
        prefix = f"/registry/{folder}/{ns}/{name}"
        for pair in etcd("range", {"key": coded(prefix), "range_end": coded(prefix + "\x7f")})["kvs"]:
            stored[base64.b64decode(pair["key"])] = base64.b64decode(pair["value"])
    need(len(stored) == PODS + 4, f"a job has {sorted(stored)}")
    uids = {
        o["metadata"]["uid"]
        for kind in ("rljobs", "pods", "services", "configmaps", "networkpolicies")
        for o in kube.list(kind, ns) if o["metadata"]["name"].startswith(name)
    }
    jobs = {key: value for key, value in stored.items() if b"/rljobs/" in key}
    def put(i, part):
        changes = {u.encode(): str(uuid.uuid5(uuid.UUID(u), str(i))).encode() for u in uids}
        changes[name.encode()] = f"job-{i:05}".encode()
        pattern = re.compile(b"|".join(map(re.escape, changes)))
        for key, value in part.items():
            # One revision each, as every object of an API server has: a watch goes on after a revision.
            etcd(
                "put", {
                    "key": coded(pattern.sub(lambda m: changes[m.group()], key)), "value": coded(
                        pattern.sub(lambda m: changes[m.group()], value))
                })
    # A job whose pods are not there has lost them: they come first.
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for part in ({key: value for key, value in stored.items() if key not in jobs}, jobs):
            list(pool.map(lambda i: put(i, part), range(1, copies + 1)))


def held():
    """JOBS x PODS pods, running: memory, idle CPU, start against curl."""
    ns, first = "held", "job-00000"
    namespace(ns)
    operator = start_operator()
    wait("the operator's metrics", _up, 60)
    kube.create("rljobs", rljob(first, ns), ns)
    def described():
        status = kube.get("rljobs", first, ns).get("status", {})
        return status.get("phase") == "Starting" and [r["ready"] for r in status["roles"]] == [PODS]
    wait("the first job's pods to run", described, 120)
    # They would make endpoints for every Service; the operator has nothing of them, and this group is the last.
    for name in ("controller-manager", "scheduler"):
        kill(int((STATE / f"{name}.pid").read_text()))
    try:
        begin = time.monotonic()
        copy_jobs(ns, first, JOBS - 1)
        wait("the operator to know all",
             lambda: time.sleep(3) or metric(metrics(), "trireme_jobs", 'phase="Starting"') >= JOBS, 1200)
        say(f"  {JOBS} RLJobs with {JOBS * PODS} pods there after {time.monotonic() - begin:.0f} s")
        quiet(operator)
        return measure_held(operator)
    finally:
        for folder in FOLDERS:
            etcd("deleterange",
                 {"key": coded(f"/registry/{folder}/{ns}/"), "range_end": coded(f"/registry/{folder}/{ns}0")})


def measure_held(operator):
    peak, steady = operator.memory("VmHWM"), operator.memory("VmRSS")
    before, began = operator.cpu(), time.monotonic()
    time.sleep(60)
    idle = (operator.cpu() - before) / (time.monotonic() - began)
    missed = wanted("steady RSS", steady, 80, " MiB") + wanted("peak RSS", peak, 120, " MiB") + wanted(
        "idle CPU", idle, 0.2, " cores")
    operator.stop()
    # From start to synced, against curl of the same lists, alternating.
    ratios = []
    for _ in range(3):
        begin = time.monotonic()
        for path in ("/apis/trireme.dev/v1alpha1/rljobs", "/api/v1/pods?labelSelector=trireme.dev/job-uid",
                     "/api/v1/services?labelSelector=trireme.dev/job-uid",
                     "/apis/networking.k8s.io/v1/networkpolicies?labelSelector=trireme.dev/job-uid", "/api/v1/nodes"):
            run("curl", "-sf", "-o", "/dev/null", "--cacert", f"{PKI}/ca.crt", "--cert", f"{PKI}/admin.crt", "--key",
                f"{PKI}/admin.key", f"https://{ADDRESS}:6443{path}")
        curl = time.monotonic() - begin
        open(f"{LOGS}/operator.log", "w").close()
        begin = time.time()
        operator = start_operator()
        line = wait("the operator's lists",
                    lambda: re.search(r"^(\S+Z) .*informers hold", open(f"{LOGS}/operator.log").read(), re.M), 300)
        synced = datetime.datetime.fromisoformat(line.group(1).replace("Z", "+00:00")).timestamp() - begin
        quiet(operator)
        ratios.append(synced / curl)
        say(f"  start to synced {synced:.2f} s, curl of the same lists {curl:.2f} s, ratio {ratios[-1]:.2f}")
        missed += wanted("RSS after that start", operator.memory("VmRSS"), 80, " MiB") + wanted(
            "its peak", operator.memory("VmHWM"), 120, " MiB")
        operator.stop()
    missed += wanted("median ratio of start to curl", sorted(ratios)[1], 1.3)
    need(not missed, "; ".join(missed))
    return f"RSS {steady:.0f} MiB, peak {peak:.0f} MiB, idle {idle:.3f} cores, start {sorted(ratios)[1]:.2f} x curl"


def queue():
    namespace("queued")
    folder = kueue.configure(PKI, ADDRESS)
    manager = Process("kueue", COMPONENTS / "bin/kueue", "--kubeconfig", KUBECONFIG, "--config", folder / "config.yaml",
                      "--feature-gates=VisibilityOnDemand=false")
    operator = None
    try:
        wait(
            "Kueue's webhooks",
            lambda: run("curl", "-sk", "-o", "/dev/null", f"https://{ADDRESS}:{kueue.PORT}/", ok=False).returncode == 0,
            120)
        kubectl("apply", "--server-side", "-f", folder / "webhooks.yaml")
        kueue.queues()
        operator = start_operator("--namespace", "queued")
        if check("Kueue: one job is admitted, the next waits", kueue.in_turn, rljob):
            check("Kueue: suspend and resume", kueue.suspended_and_resumed)
            check("Kueue: preempted by a more important job", kueue.preempted, rljob)
            check("Kueue: a crash keeps the quota", kueue.crashed, rljob)
            check("Kueue: deletion leaves nothing", kueue.nothing_left)
    finally:
        if operator:
            operator.stop()
        kubectl("delete", "--ignore-not-found", "-f", folder / "webhooks.yaml")
        manager.stop()


def _up():
    try:
        metrics()
        return True
    except OSError:
        return False


def quiet(operator, seconds=300):
    """Until the operator has used next to no CPU for five seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = operator.cpu()
        time.sleep(5)
        if operator.cpu() - before < 0.25:
            return
    say("  (the operator did not become quiet)")


def main():
    say(f"scale: {JOBS} RLJobs of {PODS} pods on kwok's nodes; load average {os.getloadavg()[0]:.1f}")
    stages = [a for path in sorted((COMPONENTS / "bin/kwok-stages").glob("*.yaml")) for a in ("--config", path)]
    kwok = Process("kwok", COMPONENTS / "bin/kwok", "--kubeconfig", KUBECONFIG, "--manage-all-nodes=false",
                   "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
                   "--node-lease-duration-seconds=40", "--server-address", "127.0.0.1:10247", *stages)
    kubectl("apply", "--server-side", "-f", ROOT / "crds/trireme.dev_rljobs.yaml")
    clear()
    burst = min(JOBS, 1000)
    pods = (4 * burst * PODS if "many" in GROUPS else 0) + (4000 if "wide" in GROUPS else 0)
    nodes(max(20, pods // 150, JOBS * PODS // 100 if "made" in GROUPS else 0))
    if "many" in GROUPS:
        check(f"creates: {burst} jobs of {PODS} pods", creates, burst, PODS, "many")
    if "wide" in GROUPS:
        check("creates: one job of 1000 pods", creates, 1, 1000, "wide")
    if "kueue" in GROUPS:
        check("Kueue comes up and goes", queue)
    if "made" in GROUPS:
        clear()
        check(f"made: {JOBS} jobs of {PODS} pods", made)
    if "held" in GROUPS:
        clear()
        check(f"held: {JOBS} jobs of {PODS} pods", held)
    kwok.stop()
    return finish()


if __name__ == "__main__":
    sys.exit(main())
