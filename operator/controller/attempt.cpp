#include <algorithm>

#include "api/runtime.h"
#include "base/text.h"
#include "operator/controller/ages.h"
#include "operator/controller/planner.h"
#include "operator/controller/reports.h"
#include "operator/kube/events.h"

namespace trireme::controller {
namespace {

constexpr const char* kByReport = "RendezvousDone";  // of condition Running: rank 0 said so
constexpr const char* kByPods = "PodsReady";         // of condition Running: no report came, all pods are ready
constexpr int kDoubtLimits = 4;                      // so many limits long nobody's silence may be our own trouble

// When a job that is silent is held to hang although nobody else is heard. Trainers speak every 10 s, whatever the
// limit.
Milliseconds doubt_of(Milliseconds limit) { return kDoubtLimits * std::max(limit, ReportStore::kLeastGap); }

std::string in_seconds(Milliseconds time) { return std::to_string(time.count() / 1000) + " s"; }

}  // namespace

void Planner::run_attempt() {
  int64_t highest = job_.status.attempt;
  for (const ObservedPod& pod : o_.pods) highest = std::max(highest, pod.attempt);
  if (highest > job_.status.attempt) return repair_status(highest);
  if (!in(phase::kSuspended) && job_.status.attempt > 0 && succeeded()) return;
  if (job_.spec.suspend) return suspend();
  if (in(phase::kSuspended)) return resume();
  if (job_.status.attempt == 0) return begin();
  describe_rendezvous();
  if (deadline_passed()) {
    return fail("DeadlineExceeded",
                "the job ran longer than activeDeadlineSeconds (" + std::to_string(*job_.spec.active_deadline_seconds) +
                    ") since it was admitted",
                "DeadlineExceeded");
  }
  if (in(phase::kPending) || in(phase::kRestarting)) return clear();

  cleanup_attempts(false);
  describe_pods();
  describe_progress();
  const std::vector<Failure> found = failures();
  if (!found.empty()) {
    const Failure& cause = first_cause(found);
    // A rank that gave up waiting for others that were never there.
    if (in(phase::kQueued) && cause.consequence && !core_placed(o_))
      return release_gang(describe(cause) + ", before every pod had a node");
    if (echo_waits(found, cause)) return;
    return on_failure(cause);
  }
  if (const auto failure = too_few_generate()) return on_failure(*failure);
  if (in(phase::kStarting)) {
    starting();
  } else if (in(phase::kRunning)) {
    running();
  } else {
    queued();
  }
  if (!out_.decision && !out_.needs_live) mend_services();
}

std::vector<WantedPod> Planner::missing_pods() const {
  std::vector<WantedPod> wanted = wanted_pods(job_, job_.status.attempt);
  std::erase_if(wanted, [&](const WantedPod& w) {
    return std::any_of(current_.begin(), current_.end(),
                       [&](const ObservedPod* pod) { return pod->role == w.role && pod->rank == w.rank; });
  });
  return wanted;
}

bool Planner::all_ready() const {
  const auto is_ready = [](const ObservedPod& pod) { return pod.ready || pod.done(); };
  return core_count(job_.spec, current_, is_ready) >= core_pods(job_.spec);
}

void Planner::clear() {
  cleanup_attempts(false);
  describe_pods();
  if (!job_.status.reservation.empty()) {
    // Kueue counts a pod that ended well as one of the group for good, and one that does not end keeps its place.
    const Milliseconds limit{job_.spec.failure_policy.termination_timeout_seconds * 1000};
    const bool spoilt = std::any_of(o_.pods.begin(), o_.pods.end(), [&](const ObservedPod& pod) {
      return pod.attempt < job_.status.attempt &&
             (pod.phase == PodPhase::kSucceeded || (pod.alive() && pod.deleting_for >= limit));
    });
    if (spoilt) {
      next_.reservation.clear();
      return decide();
    }
  }
  if (old_alive_) return;
  const auto at = kube::parse_time(job_.status.attempt_start_time);
  const int64_t left = at ? *at - o_.now_ms : 0;
  // A wait longer than any back-off means that the clock was set back.
  if (left > 0 && left <= std::max(options_.backoff_max, 2 * options_.release_backoff).count()) {
    waits_for("BackOff");
    requeue(Milliseconds(left));
    return;
  }
  if (lacks_backend()) return;
  if (!o_.live) {
    out_.needs_live = true;
    return;
  }
  next_.phase = phase::kQueued;
  condition("Restarting", false, "PodsGone");
  decide();
}

// ---- from the first pod to the last one's node
// ------------------------------------------------------------------------------

void Planner::queued() {
  if (old_alive_) return;
  const Milliseconds limit{job_.spec.scheduling.scheduling_timeout_seconds * 1000};
  if (limit.count() > 0 && o_.unplaced_for > Milliseconds(0) && o_.unplaced_for < limit)
    requeue(limit - o_.unplaced_for);
  const bool overdue = limit.count() > 0 && o_.unplaced_for >= limit;
  const std::string waited = std::to_string(limit.count() / 1000) + " s";
  const size_t wanted = static_cast<size_t>(total_pods(job_.spec));
  const bool core = core_placed(o_);
  if (const std::vector<WantedPod> missing = missing_pods(); !missing.empty() && !core) {
    if (o_.rejection) {
      describe_refusal("GangScheduled", missing.size());
      if (o_.rejection_final) return fail("PodsRejected", *o_.rejection, "PodsRejected");
    }
    if (overdue) return release_gang(waited);
    if (o_.rejection && o_.rejection_wait > Milliseconds(0)) return requeue(o_.rejection_wait);
    return make_gang(missing);
  }
  size_t gated = 0, leaving = 0;
  const ObservedPod* waiting = nullptr;
  for (const ObservedPod* pod : current_) {
    gated += pod->gated;
    leaving += pod->deleting && pod->alive();
    if (!pod->scheduled && !pod->gated && (!waiting || waiting->message.empty())) waiting = pod;
  }
  if (leaving > 0 && !job_.status.reservation.empty()) return release_gang("the queue does not take the pods back");
  if (gated > 0) {
    condition("Admitted", false, "Waiting", part_of(gated, wanted) + " pods wait for admission by the queue");
    waits_for("QueueAdmission");
    return;
  }
  if (backend_.kind == scheduling::BackendKind::kKueue) condition("Admitted", true, "Admitted");
  const size_t placed = static_cast<size_t>(placed_pods(o_));
  if (core) {
    next_.phase = phase::kStarting;
    next_.waiting.clear();
    if (next_.admitted_time.empty()) next_.admitted_time = time(o_.now_ms);
    const std::string all = placed >= wanted ? "all " + std::to_string(placed) : part_of(placed, wanted);
    condition("GangScheduled", true, "Scheduled", all + " pods have a node");
    note(false, "Starting", all + " pods of attempt " + std::to_string(next_.attempt) + " have a node");
    decide();
    return;
  }
  condition("GangScheduled", false, "Waiting",
            part_of(placed, wanted) + " pods have a node" +
                (!waiting || waiting->message.empty() ? "" : ": " + waiting->message));
  if (waiting && !waiting->message.empty()) waits_for("Unschedulable");
  if (overdue) release_gang(waited);
}

void Planner::make_gang(const std::vector<WantedPod>& missing) {
  if (lacks_backend()) return;
  if (!o_.live) {
    out_.needs_live = true;
    return;
  }
  constexpr int kWave = 10;  // after what remains of earlier attempts has gone
  if (auto policy = policy_action(o_, context(), kWave + 1)) out_.actions.push_back(std::move(*policy));
  for (Action& action : create_actions(context(), missing)) {
    action.wave += kWave;
    out_.actions.push_back(std::move(action));
  }
}

// Two gangs that hold half of what each needs let go at about the same time: unless they come back at different times,
// they do so again and again.
void Planner::release_gang(const std::string& why) {
  const Condition* before = find_condition(next_, "GangScheduled");
  const std::string message =
      "released after " + why + ": " + (before && !before->message.empty() ? before->message : "no node for every pod");
  const uint64_t draw = hash64(job_.metadata.uid + "/" + std::to_string(job_.status.attempt)) % 1000;
  const int64_t wait = options_.release_backoff.count();
  start_attempt_at(o_.now_ms + wait / 2 + wait * static_cast<int64_t>(draw) / 1000);
  next_.phase = phase::kPending;
  condition("GangScheduled", false, "SchedulingTimeout", message);
  note(true, "GangReleased", message);
  decide();
}

// ---- from there to the end
// ------------------------------------------------------------------------------------------------

bool Planner::stays_whole() {
  std::vector<WantedPod> missing = missing_pods();
  const bool no_service = o_.services_known && o_.services.count(job_.status.attempt) == 0;
  std::optional<Action> policy = policy_action(o_, context(), 0);
  std::erase_if(missing, [](const WantedPod& pod) { return is_service_role(pod.role); });  // mend_services
  if (missing.empty() && !no_service && !policy) return true;
  // The cache may be behind; and the Service may have gone with the whole job, whose deletion our copy does not show.
  if (!o_.live) {
    out_.needs_live = true;
    return false;
  }
  if (!missing.empty()) {
    Failure failure;
    failure.role = missing.front().role;
    failure.rank = missing.front().rank;
    failure.pod = missing.front().name;
    failure.reason = kReasonDeleted;
    failure.message =
        part_of(missing.size(), missing.size() + current_.size()) + " pods were deleted, and not by this operator";
    on_failure(failure);
    return false;
  }
  if (no_service) out_.actions.push_back(service_action(context(), 0));
  if (policy) out_.actions.push_back(std::move(*policy));
  return true;
}

void Planner::run_by(const char* reason, const std::string& message) {
  next_.phase = phase::kRunning;
  next_.running_time = time(o_.now_ms);
  next_.waiting.clear();
  condition("Running", true, reason, message);
  note(false, "Running", message);
}

void Planner::starting() {
  if (!stays_whole()) return;
  const std::string attempt = std::to_string(job_.status.attempt);
  if (heard() && o_.report->rendezvous_done) {
    run_by(kByReport, "all ranks of attempt " + attempt + " have met");
    condition("Progressing", true, "Reporting");
    return decide();
  }
  const bool reports = !options_.objects.status_url.empty();
  const Milliseconds limit{job_.spec.health.startup_deadline_seconds * 1000};
  const bool late = o_.starting_for >= limit;
  if (all_ready() && !heard() && (!reports || late)) {
    run_by(kByPods, "all pods of attempt " + attempt + " are ready");
    if (reports && under_other_ca()) {
      cannot_report();
    } else if (reports) {
      const std::string message = "no report has come within " + std::to_string(limit.count() / 1000) +
                                  " s: do the pods reach " + options_.objects.status_url +
                                  "? The job goes on; steps are not shown, and a hang would not be noticed";
      unknown("Progressing", "NoReports", message);
      note(true, "NoReports", message);
    } else {
      unknown("Progressing", "ReportsOff",
              "this operator takes no reports: steps are not shown, and a hang would not be noticed");
    }
    return decide();
  }
  if (!late) return requeue(limit - o_.starting_for);
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
  overdue(failure);
}

void Planner::overdue(const Failure& failure) {
  if (job_.spec.health.action == HangAction::kRestart) return on_failure(failure);
  const Condition* before = find_condition(job_.status, "Progressing");
  const bool said = before && before->status == "False" && before->reason == failure.reason;
  condition("Progressing", false, failure.reason, said ? before->message : failure.message);
  waits_for(failure.reason);
  if (said) return;
  note(true, failure.reason, failure.message);
  decide();
}

void Planner::running() {
  if (!stays_whole()) return;
  if (!heard()) {
    if (options_.objects.status_url.empty()) {
      return unknown("Progressing", "ReportsOff",
                     "this operator takes no reports: steps are not shown, and a hang would not be noticed");
    }
    // That none ever came was said when the job began to run.
    const Condition* begun = find_condition(job_.status, "Running");
    if (begun && begun->reason == kByPods) return;
  } else if (o_.report->rendezvous_done) {
    condition("Running", true, kByReport, "all ranks of attempt " + std::to_string(job_.status.attempt) + " have met");
  }
  // After an outage of ours everybody gets the whole limit again.
  const Milliseconds age = heard() ? o_.report->age : o_.silent_for;
  const Milliseconds silent = std::min(age, o_.reports_back_for);
  const std::string step_phase = heard() ? o_.report->progress.phase : next_.progress ? next_.progress->phase : "";
  int64_t limit_s = job_.spec.health.heartbeat_timeout_seconds;
  if (const auto own = job_.spec.health.phase_timeout_seconds.find(step_phase);
      own != job_.spec.health.phase_timeout_seconds.end()) {
    limit_s = own->second;
  }
  const Milliseconds limit{limit_s * 1000};
  // The silence of all is taken for our own trouble, but not for ever: they may all hang, or there is no other left.
  const bool doubt = limit_s == 0 || std::min(silent, o_.reports_served_for) < doubt_of(limit);
  // No hang, and no outage that ends. A connection from before the change may carry reports for a while.
  if (under_other_ca() && (o_.reports_out || (limit_s > 0 && silent >= limit))) return cannot_report();
  if (o_.reports_out && doubt) {
    unknown("Progressing", "ReportsLost",
            "no job's reports reach this operator: that is its own trouble, and hang limits begin anew afterwards" +
                (limit_s == 0
                     ? ""
                     : "; silence of " + in_seconds(doubt_of(limit)) + " while its address answers counts as a hang"));
    return requeue(Milliseconds(10000));
  }
  if (limit_s == 0) return;
  if (silent < limit) {
    condition("Progressing", true, "Reporting");
    requeue(limit - silent);
    return;
  }
  // One path cut under two runs ends for one of them some seconds earlier. Only a report of another job, from when this
  // one's was overdue, shows that the path is whole; or it is found broken meanwhile.
  const bool unheard = o_.reports_out || (o_.reports_quiet_for > Milliseconds(0) &&
                                          o_.reports_quiet_for + ReportStore::kLeastGap >= silent);
  if (unheard && doubt) return requeue(Milliseconds(1000));
  overdue(hang(age, step_phase, unheard));
}

bool Planner::under_other_ca() const {
  const auto reporter = std::find_if(current_.begin(), current_.end(),
                                     [](const ObservedPod* pod) { return pod->role == "actor" && pod->rank == 0; });
  if (reporter == current_.end() || (*reporter)->status_ca.empty()) return false;
  return (*reporter)->status_ca != status_ca_mark(options_.objects);
}

void Planner::cannot_report() {
  const std::string message = "the operator's CA has changed since attempt " + std::to_string(job_.status.attempt) +
                              " was made, so its trainers cannot report. The job goes on; steps are not shown, and a "
                              "hang would not be noticed. For an attempt with the new CA, suspend and resume the job, "
                              "or delete one of its actor pods";
  note_once("Progressing", "CaChanged", message);
  unknown("Progressing", "CaChanged", message);
  requeue(Milliseconds(60000));
}

Failure Planner::hang(Milliseconds age, const std::string& step_phase, bool unheard) const {
  const bool names = heard() && o_.report->stuck_rank;
  const Layout layout = layout_of(actor_of(job_.spec));
  Failure failure;
  failure.role = "actor";
  failure.rank = names ? *o_.report->stuck_rank : 0;
  failure.reason = kReasonHung;
  failure.message = "no heartbeat for " + in_seconds(age) + (step_phase.empty() ? "" : " in phase " + step_phase) +
                    (names ? "; " + name_of_rank(layout, *o_.report->stuck_rank) + " is late" : "");
  if (unheard) {
    failure.message += "; no other job is heard either, but this operator has been ready to take reports for " +
                       in_seconds(o_.reports_served_for);
  }
  return failure;
}

}  // namespace trireme::controller
