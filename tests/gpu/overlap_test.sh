#!/usr/bin/env bash
# Two ranks, gradients reduced while backward runs and weights gathered while the next forward does, against neither:
# the same weights, moments and log after six steps, bit for bit. Over NCCL on two GPUs; DEVICE=cpu: over Gloo.
#   TRIREME=build/cuda/trainer/cli/trireme tests/gpu/overlap_test.sh
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
device=${DEVICE:-cuda}
precision=bfloat16; [ "$device" = cuda ] || precision=float32
"$TRIREME" init-model --out "$dir/model" --hidden 768 --layers 6 --heads 12 --kv-heads 12 --head-dim 64 \
  --intermediate 2048 >/dev/null
"$TRIREME" init-task addition --out "$dir/task" --smallest 0 --largest 19 --warm-start 50 --held-out 20 >/dev/null
key=policy.megatron_cfg.distributed_data_parallel_config
run() { # run NAME true|false
  local name=$1 overlap=$2
  "$TRIREME" launch --nproc-per-node 2 -- $(run_args "$name" cluster.device=$device policy.precision=$precision \
    cluster.gpus_per_node=2 policy.dtensor_cfg.enabled=false policy.megatron_cfg.enabled=true \
    $key.overlap_grad_reduce=$overlap $key.overlap_param_gather=$overlap)
}
check "a run that overlaps" run overlapped true
check "a run that does not" run plain false
early() {
  grep -o '"performance/buckets_reduced_in_backward":[0-9.]*' "$dir/$1-logs/train.jsonl" | cut -d: -f2 | sort -u |
    tr '\n' ' '
}
[ "$(early plain)" = "0.0 " ] && ! grep -q 0.0 <<<"$(early overlapped)" &&
  ok "buckets reduced in backward: $(early overlapped)" ||
  bad "buckets reduced in backward: $(early overlapped), without overlap $(early plain)"
grep -q '"train/grad_norm":0.0[,}]' "$dir/plain-logs/train.jsonl" && bad "there are gradients" ||
  ok "there are gradients"
check "the same weights and moments" [ "$(weights overlapped 6)" = "$(weights plain 6)" ]
log() { values "$1" | tr -s ,; }
[ -n "$(log plain)" ] && [ "$(log overlapped)" = "$(log plain)" ] && ok "the same log" ||
  bad "the same log" "$(diff <(log overlapped | tr , "\n") <(log plain | tr , "\n"))"
# Shared gradients and weights: the bits of shared state with one micro-batch, and less memory, whatever is on its way.
if [ "$device" = cuda ]; then
  shared() { # shared STRATEGY MICRO-BATCHES: bytes at the most and what the weights are
    "$TRIREME" launch --nproc-per-node 2 -- bench train --shape qwen3-1.7b --layers 8 --sharding "$1" --tokens 2048 \
      --sequences 4 --micro-batches "$2" --repeats 3 --json "$dir/$1-$2.json" >"$dir/out" 2>"$dir/err" &&
      python3 -c 'import json, sys; r = json.load(open(sys.argv[1]))
print(r["peak_memory_bytes"], r["weights_fingerprint"])' "$dir/$1-$2.json"
  }
  whole=$(shared optim 1) && parts=$(shared optim_grads_params 1) || bad "one micro-batch" "$(cat "$dir/err")"
  [ "${whole#* }" = "${parts#* }" ] && ok "shared weights: the same weights" || bad "shared weights: $parts, not $whole"
  whole=$(shared optim 4) && parts=$(shared optim_grads_params 4) || bad "micro-batches" "$(cat "$dir/err")"
  [ "${parts% *}" -lt "${whole% *}" ] && ok "shared weights: ${parts% *} bytes, less than ${whole% *}" ||
    bad "shared weights take ${parts% *} bytes, not less than ${whole% *}"
fi
finish
