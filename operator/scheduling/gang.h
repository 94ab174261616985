// Gang back-ends: which objects make a cluster's scheduler place all pods of one attempt or none of them, and how a pod
// says that it belongs to the gang. Pure functions of (what the cluster serves, the gang); no I/O.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace trireme::scheduling {

enum class BackendKind { kNone, kKubernetes, kKueue, kVolcano, kCoscheduling, kKai };

const char* to_string(BackendKind kind);
// "none" | "kubernetes" (or "kube") | "kueue" | "volcano" | "coscheduling" | "kai", upper or lower case; throws
// Error(kUser) otherwise. "auto" is not a back-end: see choose_backend.
BackendKind backend_from_string(const std::string& name);

// What the API server serves: group/version -> resource names (plural), e.g. "scheduling.k8s.io/v1alpha2" ->
// {"podgroups"}.
using Discovery = std::map<std::string, std::set<std::string>>;

// The API groups a back-end may need; discovery has to look at no others. In order of preference.
const std::vector<std::string>& group_versions_of_interest();

struct Backend {
  BackendKind kind = BackendKind::kNone;
  std::string version;  // of the chosen API group, e.g. "v1alpha2"; empty for none and for Kueue
};

// `wanted` is "auto" or a back-end name. Auto: Kueue when the job names a queue and Kueue is installed, else the first
// of Kubernetes' own API, KAI, Volcano and coscheduling that is served, else none. A named back-end that the cluster
// does not serve throws Error(kUser) saying so: silently running without a gang would be worse.
Backend choose_backend(const std::string& wanted, bool has_queue, const Discovery& discovery);

struct Gang {
  std::string name;  // names every object of the gang; unique per attempt, but that Kueue's may outlive one
  std::string namespace_;
  nlohmann::json owner;  // ownerReferences entry of the RLJob
  std::map<std::string, std::string> labels;
  std::string job_name;
  int64_t pods = 0;   // the gang's minimum; with Kueue all of them
  std::string queue;  // empty: the back-end's default
  std::string priority_class;
  int64_t schedule_timeout_s = 0;  // 0: the scheduler's own
  std::string topology_key;        // node label in one of whose domains the gang must (or should) lie; empty: anywhere
  bool topology_required = false;
};

struct Object {
  std::string group_version;  // "v1", "scheduling.k8s.io/v1alpha2"
  std::string resource;       // plural: "podgroups"
  nlohmann::json body;        // with apiVersion, kind and metadata.name
};

struct ObjectName {
  std::string group_version;
  std::string resource;
  std::string name;
};

// In the order in which they must be created, before the pods.
std::vector<Object> gang_objects(const Backend& backend, const Gang& gang);

// What to delete, in order, when the attempt is over. A superset of gang_objects' names: Kueue makes its own Workload.
std::vector<ObjectName> gang_cleanup(const Backend& backend, const std::string& gang_name);

// Adds the labels, annotations, scheduler name and references that make `pod` a member. `role` is its role's name.
// A schedulerName that the pod's template already names is left alone.
void join_gang(const Backend& backend, const Gang& gang, const std::string& role, nlohmann::json& pod);

}  // namespace trireme::scheduling
