// What the informers keep of each object, and how it is read. Small: a cluster holds tens of thousands of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "operator/controller/observed.h"
#include "operator/kube/json_scan.h"

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
    std::optional<int64_t> exit_code;
    std::optional<int64_t> signal;
    int64_t finished_ms = 0;
  };
  std::string uid;
  std::string job;
  std::string role;
  std::string node;
  int32_t rank = -1;
  int32_t attempt = 0;
  PodPhase phase = PodPhase::kPending;
  bool scheduled = false;
  bool ready = false;
  bool gated = false;
  bool deleting = false;
  std::unique_ptr<Trouble> trouble;
};

struct CachedService {
  std::string job;
  int64_t attempt = 0;  // 0: not of an attempt
};

struct CachedNode {
  NodeState state = NodeState::kReady;
};

kube::JsonFields job_fields();
kube::JsonFields pod_fields();
kube::JsonFields service_fields();
kube::JsonFields node_fields();

// From an object reduced to the fields above.
CachedJob read_job(const Json& object, const std::string& manager_name);
CachedPod read_pod(const Json& object);
CachedService read_service(const Json& object);
CachedNode read_node(const Json& object);

// Without what only the reconciler knows (node state, durations).
ObservedPod observe(const std::string& name, const CachedPod& pod);

}  // namespace trireme::controller
