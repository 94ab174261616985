#!/usr/bin/env bash
# Generation in another layout than training: folded stages give the run in place bit for bit, another number of tensor
# ranks makes previous log-probs a pass of their own; what cannot be is refused before weights load.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_split_fixture
# run NAME RANKS TP PP [overrides...], validated too: generation fills its weights for that.
run() { run_split "$1" "$2" "$3" "$4" grpo.val_period=2 grpo.val_at_start=true "${@:5}"; }
fold=policy.generation.fold_pipeline=true
size=policy.generation.tensor_parallel_size
# What the steps' log says: whether the phase takes time, bytes that the fullest rank fetched, tokens with other bits,
# and whether their log-probs are near (a copy of other weights is not).
refits() {
  python3 - "$dir/$1-logs/train.jsonl" <<'PY'
import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
took = all(0 < x["timing/train/prepare_for_generation/total"] < x["timing/train/total_step_time"] for x in rows)
print(len(rows), took, rows[-1]["performance/refit_bytes"],
      "equal bits" if all(x["train/logprob_mismatch_tokens"] == 0 for x in rows) else "other bits",
      "near" if all(x["train/token_mult_prob_error"] < 1.001 for x in rows) else "far")
PY
}
# Folded: layouts of (name, ranks, tp, pp, overrides), each against the same run in place.
while read -r name ranks tp pp more; do
  check "GRPO on $name" run "$name" "$ranks" "$tp" "$pp" $more
  check "GRPO on $name, folded" run "$name-folded" "$ranks" "$tp" "$pp" $fold $more
  [ -n "$(weights "$name" 4)" ] && [ "$(weights "$name-folded" 4)" = "$(weights "$name" 4)" ] &&
    ok "$name folded: weights and moments of the run in place" || bad "$name folded"
  out=$(refits "$name-folded")
  [[ "$out" == "4 True "*" equal bits near" && "$out" != *" 0.0 "* ]] && ok "$name folded: $out" ||
    bad "$name folded: $out"
done <<'EOF'
pp4 4 1 4
tp2pp2 4 2 2
virtual 2 1 2 policy.megatron_cfg.virtual_pipeline_model_parallel_size=2
uneven 2 1 2 policy.megatron_cfg.num_layers_in_first_pipeline_stage=3
pp2cp2 4 1 2 policy.megatron_cfg.context_parallel_size=2
EOF
check "two steps folded" run again 4 2 2 $fold grpo.max_num_steps=2
check "the rest of them in place" run again 4 2 2
[ "$(weights again 4)" = "$(weights tp2pp2 4)" ] && ok "a folded run goes on in place, bit for bit" ||
  bad "a folded run that went on in place"

# Another number of tensor ranks: other bits, said once, and a pass of their own.
while read -r name ranks tp pp more; do
  run "$name" "$ranks" "$tp" "$pp" $more >"$dir/out" 2>&1 && ok "GRPO on $name" ||
    bad "GRPO on $name" "$(cat "$dir/out")"
  grep -q "generation has tp .*, training tp .* a previous-log-prob pass runs every step" "$dir/out" &&
    ok "$name: says why log-probs have a pass of their own" || bad "$name: what it says" "$(cat "$dir/out")"
  out=$(refits "$name"); [[ "$out" == "4 True "*" other bits near" ]] && ok "$name: $out" || bad "$name: $out"
  [ "$name" = dp2-tp2 ] || [[ "$out" != *" 0.0 "* ]] || bad "$name fetched nothing"
done <<EOF
dp2-tp2 2 1 1 $size=2
tp2-tp1 2 2 1 $size=1
tp2pp2-tp4 4 2 2 $size=4 $fold
tp2pp2-tp1 4 2 2 $size=1
EOF
[[ "$(refits dp2-tp2)" == "4 True 0.0 "* ]] && ok "ranks that have all weights fetch nothing" ||
  bad "what dp2-tp2 fetched"

# Of weights that ranks share, unit by unit: the samples, and so the losses, of a run whose policy is whole; a resume.
strategy=policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy
check "GRPO on dp2-tp2 with gradients shared" run shared-gradients 2 1 1 $size=2 $strategy=optim_grads
check "GRPO on dp2-tp2 with weights shared" run shared-weights 2 1 1 $size=2 $strategy=optim_grads_params
[ -n "$(weights shared-gradients 4)" ] && [ "$(weights shared-weights 4)" = "$(weights shared-gradients 4)" ] &&
  ok "shared weights, generation on tp 2: weights and moments of shared gradients" || bad "shared weights on tp 2"
out=$(refits shared-weights); [[ "$out" == "4 True "*" other bits near" ]] && ok "shared weights: $out" ||
  bad "shared weights: $out"
check "two steps of it" run shared-again 2 1 1 $size=2 $strategy=optim_grads_params grpo.max_num_steps=2
check "the rest of them" run shared-again 2 1 1 $size=2 $strategy=optim_grads_params
[ "$(weights shared-again 4)" = "$(weights shared-weights 4)" ] && ok "resumed with shared weights, bit for bit" ||
  bad "a resume with shared weights"

# Weights to engines in other processes.
"$TRIREME" launch --nproc-per-node 3 -- bench refit --shape tiny --device cpu --repeats 3 --json "$dir/refit.json" \
  >"$dir/out" 2>&1 && python3 -c 'import json, sys; r = json.load(open(sys.argv[1]))
sys.exit(0 if r["same_bits"] and r["ranks"] == 3 and r["transfer_seconds"] > 0 else 1)' "$dir/refit.json" &&
  ok "one process's weights in two others, bit for bit" || bad "bench refit" "$(tail -3 "$dir/out")"
"$TRIREME" launch --nproc-per-node 4 -- bench refit --tp 2 --engine-tp 2 --engine-ep 2 --shape tiny-moe --device cpu \
  --repeats 2 --json "$dir/refit.json" >"$dir/out" 2>&1 &&
  python3 -c 'import json, sys; r = json.load(open(sys.argv[1]))
sys.exit(0 if r["same_bits"] and (r["actors"], r["engines"]) == (2, 1) else 1)' "$dir/refit.json" &&
  ok "two processes' halves in those of an engine, bit for bit" || bad "bench refit in halves" "$(tail -3 "$dir/out")"

refused() {
  local name=$1 words=$2; shift 2
  "$@" >"$dir/out" 2>&1 && { bad "$name was not refused"; return; }
  grep -q "$words" "$dir/out" && ok "$name: refused" || bad "$name" "$(tail -3 "$dir/out")"
}
refused "folding without stages" "folds pipeline stages" run no-stages 2 2 1 $fold
refused "lanes of folded stages" "lanes need stages" run lanes 2 1 2 $fold policy.generation.pipeline_lanes=2
refused "sizes that do not divide" "4 x 2 stages do not divide the 4 ranks" run uneven-ranks 4 2 2 $size=4
refused "heads that do not divide" "policy.generation.tensor_parallel_size 8: .* cannot generate so" run heads 8 1 1 \
  $size=8
finish
