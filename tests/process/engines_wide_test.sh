#!/usr/bin/env bash
# Engines of several ranks, of whole runs: with the tensor ranks of training a run in turn has the bits of the run on
# the same devices, of dense models and mixtures; with others it has those of ranks that generate in such a layout.
# Versions are exact or in flight as with one device. A leader or a follower that is killed, transfers that are cut, a
# pod of two engines, mistakes.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_split_fixture
make_mixture
apart="policy.generation.colocated.enabled=false"
steps=4
common="cluster.device=cpu grpo.max_num_steps=$steps grpo.val_period=2 policy.megatron_cfg.enabled=true"
m=policy.megatron_cfg
size=policy.generation.tensor_parallel_size
tp2="$m.tensor_model_parallel_size=2"
wide="$apart $size=2"
# In turn with training, by as many tensor ranks.
layouts=(  # NAME RANKS OVERRIDES
  "tp2 2 $tp2"
  "tp2pp2 4 $tp2 $m.pipeline_model_parallel_size=2"
  "mixture 2 $tp2 $m.expert_model_parallel_size=2 policy.model_name=$dir/mixture"
)
for layout in "${layouts[@]}"; do
  set -- $layout
  in_turn "$1" "$2" "$wide" "${@:3}"
  without_pass "$1"
  grep -q "on 2 x cpu, as engine 0" <<<"$out" && ok "$1: says how wide it is" || bad "$1: how wide" "$out"
done
check "two engines of two ranks" "$TRIREME" launch --nproc-per-node 2 --engines 2 -- $(split_args two 2 $wide $tp2)
equal two tp2 $steps
check "experts whole on each rank" "$TRIREME" launch --nproc-per-node 2 --engines 1 -- \
  $(split_args whole-experts 2 $wide $tp2 $m.expert_model_parallel_size=2 policy.model_name=$dir/mixture \
    policy.generation.expert_parallel_size=1)
equal whole-experts mixture $steps
check "no room for a second copy of the weights" env TRIREME_ENGINE_SECOND_BUFFER=0 "$TRIREME" launch \
  --nproc-per-node 2 --engines 1 -- $(split_args in-place 2 $wide $tp2)
equal in-place tp2 $steps
# By other ones: two data parallel ranks, whose samples two tensor ranks draw.
check "generation by two ranks, in place" "$TRIREME" launch --nproc-per-node 2 -- $(split_args dp2 2 $size=2)
out=$("$TRIREME" launch --nproc-per-node 2 --engines 1 -- $(split_args turn-dp2 2 $wide) 2>&1) &&
  ok "data parallel ranks, an engine of two ranks" || bad "data parallel ranks, an engine of two ranks" "$out"
check "turn-dp2: other bits, and near" near turn-dp2 $steps
grep -q "generation has tp 2, training tp 1: .* a previous-log-prob pass runs every step" <<<"$out" &&
  ok "says why log-probs have a pass of their own" || bad "says why log-probs have a pass" "$out"
equal turn-dp2 dp2 $steps
# A pod of four processes is two engines. Rewards that take their time keep the run going until both have joined.
check "paid answers" "$TRIREME" launch --nproc-per-node 2 -- $(split_args paid 2 $tp2 $(paid))
manifest pods GRPO "actor: {processesPerPod: 2, parallelism: {tp: 2}},
  generation: {processesPerPod: 4, parallelism: {tp: 2}}" \
  $(split_args pods 2 $apart $tp2 $(paid 0.05)) >"$dir/pods.yaml"
out=$("$TRIREME" run -f "$dir/pods.yaml" 2>&1); code=$?
[ $code = 0 ] && grep -q "engine pods-generation-0-a1-0 has joined" <<<"$out" &&
  grep -q "engine pods-generation-0-a1-1 has joined" <<<"$out" && ok "two engines of one pod" ||
  bad "two engines of one pod: code $code" "$out"
equal pods paid $steps

# Steps that overlap.
async="$wide policy.generation.max_running_samples=4 grpo.async_grpo.enabled=true
  loss_fn.use_importance_sampling_correction=true"
check "exact versions" "$TRIREME" launch --nproc-per-node 2 --engines 2 -- $(split_args exact 2 $async $tp2)
check "again, with one engine" "$TRIREME" launch --nproc-per-node 2 --engines 1 -- $(split_args again 2 $async $tp2)
equal again exact $steps
check "exact: ages" ages exact
for kept in true false; do
  for buffer in 1 0; do
    name=flight-$kept-$buffer
    check "in flight, recomputed $kept, second copy $buffer" env TRIREME_ENGINE_SECOND_BUFFER=$buffer \
      "$TRIREME" launch --nproc-per-node 2 --engines 1 -- $(split_args $name 2 $async $tp2 \
        grpo.async_grpo.in_flight_weight_updates=true \
        grpo.async_grpo.recompute_kv_cache_after_weight_updates=$kept)
    check "$name: ages" ages $name
    check "$name: equal bits where one set of weights made an answer" no_other_bits $name
  done
done

# One of an engine's ranks dies: it is started again whole, and the run needs what it had.
for fault in kill@2:fetching kill@2:transfer kill@2:applying kill@3:generation cut@2; do
  name="fault-${fault//[@:]/-}"
  out=$(TRIREME_ENGINE_FAULT=$fault "$TRIREME" launch --nproc-per-node 2 --engines 1 -- \
    $(split_args "$name" 2 $wide $tp2) 2>&1) && ok "$fault: the run goes on" || bad "$fault" "$out"
  grep -q "on purpose" <<<"$out" && ok "$fault: it happened" || bad "$fault: nothing happened" "$out"
  equal "$name" tp2 $steps
done
# signalled NAME SIGNAL: rank 1 of the engine gets it when it has generated.
signalled() {
  local name=$1 signal=$2 pid
  "$TRIREME" launch --nproc-per-node 2 --engines 1 -- \
    $(split_args "$name" 2 $wide $tp2 $far_deadline grpo.max_num_steps=12) >"$dir/out" 2>&1 & pid=$!
  await 240 grep -q '"step":2' "$dir/$name-logs/train.jsonl" ||
    { bad "$name: no second step" "$(cat "$dir/out")"; return; }
  local follower
  for follower in $(children_of $pid); do
    tr '\0' '\n' <"/proc/$follower/environ" | grep -qx TRIREME_ENGINE_NAME=engine-0 &&
      tr '\0' '\n' <"/proc/$follower/environ" | grep -qx RANK=1 && kill -$signal $follower
  done
  wait $pid && ok "$name: the run goes on" || bad "$name" "$(cat "$dir/out")"
}
signalled follower-killed 9
grep -q "rank 1 of engine-0 ended with signal 9 (Killed); it is started again" "$dir/out" &&
  ok "says which rank of which engine" || bad "says which rank of which engine" "$(cat "$dir/out")"
check "longer, on the same devices" "$TRIREME" launch --nproc-per-node 2 -- \
  $(split_args longer 2 $tp2 grpo.max_num_steps=12)
equal follower-killed longer 12
# A rank that sends dies: the engine leaves by itself, all of it.
name=sender-killed
out=$(TRIREME_FAULT="kill@2:1:training" "$TRIREME" launch --nproc-per-node 2 --engines 1 -- \
  $(split_args $name 2 $wide $tp2 $far_deadline) 2>&1)
code=$?
[ $code = 137 ] && grep -q "rank 1 failed first (signal 9" <<<"$out" && ok "a rank that sends is killed" ||
  bad "a rank that sends is killed: code $code" "$out"
check "and the run goes on" "$TRIREME" launch --nproc-per-node 2 --engines 1 -- $(split_args $name 2 $wide $tp2)
equal $name tp2 $steps

# Mistakes.
refused() {  # NAME SENTENCE COMMAND...
  local name=$1 sentence=$2 out code; shift 2
  out=$("$@" 2>&1); code=$?
  [ $code = 10 ] && grep -q "$sentence" <<<"$out" && ok "refused: $name" || bad "refused: $name: code $code" "$out"
}
refused "heads that do not divide" "tensor_parallel_size 8: an engine cannot split the model" "$TRIREME" launch \
  --nproc-per-node 2 --engines 1 -- $(split_args refused 2 $apart $size=8 $tp2)
refused "experts of a dense model" "expert_parallel_size 2: the model of .* has no experts" "$TRIREME" launch \
  --nproc-per-node 2 --engines 1 -- $(split_args refused 2 $wide $tp2 policy.generation.expert_parallel_size=2)
refused "experts that do not divide" "3 does not divide the 2 tensor ranks of an engine" "$TRIREME" launch \
  --nproc-per-node 2 --engines 1 -- $(split_args refused 2 $wide $tp2 policy.generation.expert_parallel_size=3)
refused "half an engine" "an engine has 2 ranks .* and 3 processes were started together" env MASTER_PORT=1 "$TRIREME" \
  launch --nproc-per-node 3 -- engine $(split_args refused 2 $wide $tp2 | sed 's/^train //')
finish
