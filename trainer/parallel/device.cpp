#include "trainer/parallel/device.h"

#include "base/error.h"

namespace trireme {

void require_hopper(const std::string& name, int major, int minor) {
  if (major == 9 && minor == 0) return;
  fail_user("this machine's GPU is a " + name + " (compute capability " + std::to_string(major) + "." +
            std::to_string(minor) +
            "); the kernels are for Hopper (9.0: H100, H200, GH200). Use one of these, or the "
            "CPU (cluster.device=cpu, --device cpu)");
}

}  // namespace trireme
