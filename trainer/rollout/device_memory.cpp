#include <algorithm>

#include "base/text.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {

std::string to_string(const DeviceMemory& m) {
  const auto text = [](int64_t bytes) { return format_bytes(static_cast<uint64_t>(std::max<int64_t>(0, bytes))); };
  return "of " + text(m.total) + " " + text(m.free) + " are free, " + text(m.tensors) + " tensors, " + text(m.cached) +
         " kept by their allocator, " + text(m.total - m.free - m.tensors - m.cached) + " others";
}

int64_t device_available_bytes(at::Device device) {
  const DeviceMemory memory = device_memory(device);
  return memory.free + memory.cached;
}

}  // namespace trireme
