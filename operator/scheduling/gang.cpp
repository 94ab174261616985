#include "operator/scheduling/gang.h"

#include "base/error.h"
#include "base/text.h"

namespace trireme::scheduling {
namespace {

using nlohmann::json;

constexpr const char* kKubernetesGroup = "scheduling.k8s.io/";
constexpr const char* kVolcano = "scheduling.volcano.sh/v1beta1";
constexpr const char* kCoscheduling = "scheduling.x-k8s.io/v1alpha1";
constexpr const char* kKai = "scheduling.run.ai/v2alpha2";
constexpr const char* kGroupTemplate = "gang";

bool serves(const Discovery& discovery, const std::string& group_version, const std::string& resource) {
  const auto found = discovery.find(group_version);
  return found != discovery.end() && found->second.count(resource) > 0;
}

// Kubernetes' own API changed its shape with every release: 1.35 v1alpha1 (groups inside the Workload), 1.36 v1alpha2
// (PodGroup objects), 1.37 v1alpha3 and v1beta1 (another reference to the Workload, disruption as a union).
std::string kubernetes_version(const Discovery& discovery) {
  for (const char* version : {"v1", "v1beta1", "v1alpha3", "v1alpha2"}) {
    if (serves(discovery, std::string(kKubernetesGroup) + version, "podgroups")) return version;
  }
  return serves(discovery, std::string(kKubernetesGroup) + "v1alpha1", "workloads") ? "v1alpha1" : "";
}

std::string kueue_version(const Discovery& discovery) {
  for (const char* version : {"v1beta2", "v1beta1"}) {
    if (serves(discovery, std::string("kueue.x-k8s.io/") + version, "workloads")) return version;
  }
  return "";
}

// The back-end if the cluster serves it, else version "" and kind none.
bool find_backend(BackendKind kind, const Discovery& discovery, Backend& found) {
  found = Backend{kind, ""};
  switch (kind) {
    case BackendKind::kNone:
      return true;
    case BackendKind::kKubernetes:
      found.version = kubernetes_version(discovery);
      return !found.version.empty();
    case BackendKind::kKueue:
      found.version = kueue_version(discovery);
      return !found.version.empty();
    case BackendKind::kVolcano:
      found.version = "v1beta1";
      return serves(discovery, kVolcano, "podgroups");
    case BackendKind::kCoscheduling:
      found.version = "v1alpha1";
      return serves(discovery, kCoscheduling, "podgroups");
    case BackendKind::kKai:
      found.version = "v2alpha2";
      return serves(discovery, kKai, "podgroups");
  }
  return false;
}

json metadata(const Gang& gang) {
  json labels = json::object();
  for (const auto& [key, value] : gang.labels) labels[key] = value;
  return {{"name", gang.name},
          {"namespace", gang.namespace_},
          {"labels", labels},
          {"ownerReferences", json::array({gang.owner})}};
}

json object(const std::string& group_version, const char* kind, const Gang& gang, json spec) {
  return {{"apiVersion", group_version}, {"kind", kind}, {"metadata", metadata(gang)}, {"spec", std::move(spec)}};
}

std::vector<Object> kubernetes_objects(const std::string& version, const Gang& gang) {
  const std::string group_version = kKubernetesGroup + version;
  const json policy = {{"gang", {{"minCount", gang.pods}}}};
  const json controller = {{"apiGroup", "trireme.dev"}, {"kind", "RLJob"}, {"name", gang.job_name}};
  if (version == "v1alpha1") {
    json groups = json::array({{{"name", kGroupTemplate}, {"policy", policy}}});
    return {{group_version, "workloads",
             object(group_version, "Workload", gang, {{"controllerRef", controller}, {"podGroups", groups}})}};
  }
  const bool newer = version != "v1alpha2";
  json settings = {{"schedulingPolicy", policy}};
  if (!gang.topology_key.empty() && gang.topology_required) {
    settings["schedulingConstraints"] =
        newer ? json{{"topology", json::array({{{"key", gang.topology_key}}})}}
              : json{{"topologyConstraints", json::array({{{"topologyKey", gang.topology_key}}})}};
  }
  if (newer) {
    // One evicted pod ends the attempt anyway, so the scheduler had better take all of them or none.
    settings["disruptionMode"] = {{"all", json::object()}};
    if (!gang.priority_class.empty()) settings["priorityClassName"] = gang.priority_class;
  }
  json group_template = settings;
  group_template["name"] = kGroupTemplate;
  json group = settings;
  if (newer) {
    group["workloadRef"] = {{"workloadName", gang.name}, {"templateName", kGroupTemplate}};
  } else {
    group["podGroupTemplateRef"] = {
        {"workload", {{"workloadName", gang.name}, {"podGroupTemplateName", kGroupTemplate}}}};
  }
  json workload = {{"controllerRef", controller}, {"podGroupTemplates", json::array({group_template})}};
  return {{group_version, "workloads", object(group_version, "Workload", gang, std::move(workload))},
          {group_version, "podgroups", object(group_version, "PodGroup", gang, std::move(group))}};
}

Object volcano_object(const Gang& gang) {
  json spec = {{"minMember", gang.pods}};
  if (!gang.queue.empty()) spec["queue"] = gang.queue;
  if (!gang.priority_class.empty()) spec["priorityClassName"] = gang.priority_class;
  if (!gang.topology_key.empty()) {
    spec["networkTopology"] = {{"mode", gang.topology_required ? "hard" : "soft"}, {"highestTierAllowed", 1}};
  }
  return {kVolcano, "podgroups", object(kVolcano, "PodGroup", gang, std::move(spec))};
}

Object coscheduling_object(const Gang& gang) {
  json spec = {{"minMember", gang.pods}};
  if (gang.schedule_timeout_s > 0) spec["scheduleTimeoutSeconds"] = gang.schedule_timeout_s;
  return {kCoscheduling, "podgroups", object(kCoscheduling, "PodGroup", gang, std::move(spec))};
}

Object kai_object(const Gang& gang) {
  json spec = {{"minMember", gang.pods}, {"queue", gang.queue.empty() ? "default" : gang.queue}};
  if (!gang.priority_class.empty()) spec["priorityClassName"] = gang.priority_class;
  if (!gang.topology_key.empty()) {
    const char* level = gang.topology_required ? "requiredTopologyLevel" : "preferredTopologyLevel";
    spec["topologyConstraint"] = {{level, gang.topology_key}};
  }
  return {kKai, "podgroups", object(kKai, "PodGroup", gang, std::move(spec))};
}

void use_scheduler(json& pod, const char* name) {
  json& spec = pod["spec"];
  if (!spec.contains("schedulerName")) spec["schedulerName"] = name;
}

}  // namespace

const char* to_string(BackendKind kind) {
  switch (kind) {
    case BackendKind::kNone:
      return "none";
    case BackendKind::kKubernetes:
      return "kubernetes";
    case BackendKind::kKueue:
      return "kueue";
    case BackendKind::kVolcano:
      return "volcano";
    case BackendKind::kCoscheduling:
      return "coscheduling";
    case BackendKind::kKai:
      return "kai";
  }
  return "none";
}

BackendKind backend_from_string(const std::string& name) {
  const std::string lower = to_lower(name);
  if (lower == "kube") return BackendKind::kKubernetes;
  for (const BackendKind kind : {BackendKind::kNone, BackendKind::kKubernetes, BackendKind::kKueue,
                                 BackendKind::kVolcano, BackendKind::kCoscheduling, BackendKind::kKai}) {
    if (lower == to_string(kind)) return kind;
  }
  fail_user("scheduling back-end '" + name +
            "' is not known: use auto, none, kubernetes, kueue, volcano, coscheduling or kai");
}

const std::vector<std::string>& group_versions_of_interest() {
  static const std::vector<std::string> all = {"scheduling.k8s.io/v1",
                                               "scheduling.k8s.io/v1beta1",
                                               "scheduling.k8s.io/v1alpha3",
                                               "scheduling.k8s.io/v1alpha2",
                                               "scheduling.k8s.io/v1alpha1",
                                               "kueue.x-k8s.io/v1beta2",
                                               "kueue.x-k8s.io/v1beta1",
                                               kKai,
                                               kVolcano,
                                               kCoscheduling};
  return all;
}

Backend choose_backend(const std::string& wanted, bool has_queue, const Discovery& discovery) {
  Backend found;
  const std::string lower = to_lower(wanted);
  if (lower.empty() || lower == "auto") {
    if (has_queue && find_backend(BackendKind::kKueue, discovery, found)) return found;
    for (const BackendKind kind :
         {BackendKind::kKubernetes, BackendKind::kKai, BackendKind::kVolcano, BackendKind::kCoscheduling}) {
      if (find_backend(kind, discovery, found)) return found;
    }
    return {};
  }
  const BackendKind kind = backend_from_string(wanted);
  if (!find_backend(kind, discovery, found)) {
    fail_user(std::string("this cluster does not serve the API of the scheduling back-end '") + to_string(kind) +
              "': install it, or set scheduling.backend to Auto or None");
  }
  return found;
}

std::vector<Object> gang_objects(const Backend& backend, const Gang& gang) {
  switch (backend.kind) {
    case BackendKind::kNone:
    case BackendKind::kKueue:
      return {};
    case BackendKind::kKubernetes:
      return kubernetes_objects(backend.version, gang);
    case BackendKind::kVolcano:
      return {volcano_object(gang)};
    case BackendKind::kCoscheduling:
      return {coscheduling_object(gang)};
    case BackendKind::kKai:
      return {kai_object(gang)};
  }
  return {};
}

std::vector<ObjectName> gang_cleanup(const Backend& backend, const std::string& gang_name) {
  const std::string kubernetes = kKubernetesGroup + backend.version;
  switch (backend.kind) {
    case BackendKind::kNone:
      return {};
    case BackendKind::kKubernetes:
      if (backend.version == "v1alpha1") return {{kubernetes, "workloads", gang_name}};
      return {{kubernetes, "podgroups", gang_name}, {kubernetes, "workloads", gang_name}};
    // Kueue holds a finalizer on the pods of a group until its Workload goes or finishes.
    case BackendKind::kKueue:
      return {{"kueue.x-k8s.io/" + backend.version, "workloads", gang_name}};
    case BackendKind::kVolcano:
      return {{kVolcano, "podgroups", gang_name}};
    case BackendKind::kCoscheduling:
      return {{kCoscheduling, "podgroups", gang_name}};
    case BackendKind::kKai:
      return {{kKai, "podgroups", gang_name}};
  }
  return {};
}

void join_gang(const Backend& backend, const Gang& gang, const std::string& role, json& pod) {
  json& labels = pod["metadata"]["labels"];
  json& annotations = pod["metadata"]["annotations"];
  switch (backend.kind) {
    case BackendKind::kNone:
      break;
    case BackendKind::kKubernetes:
      if (backend.version == "v1alpha1") {
        pod["spec"]["workloadRef"] = {{"name", gang.name}, {"podGroup", kGroupTemplate}};
      } else {
        pod["spec"]["schedulingGroup"] = {{"podGroupName", gang.name}};
      }
      break;
    case BackendKind::kKueue:
      labels["kueue.x-k8s.io/pod-group-name"] = gang.name;
      if (!gang.queue.empty()) labels["kueue.x-k8s.io/queue-name"] = gang.queue;
      annotations["kueue.x-k8s.io/pod-group-total-count"] = std::to_string(gang.pods);
      if (!gang.topology_key.empty()) {
        annotations[gang.topology_required ? "kueue.x-k8s.io/podset-required-topology"
                                           : "kueue.x-k8s.io/podset-preferred-topology"] = gang.topology_key;
      }
      break;
    case BackendKind::kVolcano:
      annotations["scheduling.k8s.io/group-name"] = gang.name;
      annotations["volcano.sh/task-spec"] = role;
      use_scheduler(pod, "volcano");
      break;
    case BackendKind::kCoscheduling:
      labels["scheduling.x-k8s.io/pod-group"] = gang.name;
      use_scheduler(pod, "scheduler-plugins-scheduler");
      break;
    case BackendKind::kKai:
      annotations["pod-group-name"] = gang.name;
      labels["kai.scheduler/queue"] = gang.queue.empty() ? "default" : gang.queue;
      use_scheduler(pod, "kai-scheduler");
      break;
  }
  if (annotations.is_null() || annotations.empty()) pod["metadata"].erase("annotations");
}

}  // namespace trireme::scheduling
