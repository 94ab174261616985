// Observed: everything the planner may look at. Durations are measured by the operator on its own steady clock since it
// first saw the state in question, so that neither a node's clock nor a jump of ours can end a job.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "api/rljob.h"
#include "base/clock.h"

namespace trireme::controller {

inline constexpr const char* kLabelJob = "trireme.dev/job";
inline constexpr const char* kLabelJobUid = "trireme.dev/job-uid";
inline constexpr const char* kLabelRole = "trireme.dev/role";
inline constexpr const char* kLabelRank = "trireme.dev/rank";
inline constexpr const char* kLabelAttempt = "trireme.dev/attempt";
inline constexpr const char* kLabelIncarnation = "trireme.dev/incarnation";  // of a pod that was made again
inline constexpr const char* kLabelFailures = "trireme.dev/failures";        // see ObservedPod::failures_before
inline constexpr const char* kLabelStatusCa = "trireme.dev/status-ca";       // see status_ca_mark
inline constexpr const char* kLabelGang = "trireme.dev/gang";  // of an attempt's Service, see ObservedService

namespace phase {
inline constexpr const char* kPending =
    "Pending";  // accepted, the pods of an earlier attempt are going (or refused: attempt 0)
inline constexpr const char* kQueued = "Queued";          // pods are being created, queued and placed
inline constexpr const char* kStarting = "Starting";      // every pod has a node; images, rendezvous
inline constexpr const char* kRunning = "Running";        // rank 0 reported that all ranks met
inline constexpr const char* kRestarting = "Restarting";  // as Pending, after a failure
inline constexpr const char* kSuspended = "Suspended";
inline constexpr const char* kComplete = "Complete";
inline constexpr const char* kFailed = "Failed";
}  // namespace phase

inline bool is_terminal(const std::string& p) { return p == phase::kComplete || p == phase::kFailed; }

enum class PodPhase { kPending, kRunning, kSucceeded, kFailed };
enum class NodeState { kUnknown, kReady, kNotReady, kGone };  // kGone also with the out-of-service taint

struct ObservedPod {
  std::string name;
  std::string uid;
  std::string role;
  int64_t rank = -1;
  int64_t attempt = 0;
  int64_t incarnation = 0;      // above 0: made again in its attempt
  int64_t failures_before = 0;  // of the pods that had its place before it, in a row
  PodPhase phase = PodPhase::kPending;
  bool scheduled = false;
  bool ready = false;
  bool gated = false;  // a scheduling gate (Kueue's admission) holds it
  bool deleting = false;
  std::string node;
  std::string status_ca;  // status_ca_mark of the CA that it checks the status server with; empty: none, or not known
  // Why it failed or goes: OOMKilled, Error, Evicted, Preempted, NodeLost, NodeShutdown, AdmissionRejected, ...
  std::string reason;
  std::string message;  // the scheduler's while unscheduled, the kubelet's while it waits, or why it failed
  std::string log;      // the failed container's last lines, as they are
  // What the kubelet waits for: ErrImagePull (also while it backs off), InvalidImageName, ...; empty: nothing unusual.
  std::string waiting;
  std::optional<int64_t> exit_code;
  std::optional<int64_t> signal;
  // Of the main container, when it has ended. The pod may go on with its sidecars.
  std::optional<int64_t> main_exit;
  int64_t finished_ms = 0;  // by the node's clock; only to order failures
  int64_t lived_ms = 0;     // of the container that failed
  NodeState node_state = NodeState::kUnknown;
  bool node_unclear = false;  // the cache does not hold its node, nor has the API server said that it is gone
  Milliseconds node_bad_for{0};
  Milliseconds on_bad_node_for{0};  // since it was first seen on its node while that is NotReady
  Milliseconds ended_for{0};        // the main container at least
  Milliseconds deleting_for{0};
  Milliseconds waiting_for{0};

  bool ended() const { return phase == PodPhase::kSucceeded || phase == PodPhase::kFailed; }
  bool alive() const { return !ended(); }
  // The main container decides, whatever its sidecars do.
  bool done() const { return phase == PodPhase::kSucceeded || main_exit == 0; }
  bool failed() const { return !done() && (phase == PodPhase::kFailed || main_exit); }
};

// What rank 0 of the current attempt said last.
struct Report {
  int64_t attempt = 0;
  bool rendezvous_done = false;
  Progress progress;
  std::optional<int64_t> stuck_rank;  // the rank the trainer itself suspects
  Milliseconds age{0};                // since we received it
};

struct ObservedService {
  std::string uid;
  std::string gang;  // the pod group of the attempt's pods, where it has another name than the attempt; else empty
};

struct ObservedPolicy {
  std::string uid;
  uint64_t spec = 0;        // policy_fingerprint
  uint64_t stands_for = 0;  // the spec of ours that admission made this one of; 0: of none
};

struct Observed {
  RLJob job;
  std::vector<Issue> issues;      // the object could not be read as an RLJob
  bool as_stored = true;          // false: a copy of ours, without them
  std::vector<ObservedPod> pods;  // of every attempt; only those that the job itself controls
  bool services_known = false;
  std::map<int64_t, ObservedService> services;  // by attempt: its headless Service
  bool policies_known = false;
  std::optional<ObservedPolicy> policy;                         // the job's NetworkPolicy
  std::map<std::string, std::vector<std::string>> claim_modes;  // access modes of the claims that could be read
  // The job (and with attempt > 1 its pods) were read from the API server itself for this call, or just written there.
  bool live = false;
  std::optional<Report> report;
  int64_t now_ms = 0;  // wall clock, unix
  // The API server would not take the attempt's objects: why, the kind of the first, and whether asking again is
  // pointless.
  std::optional<std::string> rejection;
  std::string rejection_kind;
  bool rejection_final = false;
  Milliseconds rejection_wait{0};  // so long nothing is asked for again
  // So many nodes are NotReady at once that it is the cluster's trouble, not theirs.
  bool nodes_in_doubt = false;
  // No job's reports come, though several did or should: our own outage. And how long it has been over. Before it is
  // called one: for how long none of several has been heard. And how long nothing of ours has kept reports away.
  bool reports_out = false;
  Milliseconds reports_quiet_for{0};
  Milliseconds reports_served_for{0};
  Milliseconds reports_back_for{Milliseconds::max()};
  // Filled in by Ages:
  Milliseconds unplaced_for{0};  // in phase Queued, not every wanted pod has a node, and it is no queue that holds them
  Milliseconds starting_for{0};  // in phase Starting
  Milliseconds silent_for{0};    // in phase Running without a report
  Milliseconds generation_lacks_for{0};  // in phase Running with fewer than minReplicas of generation ready
};

}  // namespace trireme::controller
