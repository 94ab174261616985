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

struct Failure {
  std::string role;
  std::optional<int64_t> rank;
  std::string pod;
  std::string node;
  std::string reason;
  std::string message;
  std::optional<int64_t> exit_code;
  std::optional<int64_t> signal;
  int64_t at_ms = 0;         // node's clock, to order failures; 0: unknown
  bool consequence = false;  // most likely the echo of another pod's failure
  Milliseconds seen_for{0};
};

// Exit code 128 + n is signal n when the container's state does not name one.
std::optional<int64_t> signal_of(const ObservedPod& pod);

// A pod of the current attempt that failed, lies on a lost node, or is being taken away by somebody else; nothing if it
// is well. `node_grace`: how long a node must have been NotReady.
std::optional<Failure> pod_failure(const ObservedPod& pod, Milliseconds node_grace);

// The failure that explains the others: no echo before an echo, then the earliest, then the lowest role and rank.
// Requires at least one.
const Failure& first_cause(const std::vector<Failure>& failures);

struct Verdict {
  FailureAction action = FailureAction::kRestart;
  bool counted = true;  // against the budget
};

// The job's rules in order, then the built-in ones: configuration mistakes fail the job, a node fault avoids the node,
// preemption, node loss, deletion from outside and a checkpoint on SIGTERM restart for free, all else restarts.
Verdict judge(const FailurePolicy& policy, const Failure& failure);

// One sentence for status and events.
std::string describe(const Failure& failure);

}  // namespace trireme::controller
