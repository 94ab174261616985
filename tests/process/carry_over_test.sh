#!/usr/bin/env bash
# Carry-over of whole runs: ages, each token with the bits of the weights that drew it, on one and on two ranks, kept
# keys, dynamic sampling, kill -9 at random points; what is refused, in one sentence.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_fixture

carry=$(carry_args grpo async_grpo)

check "carry-over on one rank" "$TRIREME" $(run_args one $carry $dumped)
check "older tokens, no token with other bits" aged one 6 \
  'equal and all(x["train/mixed_context_tokens"] == 0 for x in rows)'
check "each token has the bits of a packed forward of its weights, older ones too" by_version one equal
check "the same on two ranks" "$TRIREME" launch --nproc-per-node 2 -- $(run_args two $carry)
check "on two ranks too" aged two 6 'equal and all(x["train/num_generated_samples"] == 32 for x in rows)'
check "ratio_from generation" "$TRIREME" $(run_args sampler $carry grpo.async_grpo.ratio_from=generation \
  loss_fn.use_importance_sampling_correction=false)
check "without a pass" aged sampler 6 equal
check "kept keys" "$TRIREME" $(run_args kept $carry $dumped \
  grpo.async_grpo.recompute_kv_cache_after_weight_updates=false)
check "are marked and not compared" aged kept 6 'equal and sum(x["train/mixed_context_tokens"] for x in rows) > 0'
check "have other bits than a packed forward: it would be noticed" by_version kept differ
check "dynamic sampling" "$TRIREME" $(run_args dynamic $carry grpo.use_dynamic_sampling=true \
  grpo.dynamic_sampling_max_gen_batches=50)
check "replaces groups at once" aged dynamic 6 'equal and all(x["train/num_valid_samples"] == 32 for x in rows)'

# Killed at random points: no group is lost or doubled, so the data is where it would have been.
"$TRIREME" $(run_args whole) >/dev/null 2>&1
for attempt in $(seq 1 12); do
  "$TRIREME" $(run_args killed $carry) >/dev/null 2>"$dir/err" & pid=$!
  if [ "$attempt" -le 5 ]; then sleep "0.$((RANDOM % 900 + 100))"; kill -9 $pid 2>/dev/null; fi
  wait $pid 2>/dev/null && break
done
check "killed and resumed: every step once" aged killed 6 equal
prompts() {
  python3 -c 'import json,sys
state = json.load(open(sys.argv[1]))["state"]
print(state["prompts"]["epoch"], state["prompts"]["position"], state["next_sample_id"])' "$(
    find "$dir/$1/step_6" -maxdepth 1 -name '*.json' | head -1)"
}
[ "$(prompts killed)" = "$(prompts whole)" ] && ok "the same prompts as the run without it" ||
  bad "the prompts' place" "$(prompts killed), not $(prompts whole)"
[ -f "$dir/killed/step_3/ledger.bin" ] && ok "a checkpoint has its ledger" || bad "a checkpoint has its ledger"
check "goes on without carry-over" "$TRIREME" $(run_args killed grpo.max_num_steps=7)

# refused NAME SENTENCE OVERRIDES...: with one sentence, before anything starts.
refused() {
  local name=$1 sentence=$2 out; shift 2
  out=$("$TRIREME" $(run_args refused $carry) "$@" 2>&1) && { bad "$name" "was accepted"; return; }
  grep -qF "$sentence" <<<"$out" && ! [ -d "$dir/refused-logs" ] && ok "$name" || bad "$name" "$out"
}
refused "an age of 0" "0 leaves nothing to carry over" grpo.async_grpo.max_trajectory_age_steps=0
refused "without in-flight updates" "must be true for carry-over" grpo.async_grpo.in_flight_weight_updates=false
refused "with a forced ratio" "takes every ratio for 1" loss_fn.force_on_policy_ratio=true \
  grpo.async_grpo.ratio_from=generation policy.train_global_batch_size=32
refused "with early gradients" "is for strictly on-policy steps" grpo.early_gradients=true
refused "without the correction" "since older weights draw tokens" loss_fn.use_importance_sampling_correction=false
finish
