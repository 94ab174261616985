#!/usr/bin/env bash
# The ways to run a step on GPUs, as whole runs of a small model in bfloat16: carry-over, an engine on a device of its
# own (in turn, exact versions, in flight), and PPO with its critic on the actor's device, on one of its own, and beside
# engines. Two devices; each token has the bits of a packed forward of the weights that drew it.
#   TRIREME=build/cuda/trainer/cli/trireme tests/gpu/ways_test.sh
# PARTS="carry engines ppo beside": only these; PARTS=wide needs four: two train, two are an engine. DEVICE=cpu tries
# the script itself where there is no GPU.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
parts=${PARTS-carry engines ppo beside}
wanted() { [[ " $parts " == *" $1 "* ]]; }
"$TRIREME" init-model --out "$dir/model" --hidden 512 --layers 4 --heads 8 --kv-heads 4 --head-dim 64 \
  --intermediate 1024 >/dev/null
"$TRIREME" init-task addition --out "$dir/task" --smallest 0 --largest 19 --warm-start 50 --held-out 20 >/dev/null
device="cluster.device=${DEVICE:-cuda} policy.precision=bfloat16 cluster.gpus_per_node=1 grpo.val_period=0
  grpo.val_at_start=false"
# Responses end early and late, and a step has more of them than there are places: some are always under way.
many="policy.generation.max_running_samples=10 policy.generation.max_new_tokens=24
  policy.generation.stop_token_ids=[$(seq -s , 200 219)]"
apart="policy.generation.colocated.enabled=false"
grpo() { # grpo NAME OPTIONS_OF_LAUNCH [overrides...]
  local name=$1 options=$2; shift 2
  "$TRIREME" launch $options -- $(run_args "$name" $device $many "$@")
}
equal() { # NAME OTHER STEP
  [ "$(weights "$1" "$3")" = "$(weights "$2" "$3")" ] && ok "$1: weights and moments of $2" ||
    bad "$1: weights and moments of $2"
}
# rows NAME STEPS WHAT: every step in order and no token with other bits; what WHAT (python, of the rows) says holds.
rows() {
  python3 - "$dir/$1-logs/train.jsonl" "$2" "$3" <<'PY'
import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
compared = sum(x["train/logprob_compared_tokens"] for x in rows)
differing = sum(x["train/logprob_mismatch_tokens"] for x in rows)
stale = sum(x["train/stale_tokens"] for x in rows)
spanning = sum(x["train/spanning_samples"] for x in rows)
ages = [x["train/max_trajectory_age"] for x in rows]
print(f"{len(rows)} steps, {differing} of {compared} tokens with other bits, {stale:.0f} older, "
      f"{spanning:.0f} samples of two versions, ages {ages}")
whole = [x["train/weight_version"] for x in rows] == list(range(len(rows)))
sys.exit(0 if len(rows) == int(sys.argv[2]) and whole and differing == 0 and max(ages) <= 1 and
         eval("(" + sys.argv[3] + ")") else 1)
PY
}
told() { # told NAME COMMAND...: passes when the command does, and says what it printed
  local name=$1 out; shift
  if out=$("$@" 2>&1); then ok "$name: $out"; else bad "$name" "$out"; fi
}
step="--nproc-per-node 1"
older='stale > 0 and all(x["train/mixed_context_tokens"] == 0 for x in rows)'
async="grpo.async_grpo.enabled=true loss_fn.use_importance_sampling_correction=true"
flight="$async grpo.async_grpo.in_flight_weight_updates=true"

if wanted carry; then
  check "carry-over" grpo carry "$step" $flight $dumped
  told "carry-over" rows carry 6 "$older"
  told "each token by its own weights" by_version carry equal
  check "carry-over, ratio_from generation" grpo sampler "$step" $flight grpo.async_grpo.ratio_from=generation \
    loss_fn.use_importance_sampling_correction=false
  told "without a pass" rows sampler 6 "$older"
  check "carry-over with kept keys" grpo kept "$step" $flight $dumped \
    grpo.async_grpo.recompute_kv_cache_after_weight_updates=false
  told "other bits, which would be noticed" by_version kept differ
  check "carry-over with a reference model" grpo carry-kl "$step" $flight loss_fn.reference_policy_kl_penalty=0.05
  told "with a reference model" rows carry-kl 6 "$older"
  check "carry-over on two devices" grpo carry-two "--nproc-per-node 2" $flight cluster.gpus_per_node=2
  told "on two devices" rows carry-two 6 "$older"
  m=policy.megatron_cfg
  for split in tensor pipeline; do
    check "carry-over, $split ranks" grpo "carry-$split" "--nproc-per-node 2" $flight cluster.gpus_per_node=2 \
      $m.enabled=true "$m.${split}_model_parallel_size=2"
    told "$split ranks" rows "carry-$split" 6 "$older"
    check "carry-over with kept keys, $split ranks" grpo "kept-$split" "--nproc-per-node 2" $flight \
      cluster.gpus_per_node=2 $m.enabled=true "$m.${split}_model_parallel_size=2" \
      grpo.async_grpo.recompute_kv_cache_after_weight_updates=false
    told "kept keys, $split ranks" rows "kept-$split" 6 'sum(x["train/mixed_context_tokens"] for x in rows) > 0'
  done
fi

if wanted engines; then
  check "on the same device" grpo one "$step"
  check "in turn" grpo turn "$step --engines 1" $apart
  told "equal bits of engine and loss" rows turn 6 'stale == 0 and compared > 300'
  equal turn one 6
  check "exact versions" grpo exact "$step --engines 1" $apart $async
  told "each step by the weights one step before" rows exact 6 '[x["train/avg_trajectory_age"] for x in rows] ==
    [0, 1, 1, 1, 1, 1] and spanning == 0'
  check "exact versions again" grpo again "$step --engines 1" $apart $async
  equal again exact 6
  # The graphs that were captured under the first weights decode with all later ones: checksums at each transfer.
  check "in flight" grpo flight "$step --engines 1" $apart $flight $dumped grpo.max_num_steps=24 \
    grpo.async_grpo.verify_weights_period=1
  told "after 23 transfers" rows flight 24 "$older"
  told "each token by its own weights" by_version flight equal
  check "in flight, ratio_from generation" grpo flight-sampler "$step --engines 1" $apart $flight \
    grpo.async_grpo.ratio_from=generation loss_fn.use_importance_sampling_correction=false
  told "without a pass" rows flight-sampler 6 'stale > 0'
fi

# wide NAME OVERRIDES...: of a model that two tensor ranks train, by an engine of two: whole runs, transfers to both.
wide() {
  local name=$1 pair="--nproc-per-node 2"; shift
  local two="policy.generation.tensor_parallel_size=2"
  check "$name on the same devices" grpo "$name" "$pair" "$@"
  check "$name in turn" grpo "$name-turn" "$pair --engines 1" $apart $two "$@"
  told "$name: equal bits of engine and loss" rows "$name-turn" 6 'stale == 0 and compared > 300'
  equal "$name-turn" "$name" 6
  check "$name, exact versions" grpo "$name-exact" "$pair --engines 1" $apart $two $async "$@"
  check "$name, exact versions again" grpo "$name-again" "$pair --engines 1" $apart $two $async "$@"
  equal "$name-again" "$name-exact" 6
  check "$name in flight" grpo "$name-flight" "$pair --engines 1" $apart $two $flight grpo.max_num_steps=24 \
    grpo.async_grpo.verify_weights_period=1 "$@"
  told "$name after 23 transfers" rows "$name-flight" 24 "$older"
  check "$name in flight, one copy of the weights" env TRIREME_ENGINE_SECOND_BUFFER=0 "$TRIREME" launch $pair \
    --engines 1 -- $(run_args "$name-place" $device $many $apart $two $flight "$@")
  told "$name, one copy of the weights" rows "$name-place" 6 'stale > 0'
}
if wanted wide; then
  m=policy.megatron_cfg
  tp2="cluster.gpus_per_node=2 $m.enabled=true $m.tensor_model_parallel_size=2"
  "$TRIREME" init-model --out "$dir/mixture" --family qwen3_moe --hidden 512 --layers 2 --heads 8 --kv-heads 4 \
    --head-dim 64 --intermediate 1024 --experts 8 --experts-per-token 2 --expert-width 256 >/dev/null
  wide dense $tp2
  wide mixture $tp2 $m.expert_model_parallel_size=2 policy.model_name="$dir/mixture"
fi

ppo() { # ppo NAME OPTIONS_OF_LAUNCH [overrides...]
  local name=$1 options=$2; shift 2
  "$TRIREME" launch $options -- $(ppo_args "$name" $device ppo.val_period=0 value.precision=bfloat16 \
    policy.sequence_packing.enabled=true $many "$@")
}
# critic NAME WHAT: six steps, of which two train the critic alone; no token with other bits, losses that are numbers.
critic() {
  python3 - "$dir/$1-logs/train.jsonl" "$2" <<'PY'
import json, math, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "critic/loss" in x]
trained = [x for x in rows if "train/loss" in x]
differing = sum(x["train/logprob_mismatch_tokens"] for x in trained)
compared = sum(x["train/logprob_compared_tokens"] for x in trained)
losses = [x["critic/loss"] for x in rows]
print(f"{len(rows)} steps, {differing} of {compared} tokens with other bits, critic losses "
      + " ".join(f"{x:.3g}" for x in losses))
sys.exit(0 if len(rows) == 6 and len(trained) == 4 and differing == 0 and all(map(math.isfinite, losses)) and
         all(x["critic/grad_norm"] > 0 for x in rows) and eval("(" + sys.argv[2] + ")") else 1)
PY
}
# near NAME OTHER: critic losses of both within bfloat16's rounding.
near() {
  python3 - "$dir/$1-logs/train.jsonl" "$dir/$2-logs/train.jsonl" <<'PY'
import json, sys
a, b = ([x["critic/loss"] for x in map(json.loads, open(p)) if "critic/loss" in x] for p in sys.argv[1:])
furthest = max((abs(x - y) / max(abs(y), 1e-3) for x, y in zip(a, b)), default=9)
print(f"{len(a)} losses, at most {furthest:.1e} apart")
sys.exit(0 if len(a) == len(b) == 6 and furthest < 0.02 else 1)
PY
}
if wanted ppo; then
  value=value.megatron_cfg
  check "PPO on one device" ppo local "$step"
  told "PPO on one device" critic local 'compared > 300'
  check "again" ppo local-again "$step"
  [ "$(both local 6)" = "$(both local-again 6)" ] && ok "PPO twice: both models bit for bit" || bad "PPO twice"
  check "a critic on a device of its own" ppo own "$step --critic-ranks 1"
  told "a critic on a device of its own" critic own 'compared > 300'
  told "as on the actor's" near own local
  check "a critic that tensor ranks share" ppo split "--nproc-per-node 2" cluster.gpus_per_node=2 \
    $value.enabled=true $value.tensor_model_parallel_size=2 value.dtensor_cfg.enabled=false
  told "a critic that tensor ranks share" critic split 'compared > 300'
  ppo_flight="ppo.async_ppo.enabled=true ppo.async_ppo.in_flight_weight_updates=true
    loss_fn.use_importance_sampling_correction=true"
  check "PPO that carries over" ppo carried "$step" $ppo_flight
  told "PPO that carries over" critic carried 'sum(x["train/stale_tokens"] for x in rows) > 0'
  check "PPO, an engine in flight" ppo ppo-flight "$step --engines 1" $apart $ppo_flight
  told "PPO, an engine in flight" critic ppo-flight 'True'
  check "PPO in turn" ppo ppo-turn "$step --engines 1" $apart
  [ "$(both ppo-turn 6)" = "$(both local 6)" ] && ok "PPO in turn: both models of one device, bit for bit" ||
    bad "PPO in turn: both models of one device"
  scores="env.reward_model.enabled=true env.reward_model.model_name=$dir/local/step_6/value/weights"
  check "a reward model" ppo scored "$step" $scores
  told "a reward model" critic scored 'compared > 300'
fi
# What is computed beside generation has a part of the device, however few SMs are asked for.
if wanted beside; then
  wanted ppo || check "PPO on one device" ppo local "$step"
  beside="policy.generation.background_sms=16 policy.generation.max_running_samples=4"
  check "values under generation" ppo beside "$step" $beside
  told "values under generation" critic beside 'sum(x["performance/values_under_generation"] for x in rows) > 0'
  check "values after it" ppo after "$step" policy.generation.background_sms=0 \
    policy.generation.max_running_samples=4
  [ "$(both beside 6)" = "$(both after 6)" ] && ok "values under generation and after it: both models bit for bit" ||
    bad "values under generation and after it"
  scores="env.reward_model.enabled=true env.reward_model.model_name=$dir/local/step_6/value/weights"
  check "a reward model beside generation" ppo scored-beside "$step" $scores $beside
  told "a reward model beside generation" critic scored-beside \
    'sum(x["performance/scores_under_generation"] for x in rows) > 0'
fi
finish
