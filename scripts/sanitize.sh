#!/usr/bin/env bash
# sanitize.sh [STAGE...]: stages asan, fuzz, tsan (all of them by default). Tests that need no LibTorch under
# ASan+UBSan, fuzz targets from the same build (FUZZ_SECONDS each, 15), tests with threads under TSan. The corpora of a
# longer run can be kept in FUZZ_CORPUS. `sanitize.sh setup` installs what they need and runs nothing.
#   LibTorch's own libraries are not instrumented: what includes it is tested by `make test` only.
#   TSan builds just the tests of the list below; in the others one thread works.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
stages=("$@"); [ $# -gt 0 ] || stages=(asan fuzz tsan)
TSAN_TESTS=(scheduler_test rewards_test data_test telemetry_test launch_test lifeline_test kube_test controller_test \
  webhook_test work_test)

scripts/setup.sh operator
need_packages clang libclang-rt-dev
if [ "${stages[*]}" = setup ]; then exit 0; fi
passed=0 failed=0 rows=()
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
# row NAME RESULT SECONDS: a line of the table, and of the count.
row() {
  if [ "$2" = passed ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
  rows+=("$(printf '%-32s %-8s %6s s' "$1" "$2" "$3")")
}
# tests PRESET LABEL [ctest arguments]: runs them; a row each, whatever ctest calls the end of one that did not pass.
tests() {
  local preset=$1 label=$2 name result seconds ended=0 before=$failed; shift 2
  ctest --test-dir "build/$preset" --output-on-failure -j 2 "$@" >"$work/ctest" 2>&1 || ended=$?
  grep -vE '^ *(Start |[0-9]+/[0-9]+ Test +#[0-9]+: .* Passed )' "$work/ctest" | sed 's/^/    /' >&2
  while read -r name result seconds; do row "$label $name" "$result" "$seconds"; done < <(
    awk '/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: .* sec *$/ {print $4, / Passed /? "passed" : "FAILED", $(NF - 1)}' \
      "$work/ctest")
  [ $ended = 0 ] || [ "$failed" != "$before" ] || row "$label ctest (code $ended)" FAILED 0
}

export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0:detect_stack_use_after_return=1 \
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export LSAN_OPTIONS=suppressions=$ROOT/tests/lsan.supp
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:suppressions=$ROOT/tests/tsan.supp

# A target starts from the seeds of its name, and from files of the tree that are what it reads.
seeds() {
  local name=$1 into=$2
  [ ! -d "tests/fuzz/seeds/$name" ] || cp "tests/fuzz/seeds/$name"/* "$into"
  case $name in
    config) grep -L defaults configs/*.yaml | xargs -I{} cp {} "$into" ;;
    manifest) cp examples/*.yaml "$into" ;;
  esac
}
fuzz() {
  local target=$1 name start corpus
  name=$(basename "$target"); name=${name#fuzz_}
  corpus=$work/corpus-$name
  if [ -n "${FUZZ_CORPUS:-}" ]; then corpus=$FUZZ_CORPUS/$name; fi
  mkdir -p "$corpus" "$work/seeds-$name" build/asan/findings
  seeds "$name" "$work/seeds-$name"
  start=$(date +%s)
  if "$target" -max_total_time="${FUZZ_SECONDS:-15}" -rss_limit_mb=4096 -timeout=60 -print_final_stats=1 \
    -artifact_prefix="build/asan/findings/$name-" "$corpus" "$work/seeds-$name" >"$work/fuzz-$name" 2>&1; then
    echo passed
  else
    echo FAILED
    tail -60 "$work/fuzz-$name" | sed 's/^/    /' >&2
  fi >"$work/result-$name"
  echo "$(awk '/number_of_executed_units/ {print $2}' "$work/fuzz-$name")" >"$work/runs-$name"
  echo $(($(date +%s) - start)) >"$work/seconds-$name"
}

for stage in "${stages[@]}"; do
  case $stage in
    asan)
      scripts/build.sh asan
      say "tests under ASan and UBSan"
      tests asan ASan+UBSan ;;
    fuzz)
      scripts/build.sh asan
      say "fuzz targets, ${FUZZ_SECONDS:-15} s each, two at a time"
      for target in build/asan/tests/fuzz_*; do
        [ -x "$target" ] && [ -f "$target" ] || continue
        while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n || true; done
        fuzz "$target" &
      done
      wait
      for result in "$work"/result-*; do
        name=${result##*/result-}
        row "fuzz $name ($(cat "$work/runs-$name") inputs)" "$(cat "$result")" "$(cat "$work/seconds-$name")"
      done ;;
    tsan)
      scripts/build.sh tsan "${TSAN_TESTS[@]}"
      say "tests with threads under TSan"
      tests tsan TSan -R "^($(IFS='|'; echo "${TSAN_TESTS[*]}"))\$" ;;
    *) die "sanitize.sh: '$stage' is none of asan, fuzz, tsan" ;;
  esac
done
echo
printf '%s\n' "${rows[@]}"
echo "$passed passed, $failed failed"
[ $failed = 0 ] && [ $passed -gt 0 ]
