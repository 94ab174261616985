#!/usr/bin/env bash
# quickstart.sh [key=value ...]: runs examples/quickstart.rljob.yaml on this machine from an empty volume and says what was learned.
#   SEED=2            other problems, another model, another warm start, other samples: every seed of the run
#   SHUFFLE_REWARDS=1 the control: the same run with rewards that say nothing about the answers
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
seed=${SEED:-1}
trireme=${TRIREME:-$ROOT/build/cpu/trainer/cli/trireme}
volumes=${VOLUMES:-.trireme/volumes}
overrides=("$@")
[ -z "${SHUFFLE_REWARDS:-}" ] || overrides+=(grpo.shuffle_rewards=true)
mkdir -p .trireme
manifest=.trireme/quickstart-seed$seed.rljob.yaml
sed -E "s/(grpo|sft)\.seed=1\b/\1.seed=$seed/; s/--seed, \"1\"/--seed, \"$seed\"/" examples/quickstart.rljob.yaml >"$manifest"
rm -rf "$volumes/quickstart"
log=.trireme/quickstart-seed$seed.log
start=$(date +%s)
say "running $manifest (seed $seed); metrics: http://127.0.0.1:9400/metrics"
"$trireme" run -f "$manifest" --volumes "$volumes" "${overrides[@]}" 2> >(tee "$log.err" >&2) | tee "$log" || die "the run failed; its output: $log and $log.err"
seconds=$(($(date +%s) - start))
before=$(sed -n 's/.*validation after step 0: accuracy \([0-9.]*\),.*/\1/p' "$log" | head -1)
after=$(sed -n 's/.*validation after step [0-9]*: accuracy \([0-9.]*\),.*/\1/p' "$log" | tail -1)
[ -n "$before" ] && [ -n "$after" ] || die "the run printed no validation accuracy; see $log"
echo
echo "quickstart: $seconds s; held-out accuracy after the warm start $before, after GRPO $after"
echo "quickstart: curves: file://$ROOT/$volumes/quickstart/logs/report.html"
echo "quickstart: ask the model: echo '{\"prompt\": \"27+58=\"}' | $trireme generate --temperature 0 --max-new-tokens 8 --model $(ls -d "$volumes"/quickstart/grpo/step_*/policy/weights | sort -V | tail -1)"
