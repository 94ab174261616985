"""RLJobs in a queue of a live Kueue, on kwok's nodes: waiting, admission, suspend and resume, preemption, a crash. Part
of scale.py (group `kueue`)."""
import base64
import shutil

from world import *

KUEUE = "/apis/kueue.x-k8s.io/v1beta1"
PORT = 19443


def configure(pki, address):
    """Kueue outside of the cluster: its custom resources, and its webhooks by address with a certificate of the
    cluster's own CA."""
    folder = STATE / "kueue"
    folder.mkdir(exist_ok=True)
    shutil.copy(f"{pki}/apiserver.crt", folder / "tls.crt")  # names the same address
    shutil.copy(f"{pki}/apiserver.key", folder / "tls.key")
    (folder / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "config.kueue.x-k8s.io/v1beta1",
                "kind": "Configuration",
                "namespace": "default",
                "health": {"healthProbeBindAddress": "127.0.0.1:19081"},
                "metrics": {"bindAddress": "127.0.0.1:19080"},
                "leaderElection": {"leaderElect": False},
                "internalCertManagement": {"enable": False},
                "webhook": {"host": address, "port": PORT, "certDir": str(folder)},
                "clientConnection": {"qps": 500, "burst": 1000},
                "integrations": {
                    "frameworks": ["pod"],
                    "podOptions": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "queued"}}},
                },
            }
        )
    )
    shipped = COMPONENTS / "bin/kueue-config/components"
    kubectl("apply", "--server-side",
            *[a for path in sorted((shipped / "crd/bases").glob("*.yaml")) for a in ("-f", path)])
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    authority = base64.b64encode(open(f"{pki}/ca.crt", "rb").read()).decode()
    hooks = []
    for document in yaml.safe_load_all((shipped / "webhook/manifests.yaml").read_text()):
        mine = []
        for hook in document["webhooks"]:
            groups = {g for rule in hook["rules"] for g in rule["apiGroups"]}
            if not groups <= {"", "kueue.x-k8s.io"}:
                continue  # of kinds that no integration is on for
            hook["clientConfig"] = {
                "url": f"https://{address}:{PORT}{hook['clientConfig']['service']['path']}", "caBundle": authority
            }
            if "" in groups:
                hook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": "queued"}}
            mine.append(hook)
        document["metadata"]["name"] = "kueue-" + document["metadata"]["name"]
        document["webhooks"] = mine
        hooks.append(document)
    (folder / "webhooks.yaml").write_text(yaml.safe_dump_all(hooks))
    return folder


def queues():
    """One queue that takes four pods of 100m, whose more important jobs preempt others."""
    def make(kind, body, namespace=None):
        place = f"/namespaces/{namespace}" if namespace else ""
        kube.call("POST", f"{KUEUE}{place}/{kind}", {"apiVersion": "kueue.x-k8s.io/v1beta1", **body})

    make(
        "resourceflavors", {
            "kind": "ResourceFlavor", "metadata": {"name": "any"},
            "spec": {"tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]}
        })
    make(
        "clusterqueues", {
            "kind": "ClusterQueue", "metadata": {"name": "all"}, "spec": {
                "namespaceSelector": {}, "preemption": {"withinClusterQueue": "LowerPriority"}, "resourceGroups": [{
                    "coveredResources": ["cpu"],
                    "flavors": [{"name": "any", "resources": [{"name": "cpu", "nominalQuota": "400m"}]}]
                }]
            }
        })
    make("localqueues", {"kind": "LocalQueue", "metadata": {"name": "team"}, "spec": {"clusterQueue": "all"}}, "queued")
    kube.call(
        "POST", "/apis/scheduling.k8s.io/v1/priorityclasses",
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "urgent"}, "value": 1000})


def phase(name):
    job = kube.get("rljobs", name, "queued")
    return (job or {}).get("status", {}).get("phase")


def pods_of(name):
    return kube.list("pods", "queued", f"trireme.dev/job={name}")


def reached(name, wanted, seconds=120):
    wait(f"{name} to be {wanted} (it is {phase(name)})", lambda: phase(name) == wanted, seconds)


def waits(name):
    """In the queue: every pod there, none admitted, and the status says so."""
    def held():
        pods = pods_of(name)
        job = kube.get("rljobs", name, "queued")
        said = condition(job, "Admitted") if job.get("status") else None
        return (len(pods) == 4 and all(p["spec"].get("schedulingGates") for p in pods)
                and job["status"]["phase"] == "Queued" and said and said["status"] == "False" and said["message"])
    return wait(f"{name} to wait in the queue", held, 120)


def admitted(name):
    reached(name, "Starting")
    job = kube.get("rljobs", name, "queued")
    need(condition(job, "Admitted")["status"] == "True", f"conditions {job['status']['conditions']}")
    need(all(p["spec"].get("nodeName") for p in pods_of(name)), "a pod has no node")
    return job


def in_turn(rljob):
    kube.create("rljobs", rljob("first", "queued", 4, queueName="team"), "queued")
    admitted("first")
    labels = [(p["metadata"]["labels"].get("kueue.x-k8s.io/queue-name"),
               p["metadata"]["labels"].get("kueue.x-k8s.io/pod-group-name")) for p in pods_of("first")]
    need(set(labels) == {("team", "first-a1")}, f"labels {labels}")
    kube.create("rljobs", rljob("second", "queued", 4, queueName="team"), "queued")
    message = waits("second")
    need(phase("first") == "Starting", f"first is {phase('first')}")
    return message


def suspended_and_resumed():
    """What is suspended leaves its quota to the next, and queues again."""
    kube.merge("rljobs", "first", {"spec": {"suspend": True}}, "queued")
    reached("first", "Suspended")
    wait("the pods of first to go", lambda: not pods_of("first"), 120)
    admitted("second")
    kube.merge("rljobs", "first", {"spec": {"suspend": False}}, "queued")
    waits("first")
    kube.delete("rljobs", "second", "queued")
    job = admitted("first")
    need(job["status"]["attempt"] == 2 and not job["status"].get("restarts"), f"status {job['status']}")
    return "attempt 2 after second had gone"


def preempted(rljob):
    """A more important job takes the place; the other one queues again, as a restart that does not count, and goes on
    afterwards."""
    kube.create("rljobs", rljob("urgent", "queued", 4, queueName="team", priorityClassName="urgent"), "queued")
    admitted("urgent")
    waits("first")
    job = kube.get("rljobs", "first", "queued")
    failure = job["status"]["lastFailure"]
    need(job["status"]["attempt"] == 3 and job["status"].get("freeRestarts") == 1 and not job["status"].get("restarts"),
         f"status {job['status']}")
    kube.delete("rljobs", "urgent", "queued")
    admitted("first")
    return f"{failure['reason']}: {failure['message'][:120]}"


def end_pod(p, code):
    """As a kubelet says it of a pod whose container has ended."""
    ended = {"ready": False, "started": False, "state": {"terminated": {"exitCode": code, "reason": "Error"}}}
    status = {"phase": "Failed", "containerStatuses": [{**c, **ended} for c in p["status"]["containerStatuses"]]}
    try:
        kube.merge("pods", p["metadata"]["name"], {"status": status}, "queued", "status")
    except ApiError as error:
        need(error.status == 404, str(error))  # the operator was faster


def crashed(rljob):
    """A rank fails and the others leave: the next attempt joins the group that has the quota, before a job that waits
    for it."""
    kube.create("rljobs", rljob("third", "queued", 4, queueName="team"), "queued")
    waits("third")
    before = kube.get("rljobs", "first", "queued")["status"]
    group = f"first-a{before['attempt']}"
    for p in [p for p in pods_of("first") if p["status"]["phase"] == "Running"]:
        end_pod(p, 1 if "-actor-0-" in p["metadata"]["name"] else 20)
    wait("the next attempt", lambda: kube.get("rljobs", "first", "queued")["status"]["attempt"] > before["attempt"], 60)
    status = admitted("first")["status"]
    need((status["attempt"], status.get("reservation"), status.get("restarts")) == (before["attempt"] + 1, group, 1),
         f"status {status}")
    alive = [p["metadata"] for p in pods_of("first") if p["status"]["phase"] != "Failed"]
    labels = {(m["labels"]["trireme.dev/attempt"], m["labels"]["kueue.x-k8s.io/pod-group-name"]) for m in alive}
    need(len(alive) == 4 and labels == {(str(status["attempt"]), group)}, f"pods {labels}")
    waits("third")
    need(not kube.get("rljobs", "third", "queued")["status"].get("admittedTime"), "third had the quota meanwhile")
    kube.delete("rljobs", "third", "queued")
    return f"attempt {status['attempt']} in {group}"


def nothing_left():
    kube.delete("rljobs", "first", "queued")
    left = lambda: [o for kind in ("pods", "services") for o in kube.list(kind, "queued")] + kube.call(
        "GET", f"{KUEUE}/namespaces/queued/workloads")["items"]
    wait("everything of the jobs to go", lambda: not left(), 120)
