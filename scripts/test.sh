#!/usr/bin/env bash
# test.sh [ctest arguments]: every test that needs no cluster and no GPU, on the CPU build.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
export OMP_WAIT_POLICY=passive
say "unit, parity and process tests"
# Of several that run at once some wait, for deadlines that are part of what they test.
ctest --test-dir build/cpu --output-on-failure -j 3 "$@"
