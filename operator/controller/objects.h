// The Kubernetes objects of one attempt, as JSON: pods, headless Service, ConfigMap, the reward role's Service.
#pragma once

#include <string>
#include <vector>

#include "api/rljob.h"
#include "operator/scheduling/gang.h"

namespace trireme::controller {

struct ObjectOptions {
  std::string
      status_url;  // base URL of the status server, e.g. http://trireme-status.trireme-system:8090; empty: no reports
  std::string status_ca_config_map;  // ConfigMap in the job's namespace with ca.crt for https; empty: none
  int64_t user_id = 65532;           // of pods whose template sets no security context
};

struct AttemptContext {
  const RLJob& job;
  int64_t attempt;
  const scheduling::Backend& backend;
  const ObjectOptions& options;
};

Json owner_reference(const RLJob& job);
scheduling::Gang gang_of(const AttemptContext& context);

Json headless_service(const AttemptContext& context);
// Immutable: topology.json, and config.yaml when the trainer's configuration is inline.
Json attempt_config_map(const AttemptContext& context);
// Spans attempts; only when the job has a reward role.
Json reward_service(const AttemptContext& context);
Json pod(const AttemptContext& context, const std::string& role, int64_t rank);

// Fingerprint of what the trainer is configured with, for status.configHash.
std::string config_hash(const RLJobSpec& spec);

}  // namespace trireme::controller
