"""Group `examples` of checks.py, by name only: the manifests of examples/ whose steps overlap, whose ranks split a
model over nodes, or that have a critic or other roles than the actor, as they are but for sizes: a tiny model and a
small task in place of theirs, CPUs in place of GPUs, two pods in place of many, axes of two ranks in place of four."""
from world import *

IMAGE = QUICKSTART[0]["spec"]["image"]
SAVED = 2  # checkpoints of a run

# Two tensor ranks share its key heads, two stages its layers.
MODEL = [
    "--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "2", "--head-dim", "16", "--intermediate", "48"
]
# Of manifests whose ranks split a model: the axes, each of two ranks. A pod has those of a tensor and context group.
SPLIT = {
    "eight-nodes-tp4-pp4": ["tp", "pp"], "context-parallel-16k": ["tp", "cp", "pp"],
    "dedicated-generation-tp": ["tp", "pp"]
}
KEYS = {"tp": "tensor_model_parallel_size", "cp": "context_parallel_size", "pp": "pipeline_model_parallel_size"}

# Both sections are said: that of the other algorithm changes nothing.
TINY = [
    "cluster.device=cpu", "cluster.collective_timeout_s=120", "policy.precision=float32",
    "policy.max_total_sequence_length=64", "policy.train_micro_batch_size=4", "policy.generation.max_new_tokens=24",
    "policy.generation.max_running_samples=10", "policy.generation.kv_cache_tokens=4096",
    f"policy.generation.stop_token_ids={list(range(200, 220))}",  # some responses end early
    "data.apply_chat_template=false", "data.max_input_seq_length=40", "data.train.prompt_file=null",
    "data.validation.prompt_file=null", "data.train.data_path=/models/task/train.jsonl",
    "data.validation.data_path=/models/task/held_out.jsonl", "data.train.input_key=input",
    "data.train.output_key=output", "data.validation.input_key=input", "data.validation.output_key=output",
    "env.format.enabled=true", "env.format.pattern=(a|b|c|x|y|z|A|B|0|1|2|3)", "logger.report=false",
    "checkpointing.keep_top_k=0"
]


def sizes(section, steps, prompts, responses, batch):
    return [f"{section}.max_num_steps={steps}", f"{section}.num_prompts_per_step={prompts}",
            f"{section}.num_generations_per_prompt={responses}", f"policy.train_global_batch_size={batch}",
            f"{section}.val_period={steps // SAVED}", f"{section}.max_val_samples=20",
            f"checkpointing.save_period={steps // SAVED}"]


def split(spec, axes):
    """Two pods, tensor and context groups inside of one, a stage in each."""
    actor = spec["roles"]["actor"]
    processes = 2**len(axes) // 2
    need(sorted(actor["parallelism"]) == sorted(axes), f"the manifest splits {actor['parallelism']}")
    actor.update(replicas=2, processesPerPod=processes, parallelism={axis: 2 for axis in axes})
    spec["config"]["overrides"] += [f"policy.megatron_cfg.{KEYS[axis]}=2" for axis in axes]
    spec["config"]["overrides"] += ["cluster.num_nodes=2", f"cluster.gpus_per_node={processes}"]
    for of_gpus in ("fabric", "rdma"):
        spec["network"].pop(of_gpus, None)


def manifest(name):
    """The job of a file, and how many steps it is to take: for PPO more than those in which the critic trains alone."""
    documents = yaml.safe_load_all((ROOT / f"examples/{name}.rljob.yaml").read_text())
    job = next(d for d in documents if d["kind"] == "RLJob")
    spec = job["spec"]
    spec["image"] = IMAGE
    spec.setdefault("network", {})["sharedMemory"] = "256Mi"
    steps = 8 if spec["algorithm"] == "PPO" else 6
    spec["config"]["overrides"] += TINY + (
        sizes("ppo", steps, 16, 1, 8) if spec["algorithm"] == "PPO" else sizes("grpo", steps, 8, 4, 16))
    if "model" in spec:
        spec["model"]["source"] = "/models/tiny"
    else:
        spec["config"]["overrides"].append("policy.model_name=/models/tiny")
    for role, pods in spec["roles"].items():
        pods["processesPerPod"] = min(2, pods["gpusPerPod"])
        pods["gpusPerPod"] = 0
        if role == "generation":
            pods.update(replicas=2, minReplicas=1)
            if "parallelism" in pods:  # the two processes of a pod are an engine
                pods["parallelism"] = {axis: 2 for axis in pods["parallelism"]}
        for container in pods["template"]["spec"]["containers"]:
            container["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}}
    if name in SPLIT:
        split(spec, SPLIT[name])
    return job, steps


def prepare(records):
    """The claims that examples/README.md asks for, and a model and a task in one of them."""
    for claim in ("models", "runs"):
        make_volume(claim)
        make_claim(claim)
    def container(name, *command):
        return {"name": name, "image": IMAGE, "imagePullPolicy": "IfNotPresent", "command": ["trireme", *command],
                "volumeMounts": [{"name": "models", "mountPath": "/models"}]}
    kube.create("pods", {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "prepare"}, "spec": {
            "restartPolicy": "Never",
            "initContainers": [container("model", "init-model", "--out", "/models/tiny", *MODEL)],
            "containers": [container("task", "init-task", "addition", "--out", "/models/task", *TINY_TASK)],
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}]}})
    ended = lambda: (phase := pod("prepare")["status"].get("phase")) in ("Succeeded", "Failed") and phase
    phase = wait("the pod that makes model and task", ended, 180)
    need(phase == "Succeeded", f"the pod that makes model and task: {phase}, {pod('prepare')['status']}")
    kube.delete("pods", "prepare")


def completes(records, file):
    need((volume_folder("models") / "task/train.jsonl").exists(), "there is no model: 'the claims' failed")
    job, steps = manifest(file)
    name, roles = job["metadata"]["name"], job["spec"]["roles"]
    kube.create("rljobs", job)
    status = records.wait_end(name)["status"]
    need(status["attempt"] == 1, f"attempt {status['attempt']}: {status.get('lastFailure')}")
    wanted = sorted(f"{name}-{role}-{rank}-a1" for role in roles for rank in range(roles[role]["replicas"]))
    need(sorted(records.made_pods(name)) == wanted, f"pods made: {records.made_pods(name)}")
    folder = volume_folder("runs") / name
    loss = "critic/loss" if job["spec"]["algorithm"] == "PPO" else "train/loss"
    rows = [json.loads(line) for line in (folder / "logs/train.jsonl").read_text().splitlines()]
    rows = [r for r in rows if loss in r]
    differing = sum(r.get("train/logprob_mismatch_tokens", 0) for r in rows)
    oldest = max(r.get("train/max_trajectory_age", 0) for r in rows)
    need(len(rows) == steps and differing == 0 and oldest <= 1,
         f"{len(rows)} steps, {differing} tokens with other bits, the oldest of age {oldest}")
    weights = folder / f"checkpoints/step_{steps}/policy/weights/model.safetensors"
    need(weights.exists(), f"there is no {weights}")
    kube.delete("rljobs", name)
    wait(f"the pods of {name} to go", lambda: not kube.list("pods", selector=f"trireme.dev/job={name}"), 120)
    return f"{len(wanted)} pods, {steps} steps, stale tokens {sum(r.get('train/stale_tokens', 0) for r in rows)}"


def examples(records):
    check("examples: the claims (undisturbed run)", prepare, records)
    for file in ("carry-over", "dedicated-generation", "ppo-colocated", "ppo-critic", "ppo-dedicated", *SPLIT):
        check(f"examples: {file} with a tiny model: Complete", completes, records, file)
