#!/usr/bin/env bash
# test.sh [ctest arguments]: every test that needs no cluster and no GPU, on the CPU build. A program that fails beside
# others on a busy machine is run once more alone, and both results are printed; more than three are not.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
export OMP_WAIT_POLICY=passive
say "unit, parity and process tests"
failed=build/cpu/Testing/Temporary/LastTestsFailed.log
rm -f "$failed"
# Of several that run at once some wait, for deadlines that are part of what they test.
if ctest --test-dir build/cpu --output-on-failure -j 3 "$@"; then exit 0; fi
[ -s "$failed" ] && [ "$(wc -l <"$failed")" -le 3 ] || exit 1
say "once more, alone: $(cut -d: -f2 "$failed" | paste -sd' ')"
ctest --test-dir build/cpu --output-on-failure --rerun-failed
