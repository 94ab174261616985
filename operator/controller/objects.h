// The Kubernetes objects of one attempt, as JSON: pods, headless Service, ConfigMap, the reward role's Service.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "api/rljob.h"
#include "operator/scheduling/gang.h"

namespace trireme::controller {

struct ObjectOptions {
  // Base URL of the status server, e.g. https://trireme-status.trireme-system.svc:8090; empty: no reports.
  std::string status_url;
  // Who vouches for an https status_url, as PEM: goes into the attempt's ConfigMap and from there into its pods. Empty,
  // or giving "": the system's authorities do.
  std::function<std::string()> status_ca;
  int64_t user_id = 65532;  // of pods whose template sets no security context
  // Each job gets a NetworkPolicy (network_policy.h), which these peers may pass to its metrics port. In the form of
  // parse_policy_peers; none: nobody may.
  bool network_policies = false;
  Json scraped_by = Json::array();
  // Cluster autoscalers are asked not to take a pod's node away under it.
  bool do_not_disrupt = true;
};

struct AttemptContext {
  const RLJob& job;
  int64_t attempt;
  const scheduling::Backend& backend;
  const ObjectOptions& options;
};

Json owner_reference(const RLJob& job);
// Of everything that is made for the job.
std::map<std::string, std::string> job_labels(const RLJob& job);
scheduling::Gang gang_of(const AttemptContext& context);

Json headless_service(const AttemptContext& context);
// Immutable: topology.json, and config.yaml when the trainer's configuration is inline.
Json attempt_config_map(const AttemptContext& context);
// Spans attempts; only when the job has a reward role.
Json reward_service(const AttemptContext& context);
// `incarnation`, `failures`: of a pod that is made again in its attempt, see ObservedPod.
Json pod(const AttemptContext& context, const std::string& role, int64_t rank, int64_t incarnation = 0,
         int64_t failures = 0);

// What today's CA of the status server is told from others by, short enough for a label; "": there is none.
std::string status_ca_mark(const ObjectOptions& options);

// Fingerprint of what the trainer is configured with, for status.configHash.
std::string config_hash(const RLJobSpec& spec);

}  // namespace trireme::controller
