#include "operator/controller/reconciler.h"

#include <algorithm>
#include <set>

#include "api/runtime.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "operator/controller/actions.h"
#include "operator/controller/network_policy.h"
#include "operator/kube/api_error.h"

namespace trireme::controller {
namespace {

using kube::ApiError;
using kube::ApiErrorKind;
using kube::ObjectKey;
using kube::Priority;

constexpr Milliseconds kLongestEcho{60000};  // of ReconcilerOptions::create_echo, doubled while the watch is late
constexpr int kMaxRounds = 8;                // decisions in one reconcile; more go back to the queue

// Kueue makes a group's Workload itself; its owners are the group's pods.
bool owned_by_pods(const Json& object, const std::string& job) {
  const Json metadata = object.value("metadata", Json::object());
  const Json owners = metadata.value("ownerReferences", Json::array());
  return owners.is_array() && std::any_of(owners.begin(), owners.end(), [&](const Json& owner) {
           return owner.is_object() && owner.value("kind", std::string()) == "Pod" &&
                  starts_with(owner.value("name", std::string()), job + "-actor-");
         });
}

// Every pod of an attempt that waits for nodes is there, and none is going.
bool whole(const Observed& observed) {
  const int64_t pods = std::count_if(observed.pods.begin(), observed.pods.end(), [&](const ObservedPod& pod) {
    return pod.attempt == observed.job.status.attempt && !pod.deleting;
  });
  return observed.job.status.phase == phase::kQueued && pods >= total_pods(observed.job.spec);
}

Json without_heartbeat_time(const RLJobStatus& status) {
  Json json = status_to_json(status);
  if (json.contains("progress") && json["progress"].is_object()) json["progress"].erase("lastHeartbeatTime");
  return json;
}

Json without_progress(const RLJobStatus& status) {
  Json json = status_to_json(status);
  json.erase("progress");
  return json;
}

}  // namespace

Json merge_diff(const Json& from, const Json& to) {
  Json patch = Json::object();
  if (!from.is_object() || !to.is_object()) return to;
  for (const auto& [key, value] : from.items()) {
    if (!to.contains(key)) patch[key] = nullptr;
  }
  for (const auto& [key, value] : to.items()) {
    const auto before = from.find(key);
    if (before == from.end()) {
      patch[key] = value;
    } else if (*before != value) {
      patch[key] = before->is_object() && value.is_object() ? merge_diff(*before, value) : value;
    }
  }
  return patch;
}

Reconciler::Reconciler(const kube::Client& client, ReconcilerOptions options, ReportStore& reports)
    : client_(client),
      options_(std::move(options)),
      reports_(reports),
      controller_({.queue = {.name = "rljob",
                             .backoff_min = options_.queue_backoff_min,
                             .backoff_max = options_.queue_backoff_max,
                             .low_limit = std::max(1, options_.workers / 16),
                             .metrics = options_.metrics},
                   .workers = options_.workers,
                   .reconcile_timeout = options_.reconcile_timeout},
                  [this](const std::string& key, const Deadline& deadline) {
                    return reconcile(ObjectKey::parse(key), deadline);
                  }),
      pool_(options_.write_threads),
      plan_(std::make_shared<const PlanOptions>(options_.plan)) {
  make_informers(client);
  reports_.set_listener([this](const ObjectKey& job, bool urgent) {
    if (urgent) {
      enqueue(job, Priority::kHigh);
    } else {
      look_later(job);
    }
  });
}

Reconciler::~Reconciler() { stop(); }

kube::ReflectorOptions Reconciler::reflector(const kube::Resource& resource, const char* selector) const {
  kube::ReflectorOptions o = options_.reflector;
  o.resource = resource;
  o.ns = resource.namespaced ? options_.ns : "";
  o.label_selector = selector;
  if (!o.metrics) o.metrics = options_.metrics;
  return o;
}

void Reconciler::make_informers(const kube::Client& client) {
  const std::string manager = options_.plan.manager_name;

  kube::InformerHandlers<CachedJob> on_job;
  on_job.on_add = [this](const ObjectKey& key, const auto& job, bool initial) {
    if (job->managed) enqueue(key, initial && is_placed(*job) ? Priority::kLow : Priority::kNormal);
  };
  on_job.on_update = [this](const ObjectKey& key, const auto& before, const auto& job) {
    if (!job->managed) return;
    // Else it is the status: mostly the echo of our own write.
    if (job->generation != before->generation || job->deleting != before->deleting || !before->managed) {
      enqueue(key);
    } else {
      look_later(key);
    }
  };
  on_job.on_delete = [this](const ObjectKey& key, const auto&) { enqueue(key, Priority::kHigh); };
  jobs_ = std::make_unique<kube::Informer<CachedJob>>(
      client, typename kube::Informer<CachedJob>::Options{reflector(kube::resources::kRlJobs, ""), job_fields(), ""},
      [manager](const Json& object) { return read_job(object, manager); }, std::move(on_job));

  kube::InformerHandlers<CachedPod> on_pod_change;
  on_pod_change.on_add = [this](const ObjectKey& key, const auto& pod, bool initial) {
    if (!initial) on_pod(key, *pod, true);  // else its job is in a list, too
  };
  on_pod_change.on_update = [this](const ObjectKey& key, const auto& before, const auto& pod) {
    const bool ended =
        pod->phase != before->phase && (pod->phase == PodPhase::kFailed || pod->phase == PodPhase::kSucceeded);
    const bool main_ended = pod->main_exit && !before->main_exit;
    on_pod(key, *pod, !ended && !main_ended && pod->deleting == before->deleting);
  };
  on_pod_change.on_delete = [this](const ObjectKey& key, const auto& pod) { on_pod(key, *pod, false); };
  pods_ = std::make_unique<kube::Informer<CachedPod>>(
      client,
      typename kube::Informer<CachedPod>::Options{reflector(kube::resources::kPods, kLabelJobUid), pod_fields(),
                                                  kLabelJobUid},
      read_pod, std::move(on_pod_change));

  kube::InformerHandlers<CachedService> on_service;
  // A Service that the watch tells of late may be all that remains of a job that has ended meanwhile.
  on_service.on_add = [this](const ObjectKey& key, const auto& service, bool initial) {
    if (is_own(key, *service, {key.ns, service->job}) && !initial) look_later({key.ns, service->job});
  };
  on_service.on_delete = [this](const ObjectKey& key, const auto& service) {
    if (is_own(key, *service, {key.ns, service->job})) enqueue({key.ns, service->job});
  };
  services_ = std::make_unique<kube::Informer<CachedService>>(
      client,
      typename kube::Informer<CachedService>::Options{reflector(kube::resources::kServices, kLabelJobUid),
                                                      service_fields(), kLabelJobUid},
      read_service, std::move(on_service));

  if (options_.plan.objects.network_policies) watch_policies(client);
  if (!options_.watch_nodes) return;
  kube::InformerHandlers<CachedNode> on_node_change;
  on_node_change.on_add = [this](const ObjectKey& key, const auto& node, bool) { on_node(key.name, node->state); };
  on_node_change.on_update = [this](const ObjectKey& key, const auto&, const auto& node) {
    on_node(key.name, node->state);
  };
  on_node_change.on_delete = [this](const ObjectKey& key, const auto&) { on_node(key.name, NodeState::kGone); };
  nodes_ = std::make_unique<kube::Informer<CachedNode>>(
      client, typename kube::Informer<CachedNode>::Options{reflector(kube::resources::kNodes, ""), node_fields(), ""},
      read_node, std::move(on_node_change));
}

void Reconciler::watch_policies(const kube::Client& client) {
  // Nobody's where the name is none of ours: labels can be copied.
  const auto job_of = [](const ObjectKey& key) -> std::optional<ObjectKey> {
    const std::string suffix = network_policy_name("");
    if (key.name.size() <= suffix.size() || !ends_with(key.name, suffix)) return std::nullopt;
    return ObjectKey{key.ns, key.name.substr(0, key.name.size() - suffix.size())};
  };
  kube::InformerHandlers<CachedPolicy> on_policy;
  // As with Services: the watch may tell of it after the job has ended.
  on_policy.on_add = [this, job_of](const ObjectKey& key, const auto&, bool initial) {
    if (const auto job = job_of(key); job && !initial) look_later(*job);
  };
  on_policy.on_update = [this, job_of](const ObjectKey& key, const auto& before, const auto& policy) {
    const auto job = job_of(key);
    if (job && (policy->spec != before->spec || policy->job_uid != before->job_uid)) enqueue(*job);
  };
  on_policy.on_delete = [this, job_of](const ObjectKey& key, const auto&) {
    if (const auto job = job_of(key)) enqueue(*job);
  };
  policies_ = std::make_unique<kube::Informer<CachedPolicy>>(
      client,
      typename kube::Informer<CachedPolicy>::Options{reflector(kube::resources::kNetworkPolicies, kLabelJobUid),
                                                     policy_fields(), ""},
      read_policy, std::move(on_policy));
}

void Reconciler::enqueue(const ObjectKey& job, Priority priority) {
  controller_.add(job.str(), Milliseconds(0), priority);
}

void Reconciler::look_later(const ObjectKey& job) { controller_.add(job.str(), options_.pod_debounce, Priority::kLow); }

// After a start the jobs whose objects have to be made come before those that run already.
bool Reconciler::is_placed(const CachedJob& job) {
  return job.phase == phase::kStarting || job.phase == phase::kRunning || is_terminal(job.phase);
}

void Reconciler::enqueue_all() {
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
  for (const auto& [key, priority] : keys) enqueue(key, priority);
}

void Reconciler::on_pod(const ObjectKey& key, const CachedPod& pod, bool later) {
  const ObjectKey job{key.ns, pod.job};
  if (!is_own(key, pod, job)) return;
  if (later) {
    look_later(job);
  } else {
    enqueue(job, Priority::kHigh);
  }
}

// As Kubernetes judges a zone: more than two and at least 55 of a hundred, or all of several.
bool Reconciler::nodes_in_doubt() const {
  const size_t bad = static_cast<size_t>(std::count_if(bad_nodes_.begin(), bad_nodes_.end(), [](const auto& node) {
    return node.second.state == NodeState::kNotReady;
  }));
  const size_t all = nodes_->size();
  return bad >= 2 && (bad >= all || (bad > 2 && bad * 100 >= all * 55));
}

void Reconciler::on_node(const std::string& name, NodeState state) {
  std::set<std::string> concerned = {name};
  {
    std::lock_guard lock(nodes_mutex_);
    const auto now = SteadyClock::now();
    const auto before = bad_nodes_.find(name);
    const bool same = before == bad_nodes_.end() ? state == NodeState::kReady : before->second.state == state;
    if (state == NodeState::kReady) {
      bad_nodes_.erase(name);
    } else {
      bad_nodes_.emplace(name, BadNode{state, now}).first->second.state = state;
    }
    const bool doubt = nodes_in_doubt();
    if (doubt_ != doubt) {
      if (doubt_) doubt_ended_ = now;
      for (const auto& [bad, node] : bad_nodes_) concerned.insert(bad);
    }
    if (same && doubt_ == doubt) return;
    doubt_ = doubt;
  }
  std::vector<ObjectKey> affected;
  pods_->for_each([&](const ObjectKey& key, const CachedPod& pod) {
    if (concerned.count(pod.node) > 0 && is_own(key, pod, {key.ns, pod.job})) affected.push_back({key.ns, pod.job});
  });
  for (const ObjectKey& job : affected) enqueue(job, Priority::kHigh);
}

void Reconciler::start_informers() {
  jobs_->start();
  pods_->start();
  services_->start();
  if (policies_) policies_->start();
  if (nodes_) nodes_->start();
}

bool Reconciler::synced() const {
  return jobs_->synced() && pods_->synced() && services_->synced() && (!policies_ || policies_->synced()) &&
         (!nodes_ || nodes_->synced());
}

bool Reconciler::wait_synced(const Deadline& deadline) const {
  return jobs_->wait_synced(deadline) && pods_->wait_synced(deadline) && services_->wait_synced(deadline) &&
         (!policies_ || policies_->wait_synced(deadline)) && (!nodes_ || nodes_->wait_synced(deadline));
}

void Reconciler::start_workers() {
  controller_.start([this] { enqueue_all(); });
}

void Reconciler::stop_workers() { controller_.stop(); }

void Reconciler::stop() {
  stop_workers();
  reports_.set_listener({});
  jobs_->stop();
  pods_->stop();
  services_->stop();
  if (policies_) policies_->stop();
  if (nodes_) nodes_->stop();
}

void Reconciler::set_discovery(scheduling::Discovery discovery) {
  auto next = std::make_shared<PlanOptions>(*plan_options());
  next->discovery = std::move(discovery);
  std::lock_guard lock(plan_mutex_);
  plan_ = std::move(next);
}

std::shared_ptr<const PlanOptions> Reconciler::plan_options() const {
  std::lock_guard lock(plan_mutex_);
  return plan_;
}

// ---- the loop
// --------------------------------------------------------------------------------------------------------

kube::Result Reconciler::reconcile(const ObjectKey& key, const Deadline& deadline) {
  Memory& memory = memory_of(key.str());
  std::optional<Observed> observed = observe_cached(key, memory);
  for (int round = 0; round < kMaxRounds; ++round) {
    if (!observed) {
      release_orphans(key, deadline);
      forget(key.str());
      return {};
    }
    complete_observation(key, *observed, memory, deadline);
    Plan next = plan(*observed, *plan_options());
    if (next.needs_live) {
      TRIREME_CHECK(!observed->live, "the planner asked twice for the live state of " + key.str());
      // We made the pods, or saw all of them, just now and the watch has not told of them yet.
      const auto since = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - memory.created_at);
      const RLJobStatus& cached = observed->job.status;
      const bool known = cached.phase == phase::kQueued && memory.created_attempt == cached.attempt;
      if (known && since < memory.echo) return {memory.echo - since};
      observed = observe_live(key, memory, deadline);
      if (observed && whole(*observed)) {
        // The watch is late. Waiting as long again as before keeps each news of the job from making another look.
        const int64_t attempt = observed->job.status.attempt;
        memory.echo =
            known && memory.created_attempt == attempt ? std::min(2 * memory.echo, kLongestEcho) : options_.create_echo;
        memory.created_attempt = attempt;
        memory.created_at = SteadyClock::now();
      }
      continue;
    }
    if (next.decision) {
      const int64_t before = observed->job.status.attempt;
      if (next.decision->attempt != before) memory.created_attempt = -1;
      const bool ends = is_terminal(next.decision->phase);
      observed->job = write_status(key, observed->job, *next.decision, deadline);
      if (before == 0 && observed->job.status.attempt == 1) memory.names.begin(observed->job);
      memory.written = std::make_unique<RLJob>(observed->job);
      memory.status_written = SteadyClock::now();
      emit(observed->job, next.events);
      if (ends) reports_.forget(key);  // nobody waits for its reports any more
      // A first attempt has no predecessors whose pods the cache may not show yet.
      observed->live = observed->live || observed->job.status.attempt == 1;
      continue;
    }
    const auto late = write_status_late(key, observed->job, next, memory, deadline);
    if (!next.actions.empty()) {
      const int64_t attempt = observed->job.status.attempt;
      const bool creates = std::any_of(next.actions.begin(), next.actions.end(), [](const Action& a) {
        return a.kind == Action::Kind::kCreate && a.resource.plural == "pods";
      });
      try {
        if (creates) memory.created_attempt = -1;  // until all are made
        carry_out(key, observed->job, std::move(next.actions), deadline);
        if (creates) {
          memory.rejected_attempt = -1;
          memory.rejections = 0;
        }
        if (creates) {
          memory.created_attempt = attempt;
          memory.created_at = SteadyClock::now();
          memory.echo = options_.create_echo;
        }
      } catch (const ApiError& e) {
        if (!creates || !keep_rejection(key, attempt, memory, e)) throw;
        return {Milliseconds(1)};
      }
    }
    if (late && (!next.requeue_after || *late < *next.requeue_after)) return {late, Priority::kLow};
    return {next.requeue_after};
  }
  throw kube::Requeue{"more than " + std::to_string(kMaxRounds) + " decisions in a row"};
}

// ---- writing
// ---------------------------------------------------------------------------------------------------------

void Reconciler::check_may_write() const {
  if (options_.may_write && !options_.may_write()) throw kube::NotLeading{};
}

// The user has to see what the API server would not take, and the planner to decide about it. A quota may come back, so
// it is asked again, seldom; each other answer is logged once.
bool Reconciler::keep_rejection(const ObjectKey& key, int64_t attempt, Memory& memory, const ApiError& error) {
  if (error.kind() != ApiErrorKind::kInvalid && error.kind() != ApiErrorKind::kForbidden) return false;
  if (memory.rejected_attempt != attempt) memory.rejections = 0;
  if (memory.rejections == 0) log_warn("controller", key.str() + ": " + error.what());
  memory.rejected_attempt = attempt;
  memory.rejection = error.what();
  memory.rejection_final = error.kind() == ApiErrorKind::kInvalid;
  const Milliseconds wait =
      std::min(options_.refusal_min * (1 << std::min(memory.rejections, 10)), options_.refusal_max);
  memory.retry_at = SteadyClock::now() + std::max(wait, error.retry_after().value_or(Milliseconds(0)));
  ++memory.rejections;
  return true;
}

RLJob Reconciler::write_status(const ObjectKey& key, const RLJob& job, const RLJobStatus& status,
                               const Deadline& deadline) {
  check_may_write();
  Json patch = {{"metadata", {{"resourceVersion", job.metadata.resource_version}, {"uid", job.metadata.uid}}},
                {"status", merge_diff(status_to_json(job.status), status_to_json(status))}};
  const Json answer = client_.patch(kube::resources::kRlJobs, key, patch, kube::PatchType::kMerge, "status", deadline);
  std::vector<Issue> ignored;
  return rljob_from_json(answer, ignored, {.strict = false});
}

std::optional<Milliseconds> Reconciler::write_status_late(const ObjectKey& key, const RLJob& job, const Plan& plan,
                                                          Memory& memory, const Deadline& deadline) {
  if (without_heartbeat_time(plan.status) == without_heartbeat_time(job.status)) {
    // Nothing but the time of the heartbeat: it shows that the job lives, so it is written, but seldom.
    const bool same = !plan.status.progress || !job.status.progress ||
                      plan.status.progress->last_heartbeat_time == job.status.progress->last_heartbeat_time;
    if (same) return std::nullopt;
  }
  const bool progress_only = without_progress(plan.status) == without_progress(job.status);
  // All jobs together write at most about a hundred progress updates a second.
  // While many jobs wait in the queue, making their objects comes before describing those of others.
  const Milliseconds busy(std::min<size_t>(10 * controller_.queue().size(), 10000));
  const Milliseconds interval = progress_only ? std::max(options_.progress_interval, Milliseconds(10 * jobs_->size()))
                                              : std::max(options_.status_interval, busy);
  const auto since = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - memory.status_written);
  const bool before = memory.status_written != SteadyClock::time_point{};
  // What is also an event is told at once: the actions that follow may leave nothing to tell of.
  if (before && since < interval && plan.events.empty()) return interval - since;
  memory.written = std::make_unique<RLJob>(write_status(key, job, plan.status, deadline));
  memory.status_written = SteadyClock::now();
  emit(job, plan.events);
  return std::nullopt;
}

void Reconciler::emit(const RLJob& job, const std::vector<EventNote>& notes) {
  for (const EventNote& note : notes) {
    log(note.warning ? LogLevel::kWarn : LogLevel::kInfo, "controller",
        job.metadata.namespace_ + "/" + job.metadata.name + ": " + note.reason + ": " + note.message);
    if (!options_.events) continue;
    options_.events->event({kApiVersion, kRLJobKind, job.metadata.namespace_, job.metadata.name, job.metadata.uid},
                           note.warning ? kube::EventType::kWarning : kube::EventType::kNormal, note.reason,
                           note.message);
  }
}

void Reconciler::carry_out(const ObjectKey& key, const RLJob& job, std::vector<Action> actions,
                           const Deadline& deadline) {
  std::stable_sort(actions.begin(), actions.end(), [](const Action& a, const Action& b) { return a.wave < b.wave; });
  for (size_t begin = 0; begin < actions.size();) {
    size_t end = begin;
    std::vector<std::function<void()>> wave;
    while (end < actions.size() && actions[end].wave == actions[begin].wave) {
      Action& action = actions[end++];
      wave.push_back([&, this] {
        if (action.kind == Action::Kind::kDelete) {
          remove(key, job.metadata.uid, action, deadline);
        } else {
          create(job, action, deadline);
        }
      });
    }
    pool_.run(std::move(wave));
    begin = end;
  }
}

void Reconciler::create(const RLJob& job, Action& action, const Deadline& deadline) {
  check_may_write();
  const bool apply = action.kind == Action::Kind::kApply;
  try {
    client_.post(action.resource, apply ? action.body : std::move(action.body), deadline);
    return;
  } catch (const ApiError& e) {
    if (!e.already_exists()) throw;
  }
  const ObjectKey name{job.metadata.namespace_, action.name};
  const auto existing = client_.find(action.resource, name, deadline);
  if (!existing) throw kube::Requeue{action.resource.plural + " " + name.str() + " came and went"};
  const Json metadata = existing->value("metadata", Json::object());
  if (metadata.contains("deletionTimestamp"))
    throw kube::Requeue{action.resource.plural + " " + name.str() + " is still being deleted"};
  if (controlled_by(*existing, job.metadata.uid)) {
    if (apply) make_so(action, *existing, deadline);
    return;
  }
  // Of an earlier job of the same name: the garbage collector is on its way. Anybody else's: the user has to act.
  const std::string message =
      action.resource.kind + " " + action.name + " exists and belongs to somebody else; delete it or rename the job";
  emit(job, {{true, "NameTaken", message}});
  throw kube::Requeue{message};
}

// In one write, without a moment in which the object is not there. Labels of others stay.
void Reconciler::make_so(const Action& action, const Json& existing, const Deadline& deadline) {
  const Json& metadata = existing["metadata"];
  Json labels = metadata.value("labels", Json::object());
  labels.update(action.body["metadata"]["labels"]);
  const Json spec = existing.value("spec", Json::object());
  if (spec == action.body["spec"] && labels == metadata.value("labels", Json::object())) return;
  const ObjectKey key{metadata["namespace"].get<std::string>(), action.name};
  const Json patch = {{"metadata", {{"resourceVersion", metadata["resourceVersion"]}, {"labels", labels}}},
                      {"spec", merge_diff(spec, action.body["spec"])}};
  check_may_write();
  log_info("controller", action.resource.plural + " " + key.str() + " was changed by somebody else; it is put right");
  client_.patch(action.resource, key, patch, kube::PatchType::kMerge, "", deadline);
}

// By UID, so that what somebody else made under the name meanwhile stays.
void Reconciler::remove(const ObjectKey& key, const std::string& job_uid, const Action& action,
                        const Deadline& deadline) {
  const ObjectKey name{key.ns, action.name};
  kube::DeleteOptions options;
  options.uid = action.uid;
  options.grace_period_seconds = action.grace_period_s;
  if (options.uid.empty()) {
    const auto found = client_.find(action.resource, name, deadline);
    if (!found || !(controlled_by(*found, job_uid) || owned_by_pods(*found, key.name))) return;
    options.uid = found->value("metadata", Json::object()).value("uid", std::string());
  }
  check_may_write();
  try {
    client_.remove(action.resource, name, options, deadline);
  } catch (const ApiError& e) {
    // Another object of that name: ours is gone.
    if (!e.conflict()) throw;
  }
}

void Reconciler::release_orphans(const ObjectKey& key, const Deadline& deadline) {
  const auto options = plan_options();
  scheduling::Backend kueue;
  try {
    kueue = scheduling::choose_backend("kueue", true, options->discovery);
  } catch (const Error&) {
    return;  // there is none
  }
  int64_t last = 0;
  pods_->for_each([&](const ObjectKey& pod_key, const CachedPod& pod) {
    if (pod.deleting && is_own(pod_key, pod, key)) last = std::max<int64_t>(last, pod.attempt);
  });
  for (const Action& action : orphan_actions(kueue, key.name, last)) remove(key, "", action, deadline);
}

Reconciler::Memory& Reconciler::memory_of(const std::string& key) {
  std::lock_guard lock(memory_mutex_);
  auto& memory = memory_[key];
  if (!memory) memory = std::make_unique<Memory>();
  return *memory;
}

void Reconciler::forget(const std::string& key) {
  reports_.forget(ObjectKey::parse(key));
  std::lock_guard lock(memory_mutex_);
  memory_.erase(key);
}

}  // namespace trireme::controller
