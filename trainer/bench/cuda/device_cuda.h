// What device.h needs of CUDA's runtime.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>

#include "trainer/bench/device.h"

namespace trireme::bench {

int64_t take_cuda_peak_memory_bytes(int index);
nlohmann::json cuda_versions();
double cuda_seconds_per_call(int index, const std::function<void(int64_t)>& call, const TimingOptions& options);

}  // namespace trireme::bench
