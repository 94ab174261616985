// Reconciler: what is watched, observed, planned and written, put together: the pure planner between an observer and a
// writer, for each key that the controller's workers take.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "operator/controller/observer.h"
#include "operator/controller/plan.h"
#include "operator/controller/pool.h"
#include "operator/controller/reports.h"
#include "operator/controller/watches.h"
#include "operator/controller/writer.h"
#include "operator/kube/client.h"
#include "operator/kube/controller.h"
#include "operator/kube/metrics.h"

namespace trireme::controller {

struct ReconcilerOptions : WatchOptions, ObserverOptions, WriterOptions {
  int workers = 64;        // they wait for the API server most of the time
  int write_threads = 64;  // beside the workers, for the parallel writes of a wave and the reads of a live look
  Milliseconds reconcile_timeout{60000};
  Milliseconds queue_backoff_min{5};
  Milliseconds queue_backoff_max{60000};
  PlanOptions plan;
  kube::Metrics* metrics = nullptr;  // required; outlives the reconciler
};

class Reconciler final {
 public:
  Reconciler(const kube::Client& client, const ReconcilerOptions& options, ReportStore& reports);
  ~Reconciler();  // stops
  Reconciler(const Reconciler&) = delete;
  Reconciler& operator=(const Reconciler&) = delete;

  // Informers only: a standby runs them too, so that a fail-over does not wait for lists.
  void start_informers() { watches_.start(); }
  bool wait_synced(const Deadline& deadline) const { return watches_.wait_synced(deadline); }
  bool synced() const { return watches_.synced(); }
  // Call once we lead and the informers are synced.
  void start_workers();
  // Workers end after the reconcile they are in. Then the lease may be given up.
  void stop_workers() { controller_.stop(); }
  // Workers, then informers.
  void stop();

  Milliseconds stuck_for() const { return controller_.stuck_for(); }
  void enqueue(const kube::ObjectKey& job, kube::Priority priority = kube::Priority::kNormal);
  // What the cluster serves for gangs has changed; plans from now on use it. Any thread.
  void set_discovery(scheduling::Discovery discovery);
  const kube::RateLimitedQueue& queue() const { return controller_.queue(); }
  std::shared_ptr<const CachedPod> find_pod(const kube::ObjectKey& key) const { return watches_.pods().get(key); }
  std::shared_ptr<const CachedJob> find_job(const kube::ObjectKey& key) const { return watches_.jobs().get(key); }
  void for_each_job(const std::function<void(const kube::ObjectKey&, const CachedJob&)>& fn) const {
    watches_.jobs().for_each(fn);
  }
  size_t job_count() const { return watches_.jobs().size(); }
  size_t pod_count() const { return watches_.pods().size(); }

 private:
  kube::Result reconcile(const kube::ObjectKey& key, const Deadline& deadline);
  kube::Result gone(const kube::ObjectKey& key, const Deadline& deadline);
  Snapshot decide(const kube::ObjectKey& key, Observed observed, const Plan& next, const Deadline& deadline);
  kube::Result act(const kube::ObjectKey& key, const RLJob& job, Plan next, const Deadline& deadline);
  std::shared_ptr<const PlanOptions> plan_options() const;

  std::atomic<bool> stopped_{false};
  ReportStore& reports_;
  kube::Controller controller_;
  Pool pool_;
  Watches watches_;
  Observer observer_;
  Writer writer_;
  mutable std::mutex plan_mutex_;
  std::shared_ptr<const PlanOptions> plan_;
};

}  // namespace trireme::controller
