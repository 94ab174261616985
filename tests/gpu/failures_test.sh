#!/usr/bin/env bash
# What two ranks on two GPUs do, as replicas, tensor ranks and stages, when one fails: a kill, a NaN, no memory left, a
# host and a stream that stand still.
# Both leave within the deadline of the configuration, after a kill within seconds whatever the deadline is, and the
# first cause is named with rank, phase and operation.
#   TRIREME=build/cuda/trainer/cli/trireme tests/gpu/failures_test.sh
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
deadline=${DEADLINE:-20}  # seconds
"$TRIREME" init-model --out "$dir/model" --hidden 128 --layers 2 --heads 2 --kv-heads 1 --head-dim 64 \
  --intermediate 256 >/dev/null
"$TRIREME" init-task addition --out "$dir/task" --smallest 0 --largest 19 --warm-start 50 --held-out 20 >/dev/null
layout=""  # overrides of all runs
run() { # run NAME [overrides...]
  "$TRIREME" launch --nproc-per-node 2 -- $(run_args "$@" grpo.max_num_steps=100000 checkpointing.enabled=false \
    cluster.collective_timeout_s=$deadline cluster.device=cuda policy.precision=bfloat16 \
    cluster.gpus_per_node=2 grpo.val_period=0 $layout) >"$dir/out" 2>"$dir/err"
}
# judge NAME CODE SECONDS TEXT...: the last run ended with CODE after at most SECONDS and said every TEXT.
judge() {
  local name=$1 expected=$2 limit=$3 text missing=""; shift 3
  for text in "$@"; do grep -q -- "$text" "$dir/err" || missing="$missing '$text'"; done
  if [ $code = "$expected" ] && [ $seconds -le "$limit" ] && [ -z "$missing" ]
  then ok "$name: code $code, $seconds s after step 1"
  else bad "$name: code $code after $seconds s, not said:$missing" "$(cat "$dir/err")"; fi
}
# fault FAULT: runs with it; seconds are counted from the end of the first step.
fault() {
  : >"$dir/out"
  TRIREME_FAULT=$1 run "fault-${1%%@*}" & local pid=$!
  for _ in $(seq 1 1200); do grep -q "step 1/" "$dir/out" && break; sleep 0.1; done
  SECONDS=0; wait $pid; code=$?; seconds=$SECONDS
}
deadline=900 run killed & pid=$!
for _ in $(seq 1 1200); do grep -q "step 2/" "$dir/out" && break; sleep 0.1; done
grep -q "step 2/" "$dir/out" || bad "a run without a fault takes two steps" "$(cat "$dir/err")"
for launcher in $(children_of $pid); do for child in $(children_of "$launcher"); do
  tr '\0' '\n' <"/proc/$child/environ" | grep -q '^RANK=1$' && kill -9 "$child"
done; done
SECONDS=0; wait $pid; code=$?; seconds=$SECONDS
judge "kill -9" 137 30 "rank 1 failed first (signal 9" "rank 0 .*rank 1 has died in phase .*: signal 9 (Killed)"
fault nan@2:1; judge "a NaN" 21 $((deadline + 20)) "rank 1 failed first" \
  "rank 1 on .* in phase training: the log-prob of a token of sample .* is not finite in the loss" \
  "rank 0 .*another rank has failed. rank 1 on\|failed: .*rank 1 on"
fault memory@2:1; judge "no memory" 1 $((deadline + 20)) "rank 1 failed first" "rank 1 on .* out of memory in phase \
training: 1048576.00 GiB were asked for where .* were free; lower the micro-batch"
fault hang@2:1; judge "a host that stands still" 30 $((3 * deadline + 20)) "rank 1 failed first (exit code 30" \
  "rank 1 is stuck" "in phase training" "rank 1 on .* has not come"
fault device-hang@2:1; judge "a stream that stands still" 30 $((3 * deadline + 20)) \
  "rank 1 failed first (exit code 30" "rank 1 is stuck" "in phase" "rank 1 on .* has not come"
# Under tensor ranks and stages: who fails in training is named, and the one that waits for its rows leaves, whose
# exchanges are kernels, copies and words in memory instead of NCCL's. A log-prob that is not finite is seen by whoever
# has the loss: each tensor rank, of stages the last one.
# SPLITS="tp2": only these.
mega=policy.megatron_cfg
"$TRIREME" init-model --out "$dir/split" --hidden 256 --layers 2 --heads 4 --kv-heads 2 --head-dim 64 \
  --intermediate 512 >/dev/null
for split in ${SPLITS-tp2 pp2}; do
  layout="policy.model_name=$dir/split policy.dtensor_cfg.enabled=false $mega.enabled=true"
  [ $split = tp2 ] && layout="$layout $mega.tensor_model_parallel_size=2" ||
    layout="$layout $mega.pipeline_model_parallel_size=2"
  fault nan@2:1; judge "$split, a NaN" 21 $((deadline + 20)) \
    "rank [01] .*in phase training: the log-prob of a token of sample .* is not finite in the loss"
  fault memory@2:1; judge "$split, no memory" 1 $((deadline + 20)) "rank 1 failed first" \
    "rank 1 on .* out of memory in phase training: 1048576.00 GiB were asked for"
  fault hang@2:1; judge "$split, a host that stands still" 30 $((3 * deadline + 20)) \
    "rank 1 failed first (exit code 30" "rank 1 is stuck" "in phase training" "rank 1 on .* has not come"
  fault device-hang@2:1; judge "$split, a stream that stands still" 30 $((3 * deadline + 20)) \
    "rank 1 failed first (exit code 30" "rank 1 is stuck" "in phase" "rank 1 on .* has not come"
done
finish
