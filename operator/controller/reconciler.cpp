#include "operator/controller/reconciler.h"

#include <algorithm>
#include <set>

#include "api/runtime.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "operator/controller/actions.h"
#include "operator/kube/api_error.h"

namespace trireme::controller {
namespace {

using kube::ApiError;
using kube::ApiErrorKind;
using kube::ObjectKey;
using kube::Priority;

constexpr Milliseconds kLongestEcho{60000};  // of ReconcilerOptions::create_echo, doubled while the watch is late
constexpr int kMaxRounds = 8;                // decisions in one reconcile; more go back to the queue

// Thrown when the lease is not ours: nothing is wrong, somebody else does the work.
struct NotLeading {};
// An object of ours stands in the way but will go; come back.
struct TryAgain {
  std::string why;
};

// Is resource version `a` newer than `b`? They are numbers in every API server so far; if not, the watch's word counts.
bool newer(const std::string& a, const std::string& b) {
  const auto x = parse_int(a), y = parse_int(b);
  return x && y ? *x > *y : false;
}

bool owned_by(const Json& object, const std::string& uid) {
  const Json metadata = object.value("metadata", Json::object());
  const Json owners = metadata.value("ownerReferences", Json::array());
  return std::any_of(owners.begin(), owners.end(),
                     [&](const Json& owner) { return owner.is_object() && owner.value("uid", std::string()) == uid; });
}

// The label selector of a list, for an object that was read by its name: that may be somebody else's.
bool has_label(const Json& object, const char* label, const std::string& value) {
  const Json metadata = object.value("metadata", Json::object());
  const Json labels = metadata.value("labels", Json::object());
  return labels.is_object() && labels.value(label, std::string()) == value;
}

// Every pod of an attempt that waits for nodes is there, and none is going.
bool whole(const Observed& observed) {
  const int64_t pods = std::count_if(observed.pods.begin(), observed.pods.end(), [&](const ObservedPod& pod) {
    return pod.attempt == observed.job.status.attempt && !pod.deleting;
  });
  return observed.job.status.phase == phase::kQueued && pods >= total_pods(observed.job.spec);
}

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(SteadyClock::now().time_since_epoch()).count();
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
      queue_({.name = "rljob",
              .backoff_min = options_.queue_backoff_min,
              .backoff_max = options_.queue_backoff_max,
              .low_limit = std::max(1, options_.workers / 16),
              .metrics = options_.metrics}),
      metrics_(*options_.metrics, "rljob"),
      conflicts_(options_.metrics->counter("trireme_reconcile_conflicts_total",
                                           "Status writes that lost against another writer and were done again.")),
      pool_(options_.write_threads),
      plan_(std::make_shared<const PlanOptions>(options_.plan)) {
  metrics_.max_concurrent.Set(options_.workers);
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

void Reconciler::make_informers(const kube::Client& client) {
  auto reflector = [&](const kube::Resource& resource, const char* selector) {
    kube::ReflectorOptions o = options_.reflector;
    o.resource = resource;
    o.ns = resource.namespaced ? options_.ns : "";
    o.label_selector = selector;
    if (!o.metrics) o.metrics = options_.metrics;
    return o;
  };
  const std::string manager = options_.plan.manager_name;

  kube::InformerHandlers<CachedJob> on_job;
  on_job.on_add = [this](const ObjectKey& key, const auto& job, bool initial) {
    if (!job->managed) return;
    // After a start the jobs whose objects have to be made come before those that run already.
    const bool placed = job->phase == phase::kStarting || job->phase == phase::kRunning || is_terminal(job->phase);
    enqueue(key, initial && placed ? Priority::kLow : Priority::kNormal);
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
    on_pod(key, *pod, !ended && pod->deleting == before->deleting);
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
    if (service->attempt > 0 && !initial) look_later({key.ns, service->job});
  };
  on_service.on_delete = [this](const ObjectKey& key, const auto& service) {
    if (service->attempt > 0) enqueue({key.ns, service->job});
  };
  services_ = std::make_unique<kube::Informer<CachedService>>(
      client,
      typename kube::Informer<CachedService>::Options{reflector(kube::resources::kServices, kLabelJobUid),
                                                      service_fields(), kLabelJobUid},
      read_service, std::move(on_service));

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

void Reconciler::enqueue(const ObjectKey& job, Priority priority) { queue_.add(job.str(), priority); }

void Reconciler::look_later(const ObjectKey& job) {
  queue_.add_after(job.str(), options_.pod_debounce, Priority::kLow);
}

void Reconciler::on_pod(const ObjectKey& key, const CachedPod& pod, bool later) {
  if (pod.job.empty()) return;
  const ObjectKey job{key.ns, pod.job};
  if (later) {
    look_later(job);
  } else {
    enqueue(job, Priority::kHigh);
  }
}

void Reconciler::on_node(const std::string& name, NodeState state) {
  {
    std::lock_guard lock(nodes_mutex_);
    if (state == NodeState::kReady) {
      if (bad_nodes_.erase(name) == 0) return;
    } else if (!bad_nodes_.emplace(name, SteadyClock::now()).second && state == NodeState::kNotReady) {
      return;
    }
  }
  std::vector<ObjectKey> affected;
  pods_->for_each([&](const ObjectKey& key, const CachedPod& pod) {
    if (pod.node == name && !pod.job.empty()) affected.push_back({key.ns, pod.job});
  });
  for (const ObjectKey& job : affected) enqueue(job, Priority::kHigh);
}

void Reconciler::start_informers() {
  jobs_->start();
  pods_->start();
  services_->start();
  if (nodes_) nodes_->start();
}

bool Reconciler::synced() const {
  return jobs_->synced() && pods_->synced() && services_->synced() && (!nodes_ || nodes_->synced());
}

bool Reconciler::wait_synced(const Deadline& deadline) const {
  return jobs_->wait_synced(deadline) && pods_->wait_synced(deadline) && services_->wait_synced(deadline) &&
         (!nodes_ || nodes_->wait_synced(deadline));
}

void Reconciler::start_workers() {
  TRIREME_CHECK(workers_.empty(), "start_workers called twice");
  last_progress_ns_ = steady_ns();
  for (int i = 0; i < options_.workers; ++i) workers_.emplace_back([this] { work(); });
}

void Reconciler::stop_workers() {
  stopping_ = true;
  queue_.shut_down();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void Reconciler::stop() {
  stop_workers();
  reports_.set_listener({});
  jobs_->stop();
  pods_->stop();
  services_->stop();
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

Milliseconds Reconciler::stuck_for() const {
  if (last_progress_ns_ == 0 || stopping_ || queue_.size() == 0) return Milliseconds(0);
  return Milliseconds((steady_ns() - last_progress_ns_.load()) / 1000000);
}

// ---- the loop
// --------------------------------------------------------------------------------------------------------

void Reconciler::work() {
  while (auto key = queue_.get()) {
    last_progress_ns_ = steady_ns();
    if (!stopping_) reconcile_key(*key);
    queue_.done(*key);
    last_progress_ns_ = steady_ns();
  }
}

void Reconciler::reconcile_key(const std::string& key) {
  metrics_.active_workers.Increment();
  const Stopwatch watch;
  try {
    const auto again = reconcile(ObjectKey::parse(key), Deadline::after(options_.reconcile_timeout));
    queue_.forget(key);
    if (again) {
      queue_.add_after(key, again->after, again->priority);
      metrics_.requeue_after.Increment();
    } else {
      metrics_.success.Increment();
    }
  } catch (const NotLeading&) {
    metrics_.requeue.Increment();
  } catch (const TryAgain& e) {
    log_debug("controller", key + ": " + e.why);
    metrics_.requeue.Increment();
    queue_.add_rate_limited(key);
  } catch (const ApiError& e) {
    if (e.conflict()) {
      conflicts_.Increment();
      metrics_.requeue.Increment();
      queue_.add_rate_limited(key);
    } else {
      if (e.kind() == ApiErrorKind::kTimeout) metrics_.timeouts.Increment();
      metrics_.error.Increment();
      metrics_.errors.Increment();
      log_warn("controller", key + ": " + e.what());
      const Milliseconds delay = queue_.add_rate_limited(key);
      if (e.retry_after() && *e.retry_after() > delay) queue_.add_after(key, *e.retry_after());
    }
  } catch (const std::exception& e) {
    metrics_.error.Increment();
    metrics_.errors.Increment();
    metrics_.panics.Increment();
    log_error("controller", key + ": " + e.what());
    queue_.add_rate_limited(key);
  }
  metrics_.seconds.Observe(watch.seconds());
  metrics_.active_workers.Decrement();
}

std::optional<Reconciler::Again> Reconciler::reconcile(const ObjectKey& key, const Deadline& deadline) {
  Memory& memory = memory_of(key.str());
  std::optional<Observed> observed = observe_cached(key, memory);
  for (int round = 0; round < kMaxRounds; ++round) {
    if (!observed) {
      release_orphans(key, deadline);
      forget(key.str());
      return std::nullopt;
    }
    complete_observation(key, *observed, memory, deadline);
    Plan next = plan(*observed, *plan_options());
    if (next.needs_live) {
      TRIREME_CHECK(!observed->live, "the planner asked twice for the live state of " + key.str());
      // We made the pods, or saw all of them, just now and the watch has not told of them yet.
      const auto since = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - memory.created_at);
      const RLJobStatus& cached = observed->job.status;
      const bool known = cached.phase == phase::kQueued && memory.created_attempt == cached.attempt;
      if (known && since < memory.echo) return Again{memory.echo - since};
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
      observed->job = write_status(key, observed->job, *next.decision, deadline);
      if (before == 0 && observed->job.status.attempt == 1) memory.names.begin(observed->job);
      memory.written = std::make_unique<RLJob>(observed->job);
      memory.status_written = SteadyClock::now();
      emit(observed->job, next.events);
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
        if (memory.rejected_attempt == attempt) memory.rejected_attempt = -1;
        if (creates) {
          memory.created_attempt = attempt;
          memory.created_at = SteadyClock::now();
          memory.echo = options_.create_echo;
        }
      } catch (const ApiError& e) {
        if (e.kind() != ApiErrorKind::kInvalid && e.kind() != ApiErrorKind::kForbidden) throw;
        // The user has to see this, and the planner to decide about it.
        memory.rejected_attempt = attempt;
        memory.rejection = e.what();
        memory.rejection_final = e.kind() == ApiErrorKind::kInvalid;
        throw;
      }
    }
    if (late && (!next.requeue_after || *late < *next.requeue_after)) return Again{*late, Priority::kLow};
    return next.requeue_after ? std::optional(Again{*next.requeue_after}) : std::nullopt;
  }
  throw TryAgain{"more than " + std::to_string(kMaxRounds) + " decisions in a row"};
}

// ---- observing
// -------------------------------------------------------------------------------------------------------

std::optional<Observed> Reconciler::observe_cached(const ObjectKey& key, Memory& memory) {
  const std::shared_ptr<const CachedJob> cached = jobs_->get(key);
  if (!cached) return std::nullopt;
  Observed observed;
  if (memory.written && memory.written->metadata.uid == cached->uid &&
      newer(memory.written->metadata.resource_version, cached->resource_version)) {
    observed.job = *memory.written;
  } else {
    memory.written.reset();
    observed.job = rljob_from_json(cached->json(), observed.issues, {.strict = false});
  }
  for (const auto& [pod_key, pod] : pods_->by_label(cached->uid)) observed.pods.push_back(observe(pod_key.name, *pod));
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
  for (const auto& [pod_key, pod] : pods_->by_label(uid)) cached.push_back(pod_key.name);
  const auto names = memory.names.ask(observed.job, std::move(cached));
  const bool by_name =
      names && static_cast<int64_t>(names->size()) * options_.pods_a_get <= static_cast<int64_t>(pod_count());
  observed.pods = by_name ? get_pods(key.ns, uid, *names, deadline) : list_pods(key.ns, uid, deadline);
  memory.names.saw(observed.job, observed.pods);
  return observed;
}

std::vector<ObservedPod> Reconciler::list_pods(const std::string& ns, const std::string& uid,
                                               const Deadline& deadline) const {
  std::vector<ObservedPod> pods;
  kube::ListOptions list;
  list.label_selector = std::string(kLabelJobUid) + "=" + uid;
  client_.list_each(
      kube::resources::kPods, ns, list,
      [&](std::string_view text) {
        static const kube::JsonFields kFields = pod_fields();
        const Json reduced = kFields.parse(text);
        pods.push_back(observe(reduced["metadata"]["name"].get<std::string>(), read_pod(reduced)));
      },
      deadline);
  return pods;
}

// Not of one moment, as a list is. Nobody but this worker makes pods of the job, and what was seen to have ended or to
// be gone stays so.
std::vector<ObservedPod> Reconciler::get_pods(const std::string& ns, const std::string& uid,
                                              const std::vector<std::string>& names, const Deadline& deadline) {
  std::vector<std::optional<ObservedPod>> found(names.size());
  std::vector<std::function<void()>> reads;
  for (size_t i = 0; i < names.size(); ++i) {
    reads.push_back([&, i] {
      const auto object = client_.find(kube::resources::kPods, {ns, names[i]}, deadline);
      if (object && has_label(*object, kLabelJobUid, uid)) found[i] = observe(names[i], read_pod(*object));
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
  observed.services_known = services_->synced();
  observed.services.clear();
  for (const auto& [name, service] : services_->by_label(uid)) {
    if (service->attempt > 0) observed.services.insert(service->attempt);
  }
  observed.report = reports_.get(key, uid);
  observed.rejection.reset();
  if (memory.rejected_attempt == attempt) {
    observed.rejection = memory.rejection;
    observed.rejection_final = memory.rejection_final;
  }
  look_up_claims(key, observed, memory, deadline);
  remember_ages(observed, memory);
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

void Reconciler::remember_ages(Observed& observed, Memory& memory) {
  const auto now = SteadyClock::now();
  std::map<std::string, SteadyClock::time_point> kept;
  auto age = [&](const std::string& tag) {
    const auto before = memory.since.find(tag);
    const auto at = before == memory.since.end() ? now : before->second;
    kept.emplace(tag, at);
    return std::chrono::duration_cast<Milliseconds>(now - at);
  };
  bool gated = false, all_placed = true;
  for (ObservedPod& pod : observed.pods) {
    if (pod.ended()) pod.ended_for = age("ended " + pod.uid);
    if (pod.deleting) pod.deleting_for = age("deleting " + pod.uid);
    if (pod.attempt == observed.job.status.attempt) {
      gated |= pod.gated;
      all_placed &= pod.scheduled;
    }
    if (!nodes_ || pod.node.empty() || pod.ended()) continue;
    const auto node = nodes_->get({"", pod.node});
    pod.node_state = node ? node->state : NodeState::kGone;
    if (pod.node_state == NodeState::kReady) continue;
    std::lock_guard lock(nodes_mutex_);
    const auto bad = bad_nodes_.find(pod.node);
    if (bad != bad_nodes_.end()) pod.node_bad_for = std::chrono::duration_cast<Milliseconds>(now - bad->second);
    // The pod may be known before its node is: that is news on its way, not a loss.
    if (!node && bad == bad_nodes_.end()) {
      if (age("unknown node " + pod.node) < options_.plan.node_grace) pod.node_state = NodeState::kUnknown;
    }
  }
  const std::string attempt = std::to_string(observed.job.status.attempt);
  const std::string& now_in = observed.job.status.phase;
  observed.unplaced_for = observed.starting_for = observed.silent_for = Milliseconds(0);
  const bool placed = all_placed && !observed.pods.empty();
  if (now_in == phase::kQueued && !gated && !placed) observed.unplaced_for = age("unplaced " + attempt);
  if (now_in == phase::kStarting) observed.starting_for = age("starting " + attempt);
  if (now_in == phase::kRunning) observed.silent_for = age("running " + attempt);
  memory.since = std::move(kept);
}

// ---- writing
// ---------------------------------------------------------------------------------------------------------

void Reconciler::check_may_write() const {
  if (options_.may_write && !options_.may_write()) throw NotLeading{};
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
  const Milliseconds busy(std::min<size_t>(10 * queue_.size(), 10000));
  const Milliseconds interval = progress_only ? std::max(options_.progress_interval, Milliseconds(10 * jobs_->size()))
                                              : std::max(options_.status_interval, busy);
  const auto since = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - memory.status_written);
  const bool before = memory.status_written != SteadyClock::time_point{};
  if (before && since < interval) return interval - since;
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
        if (action.kind == Action::Kind::kCreate) {
          create(job, action, deadline);
        } else {
          remove(key, action, deadline);
        }
      });
    }
    pool_.run(std::move(wave));
    begin = end;
  }
}

void Reconciler::create(const RLJob& job, Action& action, const Deadline& deadline) {
  check_may_write();
  try {
    client_.post(action.resource, std::move(action.body), deadline);
    return;
  } catch (const ApiError& e) {
    if (!e.already_exists()) throw;
  }
  const ObjectKey name{job.metadata.namespace_, action.name};
  const auto existing = client_.find(action.resource, name, deadline);
  if (!existing) throw TryAgain{action.resource.plural + " " + name.str() + " came and went"};
  const Json metadata = existing->value("metadata", Json::object());
  if (metadata.contains("deletionTimestamp"))
    throw TryAgain{action.resource.plural + " " + name.str() + " is still being deleted"};
  if (owned_by(*existing, job.metadata.uid)) return;
  // Of an earlier job of the same name: the garbage collector is on its way. Anybody else's: the user has to act.
  const std::string message =
      action.resource.kind + " " + action.name + " exists and belongs to somebody else; delete it or rename the job";
  emit(job, {{true, "NameTaken", message}});
  throw TryAgain{message};
}

void Reconciler::remove(const ObjectKey& key, const Action& action, const Deadline& deadline) {
  check_may_write();
  kube::DeleteOptions options;
  options.uid = action.uid;
  options.grace_period_seconds = action.grace_period_s;
  try {
    client_.remove(action.resource, {key.ns, action.name}, options, deadline);
  } catch (const ApiError& e) {
    // Another object of that name: ours is gone.
    if (!e.conflict()) throw;
  }
}

// Kueue keeps a finalizer on the pods of a group while its Workload stands, and the Workload belongs to the pods: of a
// job that was deleted neither would ever go.
void Reconciler::release_orphans(const ObjectKey& key, const Deadline& deadline) {
  const auto options = plan_options();
  scheduling::Backend kueue;
  try {
    kueue = scheduling::choose_backend("kueue", true, options->discovery);
  } catch (const Error&) {
    return;  // there is none
  }
  std::set<int64_t> attempts;
  pods_->for_each([&](const ObjectKey& pod_key, const CachedPod& pod) {
    if (pod.deleting && pod.job == key.name && pod_key.ns == key.ns) attempts.insert(pod.attempt);
  });
  for (const int64_t attempt : attempts) {
    for (const auto& object : scheduling::gang_cleanup(kueue, attempt_service_name(key.name, attempt))) {
      check_may_write();
      client_.remove(resource_of(object.group_version, object.resource), {key.ns, object.name}, {}, deadline);
    }
  }
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
