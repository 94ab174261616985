#include "operator/controller/ages.h"

#include <algorithm>

#include "api/runtime.h"

namespace trireme::controller {

int64_t placed_pods(const Observed& observed) {
  return std::count_if(observed.pods.begin(), observed.pods.end(), [&](const ObservedPod& pod) {
    return pod.attempt == observed.job.status.attempt && pod.scheduled;
  });
}

void Ages::fill(Observed& observed, int64_t now_ms) {
  std::map<std::string, int64_t> kept;
  const auto age = [&](const std::string& tag) {
    const auto before = since_.find(tag);
    const int64_t at = before == since_.end() ? now_ms : before->second;
    kept.emplace(tag, at);
    return Milliseconds(now_ms - at);
  };
  const RLJobStatus& status = observed.job.status;
  if (attempt_ != status.attempt) {
    attempt_ = status.attempt;
    failures_.clear();
    for (const RoleStatus& role : status.roles) failures_[role.name].before = role.restarts;
  }
  int64_t there = 0, gated = 0;
  for (ObservedPod& pod : observed.pods) {
    if (pod.ended() || pod.main_exit) pod.ended_for = age("ended " + pod.uid);
    if (pod.deleting) pod.deleting_for = age("deleting " + pod.uid);
    if (!pod.waiting.empty() && pod.alive()) pod.waiting_for = age("waiting " + pod.waiting + " " + pod.uid);
    if (pod.attempt != status.attempt) continue;
    ++there;
    gated += pod.gated;
    if (!pod.failed()) continue;
    Failures& of_role = failures_[pod.role];
    of_role.uids.insert(pod.uid);
    pod.failures_of_role = of_role.before + static_cast<int64_t>(of_role.uids.size());
  }
  const int64_t wanted = total_pods(observed.job.spec);
  const std::string attempt = std::to_string(status.attempt);
  // A queue that holds the gang may do so for as long as it likes; but it can only admit a gang that is there.
  const bool held = gated > 0 && there >= wanted;
  const bool waits = status.phase == phase::kQueued && !held && placed_pods(observed) < wanted;
  observed.unplaced_for = waits ? age("unplaced " + attempt) : Milliseconds(0);
  observed.starting_for = status.phase == phase::kStarting ? age("starting " + attempt) : Milliseconds(0);
  observed.silent_for = status.phase == phase::kRunning ? age("running " + attempt) : Milliseconds(0);
  since_ = std::move(kept);
}

}  // namespace trireme::controller
