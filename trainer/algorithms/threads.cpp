#include "trainer/algorithms/threads.h"

#include <ATen/Parallel.h>
#include <sched.h>

#include <algorithm>

namespace trireme {

void use_threads(int ranks_on_this_node) {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int cores = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  at::set_num_threads(std::max(1, cores / std::max(1, ranks_on_this_node)));
  at::set_num_interop_threads(1);
}

}  // namespace trireme
