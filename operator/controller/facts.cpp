#include "operator/controller/facts.h"

#include <algorithm>

#include "base/text.h"

namespace trireme::controller {
namespace {

void observe_services(const Facts& facts, Observed& observed) {
  observed.services_known = facts.services_known;
  for (const auto& [name, service] : facts.services) {
    if (is_own(name, *service, facts.key)) observed.services[service->attempt] = {service->uid, service->gang};
  }
}

void observe_policy(const Facts& facts, Observed& observed) {
  observed.policies_known = facts.policies_known;
  if (!facts.policy || facts.policy->job_uid != hash64(observed.job.metadata.uid)) return;
  const Rewrite& rewrite = facts.answers.policy;
  const uint64_t stands_for = facts.policy->spec == rewrite.got ? rewrite.wanted : 0;
  observed.policy = {facts.policy->uid, facts.policy->spec, stands_for};
}

void observe_refusal(const Facts& facts, Observed& observed) {
  const std::optional<Refusal>& refusal = facts.answers.refusal;
  if (!refusal || !refusal->is_of(observed.job.metadata.uid, observed.job.status.attempt)) return;
  observed.rejection = refusal->message;
  observed.rejection_kind = refusal->kind;
  observed.rejection_final = refusal->is_final;
  observed.rejection_wait =
      std::max(Milliseconds(0), std::chrono::duration_cast<Milliseconds>(refusal->retry_at - facts.now));
}

void observe_nodes(const Facts& facts, Observed& observed, Sightings& sightings) {
  if (!facts.nodes_known) return;
  std::map<std::string, SteadyClock::time_point> unknown;
  for (ObservedPod& pod : observed.pods) {
    if (pod.node.empty() || pod.ended()) continue;
    const auto found = facts.nodes.find(pod.node);
    const NodeFact node = found == facts.nodes.end() ? NodeFact{} : found->second;
    pod.node_state = node.cached.value_or(node.gone ? NodeState::kGone : NodeState::kUnknown);
    if (pod.node_state == NodeState::kReady) continue;
    observed.nodes_in_doubt = facts.nodes_in_doubt;
    if (node.bad_since) pod.node_bad_for = std::chrono::duration_cast<Milliseconds>(facts.now - *node.bad_since);
    if (node.cached) continue;
    pod.node_unclear = !node.gone;
    const auto before = sightings.unknown_nodes.find(pod.node);
    unknown.emplace(pod.node, before == sightings.unknown_nodes.end() ? facts.now : before->second);
  }
  sightings.unknown_nodes = std::move(unknown);
}

}  // namespace

std::vector<std::string> nodes_to_ask(const Facts& facts, const Sightings& sightings, SteadyClock::time_point now,
                                      Milliseconds unknown_node) {
  std::vector<std::string> names;
  for (const auto& [name, node] : facts.nodes) {
    if (node.cached) continue;
    const auto seen = sightings.unknown_nodes.find(name);
    const bool overdue = seen != sightings.unknown_nodes.end() && now - seen->second >= unknown_node;
    if (node.bad_since || overdue) names.push_back(name);
  }
  return names;
}

Observed observe(Facts facts, Sightings& sightings) {
  Observed observed;
  observed.job = std::move(facts.snapshot.job);
  observed.issues = std::move(facts.snapshot.issues);
  observed.pods = std::move(facts.snapshot.pods);
  observed.live = facts.snapshot.live;
  observed.as_stored = facts.snapshot.as_stored;
  observed.now_ms = facts.now_ms;
  observed.report = std::move(facts.report);
  observed.claim_modes = std::move(facts.claim_modes);
  observed.reports_out = facts.path.out;
  observed.reports_quiet_for = facts.path.quiet_for;
  observed.reports_served_for = facts.path.served_for;
  observed.reports_back_for = facts.path.back_for;
  observe_services(facts, observed);
  observe_policy(facts, observed);
  observe_refusal(facts, observed);
  observe_nodes(facts, observed, sightings);
  sightings.ages.fill(observed, std::chrono::duration_cast<Milliseconds>(facts.now.time_since_epoch()).count());
  return observed;
}

Milliseconds silence_window(const Health& health, Milliseconds least) {
  int64_t limit_s = health.heartbeat_timeout_seconds;
  for (const auto& [phase, seconds] : health.phase_timeout_seconds) limit_s = std::min(limit_s, seconds);
  return std::clamp(Milliseconds(limit_s * 500), least, Milliseconds(60000));
}

}  // namespace trireme::controller
