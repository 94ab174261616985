// What ran on a device and when, kernel by kernel, by LibTorch's profiler (Kineto over CUPTI; kernels of a CUDA graph
// are seen one by one).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

namespace trireme::bench {

// All calls of kernels (and copies) of one name.
struct TracedKernel {
  std::string name;
  int64_t calls = 0;
  double seconds = 0;  // from its start to its end, whatever ran beside it
  double alone = 0;    // of these, after the end of all that began before it: what it adds to the whole
  double idle = 0;     // between the end of all that began before it and its start
};
struct Trace {
  double seconds = 0;                 // from the first kernel's start to the last one's end
  std::vector<TracedKernel> kernels;  // by what they add, largest first; empty on CPU
};

struct TracedCall {
  std::string name;
  int64_t start = 0, end = 0;  // nanoseconds
};
Trace summarize(std::vector<TracedCall> calls);

// Runs `work`, which may only queue; what the device does for it is written to `file` in Chrome's trace format (open it
// in ui.perfetto.dev). On CPU the file holds LibTorch's operators. Tracing slows the host, not the kernels.
Trace trace_device(at::Device device, const std::string& file, const std::function<void()>& work);

void print_trace(const Trace& trace, int64_t steps, std::ostream& out);  // per step

}  // namespace trireme::bench
