// Devices as a benchmark sees them: timing, ceilings, names.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace trireme::bench {

// Most memory that tensors held at once since the last call; 0 on CPU.
int64_t take_peak_memory_bytes(at::Device device);

std::string machine_name(at::Device device);  // "NVIDIA H200", or the CPU's model
nlohmann::json versions(at::Device device);   // trireme, libtorch, compiler, on CUDA runtime and driver

double median(std::vector<double> values);  // of at least one

struct TimingOptions {
  double target_seconds = 0.02;  // calls of one sample last about this long
  int samples = 5;
  int max_calls = 100;
};
// Seconds of one call: the median of some samples of many calls each, after a warm-up. `call` gets 0, 1, 2, ... so that
// it can go round buffers that together exceed the caches. On CUDA the time between two events of the stream, the calls
// queued while the device is kept busy: launching is hidden as it is in a graph, unless the call waits for the device.
double seconds_per_call(at::Device device, const std::function<void(int64_t)>& call, const TimingOptions& options = {});

// Seconds of one call, where ranks must make the same number of calls: the median of some samples of a fixed number.
// `in_graph` above 0: on CUDA so many calls are captured into a graph, which is replayed.
double counted_seconds_per_call(at::Device device, const std::function<void()>& call, int64_t in_graph);

// What the device reaches in plain work, measured now: a copy of a large buffer (bytes read and written), a plain read
// of one, and a large square product in `dtype`.
struct Ceilings {
  double copy_bytes_per_second = 0;
  double read_bytes_per_second = 0;
  double flops_per_second = 0;
  // That of reading: work that mostly reads is measured against the better of the two.
  double bytes_per_second() const { return std::max(copy_bytes_per_second, read_bytes_per_second); }
};
Ceilings measure_ceilings(at::Device device, at::ScalarType dtype);
// Seconds that work of so many bytes and operations needs at the ceilings.
double floor_seconds(const Ceilings& ceilings, double bytes, double flops);

}  // namespace trireme::bench
