#include "operator/controller/reconciler.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "api/runtime.h"
#include "base/error.h"
#include "operator/controller/actions.h"

namespace trireme::controller {
namespace {

using kube::ObjectKey;
using kube::Priority;

constexpr int kMaxRounds = 8;  // decisions in one reconcile; more go back to the queue

kube::ControllerOptions controller_options(const ReconcilerOptions& options) {
  return {.queue = {.name = "rljob",
                    .backoff_min = options.queue_backoff_min,
                    .backoff_max = options.queue_backoff_max,
                    .low_limit = std::max(1, options.workers / 16),
                    .metrics = options.metrics},
          .workers = options.workers,
          .reconcile_timeout = options.reconcile_timeout};
}

WatchOptions watch_options(const ReconcilerOptions& options) {
  WatchOptions watch = options;
  if (!watch.reflector.metrics) watch.reflector.metrics = options.metrics;
  return watch;
}

std::optional<scheduling::Backend> kueue_of(const scheduling::Discovery& discovery) {
  try {
    return scheduling::choose_backend("kueue", true, discovery);
  } catch (const Error&) {
    return std::nullopt;  // there is none
  }
}

}  // namespace

Reconciler::Reconciler(const kube::Client& client, const ReconcilerOptions& options, ReportStore& reports)
    : reports_(reports),
      controller_(controller_options(options),
                  [this](const std::string& key, const Deadline& deadline) {
                    return reconcile(ObjectKey::parse(key), deadline);
                  }),
      pool_(options.write_threads),
      watches_(client, watch_options(options), options.plan,
               [this](const ObjectKey& job, Milliseconds after, Priority priority) {
                 controller_.add(job.str(), after, priority);
               }),
      observer_(client, options, watches_, reports, pool_),
      writer_(client, options, pool_,
              [this] {
                return Load{job_count(), queue().size()};
              }),
      plan_(std::make_shared<const PlanOptions>(options.plan)) {
  reports_.set_listener([this](const ObjectKey& job, bool urgent) {
    if (urgent) {
      enqueue(job, Priority::kHigh);
    } else {
      watches_.look_later(job);
    }
  });
}

Reconciler::~Reconciler() { stop(); }

void Reconciler::start_workers() {
  controller_.start([this] { watches_.enqueue_all(); });
}

void Reconciler::stop() {
  if (stopped_.exchange(true)) return;  // the reports may have another's listener by now
  stop_workers();
  reports_.set_listener({});
  watches_.stop();
}

void Reconciler::enqueue(const ObjectKey& job, Priority priority) {
  controller_.add(job.str(), Milliseconds(0), priority);
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

kube::Result Reconciler::reconcile(const ObjectKey& key, const Deadline& deadline) {
  std::optional<Snapshot> seen = observer_.cached(key);
  for (int round = 0; round < kMaxRounds; ++round) {
    if (!seen) return gone(key, deadline);
    Observed observed = observer_.observe(key, std::move(*seen), writer_.answers(key), deadline);
    Plan next = plan(observed, *plan_options());
    if (next.needs_live) {
      TRIREME_CHECK(!observed.live, "the planner asked twice for the live state of " + key.str());
      if (const auto wait = observer_.wait_for_watch(key, observed.job.status)) return {wait};
      seen = observer_.live(key, observed.job.status, deadline);
    } else if (next.decision) {
      seen = decide(key, std::move(observed), next, deadline);
    } else {
      return act(key, observed.job, std::move(next), deadline);
    }
  }
  throw kube::Requeue{"more than " + std::to_string(kMaxRounds) + " decisions in a row"};
}

kube::Result Reconciler::gone(const ObjectKey& key, const Deadline& deadline) {
  // First: a failed delete must not leave it to a job that is made under the name before the next try.
  reports_.forget(key);
  observer_.forget(key);
  writer_.forget(key);
  if (const auto kueue = kueue_of(plan_options()->discovery)) {
    for (const Action& action : orphan_actions(*kueue, key.name, watches_.last_attempt_going(key)))
      writer_.remove(key, "", action, deadline);
  }
  return {};
}

Snapshot Reconciler::decide(const ObjectKey& key, Observed observed, const Plan& next, const Deadline& deadline) {
  const int64_t before = observed.job.status.attempt;
  if (next.decision->attempt != before) observer_.expect_no_pods(key);
  RLJob job = writer_.decide(key, observed.job, *next.decision, next.events, deadline);
  if (before == 0 && job.status.attempt == 1) observer_.first_attempt_begins(key, job);
  observer_.wrote(key, job);
  if (is_terminal(next.decision->phase)) reports_.forget(key);  // nobody waits for its reports any more
  // A first attempt that has just begun has no pods that the cache may not show yet.
  const bool live = observed.live || (before == 0 && job.status.attempt == 1);
  return {std::move(job), std::move(observed.issues), std::move(observed.pods), live, observed.as_stored};
}

kube::Result Reconciler::act(const ObjectKey& key, const RLJob& job, Plan next, const Deadline& deadline) {
  const Writer::Described described = writer_.describe(key, job, next.status, next.events, deadline);
  if (described.job) observer_.wrote(key, *described.job);
  if (!next.actions.empty()) {
    const bool pods = makes_pods(next.actions);
    if (pods) observer_.expect_no_pods(key);  // until all are made
    if (!writer_.carry_out(key, job, std::move(next.actions), deadline)) {
      const Milliseconds look = look_after(*writer_.answers(key).refusal, SteadyClock::now());
      next.requeue_after = std::min(look, next.requeue_after.value_or(look));
    } else if (pods) {
      observer_.made_pods(key, job.status.attempt);
    }
  }
  const auto& late = described.wait;
  if (late && (!next.requeue_after || *late < *next.requeue_after)) return {late, Priority::kLow};
  return {next.requeue_after};
}

}  // namespace trireme::controller
