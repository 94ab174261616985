#include "operator/controller/plan.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "api/runtime.h"
#include "api/validate.h"
#include "base/error.h"
#include "base/text.h"
#include "operator/controller/actions.h"
#include "operator/controller/failure.h"
#include "operator/kube/events.h"

namespace trireme::controller {
namespace {

constexpr size_t kMaxMessageBytes = 1024;
constexpr size_t kMaxLogTailBytes = 2048;

// The end of the text, at a character's border.
std::string tail(const std::string& text, size_t limit) {
  if (text.size() <= limit) return text;
  size_t at = text.size() - limit;
  while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) ++at;
  return text.substr(at);
}

std::string head(const std::string& text, size_t limit) {
  if (text.size() <= limit) return text;
  size_t at = limit;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return text.substr(0, at);
}

double five_digits(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.5g", value);
  return std::strtod(text, nullptr);
}

std::string count(size_t part, size_t whole) { return std::to_string(part) + " of " + std::to_string(whole); }

class Planner final {
 public:
  Planner(const Observed& observed, const PlanOptions& options)
      : o_(observed), options_(options), job_(observed.job), next_(observed.job.status) {}

  Plan run();

 private:
  // One of these ends every path.
  void decide();
  void requeue(Milliseconds after);

  bool accept();
  scheduling::Backend backend() const;
  void refuse(const std::string& reason, const std::string& message);
  void begin();
  void suspend();
  void resume();
  void finished();
  void run_attempt();
  void clear();
  void queued();
  void starting();
  void running();
  bool succeeded();
  bool deadline_passed();
  void complete();
  void fail(const std::string& reason, const std::string& message);
  void on_failure(const Failure& failure);
  void restart(const Failure& failure, const Verdict& verdict);
  void release_gang();
  void start_attempt_at(int64_t unix_ms);

  void sort_pods();
  std::vector<Failure> failures();
  std::vector<WantedPod> missing_pods() const;
  void cleanup_attempts(bool also_current);
  bool keep(const ObservedPod& pod) const;
  void describe_pods();
  void describe_progress();
  void note(bool warning, const std::string& reason, const std::string& message) {
    out_.events.push_back({warning, reason, head(message, kMaxMessageBytes)});
  }
  void condition(const char* type, bool value, const std::string& reason, const std::string& message = {}) {
    set_condition(next_, type, value, reason, head(message, kMaxMessageBytes), o_.now_ms);
  }
  std::string time(int64_t unix_ms) const { return kube::format_time(unix_ms); }
  int64_t since(const std::string& rfc3339) const;
  AttemptContext context() const { return {job_, job_.status.attempt, backend_, options_.objects}; }
  bool in(const char* phase) const { return job_.status.phase == phase; }

  const Observed& o_;
  const PlanOptions& options_;
  const RLJob& job_;
  RLJobStatus next_;
  Plan out_;
  scheduling::Backend backend_;
  std::vector<const ObservedPod*> current_;
  bool old_alive_ = false;
};

// Milliseconds since a time of ours; 0 when it is unknown or in the future (the clock jumped back).
int64_t Planner::since(const std::string& rfc3339) const {
  const auto at = kube::parse_time(rfc3339);
  return at ? std::max<int64_t>(0, o_.now_ms - *at) : 0;
}

void Planner::decide() {
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
    sort_pods();
    if (is_terminal(job_.status.phase)) {
      finished();
    } else if (accept()) {
      run_attempt();
    }
  }
  out_.status = next_;
  return out_;
}

void Planner::sort_pods() {
  for (const ObservedPod& pod : o_.pods) {
    if (pod.attempt == job_.status.attempt) current_.push_back(&pod);
  }
}

// ---- acceptance, suspension
// ------------------------------------------------------------------------------------------

bool Planner::accept() {
  const bool begun = job_.status.attempt > 0;
  const bool seen = job_.status.observed_generation == job_.metadata.generation;
  const Condition* accepted = find_condition(job_.status, "Accepted");
  const bool refused = accepted && accepted->status == "False";
  if (seen && refused && accepted->reason == "Invalid") return false;  // a new generation asks again
  std::vector<Issue> issues = o_.issues;
  if (issues.empty() && !seen) issues = validate(job_).errors;
  if (!issues.empty()) {
    refuse("Invalid", to_string(issues, {}, 5));
    return false;
  }
  try {
    backend_ = backend();
  } catch (const Error& e) {
    if (!begun) {
      refuse("BackendMissing", e.what());
      requeue(Milliseconds(60000));
      return false;
    }
  }
  next_.observed_generation = job_.metadata.generation;
  if (begun && refused) condition("Accepted", true, "Accepted");
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
                    before->message == head(message, kMaxMessageBytes) &&
                    job_.status.observed_generation == job_.metadata.generation;
  condition("Accepted", false, reason, message);
  if (said) return;
  note(true, reason, message);
  decide();
}

void Planner::start_attempt_at(int64_t unix_ms) {
  next_.attempt = job_.status.attempt + 1;
  next_.attempt_start_time = time(unix_ms);
  next_.running_time.clear();
  next_.rendezvous =
      Rendezvous{pod_address(job_.metadata.name, "actor", 0, next_.attempt), job_.spec.network.master_port,
                 topology_config_map_name(job_.metadata.name, next_.attempt)};
  next_.config_hash = config_hash(job_.spec);
  for (const char* type : {"GangScheduled", "PodsReady", "Running"}) condition(type, false, "AttemptPending");
  for (RoleStatus& role : next_.roles) role.created = role.scheduled = role.ready = role.succeeded = role.failed = 0;
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
      o_, options_, backend_,
      [&](int64_t attempt) { return attempt < current || (also_current && attempt == current); },
      [&](const ObservedPod& pod) { return keep(pod); });
  old_alive_ = result.alive;
  for (Action& action : result.actions) out_.actions.push_back(std::move(action));
  if (result.alive) requeue(Milliseconds(5000));  // a node may be declared lost meanwhile
}

void Planner::finished() {
  try {
    backend_ = backend();
  } catch (const Error&) {
    backend_ = {};  // its objects go with the job
  }
  next_.observed_generation = job_.metadata.generation;
  cleanup_attempts(true);
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
  bool actors_ended = true;
  for (const ObservedPod* pod : current_) {
    if (pod->role != "actor") continue;
    if (pod->rank == 0) rank0 = pod;
    if (pod->alive()) actors_ended = false;
  }
  if (!rank0 || rank0->phase != PodPhase::kSucceeded) return false;
  if (actors_ended || rank0->ended_for >= options_.completion_grace) {
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
  note(false, "Complete", "the job is complete after " + std::to_string(job_.status.attempt) + " attempt(s)");
  decide();
}

void Planner::fail(const std::string& reason, const std::string& message) {
  next_.phase = phase::kFailed;
  next_.completion_time = time(o_.now_ms);
  condition("Failed", true, reason, message);
  condition("Running", false, reason);
  condition("Progressing", false, reason);
  condition("Restarting", false, reason);
  note(true, "Failed", reason + ": " + message);
  decide();
}

bool Planner::deadline_passed() {
  if (!job_.spec.active_deadline_seconds || job_.status.start_time.empty()) return false;
  const int64_t left = *job_.spec.active_deadline_seconds * 1000 - since(job_.status.start_time);
  if (left <= 0) return true;
  requeue(Milliseconds(left));
  return false;
}

// ---- one attempt
// -----------------------------------------------------------------------------------------------------

void Planner::run_attempt() {
  int64_t highest = job_.status.attempt;
  for (const ObservedPod& pod : o_.pods) highest = std::max(highest, pod.attempt);
  if (highest > job_.status.attempt) {
    // Somebody took the status back (or our copy is old, and the write will say so).
    next_.attempt = highest;
    next_.phase = phase::kQueued;
    if (next_.start_time.empty()) next_.start_time = time(o_.now_ms);
    if (next_.attempt_start_time.empty()) next_.attempt_start_time = time(o_.now_ms);
    note(true, "StatusRepaired", "pods of attempt " + std::to_string(highest) + " exist, the status said less");
    decide();
    return;
  }
  if (!in(phase::kSuspended) && job_.status.attempt > 0 && succeeded()) return;
  if (job_.spec.suspend) return suspend();
  if (in(phase::kSuspended)) return resume();
  if (job_.status.attempt == 0) return begin();
  if (deadline_passed()) {
    return fail("DeadlineExceeded", "the job ran longer than activeDeadlineSeconds (" +
                                        std::to_string(*job_.spec.active_deadline_seconds) + ")");
  }
  if (in(phase::kPending) || in(phase::kRestarting)) return clear();

  cleanup_attempts(false);
  describe_pods();
  describe_progress();
  const std::vector<Failure> found = failures();
  if (!found.empty()) {
    const Failure& cause = first_cause(found);
    // An actor that still seems to live while others lost it may be on a node that has just died: its kubelet's silence
    // takes longer to be noticed than a broken connection.
    const bool missing = std::any_of(current_.begin(), current_.end(),
                                     [](const ObservedPod* pod) { return pod->role == "actor" && pod->alive(); });
    const Milliseconds patience = missing ? options_.cause_wait : options_.settle;
    if (cause.consequence && cause.seen_for < patience) {
      requeue(patience - cause.seen_for);
      return;
    }
    return on_failure(cause);
  }
  if (in(phase::kStarting)) return starting();
  if (in(phase::kRunning)) return running();
  queued();
}

std::vector<Failure> Planner::failures() {
  std::vector<Failure> found;
  for (const ObservedPod* pod : current_) {
    if (pod->alive() && pod->node_state == NodeState::kNotReady && pod->node_bad_for < options_.node_grace) {
      requeue(options_.node_grace - pod->node_bad_for);
    }
    // A pod of a gang that is not complete yet may be taken away: it is made again.
    if (in(phase::kQueued) && pod->deleting && pod->alive()) continue;
    if (auto failure = pod_failure(*pod, options_.node_grace)) found.push_back(std::move(*failure));
  }
  return found;
}

std::vector<WantedPod> Planner::missing_pods() const {
  std::vector<WantedPod> wanted = wanted_pods(job_, job_.status.attempt);
  std::erase_if(wanted, [&](const WantedPod& w) {
    return std::any_of(current_.begin(), current_.end(), [&](const ObservedPod* pod) { return pod->name == w.name; });
  });
  return wanted;
}

void Planner::clear() {
  cleanup_attempts(false);
  describe_pods();
  if (old_alive_) return;
  const auto at = kube::parse_time(job_.status.attempt_start_time);
  const int64_t left = at ? *at - o_.now_ms : 0;
  // A wait longer than any back-off means that the clock was set back.
  if (left > 0 && left <= std::max(options_.backoff_max, options_.release_backoff).count()) {
    requeue(Milliseconds(left));
    return;
  }
  if (!o_.live) {
    out_.needs_live = true;
    return;
  }
  next_.phase = phase::kQueued;
  condition("Restarting", false, "PodsGone");
  decide();
}

void Planner::queued() {
  if (old_alive_) return;
  const Milliseconds limit{job_.spec.scheduling.scheduling_timeout_seconds * 1000};
  const std::vector<WantedPod> missing = missing_pods();
  if (!missing.empty()) {
    if (!o_.live) {
      out_.needs_live = true;
      return;
    }
    if (o_.rejection) {
      condition("GangScheduled", false, "PodsRejected", *o_.rejection);
      if (o_.rejection_final) return fail("PodsRejected", *o_.rejection);
      if (limit.count() > 0 && o_.unplaced_for >= limit) return release_gang();
    }
    for (Action& action : create_actions(context(), missing)) {
      action.wave += 10;  // after what remains of earlier attempts has gone
      out_.actions.push_back(std::move(action));
    }
    return;
  }
  size_t placed = 0, gated = 0;
  const ObservedPod* waiting = nullptr;
  for (const ObservedPod* pod : current_) {
    if (pod->scheduled) ++placed;
    if (pod->gated) ++gated;
    if (!pod->scheduled && !pod->gated && (!waiting || waiting->message.empty())) waiting = pod;
  }
  if (gated > 0) {
    condition("Admitted", false, "Waiting", count(gated, current_.size()) + " pods wait for admission by the queue");
    return;
  }
  if (backend_.kind == scheduling::BackendKind::kKueue) condition("Admitted", true, "Admitted");
  if (placed == current_.size()) {
    next_.phase = phase::kStarting;
    condition("GangScheduled", true, "Scheduled", "all " + std::to_string(placed) + " pods have a node");
    note(false, "Starting",
         "all " + std::to_string(placed) + " pods of attempt " + std::to_string(next_.attempt) + " have a node");
    decide();
    return;
  }
  condition(
      "GangScheduled", false, "Waiting",
      count(placed, current_.size()) + " pods have a node" + (waiting->message.empty() ? "" : ": " + waiting->message));
  if (limit.count() == 0) return;
  if (o_.unplaced_for >= limit) return release_gang();
  requeue(limit - o_.unplaced_for);
}

void Planner::release_gang() {
  const Condition* before = find_condition(next_, "GangScheduled");
  const std::string message = "released after " + std::to_string(job_.spec.scheduling.scheduling_timeout_seconds) +
                              " s: " + (before ? before->message : "no node for every pod");
  start_attempt_at(o_.now_ms + options_.release_backoff.count());
  next_.phase = phase::kPending;
  condition("GangScheduled", false, "SchedulingTimeout", message);
  note(true, "GangReleased", message);
  decide();
}

void Planner::starting() {
  const std::vector<WantedPod> missing = missing_pods();
  if (!missing.empty()) {
    if (!o_.live) {
      out_.needs_live = true;
      return;
    }
    Failure failure;
    failure.role = missing.front().role;
    failure.rank = missing.front().rank;
    failure.pod = missing.front().name;
    failure.reason = kReasonDeleted;
    failure.message =
        count(missing.size(), missing.size() + current_.size()) + " pods were deleted, and not by this operator";
    return on_failure(failure);
  }
  if (o_.services_known && o_.services.count(job_.status.attempt) == 0) {
    // It may have gone with the whole job, whose deletion our copy does not show yet.
    if (!o_.live) {
      out_.needs_live = true;
      return;
    }
    out_.actions.push_back(service_action(context(), 0));
  }
  if (!in(phase::kStarting)) return;
  if (o_.report && o_.report->attempt == job_.status.attempt && o_.report->rendezvous_done) {
    next_.phase = phase::kRunning;
    next_.running_time = time(o_.now_ms);
    condition("Running", true, "RendezvousDone", "all ranks of attempt " + std::to_string(next_.attempt) + " have met");
    condition("Progressing", true, "Reporting");
    note(false, "Running", "all ranks of attempt " + std::to_string(next_.attempt) + " have met");
    decide();
    return;
  }
  const Milliseconds limit{job_.spec.health.startup_deadline_seconds * 1000};
  if (limit.count() == 0) return;
  if (o_.starting_for < limit) return requeue(limit - o_.starting_for);
  Failure failure;
  failure.role = "actor";
  failure.reason = kReasonStartup;
  failure.message = "no report of a complete rendezvous within " + std::to_string(limit.count() / 1000) + " s";
  for (const ObservedPod* pod : current_) {
    if (pod->ready || pod->ended()) continue;
    failure.role = pod->role;
    failure.rank = pod->rank;
    failure.pod = pod->name;
    failure.node = pod->node;
    if (!pod->message.empty()) failure.message += "; first pod that is not ready: " + pod->message;
    break;
  }
  on_failure(failure);
}

void Planner::running() {
  starting();  // what must stay true
  if (out_.decision || out_.needs_live) return;
  const bool heard = o_.report && o_.report->attempt == job_.status.attempt;
  const Milliseconds silent = heard ? o_.report->age : o_.silent_for;
  const std::string step_phase = heard ? o_.report->progress.phase : next_.progress ? next_.progress->phase : "";
  int64_t limit_s = job_.spec.health.heartbeat_timeout_seconds;
  if (const auto own = job_.spec.health.phase_timeout_seconds.find(step_phase);
      own != job_.spec.health.phase_timeout_seconds.end()) {
    limit_s = own->second;
  }
  if (limit_s == 0) return;
  const Milliseconds limit{limit_s * 1000};
  if (silent < limit) {
    condition("Progressing", true, "Reporting");
    requeue(limit - silent);
    return;
  }
  Failure failure;
  failure.role = "actor";
  failure.rank = heard && o_.report->stuck_rank ? *o_.report->stuck_rank : 0;
  failure.reason = kReasonHung;
  failure.message =
      "no heartbeat for " + std::to_string(silent.count() / 1000) + " s" +
      (step_phase.empty() ? "" : " in phase " + step_phase) +
      (heard && o_.report->stuck_rank ? "; rank " + std::to_string(*o_.report->stuck_rank) + " is late" : "");
  if (job_.spec.health.action == HangAction::kEvent) {
    const Condition* before = find_condition(job_.status, "Progressing");
    const bool said = before && before->status == "False" && before->reason == kReasonHung;
    condition("Progressing", false, kReasonHung, said ? before->message : failure.message);
    if (!said) {
      note(true, kReasonHung, failure.message);
      decide();
    }
    return;
  }
  on_failure(failure);
}

// ---- failure
// ---------------------------------------------------------------------------------------------------------

void Planner::on_failure(const Failure& failure) {
  const FailurePolicy& policy = job_.spec.failure_policy;
  const Verdict verdict = judge(policy, failure);
  LastFailure record;
  record.role = failure.role;
  record.rank = failure.rank;
  record.pod = failure.pod;
  record.node = failure.node;
  record.exit_code = failure.exit_code;
  record.signal = failure.signal;
  record.reason = failure.reason;
  record.message = describe(failure);
  record.log_tail = tail(failure.message, kMaxLogTailBytes);
  record.action = to_string(verdict.action);
  record.time = time(o_.now_ms);
  record.attempt = job_.status.attempt;
  next_.last_failure = std::move(record);

  const int64_t step = next_.progress ? next_.progress->step : 0;
  if (policy.restart_window_steps > 0 && step - next_.window_step >= policy.restart_window_steps) next_.budget_used = 0;
  if (verdict.action == FailureAction::kFailJob) return fail("FailurePolicy", describe(failure));
  if (verdict.counted && next_.budget_used + 1 > policy.max_restarts) {
    return fail("RestartBudgetExhausted",
                describe(failure) + "; all " + std::to_string(policy.max_restarts) + " restarts are used");
  }
  restart(failure, verdict);
}

void Planner::restart(const Failure& failure, const Verdict& verdict) {
  int64_t delay_ms = 0;
  if (verdict.counted) {
    ++next_.restarts;
    ++next_.budget_used;
    next_.window_step = next_.progress ? next_.progress->step : 0;
    if (next_.budget_used > 1) {
      const int64_t doublings = std::min<int64_t>(next_.budget_used - 2, 20);
      delay_ms = std::min<int64_t>(options_.backoff_base.count() << doublings, options_.backoff_max.count());
    }
  } else {
    ++next_.free_restarts;
    if (since(job_.status.attempt_start_time) < options_.short_life.count()) delay_ms = options_.backoff_base.count();
  }
  std::erase_if(next_.avoided_nodes, [&](const AvoidedNode& node) {
    const auto until = kube::parse_time(node.until);
    return !until || *until <= o_.now_ms ||
           (verdict.action == FailureAction::kAvoidNodeAndRestart && node.name == failure.node);
  });
  if (verdict.action == FailureAction::kAvoidNodeAndRestart && !failure.node.empty()) {
    next_.avoided_nodes.push_back({failure.node, failure.reason, time(o_.now_ms + options_.avoid_node_seconds * 1000)});
    const size_t limit = static_cast<size_t>(std::max<int64_t>(0, job_.spec.failure_policy.max_avoided_nodes));
    while (next_.avoided_nodes.size() > limit) next_.avoided_nodes.erase(next_.avoided_nodes.begin());
  }
  start_attempt_at(o_.now_ms + delay_ms);
  next_.phase = phase::kRestarting;
  condition("Restarting", true, failure.reason, describe(failure));
  condition("Progressing", false, failure.reason);
  note(true, "Restarting",
       describe(failure) + "; attempt " + std::to_string(next_.attempt) + " follows" +
           (verdict.counted ? "" : " (not counted)"));
  decide();
}

// ---- description
// -----------------------------------------------------------------------------------------------------

void Planner::describe_pods() {
  next_.roles.clear();
  size_t ready = 0, wanted = 0;
  for (const RoleRef& role : roles_of(job_.spec)) {
    RoleStatus row;
    row.name = role.name;
    row.desired = role.spec->replicas;
    row.world_size = world_size(*role.spec);
    row.selector = std::string(kLabelJobUid) + "=" + job_.metadata.uid + "," + kLabelRole + "=" + role.name;
    for (const ObservedPod* pod : current_) {
      if (pod->role != role.name) continue;
      ++row.created;
      row.scheduled += pod->scheduled;
      row.ready += pod->ready;
      row.succeeded += pod->phase == PodPhase::kSucceeded;
      row.failed += pod->phase == PodPhase::kFailed;
    }
    ready += static_cast<size_t>(row.ready);
    wanted += static_cast<size_t>(row.desired);
    next_.roles.push_back(std::move(row));
  }
  if (is_terminal(job_.status.phase) || in(phase::kSuspended)) return;
  condition("PodsReady", wanted > 0 && ready == wanted, ready == wanted ? "Ready" : "Waiting",
            count(ready, wanted) + " pods are ready");

  // Several writers on one claim need an access mode that lets several nodes have it.
  std::string problem;
  for (const RoleRef& role : roles_of(job_.spec)) {
    if (role.spec->replicas < 2) continue;
    for (const VolumeView& volume : pod_view(job_.spec, *role.spec).volumes) {
      const auto claim = o_.claim_modes.find(volume.source);
      if (volume.kind != VolumeKind::kClaim || claim == o_.claim_modes.end()) continue;
      const auto& modes = claim->second;
      const bool shared = std::any_of(modes.begin(), modes.end(),
                                      [](const std::string& m) { return m == "ReadWriteMany" || m == "ReadOnlyMany"; });
      if (!shared)
        problem = "claim " + volume.source + " is not ReadWriteMany but " + std::to_string(role.spec->replicas) + " " +
                  role.name + " pods mount it: they can only run on one node";
    }
  }
  const Condition* accepted = find_condition(next_, "Accepted");
  if (!problem.empty() && accepted && accepted->status == "True" && accepted->reason != "ClaimNotShared") {
    condition("Accepted", true, "ClaimNotShared", problem);
    note(true, "ClaimNotShared", problem);
  }
}

void Planner::describe_progress() {
  if (!o_.report || o_.report->attempt != job_.status.attempt) return;
  next_.progress = o_.report->progress;
  // People read these numbers in columns; the exact ones are in the metrics and the run's log.
  Progress& p = *next_.progress;
  for (auto* value : {&p.reward, &p.step_seconds, &p.tokens_per_second, &p.response_length, &p.validation_accuracy})
    if (*value) *value = five_digits(**value);
  for (auto& [name, seconds] : p.phase_seconds) seconds = five_digits(seconds);
  next_.progress->last_heartbeat_time = time(o_.now_ms - o_.report->age.count());
}

}  // namespace

const Condition* find_condition(const RLJobStatus& status, const std::string& type) {
  for (const Condition& condition : status.conditions) {
    if (condition.type == type) return &condition;
  }
  return nullptr;
}

bool set_condition(RLJobStatus& status, const std::string& type, bool value, const std::string& reason,
                   const std::string& message, int64_t now_ms) {
  const char* text = value ? "True" : "False";
  for (Condition& condition : status.conditions) {
    if (condition.type != type) continue;
    const bool flipped = condition.status != text;
    if (!flipped && condition.reason == reason && condition.message == message) return false;
    if (flipped) condition.last_transition_time = kube::format_time(now_ms);
    condition.status = text;
    condition.reason = reason;
    condition.message = message;
    return true;
  }
  status.conditions.push_back({type, text, reason, message, kube::format_time(now_ms), std::nullopt});
  return true;
}

Plan plan(const Observed& observed, const PlanOptions& options) { return Planner(observed, options).run(); }

}  // namespace trireme::controller
