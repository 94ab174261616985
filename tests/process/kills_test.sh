#!/usr/bin/env bash
# Two tensor ranks and two stages: each rank is killed with -9 in each phase of a step. Who died is named with its
# place, nobody stands still, and the run goes on from what is saved to the weights and moments of the undisturbed one.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_split_fixture
run() { run_split "$1" 4 2 2 grpo.max_num_steps=3 "${@:2}"; }
fold=policy.generation.fold_pipeline=true
check "a run that nobody disturbs" run whole
whole=$(weights whole 3)

# Kills rank $1 in phase $2 of the second step.
kills() {
  local rank=$1 phase=$2 name="killed-${2// /-}-$1" code; shift 2
  SECONDS=0
  TRIREME_FAULT="kill@2:$rank:$phase" run "$name" $far_deadline "$@" >"$dir/out" 2>&1; code=$?
  if [ $code = 137 ] && [ $SECONDS -le $soon ] && grep -q "rank $rank failed first (signal 9" "$dir/out" &&
    grep -q "rank $rank (tp $((rank % 2)), pp $((rank / 2))) has died.*signal 9 (Killed)" "$dir/out"
  then ok "rank $rank killed in phase $phase: named, $SECONDS s"
  else bad "rank $rank killed in phase $phase: code $code, $SECONDS s" "$(cat "$dir/out")"; fi
}
goes_on() { # goes_on RANK PHASE: to the undisturbed run's end
  local name="killed-${2// /-}-$1"; shift 2
  check "$name goes on" run "$name" "$@"
  [ "$(weights "$name" 3)" = "$whole" ] && ok "$name: weights and moments of the undisturbed run" ||
    bad "$name: other weights"
}
for rank in 0 1 2 3; do
  for phase in generation rewards "rollout exchange" logprobs training checkpoint; do kills $rank "$phase"; done
  kills $rank refit $fold
done
goes_on 3 generation
goes_on 0 rewards
goes_on 2 "rollout exchange"
goes_on 1 logprobs
goes_on 2 training
goes_on 0 checkpoint
goes_on 1 refit $fold
finish
