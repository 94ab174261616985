#include "trainer/bench/device.h"

#include <ATen/ATen.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <fstream>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "trainer/bench/device_cuda.h"
#include "trainer/ops/mapped_memory.h"
#include "trainer/parallel/device.h"

namespace trireme::bench {
namespace {

// Larger than any cache of the device, small enough to leave room for a model.
constexpr int64_t kCudaCopyBytes = int64_t{2} << 30;
constexpr int64_t kCpuCopyBytes = int64_t{256} << 20;
constexpr int64_t kCudaProduct = 8192;
constexpr int64_t kCpuProduct = 1024;

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (starts_with(line, "model name") && line.find(':') != std::string::npos)
      return std::string(trim(std::string_view(line).substr(line.find(':') + 1)));
  }
  return "CPU";
}

// Reads all of `data` and writes next to nothing, to `sink`.
void read_all(const at::Tensor& data, at::Tensor& sink) {
  if (data.is_cuda()) {
    read_on_cuda(data.get_device(), data.const_data_ptr(), data.nbytes(),
                 static_cast<unsigned*>(sink.mutable_data_ptr()));
    return;
  }
  at::Tensor sum = sink.view(at::kFloat).narrow(0, 0, 1).squeeze(0);
  at::sum_out(sum, data.view(at::kFloat), {0});
}

double cpu_seconds_per_call(const std::function<void(int64_t)>& call, const TimingOptions& options) {
  int64_t next = 0;
  call(next++);
  Stopwatch first;
  call(next++);
  const double estimate = std::max(first.seconds(), 1e-7);
  const auto calls =
      static_cast<int>(std::clamp(options.target_seconds / estimate, 1.0, static_cast<double>(options.max_calls)));
  std::vector<double> samples;
  for (int s = 0; s < options.samples; ++s) {
    Stopwatch watch;
    for (int i = 0; i < calls; ++i) call(next++);
    samples.push_back(watch.seconds() / calls);
  }
  return median(samples);
}

}  // namespace

int64_t take_peak_memory_bytes(at::Device device) {
  if (device.is_cuda()) return cuda::take_peak_bytes(device);
  return 0;
}

std::string machine_name(at::Device device) { return device.is_cuda() ? device_name(device) : cpu_name(); }

nlohmann::json versions(at::Device device) {
  nlohmann::json json = {{"trireme", TRIREME_VERSION}, {"libtorch", TORCH_VERSION}, {"compiler", "g++ " __VERSION__}};
  if (device.is_cuda()) json.update(cuda_versions());
  return json;
}

double median(std::vector<double> values) {
  TRIREME_CHECK(!values.empty(), "the median of nothing");
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double seconds_per_call(at::Device device, const std::function<void(int64_t)>& call, const TimingOptions& options) {
  if (device.is_cuda()) return cuda_seconds_per_call(device.index(), call, options);
  return cpu_seconds_per_call(call, options);
}

double counted_seconds_per_call(at::Device device, const std::function<void()>& call, int64_t in_graph) {
  if (device.is_cuda()) return cuda_counted_seconds(device.index(), call, in_graph);
  constexpr int kSamples = 5, kCalls = 10;
  call();
  std::vector<double> samples;
  for (int s = 0; s < kSamples; ++s) {
    Stopwatch watch;
    for (int i = 0; i < kCalls; ++i) call();
    samples.push_back(watch.seconds() / kCalls);
  }
  return median(samples);
}

Ceilings measure_ceilings(at::Device device, at::ScalarType dtype) {
  Ceilings ceilings;
  {
    const int64_t bytes = device.is_cuda() ? kCudaCopyBytes : kCpuCopyBytes;
    const auto options = at::TensorOptions().dtype(at::kByte).device(device);
    const at::Tensor from = at::zeros({bytes}, options);
    at::Tensor to = at::zeros({bytes}, options);
    ceilings.copy_bytes_per_second =
        2 * static_cast<double>(bytes) / seconds_per_call(device, [&](int64_t) { to.copy_(from); });
    ceilings.read_bytes_per_second =
        static_cast<double>(bytes) / seconds_per_call(device, [&](int64_t) { read_all(from, to); });
  }
  const int64_t size = device.is_cuda() ? kCudaProduct : kCpuProduct;
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  const at::Tensor a = at::ones({size, size}, options).normal_(), b = at::ones({size, size}, options).normal_();
  at::Tensor out = at::zeros({size, size}, options);
  const double n = static_cast<double>(size);
  ceilings.flops_per_second = 2 * n * n * n / seconds_per_call(device, [&](int64_t) { at::mm_out(out, a, b); });
  return ceilings;
}

double floor_seconds(const Ceilings& ceilings, double bytes, double flops) {
  return std::max(bytes / ceilings.bytes_per_second(), flops / ceilings.flops_per_second);
}

}  // namespace trireme::bench
