#!/usr/bin/env bash
# PPO whose steps overlap, and whose rollouts other processes generate, the critic on the actor's ranks and on its own:
# carry-over; in turn the bits of a run on the same devices; exact versions twice and killed; in flight with an engine
# that is killed, and on from the checkpoint; NeMo-RL's recipe with a tiny model; what is refused.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_fixture

# Responses end early and late, and a step has more of them than there are places: some are always under way.
many="policy.generation.max_running_samples=10 policy.generation.max_new_tokens=24
  policy.generation.stop_token_ids=[$(seq -s , 200 219)]"
apart="policy.generation.colocated.enabled=false $many"
async="ppo.async_ppo.enabled=true loss_fn.use_importance_sampling_correction=true"
flight="$async ppo.async_ppo.in_flight_weight_updates=true"

equal() {  # NAME OTHER STEP
  [ "$(both "$1" "$3")" = "$(both "$2" "$3")" ] && ok "$1: both models of $2, bit for bit" ||
    bad "$1: both models of $2"
}
# aged NAME STEPS ALONE WHAT: every step in order, of which the first ALONE train the critic alone and leave the version
# as it is; ages are bounded, no token has other bits, metrics are there, and what WHAT (python, of the rows) says
# holds.
aged() {
  python3 - "$dir/$1-logs/train.jsonl" "$2" "$3" "$4" <<'PY'
import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "critic/loss" in x]
steps, alone = int(sys.argv[2]), int(sys.argv[3])
print(f"{len(rows)} steps,", [(x["train/weight_version"], x["train/max_trajectory_age"], x["train/avg_trajectory_age"],
                               x["train/stale_tokens"], x["train/mixed_context_tokens"]) for x in rows])
versions = [x["train/weight_version"] for x in rows] == [max(0, s - alone) for s in range(steps)]
ages = all(0 <= x["train/avg_trajectory_age"] <= x["train/max_trajectory_age"] <= 1 for x in rows)
trained = [x for x in rows if "train/loss" in x]
bits = sum(x["train/logprob_mismatch_tokens"] for x in trained) == 0
names = ["critic/" + n for n in ("grad_norm", "lr", "values_mean", "values_min", "values_max", "returns_mean",
                                 "explained_var", "vf_clipfrac")]
names += ["timing/train/exposed_generation", "timing/train/value_inference", "timing/train/value_training"]
lacking = [n for n in names if any(n not in x for x in rows)]
print(versions, ages, len(trained), bits, lacking)
sys.exit(0 if versions and ages and bits and not lacking and len(trained) == steps - alone and
         eval("(" + sys.argv[4] + ")") else 1)
PY
}
older='sum(x["train/stale_tokens"] for x in rows) > 0'

# Carry-over.
check "carry-over" "$TRIREME" $(ppo_args carry $many $flight)
check "the critic's own steps first, then older tokens" aged carry 6 2 "$older and
  all(x['performance/ledger_groups_leased'] + x['performance/ledger_groups_complete'] <= 8 for x in rows)"
check "carry-over with kept keys" "$TRIREME" $(ppo_args kept $many $flight \
  ppo.async_ppo.recompute_kv_cache_after_weight_updates=false)
check "marked and not compared" aged kept 6 2 'sum(x["train/mixed_context_tokens"] for x in rows) > 0'
check "carry-over, a critic on its own rank" "$TRIREME" launch --critic-ranks 1 -- $(ppo_args carry-own $many $flight \
  ppo.async_ppo.ratio_from=generation loss_fn.use_importance_sampling_correction=false)
check "older tokens there too" aged carry-own 6 2 "$older"
TRIREME_FAULT=kill@5:0:training "$TRIREME" $(ppo_args carry-killed $many $flight) >/dev/null 2>&1; code=$?
[ $code = 137 ] && [ ! -d "$dir/carry-killed/step_5" ] && ok "killed in training" || bad "is not killed: code $code"
check "killed, and on" "$TRIREME" $(ppo_args carry-killed $many $flight)
check "every step once" aged carry-killed 6 2 'True'

# In turn with training: values that rank 0 computes while it waits are the same bits.
check "on the same devices" "$TRIREME" $(ppo_args plain $many $(paid))
check "in turn, slow rewards" "$TRIREME" launch --engines 1 -- $(ppo_args turn $apart $(paid 0.02))
equal turn plain 6
check "values while it waited" aged turn 6 2 'max(x["performance/values_under_generation"] for x in rows) > 0 and
  all(x["train/max_trajectory_age"] == 0 for x in rows)'
check "a critic on its own rank" "$TRIREME" launch --critic-ranks 1 -- $(ppo_args own $many)
check "in turn with it" "$TRIREME" launch --critic-ranks 1 --engines 2 -- $(ppo_args turn-own $apart)
equal turn-own own 6

# Exact versions.
exact='[x["train/max_trajectory_age"] for x in rows] == [x["train/avg_trajectory_age"] for x in rows] ==
  [0, 0, 0, 1, 1, 1] and all(x["train/spanning_samples"] == 0 for x in rows)'
check "exact versions" "$TRIREME" launch --engines 2 -- $(ppo_args exact $apart $async checkpointing.save_period=2)
check "each step of the actor by the weights one step before" aged exact 6 2 "$exact"
check "again, with one engine" "$TRIREME" launch --engines 1 -- $(ppo_args again $apart $async)
equal again exact 6
TRIREME_FAULT=kill@5:0:training "$TRIREME" launch --engines 2 -- $(ppo_args killed $apart $async) >/dev/null 2>&1
out=$("$TRIREME" launch --engines 2 -- $(ppo_args killed $apart $async) 2>&1) &&
  grep -q "[1-9][0-9]* complete groups of later steps come from the checkpoint" <<<"$out" &&
  ok "killed, and on with the groups that it had" || bad "killed, and on" "$out"
equal killed exact 6

# In flight, the critic on its own rank; an engine is killed meanwhile.
log="$dir/flight.err"
"$TRIREME" launch --critic-ranks 1 --engines 2 -- $(ppo_args flight $apart $flight $(paid 0.05)) >/dev/null 2>"$log" &
pid=$!
await 240 grep -q ": 2 are there" "$log" || bad "two engines have joined" "$(cat "$log")"
kill -9 "$(pgrep -P $pid -f " engine --config" | sort -n | tail -1)"
wait $pid && ok "in flight, an engine is killed: the run goes on" ||
  bad "in flight, an engine is killed" "$(cat "$log")"
check "ages and bits" aged flight 6 2 'all(x["timing/train/weight_sync"] >= 0 for x in rows)'
grep -q "engine-[01] ended with signal 9 (Killed); it is started again" "$log" && ok "it is named" ||
  bad "it is named" "$(cat "$log")"
check "it goes on from its checkpoint" "$TRIREME" launch --critic-ranks 1 --engines 1 -- $(ppo_args flight $apart \
  $flight $(paid) ppo.max_num_steps=8)
check "every step once" aged flight 8 2 'True'

# The recipe with its own keys, but for sizes: weights that two ranks share, an engine, two steps of lead.
recipe="train --config configs/ppo_gsm8k_1.5b.yaml policy.model_name=$dir/model data.apply_chat_template=false
  data.train.data_path=$dir/task/train.jsonl data.validation.data_path=$dir/task/held_out.jsonl
  data.train.input_key=input data.train.output_key=output data.validation.input_key=input
  data.validation.output_key=output data.train.prompt_file=null data.validation.prompt_file=null
  env.format.enabled=true env.format.pattern=(a|b|c|x|y|z|A|B|0|1|2|3) policy.max_total_sequence_length=64
  data.max_input_seq_length=40 $many policy.precision=float32 policy.train_global_batch_size=8
  ppo.num_prompts_per_step=16 ppo.max_num_steps=8 ppo.val_period=4 ppo.max_val_samples=20
  policy.generation.colocated.resources.gpus_per_node=1 policy.generation.kv_cache_tokens=4096
  cluster.gpus_per_node=3 cluster.collective_timeout_s=120 logger.prometheus.enabled=false logger.report=false
  checkpointing.checkpoint_dir=$dir/recipe logger.log_dir=$dir/recipe-logs"
engines="policy.generation.backend=vllm policy.generation.vllm_cfg.async_engine=true
  policy.generation.vllm_cfg.gpu_memory_utilization=0.4 env.math.math_verify_impl=hf_math_verify"
out=$("$TRIREME" launch --nproc-per-node 2 --engines 1 -- $recipe $engines 2>&1) && ok "the recipe runs" ||
  bad "the recipe runs" "$out"
grep -q "policy.generation.vllm_cfg has no effect here" <<<"$out" && ok "what has no effect is said" ||
  bad "what has no effect is said" "$out"
check "as it says: five steps of the critic, two of lead" aged recipe 8 5 'all(x["train/num_generated_samples"] == 16
  and x["performance/ledger_groups_leased"] + x["performance/ledger_groups_complete"] <= 2 * 16 for x in rows)'

refused() {  # NAME SENTENCE overrides...: in one sentence, before anything starts
  local name=$1 sentence=$2 out; shift 2
  out=$("$TRIREME" $(ppo_args refused $many) "$@" 2>&1) && { bad "$name" "was accepted"; return; }
  grep -qF "$sentence" <<<"$out" && ! [ -d "$dir/refused-logs" ] && ok "$name" || bad "$name" "$out"
}
refused "carry-over without in-flight updates" "ppo.async_ppo.in_flight_weight_updates: must be true for carry-over" \
  $async
refused "GRPO's key" "of a PPO run it is ppo.async_ppo.enabled" grpo.async_grpo.enabled=true
refused "the correction switched off" "must be true with ppo.async_ppo.enabled" $flight \
  loss_fn.use_importance_sampling_correction=false
refused "a lead without steps of the critic" "is for steps that train only the critic" $flight \
  ppo.policy_training_start_step=0 ppo.async_ppo.warmup_generation_lead_steps=2
finish
