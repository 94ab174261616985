#include "operator/controller/objects.h"

#include <algorithm>
#include <map>

#include "api/runtime.h"
#include "base/error.h"
#include "base/text.h"
#include "operator/controller/observed.h"

namespace trireme::controller {
namespace {

constexpr const char* kShmVolume = "trireme-shm";
constexpr const char* kConfigVolume = "trireme-config";
constexpr const char* kTopologyVolume = "trireme-topology";
constexpr const char* kStatusVolume = "trireme-status";
constexpr const char* kConfigKey = "config.yaml";
constexpr const char* kTopologyKey = "topology.json";
constexpr const char* kIpcLock = "IPC_LOCK";

std::map<std::string, std::string> attempt_labels(const AttemptContext& c) {
  auto labels = job_labels(c.job);
  labels[kLabelAttempt] = std::to_string(c.attempt);
  return labels;
}

Json metadata(const AttemptContext& c, const std::string& name, const std::map<std::string, std::string>& labels) {
  return {{"name", name},
          {"namespace", c.job.metadata.namespace_},
          {"labels", labels},
          {"ownerReferences", Json::array({owner_reference(c.job)})}};
}

const RoleSpec& role_spec(const RLJobSpec& spec, const std::string& role) {
  for (const RoleRef& ref : roles_of(spec)) {
    if (ref.name == role) return *ref.spec;
  }
  fail_internal("the job has no role '" + role + "'");
}

Json& object_at(Json& parent, const char* key) {
  Json& child = parent[key];
  if (!child.is_object()) child = Json::object();
  return child;
}

Json& array_at(Json& parent, const char* key) {
  Json& child = parent[key];
  if (!child.is_array()) child = Json::array();
  return child;
}

bool has_named(const Json& list, const std::string& name) {
  return std::any_of(list.begin(), list.end(),
                     [&](const Json& e) { return e.is_object() && e.value("name", std::string()) == name; });
}

void set_default(Json& object, const char* key, Json value) {
  if (!object.contains(key) || object[key].is_null()) object[key] = std::move(value);
}

void add_volume(Json& spec, Json volume) {
  Json& volumes = array_at(spec, "volumes");
  if (!has_named(volumes, volume["name"].get<std::string>())) volumes.push_back(std::move(volume));
}

void add_mount(Json& container, const char* volume, const char* path, bool read_only) {
  Json& mounts = array_at(container, "volumeMounts");
  const bool taken = std::any_of(mounts.begin(), mounts.end(), [&](const Json& m) {
    return m.is_object() && m.value("mountPath", std::string()) == path;
  });
  if (taken) return;
  Json mount = {{"name", volume}, {"mountPath", path}};
  if (read_only) mount["readOnly"] = true;
  mounts.push_back(std::move(mount));
}

std::string hex_hash(const std::string& bytes) {
  const uint64_t hash = hash64(bytes);
  static const char* digits = "0123456789abcdef";
  std::string out(16, '0');
  for (int i = 0; i < 16; ++i) out[15 - i] = digits[(hash >> (4 * i)) & 15];
  return out;
}

std::string status_ca(const ObjectOptions& options) {
  return options.status_url.empty() || !options.status_ca ? std::string() : options.status_ca();
}

// Ours come first, so that the template's values may say $(TRIREME_JOB). Reserved names of the template lose, others
// (NCCL's settings) win.
void set_environment(Json& container, const Json& ours) {
  const Json own = container.contains("env") && container["env"].is_array() ? container["env"] : Json::array();
  Json merged = Json::array();
  for (const Json& entry : ours) {
    const std::string name = entry["name"].get<std::string>();
    if (is_reserved_env(name) || !has_named(own, name)) merged.push_back(entry);
  }
  const Json kept = merged;
  for (const Json& entry : own) {
    if (entry.is_object() && !has_named(kept, entry.value("name", std::string()))) merged.push_back(entry);
  }
  container["env"] = std::move(merged);
}

// Init containers get no address for reports: what they run is not the job's progress.
Json environment(const AttemptContext& c, const std::string& role, int64_t rank, int64_t incarnation, bool init) {
  const RLJob& job = c.job;
  PodPlace place;
  place.role = role;
  place.index = rank;
  place.attempt = c.attempt;
  place.incarnation = incarnation;
  place.master_address = pod_address(job.metadata.name, "actor", 0, c.attempt);
  place.topology_file = std::string(kTopologyMountPath) + "/" + kTopologyKey;
  std::map<std::string, std::string> values = pod_environment(job, place);
  if (init) values = init_environment(std::move(values));
  if (!init && role == "actor" && !c.options.status_url.empty()) {
    values["TRIREME_STATUS_URL"] =
        c.options.status_url + "/v1/status/" + job.metadata.namespace_ + "/" + job.metadata.name;
    values["TRIREME_STATUS_TOKEN_FILE"] = std::string(kStatusTokenMountPath) + "/token";
    if (!status_ca(c.options).empty()) {
      values["TRIREME_STATUS_CA_FILE"] = std::string(kStatusTokenMountPath) + "/" + kStatusCaKey;
    }
  }
  Json env = Json::array();
  for (const auto& [name, value] : values) env.push_back({{"name", name}, {"value", value}});
  env.push_back({{"name", "TRIREME_POD_NAME"}, {"valueFrom", {{"fieldRef", {{"fieldPath", "metadata.name"}}}}}});
  env.push_back({{"name", "TRIREME_NODE_NAME"}, {"valueFrom", {{"fieldRef", {{"fieldPath", "spec.nodeName"}}}}}});
  return env;
}

void add_security_context(Json& spec, int64_t user_id) {
  Json& pod = object_at(spec, "securityContext");
  if (!pod.contains("runAsUser") && !pod.contains("runAsNonRoot")) {
    pod["runAsNonRoot"] = true;
    pod["runAsUser"] = user_id;
    set_default(pod, "runAsGroup", user_id);
    if (!pod.contains("fsGroup")) {
      pod["fsGroup"] = user_id;
      set_default(pod, "fsGroupChangePolicy", "OnRootMismatch");
    }
  }
  set_default(pod, "seccompProfile", {{"type", "RuntimeDefault"}});
  for (const char* list : {"initContainers", "containers"}) {
    if (!spec.contains(list)) continue;
    for (Json& container : spec[list]) {
      Json& context = object_at(container, "securityContext");
      // A privileged container may not forbid escalation, and one that adds capabilities decides for itself.
      if (context.value("privileged", false)) continue;
      set_default(context, "allowPrivilegeEscalation", false);
      if (!context.contains("capabilities")) context["capabilities"] = {{"drop", Json::array({"ALL"})}};
    }
  }
}

// Devices are used through memory that is locked. A template that is privileged, or that drops the capability by name,
// decides for itself. Before add_security_context, which forbids what is not decided.
void allow_locked_memory(Json& container) {
  Json& context = object_at(container, "securityContext");
  if (context.value("privileged", false)) return;
  const bool own = context.contains("capabilities") && context["capabilities"].is_object();
  Json& capabilities = object_at(context, "capabilities");
  const auto names = [&](const char* list, const char* name) {
    return capabilities.contains(list) && capabilities[list].is_array() &&
           std::find(capabilities[list].begin(), capabilities[list].end(), name) != capabilities[list].end();
  };
  if (!own) capabilities["drop"] = Json::array({"ALL"});
  if (names("add", "ALL") || names("add", kIpcLock) || names("drop", kIpcLock)) return;
  array_at(capabilities, "add").push_back(kIpcLock);
}

// The template's own word wins.
void ask_to_stay(Json& annotations) {
  set_default(annotations, "cluster-autoscaler.kubernetes.io/safe-to-evict", "false");
  set_default(annotations, "karpenter.sh/do-not-disrupt", "true");
}

// metadata.name as a field selector: the host-name label may differ from the node's name.
void avoid_nodes(Json& spec, const std::vector<std::string>& nodes) {
  if (nodes.empty()) return;
  Json fields = Json::array();
  for (const std::string& node : nodes) {
    fields.push_back({{"key", "metadata.name"}, {"operator", "NotIn"}, {"values", Json::array({node})}});
  }
  Json& required = object_at(object_at(object_at(spec, "affinity"), "nodeAffinity"),
                             "requiredDuringSchedulingIgnoredDuringExecution");
  Json& terms = array_at(required, "nodeSelectorTerms");
  if (terms.empty()) terms.push_back(Json::object());
  for (Json& term : terms) {
    Json& list = array_at(term, "matchFields");
    for (const Json& field : fields) list.push_back(field);
  }
}

// Without a gang scheduler that knows topology, pods of an attempt attract each other.
void attract(Json& spec, const AttemptContext& c) {
  const Scheduling& scheduling = c.job.spec.scheduling;
  const auto kind = c.backend.kind;
  if (kind == scheduling::BackendKind::kKueue || kind == scheduling::BackendKind::kKai) return;
  Json selector = {{"matchLabels", {{kLabelJobUid, c.job.metadata.uid}, {kLabelAttempt, std::to_string(c.attempt)}}}};
  if (!scheduling.required_topology.empty() && kind != scheduling::BackendKind::kKubernetes) {
    Json& affinity = object_at(object_at(spec, "affinity"), "podAffinity");
    array_at(affinity, "requiredDuringSchedulingIgnoredDuringExecution")
        .push_back({{"topologyKey", scheduling.required_topology}, {"labelSelector", selector}});
  }
  if (!scheduling.preferred_topology.empty()) {
    Json& affinity = object_at(object_at(spec, "affinity"), "podAffinity");
    array_at(affinity, "preferredDuringSchedulingIgnoredDuringExecution")
        .push_back(
            {{"weight", 100},
             {"podAffinityTerm", {{"topologyKey", scheduling.preferred_topology}, {"labelSelector", selector}}}});
  }
}

Json& main_container(Json& spec, const char* name) {
  Json& containers = array_at(spec, "containers");
  for (Json& container : containers) {
    if (container.is_object() && container.value("name", std::string()) == name) return container;
  }
  containers.insert(containers.begin(), Json{{"name", name}});
  return containers.front();
}

void add_resources(Json& container, const RLJobSpec& spec, const RoleSpec& role, bool rdma) {
  Json& limits = object_at(object_at(container, "resources"), "limits");
  if (role.gpus_per_pod > 0) set_default(limits, role.gpu_resource.c_str(), std::to_string(role.gpus_per_pod));
  if (rdma) {
    set_default(limits, spec.network.rdma->resource_name.c_str(), std::to_string(spec.network.rdma->count));
  }
  if (limits.empty()) container["resources"].erase("limits");
  if (container["resources"].empty()) container.erase("resources");
}

void add_config(Json& spec, Json& container, const AttemptContext& c) {
  const std::string own = topology_config_map_name(c.job.metadata.name, c.attempt);
  auto volume = [](const char* name, const std::string& map, const std::string& key, const char* path) {
    return Json{{"name", name},
                {"configMap", {{"name", map}, {"items", Json::array({{{"key", key}, {"path", path}}})}}}};
  };
  add_volume(spec, volume(kTopologyVolume, own, kTopologyKey, kTopologyKey));
  add_mount(container, kTopologyVolume, kTopologyMountPath, true);
  const ConfigSource& config = c.job.spec.config;
  if (config.config_map_ref) {
    add_volume(spec, volume(kConfigVolume, config.config_map_ref->name, config.config_map_ref->key, kConfigKey));
  } else if (!config.inline_config.is_null()) {
    add_volume(spec, volume(kConfigVolume, own, kConfigKey, kConfigKey));
  } else {
    return;
  }
  add_mount(container, kConfigVolume, kConfigMountPath, true);
}

void add_status_token(Json& spec, Json& container, const AttemptContext& c) {
  if (c.options.status_url.empty()) return;
  Json sources = Json::array();
  sources.push_back(
      {{"serviceAccountToken", {{"audience", kStatusTokenAudience}, {"expirationSeconds", 3600}, {"path", "token"}}}});
  if (!status_ca(c.options).empty()) {
    sources.push_back({{"configMap",
                        {{"name", topology_config_map_name(c.job.metadata.name, c.attempt)},
                         {"optional", true},
                         {"items", Json::array({{{"key", kStatusCaKey}, {"path", kStatusCaKey}}})}}}});
  }
  add_volume(spec, {{"name", kStatusVolume}, {"projected", {{"sources", sources}}}});
  add_mount(container, kStatusVolume, kStatusTokenMountPath, true);
}

void tolerate_gpu_taint(Json& spec, const std::string& resource) {
  Json& tolerations = array_at(spec, "tolerations");
  for (const Json& t : tolerations) {
    if (t.is_object() && t.value("key", std::string()) == resource) return;
  }
  tolerations.push_back({{"key", resource}, {"operator", "Exists"}, {"effect", "NoSchedule"}});
}

}  // namespace

std::map<std::string, std::string> job_labels(const RLJob& job) {
  return {{"app.kubernetes.io/name", "trireme"},
          {"app.kubernetes.io/managed-by", "trireme-operator"},
          {kLabelJob, job.metadata.name},
          {kLabelJobUid, job.metadata.uid}};
}

Json owner_reference(const RLJob& job) {
  return {{"apiVersion", kApiVersion}, {"kind", kRLJobKind}, {"name", job.metadata.name},
          {"uid", job.metadata.uid},   {"controller", true}, {"blockOwnerDeletion", true}};
}

scheduling::Gang gang_of(const AttemptContext& c) {
  const RLJobSpec& spec = c.job.spec;
  scheduling::Gang gang;
  gang.name = attempt_service_name(c.job.metadata.name, c.attempt);
  if (c.backend.kind == scheduling::BackendKind::kKueue && !c.job.status.reservation.empty())
    gang.name = c.job.status.reservation;
  gang.namespace_ = c.job.metadata.namespace_;
  gang.owner = owner_reference(c.job);
  gang.labels = attempt_labels(c);
  gang.job_name = c.job.metadata.name;
  // Kueue admits a fixed number of pods.
  gang.pods = c.backend.kind == scheduling::BackendKind::kKueue ? total_pods(spec) : core_pods(spec);
  gang.queue = spec.queue_name;
  gang.priority_class = spec.priority_class_name;
  gang.schedule_timeout_s = spec.scheduling.scheduling_timeout_seconds;
  gang.topology_required = !spec.scheduling.required_topology.empty();
  gang.topology_key = gang.topology_required ? spec.scheduling.required_topology : spec.scheduling.preferred_topology;
  return gang;
}

Json headless_service(const AttemptContext& c) {
  const std::string name = attempt_service_name(c.job.metadata.name, c.attempt);
  auto labels = attempt_labels(c);
  // Whoever takes the attempt apart finds here which group its pods are in.
  if (const std::string gang = gang_of(c).name; gang != name) labels[kLabelGang] = gang;
  return {{"apiVersion", "v1"},
          {"kind", "Service"},
          {"metadata", metadata(c, name, labels)},
          {"spec",
           {{"clusterIP", "None"},
            // Ranks look each other up long before they are ready.
            {"publishNotReadyAddresses", true},
            {"selector", {{kLabelJobUid, c.job.metadata.uid}, {kLabelAttempt, std::to_string(c.attempt)}}},
            {"ports", Json::array({{{"name", "rendezvous"}, {"port", c.job.spec.network.master_port}}})}}}};
}

Json attempt_config_map(const AttemptContext& c) {
  const RLJob& job = c.job;
  const auto hosts = [&](const std::string& role, int64_t pods) {
    std::vector<std::string> names;
    for (int64_t i = 0; i < pods; ++i) names.push_back(pod_address(job.metadata.name, role, i, c.attempt));
    return names;
  };
  const int64_t critics = job.spec.roles.critic ? job.spec.roles.critic->replicas : 0;
  const Json topology =
      topology_document(job, c.attempt, hosts("actor", actor_of(job.spec).replicas), hosts("critic", critics));
  Json data = {{kTopologyKey, topology.dump()}};
  // JSON is YAML.
  if (!job.spec.config.inline_config.is_null()) data[kConfigKey] = job.spec.config.inline_config.dump(2);
  if (const std::string ca = status_ca(c.options); !ca.empty()) data[kStatusCaKey] = ca;
  return {{"apiVersion", "v1"},
          {"kind", "ConfigMap"},
          {"metadata", metadata(c, topology_config_map_name(job.metadata.name, c.attempt), attempt_labels(c))},
          {"immutable", true},
          {"data", std::move(data)}};
}

Json reward_service(const AttemptContext& c) {
  const std::string role = "reward";
  const RoleSpec& reward = role_spec(c.job.spec, role);
  return {{"apiVersion", "v1"},
          {"kind", "Service"},
          {"metadata", metadata(c, reward_service_name(c.job.metadata.name), job_labels(c.job))},
          {"spec",
           {{"selector", {{kLabelJobUid, c.job.metadata.uid}, {kLabelRole, role}}},
            {"ports", Json::array({{{"name", "http"}, {"port", reward.port.value_or(8000)}}})}}}};
}

Json pod(const AttemptContext& c, const std::string& role, int64_t rank, int64_t incarnation, int64_t failures) {
  const RLJob& job = c.job;
  const RLJobSpec& spec = job.spec;
  const RoleSpec& role_settings = role_spec(spec, role);
  const Json empty = Json::object();
  const Json& source = role_settings.pod_template.is_object() ? role_settings.pod_template : empty;
  const Json& source_meta = source.contains("metadata") && source["metadata"].is_object() ? source["metadata"] : empty;

  Json out = {{"apiVersion", "v1"}, {"kind", "Pod"}};
  auto labels = attempt_labels(c);
  labels[kLabelRole] = role;
  labels[kLabelRank] = std::to_string(rank);
  if (incarnation > 0) labels[kLabelIncarnation] = std::to_string(incarnation);
  if (failures > 0) labels[kLabelFailures] = std::to_string(failures);
  if (const std::string mark = status_ca_mark(c.options); role == "actor" && !mark.empty())
    labels[kLabelStatusCa] = mark;
  labels["app.kubernetes.io/component"] = role;
  Json& meta = out["metadata"] = metadata(c, pod_name(job.metadata.name, role, rank, c.attempt, incarnation), {});
  meta["labels"] = source_meta.contains("labels") && source_meta["labels"].is_object() ? source_meta["labels"] : empty;
  for (const auto& [key, value] : labels) meta["labels"][key] = value;
  if (source_meta.contains("annotations") && source_meta["annotations"].is_object()) {
    meta["annotations"] = source_meta["annotations"];
  }
  if (c.options.do_not_disrupt) ask_to_stay(object_at(meta, "annotations"));
  Json& pod_spec = out["spec"] = source.contains("spec") && source["spec"].is_object() ? source["spec"] : empty;

  const bool is_reward = role == "reward";
  Json& main = main_container(pod_spec, is_reward ? kRewardContainer : kTrainerContainer);
  for (const char* list : {"initContainers", "containers"}) {
    if (!pod_spec.contains(list) || !pod_spec[list].is_array()) continue;
    for (Json& container : pod_spec[list]) {
      if (!container.is_object()) continue;
      set_default(container, "image", spec.image);
      if (!spec.image_pull_policy.empty()) set_default(container, "imagePullPolicy", spec.image_pull_policy);
      set_default(container, "terminationMessagePolicy", "FallbackToLogsOnError");
      const bool init = std::string_view(list) == "initContainers";
      set_environment(container, environment(c, role, rank, incarnation, init));
    }
  }
  if (!is_reward) {
    if (!main.contains("command") && !main.contains("args")) {
      main["command"] = role_command(job, role, std::string(kConfigMountPath) + "/" + kConfigKey);
    }
    Json& ports = array_at(main, "ports");
    if (!has_named(ports, "metrics"))
      ports.push_back({{"name", "metrics"}, {"containerPort", spec.network.metrics_port}});
    set_default(main, "terminationMessagePath", "/dev/termination-log");
    main["env"].push_back({{"name", "TRIREME_TERMINATION_LOG"}, {"value", main["terminationMessagePath"]}});
    add_config(pod_spec, main, c);
    if (role == "actor") add_status_token(pod_spec, main, c);  // rank 0 of the actor reports
  }
  add_volume(pod_spec,
             {{"name", kShmVolume}, {"emptyDir", {{"medium", "Memory"}, {"sizeLimit", spec.network.shared_memory}}}});
  add_mount(main, kShmVolume, "/dev/shm", false);
  const bool rdma = uses_rdma(spec, role);
  add_resources(main, spec, role_settings, rdma);
  if (rdma) allow_locked_memory(main);

  pod_spec["restartPolicy"] = "Never";
  pod_spec["hostname"] = pod_hostname(job.metadata.name, role, rank);
  pod_spec["subdomain"] = attempt_service_name(job.metadata.name, c.attempt);
  set_default(pod_spec, "enableServiceLinks", false);
  set_default(pod_spec, "automountServiceAccountToken", false);
  const bool saves = spec.checkpoint.on_termination && role != "generation";
  set_default(pod_spec, "terminationGracePeriodSeconds", saves ? spec.checkpoint.timeout_seconds : 30);
  if (!spec.priority_class_name.empty()) pod_spec["priorityClassName"] = spec.priority_class_name;
  if (!spec.scheduling.scheduler_name.empty()) pod_spec["schedulerName"] = spec.scheduling.scheduler_name;
  if (spec.network.host_network) {
    pod_spec["hostNetwork"] = true;
    set_default(pod_spec, "dnsPolicy", "ClusterFirstWithHostNet");
  }
  if (role_settings.gpus_per_pod > 0) tolerate_gpu_taint(pod_spec, role_settings.gpu_resource);
  std::vector<std::string> nodes;
  for (const AvoidedNode& node : job.status.avoided_nodes) nodes.push_back(node.name);
  avoid_nodes(pod_spec, nodes);
  attract(pod_spec, c);
  add_security_context(pod_spec, c.options.user_id);
  scheduling::join_gang(c.backend, gang_of(c), role, out);
  return out;
}

std::string status_ca_mark(const ObjectOptions& options) {
  const std::string ca = status_ca(options);
  return ca.empty() ? ca : hex_hash(ca);
}

std::string config_hash(const RLJobSpec& spec) {
  return hex_hash(spec_to_json(spec).value("config", Json::object()).dump());
}

}  // namespace trireme::controller
