// The two lists of actions a plan may hold: make an attempt's objects, and take attempts apart. Internal to the
// planner.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "operator/controller/plan.h"

namespace trireme::controller {

// "scheduling.k8s.io/v1alpha2" + "podgroups"; a group version without a slash is core.
kube::Resource resource_of(const std::string& group_version, const std::string& plural, const std::string& kind = {});

struct WantedPod {
  std::string role;
  int64_t rank = 0;
  std::string name;
};
// Every pod of an attempt, actor first.
std::vector<WantedPod> wanted_pods(const RLJob& job, int64_t attempt);

// Service, gang, ConfigMap, then `missing`. The Service comes first and goes last: while it stands, the attempt has
// remains.
std::vector<Action> create_actions(const AttemptContext& context, const std::vector<WantedPod>& missing);
Action service_action(const AttemptContext& context, int wave);
// The job's NetworkPolicy, when it is not as it should be; nothing when it is, or is not looked after.
std::optional<Action> policy_action(const Observed& observed, const AttemptContext& context, int wave);
// `missing` alone, when the rest of the attempt stands.
std::vector<Action> pod_actions(const AttemptContext& context, const std::vector<WantedPod>& missing, int wave);
// Of a pod of the job, by its UID.
Action remove_pod(const ObservedPod& pod);

struct Cleanup {
  std::vector<Action> actions;
  bool alive = false;                  // a pod of these attempts still runs, or may
  const ObservedPod* stuck = nullptr;  // was told to go longer ago than the termination timeout, and has not
};
// Takes apart the attempts for which `is_over` is true. `keep` says which ended pods stay for their logs.
Cleanup cleanup(const Observed& observed, const PlanOptions& options, const scheduling::Backend& backend,
                const std::function<bool(int64_t attempt)>& is_over,
                const std::function<bool(const ObservedPod&)>& keep);

}  // namespace trireme::controller
