// The device of step_runner.h in builds without CUDA: there is none.
#include "base/error.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {
namespace {

[[noreturn]] void none() { fail_internal("this build has no CUDA"); }

}  // namespace

std::unique_ptr<StepRunner> make_device_runner(const Model&, KvArena&, int64_t, int64_t,
                                               std::shared_ptr<const DevicePartition>) {
  none();
}

DeviceMemory device_memory(at::Device) { none(); }
void empty_device_cache(at::Device) { none(); }

}  // namespace trireme
