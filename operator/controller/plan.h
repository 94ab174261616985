// plan: (what is) -> (what to do next). Pure; the reconciler carries it out and asks again.
//
// A plan is either a decision (a status that must be written, under the job's resourceVersion, before anything else is
// done: a new phase or attempt) or a list of actions that follow from decisions already written. So an operator that
// dies between any two writes leaves a state from which the next one goes on.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "operator/controller/action.h"
#include "operator/controller/objects.h"
#include "operator/controller/observed.h"
#include "operator/scheduling/gang.h"

namespace trireme::controller {

struct PlanOptions {
  std::string manager_name = kDefaultManager;
  std::string default_backend = "auto";  // for jobs with backend Auto
  scheduling::Discovery discovery;
  ObjectOptions objects;
  Milliseconds settle{2000};             // wait for the cause when only echoes (exit 20, 40) were seen
  Milliseconds cause_wait{60000};        // the same while another actor pod has not ended: its node may be lost
  Milliseconds fresh_heartbeat{60000};   // a younger one holds back that a node's silence ends the attempt
  Milliseconds start_grace{120000};      // an image that cannot be pulled, a Secret that is missing: for this long
  Milliseconds completion_grace{60000};  // after rank 0 succeeded, for the other actor pods to end
  Milliseconds backoff_base{10000};      // before the second counted restart; doubles
  Milliseconds backoff_max{300000};
  Milliseconds short_life{60000};  // a free restart of an attempt younger than this waits backoff_base
  Milliseconds long_life{600000};  // an attempt that ran for so long has got on; a pod that did has not crashed at once
  Milliseconds release_backoff{60000};  // between gangs that could not be placed: half of it to one and a half times
  int64_t avoid_node_seconds = 86400;   // after a fault of the node
  int64_t refused_node_seconds = 3600;  // after an eviction or a refused admission
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

// Sets or replaces; lastTransitionTime changes only with the status ("True", "False", "Unknown").
void set_condition(RLJobStatus& status, const std::string& type, const std::string& value, const std::string& reason,
                   const std::string& message, int64_t now_ms);
const Condition* find_condition(const RLJobStatus& status, const std::string& type);

}  // namespace trireme::controller
