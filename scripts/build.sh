#!/usr/bin/env bash
# build.sh PRESET [TARGET...]: configures when needed and builds.
. "$(dirname "$0")/lib.sh"
preset=$1; shift
cd "$ROOT"
log=$(mktemp)
cmake --preset "$preset" >"$log" 2>&1 || { tail -30 "$log" >&2; die "cmake failed for preset $preset"; }
rm -f "$log"
say "building preset $preset ${*:+($*)}"
ninja -C "build/$preset" "$@"
