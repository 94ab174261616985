// The lists of actions a plan may hold: make an attempt's objects, take attempts apart; and what is left to do for a
// job that is gone. Pure; knows no plan.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "operator/controller/action.h"
#include "operator/controller/objects.h"
#include "operator/controller/observed.h"
#include "operator/controller/pod_names.h"
#include "operator/scheduling/gang.h"

namespace trireme::controller {

// Service, gang, ConfigMap, then `missing`. The Service comes first and goes last: while it stands, the attempt has
// remains.
std::vector<Action> create_actions(const AttemptContext& context, const std::vector<WantedPod>& missing);
Action service_action(const AttemptContext& context, int wave);
// The job's NetworkPolicy, when it is not as it should be; nothing when it is, or is not looked after.
std::optional<Action> policy_action(const Observed& observed, const AttemptContext& context, int wave);
// `missing` alone, when the rest of the attempt stands. Thousands of bodies would not fit into memory: each is made
// when it is asked for (Action::make), from copies.
std::vector<Action> pod_actions(const AttemptContext& context, const std::vector<WantedPod>& missing, int wave);
// Of a pod of the job, by its UID.
Action remove_pod(const ObservedPod& pod);

struct Cleanup {
  std::vector<Action> actions;
  bool alive = false;                  // a pod of these attempts still runs, or may
  const ObservedPod* stuck = nullptr;  // was told to go longer ago than the termination timeout, and has not
};
// Takes apart the attempts for which `is_over` is true. `keep` says which ended pods stay for their logs.
Cleanup cleanup(const Observed& observed, const scheduling::Backend& backend,
                const std::function<bool(int64_t attempt)>& is_over,
                const std::function<bool(const ObservedPod&)>& keep);

// Of a job that is gone: Kueue keeps a finalizer on the pods of a group while its Workload stands, and the Workload
// belongs to the pods, so that neither would ever go. `last`: the highest attempt of which a pod is going.
std::vector<Action> orphan_actions(const scheduling::Backend& kueue, const std::string& job, int64_t last);

}  // namespace trireme::controller
