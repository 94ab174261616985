#include "trainer/bench/device_cuda.h"

#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "trainer/bench/cuda/ceilings.h"

namespace trireme::bench {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail_internal(std::string(what) + ": " + cudaGetErrorString(status));
}

struct EventDeleter {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<CUevent_st, EventDeleter>;

Event make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "cudaEventCreate");
  return Event(event);
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

constexpr double kCyclesPerSecond = 2e9;  // a little above the clock: the pause gets longer, never shorter
constexpr double kLongestPause = 0.1;     // seconds

}  // namespace

nlohmann::json cuda_versions() {
  int runtime = 0, driver = 0;
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  return {{"cuda_runtime", version_text(runtime)}, {"cuda_driver", version_text(driver)}};
}

void read_on_cuda(int index, const void* data, size_t bytes, unsigned* sink) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(index));
  launch_read(data, bytes, sink, c10::cuda::getCurrentCUDAStream().stream());
}

double cuda_counted_seconds(int index, const std::function<void()>& call, int64_t in_graph) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(index));
  const c10::cuda::CUDAStream side =
      c10::cuda::getStreamFromPool(/*isHighPriority=*/false, guard.current_device().index());
  constexpr int kWarmUp = 4, kSamples = 9, kCalls = 20;
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (int i = 0; i < kWarmUp; ++i) call();
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const c10::cuda::CUDAStreamGuard on_side(side);
  at::cuda::CUDAGraph graph;
  if (in_graph > 0) {
    graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);  // Attendance's thread looks at events meanwhile
    for (int64_t i = 0; i < in_graph; ++i) call();
    graph.capture_end();
  }
  const auto once = [&] { in_graph > 0 ? graph.replay() : call(); };
  const Event begin = make_event(), end = make_event();
  std::vector<double> samples;
  for (int s = 0; s < kSamples + 1; ++s) {  // the first one warms up
    check(cudaEventRecord(begin.get(), side.stream()), "cudaEventRecord");
    for (int i = 0; i < kCalls; ++i) once();
    check(cudaEventRecord(end.get(), side.stream()), "cudaEventRecord");
    check(cudaEventSynchronize(end.get()), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "cudaEventElapsedTime");
    if (s > 0)
      samples.push_back(static_cast<double>(milliseconds) / 1e3 / kCalls /
                        std::max<double>(1, static_cast<double>(in_graph)));
  }
  return median(samples);
}

double cuda_seconds_per_call(int index, const std::function<void(int64_t)>& call, const TimingOptions& options) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(index));
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  int64_t next = 0;
  constexpr int kWarmUp = 3, kProbe = 4;
  for (int i = 0; i < kWarmUp; ++i) call(next++);
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  Stopwatch watch;
  for (int i = 0; i < kProbe; ++i) call(next++);
  const double launching = watch.seconds() / kProbe;
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const double estimate = std::max(watch.seconds() / kProbe, 1e-7);
  const auto calls =
      static_cast<int>(std::clamp(options.target_seconds / estimate, 4.0, static_cast<double>(options.max_calls)));
  const double pause = std::min(kLongestPause, 1e-4 + 1.5 * launching * calls);
  const Event begin = make_event(), end = make_event();
  std::vector<double> samples;
  for (int s = 0; s < options.samples; ++s) {
    at::cuda::sleep(static_cast<int64_t>(pause * kCyclesPerSecond));
    check(cudaEventRecord(begin.get(), stream), "cudaEventRecord");
    for (int i = 0; i < calls; ++i) call(next++);
    check(cudaEventRecord(end.get(), stream), "cudaEventRecord");
    check(cudaEventSynchronize(end.get()), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "cudaEventElapsedTime");
    samples.push_back(static_cast<double>(milliseconds) / 1e3 / calls);
  }
  return median(samples);
}

}  // namespace trireme::bench
