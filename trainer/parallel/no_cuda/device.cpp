// device.h in builds without CUDA: there is the CPU.
#include "trainer/parallel/device.h"

#include "base/error.h"
#include "base/host.h"

namespace trireme {

void prepare_devices(const std::vector<Layout>&) {}

at::Device choose_device(const std::string& setting, int /*local_rank*/) {
  TRIREME_CHECK(setting == "cpu" || setting == "cuda" || setting == "auto", "unknown device " + setting);
  if (setting == "cuda") {
    fail_user("cluster.device is cuda but this is the CPU build; build the preset cuda, or use cluster.device=cpu");
  }
  return at::kCPU;
}

void synchronize(at::Device) {}
int64_t memory_bytes_of(at::Device) { return total_memory_bytes(); }
std::string device_name(at::Device) { return "cpu"; }
bool queue_call(at::Device, void (*)(void*)) { return false; }

}  // namespace trireme
