#!/usr/bin/env bash
# Whole runs that share optimizer state, gradients and weights among their ranks, each as configured: the numbers of
# today's strategy, equal bits of sampler and loss, resumes, a strategy that goes on where another has stopped, a rank
# that dies, and what is refused.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_fixture
"$TRIREME" init-model --out "$dir/model" --hidden 64 --layers 4 --heads 4 --kv-heads 4 --head-dim 16 --intermediate 64 \
  >/dev/null
ddp=policy.megatron_cfg.distributed_data_parallel_config
# run NAME RANKS STRATEGY [overrides...]; dtensor: policy.dtensor_cfg; neither: no back-end, which shares as optim does
run() {
  local name=$1 ranks=$2 strategy=$3; shift 3
  local back_end="policy.megatron_cfg.enabled=true $ddp.data_parallel_sharding_strategy=$strategy"
  [ "$strategy" = dtensor ] && back_end="policy.dtensor_cfg.enabled=true"
  [ "$strategy" = neither ] && back_end="policy.dtensor_cfg.enabled=false"
  "$TRIREME" launch --nproc-per-node "$ranks" -- $(run_args "$name" grpo.val_period=0 grpo.val_at_start=false \
    cluster.device=cpu cluster.gpus_per_node="$ranks" $back_end grpo.max_num_steps=4 \
    loss_fn.reference_policy_kl_penalty=0.05 policy.generation.max_running_samples=8 \
    policy.generation.kv_cache_tokens=400 "$@")
}
# same NAME OTHER: losses and gradient norms of both logs within 1e-5.
same() {
  python3 - "$dir" "$1" "$2" <<'PY'
import json, sys
def rows(name):
    return [x for x in map(json.loads, open(f"{sys.argv[1]}/{name}-logs/train.jsonl")) if "train/loss" in x]
one, other = rows(sys.argv[2]), rows(sys.argv[3])
keys = ["train/loss", "train/grad_norm", "train/reward"]
pairs = [(a[k], b[k]) for a, b in zip(one, other) for k in keys if k in a]
worst = max(abs(a - b) / max(abs(a), 1e-2) for a, b in pairs)
print(f"{len(pairs)} numbers, {worst:.1e} apart at most")
sys.exit(0 if len(one) == len(other) >= 3 and len(pairs) >= 6 and worst <= 1e-4 else 1)
PY
}
check "GRPO, optim" run optim 2 optim
check "GRPO, neither back-end" run neither 2 neither checkpointing.enabled=false
for strategy in no_shard optim_grads optim_grads_params dtensor; do
  check "GRPO, $strategy" run $strategy 2 $strategy
  out=$(sound $strategy 4) && ok "$strategy: $out" || bad "$strategy: $out"
  like=optim; [ $strategy = dtensor ] && like=neither  # the back-ends' optimizers have other settings
  out=$(same $like $strategy) && ok "$strategy as $like: $out" || bad "$strategy as $like" "$out"
done
# With ranks that split the model, or sequences.
tp2=policy.megatron_cfg.tensor_model_parallel_size=2 cp2=policy.megatron_cfg.context_parallel_size=2
check "GRPO, optim on tp2" run optim_tp2 4 optim $tp2
check "GRPO, optim_grads on tp2" run grads_tp2 4 optim_grads $tp2 checkpointing.enabled=false
check "GRPO, optim_grads_params on tp2" run params_tp2 4 optim_grads_params $tp2
check "GRPO, dtensor_cfg on tp2" run dtensor_tp2 4 dtensor policy.dtensor_cfg.tensor_parallel_size=2 \
  checkpointing.enabled=false
for name in grads_tp2 params_tp2 dtensor_tp2; do
  out=$(sound $name 4) && ok "$name: $out" || bad "$name: $out"
  [ $name = dtensor_tp2 ] && continue
  out=$(same optim_tp2 $name) && ok "$name as optim: $out" || bad "$name as optim" "$out"
done
check "GRPO, optim_grads_params on cp2" run params_cp2 4 optim_grads_params $cp2 checkpointing.enabled=false
out=$(sound params_cp2 4) && ok "params_cp2: $out" || bad "params_cp2: $out"

# Two steps, then the rest: with the same strategy bit for bit, with another at all.
check "two steps" run again 2 optim_grads_params grpo.max_num_steps=2
cp -r "$dir/again" "$dir/other"
check "the rest of them" run again 2 optim_grads_params
[ "$(weights again 4)" = "$(weights optim_grads_params 4)" ] && ok "resumed: weights and moments bit for bit" ||
  bad "a resume"
check "the rest of them under no_shard" run other 2 no_shard
sound other 2 >/dev/null; [ -d "$dir/other/step_4" ] && ok "no_shard went on with what optim_grads_params had" ||
  bad "no_shard went on"
check "a step more on tp2, optim_grads" run other 4 optim_grads $tp2 grpo.max_num_steps=5
[ -d "$dir/other/step_5" ] && ok "optim_grads on tp2 went on with what no_shard had" || bad "optim_grads went on"

# A rank that dies is named, and the run that goes on is the one that was not disturbed.
run killed 2 optim_grads_params grpo.max_num_steps=200 $far_deadline >"$dir/out" 2>&1 & launcher=$!
await 240 test -d "$dir/killed/step_2"
victim=$(pgrep -f "logger.log_dir=$dir/killed-logs" | while read -r pid; do
  grep -qz "^RANK=1\$" "/proc/$pid/environ" 2>/dev/null && echo "$pid"; done | head -1)
kill -9 "$victim"; SECONDS=0; wait $launcher
[ $SECONDS -le $soon ] && grep -q "rank 1" "$dir/out" && ok "a killed rank is named" ||
  bad "a killed rank ($SECONDS s)" "$(cat "$dir/out")"
for step in "$dir"/killed/step_*; do [ "${step##*_}" -le 3 ] || rm -rf "$step"; done
check "the run that was killed" run killed 2 optim_grads_params
[ "$(weights killed 4)" = "$(weights optim_grads_params 4)" ] && ok "killed and resumed: bit for bit" ||
  bad "killed and resumed"

# Fine-tuning, whose weights are whole for a checkpoint only.
sft() {
  local name=$1 strategy=$2; shift 2
  "$TRIREME" launch --nproc-per-node 2 -- train --config configs/quickstart_sft.yaml \
    policy.model_name="$dir/model" data.train.data_path="$dir/task/warm_start.jsonl" \
    data.train.split_validation_size=10 checkpointing.enabled=true checkpointing.checkpoint_dir="$dir/$name" \
    checkpointing.save_period=2 logger.log_dir="$dir/$name-logs" logger.prometheus.enabled=false logger.report=false \
    cluster.device=cpu cluster.gpus_per_node=2 policy.megatron_cfg.enabled=true \
    $ddp.data_parallel_sharding_strategy=$strategy sft.max_num_steps=4 sft.val_period=2 sft.val_batches=1 \
    policy.train_global_batch_size=16 policy.train_micro_batch_size=4 "$@"
}
check "SFT, optim" sft sft_optim optim
check "SFT, optim_grads_params" sft sft_params optim_grads_params
cp -r "$dir/sft_params" "$dir/sft_again"; rm -rf "$dir/sft_again/step_4"
check "SFT, its last steps again" sft sft_again optim_grads_params
[ "$(weights sft_params 4)" = "$(weights sft_again 4)" ] && ok "SFT resumed: bit for bit" || bad "an SFT resume"
python3 - "$dir" <<'PY' && ok "SFT: losses, gradient norms and validation of optim" || bad "the losses of SFT"
import json, sys
def rows(name):
    return [x for x in map(json.loads, open(f"{sys.argv[1]}/{name}-logs/train.jsonl")) if "train/loss" in x]
one, other = rows("sft_optim"), rows("sft_params")
keys = ["train/loss", "train/grad_norm", "validation/loss"]
pairs = [(a[k], b[k]) for a, b in zip(one, other) for k in keys if k in a]
sys.exit(0 if len(one) == len(other) == 4 and len(pairs) >= 9 and
         all(abs(a - b) <= 1e-5 * abs(a) for a, b in pairs) else 1)
PY

# What cannot be, in one sentence before any weight is read; what a NeMo-RL file says of a back-end that it does not
# use is passed over.
"$TRIREME" train --config configs/quickstart.yaml cluster.device=cpu cluster.gpus_per_node=2 \
  policy.megatron_cfg.enabled=true policy.megatron_cfg.pipeline_model_parallel_size=2 \
  $ddp.data_parallel_sharding_strategy=optim_grads >"$dir/out" 2>&1 && bad "stages were accepted"
grep -q "optim_grads needs policy.megatron_cfg.pipeline_model_parallel_size 1, not 2" "$dir/out" &&
  ok "stages take no_shard or optim" || bad "stages" "$(cat "$dir/out")"
check "NeMo-RL's default with stages" run nemo_rl 2 optim_grads_params $ddp.use_custom_fsdp=false \
  grpo.max_num_steps=1 policy.megatron_cfg.pipeline_model_parallel_size=2
finish
