#include "operator/controller/failure.h"

#include <algorithm>
#include <csignal>
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

FailureAction built_in(const Failure& failure) {
  static const std::set<std::string> kFree = {kReasonDeleted, kReasonNodeLost, "Preempted",
                                              "Evicted",      "NodeShutdown",  "AdmissionRejected"};
  if (kFree.count(failure.reason) > 0) return FailureAction::kRestartFree;
  if (failure.exit_code == kExitConfig) return FailureAction::kFailJob;
  if (failure.exit_code == kExitNode) return FailureAction::kAvoidNodeAndRestart;
  if (failure.exit_code == kExitCheckpointed) return FailureAction::kRestartFree;
  return FailureAction::kRestart;
}

Failure of_pod(const ObservedPod& pod) {
  Failure failure;
  failure.role = pod.role;
  failure.rank = pod.rank;
  failure.pod = pod.name;
  failure.node = pod.node;
  failure.reason = pod.reason;
  failure.message = pod.message;
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

std::optional<Failure> pod_failure(const ObservedPod& pod, Milliseconds node_grace) {
  if (pod.phase == PodPhase::kSucceeded) return std::nullopt;
  if (pod.phase == PodPhase::kFailed) {
    Failure failure = of_pod(pod);
    if (failure.reason.empty()) failure.reason = "Error";
    // A rank that had not begun ends by the deletion's SIGTERM; seen late, the pod is already over.
    if (pod.deleting && failure.reason == "Error" && signal_of(pod) == SIGTERM) failure.reason = kReasonDeleted;
    failure.consequence = failure.exit_code == kExitCommunication || failure.exit_code == kExitCheckpointed;
    return failure;
  }
  if (pod.node_state == NodeState::kGone ||
      (pod.node_state == NodeState::kNotReady && pod.node_bad_for >= node_grace)) {
    Failure failure = of_pod(pod);
    failure.reason = kReasonNodeLost;
    failure.message = "node " + pod.node + (pod.node_state == NodeState::kGone ? " is gone" : " is not ready");
    return failure;
  }
  if (pod.deleting) {
    Failure failure = of_pod(pod);
    if (failure.reason.empty() || failure.reason == "Error") failure.reason = kReasonDeleted;
    failure.message = "the pod is being deleted, and not by this operator";
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
  Verdict verdict;
  verdict.action = built_in(failure);
  for (const FailureRule& rule : policy.rules) {
    if (!matches(rule, failure)) continue;
    verdict.action = rule.action;
    break;
  }
  verdict.counted = verdict.action == FailureAction::kRestart || verdict.action == FailureAction::kAvoidNodeAndRestart;
  return verdict;
}

std::string describe(const Failure& failure) {
  std::string text = failure.role.empty() ? "the attempt" : failure.role;
  if (failure.rank) text += " " + std::to_string(*failure.rank);
  text += ": " + failure.reason;
  if (failure.exit_code) text += ", exit code " + std::to_string(*failure.exit_code);
  if (failure.signal) text += ", signal " + std::to_string(*failure.signal);
  if (!failure.node.empty()) text += ", on node " + failure.node;
  return text;
}

}  // namespace trireme::controller
