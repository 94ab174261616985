#include "operator/controller/actions.h"

#include <algorithm>
#include <memory>
#include <set>

#include "api/runtime.h"
#include "operator/controller/failure.h"
#include "operator/controller/network_policy.h"

namespace trireme::controller {
namespace {

Action create(const kube::Resource& resource, Json body, int wave) {
  Action action;
  action.kind = Action::Kind::kCreate;
  action.wave = wave;
  action.resource = resource;
  action.name = body["metadata"]["name"].get<std::string>();
  action.body = std::move(body);
  return action;
}

Action remove(const kube::Resource& resource, const std::string& name, int wave) {
  Action action;
  action.kind = Action::Kind::kDelete;
  action.wave = wave;
  action.resource = resource;
  action.name = name;
  return action;
}

// After a crash, a hang or a lost node the ranks that are left cannot save anything together: their pods need not have
// the time that a checkpoint takes. After a pod was taken away gracefully they can.
bool nothing_to_save(const RLJobStatus& status, int64_t attempt) {
  static const std::set<std::string> kGraceful = {kReasonDeleted, "Preempted",         "Evicted",
                                                  "NodeShutdown", "AdmissionRejected", kReasonTooFew};
  const auto& failure = status.last_failure;
  return failure && failure->action != kActionReplacePod && failure->attempt == attempt &&
         kGraceful.count(failure->reason) == 0 && failure->exit_code != kExitCheckpointed;
}

// What the bodies of an attempt's pods are made of, after the plan and what it looked at are gone.
struct PodSource {
  explicit PodSource(const AttemptContext& c)
      : job(c.job), attempt(c.attempt), backend(c.backend), options(c.options) {}
  AttemptContext context() const { return {job, attempt, backend, options}; }

  RLJob job;
  int64_t attempt;
  scheduling::Backend backend;
  ObjectOptions options;
};

constexpr int64_t kShortGraceSeconds = 30;
constexpr int64_t kMostAttempts = 32;  // that share a group of Kueue's, when a job is deleted

}  // namespace

Action service_action(const AttemptContext& context, int wave) {
  return create(kube::resources::kServices, headless_service(context), wave);
}

std::optional<Action> policy_action(const Observed& observed, const AttemptContext& context, int wave) {
  if (!observed.policies_known) return std::nullopt;
  if (!wants_network_policy(context.job, context.options)) {
    if (!observed.policy) return std::nullopt;
    Action action = remove(kube::resources::kNetworkPolicies, network_policy_name(context.job.metadata.name), wave);
    action.uid = observed.policy->uid;
    return action;
  }
  Json wanted = network_policy(context);
  const uint64_t right = policy_fingerprint(wanted["spec"]);
  if (observed.policy && (observed.policy->spec == right || observed.policy->stands_for == right)) return std::nullopt;
  Action action = create(kube::resources::kNetworkPolicies, std::move(wanted), wave);
  action.kind = Action::Kind::kApply;
  return action;
}

std::vector<Action> create_actions(const AttemptContext& context, const std::vector<WantedPod>& missing) {
  std::vector<Action> actions;
  int wave = 0;
  actions.push_back(service_action(context, wave++));
  actions.push_back(create(kube::resources::kConfigMaps, attempt_config_map(context), wave));
  if (context.job.spec.roles.reward)
    actions.push_back(create(kube::resources::kServices, reward_service(context), wave));
  for (scheduling::Object& object : scheduling::gang_objects(context.backend, gang_of(context))) {
    const std::string kind = object.body["kind"].get<std::string>();
    actions.push_back(
        create(kube::resource_of(object.group_version, object.resource, kind), std::move(object.body), wave++));
  }
  for (Action& action : pod_actions(context, missing, wave + 1)) actions.push_back(std::move(action));
  return actions;
}

std::vector<Action> pod_actions(const AttemptContext& context, const std::vector<WantedPod>& missing, int wave) {
  std::vector<Action> actions;
  const auto source = std::make_shared<const PodSource>(context);
  for (const WantedPod& wanted : missing) {
    Action action;
    action.wave = wave;
    action.resource = kube::resources::kPods;
    action.name = pod_name(source->job.metadata.name, wanted.role, wanted.rank, source->attempt, wanted.incarnation);
    action.role = wanted.role;
    action.make = [source, wanted] {
      return pod(source->context(), wanted.role, wanted.rank, wanted.incarnation, wanted.failures);
    };
    actions.push_back(std::move(action));
  }
  return actions;
}

Action remove_pod(const ObservedPod& pod) {
  Action action = remove(kube::resources::kPods, pod.name, 0);
  action.uid = pod.uid;
  return action;
}

Cleanup cleanup(const Observed& observed, const scheduling::Backend& backend,
                const std::function<bool(int64_t attempt)>& is_over,
                const std::function<bool(const ObservedPod&)>& keep) {
  Cleanup result;
  const RLJob& job = observed.job;
  const Milliseconds limit{job.spec.failure_policy.termination_timeout_seconds * 1000};
  for (const ObservedPod& pod : observed.pods) {
    if (!is_over(pod.attempt)) continue;
    if (pod.alive()) result.alive = true;
    if (pod.ended() && keep(pod)) continue;
    Action action = remove_pod(pod);
    if (nothing_to_save(job.status, pod.attempt))
      action.grace_period_s = std::min(kShortGraceSeconds, job.spec.checkpoint.timeout_seconds);
    if (pod.deleting) {
      // Only a kubelet can end a pod for certain, and one that is silent may run it still. Somebody has to say that the
      // node is off: by deleting its object or by the taint out-of-service.
      if (pod.node_state != NodeState::kGone) {
        if (pod.alive() && pod.deleting_for >= limit && !result.stuck) result.stuck = &pod;
        continue;
      }
      action.grace_period_s = 0;
    }
    result.actions.push_back(std::move(action));
  }
  // Of the present attempt's gang, when it outlives the attempts before.
  const bool current_over = is_over(job.status.attempt);
  for (const auto& [attempt, service] : observed.services) {
    if (!is_over(attempt)) continue;
    int wave = 1;
    const std::string name = attempt_service_name(job.metadata.name, attempt);
    const std::string gang = service.gang.empty() ? name : service.gang;
    if (current_over || gang != job.status.reservation) {
      for (const scheduling::ObjectName& object : scheduling::gang_cleanup(backend, gang)) {
        result.actions.push_back(remove(kube::resource_of(object.group_version, object.resource), object.name, wave));
      }
    }
    result.actions.push_back(
        remove(kube::resources::kConfigMaps, topology_config_map_name(job.metadata.name, attempt), wave));
    result.actions.push_back(remove(kube::resources::kServices, name, wave + 1));
    result.actions.back().uid = service.uid;
  }
  return result;
}

// Its pods are in the group of their own attempt, or of an earlier one.
std::vector<Action> orphan_actions(const scheduling::Backend& kueue, const std::string& job, int64_t last) {
  std::vector<Action> actions;
  for (int64_t attempt = std::max<int64_t>(1, last - kMostAttempts); attempt <= last; ++attempt) {
    for (const scheduling::ObjectName& object : scheduling::gang_cleanup(kueue, attempt_service_name(job, attempt))) {
      actions.push_back(remove(kube::resource_of(object.group_version, object.resource), object.name, 0));
    }
  }
  return actions;
}

}  // namespace trireme::controller
