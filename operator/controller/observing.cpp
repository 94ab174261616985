// What the reconciler shows the planner: its caches, live looks, and what it remembers of a job.
#include <algorithm>

#include "api/runtime.h"
#include "base/log.h"
#include "base/text.h"
#include "operator/controller/reconciler.h"
#include "operator/kube/api_error.h"
#include "operator/kube/events.h"

namespace trireme::controller {
namespace {

using kube::ApiError;
using kube::ObjectKey;

// Is resource version `a` newer than `b`? They are numbers in every API server so far; if not, the watch's word counts.
bool newer(const std::string& a, const std::string& b) {
  const auto x = parse_int(a), y = parse_int(b);
  return x && y ? *x > *y : false;
}

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(SteadyClock::now().time_since_epoch()).count();
}

}  // namespace

std::optional<Observed> Reconciler::observe_cached(const ObjectKey& key, Memory& memory) {
  const std::shared_ptr<const CachedJob> cached = watches_.jobs().get(key);
  if (!cached) return std::nullopt;
  Observed observed;
  if (memory.written && memory.written->metadata.uid == cached->uid &&
      newer(memory.written->metadata.resource_version, cached->resource_version)) {
    observed.job = *memory.written;
  } else {
    memory.written.reset();
    observed.job = rljob_from_json(cached->json(), observed.issues, {.strict = false});
  }
  for (const auto& [pod_key, pod] : watches_.pods().by_label(cached->uid)) {
    if (is_own(pod_key, *pod, key)) observed.pods.push_back(observe(pod_key.name, *pod));
  }
  return observed;
}

// What the cache cannot tell: whether a pod that it does not show is not there or only not heard of, and whether one
// that it shows still stands in the way.
std::optional<Observed> Reconciler::observe_live(const ObjectKey& key, Memory& memory, const Deadline& deadline) {
  const auto object = client_.find(kube::resources::kRlJobs, key, deadline);
  if (!object) return std::nullopt;
  Observed observed;
  observed.live = true;
  observed.job = rljob_from_json(*object, observed.issues, {.strict = false});
  const std::string& uid = observed.job.metadata.uid;
  std::vector<std::string> cached;
  for (const auto& [pod_key, pod] : watches_.pods().by_label(uid)) {
    if (is_own(pod_key, *pod, key)) cached.push_back(pod_key.name);
  }
  const auto names = memory.names.ask(observed.job, std::move(cached));
  const bool by_name =
      names && static_cast<int64_t>(names->size()) * options_.pods_a_get <= static_cast<int64_t>(pod_count());
  observed.pods = by_name ? get_pods(key, uid, *names, deadline) : list_pods(key, uid, deadline);
  memory.names.saw(observed.job, observed.pods);
  return observed;
}

std::vector<ObservedPod> Reconciler::list_pods(const ObjectKey& job, const std::string& uid,
                                               const Deadline& deadline) const {
  std::vector<ObservedPod> pods;
  kube::ListOptions list;
  list.label_selector = std::string(kLabelJobUid) + "=" + uid;
  client_.list_each(
      kube::resources::kPods, job.ns, list,
      [&](std::string_view text) {
        static const kube::JsonFields kFields = pod_fields();
        const Json reduced = kFields.parse(text);
        const std::string name = reduced["metadata"]["name"].get<std::string>();
        if (const CachedPod pod = read_pod(reduced); is_own({job.ns, name}, pod, job))
          pods.push_back(observe(name, pod));
      },
      deadline);
  return pods;
}

// Not of one moment, as a list is. Nobody but this worker makes pods of the job, and what was seen to have ended or to
// be gone stays so.
std::vector<ObservedPod> Reconciler::get_pods(const ObjectKey& job, const std::string& uid,
                                              const std::vector<std::string>& names, const Deadline& deadline) {
  std::vector<std::optional<ObservedPod>> found(names.size());
  std::vector<std::function<void()>> reads;
  for (size_t i = 0; i < names.size(); ++i) {
    reads.push_back([&, i] {
      const auto object = client_.find(kube::resources::kPods, {job.ns, names[i]}, deadline);
      if (!object || !controlled_by(*object, uid)) return;
      if (const CachedPod pod = read_pod(*object); is_own({job.ns, names[i]}, pod, job))
        found[i] = observe(names[i], pod);
    });
  }
  pool_.run(std::move(reads));
  std::vector<ObservedPod> pods;
  for (auto& pod : found) {
    if (pod) pods.push_back(std::move(*pod));
  }
  return pods;
}

void Reconciler::complete_observation(const ObjectKey& key, Observed& observed, Memory& memory,
                                      const Deadline& deadline) {
  const std::string& uid = observed.job.metadata.uid;
  const int64_t attempt = observed.job.status.attempt;
  observed.now_ms = now_ms();
  observed.services_known = watches_.services().synced();
  observed.services.clear();
  for (const auto& [name, service] : watches_.services().by_label(uid)) {
    if (is_own(name, *service, key)) observed.services[service->attempt] = {service->uid, service->gang};
  }
  const auto* policies = watches_.policies();
  observed.policies_known = policies && policies->synced();
  observed.policy.reset();
  if (const auto policy = policies ? policies->get({key.ns, network_policy_name(key.name)}) : nullptr;
      policy && policy->job_uid == hash64(uid))
    observed.policy = {policy->uid, policy->spec};
  observed.report = reports_.get(key, uid);
  observed.rejection.reset();
  if (const auto& refusal = writer_.refusal(key); refusal && refusal->attempt == attempt) {
    observed.rejection = refusal->message;
    observed.rejection_final = refusal->is_final;
    observed.rejection_wait =
        std::max(Milliseconds(0), std::chrono::duration_cast<Milliseconds>(refusal->retry_at - SteadyClock::now()));
  }
  look_up_claims(key, observed, memory, deadline);
  look_at_nodes(observed, memory);
  look_at_reports(observed);
  memory.ages.fill(observed, steady_ns() / 1000000);
}

void Reconciler::look_up_claims(const ObjectKey& key, Observed& observed, Memory& memory, const Deadline& deadline) {
  const RLJobStatus& status = observed.job.status;
  if (status.phase == phase::kQueued && memory.claims_attempt != status.attempt) {
    memory.claims_attempt = status.attempt;
    memory.claims.clear();
    for (const RoleRef& role : roles_of(observed.job.spec)) {
      if (role.spec->replicas < 2) continue;
      for (const VolumeView& volume : pod_view(observed.job.spec, *role.spec).volumes) {
        if (volume.kind != VolumeKind::kClaim || memory.claims.count(volume.source) > 0) continue;
        try {
          const auto claim = client_.find(kube::resources::kPersistentVolumeClaims, {key.ns, volume.source}, deadline);
          if (!claim) continue;
          std::vector<std::string>& modes = memory.claims[volume.source];
          for (const Json& mode : claim->value("spec", Json::object()).value("accessModes", Json::array())) {
            if (mode.is_string()) modes.push_back(mode.get<std::string>());
          }
        } catch (const ApiError& e) {
          log_debug("controller", key.str() + ": claim " + volume.source + " was not checked: " + e.what());
        }
      }
    }
  }
  observed.claim_modes = memory.claims_attempt == status.attempt ? memory.claims : decltype(memory.claims){};
}

void Reconciler::look_at_nodes(Observed& observed, Memory& memory) {
  const auto* nodes = watches_.nodes();
  if (!nodes) return;
  const auto now = SteadyClock::now();
  const auto since = [&](SteadyClock::time_point at) { return std::chrono::duration_cast<Milliseconds>(now - at); };
  std::map<std::string, SteadyClock::time_point> unknown;
  for (ObservedPod& pod : observed.pods) {
    if (pod.node.empty() || pod.ended()) continue;
    const auto node = nodes->get({"", pod.node});
    pod.node_state = node ? node->state : NodeState::kGone;
    if (pod.node_state == NodeState::kReady) continue;
    observed.nodes_in_doubt = watches_.bad_nodes().in_doubt();
    const auto bad_since = watches_.bad_nodes().since(pod.node);
    if (bad_since) pod.node_bad_for = since(*bad_since);
    // The pod may be known before its node is: that is news on its way, not a loss.
    if (!node && !bad_since) {
      const auto before = memory.unknown_nodes.find(pod.node);
      const auto at = before == memory.unknown_nodes.end() ? now : before->second;
      unknown.emplace(pod.node, at);
      if (since(at) < options_.unknown_node) pod.node_state = NodeState::kUnknown;
    }
  }
  memory.unknown_nodes = std::move(unknown);
}

void Reconciler::look_at_reports(Observed& observed) {
  const Health& health = observed.job.spec.health;
  int64_t limit_s = health.heartbeat_timeout_seconds;
  for (const auto& [phase, seconds] : health.phase_timeout_seconds) limit_s = std::min(limit_s, seconds);
  const Milliseconds window = std::clamp(Milliseconds(limit_s * 500), options_.least_silence, Milliseconds(60000));
  // A new leader has heard nobody yet; then all that run should have spoken. Counted seldom: there may be thousands.
  if (reports_.size() == 0 && steady_ns() - counted_ns_ > 5'000'000'000) {
    int64_t running = 0;
    watches_.jobs().for_each(
        [&](const ObjectKey&, const CachedJob& job) { running += job.managed && job.phase == phase::kRunning; });
    running_jobs_ = running;
    counted_ns_ = steady_ns();
  }
  const bool broken = options_.path_broken && options_.path_broken();
  const ReportStore::Path path = reports_.path(window, static_cast<size_t>(running_jobs_.load()), broken);
  observed.reports_out = path.out;
  observed.reports_quiet_for = path.quiet_for;
  observed.reports_back_for = path.back_for;
}

}  // namespace trireme::controller
