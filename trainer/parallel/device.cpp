#include "trainer/parallel/device.h"

#include <algorithm>

#include "base/error.h"

namespace trireme {

std::vector<std::pair<std::string, std::string>> driver_settings(const std::vector<Layout>& layouts) {
  const auto any = [&](int64_t Layout::*axis) {
    return std::any_of(layouts.begin(), layouts.end(), [axis](const Layout& layout) { return layout.*axis > 1; });
  };
  std::vector<std::pair<std::string, std::string>> settings;
  // Streams that share one of the device's queues wait for each other: what a stage or tensor rank receives must not
  // stand before what it computes.
  if (any(&Layout::tp) || any(&Layout::pp)) settings.emplace_back("CUDA_DEVICE_MAX_CONNECTIONS", "32");
  // A kernel that is loaded when it is first launched may wait for what runs on the device: another stream that waits
  // for another stage, which may wait for this one likewise.
  if (any(&Layout::pp)) settings.emplace_back("CUDA_MODULE_LOADING", "EAGER");
  return settings;
}

void require_hopper(const std::string& name, int major, int minor) {
  if (major == 9 && minor == 0) return;
  fail_user("this machine's GPU is a " + name + " (compute capability " + std::to_string(major) + "." +
            std::to_string(minor) +
            "); the kernels are for Hopper (9.0: H100, H200, GH200). Use one of these, or the "
            "CPU (cluster.device=cpu, --device cpu)");
}

}  // namespace trireme
