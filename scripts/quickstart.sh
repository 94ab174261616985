#!/usr/bin/env bash
# quickstart.sh [--device] [key=value ...]: runs examples/quickstart.rljob.yaml on this machine from an empty volume and
# says what was learned.
#   DEVICE=cuda|cpu   where (default: cuda where there are a GPU and the build of preset cuda, else cpu);
#                     --device prints it and ends
#   SEED=2            other problems, another model, another warm start, other samples: every seed of the run
#   SHUFFLE_REWARDS=1 the control: the same run with rewards that say nothing about the responses
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
device=${DEVICE:-}
if [ -z "$device" ]; then
  if [ -e /dev/nvidiactl ] && [ -z "${TRIREME:-}" ] && [ -x build/cuda/trainer/cli/trireme ]; then
    device=cuda
  else
    device=cpu
  fi
fi
case $device in cpu|cuda) ;; *) die "DEVICE is '$device', not cpu or cuda" ;; esac
if [ "${1:-}" = --device ]; then echo "$device"; exit 0; fi
seed=${SEED:-1}
trireme=${TRIREME:-$ROOT/build/$device/trainer/cli/trireme}
[ -x "$trireme" ] || die "$trireme is not there: scripts/setup.sh $device && scripts/build.sh $device trireme"
volumes=${VOLUMES:-.trireme/volumes}
overrides=("$@")
[ -z "${SHUFFLE_REWARDS:-}" ] || overrides+=(grpo.shuffle_rewards=true)
mkdir -p .trireme
manifest=.trireme/quickstart-seed$seed.rljob.yaml
sed -E "s/(grpo|sft)\.seed=1\b/\1.seed=$seed/; s/--seed, \"1\"/--seed, \"$seed\"/" examples/quickstart.rljob.yaml \
  >"$manifest"
if [ "$device" = cuda ]; then
  # The kernels know head sizes of 64 and 128 and compute in bfloat16: another model, the rest as on the CPU.
  on_cuda="cluster.device=cuda, policy.precision=bfloat16"
  shape='--hidden, "256", --intermediate, "768", --heads, "4", --kv-heads, "2", --head-dim, "64"'
  sed -i -E "s#(--out, /data/model,)#\1 $shape,#; s#(logger\.log_dir=/data/sft-logs,)#\1 $on_cuda,#" "$manifest"
  [ "$(grep -c -e '--head-dim' "$manifest")" = 1 ] && [ "$(grep -c "$on_cuda" "$manifest")" = 1 ] \
    || die "examples/quickstart.rljob.yaml no longer has the lines that are changed for CUDA"
  overrides+=(cluster.device=cuda policy.precision=bfloat16)
fi
rm -rf "$volumes/quickstart"
log=.trireme/quickstart-seed$seed.log
start=$(date +%s)
say "running $manifest on $device (seed $seed); metrics: http://127.0.0.1:9400/metrics"
"$trireme" run -f "$manifest" --volumes "$volumes" "${overrides[@]}" 2> >(tee "$log.err" >&2) | tee "$log" ||
  die "the run failed; its output: $log and $log.err"
seconds=$(($(date +%s) - start))
before=$(sed -n 's/.*validation after step 0: accuracy \([0-9.]*\),.*/\1/p' "$log" | head -1)
after=$(sed -n 's/.*validation after step [0-9]*: accuracy \([0-9.]*\),.*/\1/p' "$log" | tail -1)
[ -n "$before" ] && [ -n "$after" ] || die "the run printed no validation accuracy; see $log"
echo
echo "quickstart: $seconds s on $device; held-out accuracy after the warm start $before, after GRPO $after"
echo "quickstart: curves: file://$ROOT/$volumes/quickstart/logs/report.html"
weights=$(ls -d "$volumes"/quickstart/grpo/step_*/policy/weights | sort -V | tail -1 || true)
generate="$trireme generate --temperature 0 --max-new-tokens 8 --model $weights"
echo "quickstart: ask the model: echo '{\"prompt\": \"27+58=\"}' | $generate"
