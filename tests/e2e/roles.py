"""Group `roles` of checks.py: pods that generate and a pod that grades beside the one that trains. Each of them is lost
and made again while the attempt goes on, also with its node, and generation pods are told to be more and fewer. The
pod that trains is lost too, which ends the attempt. A pod whose processes are one engine. And PPO with a critic on a
pod of its own, whose loss ends it as well.

Without arguments checks.py runs four of them, the group `roles-short`."""
from world import *

LONG = 60  # steps: more than pass while three pods are lost and made again
ENDLESS = 5000  # of a job that is deleted
VALUED = 40  # of PPO

# An HTTP reward in what every Debian has: the parity of a response's length.
REWARD = r'''use IO::Socket::INET;
$SIG{TERM} = sub { exit 0 };
my $server = IO::Socket::INET->new(LocalPort => $ENV{TRIREME_REWARD_PORT}, Listen => 64, ReuseAddr => 1) or die $!;
while (my $client = $server->accept) {
  my ($length, $body) = (0, "");
  while (my $line = <$client>) {
    $length = $1 if $line =~ /^content-length:\s*(\d+)/i;
    last if $line =~ /^\r?\n$/;
  }
  read($client, $body, $length);
  my @rewards;
  push @rewards, length($1) % 2 while $body =~ /"response":\s*"((?:[^"\\]|\\.)*)"/g;
  my $answer = "{\"rewards\": [" . join(", ", @rewards) . "]}";
  print $client "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: "
    . length($answer) . "\r\n\r\n$answer";
  close $client;
}
'''


def roles_job(name, steps, generation=2):
    job = small_job(name, steps, (
        "policy.generation.colocated.enabled=false", "grpo.async_grpo.enabled=true",
        "grpo.async_grpo.max_trajectory_age_steps=1", "grpo.async_grpo.in_flight_weight_updates=true",
        "loss_fn.use_importance_sampling_correction=true", "grpo.val_period=0", "env.math.enabled=false",
        "env.http.enabled=true", "env.http.max_attempts=20", "env.http.timeout_s=120"))
    roles = job["spec"]["roles"]
    template = roles["actor"]["template"]
    template["spec"].pop("affinity", None)
    roles["actor"]["replicas"] = 1
    roles["generation"] = {"replicas": generation, "minReplicas": 1, "template": copy.deepcopy(template)}
    image = job["spec"].get("image") or "docker.io/trireme/trainer:0.1.0"
    roles["reward"] = {
        "replicas": 1, "port": 8000, "template": {
            "spec": {
                "containers": [{
                    "name": "reward", "image": image, "imagePullPolicy": "IfNotPresent",
                    "command": ["perl", "-e", REWARD]
                }]
            }
        }
    }
    job["spec"]["health"] = {**job["spec"].get("health", {}), "generationTimeoutSeconds": 120}
    return job


def critic_job(name, critics=1, overrides=()):
    """PPO: one pod of the actor, `critics` of the critic, each on a node of its own; all save on the same volume. The
    critic's pods have the actor's init containers, and wait there for what its first pod prepares."""
    job = small_job(name, VALUED, (
        "ppo.num_prompts_per_step=8", "ppo.num_generations_per_prompt=4", f"ppo.max_num_steps={VALUED}",
        "ppo.ppo_epochs=1", "ppo.policy_training_start_step=2", "ppo.val_period=10", "ppo.val_at_start=false",
        "ppo.max_val_samples=20", "value_loss_fn.cliprange=0.5", "value.optimizer.kwargs.lr=0.001",
        "policy.train_global_batch_size=16", "policy.train_micro_batch_size=4", "env.format.enabled=true",
        "env.format.pattern=(a|b|c|x|y|z|A|B|0|1|2|3)", *overrides))
    job["spec"]["algorithm"] = "PPO"
    roles = job["spec"]["roles"]
    roles["actor"]["replicas"] = 1
    roles["critic"] = {"replicas": critics, "template": copy.deepcopy(roles["actor"]["template"])}
    return job


def weights_of(name, step=VALUED):
    """Of actor and critic, with the optimizers' moments."""
    folder = volume_folder(name) / f"grpo/value/step_{step}/value"
    files = sorted((folder / "weights").glob("*.safetensors")) + sorted((folder / "optimizer").glob("*.safetensors"))
    need((folder / "weights/model.safetensors").exists(), f"there is no {folder}/weights/model.safetensors")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return result_of(name, step), digest.hexdigest()[:16]


def status_of(name):
    return kube.get("rljobs", name)["status"]


def row(name, role):
    return next(r for r in status_of(name)["roles"] if r["name"] == role)


def newest(name, role, rank):
    """The pod of a place that counts: of the highest incarnation."""
    labels = lambda o: o["metadata"]["labels"]
    pods = [o for o in kube.list("pods", selector=f"trireme.dev/job={name},trireme.dev/role={role}")
            if labels(o)["trireme.dev/rank"] == str(rank)]
    return max(pods, key=lambda o: int(labels(o).get("trireme.dev/incarnation", 0)), default=None)


def ready(name, role, rank, but=()):
    o = newest(name, role, rank)
    conditions = (o or {}).get("status", {}).get("conditions", [])
    good = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return o if good and o["metadata"]["name"] not in but and "deletionTimestamp" not in o["metadata"] else None


def one_attempt(records, name):
    """Complete, and nothing was restarted: the actor's pod was made once."""
    status = records.wait_end(name)["status"]
    got = (status["attempt"], status.get("restarts", 0), status.get("freeRestarts", 0))
    need(got == (1, 0, 0), f"attempt, restarts, free restarts: {got}; {status.get('lastFailure')}")
    actors = [n for n in records.made_pods(name) if f"{name}-actor-" in n]
    need(actors == [f"{name}-actor-0-a1"], f"pods made: {actors}")
    return status


def undisturbed(records):
    submit(roles_job("roles", 12))
    status = one_attempt(records, "roles")
    made = sorted(records.made_pods("roles"))
    need({"roles-actor-0-a1", "roles-generation-0-a1", "roles-generation-1-a1", "roles-reward-0-a1"} <= set(made),
         f"pods made: {made}")
    need(status["progress"].get("weightVersion", 0) > 0, f"progress {status['progress']}")
    need("trajectoryAge" in status["progress"], f"progress {status['progress']}")
    rows = [json.loads(line) for line in (volume_folder("roles") / "logs/train.jsonl").read_text().splitlines()]
    differing = sum(r.get("train/logprob_mismatch_tokens", 0) for r in rows)
    need(differing == 0, f"{differing} tokens with other bits")
    return f"{len(made)} pods, weights of version {status['progress']['weightVersion']}"


def engine_of_two_ranks(records):
    """One pod trains with two tensor ranks, and the two processes of another are one engine of two tensor ranks."""
    name = "paired"
    job = split_job(name)
    job["spec"]["config"]["overrides"].append("policy.generation.colocated.enabled=false")
    roles = job["spec"]["roles"]
    roles["actor"]["replicas"] = 1
    roles["generation"] = {"replicas": 1, "processesPerPod": 2, "parallelism": {"tp": 2},
                           "template": copy.deepcopy(roles["actor"]["template"])}
    submit(job)
    one_attempt(records, name)
    need(sorted(records.made_pods(name)) == [f"{name}-actor-0-a1", f"{name}-generation-0-a1"],
         f"pods made: {records.made_pods(name)}")
    topology = [json.loads(o["data"]["topology.json"])
                for _, kind, o in records.configmaps.of(f"{name}-topology-a1") if kind == "ADDED"]
    need({"name": "generation", "replicas": 1, "processesPerPod": 2, "engine": {"tp": 2}}
         in topology[0]["roles"], f"topology {topology}")
    return equal_bits(name)


def each_lost(records):
    """A generation pod's program is killed, the other's pod is deleted, the reward pod's program is killed."""
    name = "lost"
    submit(roles_job(name, LONG), like="roles")
    wait_step(name, 3)
    told = []
    for role, rank, word in (("generation", 0, "trireme engine"), ("generation", 1, None), ("reward", 0, "perl")):
        before = wait(f"{role} pod {rank}", lambda: ready(name, role, rank), 120)
        old = before["metadata"]["name"]
        if word:
            found = wait(f"the program of {old}", lambda: processes(before, word))
            kill(found[-1])
        else:
            kube.delete("pods", old)
        after = wait(f"a pod in the place of {old}", lambda: ready(name, role, rank, but=(old,)), 120)
        step = logged_steps(name)
        told.append(f"{old} -> {after['metadata']['name']} at step {step}")
        wait_step(name, step + 3)
    status = one_attempt(records, name)
    restarts = {r["name"]: r.get("restarts", 0) for r in status["roles"]}
    need(restarts["generation"] == 2 and restarts["reward"] == 1, f"roles {status['roles']}")
    need("PodReplaced" in records.reasons(name), f"events {records.reasons(name)}")
    return "; ".join(told)


def actor_killed(records):
    """The attempt ends, and the other roles' pods are made again with it."""
    name = "untrained"
    submit(roles_job(name, 20), like="roles")
    wait_step(name, 3)
    kill(rank_process(f"{name}-actor-0-a1"))
    status = records.wait_end(name)["status"]
    got = (status["attempt"], status["restarts"], status.get("freeRestarts", 0))
    need(got == (2, 1, 0), f"attempt, restarts, free restarts: {got}; {status.get('lastFailure')}")
    failure = status["lastFailure"]
    need(failure["role"] == "actor" and failure.get("exitCode") == 137, f"lastFailure {failure}")
    wanted = {f"{name}-{place}-a{attempt}" for place in ("actor-0", "generation-0", "generation-1", "reward-0")
              for attempt in (1, 2)}
    made = records.made_pods(name)
    need(wanted <= set(made) and f"{name}-actor-0-a3" not in made, f"pods made: {made}")
    return failure["message"][:200]


def of_role(name, role):
    return {"topologyKey": "kubernetes.io/hostname",
            "labelSelector": {"matchLabels": {"trireme.dev/job": name, "trireme.dev/role": role}}}


def keep_apart(name, roles):
    """Generation pods are never on the actor's node; the reward pod is on that, or at least on no node of theirs, where
    that can be."""
    preferred = lambda term: [{"weight": 100, "podAffinityTerm": term}]
    roles["generation"]["template"]["spec"]["affinity"] = {"podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [of_role(name, "actor")],
        "preferredDuringSchedulingIgnoredDuringExecution": preferred(of_role(name, "reward"))}}
    roles["reward"]["template"]["spec"]["affinity"] = {"podAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": preferred(of_role(name, "actor"))}}


def generation_node_lost(records):
    """A node with generation pods, and no other of the job's, loses power. Long before Kubernetes would take them away
    they are made again on another node, within the attempt, although the actor reports all the time."""
    name = "dark"
    job = roles_job(name, ENDLESS)
    job["spec"]["health"]["nodeNotReadyGraceSeconds"] = 20
    keep_apart(name, job["spec"]["roles"])
    submit(job, like="roles")
    wait_step(name, 3)
    for rank in (0, 1):
        wait(f"generation pod {rank}", lambda: ready(name, "generation", rank), 120)
    node_of = lambda role, rank: newest(name, role, rank)["spec"]["nodeName"]
    others = {node_of("actor", 0), node_of("reward", 0)}
    nodes = sorted({node_of("generation", rank) for rank in (0, 1)} - others)
    need(nodes, f"no node has generation pods alone: {others}")
    node = nodes[0]
    lost = {rank: newest(name, "generation", rank)["metadata"]["name"] for rank in (0, 1)
            if node_of("generation", rank) == node}
    cluster("stop-node", node[-1])
    try:
        for rank, old in lost.items():
            again = wait(f"a pod in the place of {old}", lambda: ready(name, "generation", rank, but=(old,)), 240)
            need(again["spec"]["nodeName"] != node, f"{again['metadata']['name']} is on {node}")
        wait_step(name, logged_steps(name) + 3)
        status = status_of(name)
        need((status["phase"], status["attempt"]) == ("Running", 1) and not status.get("restarts"), f"status {status}")
        need(row(name, "generation")["restarts"] == len(lost), f"roles {status['roles']}")
        need(status["lastFailure"]["reason"] == "NodeLost", f"lastFailure {status['lastFailure']}")
    finally:
        cluster("start-node", node[-1])
    kube.delete("rljobs", name)
    wait("its pods to go", lambda: not kube.list("pods", selector=f"trireme.dev/job={name}"), 180)
    return f"{node} with {', '.join(lost.values())}; step {logged_steps(name)}"


def scaled(records):
    name = "scaled"
    submit(roles_job(name, LONG, generation=1), like="roles")
    wait_step(name, 3)
    kubectl("scale", "rljob", name, "--replicas=3")
    for rank in (1, 2):
        wait(f"generation pod {rank}", lambda: ready(name, "generation", rank), 120)
    scale = kube.call("GET", kube.path("rljobs", name) + "/scale")
    wait("three replicas in the scale", lambda: kube.call("GET", kube.path("rljobs", name) + "/scale")["status"][
        "replicas"] == 3, 60)
    need("trireme.dev/role=generation" in scale["status"].get("selector", ""), f"scale {scale}")
    try:
        kube.merge("rljobs", name, {"spec": {"roles": {"reward": {"replicas": 2}}}})
        raise AssertionError("the number of reward pods of a running job was changed")
    except ApiError as error:
        need("suspend" in error.message, error.message)
    kubectl("scale", "rljob", name, "--replicas=2")
    wait("the third generation pod to go", lambda: newest(name, "generation", 2) is None, 120)
    step = logged_steps(name)
    wait_step(name, step + 3)
    need(row(name, "generation")["ready"] == 2, f"roles {status_of(name)['roles']}")
    one_attempt(records, name)
    return f"1, 3, 2 generation pods; {len(records.made_pods(name))} pods made"


def too_few(records):
    """Generation pods that have no node end the attempt, with a reason."""
    name = "few"
    job = roles_job(name, LONG)
    job["spec"]["health"]["generationTimeoutSeconds"] = 15
    job["spec"]["failurePolicy"] = {"maxReplacements": 0, "maxRestarts": 0}
    submit(job, like="roles")
    wait_step(name, 2)
    for rank in (0, 1):
        there = wait(f"generation pod {rank}", lambda: ready(name, "generation", rank), 120)
        kill(wait("the engine", lambda: processes(there, "trireme engine"))[-1])
    status = records.wait_phase(name, ("Failed", "Complete"), 180)["status"]
    need(status["phase"] == "Failed" and status["lastFailure"]["reason"] == "TooFewGenerationPods",
         f"{status['phase']}, lastFailure {status.get('lastFailure')}")
    return status["lastFailure"]["message"][:200]


def valued(records):
    name = "valued"
    submit(critic_job(name))
    status = records.wait_end(name)["status"]
    need(sorted(records.made_pods(name)) == ["valued-actor-0-a1", "valued-critic-0-a1"],
         f"pods made: {records.made_pods(name)}")
    rows = {r["name"]: r for r in status["roles"]}
    need([r["name"] for r in status["roles"]] == ["actor", "critic"] and rows["critic"]["succeeded"] == 1,
         f"roles {status['roles']}")
    need(status["progress"]["step"] == VALUED, f"progress {status['progress']}")
    topology = [json.loads(o["data"]["topology.json"])
                for _, kind, o in records.configmaps.of("valued-topology-a1") if kind == "ADDED"]
    need({"name": "critic", "replicas": 1, "processesPerPod": 1} in topology[0]["roles"], f"topology {topology}")
    need({"index": 0, "role": "critic", "host": "valued-critic-0.valued-a1", "ranks": [1, 1]} in topology[0]["nodes"],
         f"topology {topology}")
    log = [json.loads(line) for line in (volume_folder(name) / "logs/train.jsonl").read_text().splitlines()]
    log = [r for r in log if "critic/loss" in r]
    differing = sum(r.get("train/logprob_mismatch_tokens", 0) for r in log)
    need(len(log) == VALUED and differing == 0, f"{len(log)} steps with a critic, {differing} tokens with other bits")
    weights_of(name)
    return f"explained variance {log[-1].get('critic/explained_var')}"


def critic_killed(records):
    """As an actor's rank: the attempt ends, and the next one goes on to the undisturbed run's weights."""
    name = "unvalued"
    submit(critic_job(name), like="valued")
    wait_step(name, 3)
    kill(rank_process(f"{name}-critic-0-a1"))
    status = records.wait_end(name)["status"]
    got = (status["attempt"], status["restarts"], status.get("freeRestarts", 0))
    need(got == (2, 1, 0), f"attempt, restarts, free restarts: {got}; {status.get('lastFailure')}")
    failure = status["lastFailure"]
    need(failure["role"] == "critic" and failure.get("exitCode") == 137
         and "critic rank 0 failed first" in failure["message"], f"lastFailure {failure}")
    need("Restarting" in records.phases(name), f"phases {records.phases(name)}")
    need(sorted(records.made_pods(name)) == [f"{name}-{role}-0-a{attempt}" for role in ("actor", "critic")
                                             for attempt in (1, 2)], f"pods made: {records.made_pods(name)}")
    need(weights_of(name) == weights_of("valued"), "other weights than those of the undisturbed run")
    return failure["message"][:200]


def critic_beside_generation(records):
    """One pod trains, two hold the critic, one generates, in turn; the critic's pods are deleted once."""
    name = "three"
    job = critic_job(name, critics=2, overrides=("policy.generation.colocated.enabled=false",))
    roles = job["spec"]["roles"]
    for role in ("actor", "critic"):
        roles[role]["template"]["spec"].pop("affinity", None)
    roles["generation"] = {"replicas": 1, "template": copy.deepcopy(roles["actor"]["template"])}
    submit(job, like="valued")
    wait_step(name, 3)
    kube.delete("pods", f"{name}-critic-1-a1")
    status = records.wait_end(name)["status"]
    got = (status["attempt"], status.get("restarts", 0), status["freeRestarts"])
    need(got == (2, 0, 1), f"attempt, restarts, free restarts: {got}; {status.get('lastFailure')}")
    need(status["lastFailure"]["role"] == "critic" and status["lastFailure"]["reason"] == "Deleted",
         f"lastFailure {status['lastFailure']}")
    weights_of(name)
    return status["lastFailure"]["message"][:200]


# What runs without arguments: what each role does, and each of them that may be lost.
SHORT = (
    ("an undisturbed run: one trains, two generate, one grades", undisturbed),
    ("an engine of two ranks beside two that train: equal bits", engine_of_two_ranks),
    ("each of them lost: one attempt", each_lost),
    ("PPO, an undisturbed run with a pod of the critic", valued),
)
LONGER = (
    ("kill -9 of the one that trains: the next attempt", actor_killed),
    ("a node of generation pods stopped: one attempt", generation_node_lost),
    ("generation pods told to be more and fewer", scaled),
    ("too few generation pods for too long", too_few),
    ("kill -9 of the critic's rank: same weights", critic_killed),
    ("two pods of the critic beside one that generates, one of them deleted", critic_beside_generation),
)


def roles(records, short=False):
    for name, function in SHORT if short else SHORT + LONGER:
        check(f"roles: {name}", function, records)
