// Slots: which pods of the present attempt count. A generation or reward pod that is lost is made again under a further
// name (its incarnation), and generation pods may be told to be fewer. Of each place (role, rank) the newest pod
// counts; the others are on their way out. Pure.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "operator/controller/observed.h"

namespace trireme::controller {

struct Slots {
  std::vector<const ObservedPod*> newest;      // of each place, in the order in which they were observed
  std::vector<const ObservedPod*> superseded;  // a newer pod has their place
  std::vector<const ObservedPod*> surplus;     // of a service, in places that the specification does not have
};
// Of the attempt that the status names. The pointers are into `observed`.
Slots slots_of(const Observed& observed);

// So many of the pods that no step ends without (core_pods) are as `is` says.
int64_t core_count(const RLJobSpec& spec, const std::vector<const ObservedPod*>& newest,
                   const std::function<bool(const ObservedPod&)>& is);

// So many pods that count have a node; and: those are enough to begin.
int64_t placed_pods(const Observed& observed);
bool core_placed(const Observed& observed);

// The generation role has fewer pods that are ready, or have done their work, than its minReplicas.
bool lacks_generation(const Observed& observed);

}  // namespace trireme::controller
