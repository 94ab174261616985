#include "operator/kube/work_queue.h"

#include <algorithm>
#include <cmath>

#include "operator/kube/metrics.h"

namespace trireme::kube {
namespace {

double seconds_between(SteadyClock::time_point from, SteadyClock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

RateLimitedQueue::RateLimitedQueue(WorkQueueOptions options)
    : options_(std::move(options)), random_(std::random_device{}()) {
  if (!options_.metrics) return;
  Metrics& m = *options_.metrics;
  // client-go labels the same name as "name" and, newer, as "controller" too.
  const Labels labels{{"name", options_.name}, {"controller", options_.name}};
  const std::vector<double> buckets{1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1, 10, 100, 1000};
  depth_ = &m.gauge("workqueue_depth", "Keys that wait for a worker.", labels);
  adds_ = &m.counter("workqueue_adds_total", "Keys added.", labels);
  retries_ = &m.counter("workqueue_retries_total", "Keys added again after a failure.", labels);
  queue_seconds_ =
      &m.histogram("workqueue_queue_duration_seconds", "How long a key waited for a worker.", labels, buckets);
  work_seconds_ = &m.histogram("workqueue_work_duration_seconds", "How long a worker had a key.", labels, buckets);
  unfinished_ = &m.gauge("workqueue_unfinished_work_seconds", "Seconds spent on keys that workers have now.", labels);
  longest_ =
      &m.gauge("workqueue_longest_running_processor_seconds", "Age of the oldest key that a worker has.", labels);
  scrape_hook_ = m.add_scrape_hook([this] { refresh_metrics(); });
}

RateLimitedQueue::~RateLimitedQueue() {
  if (options_.metrics) options_.metrics->remove_scrape_hook(scrape_hook_);
}

void RateLimitedQueue::refresh_metrics() {
  std::lock_guard lock(mutex_);
  const auto now = SteadyClock::now();
  double sum = 0;
  double longest = 0;
  for (const auto& [key, taken] : processing_) {
    const double age = seconds_between(taken.since, now);
    sum += age;
    longest = std::max(longest, age);
  }
  unfinished_->Set(sum);
  longest_->Set(longest);
  depth_->Set(static_cast<double>(ready_.size()));
}

void RateLimitedQueue::add_locked(const std::string& key, Priority priority) {
  if (shutting_down_) return;
  if (processing_.count(key) != 0) {
    const auto [it, fresh] = dirty_.emplace(key, priority);
    if (!fresh) it->second = std::min(it->second, priority);
    if (fresh && adds_) adds_->Increment();
    return;
  }
  const auto it = queued_.find(key);
  if (it != queued_.end()) {
    if (priority < it->second.priority) {
      ready_.erase({static_cast<int>(it->second.priority), it->second.sequence});
      it->second.priority = priority;
      ready_.emplace(std::make_pair(static_cast<int>(priority), it->second.sequence), key);
    }
    return;
  }
  const uint64_t sequence = ++sequence_;
  queued_.emplace(key, Waiting{priority, sequence, SteadyClock::now()});
  ready_.emplace(std::make_pair(static_cast<int>(priority), sequence), key);
  if (adds_) {
    adds_->Increment();
    depth_->Set(static_cast<double>(ready_.size()));
  }
  changed_.notify_one();
}

void RateLimitedQueue::add(const std::string& key, Priority priority) {
  std::lock_guard lock(mutex_);
  add_locked(key, priority);
}

void RateLimitedQueue::drop_delay_locked(const std::string& key) {
  const auto it = timer_of_.find(key);
  if (it == timer_of_.end()) return;
  timers_.erase({it->second.at, key});
  timer_of_.erase(it);
}

void RateLimitedQueue::add_after(const std::string& key, Milliseconds delay, Priority priority) {
  std::lock_guard lock(mutex_);
  if (shutting_down_) return;
  if (delay <= Milliseconds(0)) {
    add_locked(key, priority);
    return;
  }
  const auto at = SteadyClock::now() + delay;
  const auto it = timer_of_.find(key);
  if (it != timer_of_.end()) {
    priority = it->second.priority = std::min(priority, it->second.priority);
    if (it->second.at <= at) return;
  }
  drop_delay_locked(key);
  timers_.emplace(at, key);
  timer_of_.emplace(key, Timer{at, priority});
  changed_.notify_one();  // the earliest timer may be this one now
}

Milliseconds RateLimitedQueue::add_rate_limited(const std::string& key, Milliseconds at_least) {
  Milliseconds delay;
  {
    std::lock_guard lock(mutex_);
    const int failures = failures_[key]++;
    const double base = static_cast<double>(options_.backoff_min.count()) * std::pow(2.0, std::min(failures, 40));
    const double capped = std::min(base, static_cast<double>(options_.backoff_max.count()));
    const double share = std::uniform_real_distribution<double>(0.0, options_.jitter)(random_);
    delay = std::max(at_least, Milliseconds(static_cast<int64_t>(capped * (1.0 + share))));
    if (retries_) retries_->Increment();
  }
  add_after(key, delay);
  return delay;
}

void RateLimitedQueue::forget(const std::string& key) {
  std::lock_guard lock(mutex_);
  failures_.erase(key);
}

int RateLimitedQueue::requeues(const std::string& key) const {
  std::lock_guard lock(mutex_);
  const auto it = failures_.find(key);
  return it == failures_.end() ? 0 : it->second;
}

void RateLimitedQueue::promote_locked(SteadyClock::time_point now) {
  while (!timers_.empty() && timers_.begin()->first <= now) {
    const std::string key = timers_.begin()->second;
    timers_.erase(timers_.begin());
    const Priority priority = timer_of_.at(key).priority;
    timer_of_.erase(key);
    add_locked(key, priority);
  }
}

std::optional<std::string> RateLimitedQueue::get() { return take(nullptr); }
std::optional<std::string> RateLimitedQueue::get(const Deadline& deadline) { return take(&deadline); }

bool RateLimitedQueue::next_locked() const {
  if (ready_.empty()) return false;
  if (options_.low_limit <= 0 || shutting_down_ || ready_.begin()->first.first != static_cast<int>(Priority::kLow))
    return true;
  return low_taken_ < options_.low_limit || processing_.size() == static_cast<size_t>(low_taken_);
}

std::optional<std::string> RateLimitedQueue::take(const Deadline* deadline) {
  std::unique_lock lock(mutex_);
  while (true) {
    promote_locked(SteadyClock::now());
    if (next_locked()) break;
    if (shutting_down_ || (deadline && deadline->passed())) return std::nullopt;
    auto until = timers_.empty() ? SteadyClock::now() + std::chrono::hours(1) : timers_.begin()->first;
    if (deadline) until = std::min(until, deadline->at());
    changed_.wait_until(lock, until);
  }
  const std::string key = ready_.begin()->second;
  ready_.erase(ready_.begin());
  const auto now = SteadyClock::now();
  const auto it = queued_.find(key);
  if (queue_seconds_) {
    queue_seconds_->Observe(seconds_between(it->second.since, now));
    depth_->Set(static_cast<double>(ready_.size()));
  }
  low_taken_ += it->second.priority == Priority::kLow;
  processing_.emplace(key, Taken{now, it->second.priority});
  queued_.erase(it);
  // This worker may have been the one that watched the timers, or was woken once for several keys: pass it on.
  if (!ready_.empty() || !timers_.empty()) changed_.notify_one();
  return key;
}

void RateLimitedQueue::done(const std::string& key) {
  std::lock_guard lock(mutex_);
  const auto it = processing_.find(key);
  if (it == processing_.end()) return;
  if (work_seconds_) work_seconds_->Observe(seconds_between(it->second.since, SteadyClock::now()));
  low_taken_ -= it->second.priority == Priority::kLow;
  processing_.erase(it);
  if (!ready_.empty()) changed_.notify_one();  // it may have waited for this
  const auto again = dirty_.find(key);
  if (again == dirty_.end()) return;
  const Priority priority = again->second;
  dirty_.erase(again);
  add_locked(key, priority);
}

void RateLimitedQueue::shut_down() {
  {
    std::lock_guard lock(mutex_);
    shutting_down_ = true;
    timers_.clear();
    timer_of_.clear();
  }
  changed_.notify_all();
}

bool RateLimitedQueue::shutting_down() const {
  std::lock_guard lock(mutex_);
  return shutting_down_;
}

size_t RateLimitedQueue::size() const {
  std::lock_guard lock(mutex_);
  return ready_.size();
}

size_t RateLimitedQueue::delayed() const {
  std::lock_guard lock(mutex_);
  return timers_.size();
}

}  // namespace trireme::kube
