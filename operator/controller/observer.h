// Observer: reads what a plan may look at: the informers' caches, the API server itself where they may be behind, and
// the trainers' reports. What follows from the facts it reads is said by observe() (facts.h).
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "operator/controller/echo.h"
#include "operator/controller/facts.h"
#include "operator/controller/per_job.h"
#include "operator/controller/pod_names.h"
#include "operator/controller/pool.h"
#include "operator/controller/reports.h"
#include "operator/controller/watches.h"
#include "operator/kube/client.h"

namespace trireme::controller {

struct ObserverOptions {
  int64_t pods_a_get = 150;          // a list by label walks so many pods in the time of a GET by name
  Milliseconds create_echo{5000};    // the watch tells of our creates by then; if not, we look ourselves
  Milliseconds unknown_node{10000};  // a pod's node that the cache does not hold: for so long it is news on its way
  Milliseconds node_answer{2000};    // so long what the API server said of such a node holds
  Milliseconds least_silence = ReportStore::kLeastGap;  // of all jobs together, before it counts as our own outage
  std::function<OwnPath()> own_path;                    // what is found where trainers report; empty: not known
  std::function<int64_t()> now_ms;                      // wall clock; empty: the system's
};

// Calls for one job by one thread at a time; for different jobs from any.
class Observer final {
 public:
  Observer(const kube::Client& client, ObserverOptions options, const Watches& watches, ReportStore& reports,
           Pool& pool);

  // The job and its pods as the caches have them, or as our own last write left the job; nothing: it is not there.
  std::optional<Snapshot> cached(const kube::ObjectKey& key);
  // A live look: the same, from the API server. What the cache cannot tell: whether a pod that it does not show is not
  // there or only not heard of, and whether one that it shows still stands in the way. `before`: what the cache said.
  std::optional<Snapshot> live(const kube::ObjectKey& key, const RLJobStatus& before, const Deadline& deadline);
  // So long the watch still has to tell of the pods that we made, or saw all of, just now; nothing: look live.
  std::optional<Milliseconds> wait_for_watch(const kube::ObjectKey& key, const RLJobStatus& cached);
  // What a plan is made from.
  Observed observe(const kube::ObjectKey& key, Snapshot snapshot, const Answers& answers, const Deadline& deadline);

  // What the others tell, since the watch will only do so later:
  void wrote(const kube::ObjectKey& key, const RLJob& job);  // the job, as a write of its status answered
  void first_attempt_begins(const kube::ObjectKey& key, const RLJob& job);
  void expect_no_pods(const kube::ObjectKey& key);  // they are being made, or their attempt is over
  void made_pods(const kube::ObjectKey& key, int64_t attempt);
  void forget(const kube::ObjectKey& key);  // the job is gone

 private:
  struct Memory {
    // As the last status write answered, until a look finds that the informer has it too. Small: while thousands of
    // jobs are made, those that are only to be described wait for that look until all are made.
    std::unique_ptr<const CachedJob> written;
    Sightings sightings;
    Echo echo;
    PodNames names;
    int64_t claims_attempt = -1;
    std::map<std::string, std::vector<std::string>> claims;
  };
  std::vector<ObservedPod> list_pods(const kube::ObjectKey& job, const std::string& uid,
                                     const Deadline& deadline) const;
  std::vector<ObservedPod> get_pods(const kube::ObjectKey& job, const std::string& uid,
                                    const std::vector<std::string>& names, const Deadline& deadline) const;
  void read_claims(const kube::ObjectKey& key, const RLJob& job, Memory& memory, const Deadline& deadline) const;
  void read_nodes(Facts& facts) const;
  void ask_for_nodes(Facts& facts, const Sightings& sightings, const Deadline& deadline);
  bool is_gone(const std::string& node, const Deadline& deadline);
  size_t running_jobs();

  const kube::Client& client_;
  const ObserverOptions options_;
  const Watches& watches_;
  ReportStore& reports_;
  Pool& pool_;
  PerJob<Memory> memory_;
  struct NodeAnswer {
    SteadyClock::time_point at;
    bool gone = false;
  };
  std::mutex nodes_mutex_;
  std::map<std::string, NodeAnswer> node_answers_;  // of all jobs: a node that is lost concerns each pod it had
  std::atomic<int64_t> running_jobs_{0};            // as counted at counted_ns_
  std::atomic<int64_t> counted_ns_{0};
};

}  // namespace trireme::controller
