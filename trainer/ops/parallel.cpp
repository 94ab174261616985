#include "trainer/ops/parallel.h"

#include <ATen/Parallel.h>

#ifndef _OPENMP
#error "this file needs -fopenmp: without it ATen's parallel_for silently runs on one thread"
#endif

namespace trireme {

void parallel_tasks(int64_t count, int64_t grain, c10::function_ref<void(int64_t, int64_t)> task) {
  at::parallel_for(0, count, grain < 1 ? 1 : grain, [&](int64_t begin, int64_t end) { task(begin, end); });
}

}  // namespace trireme
