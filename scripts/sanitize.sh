#!/usr/bin/env bash
# sanitize.sh: the tests that need no LibTorch under ASan+UBSan and under TSan, then each fuzz target for FUZZ_SECONDS (15).
. "$(dirname "$0")/lib.sh"
"$ROOT/scripts/setup.sh" operator
need_packages clang
cd "$ROOT"
passed=0 failed=0
step() { local name=$1; shift; say "$name"; if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAIL  $name"; fi; }

export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:suppressions=$ROOT/tests/tsan.supp
export LSAN_OPTIONS=suppressions=$ROOT/tests/lsan.supp
scripts/build.sh asan
step "ASan and UBSan" ctest --test-dir build/asan --output-on-failure -j 2
scripts/build.sh tsan
step "TSan" ctest --test-dir build/tsan --output-on-failure -j 2 -E '^(topology|config|rewards_math)_test$'
scripts/build.sh fuzz
for target in build/fuzz/tests/fuzz_*; do
  corpus=$(mktemp -d)
  step "$(basename "$target")" "$target" -max_total_time="${FUZZ_SECONDS:-15}" -rss_limit_mb=4096 -timeout=20 -print_final_stats=0 -verbosity=0 "$corpus"
  rm -rf "$corpus"
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
