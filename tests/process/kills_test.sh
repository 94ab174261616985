#!/usr/bin/env bash
# Two tensor ranks and two stages: a rank is killed with -9 in each phase of a step. Who died is named with its place,
# nobody stands still, and the run goes on from what is saved to the weights and moments of the undisturbed one.
# TRIREME_WHOLE_MATRIX=1: each rank in each phase.
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
sample=("3 generation" "0 rewards" "2 rollout exchange" "1 logprobs" "2 training" "0 checkpoint")
for one in "${sample[@]}"; do kills "${one%% *}" "${one#* }"; done
kills 1 refit $fold
if [ -n "${TRIREME_WHOLE_MATRIX:-}" ]; then
  for rank in 0 1 2 3; do
    for one in "${sample[@]}"; do [ "$rank" = "${one%% *}" ] || kills $rank "${one#* }"; done
    [ $rank = 1 ] || kills $rank refit $fold
  done
fi
for one in "${sample[@]}"; do goes_on "${one%% *}" "${one#* }"; done
goes_on 1 refit $fold
finish
