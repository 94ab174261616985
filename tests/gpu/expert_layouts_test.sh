#!/usr/bin/env bash
# Experts over ranks of several stages, and shared by width, on four GPUs: whole runs with no token of other bits, one
# rank's first step, a replica that has nothing left while the other has, over peer memory and NCCL, a resume, a rank
# that dies.
#   TRIREME=build/cuda/trainer/cli/trireme tests/gpu/expert_layouts_test.sh
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
"$TRIREME" init-model --out "$dir/model" --family qwen3_moe --hidden 512 --layers 4 --heads 8 --kv-heads 4 \
  --head-dim 64 --intermediate 1024 --experts 8 --experts-per-token 2 --expert-width 256 >/dev/null
"$TRIREME" init-task addition --out "$dir/task" --smallest 0 --largest 19 --warm-start 50 --held-out 20 >/dev/null
# run NAME RANKS [AXIS=SIZE...] [overrides...]: axes are tensor, pipeline, context, expert, expert_tensor.
run() {
  local name=$1 ranks=$2 word overrides=(); shift 2
  for word in "$@"; do
    case $word in
      tensor=* | pipeline=* | expert=*)
        overrides+=("policy.megatron_cfg.${word%%=*}_model_parallel_size=${word#*=}") ;;
      context=* | expert_tensor=*) overrides+=("policy.megatron_cfg.${word%%=*}_parallel_size=${word#*=}") ;;
      *) overrides+=("$word") ;;
    esac
  done
  "$TRIREME" launch --nproc-per-node "$ranks" -- $(run_args "$name" grpo.val_period=0 grpo.val_at_start=false \
    cluster.device=cuda policy.precision=bfloat16 cluster.gpus_per_node="$ranks" policy.dtensor_cfg.enabled=false \
    policy.megatron_cfg.enabled=true grpo.max_num_steps=4 loss_fn.reference_policy_kl_penalty=0.05 \
    cluster.collective_timeout_s=40 "${overrides[@]}")
}
virtual=policy.megatron_cfg.virtual_pipeline_model_parallel_size=2
# Lanes and replicas without rows: responses of many lengths, and places for some of them.
uneven="policy.generation.forced_lengths=synthetic:8x4:mean=7:max=12:prompt=6 policy.generation.max_running_samples=12"
for layout in "one 1" "pp2ep2 4 pipeline=2 expert=2" "pp2ep2-virtual 4 pipeline=2 expert=2 $virtual" \
  "pp2ep2-uneven 4 pipeline=2 expert=2 $uneven" "pp2ep2-both 4 pipeline=2 expert=2 $virtual $uneven" \
  "pp2tp2ep2 4 pipeline=2 tensor=2 expert=2" "pp2cp2ep2 4 pipeline=2 context=2 expert=2" \
  "pp2ep2-large 4 pipeline=2 expert=2 policy.train_micro_batch_size=32 policy.train_global_batch_size=32" \
  "etp2 2 expert_tensor=2" "etp4 4 expert_tensor=4" "ep2etp2 4 expert=2 expert_tensor=2" \
  "tp2etp2 4 tensor=2 expert_tensor=2" "pp2etp2 4 pipeline=2 expert_tensor=2"; do
  set -- $layout
  check "GRPO on $1" run "$@"
  out=$(sound "$1" 4) && ok "$1: $out" || bad "$1: $out"
done
for name in pp2ep2 pp2ep2-virtual; do
  [ -n "$(first one)" ] && [ "$(first $name)" = "$(first one)" ] &&
    ok "the first step of $name is one rank's: $(first $name)" ||
    bad "the first step of $name: $(first $name), one rank's $(first one)"
done
# Neither ep nor pp changes what etp has.
for name in ep2etp2 pp2etp2; do
  [ -n "$(first etp2)" ] && [ "$(first $name)" = "$(first etp2)" ] &&
    ok "the first step of $name is that of etp2: $(first $name)" ||
    bad "the first step of $name: $(first $name), that of etp2 $(first etp2)"
done
[ "$(first pp2ep2-both)" = "$(first pp2ep2-uneven)" ] && ok "uneven lanes: virtual stages change nothing" ||
  bad "uneven lanes: $(first pp2ep2-both), without virtual stages $(first pp2ep2-uneven)"
NCCL_P2P_DISABLE=1 check "GRPO on pp2ep2 over NCCL" run pp2ep2-nccl 4 pipeline=2 expert=2
out=$(sound pp2ep2-nccl 4) && ok "pp2ep2 over NCCL: $out" || bad "pp2ep2 over NCCL: $out"
check "two steps on pp2ep2" run again 4 pipeline=2 expert=2 grpo.max_num_steps=2
check "the rest of them" run again 4 pipeline=2 expert=2
[ "$(weights again 4)" = "$(weights pp2ep2 4)" ] && ok "resumed on pp2ep2: weights and moments bit for bit" ||
  bad "a resume on pp2ep2"
# In generation, where an idle lane waits for others too.
SECONDS=0
TRIREME_FAULT=kill@2:3:generation run killed 4 pipeline=2 expert=2 checkpointing.enabled=false \
  cluster.collective_timeout_s=900 >"$dir/out" 2>"$dir/err"
code=$?
[ $code = 137 ] && [ $SECONDS -le 120 ] && grep -q "rank 3 (.*) has died in phase generation: signal 9" "$dir/err" &&
  ok "kill -9 of an expert rank of the last stage: code $code, $SECONDS s" ||
  bad "kill -9 of an expert rank of the last stage: code $code, $SECONDS s" "$(cat "$dir/err")"
finish
