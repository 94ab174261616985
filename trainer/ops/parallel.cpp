#include "trainer/ops/parallel.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#ifndef _OPENMP
#error "this file needs -fopenmp: without it ATen's parallel_for silently runs on one thread"
#endif

namespace trireme {

void parallel_tasks(int64_t count, int64_t grain, c10::function_ref<void(int64_t, int64_t)> task) {
  at::parallel_for(0, count, grain < 1 ? 1 : grain, [&](int64_t begin, int64_t end) { task(begin, end); });
}

void parallel_dynamic(int64_t count, bool worth, c10::function_ref<void(int64_t)> task) {
  const int64_t workers = worth ? std::min<int64_t>(at::get_num_threads(), count) : 1;
  std::atomic<int64_t> next{0};
  parallel_tasks(workers, 1, [&](int64_t, int64_t) {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(i);
  });
}

}  // namespace trireme
