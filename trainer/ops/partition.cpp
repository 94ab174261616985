#include "trainer/ops/partition.h"

#include <map>
#include <mutex>
#include <utility>

#include "base/log.h"
#include "trainer/ops/sms.h"

namespace trireme {
namespace {

thread_local int limit = 0;
thread_local int lane = 0;

}  // namespace

int sm_limit() { return limit; }
int work_lane() { return lane; }

std::shared_ptr<const DevicePartition> split_device(c10::Device device, int64_t background_sms) {
  if (!device.is_cuda() || background_sms <= 0) return nullptr;
  static std::mutex mutex;
  static std::map<std::pair<int, int64_t>, std::shared_ptr<const DevicePartition>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [at, fresh] = known.try_emplace({device.index(), background_sms});
  if (!fresh) return at->second;
  std::string problem;
  at->second = cuda::split_sms(device, background_sms, &problem);
  if (at->second == nullptr)
    log_warn("device", "the SMs cannot be divided (" + problem +
                           "): reference log-probs and values are computed after generation; policy."
                           "generation.background_sms=0 asks for that");
  if (at->second != nullptr && at->second->background_sms > background_sms)
    log_info("device", std::to_string(at->second->background_sms) +
                           " SMs compute beside generation: products do not start on the " +
                           std::to_string(background_sms) + " of policy.generation.background_sms");
  return at->second;
}

PartitionScope::PartitionScope(const DevicePartition& partition, Part part)
    : stream_(part == Part::kForeground ? partition.foreground : partition.background),
      limit_before_(limit),
      lane_before_(lane) {
  limit = part == Part::kForeground ? partition.foreground_sms : partition.background_sms;
  lane = part == Part::kForeground ? 0 : 1;
}

PartitionScope::~PartitionScope() {
  limit = limit_before_;
  lane = lane_before_;
}

}  // namespace trireme
