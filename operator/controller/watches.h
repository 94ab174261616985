// Watches: the informers of a reconciler, and which job each change of an object is news of.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "operator/controller/bad_nodes.h"
#include "operator/controller/cache.h"
#include "operator/kube/client.h"
#include "operator/kube/informer.h"
#include "operator/kube/work_queue.h"

namespace trireme::controller {

struct PlanOptions;

struct WatchOptions {
  std::string ns;           // "" all namespaces
  bool watch_nodes = true;  // needs get/list/watch on nodes; without it a lost node is noticed by its evicted pods
  Milliseconds pod_debounce{50};     // pods becoming scheduled and ready are looked at together
  kube::ReflectorOptions reflector;  // time-outs and back-offs of all informers; resource, ns, selectors are set here
};

class Watches final {
 public:
  // Somebody has to look at the job, not before `after` from now. Called on the informers' threads.
  using Enqueue = std::function<void(const kube::ObjectKey& job, Milliseconds after, kube::Priority priority)>;

  // NetworkPolicies are watched where the plan makes any.
  Watches(const kube::Client& client, WatchOptions options, const PlanOptions& plan, Enqueue enqueue);
  Watches(const Watches&) = delete;
  Watches& operator=(const Watches&) = delete;

  void start();
  bool synced() const;
  bool wait_synced(const Deadline& deadline) const;
  void stop();

  // What came while nobody took it: every job, and pods whose job has gone.
  void enqueue_all() const;
  // News that ask for no work but a line in the status: many at a time are looked at once.
  void look_later(const kube::ObjectKey& job) const;
  // The highest attempt of which a pod of the job was told to go; 0: none was.
  int64_t last_attempt_going(const kube::ObjectKey& job) const;

  const kube::Informer<CachedJob>& jobs() const { return *jobs_; }
  const kube::Informer<CachedPod>& pods() const { return *pods_; }
  const kube::Informer<CachedService>& services() const { return *services_; }
  const kube::Informer<CachedPolicy>* policies() const { return policies_.get(); }  // null: not looked after
  const kube::Informer<CachedNode>* nodes() const { return nodes_.get(); }          // null: not watched
  const BadNodes& bad_nodes() const { return bad_nodes_; }

 private:
  void look(const kube::ObjectKey& job, kube::Priority priority = kube::Priority::kNormal) const;
  kube::ReflectorOptions reflector(const kube::Resource& resource, const char* selector) const;
  void watch_jobs(const kube::Client& client, const std::string& manager);
  void watch_pods(const kube::Client& client);
  void watch_services(const kube::Client& client);
  void watch_policies(const kube::Client& client);
  void watch_nodes(const kube::Client& client);
  void on_pod(const kube::ObjectKey& key, const CachedPod& pod, bool later) const;
  void on_node(const std::string& name, NodeState state);

  const WatchOptions options_;
  const Enqueue enqueue_;
  BadNodes bad_nodes_;
  std::unique_ptr<kube::Informer<CachedJob>> jobs_;
  std::unique_ptr<kube::Informer<CachedPod>> pods_;
  std::unique_ptr<kube::Informer<CachedService>> services_;
  std::unique_ptr<kube::Informer<CachedPolicy>> policies_;
  std::unique_ptr<kube::Informer<CachedNode>> nodes_;
};

}  // namespace trireme::controller
