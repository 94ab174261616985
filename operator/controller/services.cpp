// Pods of services: made again, given up or taken away while their attempt goes on.
#include <algorithm>
#include <set>

#include "api/runtime.h"
#include "operator/controller/planner.h"

namespace trireme::controller {
namespace {

// Somebody took the pod away, or its node: that says nothing about it.
bool was_taken(const Failure& failure) {
  static const std::set<std::string> kTaken = {kReasonDeleted, kReasonNodeLost, "Preempted", "NodeShutdown"};
  return kTaken.count(failure.reason) > 0;
}

}  // namespace

int64_t Planner::failures_in_a_row(const ObservedPod& pod, const Failure& failure) const {
  if (was_taken(failure)) return pod.failures_before;
  return pod.lived_ms >= options_.long_life.count() ? 0 : pod.failures_before + 1;
}

// What Kueue has admitted is a number of pods: a new one would be too many while the old one may run.
bool Planner::may_replace(const ObservedPod& pod) const {
  return backend_.kind != scheduling::BackendKind::kKueue || pod.ended();
}

// True when the failure ends the attempt after all. One generation pod less does not, as long as minReplicas are there.
bool Planner::lose(const ObservedPod& pod, const Failure& failure) {
  Lost lost{&pod, failure, failures_in_a_row(pod, failure), false};
  lost.given_up = lost.failures > job_.spec.failure_policy.max_replacements;
  if (lost.given_up && pod.role != "generation") return true;
  lost_.push_back(std::move(lost));
  return false;
}

void Planner::tell_lost() {
  const Lost* told = nullptr;
  for (const Lost& lost : lost_) {
    if (lost.given_up) {
      const std::string message = lost.pod->name + " is not made again in this attempt, after " +
                                  std::to_string(lost.failures) +
                                  " failures in a row (failurePolicy.maxReplacements): " + describe(lost.failure);
      note_once("PodsReady", "PodGivenUp", message);
      condition("PodsReady", false, "PodGivenUp", message);
    } else if (!told) {
      told = &lost;
    }
  }
  if (!told || (next_.last_failure && next_.last_failure->pod_uid == told->pod->uid)) return;
  next_.last_failure = record_of(told->failure, kActionReplacePod);
  note(true, "PodReplaced",
       describe(told->failure) + "; it alone is replaced in attempt " + std::to_string(next_.attempt));
}

// Nothing of the attempt's follows from these: its newer pods are there already, or it is told to have fewer.
void Planner::remove_outgoing() {
  const auto remove = [&](const ObservedPod& pod) {
    Action action = remove_pod(pod);
    if (pod.deleting) {
      if (pod.node_state != NodeState::kGone) return;
      action.grace_period_s = 0;
    }
    out_.actions.push_back(std::move(action));
  };
  for (const ObservedPod* pod : slots_.superseded) {
    if (!pod->ended() || !keep(*pod)) remove(*pod);
  }
  for (const ObservedPod* pod : slots_.surplus) {
    if (pod->deleting && pod->node_state != NodeState::kGone) continue;
    if (pod->ended() && keep(*pod)) continue;
    if (!o_.live) {  // our copy of the specification may be an old one
      out_.needs_live = true;
      return;
    }
    remove(*pod);
  }
}

// Those whose back-off is over. A node that is at fault is avoided first.
std::vector<WantedPod> Planner::due_pods(bool& avoids) {
  std::vector<WantedPod> due;
  for (const Lost& lost : lost_) {
    if (lost.given_up) continue;
    const ObservedPod& pod = *lost.pod;
    const int64_t wait = was_taken(lost.failure) || lost.failures <= 1
                             ? 0
                             : doubled(options_.backoff_base, lost.failures - 2, options_.backoff_max);
    const int64_t waited = (pod.failed() ? pod.ended_for : pod.waiting_for).count();
    if (waited < wait) {
      requeue(Milliseconds(wait - waited));
      continue;
    }
    due.push_back({pod.role, pod.rank, {}, 1, lost.failures});
    avoids |= avoid_alone(lost.failure);
  }
  if (in(phase::kQueued)) return due;  // make_gang makes those that are not there
  for (WantedPod& wanted : missing_pods()) {
    if (!is_service_role(wanted.role)) continue;
    // One that ran, or a place that is new? In a start a pod is asked for under its first name until it is there.
    const auto before = std::find_if(job_.status.roles.begin(), job_.status.roles.end(),
                                     [&](const RoleStatus& role) { return role.name == wanted.role; });
    const bool is_new = before == job_.status.roles.end() || wanted.rank >= before->desired;
    if (in(phase::kRunning) && !is_new) wanted.incarnation = 1;
    due.push_back(std::move(wanted));
  }
  return due;
}

bool Planner::avoid_alone(const Failure& failure) {
  const Verdict verdict = judge(job_.spec.failure_policy, failure);
  // To Kueue a pod of another affinity would not be one of the group; a back-end that is missing may be Kueue.
  const bool fixed = no_backend_ || backend_.kind == scheduling::BackendKind::kKueue;
  if (!verdict.avoid_node || failure.node.empty() || fixed) return false;
  const auto& nodes = next_.avoided_nodes;
  const bool known =
      std::any_of(nodes.begin(), nodes.end(), [&](const AvoidedNode& node) { return node.name == failure.node; });
  if (known || static_cast<int64_t>(nodes.size()) >= job_.spec.failure_policy.max_avoided_nodes) return false;
  avoid_node(failure, verdict);
  return true;
}

// Numbers grow over a role's pods of the attempt, and the status has the highest before a pod has it: so names are not
// used twice, and the status counts the pods that were made again.
bool Planner::give_numbers(std::vector<WantedPod>& due) {
  bool grows = false;
  for (RoleStatus& row : next_.roles) {
    int64_t top = 0;
    for (const ObservedPod& pod : o_.pods) {
      if (pod.attempt == job_.status.attempt && pod.role == row.name) top = std::max(top, pod.incarnation);
    }
    for (WantedPod& wanted : due) {
      if (wanted.role != row.name) continue;
      if (wanted.incarnation > 0) wanted.incarnation = ++top;
      wanted.name = pod_name(job_.metadata.name, wanted.role, wanted.rank, job_.status.attempt, wanted.incarnation);
    }
    grows |= top > row.restarts;
    row.restarts = std::max(row.restarts, top);
  }
  return grows;
}

void Planner::mend_services() {
  tell_lost();
  remove_outgoing();
  if (out_.needs_live || old_alive_) return;
  bool avoids = false;
  std::vector<WantedPod> due = due_pods(avoids);
  if (due.empty() || lacks_backend()) return;
  if (o_.rejection) {
    describe_refusal("PodsReady", due.size());
    if (o_.rejection_wait > Milliseconds(0)) return requeue(o_.rejection_wait);
  }
  // The cache may be behind; and the job may be going, which our copy does not show.
  if (!o_.live) {
    out_.needs_live = true;
    return;
  }
  if (give_numbers(due) || avoids) return decide();
  if (in(phase::kQueued)) {  // later stays_whole sees to it
    if (auto policy = policy_action(o_, context(), 0)) out_.actions.push_back(std::move(*policy));
  }
  for (Action& action : pod_actions(context(), due, 1)) out_.actions.push_back(std::move(action));
}

std::optional<Failure> Planner::too_few_generate() {
  if (!in(phase::kRunning) || o_.generation_lacks_for <= Milliseconds(0) || o_.nodes_in_doubt) return std::nullopt;
  const Milliseconds limit{job_.spec.health.generation_timeout_seconds * 1000};
  if (o_.generation_lacks_for < limit) {
    requeue(limit - o_.generation_lacks_for);
    return std::nullopt;
  }
  const int64_t least = core_pods(RoleRef{"generation", &*job_.spec.roles.generation});
  Failure failure;
  failure.role = "generation";
  failure.reason = kReasonTooFew;
  failure.message = "fewer than " + std::to_string(least) + " pods (minReplicas) have been ready for " +
                    std::to_string(limit.count() / 1000) + " s";
  for (const Lost& lost : lost_) {
    if (lost.pod->role != "generation") continue;
    failure.pod = lost.pod->name;
    failure.node = lost.pod->node;
    failure.log = lost.pod->log;
    failure.message += "; the last one that failed: " + describe(lost.failure);
    break;
  }
  return failure;
}

}  // namespace trireme::controller
