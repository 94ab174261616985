#include "operator/controller/ages.h"

#include "api/runtime.h"
#include "operator/controller/slots.h"

namespace trireme::controller {

void Ages::fill(Observed& observed, int64_t now_ms) {
  std::map<std::string, int64_t> kept;
  const auto age = [&](const std::string& tag) {
    const auto before = since_.find(tag);
    const int64_t at = before == since_.end() ? now_ms : before->second;
    kept.emplace(tag, at);
    return Milliseconds(now_ms - at);
  };
  const RLJobStatus& status = observed.job.status;
  int64_t there = 0, gated = 0;
  for (ObservedPod& pod : observed.pods) {
    if (pod.ended() || pod.main_exit) pod.ended_for = age("ended " + pod.uid);
    if (pod.deleting) pod.deleting_for = age("deleting " + pod.uid);
    if (pod.alive() && pod.node_state == NodeState::kNotReady) pod.on_bad_node_for = age("not ready " + pod.uid);
    if (!pod.waiting.empty() && pod.alive()) pod.waiting_for = age("waiting " + pod.waiting + " " + pod.uid);
    if (pod.attempt != status.attempt) continue;
    ++there;
    gated += pod.gated;
  }
  const int64_t wanted = total_pods(observed.job.spec);
  const std::string attempt = std::to_string(status.attempt);
  // A queue that holds the gang may do so for as long as it likes; but it can only admit a gang that is there.
  const bool held = gated > 0 && there >= wanted;
  const bool waits = status.phase == phase::kQueued && !held && !core_placed(observed);
  observed.unplaced_for = waits ? age("unplaced " + attempt) : Milliseconds(0);
  observed.starting_for = status.phase == phase::kStarting ? age("starting " + attempt) : Milliseconds(0);
  observed.silent_for = status.phase == phase::kRunning ? age("running " + attempt) : Milliseconds(0);
  const bool lacks = status.phase == phase::kRunning && lacks_generation(observed);
  // The first look counts as a millisecond, so that 0 says that nothing lacks.
  observed.generation_lacks_for = lacks ? age("generation " + attempt) + Milliseconds(1) : Milliseconds(0);
  since_ = std::move(kept);
}

}  // namespace trireme::controller
