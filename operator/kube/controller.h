// Controller: workers that take keys from a queue and reconcile them. It knows no kind: what a key means and what has
// to be done about it is the function's business. The shape is that of controller-runtime's pkg/internal/controller.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "operator/kube/api_error.h"
#include "operator/kube/metrics.h"
#include "operator/kube/work_queue.h"

namespace trireme::kube {

// What a reconcile that came to its end says of its key.
struct Result {
  std::optional<Milliseconds> requeue_after;  // look again then, whatever comes; nothing: when there is news
  Priority priority = Priority::kNormal;      // of that look
};

// Thrown by a reconcile that cannot go on now, though nothing is wrong: the key comes back after its back-off.
struct Requeue {
  std::string why;
};
// Thrown by a reconcile when we do not lead (any more): the key is put down, and nothing is wrong. Whoever leads next
// begins with every key.
struct NotLeading {};

struct ControllerOptions {
  WorkQueueOptions queue;  // its name is the controller's, in metrics; its metrics are required
  int workers = 1;
  Milliseconds reconcile_timeout{60000};
};

// An exception of a reconcile never ends a worker: Requeue and NotLeading as said there; a conflict is retried without
// a word; any other ApiError and any other exception is logged and counted as an error and comes back after the key's
// back-off. Where the API server named a time (Retry-After) the key is not reconciled before it, whatever news there
// are.
class Controller final {
 public:
  // A key is never with two workers at once. What is not done at the deadline should be given up.
  using Reconcile = std::function<Result(const std::string& key, const Deadline& deadline)>;

  Controller(ControllerOptions options, Reconcile reconcile);
  ~Controller();  // stops
  Controller(const Controller&) = delete;
  Controller& operator=(const Controller&) = delete;

  // Not before `after` from now; see RateLimitedQueue::add_after. Dropped before start(): nobody would take it. Any
  // thread.
  void add(const std::string& key, Milliseconds after = Milliseconds(0), Priority priority = Priority::kNormal);
  // Keys are taken from now on. `seed` adds what there is already; the first worker begins when it returns. Once.
  void start(const std::function<void()>& seed = {});
  // Workers end after the reconcile they are in; keys that wait are dropped.
  void stop();

  // Time since a worker last took or finished a key while there was work; for a liveness probe.
  Milliseconds stuck_for() const;
  const RateLimitedQueue& queue() const { return queue_; }

 private:
  void work();
  void reconcile(const std::string& key);
  void failed(const std::string& key, const ApiError& error);
  // The rest of the time that the API server asked for, if it asked.
  std::optional<Milliseconds> held(const std::string& key);

  ControllerOptions options_;
  Reconcile reconcile_;
  RateLimitedQueue queue_;
  ControllerMetrics metrics_;
  prometheus::Counter& conflicts_;
  std::atomic<int64_t> last_progress_ns_{0};
  std::atomic<bool> working_{false};
  std::atomic<bool> stopping_{false};
  std::mutex holds_mutex_;
  std::unordered_map<std::string, SteadyClock::time_point> holds_;
  std::vector<std::thread> workers_;
};

}  // namespace trireme::kube
