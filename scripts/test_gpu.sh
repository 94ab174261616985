#!/usr/bin/env bash
# test_gpu.sh [FOLDER]: every GPU test program of FOLDER (default: builds the preset cuda and takes its own), each by
# itself; a table of them last. On a machine that has only the built programs and the torch wheel:
#   LD_LIBRARY_PATH=$SITE/torch/lib:$SITE/nvidia/cu13/lib scripts/test_gpu.sh FOLDER
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
folder=${1:-}
if [ -z "$folder" ]; then
  scripts/setup.sh cuda
  scripts/build.sh cuda
  folder=build/cuda/tests/gpu
fi
export TRIREME_REQUIRE_GPU=1
log=$(mktemp); trap 'rm -f "$log"' EXIT
table="" failed=0
for program in "$folder"/gpu_*_test; do
  [ -x "$program" ] || die "no GPU test programs in $folder"
  SECONDS=0
  if "$program" ${GTEST_FILTER:+--gtest_filter="$GTEST_FILTER"} >"$log" 2>&1; then
    state=passed
  else
    state=FAILED
    failed=$((failed + 1))
  fi
  grep -E '^\[  (FAILED|PASSED)|error|Failure' "$log" | head -40 || true
  [ $state = passed ] || tail -60 "$log"
  tests=$(sed -n 's/^\[==========\] \([0-9]*\) tests\{0,1\} from .* ran.*/\1/p' "$log")
  table+=$(printf '%-28s %-7s %4s tests %4s s' "$(basename "$program")" "$state" "${tests:-?}" "$SECONDS")$'\n'
done
# What several ranks do needs two GPUs, or four, and the program itself.
trireme=$folder/trireme
[ -x "$trireme" ] || trireme=build/cuda/trainer/cli/trireme
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
if [ -x "$trireme" ] && [ "$gpus" -ge 2 ] && [ -z "${GTEST_FILTER:-}" ]; then
  scripts="overlap failures layouts ways"
  [ "$gpus" -ge 4 ] && scripts+=" expert_layouts"
  for script in $scripts; do
    SECONDS=0
    if TRIREME=$trireme bash tests/gpu/${script}_test.sh >"$log" 2>&1; then
      state=passed
    else
      state=FAILED
      failed=$((failed + 1))
    fi
    [ $state = passed ] || cat "$log"
    table+=$(printf '%-28s %-7s %4s tests %4s s' ${script}_test.sh "$state" "$(grep -c '^ok' "$log")" "$SECONDS")$'\n'
  done
fi
printf '%s' "$table"
[ $failed = 0 ] && echo "all GPU test programs passed" || { echo "$failed GPU test programs failed"; exit 1; }
