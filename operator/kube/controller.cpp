#include "operator/kube/controller.h"

#include "base/error.h"
#include "base/log.h"

namespace trireme::kube {
namespace {

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(SteadyClock::now().time_since_epoch()).count();
}

}  // namespace

Controller::Controller(ControllerOptions options, Reconcile reconcile)
    : options_(std::move(options)),
      reconcile_(std::move(reconcile)),
      queue_(options_.queue),
      metrics_(*options_.queue.metrics, options_.queue.name),
      conflicts_(options_.queue.metrics->counter(
          "trireme_reconcile_conflicts_total", "Status writes that lost against another writer and were done again.")) {
  metrics_.max_concurrent.Set(options_.workers);
}

Controller::~Controller() { stop(); }

void Controller::add(const std::string& key, Milliseconds after, Priority priority) {
  if (working_) queue_.add_after(key, after, priority);
}

void Controller::start(const std::function<void()>& seed) {
  TRIREME_CHECK(workers_.empty(), "a controller was started twice");
  last_progress_ns_ = steady_ns();
  working_ = true;
  if (seed) seed();
  for (int i = 0; i < options_.workers; ++i) workers_.emplace_back([this] { work(); });
}

void Controller::stop() {
  stopping_ = true;
  queue_.shut_down();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

Milliseconds Controller::stuck_for() const {
  if (last_progress_ns_ == 0 || stopping_ || queue_.size() == 0) return Milliseconds(0);
  return Milliseconds((steady_ns() - last_progress_ns_.load()) / 1000000);
}

void Controller::work() {
  while (auto key = queue_.get()) {
    last_progress_ns_ = steady_ns();
    if (!stopping_) reconcile(*key);
    queue_.done(*key);
    last_progress_ns_ = steady_ns();
  }
}

void Controller::reconcile(const std::string& key) {
  metrics_.active_workers.Increment();
  const Stopwatch watch;
  try {
    const auto hold = held(key);
    const Result result = hold ? Result{hold} : reconcile_(key, Deadline::after(options_.reconcile_timeout));
    if (!hold) queue_.forget(key);  // else it was not tried, and its back-off goes on
    if (result.requeue_after) {
      queue_.add_after(key, *result.requeue_after, result.priority);
      metrics_.requeue_after.Increment();
    } else {
      metrics_.success.Increment();
    }
  } catch (const NotLeading&) {
    metrics_.requeue.Increment();
  } catch (const Requeue& e) {
    log_debug("controller", key + ": " + e.why);
    metrics_.requeue.Increment();
    queue_.add_rate_limited(key);
  } catch (const ApiError& e) {
    failed(key, e);
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

void Controller::failed(const std::string& key, const ApiError& error) {
  if (error.conflict()) {
    conflicts_.Increment();
    metrics_.requeue.Increment();
    queue_.add_rate_limited(key);
    return;
  }
  if (error.kind() == ApiErrorKind::kTimeout) metrics_.timeouts.Increment();
  metrics_.error.Increment();
  metrics_.errors.Increment();
  log_warn("controller", key + ": " + error.what());
  const Milliseconds patience = error.retry_after().value_or(Milliseconds(0));
  if (patience.count() > 0) {
    std::lock_guard lock(holds_mutex_);
    holds_[key] = SteadyClock::now() + patience;
  }
  queue_.add_rate_limited(key, patience);
}

std::optional<Milliseconds> Controller::held(const std::string& key) {
  std::lock_guard lock(holds_mutex_);
  const auto hold = holds_.find(key);
  if (hold == holds_.end()) return std::nullopt;
  const auto left = std::chrono::ceil<Milliseconds>(hold->second - SteadyClock::now());
  if (left.count() > 0) return left;
  holds_.erase(hold);
  return std::nullopt;
}

}  // namespace trireme::kube
