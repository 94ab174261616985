// plan: (what is) -> (what to do next). Pure; the reconciler carries it out and asks again.
//
// A plan is either a decision (a status that must be written, under the job's resourceVersion, before anything else is
// done: a new phase or attempt) or a list of actions that follow from decisions already written. So an operator that
// dies between any two writes leaves a state from which the next one goes on.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "operator/controller/objects.h"
#include "operator/controller/observed.h"
#include "operator/kube/resource.h"
#include "operator/scheduling/gang.h"

namespace trireme::controller {

struct PlanOptions {
  std::string manager_name = kDefaultManager;
  std::string default_backend = "auto";  // for jobs with backend Auto
  scheduling::Discovery discovery;
  ObjectOptions objects;
  Milliseconds settle{2000};             // wait for the cause when only echoes (exit 20, 40) were seen
  Milliseconds cause_wait{60000};        // the same while another actor pod has not ended: its node may be lost
  Milliseconds node_grace{10000};        // NotReady for this long: the node's pods count as lost
  Milliseconds completion_grace{60000};  // after rank 0 succeeded, for the other actor pods to end
  Milliseconds backoff_base{10000};      // before the second counted restart; doubles
  Milliseconds backoff_max{300000};
  Milliseconds short_life{60000};       // a free restart of an attempt younger than this waits backoff_base
  Milliseconds release_backoff{60000};  // between gangs that could not be placed
  int64_t avoid_node_seconds = 86400;
};

struct Action {
  enum class Kind { kCreate, kDelete };
  Kind kind = Kind::kCreate;
  int wave = 0;  // actions of a wave may run together; waves in order
  kube::Resource resource;
  std::string name;
  Json body;                    // kCreate
  std::string uid;              // kDelete: precondition; empty: none
  int64_t grace_period_s = -1;  // kDelete: < 0 the object's own; 0 without waiting for the kubelet
};

struct EventNote {
  bool warning = false;
  std::string reason;
  std::string message;
};

struct Plan {
  std::optional<RLJobStatus> decision;  // write this first, then plan again; actions are empty
  bool needs_live = false;              // nothing to do before the job and its pods are read from the API server
  std::vector<Action> actions;
  RLJobStatus status;             // what the status should say otherwise; may be written late
  std::vector<EventNote> events;  // once the decision is written
  std::optional<Milliseconds> requeue_after;
};

Plan plan(const Observed& observed, const PlanOptions& options);

// Sets or replaces; lastTransitionTime changes only with the status. Returns true if anything but the time changed.
bool set_condition(RLJobStatus& status, const std::string& type, bool value, const std::string& reason,
                   const std::string& message, int64_t now_ms);
const Condition* find_condition(const RLJobStatus& status, const std::string& type);

}  // namespace trireme::controller
