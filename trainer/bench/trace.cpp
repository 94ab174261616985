#include "trainer/bench/trace.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "trainer/bench/report.h"
#include "trainer/parallel/device.h"

namespace trireme::bench {
namespace {

constexpr size_t kLongestName = 72;

std::string microseconds(double seconds) { return format_fixed(seconds * 1e6, 1); }

}  // namespace

Trace summarize(std::vector<TracedCall> calls) {
  Trace trace;
  if (calls.empty()) return trace;
  std::sort(calls.begin(), calls.end(), [](const TracedCall& a, const TracedCall& b) { return a.start < b.start; });
  std::map<std::string, TracedKernel> kernels;
  int64_t ended = calls.front().start;
  for (const TracedCall& call : calls) {
    TracedKernel& kernel = kernels[call.name];
    kernel.name = call.name;
    ++kernel.calls;
    kernel.seconds += static_cast<double>(call.end - call.start) * 1e-9;
    kernel.idle += static_cast<double>(std::max<int64_t>(0, call.start - ended)) * 1e-9;
    kernel.alone += static_cast<double>(std::max<int64_t>(0, call.end - std::max(ended, call.start))) * 1e-9;
    ended = std::max(ended, call.end);
  }
  trace.seconds = static_cast<double>(ended - calls.front().start) * 1e-9;
  for (auto& [name, kernel] : kernels) trace.kernels.push_back(std::move(kernel));
  std::sort(trace.kernels.begin(), trace.kernels.end(),
            [](const TracedKernel& a, const TracedKernel& b) { return a.alone + a.idle > b.alone + b.idle; });
  return trace;
}

Trace trace_device(at::Device device, const std::string& file, const std::function<void()>& work) {
  using torch::profiler::impl::ActivityType;
  const std::set<ActivityType> activities{device.is_cuda() ? ActivityType::CUDA : ActivityType::CPU};
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  synchronize(device);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
  work();
  synchronize(device);
  const auto result = torch::autograd::profiler::disableProfiler();
  std::vector<TracedCall> calls;
  for (const auto& event : result->events()) {
    if (event.deviceType() != c10::DeviceType::CUDA) continue;
    calls.push_back({event.name(), static_cast<int64_t>(event.startNs()),
                     static_cast<int64_t>(event.startNs() + event.durationNs())});
  }
  result->save(file);
  if (!std::filesystem::exists(file)) fail_user("--trace: " + file + " could not be written");
  return summarize(std::move(calls));
}

void print_trace(const Trace& trace, int64_t steps, std::ostream& out) {
  if (trace.kernels.empty()) return;
  const auto n = static_cast<double>(steps);
  Table table({"kernel", "calls a step", "us a call", "us added a step", "idle us before, a step"});
  for (const TracedKernel& kernel : trace.kernels) {
    std::string name = kernel.name;
    if (name.size() > kLongestName) name.resize(kLongestName);
    table.add({name, format_fixed(static_cast<double>(kernel.calls) / n, 1),
               microseconds(kernel.seconds / static_cast<double>(kernel.calls)), microseconds(kernel.alone / n),
               microseconds(kernel.idle / n)});
  }
  table.print(out);
  out << "a step of the trace: " << format_fixed(trace.seconds / n * 1e3, 3) << " ms\n";
}

}  // namespace trireme::bench
