// What device.h needs of CUDA's runtime. Builds with CUDA link cuda/; in the others (no_cuda/) all of it throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>

#include "trainer/bench/device.h"

namespace trireme::bench {

nlohmann::json cuda_versions();
// Of reading `bytes` (a multiple of 16) on that device, nothing written.
void read_on_cuda(int index, const void* data, size_t bytes, unsigned* sink);
double cuda_counted_seconds(int index, const std::function<void()>& call, int64_t in_graph);
double cuda_seconds_per_call(int index, const std::function<void(int64_t)>& call, const TimingOptions& options);

}  // namespace trireme::bench
