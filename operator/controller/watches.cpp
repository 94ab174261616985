#include "operator/controller/watches.h"

#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "api/runtime.h"
#include "base/text.h"
#include "operator/controller/plan.h"

namespace trireme::controller {
namespace {

using kube::ObjectKey;
using kube::Priority;

// After a start the jobs whose objects have to be made come before those that run already.
bool is_placed(const CachedJob& job) {
  return job.phase == phase::kStarting || job.phase == phase::kRunning || is_terminal(job.phase);
}

// Nobody's where the name is none of ours: labels can be copied.
std::optional<ObjectKey> job_of_policy(const ObjectKey& key) {
  const std::string suffix = network_policy_name("");
  if (key.name.size() <= suffix.size() || !ends_with(key.name, suffix)) return std::nullopt;
  return ObjectKey{key.ns, key.name.substr(0, key.name.size() - suffix.size())};
}

}  // namespace

Watches::Watches(const kube::Client& client, WatchOptions options, const PlanOptions& plan, Enqueue enqueue)
    : options_(std::move(options)), enqueue_(std::move(enqueue)) {
  watch_jobs(client, plan.manager_name);
  watch_pods(client);
  watch_services(client);
  if (plan.objects.network_policies) watch_policies(client);
  if (options_.watch_nodes) watch_nodes(client);
}

kube::ReflectorOptions Watches::reflector(const kube::Resource& resource, const char* selector) const {
  kube::ReflectorOptions o = options_.reflector;
  o.resource = resource;
  o.ns = resource.namespaced ? options_.ns : "";
  o.label_selector = selector;
  return o;
}

void Watches::watch_jobs(const kube::Client& client, const std::string& manager) {
  kube::InformerHandlers<CachedJob> on;
  on.on_add = [this](const ObjectKey& key, const auto& job, bool initial) {
    if (job->managed) look(key, initial && is_placed(*job) ? Priority::kLow : Priority::kNormal);
  };
  on.on_update = [this](const ObjectKey& key, const auto& before, const auto& job) {
    if (!job->managed) return;
    // Else it is the status: mostly the echo of our own write.
    if (job->generation != before->generation || job->deleting != before->deleting || !before->managed) {
      look(key);
    } else {
      look_later(key);
    }
  };
  on.on_delete = [this](const ObjectKey& key, const auto&) { look(key, Priority::kHigh); };
  jobs_ = std::make_unique<kube::Informer<CachedJob>>(
      client, kube::Informer<CachedJob>::Options{reflector(kube::resources::kRlJobs, ""), job_fields(), ""},
      [manager](const Json& object) { return read_job(object, manager); }, std::move(on));
}

void Watches::watch_pods(const kube::Client& client) {
  kube::InformerHandlers<CachedPod> on;
  on.on_add = [this](const ObjectKey& key, const auto& pod, bool initial) {
    if (!initial) on_pod(key, *pod, true);  // else its job is in a list, too
  };
  on.on_update = [this](const ObjectKey& key, const auto& before, const auto& pod) {
    const bool ended =
        pod->phase != before->phase && (pod->phase == PodPhase::kFailed || pod->phase == PodPhase::kSucceeded);
    const bool main_ended = pod->main_exit && !before->main_exit;
    on_pod(key, *pod, !ended && !main_ended && pod->deleting == before->deleting);
  };
  on.on_delete = [this](const ObjectKey& key, const auto& pod) { on_pod(key, *pod, false); };
  pods_ = std::make_unique<kube::Informer<CachedPod>>(
      client,
      kube::Informer<CachedPod>::Options{reflector(kube::resources::kPods, kLabelJobUid), pod_fields(), kLabelJobUid},
      read_pod, std::move(on));
}

void Watches::watch_services(const kube::Client& client) {
  kube::InformerHandlers<CachedService> on;
  // A Service that the watch tells of late may be all that remains of a job that has ended meanwhile.
  on.on_add = [this](const ObjectKey& key, const auto& service, bool initial) {
    if (is_own(key, *service, {key.ns, service->job}) && !initial) look_later({key.ns, service->job});
  };
  on.on_delete = [this](const ObjectKey& key, const auto& service) {
    if (is_own(key, *service, {key.ns, service->job})) look({key.ns, service->job});
  };
  services_ = std::make_unique<kube::Informer<CachedService>>(
      client,
      kube::Informer<CachedService>::Options{reflector(kube::resources::kServices, kLabelJobUid), service_fields(),
                                             kLabelJobUid},
      read_service, std::move(on));
}

void Watches::watch_policies(const kube::Client& client) {
  kube::InformerHandlers<CachedPolicy> on;
  // As with Services: the watch may tell of it after the job has ended.
  on.on_add = [this](const ObjectKey& key, const auto&, bool initial) {
    if (const auto job = job_of_policy(key); job && !initial) look_later(*job);
  };
  on.on_update = [this](const ObjectKey& key, const auto& before, const auto& policy) {
    const auto job = job_of_policy(key);
    if (job && (policy->spec != before->spec || policy->job_uid != before->job_uid)) look(*job);
  };
  on.on_delete = [this](const ObjectKey& key, const auto&) {
    if (const auto job = job_of_policy(key)) look(*job);
  };
  policies_ = std::make_unique<kube::Informer<CachedPolicy>>(
      client,
      kube::Informer<CachedPolicy>::Options{reflector(kube::resources::kNetworkPolicies, kLabelJobUid), policy_fields(),
                                            ""},
      read_policy, std::move(on));
}

void Watches::watch_nodes(const kube::Client& client) {
  kube::InformerHandlers<CachedNode> on;
  on.on_add = [this](const ObjectKey& key, const auto& node, bool) { on_node(key.name, node->state); };
  on.on_update = [this](const ObjectKey& key, const auto&, const auto& node) { on_node(key.name, node->state); };
  on.on_delete = [this](const ObjectKey& key, const auto&) { on_node(key.name, NodeState::kGone); };
  nodes_ = std::make_unique<kube::Informer<CachedNode>>(
      client, kube::Informer<CachedNode>::Options{reflector(kube::resources::kNodes, ""), node_fields(), ""}, read_node,
      std::move(on));
}

void Watches::look(const ObjectKey& job, Priority priority) const { enqueue_(job, Milliseconds(0), priority); }

void Watches::look_later(const ObjectKey& job) const { enqueue_(job, options_.pod_debounce, Priority::kLow); }

void Watches::enqueue_all() const {
  std::vector<std::pair<ObjectKey, Priority>> keys;
  jobs_->for_each([&](const ObjectKey& key, const CachedJob& job) {
    if (job.managed) keys.emplace_back(key, is_placed(job) ? Priority::kLow : Priority::kNormal);
  });
  std::set<ObjectKey> orphaned;
  pods_->for_each([&](const ObjectKey& key, const CachedPod& pod) {
    const ObjectKey job{key.ns, pod.job};
    if (pod.deleting && is_own(key, pod, job) && !jobs_->get(job)) orphaned.insert(job);
  });
  for (const ObjectKey& job : orphaned) keys.emplace_back(job, Priority::kNormal);
  for (const auto& [key, priority] : keys) look(key, priority);
}

void Watches::on_pod(const ObjectKey& key, const CachedPod& pod, bool later) const {
  const ObjectKey job{key.ns, pod.job};
  if (!is_own(key, pod, job)) return;
  if (later) {
    look_later(job);
  } else {
    look(job, Priority::kHigh);
  }
}

void Watches::on_node(const std::string& name, NodeState state) {
  const std::set<std::string> concerned = bad_nodes_.heard(name, state, nodes_->size(), SteadyClock::now());
  if (concerned.empty()) return;
  std::vector<ObjectKey> affected;
  pods_->for_each([&](const ObjectKey& key, const CachedPod& pod) {
    if (concerned.count(pod.node) > 0 && is_own(key, pod, {key.ns, pod.job})) affected.push_back({key.ns, pod.job});
  });
  for (const ObjectKey& job : affected) look(job, Priority::kHigh);
}

int64_t Watches::last_attempt_going(const ObjectKey& job) const {
  int64_t last = 0;
  pods_->for_each([&](const ObjectKey& key, const CachedPod& pod) {
    if (pod.deleting && is_own(key, pod, job)) last = std::max<int64_t>(last, pod.attempt);
  });
  return last;
}

void Watches::start() {
  jobs_->start();
  pods_->start();
  services_->start();
  if (policies_) policies_->start();
  if (nodes_) nodes_->start();
}

bool Watches::synced() const {
  return jobs_->synced() && pods_->synced() && services_->synced() && (!policies_ || policies_->synced()) &&
         (!nodes_ || nodes_->synced());
}

bool Watches::wait_synced(const Deadline& deadline) const {
  return jobs_->wait_synced(deadline) && pods_->wait_synced(deadline) && services_->wait_synced(deadline) &&
         (!policies_ || policies_->wait_synced(deadline)) && (!nodes_ || nodes_->wait_synced(deadline));
}

void Watches::stop() {
  jobs_->stop();
  pods_->stop();
  services_->stop();
  if (policies_) policies_->stop();
  if (nodes_) nodes_->stop();
}

}  // namespace trireme::controller
