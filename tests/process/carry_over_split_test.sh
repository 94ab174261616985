#!/usr/bin/env bash
# Carry-over of whole runs whose model ranks share in generation: tensor ranks, stages, both, experts, several replicas,
# and generation in another layout than training's. Ages; each token with the bits of the weights that drew it; kept
# keys, dynamic sampling, a rank that is killed; PPO; what is refused, in one sentence.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_split_fixture
make_mixture
m=policy.megatron_cfg
steps=4
common="cluster.device=cpu grpo.max_num_steps=$steps grpo.val_period=2 $m.enabled=true
  logger.dump_steps=[1,2,3,4] policy.train_global_batch_size=32 $(carry_args grpo async_grpo)"
tp2=$m.tensor_model_parallel_size=2 pp2=$m.pipeline_model_parallel_size=2
mixture="$m.expert_model_parallel_size=2 policy.model_name=$dir/mixture"
size=policy.generation.tensor_parallel_size
kept=grpo.async_grpo.recompute_kv_cache_after_weight_updates=false
mixed='sum(x["train/mixed_context_tokens"] for x in rows) > 0'

# carried NAME RANKS [overrides...]
carried() {
  local name=$1 ranks=$2; shift 2
  check "$name" "$TRIREME" launch --nproc-per-node "$ranks" -- $(split_args "$name" "$ranks" "$@")
}
# Log-probs of the sampler and of the loss have equal bits. Sums over tensor ranks have bits of their own, so that of
# these one rank cannot tell.
carried tp2 2 $tp2
check "tp2: older tokens, no token with other bits" aged tp2 $steps equal
carried tp2dp2 4 $tp2
check "tp2dp2: older tokens, no token with other bits" aged tp2dp2 $steps equal
carried tp2pp2 4 $tp2 $pp2
check "tp2pp2: older tokens, no token with other bits" aged tp2pp2 $steps equal
carried pp2 2 $pp2
check "pp2: older tokens, no token with other bits" aged pp2 $steps equal
check "pp2: each token has the bits of a packed forward of its weights, older ones too" by_version pp2 equal $steps
carried ep2 2 $mixture
check "ep2: older tokens, no token with other bits" aged ep2 $steps equal
check "ep2: each token has the bits of a packed forward of its weights, older ones too" by_version ep2 equal \
  $((2 * steps)) mixture
carried kept 2 $pp2 $kept
check "kept keys are marked and not compared" aged kept $steps "equal and $mixed"
carried dynamic 2 $pp2 grpo.use_dynamic_sampling=true grpo.dynamic_sampling_max_gen_batches=50
check "dynamic sampling: whole steps" aged dynamic $steps 'equal and all(x["train/num_valid_samples"] == 32
  for x in rows)'

# Another layout: with another number of tensor ranks each token's previous log-prob comes from a pass of training's.
carried folded 2 $pp2 policy.generation.fold_pipeline=true
check "folded: older tokens, no token with other bits" aged folded $steps equal
check "folded: each token has the bits of a packed forward of its weights" by_version folded equal $steps
carried wider 2 $size=2
check "generation tp 2 of training tp 1: older tokens, log-probs with bits of their own" aged wider $steps "not equal"
carried narrower 2 $tp2 $size=1 $kept
check "generation tp 1 of training tp 2, kept keys" aged narrower $steps "not equal and $mixed"
strategy=$m.distributed_data_parallel_config.data_parallel_sharding_strategy
carried shared 2 $size=2 $strategy=optim_grads_params $kept
check "weights that data parallel ranks share, kept keys" aged shared $steps "not equal and $mixed"

# A rank that follows dies where its leader tells it what to do; the run goes on from the checkpoint.
out=$(TRIREME_FAULT="kill@3:1:generation" "$TRIREME" launch --nproc-per-node 2 -- \
  $(split_args killed 2 $tp2 $far_deadline) 2>&1); code=$?
[ $code = 137 ] && grep -q "rank 1 failed first (signal 9" <<<"$out" && ok "rank 1 is killed" ||
  bad "rank 1 is killed: code $code" "$out"
compgen -G "$dir/killed/step_*/ledger.bin" >/dev/null && ok "a checkpoint has its ledger" ||
  bad "a checkpoint has its ledger"
carried killed 2 $tp2
check "killed and resumed: every step once" aged killed $steps equal
check "on with stages" "$TRIREME" launch --nproc-per-node 2 -- $(split_args killed 2 $pp2 grpo.max_num_steps=6)
check "on with stages: every step once" aged killed 6 equal

# PPO, whose first two steps train the critic alone.
check "PPO" "$TRIREME" launch --nproc-per-node 2 -- $(ppo_args ppo cluster.device=cpu cluster.gpus_per_node=2 \
  $m.enabled=true $pp2 policy.train_global_batch_size=32 $(carry_args ppo async_ppo))
ppo_ages() {
  python3 - "$dir/ppo-logs/train.jsonl" <<'PY'
import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "critic/loss" in x]
print([(x["train/weight_version"], x["train/max_trajectory_age"], x["train/stale_tokens"]) for x in rows])
trained = [x for x in rows if "train/loss" in x]
sys.exit(0 if [x["train/weight_version"] for x in rows] == [0, 0, 0, 1, 2, 3] and len(trained) == 4 and
         all(x["train/max_trajectory_age"] <= 1 for x in rows) and sum(x["train/stale_tokens"] for x in rows) > 0 and
         all(x["train/logprob_mismatch_tokens"] == 0 for x in trained) else 1)
PY
}
check "PPO: older tokens, no token with other bits" ppo_ages

out=$("$TRIREME" launch --nproc-per-node 2 -- $(split_args refused 2 $mixture $size=2) 2>&1) &&
  bad "experts in another layout" "was accepted" ||
  { grep -qF "experts, which generate as they are trained" <<<"$out" && ok "experts in another layout are refused" ||
    bad "experts in another layout" "$out"; }
finish
