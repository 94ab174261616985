#include "operator/controller/slots.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "api/runtime.h"
#include "operator/controller/failure.h"

namespace trireme::controller {

Slots slots_of(const Observed& observed) {
  std::map<std::string, int64_t> replicas;
  for (const RoleRef& role : roles_of(observed.job.spec)) replicas[role.name] = role.spec->replicas;
  std::map<std::pair<std::string, int64_t>, const ObservedPod*> newest;
  for (const ObservedPod& pod : observed.pods) {
    if (pod.attempt != observed.job.status.attempt) continue;
    const ObservedPod*& best = newest[{pod.role, pod.rank}];
    if (!best || best->incarnation < pod.incarnation) best = &pod;
  }
  Slots slots;
  for (const ObservedPod& pod : observed.pods) {
    if (pod.attempt != observed.job.status.attempt) continue;
    const auto places = replicas.find(pod.role);
    if (is_service_role(pod.role) && (places == replicas.end() || pod.rank >= places->second)) {
      slots.surplus.push_back(&pod);
    } else if (newest.at({pod.role, pod.rank}) != &pod) {
      slots.superseded.push_back(&pod);
    } else {
      slots.newest.push_back(&pod);
    }
  }
  return slots;
}

int64_t core_count(const RLJobSpec& spec, const std::vector<const ObservedPod*>& newest,
                   const std::function<bool(const ObservedPod&)>& is) {
  int64_t count = 0;
  for (const RoleRef& role : roles_of(spec)) {
    const int64_t of_role = std::count_if(newest.begin(), newest.end(),
                                          [&](const ObservedPod* pod) { return pod->role == role.name && is(*pod); });
    count += std::min(of_role, core_pods(role));
  }
  return count;
}

int64_t placed_pods(const Observed& observed) {
  const Slots slots = slots_of(observed);
  return std::count_if(slots.newest.begin(), slots.newest.end(), [](const ObservedPod* pod) { return pod->scheduled; });
}

bool core_placed(const Observed& observed) {
  const RLJobSpec& spec = observed.job.spec;
  return core_count(spec, slots_of(observed).newest, [](const ObservedPod& pod) { return pod.scheduled; }) >=
         core_pods(spec);
}

bool lacks_generation(const Observed& observed) {
  const RLJobSpec& spec = observed.job.spec;
  if (!spec.roles.generation) return false;
  const int64_t wanted = core_pods(RoleRef{"generation", &*spec.roles.generation});
  const Slots slots = slots_of(observed);
  const int64_t there = std::count_if(slots.newest.begin(), slots.newest.end(), [](const ObservedPod* pod) {
    return pod->role == "generation" && !pod->deleting && (pod->done() || (pod->ready && !pod->failed()));
  });
  return there < wanted;
}

}  // namespace trireme::controller
