#include "operator/controller/plan.h"

#include <algorithm>

#include "api/runtime.h"
#include "api/validate.h"
#include "base/error.h"
#include "operator/controller/planner.h"
#include "operator/kube/events.h"

namespace trireme::controller {
namespace {

constexpr const char* kBackendMissing = "BackendMissing";  // of condition Accepted

}  // namespace

// Milliseconds since a time of ours; 0 when it is unknown or in the future (the clock jumped back).
int64_t Planner::since(const std::string& rfc3339) const {
  const auto at = kube::parse_time(rfc3339);
  return at ? std::max<int64_t>(0, o_.now_ms - *at) : 0;
}

void Planner::decide() {
  describe_rendezvous();
  next_.observed_generation = job_.metadata.generation;
  out_.actions.clear();
  out_.needs_live = false;
  out_.decision = next_;
}

void Planner::requeue(Milliseconds after) {
  after = std::max(after, Milliseconds(1));
  if (!out_.requeue_after || after < *out_.requeue_after) out_.requeue_after = after;
}

Plan Planner::run() {
  const bool ours = job_.spec.managed_by.empty() || job_.spec.managed_by == options_.manager_name;
  // Owner references do the rest of a deletion.
  if (ours && job_.metadata.deletion_timestamp.empty()) {
    next_.waiting.clear();
    slots_ = slots_of(o_);
    current_ = slots_.newest;
    if (is_terminal(job_.status.phase)) {
      finished();
    } else if (accept()) {
      run_attempt();
    }
  }
  out_.status = next_;
  return out_;
}

// ---- acceptance, suspension
// ------------------------------------------------------------------------------------------

bool Planner::accept() {
  const bool begun = job_.status.attempt > 0;
  const bool seen = job_.status.observed_generation == job_.metadata.generation;
  const Condition* accepted = find_condition(job_.status, "Accepted");
  const bool refused = accepted && accepted->status == "False";
  const bool invalid = refused && accepted->reason == "Invalid";
  if (seen && invalid && !o_.as_stored) {
    waits_for("Invalid");
    return false;
  }
  std::vector<Issue> issues = o_.issues;
  // What an older operator refused may be possible by now.
  if (issues.empty() && (!seen || invalid)) issues = validate(job_).errors;
  // One that was accepted before there was a bound: none of its objects is made any more.
  const bool makes_attempt = in(phase::kPending) || in(phase::kQueued) || in(phase::kRestarting);
  if (issues.empty() && makes_attempt) {
    if (auto issue = size_issue(job_.spec)) issues.push_back(std::move(*issue));
  }
  if (!issues.empty()) {
    refuse("Invalid", to_string(issues, {}, 5));
    return false;
  }
  try {
    backend_ = backend();
  } catch (const Error& e) {
    no_backend_ = e.what();
  }
  if (!begun && lacks_backend()) return false;
  next_.observed_generation = job_.metadata.generation;
  const bool still = no_backend_ && refused && accepted->reason == kBackendMissing;
  if (begun && refused && !still) condition("Accepted", true, "Accepted");
  return true;
}

bool Planner::lacks_backend() {
  if (!no_backend_) return false;
  refuse(kBackendMissing, *no_backend_);
  requeue(Milliseconds(60000));
  return true;
}

scheduling::Backend Planner::backend() const {
  const bool automatic = job_.spec.scheduling.backend == GangBackend::kAuto;
  return scheduling::choose_backend(automatic ? options_.default_backend : to_string(job_.spec.scheduling.backend),
                                    !job_.spec.queue_name.empty(), options_.discovery);
}

// With the webhook off, an attempt that runs may be edited into something impossible: its pods are left alone until the
// specification is right again.
void Planner::refuse(const std::string& reason, const std::string& message) {
  if (job_.status.attempt == 0) next_.phase = phase::kPending;
  const Condition* before = find_condition(job_.status, "Accepted");
  const bool said = before && before->status == "False" && before->reason == reason &&
                    before->message == shorten(message) && job_.status.observed_generation == job_.metadata.generation;
  condition("Accepted", false, reason, message);
  waits_for(reason);
  if (said) return;
  note(true, reason, message);
  decide();
}

void Planner::start_attempt_at(int64_t unix_ms) {
  next_.attempt = job_.status.attempt + 1;
  next_.attempt_start_time = time(unix_ms);
  next_.running_time.clear();
  next_.reservation.clear();
  next_.config_hash = config_hash(job_.spec);
  for (const char* type : {"GangScheduled", "PodsReady", "Running"}) condition(type, false, "AttemptPending");
  for (RoleStatus& role : next_.roles) {
    role.created = role.scheduled = role.ready = role.succeeded = role.failed = role.restarts = 0;
  }
}

void Planner::begin() {
  start_attempt_at(o_.now_ms);
  next_.phase = phase::kQueued;
  next_.start_time = time(o_.now_ms);
  condition("Accepted", true, "Accepted");
  note(false, "Accepted", "attempt 1 begins with " + std::to_string(total_pods(job_.spec)) + " pods");
  decide();
}

void Planner::suspend() {
  if (!in(phase::kSuspended)) {
    next_.phase = phase::kSuspended;
    next_.running_time.clear();
    next_.admitted_time.clear();
    condition("Accepted", true, "Accepted");
    condition("Suspended", true, "Suspended", "spec.suspend is true");
    for (const char* type : {"GangScheduled", "PodsReady", "Running", "Restarting"})
      condition(type, false, "Suspended");
    note(false, "Suspended", "pods are being deleted; set spec.suspend to false to go on");
    decide();
    return;
  }
  cleanup_attempts(true);
  describe_pods();
}

void Planner::resume() {
  start_attempt_at(o_.now_ms);
  next_.phase = phase::kPending;
  next_.start_time = time(o_.now_ms);
  condition("Suspended", false, "Resumed");
  note(false, "Resumed", "attempt " + std::to_string(next_.attempt) + " begins");
  decide();
}

// Somebody took the status back (or our copy is old, and the write will say so).
void Planner::repair_status(int64_t highest) {
  next_.attempt = highest;
  next_.phase = phase::kQueued;
  next_.reservation.clear();
  if (next_.start_time.empty()) next_.start_time = time(o_.now_ms);
  if (next_.attempt_start_time.empty()) next_.attempt_start_time = time(o_.now_ms);
  note(true, "StatusRepaired", "pods of attempt " + std::to_string(highest) + " exist, the status said less");
  decide();
}

// ---- the end
// ---------------------------------------------------------------------------------------------------------

bool Planner::keep(const ObservedPod& pod) const {
  switch (job_.spec.pod_retention) {
    case PodRetention::kNone:
      return false;
    case PodRetention::kAll:
      return true;
    case PodRetention::kFailed:
      break;
  }
  // The logs of what ended well stay readable with the job, those of a failure until the next one.
  if (is_terminal(job_.status.phase) && pod.attempt == job_.status.attempt && pod.phase == PodPhase::kSucceeded)
    return true;
  return job_.status.last_failure && job_.status.last_failure->pod == pod.name;
}

void Planner::cleanup_attempts(bool also_current) {
  const int64_t current = job_.status.attempt;
  Cleanup result = cleanup(
      o_, backend_, [&](int64_t attempt) { return attempt < current || (also_current && attempt == current); },
      [&](const ObservedPod& pod) { return keep(pod); });
  old_alive_ = result.alive;
  for (Action& action : result.actions) {
    // How an attempt's gang is removed is not known then. Its Service stays, so that it is not forgotten.
    if (no_backend_ && action.resource.plural != kube::resources::kPods.plural) continue;
    out_.actions.push_back(std::move(action));
  }
  if (result.alive) requeue(Milliseconds(5000));  // a node may be declared lost meanwhile
  describe_stuck(result.stuck);
}

void Planner::finished() {
  try {
    backend_ = backend();
  } catch (const Error&) {
    backend_ = {};  // its objects go with the job
  }
  next_.observed_generation = job_.metadata.generation;
  cleanup_attempts(true);
  if (o_.policy && !old_alive_) {
    Action action;
    action.kind = Action::Kind::kDelete;
    action.wave = 3;
    action.resource = kube::resources::kNetworkPolicies;
    action.name = network_policy_name(job_.metadata.name);
    action.uid = o_.policy->uid;
    out_.actions.push_back(std::move(action));
  }
  describe_pods();
  if (!job_.spec.ttl_seconds_after_finished) return;
  const auto completed = kube::parse_time(job_.status.completion_time);
  if (!completed) return;
  const int64_t left = *completed + *job_.spec.ttl_seconds_after_finished * 1000 - o_.now_ms;
  if (left > 0) {
    requeue(Milliseconds(std::min<int64_t>(left, 24LL * 3600 * 1000)));
    return;
  }
  Action action;
  action.kind = Action::Kind::kDelete;
  action.wave = 100;
  action.resource = kube::resources::kRlJobs;
  action.name = job_.metadata.name;
  action.uid = job_.metadata.uid;
  out_.actions.push_back(std::move(action));
}

bool Planner::succeeded() {
  const ObservedPod* rank0 = nullptr;
  bool ranks_ended = true;
  for (const ObservedPod* pod : current_) {
    if (is_service_role(pod->role)) continue;
    if (pod->role == "actor" && pod->rank == 0) rank0 = pod;
    if (pod->alive() && !pod->done()) ranks_ended = false;
  }
  if (!rank0 || !rank0->done()) return false;
  if (ranks_ended || rank0->ended_for >= options_.completion_grace) {
    complete();
  } else {
    requeue(options_.completion_grace - rank0->ended_for);
    describe_pods();
    describe_progress();
  }
  return true;
}

void Planner::complete() {
  describe_progress();
  describe_pods();
  next_.phase = phase::kComplete;
  next_.completion_time = time(o_.now_ms);
  condition("Complete", true, "Succeeded", "rank 0 of the actor ended with exit code 0");
  condition("Running", false, "Succeeded");
  condition("Progressing", false, "Succeeded");
  close_conditions("Succeeded");
  note(false, "Complete", "the job is complete after " + std::to_string(job_.status.attempt) + " attempt(s)");
  decide();
}

void Planner::fail(const std::string& reason, const std::string& message, const char* cause) {
  if (cause) {
    LastFailure record;
    record.reason = cause;
    record.message = shorten(message);
    record.action = to_string(FailureAction::kFailJob);
    record.time = time(o_.now_ms);
    record.attempt = job_.status.attempt;
    next_.last_failure = std::move(record);
  }
  next_.phase = phase::kFailed;
  next_.completion_time = time(o_.now_ms);
  condition("Failed", true, reason, message);
  condition("Running", false, reason);
  condition("Progressing", false, reason);
  condition("Restarting", false, reason);
  close_conditions(reason);
  note(true, "Failed", reason + ": " + message);
  decide();
}

bool Planner::deadline_passed() {
  if (!job_.spec.active_deadline_seconds) return false;
  // A job that an older operator admitted has no time of it.
  const bool placed = in(phase::kStarting) || in(phase::kRunning);
  const std::string& from =
      !job_.status.admitted_time.empty() || !placed ? job_.status.admitted_time : job_.status.start_time;
  if (from.empty()) return false;
  const int64_t left = *job_.spec.active_deadline_seconds * 1000 - since(from);
  if (left <= 0) return true;
  requeue(Milliseconds(left));
  return false;
}

Plan plan(const Observed& observed, const PlanOptions& options) { return Planner(observed, options).run(); }

}  // namespace trireme::controller
