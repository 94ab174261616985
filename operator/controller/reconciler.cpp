#include "operator/controller/reconciler.h"

#include <algorithm>

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

WatchOptions watch_options(const ReconcilerOptions& options) {
  WatchOptions watch = options;
  if (!watch.reflector.metrics) watch.reflector.metrics = options.metrics;
  return watch;
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
      watches_(client, watch_options(options_), options_.plan,
               [this](const ObjectKey& job, Milliseconds after, Priority priority) {
                 controller_.add(job.str(), after, priority);
               }),
      plan_(std::make_shared<const PlanOptions>(options_.plan)) {
  reports_.set_listener([this](const ObjectKey& job, bool urgent) {
    if (urgent) {
      enqueue(job, Priority::kHigh);
    } else {
      watches_.look_later(job);
    }
  });
}

Reconciler::~Reconciler() { stop(); }

void Reconciler::enqueue(const ObjectKey& job, Priority priority) {
  controller_.add(job.str(), Milliseconds(0), priority);
}

void Reconciler::start_workers() {
  controller_.start([this] { watches_.enqueue_all(); });
}

void Reconciler::stop_workers() { controller_.stop(); }

void Reconciler::stop() {
  stop_workers();
  reports_.set_listener({});
  watches_.stop();
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
  const Milliseconds interval = progress_only
                                    ? std::max(options_.progress_interval, Milliseconds(10 * watches_.jobs().size()))
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
  const int64_t last = watches_.last_attempt_going(key);
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
