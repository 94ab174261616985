#!/usr/bin/env bash
# Reference log-probs under generation or after it: the same weights and moments, bit for bit. And
# the same run on 1, 2 and 4 processes: samples do not depend on ranks, so loss, gradient norm, log-probs' sums and the
# first moments (gradients, as the optimizer saw them) of every step must agree within rounding.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_fixture
run() { # run PROCESSES
  local n=$1; shift
  "$TRIREME" launch --nproc-per-node "$n" -- $(run_args "on$n" grpo.max_num_steps=3 grpo.val_period=0 \
    grpo.val_at_start=false cluster.gpus_per_node="$n" policy.generation.max_running_samples=8 "$@")
}
for n in 1 2 4; do check "a run on $n processes" run $n; done
compare() { # compare PROCESSES: with one process
  python3 - "$dir" "$1" <<'PY'
import array, json, struct, sys
folder, ranks = sys.argv[1], int(sys.argv[2])
def tensors(path):
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    meta = header.pop("__metadata__")
    out = {}
    for name, t in header.items():
        values = array.array("f")
        assert t["dtype"] == "F32", t
        values.frombytes(data[t["data_offsets"][0]:t["data_offsets"][1]])
        out[name] = values
    return out, meta
def moments(n, step):
    pieces = {}
    for rank in range(n):
        t, meta = tensors(f"{folder}/on{n}/step_{step}/policy/optimizer/rank_{rank:05d}.safetensors")
        for name, _, _, _, first, count, at in json.loads(meta["pieces"]):
            pieces[name, first] = t["exp_avg"][at:at + count]
    flat, ends = [], {}
    for name, first in sorted(pieces):
        assert ends.get(name, 0) == first, (name, first)
        ends[name] = first + len(pieces[name, first])
        flat += pieces[name, first]
    return flat
logs = [[x for x in map(json.loads, open(f"{folder}/on{n}-logs/train.jsonl")) if "train/loss" in x] for n in (1, ranks)]
worst = 0
for a, b in zip(*logs):
    for key in ("train/loss", "train/grad_norm", "train/reward", "train/gen_kl_error", "train/total_num_tokens"):
        if key in a:
            worst = max(worst, abs(a[key] - b[key]) / max(abs(a[key]), 1e-3))
assert len(logs[0]) == len(logs[1]) == 3 and all(x["train/grad_norm"] > 0 for x in logs[0])
difference = 0
for step in (1, 2, 3):
    one, many = moments(1, step), moments(ranks, step)
    largest = max(map(abs, one))
    assert largest > 0 and len(one) == len(many)
    difference = max(difference, max(abs(x - y) for x, y in zip(one, many)) / largest)
print(f"{ranks} processes: log {worst:.2g}, gradients {difference:.2g} of the largest")
sys.exit(0 if worst <= 1e-5 and difference <= 1e-5 else 1)
PY
}
reference() { # reference NAME BACKGROUND_PROCESSORS [overrides...]
  "$TRIREME" launch --nproc-per-node 2 -- $(run_args "$1" grpo.max_num_steps=3 grpo.val_period=0 \
    grpo.val_at_start=false cluster.gpus_per_node=2 policy.generation.max_running_samples=8 \
    loss_fn.reference_policy_kl_penalty=0.05 policy.generation.background_sms="$2" "${@:3}")
}
check "reference log-probs after generation" reference after 0
check "reference log-probs under generation" reference under 1
early=$(python3 - "$dir/under-logs/train.jsonl" <<'PY'
import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
print(sum(x["performance/references_under_generation"] for x in rows) / len(rows))
PY
)
[[ "$early" =~ ^[0-9.]+$ && "$early" != 0.0 ]] && ok "under generation: $early of them" ||
  bad "no reference log-prob was computed under generation"
[ "$(weights after 3)" = "$(weights under 3)" ] && [ "$(values after | tr -s ,)" = "$(values under | tr -s ,)" ] &&
  ok "the same weights, moments and log" ||
  bad "weights or log differ" "$(diff <(values after) <(values under))"
# Gradients of whole groups while others are generated: the same numbers but for the order of sums.
check "gradients under generation" reference gradients 1 grpo.early_gradients=true
out=$(python3 - "$dir/under-logs/train.jsonl" "$dir/gradients-logs/train.jsonl" <<'PY'
import json, sys
logs = [[x for x in map(json.loads, open(name)) if "train/loss" in x] for name in sys.argv[1:]]
early = [x["performance/gradients_under_generation"] for x in logs[1]]
keys = sorted(k for k, v in logs[0][0].items() if k.startswith("train/") and isinstance(v, (int, float)))
worst, where = 0, ""
for a, b in zip(*logs):
    for key in keys:
        difference = abs(a[key] - b[key]) / max(abs(a[key]), 1e-3)
        if difference > worst: worst, where = difference, key
print(f"{sum(early) / len(early):.2f} of the samples early, log of {len(keys)} values within {worst:.2g} ({where})")
whole = len(logs[0]) == len(logs[1]) == 3 and "train/grad_norm" in keys
sys.exit(0 if whole and max(early) > 0 and worst <= 1e-4 else 1)
PY
) && ok "$out" || bad "gradients under generation against after it" "$out"
# A measurement: weights drawn, lengths forced, rewards drawn, on the trainer's own path.
measured() { # measured NAME RANKS [overrides...]
  local name=$1 ranks=$2; shift 2
  "$TRIREME" init-model --shape tiny --no-weights --out "$dir/drawn" &&
    "$TRIREME" launch --nproc-per-node "$ranks" -- $(run_args "$name" grpo.max_num_steps=2 grpo.val_period=0 \
      grpo.val_at_start=false cluster.gpus_per_node="$ranks" policy.model_name="$dir/drawn" \
      policy.random_weights=true policy.generation.forced_lengths=synthetic:8x4:mean=6:max=12:prompt=9 "$@")
}
check "drawn weights, forced lengths" measured measured 2
out=$(python3 - "$dir/measured-logs/train.jsonl" <<'PY'
import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
fewest, most = ([x["performance/rank_samples_" + key] for x in rows] for key in ("fewest", "most"))
idle = [(x["performance/generation_idle_s_slowest_rank"], x["performance/generation_idle_s_fastest_rank"])
        for x in rows]
lengths = [(x["train/mean_gen_tokens_per_sample"], x["train/max_gen_tokens_per_sample"], x["train/mean_prompt_length"])
           for x in rows]
print(f"samples of a rank {fewest} to {most}, idle {idle}, lengths {lengths}")
sys.exit(0 if len(rows) == 2 and all(a + b == 32 for a, b in zip(fewest, most))
         and all(0 == slow <= fast for slow, fast in idle)
         and all(abs(mean - 6) <= 0.5 and longest == 12 and 5 < prompt < 13 for mean, longest, prompt in lengths)
         and all(0 < x["train/reward"] < 1 and x["train/grad_norm"] > 0 and x["train/truncation_rate"] < 1
                 for x in rows) else 1)
PY
) && ok "$out" || bad "forced lengths in the log" "$out"
measured measured 2 policy.generation.forced_lengths=synthetic:8x5:mean=6 >/dev/null 2>"$dir/refused" &&
  bad "forced lengths for groups of another size" ||
  { grep -q "5 responses for each prompt, grpo.num_generations_per_prompt is 4" "$dir/refused" &&
    ok "forced lengths for groups of another size are refused" ||
    bad "forced lengths for groups of another size" "$(cat "$dir/refused")"; }
# How 4 and 8 ranks share a rollout: 8 samples a rank, and 8 times as many as there are places.
# How evenly depends on when the kernel lets each process run: scheduler_test has shares under a virtual clock.
shared() { # shared NAME RANKS SAMPLES: counts that add up; the slowest rank does not wait for itself
  python3 - "$dir/$1-logs/train.jsonl" "$2" "$3" <<'PY'
import json, sys
ranks, samples = map(int, sys.argv[2:])
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
told = [[round(x["performance/" + key], 3) for key in (
    "rank_samples_fewest", "rank_samples_most", "generation_idle_s_slowest_rank", "generation_idle_s_fastest_rank")]
        for x in rows]
print(f"{ranks} ranks, {samples} samples: fewest, most, idle of the slowest and the fastest: {told}")
sys.exit(0 if len(rows) == 2 and all(
    few * ranks <= samples <= most * ranks and most <= samples and 0 == slow <= fast
    for few, most, slow, fast in told) else 1)
PY
}
check "8 ranks, 8 samples each" measured eight 8 grpo.num_prompts_per_step=16 policy.train_global_batch_size=64 \
  policy.generation.forced_lengths=synthetic:16x4:mean=6:max=12:prompt=9
out=$(shared eight 8 64) && ok "$out" || bad "how 8 ranks share 64 samples" "$out"
check "4 ranks, 8 times their places" measured four 4 grpo.num_prompts_per_step=32 policy.train_global_batch_size=128 \
  policy.generation.max_running_samples=4 policy.generation.forced_lengths=synthetic:32x4:mean=6:max=12:prompt=9
out=$(shared four 4 128) && ok "$out" || bad "how 4 ranks share 128 samples" "$out"
for n in 2 4; do out=$(compare $n) && ok "$out" || bad "$n processes against one" "$out"; done
finish
