#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "api/runtime.h"
#include "base/text.h"
#include "operator/controller/planner.h"
#include "operator/kube/events.h"

namespace trireme::controller {
namespace {

constexpr size_t kMostStatusBytes = 1024;

double five_digits(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.5g", value);
  return std::strtod(text, nullptr);
}

}  // namespace

std::string part_of(size_t part, size_t whole) { return std::to_string(part) + " of " + std::to_string(whole); }

std::string shorten(const std::string& message) {
  if (message.size() <= kMostStatusBytes) return message;
  size_t at = kMostStatusBytes;
  while (at > 0 && (static_cast<unsigned char>(message[at]) & 0xC0) == 0x80) --at;
  return message.substr(0, at);
}

std::string Planner::time(int64_t unix_ms) const { return kube::format_time(unix_ms); }

void Planner::note(bool warning, const std::string& reason, const std::string& message) {
  out_.events.push_back({warning, reason, shorten(message)});
}

void Planner::note_once(const char* type, const std::string& reason, const std::string& message) {
  const Condition* before = find_condition(job_.status, type);
  if (!before || before->reason != reason) note(true, reason, message);
}

void Planner::condition(const char* type, bool value, const std::string& reason, const std::string& message) {
  set_condition(next_, type, value ? "True" : "False", reason, shorten(message), o_.now_ms);
}

void Planner::unknown(const char* type, const std::string& reason, const std::string& message) {
  set_condition(next_, type, "Unknown", reason, shorten(message), o_.now_ms);
}

void Planner::describe_pods() {
  std::vector<RoleStatus> before = std::move(next_.roles);
  next_.roles.clear();
  size_t ready = 0, wanted = 0;
  std::optional<ScaleStatus> scale;
  const ObservedPod* blocked = nullptr;  // the first one that cannot begin
  for (const RoleRef& role : roles_of(job_.spec)) {
    RoleStatus row;
    row.name = role.name;
    row.desired = role.spec->replicas;
    row.world_size = world_size(*role.spec);
    row.selector = std::string(kLabelJobUid) + "=" + job_.metadata.uid + "," + kLabelRole + "=" + role.name;
    for (const RoleStatus& old : before) {
      if (old.name == role.name) row.restarts = old.restarts;
    }
    for (const ObservedPod* pod : current_) {
      if (pod->role != role.name) continue;
      ++row.created;
      row.scheduled += pod->scheduled;
      row.ready += pod->ready;
      row.succeeded += pod->done();
      row.failed += pod->failed();
      if (!blocked && pod->alive() && !pod->waiting.empty()) blocked = pod;
    }
    ready += static_cast<size_t>(row.ready);
    wanted += static_cast<size_t>(row.desired);
    if (role.name == "generation") scale = ScaleStatus{row.created, row.selector};
    next_.roles.push_back(std::move(row));
  }
  next_.generation = std::move(scale);
  if (is_terminal(job_.status.phase) || in(phase::kSuspended)) return;
  const bool all = wanted > 0 && ready == wanted;
  const std::string reason = all ? "Ready" : blocked ? blocked->waiting : "Waiting";
  const std::string message =
      part_of(ready, wanted) + " pods are ready" + (blocked ? ": " + blocked->name + ": " + blocked->message : "");
  if (blocked) {
    waits_for(blocked->waiting);
    note_once("PodsReady", reason, message);
  }
  condition("PodsReady", all, reason, message);
  describe_claims();
}

// Several writers on one claim need an access mode that lets several nodes have it.
void Planner::describe_claims() {
  std::string problem;
  for (const ClaimUse& use : claim_uses(job_.spec)) {
    const auto claim = o_.claim_modes.find(use.claim);
    if (use.pods < 2 || claim == o_.claim_modes.end()) continue;
    const auto& modes = claim->second;
    const bool shared = std::any_of(modes.begin(), modes.end(),
                                    [](const std::string& m) { return m == "ReadWriteMany" || m == "ReadOnlyMany"; });
    if (!shared)
      problem = "claim " + use.claim + " is not ReadWriteMany but " + std::to_string(use.pods) + " pods (" +
                join(use.roles, ", ") + ") mount it: they can only run on one node";
  }
  const Condition* accepted = find_condition(next_, "Accepted");
  if (!problem.empty() && accepted && accepted->status == "True" && accepted->reason != "ClaimNotShared") {
    condition("Accepted", true, "ClaimNotShared", problem);
    note(true, "ClaimNotShared", problem);
  }
}

void Planner::describe_progress() {
  if (!heard()) return;
  next_.progress = o_.report->progress;
  // People read these numbers in columns; the exact ones are in the metrics and the run's log.
  Progress& p = *next_.progress;
  for (auto* value : {&p.reward, &p.step_seconds, &p.tokens_per_second, &p.response_length, &p.validation_accuracy,
                      &p.trajectory_age})
    if (*value) *value = five_digits(**value);
  for (auto& [name, seconds] : p.phase_seconds) seconds = five_digits(seconds);
  next_.progress->last_heartbeat_time = time(o_.now_ms - o_.report->age.count());
}

// Of the attempt that the status names, whatever brought it there.
void Planner::describe_rendezvous() {
  if (next_.attempt == 0) return;
  const std::string map = topology_config_map_name(job_.metadata.name, next_.attempt);
  if (next_.rendezvous && next_.rendezvous->topology_config_map == map) return;
  next_.rendezvous =
      Rendezvous{pod_address(job_.metadata.name, "actor", 0, next_.attempt), job_.spec.network.master_port, map};
}

void Planner::describe_stuck(const ObservedPod* stuck) {
  const Condition* before = find_condition(job_.status, "Terminating");
  if (!stuck) {
    if (before && before->status == "True") condition("Terminating", false, "PodsGone");
    return;
  }
  const std::string silent = stuck->node_state == NodeState::kNotReady ? ", which is not ready," : "";
  const std::string message = "pod " + stuck->name + " on node " + stuck->node + silent +
                              " was told to go and does not; nothing is started beside it. If the node is off for "
                              "good, delete its object or taint it with node.kubernetes.io/out-of-service";
  waits_for("PodNotGone");
  note_once("Terminating", "PodNotGone", message);
  condition("Terminating", true, "PodNotGone", message);
}

void Planner::describe_refusal(const char* type, size_t missing) {
  const bool quota = o_.rejection->find("exceeded quota") != std::string::npos;
  const bool of_pods = o_.rejection_kind == kube::resources::kPods.kind;
  const std::string reason = quota ? "QuotaExceeded" : of_pods ? "PodsRejected" : o_.rejection_kind + "Rejected";
  const size_t wanted = static_cast<size_t>(total_pods(job_.spec));
  const std::string message = part_of(wanted - missing, wanted) + " pods could be made: " + *o_.rejection;
  note_once(type, reason, message);
  condition(type, false, reason, message);
  waits_for(reason);
}

void Planner::close_conditions(const std::string& reason) {
  next_.waiting.clear();
  for (const char* type : {"Admitted", "GangScheduled", "PodsReady"}) {
    const Condition* before = find_condition(next_, type);
    if (before && (before->status != "True" || std::string_view(type) == "PodsReady"))
      condition(type, false, reason, "the job has ended");
  }
}

const Condition* find_condition(const RLJobStatus& status, const std::string& type) {
  for (const Condition& condition : status.conditions) {
    if (condition.type == type) return &condition;
  }
  return nullptr;
}

void set_condition(RLJobStatus& status, const std::string& type, const std::string& value, const std::string& reason,
                   const std::string& message, int64_t now_ms) {
  for (Condition& condition : status.conditions) {
    if (condition.type != type) continue;
    if (condition.status != value) condition.last_transition_time = kube::format_time(now_ms);
    condition.status = value;
    condition.reason = reason;
    condition.message = message;
    return;
  }
  status.conditions.push_back({type, value, reason, message, kube::format_time(now_ms), std::nullopt});
}

}  // namespace trireme::controller
