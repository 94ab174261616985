#!/usr/bin/env bash
# lint.sh [--fix] [FILE...]: clang-format over the tracked C++ files (or FILE...), clang-tidy over a list of them.
#   --fix      formats in place instead of comparing
#   TIDY=list  sources without LibTorch that hold the rules: parsers, planners, arithmetic (the default)
#   TIDY=all   every source without LibTorch (those with it need GCC's precompiled header)
#   TIDY=none  formatting only
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
fix=""
if [ "${1:-}" = --fix ]; then fix=1; shift; fi
need_packages clang-format clang-tidy

LIST='^(base|topology|api)/[^/]+\.cpp$
^operator/controller/(actions|cache|failure|objects|plan|pod_names)\.cpp$
^operator/kube/(api_error|client_config|json_scan|watch_lines|work_queue)\.cpp$
^operator/(scheduling|webhook)/(gang|admission)\.cpp$
^trainer/config/[^/]+\.cpp$
^trainer/data/(permutation|row|row_file)\.cpp$
^trainer/rewards/(answer_.*|math|pool)\.cpp$
^trainer/(rollout/scheduler|batch/packing|launch/launch)\.cpp$'
ALL='^(base|topology|api|operator|trainer/(config|data|launch|rewards|telemetry|tokenizer))/.*\.cpp$
^trainer/(rollout/scheduler|batch/packing)\.cpp$'

if [ $# -gt 0 ]; then files=("$@")
else mapfile -t files < <(git ls-files '*.h' '*.cpp' | grep -v '^third_party/'); fi
sources=()
case ${TIDY:-list} in
  list) pattern=$LIST ;;
  all) pattern=$ALL ;;
  none) pattern= ;;
  *) die "TIDY is '$TIDY', not list, all or none" ;;
esac
if [ -n "$pattern" ]; then mapfile -t sources < <(printf '%s\n' "${files[@]}" | grep -E "$pattern" || true); fi
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT

if [ -n "$fix" ]; then
  say "clang-format: ${#files[@]} files, in place"
  clang-format -i "${files[@]}"
fi
say "clang-format: ${#files[@]} files"
clang-format --dry-run "${files[@]}" 2>"$work/format" || true
grep -oE '^[^: ]+:[0-9]+:[0-9]+: (warning|error)' "$work/format" | cut -d: -f1 | sort | uniq -c |
  sort -rn >"$work/misformatted" || true
head -20 "$work/misformatted" | awk '{printf "  %s: %s places\n", $2, $1}'
misformatted=$(wc -l <"$work/misformatted")
[ "$misformatted" -le 20 ] || echo "  and $((misformatted - 20)) more files"

findings=0
if [ ${#sources[@]} -gt 0 ]; then
  # Its own configuration, since a unity build's commands name no source; nothing is built there.
  cmake --preset cpu -B build/tidy -DTRIREME_UNITY=OFF >"$work/cmake" 2>&1 \
    || { tail -5 "$work/cmake" >&2; die "cmake failed: make setup"; }
  say "clang-tidy: ${#sources[@]} files (minutes)"
  broken=0
  printf '%s\0' "${sources[@]}" | xargs -0 -n 1 -P "$(nproc)" \
    clang-tidy -p build/tidy --quiet --extra-arg=-Wno-unknown-warning-option >"$work/tidy" 2>"$work/tidy.log" \
    || broken=1
  # A finding in a header comes once for each source that includes it.
  grep -E '^[^ ]+:[0-9]+:[0-9]+: (warning|error): ' "$work/tidy" | sed "s#^$ROOT/##" | sort -u >"$work/findings" || true
  sed 's/^/  /' "$work/findings"
  findings=$(wc -l <"$work/findings")
  if [ "$broken" = 1 ] && [ "$findings" = 0 ]; then tail -5 "$work/tidy.log" >&2; die "clang-tidy failed"; fi
fi

scripts/check_bench_results.py && scripts/bench_floors.py >/dev/null && benches=0 || benches=1
scripts/check_includes.py && includes=0 || includes=1
scripts/check_pages.py && pages=0 || pages=1
scripts/check_functions.py && functions=0 || functions=1
hint=$([ "$misformatted" = 0 ] || echo ' (scripts/lint.sh --fix formats them)')
echo "clang-format: $misformatted of ${#files[@]} files differ$hint"
echo "clang-tidy: $findings findings in ${#sources[@]} sources"
[ "$misformatted" = 0 ] && [ "$findings" = 0 ] && [ "$benches" = 0 ] && [ "$includes" = 0 ] \
  && [ "$pages" = 0 ] && [ "$functions" = 0 ]
