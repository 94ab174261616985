// RateLimitedQueue: keys to reconcile; a key is never with two workers at once and never queued twice.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
}  // namespace prometheus

namespace trireme::kube {

class Metrics;

// Deletions and failures; what asks for work; what only has to be described, which waits while there is work.
enum class Priority { kHigh = 0, kNormal = 1, kLow = 2 };

struct WorkQueueOptions {
  std::string name = "rljob";  // label of the workqueue_* metrics
  Milliseconds backoff_min{5};
  Milliseconds backoff_max{60000};
  double jitter = 0.1;  // each back-off is longer by up to this share
  // While a worker has a key of a higher priority at most so many have one of kLow, so that describing does not slow
  // down the rest of what is being made. 0: no limit.
  int low_limit = 0;
  Metrics* metrics = nullptr;  // must outlive the queue
};

// Thread-safe. add() while a worker has the key makes it queued again at done().
class RateLimitedQueue final {
 public:
  explicit RateLimitedQueue(WorkQueueOptions options = {});
  ~RateLimitedQueue();
  RateLimitedQueue(const RateLimitedQueue&) = delete;
  RateLimitedQueue& operator=(const RateLimitedQueue&) = delete;

  void add(const std::string& key, Priority priority = Priority::kNormal);
  // Not before `delay` from now; of two calls for the same key the earlier time and the higher priority win. <= 0: add.
  void add_after(const std::string& key, Milliseconds delay, Priority priority = Priority::kNormal);
  // After the key's back-off, which doubles with every call until forget(), but not before `at_least`. Returns the
  // delay chosen.
  Milliseconds add_rate_limited(const std::string& key, Milliseconds at_least = Milliseconds(0));
  void forget(const std::string& key);
  int requeues(const std::string& key) const;

  // The next key; the caller must call done(key). Nothing after shut_down() once the queue is empty, or at the
  // deadline.
  std::optional<std::string> get();
  std::optional<std::string> get(const Deadline& deadline);
  void done(const std::string& key);

  // No new keys; workers get what is queued and then nothing. Delayed keys are dropped.
  void shut_down();
  bool shutting_down() const;
  size_t size() const;     // ready keys
  size_t delayed() const;  // keys waiting for their time

 private:
  struct Waiting {
    Priority priority;
    uint64_t sequence;
    SteadyClock::time_point since;
  };
  struct Taken {
    SteadyClock::time_point since;
    Priority priority;
  };
  void add_locked(const std::string& key, Priority priority);
  bool next_locked() const;  // may the first key be given away now?
  void promote_locked(SteadyClock::time_point now);
  void drop_delay_locked(const std::string& key);
  std::optional<std::string> take(const Deadline* deadline);
  void refresh_metrics();

  WorkQueueOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool shutting_down_ = false;
  uint64_t sequence_ = 0;
  std::map<std::pair<int, uint64_t>, std::string> ready_;  // by priority, then order of arrival
  std::unordered_map<std::string, Waiting> queued_;        // keys in ready_
  std::unordered_map<std::string, Taken> processing_;      // with a worker
  int low_taken_ = 0;                                      // of processing_, by priority kLow
  std::unordered_map<std::string, Priority> dirty_;        // with a worker, and wanted again
  std::set<std::pair<SteadyClock::time_point, std::string>> timers_;
  struct Timer {
    SteadyClock::time_point at;
    Priority priority;
  };
  std::unordered_map<std::string, Timer> timer_of_;
  std::unordered_map<std::string, int> failures_;
  std::mt19937_64 random_;
  uint64_t scrape_hook_ = 0;
  prometheus::Gauge* depth_ = nullptr;
  prometheus::Gauge* unfinished_ = nullptr;
  prometheus::Gauge* longest_ = nullptr;
  prometheus::Counter* adds_ = nullptr;
  prometheus::Counter* retries_ = nullptr;
  prometheus::Histogram* queue_seconds_ = nullptr;
  prometheus::Histogram* work_seconds_ = nullptr;
};

}  // namespace trireme::kube
