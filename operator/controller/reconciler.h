// Reconciler: informers and a controller around the pure planner. The only place that writes to the API server for
// jobs.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "operator/controller/ages.h"
#include "operator/controller/plan.h"
#include "operator/controller/pod_names.h"
#include "operator/controller/pool.h"
#include "operator/controller/reports.h"
#include "operator/controller/watches.h"
#include "operator/controller/writer.h"
#include "operator/kube/client.h"
#include "operator/kube/controller.h"
#include "operator/kube/metrics.h"

namespace trireme::controller {

struct ReconcilerOptions : WatchOptions, WriterOptions {
  int workers = 64;                // they wait for the API server most of the time
  int write_threads = 64;          // beside the workers, for the parallel writes of a wave and the reads of a live look
  int64_t pods_a_get = 150;        // a list by label walks so many pods in the time of a GET by name
  Milliseconds create_echo{5000};  // the watch tells of our creates by then; if not, we look ourselves
  Milliseconds unknown_node{10000};  // a pod's node that the cache does not hold: for so long it is news on its way
  Milliseconds least_silence = ReportStore::kLeastGap;  // of all jobs together, before it counts as our own outage
  Milliseconds reconcile_timeout{60000};
  Milliseconds queue_backoff_min{5};
  Milliseconds queue_backoff_max{60000};
  PlanOptions plan;
  kube::Metrics* metrics = nullptr;   // required; outlives this
  std::function<bool()> path_broken;  // nothing answers where trainers report; empty: not known
  std::function<int64_t()> now_ms;    // wall clock; empty: the system's
};

class Reconciler final {
 public:
  Reconciler(const kube::Client& client, ReconcilerOptions options, ReportStore& reports);
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
  void stop_workers();
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
  // What we remember of a job between reconciles; none of it is needed for correctness.
  struct Memory {
    std::unique_ptr<RLJob> written;  // as the last status write answered, until the informer has it too
    Ages ages;
    std::map<std::string, SteadyClock::time_point> unknown_nodes;
    int64_t claims_attempt = -1;
    std::map<std::string, std::vector<std::string>> claims;
    int64_t created_attempt = -1;  // whose pods we made, or saw all of in a live look, at created_at
    SteadyClock::time_point created_at{};
    Milliseconds echo{0};  // the watch has this long from then on
    PodNames names;
  };

  kube::Result reconcile(const kube::ObjectKey& key, const Deadline& deadline);

  std::optional<Observed> observe_cached(const kube::ObjectKey& key, Memory& memory);
  std::optional<Observed> observe_live(const kube::ObjectKey& key, Memory& memory, const Deadline& deadline);
  std::vector<ObservedPod> list_pods(const kube::ObjectKey& job, const std::string& uid,
                                     const Deadline& deadline) const;
  std::vector<ObservedPod> get_pods(const kube::ObjectKey& job, const std::string& uid,
                                    const std::vector<std::string>& names, const Deadline& deadline);
  void complete_observation(const kube::ObjectKey& key, Observed& observed, Memory& memory, const Deadline& deadline);
  void look_up_claims(const kube::ObjectKey& key, Observed& observed, Memory& memory, const Deadline& deadline);
  void look_at_nodes(Observed& observed, Memory& memory);
  void look_at_reports(Observed& observed);

  void release_orphans(const kube::ObjectKey& key, const Deadline& deadline);
  int64_t now_ms() const { return options_.now_ms ? options_.now_ms() : kube::unix_now_ms(); }
  std::shared_ptr<const PlanOptions> plan_options() const;
  Memory& memory_of(const std::string& key);
  void forget(const std::string& key);

  const kube::Client& client_;
  ReconcilerOptions options_;
  ReportStore& reports_;
  kube::Controller controller_;
  Pool pool_;
  Watches watches_;
  Writer writer_;
  mutable std::mutex plan_mutex_;
  std::shared_ptr<const PlanOptions> plan_;
  std::mutex memory_mutex_;
  std::unordered_map<std::string, std::unique_ptr<Memory>> memory_;
  std::atomic<int64_t> running_jobs_{0};  // as counted at counted_ns_
  std::atomic<int64_t> counted_ns_{0};
};

}  // namespace trireme::controller
