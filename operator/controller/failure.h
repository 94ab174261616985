// What went wrong in an attempt, and what the failure policy makes of it. Pure.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "operator/controller/observed.h"

namespace trireme::controller {

// Reasons that the planner itself gives; the others come from pods (see ObservedPod::reason).
inline constexpr const char* kReasonDeleted = "Deleted";
inline constexpr const char* kReasonNodeLost = "NodeLost";
inline constexpr const char* kReasonHung = "Hung";
inline constexpr const char* kReasonStartup = "StartupDeadlineExceeded";
inline constexpr const char* kReasonTooFew = "TooFewGenerationPods";
inline constexpr const char* kActionReplacePod = "ReplacePod";  // in lastFailure.action, beside the FailureActions

struct Failure {
  std::string role;
  std::optional<int64_t> rank;
  std::string pod;
  std::string node;
  std::string reason;
  std::string message;  // what describe() does not say already
  std::string log;      // the container's last lines
  std::string pod_uid;
  std::optional<int64_t> exit_code;
  std::optional<int64_t> signal;
  int64_t at_ms = 0;            // node's clock, to order failures; 0: unknown
  bool consequence = false;     // most likely the echo of another pod's failure
  bool node_refused = false;    // by the node's kubelet: it would do so again
  bool trained_before = false;  // by this job: its image and configuration are good ones
  Milliseconds seen_for{0};
};

// Pods of these roles keep no state that others share: one that is lost is replaced alone.
inline bool is_service_role(const std::string& role) { return role == "reward" || role == "generation"; }

// Exit code 128 + n is signal n when the container's state does not name one.
std::optional<int64_t> signal_of(const ObservedPod& pod);

// A pod of the current attempt that failed, lies on a lost node, cannot begin, or is being taken away by somebody else;
// nothing if it is well. `node_grace`: how long a node must have been NotReady; `start_grace`: how long a container
// must have waited for what may still come (an image that cannot be pulled, a Secret that is not there).
std::optional<Failure> pod_failure(const ObservedPod& pod, Milliseconds node_grace, Milliseconds start_grace);

// The failure that explains the others: no echo before an echo, then the earliest, then the lowest role and rank.
// Requires at least one.
const Failure& first_cause(const std::vector<Failure>& failures);

struct Verdict {
  FailureAction action = FailureAction::kRestart;
  bool counted = true;  // against the budget
  bool avoid_node = false;
  bool replace = false;  // this pod alone, within the attempt; `action` has no meaning then
};

// The job's rules in order, then the built-in ones: configuration mistakes fail the job (an image that could be had
// before is waited for instead), any other loss of a service role's pod replaces it alone, a node fault avoids the
// node, preemption, node loss, deletion from outside and a checkpoint on SIGTERM restart for free, all else restarts. A
// node that evicted a pod or refused it is avoided, too.
Verdict judge(const FailurePolicy& policy, const Failure& failure);

// One sentence for status and events.
std::string describe(const Failure& failure);

}  // namespace trireme::controller
