#include "operator/controller/failure.h"

#include <algorithm>
#include <csignal>
#include <map>
#include <set>
#include <tuple>

#include "api/runtime.h"
#include "base/error.h"

namespace trireme::controller {
namespace {

template <class T>
bool allows(const std::vector<T>& list, const std::optional<T>& value) {
  return list.empty() || (value && std::find(list.begin(), list.end(), *value) != list.end());
}

bool matches(const FailureRule& rule, const Failure& failure) {
  return allows(rule.on_exit_codes, failure.exit_code) && allows(rule.on_signals, failure.signal) &&
         allows(rule.on_pod_reasons, std::optional<std::string>(failure.reason)) &&
         allows(rule.roles, std::optional<std::string>(failure.role));
}

// What the kubelet says of a container that cannot begin. True: it may still be mended from outside.
const std::map<std::string, bool>& start_failures() {
  static const std::map<std::string, bool> reasons = {
      {"InvalidImageName", false},          {"ErrImageNeverPull", false},   {"ErrImagePull", true},
      {"CreateContainerConfigError", true}, {"CreateContainerError", true}, {"RunContainerError", true}};
  return reasons;
}

Verdict built_in(const Failure& failure) {
  static const std::set<std::string> kFree = {kReasonDeleted, kReasonNodeLost, "Preempted",
                                              "Evicted",      "NodeShutdown",  "AdmissionRejected"};
  Verdict verdict;
  verdict.avoid_node = failure.node_refused;
  const bool service = is_service_role(failure.role);
  const bool engine = failure.role == "generation";  // our own program, with our exit codes
  if (failure.reason == kReasonTooFew) return verdict;
  verdict.replace = service;
  if (start_failures().count(failure.reason) > 0) {
    verdict.action = failure.trained_before ? FailureAction::kRestartFree : FailureAction::kFailJob;
    verdict.replace = service && failure.trained_before;
  } else if (service && failure.exit_code && !(engine && failure.exit_code == kExitConfig)) {
    verdict.avoid_node |= engine && failure.exit_code == kExitNode;
  } else if (kFree.count(failure.reason) > 0) {
    verdict.action = FailureAction::kRestartFree;
  } else if (failure.exit_code == kExitConfig) {
    verdict.action = FailureAction::kFailJob;
    verdict.replace = false;
  } else if (failure.exit_code == kExitNode) {
    verdict.action = FailureAction::kAvoidNodeAndRestart;
  } else if (failure.exit_code == kExitCheckpointed) {
    verdict.action = FailureAction::kRestartFree;
  }
  return verdict;
}

Failure of_pod(const ObservedPod& pod) {
  Failure failure;
  failure.role = pod.role;
  failure.rank = pod.rank;
  failure.pod = pod.name;
  failure.node = pod.node;
  failure.reason = pod.reason;
  failure.message = pod.message;
  failure.log = pod.log;
  failure.pod_uid = pod.uid;
  failure.exit_code = pod.exit_code;
  failure.signal = signal_of(pod);
  failure.at_ms = pod.finished_ms;
  failure.seen_for = pod.ended_for;
  return failure;
}

}  // namespace

std::optional<int64_t> signal_of(const ObservedPod& pod) {
  if (pod.signal && *pod.signal > 0) return pod.signal;
  if (pod.exit_code && *pod.exit_code > 128 && *pod.exit_code < 128 + 65) return *pod.exit_code - 128;
  return std::nullopt;
}

std::optional<Failure> pod_failure(const ObservedPod& pod, Milliseconds node_grace, Milliseconds start_grace) {
  if (pod.done()) return std::nullopt;
  if (pod.failed()) {
    Failure failure = of_pod(pod);
    if (failure.reason.empty()) failure.reason = "Error";
    // A rank that had not begun ends by the deletion's SIGTERM; seen late, the pod is already over.
    if (pod.deleting && failure.reason == "Error" && signal_of(pod) == SIGTERM) failure.reason = kReasonDeleted;
    failure.consequence = failure.exit_code == kExitCommunication || failure.exit_code == kExitCheckpointed;
    // An eviction over the API deletes the pod; a kubelet's only ends it.
    failure.node_refused = failure.reason == "AdmissionRejected" || (failure.reason == "Evicted" && !pod.deleting);
    return failure;
  }
  // A template that tolerates everything may bring a pod to a node that is NotReady already.
  const Milliseconds bad_for = std::min(pod.node_bad_for, pod.on_bad_node_for);
  if (pod.node_state == NodeState::kGone || (pod.node_state == NodeState::kNotReady && bad_for >= node_grace)) {
    Failure failure = of_pod(pod);
    failure.reason = kReasonNodeLost;
    failure.message = pod.node_state == NodeState::kGone
                          ? "the node is gone"
                          : "the node has not been ready for " + std::to_string(pod.node_bad_for.count() / 1000) + " s";
    return failure;
  }
  if (pod.deleting) {
    Failure failure = of_pod(pod);
    if (failure.reason.empty() || failure.reason == "Error") failure.reason = kReasonDeleted;
    failure.message = "the pod is being deleted, and not by this operator";
    return failure;
  }
  const auto waits = start_failures().find(pod.waiting);
  if (waits != start_failures().end() && (!waits->second || pod.waiting_for >= start_grace)) {
    Failure failure = of_pod(pod);
    failure.reason = pod.waiting;
    return failure;
  }
  return std::nullopt;
}

const Failure& first_cause(const std::vector<Failure>& failures) {
  TRIREME_CHECK(!failures.empty(), "first_cause of nothing");
  auto order = [](const Failure& f) {
    return std::make_tuple(f.consequence, f.at_ms == 0 ? INT64_MAX : f.at_ms, f.role, f.rank.value_or(0));
  };
  return *std::min_element(failures.begin(), failures.end(),
                           [&](const Failure& a, const Failure& b) { return order(a) < order(b); });
}

Verdict judge(const FailurePolicy& policy, const Failure& failure) {
  Verdict verdict = built_in(failure);
  for (const FailureRule& rule : policy.rules) {
    if (!matches(rule, failure)) continue;
    verdict.action = rule.action;
    verdict.replace = false;
    break;
  }
  verdict.counted = verdict.action == FailureAction::kRestart || verdict.action == FailureAction::kAvoidNodeAndRestart;
  verdict.avoid_node |= verdict.action == FailureAction::kAvoidNodeAndRestart;
  return verdict;
}

std::string describe(const Failure& failure) {
  std::string text = failure.role.empty() ? "the attempt" : failure.role;
  if (failure.rank) text += " " + std::to_string(*failure.rank);
  text += ": " + failure.reason;
  if (failure.exit_code) text += ", exit code " + std::to_string(*failure.exit_code);
  if (failure.signal) text += ", signal " + std::to_string(*failure.signal);
  if (!failure.node.empty()) text += ", on node " + failure.node;
  if (!failure.message.empty()) text += ": " + failure.message;
  return text;
}

}  // namespace trireme::controller
