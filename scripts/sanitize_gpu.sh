#!/usr/bin/env bash
# sanitize_gpu.sh [FOLDER]: the kernels' tests with small sizes (gpu_small_test of FOLDER; default:
# build/cuda/tests/gpu) under compute-sanitizer, once with each of TOOLS (memcheck racecheck). Looks at the project's
# own kernels; the library's are not checked. racecheck reports "potential" hazards where one lane arrives at a barrier
# for its warp, behind a __syncwarp() that it does not follow: those of the tests in READ_BY_HAND were read and are
# passed over (READ_BY_HAND= shows them again). Needs a GPU, and compute-sanitizer: COMPUTE_SANITIZER, on PATH, or in
# the CUDA toolkit (package cuda-sanitizer-13-0, or the wheel nvidia-cuda-sanitizer-api).
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
program=${1:-build/cuda/tests/gpu}/gpu_small_test
[ -x "$program" ] || die "$program is not there: scripts/build.sh cuda gpu_small_test"
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null \
  | tail -1 || true)}
[ -x "$sanitizer" ] || die "compute-sanitizer is not there; install it, or say where it is: COMPUTE_SANITIZER=PATH"
export TRIREME_REQUIRE_GPU=1
# One memory block a tensor, so that an access behind one is outside of any; but while a graph is captured nothing may
# be allocated past LibTorch's pools.
pooled='^Small\.AModelGenerates'
by_hand=${READ_BY_HAND-'^Small\.DecodeAttentionBy(Clusters|OneBlock)'}
log=$(mktemp); trap 'rm -f "$log"' EXIT
passed=0 failed=0
for tool in ${TOOLS:-memcheck racecheck}; do
  options=(--tool "$tool" --error-exitcode 9 --kernel-name kernel_substring=trireme --print-limit 20)
  [ "$tool" != racecheck ] || options+=(--racecheck-report all)
  # What a driver refuses is asked for in another way (mapped_memory.cpp): no error of ours.
  [ "$tool" != memcheck ] || options+=(--report-api-errors no)
  for test in $("$program" --gtest_list_tests | awk '/^[^ ]/ {suite = $1} /^ / {print suite $1}'); do
    SECONDS=0
    if [ $tool = racecheck ] && [ -n "$by_hand" ] && [[ $test =~ $by_hand ]]; then
      echo "      racecheck $test: read by hand"
      continue
    fi
    if [[ $test =~ $pooled ]]; then
      unset PYTORCH_NO_CUDA_MEMORY_CACHING
    else
      export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    fi
    if timeout 900 "$sanitizer" "${options[@]}" "$program" --gtest_filter="$test" >"$log" 2>&1; then
      passed=$((passed + 1)); echo "ok    $tool $test ($SECONDS s)"
    else
      failed=$((failed + 1)); echo "FAIL  $tool $test ($SECONDS s)"
      grep -E '^=========|Failure|error' "$log" | head -60 || true
    fi
  done
done
echo "$passed passed, $failed failed"
[ $failed = 0 ] && [ $passed -gt 0 ]
