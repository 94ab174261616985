// What the informers keep of each object, and how it is read. Small: a cluster holds tens of thousands of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "operator/controller/observed.h"
#include "operator/kube/json_scan.h"
#include "operator/kube/resource.h"

namespace trireme::controller {

struct CachedJob {
  // Without managed fields and annotations; unpacked and parsed at each reconcile.
  Json json() const;

  std::string packed;
  uint32_t unpacked_size = 0;
  std::string uid;
  std::string resource_version;
  int64_t generation = 0;  // of the specification
  bool deleting = false;
  // For /metrics and the queue, without parsing:
  std::string phase;
  int64_t attempt = 0;
  int64_t restarts = 0;
  int64_t free_restarts = 0;
  int64_t pods_wanted = 0;
  int64_t pods_created = 0;
  int64_t pods_ready = 0;
  bool terminating = false;  // condition Terminating: a pod does not go
  int64_t step = 0;
  int64_t max_steps = 0;
  int64_t checkpoint_step = -1;
  double reward = 0;
  double step_seconds = 0;
  double tokens_per_second = 0;
  bool has_progress = false;
  bool has_reward = false;
  bool managed = true;  // by this operator
};

struct CachedPod {
  struct Trouble {  // only of pods that have some
    std::string reason;
    std::string message;
    std::string log;
    std::string waiting;
    std::optional<int64_t> exit_code;
    std::optional<int64_t> signal;
    int64_t finished_ms = 0;
    int64_t lived_ms = 0;
  };
  std::string uid;
  std::string job;
  std::string role;
  std::string node;
  std::string status_ca;  // ObservedPod::status_ca
  int32_t rank = -1;
  int32_t attempt = 0;
  int32_t incarnation = 0;
  int32_t failures = 0;  // ObservedPod::failures_before
  uint64_t job_uid = 0;  // hash64 of the job's uid as its label has it, which is only compared
  PodPhase phase = PodPhase::kPending;
  bool scheduled = false;
  bool ready = false;
  bool gated = false;
  bool deleting = false;
  bool owned = false;  // its controller is the RLJob that its labels name
  std::optional<int32_t> main_exit;
  std::unique_ptr<Trouble> trouble;
};

struct CachedService {
  std::string uid;
  std::string job;
  std::string gang;     // see ObservedService
  int64_t attempt = 0;  // 0: not of an attempt
  bool owned = false;
};

struct CachedPolicy {
  std::string uid;
  uint64_t job_uid = 0;  // hash64 of its controller's, an RLJob's; 0: it has none
  uint64_t spec = 0;     // policy_fingerprint
};

struct CachedNode {
  NodeState state = NodeState::kReady;
};

kube::JsonFields job_fields();
kube::JsonFields pod_fields();
kube::JsonFields service_fields();
kube::JsonFields policy_fields();
kube::JsonFields node_fields();

// From an object reduced to the fields above.
CachedJob read_job(const Json& object, const std::string& manager_name);
CachedPod read_pod(const Json& object);
CachedService read_service(const Json& object);
CachedPolicy read_policy(const Json& object);
CachedNode read_node(const Json& object);

// Labels can be copied by anybody: an object is a job's own if it lies in the job's namespace, the job controls it, and
// it has the name that its labels lead to.
bool is_own(const kube::ObjectKey& key, const CachedPod& pod, const kube::ObjectKey& job);
bool is_own(const kube::ObjectKey& key, const CachedService& service, const kube::ObjectKey& job);
// The controller owner reference of any object is to the RLJob of that uid ("": of any).
bool controlled_by(const Json& object, const std::string& job_uid);

// Without what only the reconciler knows (node state, durations).
ObservedPod observe(const std::string& name, const CachedPod& pod);

}  // namespace trireme::controller
