#include "operator/controller/reconciler.h"

#include <algorithm>

#include "api/runtime.h"
#include "base/error.h"
#include "operator/controller/actions.h"

namespace trireme::controller {
namespace {

using kube::ObjectKey;
using kube::Priority;

constexpr Milliseconds kLongestEcho{60000};  // of ReconcilerOptions::create_echo, doubled while the watch is late
constexpr int kMaxRounds = 8;                // decisions in one reconcile; more go back to the queue

// Every pod of an attempt that waits for nodes is there, and none is going.
bool whole(const Observed& observed) {
  const int64_t pods = std::count_if(observed.pods.begin(), observed.pods.end(), [&](const ObservedPod& pod) {
    return pod.attempt == observed.job.status.attempt && !pod.deleting;
  });
  return observed.job.status.phase == phase::kQueued && pods >= total_pods(observed.job.spec);
}

WatchOptions watch_options(const ReconcilerOptions& options) {
  WatchOptions watch = options;
  if (!watch.reflector.metrics) watch.reflector.metrics = options.metrics;
  return watch;
}

}  // namespace

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
      writer_(client, options_, pool_,
              [this] {
                return Load{job_count(), queue().size()};
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
      observed->job = writer_.decide(key, observed->job, *next.decision, next.events, deadline);
      if (before == 0 && observed->job.status.attempt == 1) memory.names.begin(observed->job);
      memory.written = std::make_unique<RLJob>(observed->job);
      if (ends) reports_.forget(key);  // nobody waits for its reports any more
      // A first attempt has no predecessors whose pods the cache may not show yet.
      observed->live = observed->live || observed->job.status.attempt == 1;
      continue;
    }
    const Writer::Described described = writer_.describe(key, observed->job, next.status, next.events, deadline);
    if (described.job) memory.written = std::make_unique<RLJob>(*described.job);
    if (!next.actions.empty()) {
      const bool pods = makes_pods(next.actions);
      if (pods) memory.created_attempt = -1;  // until all are made
      if (!writer_.carry_out(key, observed->job, std::move(next.actions), deadline)) return {Milliseconds(1)};
      if (pods) {
        memory.created_attempt = observed->job.status.attempt;
        memory.created_at = SteadyClock::now();
        memory.echo = options_.create_echo;
      }
    }
    const auto& late = described.wait;
    if (late && (!next.requeue_after || *late < *next.requeue_after)) return {late, Priority::kLow};
    return {next.requeue_after};
  }
  throw kube::Requeue{"more than " + std::to_string(kMaxRounds) + " decisions in a row"};
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
  for (const Action& action : orphan_actions(kueue, key.name, last)) writer_.remove(key, "", action, deadline);
}

Reconciler::Memory& Reconciler::memory_of(const std::string& key) {
  std::lock_guard lock(memory_mutex_);
  auto& memory = memory_[key];
  if (!memory) memory = std::make_unique<Memory>();
  return *memory;
}

void Reconciler::forget(const std::string& key) {
  reports_.forget(ObjectKey::parse(key));
  writer_.forget(ObjectKey::parse(key));
  std::lock_guard lock(memory_mutex_);
  memory_.erase(key);
}

}  // namespace trireme::controller
