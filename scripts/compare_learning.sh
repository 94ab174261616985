#!/usr/bin/env bash
# compare_learning.sh: the quickstart's task from one warm start by every way to run a step: how many steps each takes
# to LEAST (0.90) of the held-out problems, and that with shuffled rewards none learns. CPU; about 25 minutes a seed on
# two cores, so it is no part of CI.
#   SEEDS='1 2 3'  each has its problems, model, warm start and samples (default 1)
#   WAYS=...  some of: sync carry-over in-flight ppo; sync comes first where one with older weights is compared with it
#   RATE=3e-4 the learning rate of all ways but PPO; the default is half the quickstart's: older weights bear less
#   MORE='key=value ...'  overrides of every run
#   RATIO_FROM=training  the ratio of older tokens begins with log-probs of the step's weights, and they are weighed
#   CONTROLS=0  no runs with shuffled rewards
# Fails where a way begins above MOST (0.45), does not reach LEAST, where a control passes 0.55, or where one with older
# weights takes more than MOST_RATIO (1.25) times the steps of the synchronous runs, the seeds together: of one seed the
# ratio is chance (a validation comes every 10 steps and is sure to 0.013). The last lines are a table.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
read -r -a seeds <<<"${SEEDS:-1}"
rate=${RATE:-3e-4}
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
export OMP_WAIT_POLICY=passive
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}

warm_start() { # of $seed, in $dir
  [ ! -e "$dir/.warm" ] || return 0
  say "task, model and warm start (seed $seed)"
  rm -rf "$dir" && mkdir -p "$dir"
  "$trireme" init-task addition --out "$dir/task" --warm-start 2000 --seed "$seed"
  "$trireme" init-model --out "$dir/model" --seed "$seed"
  "$trireme" train --config configs/quickstart_sft.yaml policy.model_name="$dir/model" sft.seed="$seed" \
    data.train.data_path="$dir/task/warm_start.jsonl" checkpointing.checkpoint_dir="$dir/sft" \
    logger.log_dir="$dir/sft-logs" >"$dir/sft.log" 2>&1 || die "the warm start failed: $dir/sft.log"
  touch "$dir/.warm"
}

# What each way says beside the quickstart's configuration. Carry-over and engines in flight with an age of 1.
case $ratio_from in
  generation) older=grpo.async_grpo.ratio_from=generation ;;
  training) older=loss_fn.use_importance_sampling_correction=true ;;
  *) die "RATIO_FROM: '$ratio_from' is neither generation nor training" ;;
esac
overlap="grpo.async_grpo.enabled=true grpo.async_grpo.max_trajectory_age_steps=1
  grpo.async_grpo.in_flight_weight_updates=true grpo.batch_multiplier=1.0 $older"
args_of() { # args_of WAY NAME: the arguments of train
  local config=configs/quickstart.yaml section=grpo lr=policy.optimizer.kwargs.lr=$rate
  [ "$1" = ppo ] && config=configs/quickstart_ppo.yaml section=ppo lr=
  echo train --config $config policy.model_name="$dir/sft" data.train.data_path="$dir/task/train.jsonl" \
    data.validation.data_path="$dir/task/held_out.jsonl" checkpointing.checkpoint_dir="$dir/$2" \
    logger.log_dir="$dir/$2-logs" $section.val_period=10 $section.stop_at_validation_threshold="$least" \
    $section.seed="$seed" checkpointing.save_period=1000 logger.prometheus.enabled=false \
    $lr ${MORE:-}
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

table=() failed=0
declare -A total  # steps of a way, all seeds together; "none" where one has not reached LEAST
for seed in "${seeds[@]}"; do
  dir=.trireme/compare-seed$seed
  warm_start
  for way in "${ways[@]}"; do
    run_of "$way" "$way"
    read -r step accuracy last age begin < <(reached "$way" "$least")
    verdict=ok shuffled=- control=0
    if [ "$step" = none ]; then total[$way]=none verdict=FAIL
    elif [ "${total[$way]:-0}" != none ]; then total[$way]=$((${total[$way]:-0} + step)); fi
    { [ "$begin" != none ] && awk "BEGIN{exit !($begin <= $most)}"; } || verdict=FAIL
    if [ "${CONTROLS:-1}" != 0 ]; then
      # The control has as many steps, and at least 100.
      control=$last; [ "$control" -ge 100 ] || control=100
      section=grpo plain="grpo.use_dynamic_sampling=false grpo.batch_multiplier=1.0"
      [ "$way" = ppo ] && section=ppo plain=
      run_of "$way" "$way-shuffled" $section.shuffle_rewards=true $section.max_num_steps="$control" $plain
      read -r _ shuffled _ < <(reached "$way-shuffled" "$least")
      awk "BEGIN{exit !($shuffled <= 0.55)}" || verdict=FAIL
    fi
    [ $verdict = ok ] || failed=1
    table+=("$(printf '%-5s %-4s %-11s %7s %13s %9s %8s %15s (%s steps)' \
      "$verdict" "$seed" "$way" "$begin" "$step" "$accuracy" "$age" "$shuffled" "$control")")
  done
done
for way in "${ways[@]}"; do
  verdict=ok against=
  case $way in carry-over|in-flight)
    against="   x $(awk -v way="${total[$way]/none/0}" -v sync="${total[sync]/none/0}" \
      'BEGIN{printf "%.2f", sync ? way / sync : 0}')"
    { [ "${total[sync]}" != none ] && [ "${total[$way]}" != none ] &&
      awk "BEGIN{exit !(${total[$way]} <= $ratio * ${total[sync]})}"; } || verdict=FAIL ;;
  esac
  [ $verdict = ok ] || failed=1
  table+=("$(printf '%-5s %-4s %-11s %7s %13s%s' "$verdict" all "$way" "" "${total[$way]}" "$against")")
done
echo
printf '%-5s %-4s %-11s %7s %13s %9s %8s %15s\n' "" seed way begins "steps to $least" last "mean age" "shuffled rewards"
printf '%s\n' "${table[@]}"
exit $failed
