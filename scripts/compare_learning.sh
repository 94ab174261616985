#!/usr/bin/env bash
# compare_learning.sh: the quickstart's task from one warm start by every way to run a step: how many steps each takes
# to LEAST (0.90) of the held-out problems, and that with shuffled rewards none learns. CPU; about 25 minutes on two
# cores, so it is no part of CI.
#   SEED=2    other problems, another model, another warm start, other samples
#   WAYS=...  some of: sync carry-over in-flight ppo; sync comes first where one with older weights is compared with it
#   MORE='policy.optimizer.kwargs.lr=3e-4'  overrides of every run
#   RATIO_FROM=training  the ratio of older tokens begins with log-probs of the step's weights, and they are weighed
# Fails where a way begins above MOST (0.45), does not reach LEAST, where one with older weights takes more than
# MOST_RATIO (1.25) times the steps of the synchronous run, or where a control passes 0.55. The last lines are a table.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
seed=${SEED:-1}
most=${MOST:-0.45}
least=${LEAST:-0.90}
ratio=${MOST_RATIO:-1.25}
ratio_from=${RATIO_FROM:-generation}
read -r -a ways <<<"${WAYS:-sync carry-over in-flight ppo}"
trireme=${TRIREME:-$ROOT/build/cpu/trainer/cli/trireme}
for way in "${ways[@]}"; do
  case $way in
    sync|ppo) ;;
    carry-over|in-flight) [ "${ways[0]}" = sync ] ||
      die "WAYS: $way is judged by the steps of sync, which must come first: WAYS='sync $way'" ;;
    *) die "WAYS: '$way' is none of sync, carry-over, in-flight, ppo" ;;
  esac
done
[ -x "$trireme" ] || die "$trireme is not there: make build"
dir=${DIR:-.trireme/compare-seed$seed}
export OMP_WAIT_POLICY=passive
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
mkdir -p "$dir"

if [ ! -e "$dir/.warm" ]; then
  say "task, model and warm start (seed $seed)"
  rm -rf "$dir" && mkdir -p "$dir"
  "$trireme" init-task addition --out "$dir/task" --warm-start 2000 --seed "$seed"
  "$trireme" init-model --out "$dir/model" --seed "$seed"
  "$trireme" train --config configs/quickstart_sft.yaml policy.model_name="$dir/model" sft.seed="$seed" \
    data.train.data_path="$dir/task/warm_start.jsonl" checkpointing.checkpoint_dir="$dir/sft" \
    logger.log_dir="$dir/sft-logs" >"$dir/sft.log" 2>&1 || die "the warm start failed: $dir/sft.log"
  touch "$dir/.warm"
fi

# What each way says beside the quickstart's configuration. Carry-over and engines in flight with an age of 1.
case $ratio_from in
  generation) older=grpo.async_grpo.ratio_from=generation ;;
  training) older=loss_fn.use_importance_sampling_correction=true ;;
  *) die "RATIO_FROM: '$ratio_from' is neither generation nor training" ;;
esac
overlap="grpo.async_grpo.enabled=true grpo.async_grpo.max_trajectory_age_steps=1
  grpo.async_grpo.in_flight_weight_updates=true grpo.batch_multiplier=1.0 $older"
args_of() { # args_of WAY NAME: the arguments of train
  local config=configs/quickstart.yaml section=grpo
  [ "$1" = ppo ] && config=configs/quickstart_ppo.yaml section=ppo
  echo train --config $config policy.model_name="$dir/sft" data.train.data_path="$dir/task/train.jsonl" \
    data.validation.data_path="$dir/task/held_out.jsonl" checkpointing.checkpoint_dir="$dir/$2" \
    logger.log_dir="$dir/$2-logs" $section.val_period=10 $section.stop_at_validation_threshold="$least" \
    $section.seed="$seed" checkpointing.save_period=1000 logger.prometheus.enabled=false ${MORE:-}
  case $1 in
    # Fewer places than a step has samples: some of the next step's begin before this one's are complete.
    carry-over) echo $overlap policy.generation.max_running_samples=256 ;;
    in-flight) echo $overlap policy.generation.colocated.enabled=false ;;
  esac
}
run_of() { # run_of WAY NAME [key=value ...]
  local way=$1 name=$2 before=()
  shift 2
  rm -rf "${dir:?}/$name" "${dir:?}/$name-logs"
  [ "$way" = in-flight ] && before=(launch --nproc-per-node 1 --engines 1 --)
  say "$name"
  "$trireme" "${before[@]}" $(args_of "$way" "$name") "$@" >"$dir/$name.log" 2>&1 ||
    die "$name failed: $dir/$name.log"
}
# reached NAME LEAST: first validated step of at least LEAST, last accuracy, its step, mean age, accuracy of step 0
reached() {
  python3 - "$dir/$1-logs/train.jsonl" "$2" <<'PY'
import json, sys
rows = list(map(json.loads, open(sys.argv[1])))
seen = [(x["step"], x["validation/accuracy"]) for x in rows if "validation/accuracy" in x]
step = next((s for s, a in seen if a >= float(sys.argv[2])), None)
ages = [x["train/avg_trajectory_age"] for x in rows if "train/avg_trajectory_age" in x]
age = f"{sum(ages) / len(ages):.3f}" if ages else "0"
begin = next((f"{a:.3f}" for s, a in seen if s == 0), "none")
print("none" if step is None else step, f"{seen[-1][1]:.3f}", seen[-1][0], age, begin)
PY
}

table=() failed=0 sync=
for way in "${ways[@]}"; do
  run_of "$way" "$way"
  read -r step accuracy last age begin < <(reached "$way" "$least")
  verdict=ok
  [ "$way" = sync ] && sync=$step
  [ "$step" = none ] && verdict=FAIL
  { [ "$begin" != none ] && awk "BEGIN{exit !($begin <= $most)}"; } || verdict=FAIL
  case $way in carry-over|in-flight)
    { [ "$sync" != none ] && [ "$step" != none ] && awk "BEGIN{exit !($step <= $ratio * $sync)}"; } || verdict=FAIL ;;
  esac
  # The control has as many steps, and at least 100.
  control=$last; [ "$control" -ge 100 ] || control=100
  section=grpo plain="grpo.use_dynamic_sampling=false grpo.batch_multiplier=1.0"
  [ "$way" = ppo ] && section=ppo plain=
  run_of "$way" "$way-shuffled" $section.shuffle_rewards=true $section.max_num_steps="$control" $plain
  read -r _ shuffled _ < <(reached "$way-shuffled" "$least")
  awk "BEGIN{exit !($shuffled <= 0.55)}" || verdict=FAIL
  [ $verdict = ok ] || failed=1
  table+=("$(printf '%-5s %-11s %7s %13s %9s %8s %15s (%s steps)' \
    "$verdict" "$way" "$begin" "$step" "$accuracy" "$age" "$shuffled" "$control")")
done
echo
printf '%-5s %-11s %7s %13s %9s %8s %15s\n' "" way begins "steps to $least" last "mean age" "shuffled rewards"
printf '%s\n' "${table[@]}"
exit $failed
