#include <algorithm>

#include "api/runtime.h"
#include "operator/controller/planner.h"
#include "operator/kube/events.h"

namespace trireme::controller {
namespace {

constexpr size_t kMaxLogTailBytes = 2048;

// The end of the text, at a character's border.
std::string tail(const std::string& text, size_t limit) {
  if (text.size() <= limit) return text;
  size_t at = text.size() - limit;
  while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) ++at;
  return text.substr(at);
}

}  // namespace

int64_t doubled(Milliseconds base, int64_t times, Milliseconds most) {
  return std::min<int64_t>(base.count() << std::clamp<int64_t>(times, 0, 20), most.count());
}

std::vector<Failure> Planner::failures() {
  // A rank that reports, and a cluster that finds many nodes silent at once, speak against the loss of this one.
  const bool beats = heard() && o_.report->age <= options_.fresh_heartbeat;
  const Milliseconds grace{job_.spec.health.node_not_ready_grace_seconds * 1000};
  const Milliseconds patience = o_.nodes_in_doubt ? Milliseconds::max() : grace;
  std::vector<Failure> found;
  for (const ObservedPod* pod : current_) {
    const auto alone = [&](const Failure& failure) {
      return judge(job_.spec.failure_policy, failure).replace && may_replace(*pod);
    };
    if (pod->alive() && pod->node_state == NodeState::kNotReady) {
      const bool held = o_.nodes_in_doubt || (beats && !is_service_role(pod->role));
      waits_for("NodeNotReady");
      const Milliseconds bad_for = std::min(pod->node_bad_for, pod->on_bad_node_for);
      requeue(held || bad_for >= grace ? Milliseconds(10000) : grace - bad_for);
    }
    if (pod->alive() && pod->node_unclear) requeue(Milliseconds(10000));  // it is asked about again
    // A pod of a gang that is not complete yet may be taken away: it is made again. So is one of a service, of which
    // Kueue takes a second only when the first has ended.
    const bool good_node = pod->node_state == NodeState::kReady || pod->node_state == NodeState::kUnknown;
    const bool waits = is_service_role(pod->role) && good_node && !may_replace(*pod);
    if (pod->deleting && pod->alive() && (in(phase::kQueued) || waits)) continue;
    auto failure = pod_failure(*pod, patience, options_.start_grace);
    // Rank 0's word is one against the end of its attempt. Of a pod that is replaced alone it knows nothing.
    if (failure && beats && !alone(*failure)) failure = pod_failure(*pod, Milliseconds::max(), options_.start_grace);
    if (!failure) continue;
    failure->trained_before = next_.progress && next_.progress->step > 0;
    if (!alone(*failure) || lose(*pod, *failure)) found.push_back(std::move(*failure));
  }
  const bool echoes = !found.empty() && std::all_of(found.begin(), found.end(), [](auto& f) { return f.consequence; });
  if (!echoes || o_.nodes_in_doubt) return found;
  // Ranks that lost a peer, and a node that is silent: the attempt is over, and it was the node.
  for (const ObservedPod* pod : current_) {
    if (!pod->alive() || pod->node_state != NodeState::kNotReady || is_service_role(pod->role)) continue;
    if (auto failure = pod_failure(*pod, Milliseconds(0), options_.start_grace)) found.push_back(std::move(*failure));
  }
  return found;
}

// A rank that still seems to live while others lost it may be on a node that has just died: its kubelet's silence
// takes longer to be noticed than a broken connection.
bool Planner::echo_waits(const std::vector<Failure>& found, const Failure& cause) {
  if (!cause.consequence) return false;
  const bool missing = std::any_of(current_.begin(), current_.end(), [](const ObservedPod* pod) {
    return !is_service_role(pod->role) && pod->alive() && !pod->failed() && !pod->done();
  });
  const Milliseconds patience = missing ? options_.cause_wait : options_.settle;
  // Since the first of them: more echoes do not make the cause come later.
  Milliseconds seen{0};
  for (const Failure& failure : found) seen = std::max(seen, failure.seen_for);
  if (seen >= patience) return false;
  requeue(patience - seen);
  return true;
}

LastFailure Planner::record_of(const Failure& failure, const char* action) const {
  LastFailure record;
  record.role = failure.role;
  record.rank = failure.rank;
  record.pod = failure.pod;
  record.pod_uid = failure.pod_uid;
  record.node = failure.node;
  record.exit_code = failure.exit_code;
  record.signal = failure.signal;
  record.reason = failure.reason;
  record.message = shorten(describe(failure));
  record.log_tail = tail(failure.log, kMaxLogTailBytes);
  record.action = action;
  record.time = time(o_.now_ms);
  record.attempt = job_.status.attempt;
  return record;
}

void Planner::on_failure(const Failure& failure) {
  const FailurePolicy& policy = job_.spec.failure_policy;
  const Verdict verdict = judge(policy, failure);
  next_.last_failure = record_of(failure, to_string(verdict.action));
  const std::string what = describe(failure);
  const int64_t step = next_.progress ? next_.progress->step : 0;
  if (policy.restart_window_steps > 0 && step - next_.window_step >= policy.restart_window_steps) next_.budget_used = 0;
  if (verdict.action == FailureAction::kFailJob) return fail("FailurePolicy", what);
  if (verdict.counted && next_.budget_used + 1 > policy.max_restarts) {
    return fail("RestartBudgetExhausted", what + "; all " + std::to_string(policy.max_restarts) + " restarts are used");
  }
  restart(failure, verdict);
}

// The back-off before the next attempt.
int64_t Planner::count_restart() {
  ++next_.restarts;
  ++next_.budget_used;
  next_.window_step = next_.progress ? next_.progress->step : 0;
  return next_.budget_used > 1 ? doubled(options_.backoff_base, next_.budget_used - 2, options_.backoff_max) : 0;
}

int64_t Planner::count_free_restart() {
  ++next_.free_restarts;
  const int64_t step = next_.progress ? next_.progress->step : 0;
  const bool ran = in(phase::kRunning) && since(job_.status.running_time) >= options_.long_life.count();
  if (ran || step > next_.free_step) next_.free_streak = 0;
  next_.free_step = std::max(step, next_.free_step);
  ++next_.free_streak;
  const bool short_lived = since(job_.status.attempt_start_time) < options_.short_life.count();
  if (next_.free_streak == 1 && !short_lived) return 0;
  return doubled(options_.backoff_base, next_.free_streak - 1, options_.backoff_max);
}

void Planner::avoid_node(const Failure& failure, const Verdict& verdict) {
  const bool avoids = verdict.avoid_node && !failure.node.empty();
  std::erase_if(next_.avoided_nodes, [&](const AvoidedNode& node) {
    const auto until = kube::parse_time(node.until);
    return !until || *until <= o_.now_ms || (avoids && node.name == failure.node);
  });
  if (!avoids) return;
  const int64_t seconds = failure.node_refused ? options_.refused_node_seconds : options_.avoid_node_seconds;
  next_.avoided_nodes.push_back({failure.node, failure.reason, time(o_.now_ms + seconds * 1000)});
  const size_t limit = static_cast<size_t>(std::max<int64_t>(0, job_.spec.failure_policy.max_avoided_nodes));
  while (next_.avoided_nodes.size() > limit) next_.avoided_nodes.erase(next_.avoided_nodes.begin());
}

// Kueue takes a new pod for one of the group that failed, and the group keeps its quota: when the new pods look like
// the old ones to it (the same affinity, too), and the old ones will all have failed.
bool Planner::keeps_reservation(const Failure& failure, const Verdict& verdict) const {
  if (backend_.kind != scheduling::BackendKind::kKueue || verdict.avoid_node) return false;
  if (in(phase::kQueued) || next_.avoided_nodes.size() != job_.status.avoided_nodes.size()) return false;
  if (!failure.exit_code && failure.reason != kReasonHung) return false;
  return std::none_of(current_.begin(), current_.end(), [](const ObservedPod* pod) {
    return pod->phase == PodPhase::kSucceeded || pod->deleting || pod->node_state == NodeState::kGone ||
           pod->node_state == NodeState::kNotReady;
  });
}

void Planner::restart(const Failure& failure, const Verdict& verdict) {
  const std::string what = describe(failure);
  const int64_t delay_ms = verdict.counted ? count_restart() : count_free_restart();
  if (!verdict.counted && next_.free_streak > job_.spec.failure_policy.max_free_restarts) {
    return fail("FreeRestartsExhausted",
                what + "; " + std::to_string(job_.spec.failure_policy.max_free_restarts) +
                    " free restarts in a row brought neither a step nor ten minutes of running");
  }
  avoid_node(failure, verdict);
  const std::string group = job_.status.reservation.empty()
                                ? attempt_service_name(job_.metadata.name, job_.status.attempt)
                                : job_.status.reservation;
  const bool keeps = keeps_reservation(failure, verdict);
  start_attempt_at(o_.now_ms + delay_ms);
  if (keeps) next_.reservation = group;
  next_.phase = phase::kRestarting;
  condition("Restarting", true, failure.reason, what);
  condition("Progressing", false, failure.reason);
  note(true, "Restarting",
       what + "; attempt " + std::to_string(next_.attempt) + " follows" + (verdict.counted ? "" : " (not counted)"));
  decide();
}

}  // namespace trireme::controller
