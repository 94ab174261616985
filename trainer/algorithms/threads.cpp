#include "trainer/algorithms/threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "base/host.h"
#include "base/text.h"

namespace trireme {

void use_threads(int ranks_on_this_node) {
  int threads = std::max(1, usable_cpus() / std::max(1, ranks_on_this_node));
  const char* const wanted = std::getenv("OMP_NUM_THREADS");
  const std::optional<int64_t> most = wanted == nullptr ? std::nullopt : parse_int(wanted);
  if (most && *most >= 1) threads = static_cast<int>(std::min<int64_t>(threads, *most));
  at::set_num_threads(threads);
  at::set_num_interop_threads(1);
}

}  // namespace trireme
