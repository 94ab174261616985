// Every field of the RLJob types, once: name in JSON, member, limits. Visitors over these lists read, write, check
// limits, and compare the types with the CRD. A visitor has: template <class T> void operator()(const char*, T&,
// Limits).
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "api/rljob.h"

namespace trireme::fields {

// Numbers: the value. Strings: the length in bytes. Lists and maps: the number of entries.
struct Limits {
  int64_t min = 0;
  int64_t max = -1;  // -1: the default of the type, see max_of
};

inline constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
inline constexpr int64_t kMaxString = 1024;
inline constexpr int64_t kMaxEntries = 64;

inline constexpr Limits kPositive{1, kMaxInt};
inline constexpr Limits kSize{1, 1024};  // one axis of a layout
inline constexpr Limits kPort{1, 65535};
inline constexpr Limits kAnyInt{std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
inline constexpr Limits kLongText{0, 32768};

template <class E>
struct EnumNames;  // kNames: array of (value, name), in declaration order
template <>
struct EnumNames<Algorithm> {
  static constexpr std::array<std::pair<Algorithm, const char*>, 3> kNames{
      {{Algorithm::kGrpo, "GRPO"}, {Algorithm::kSft, "SFT"}, {Algorithm::kPpo, "PPO"}}};
};
template <>
struct EnumNames<GangBackend> {
  static constexpr std::array<std::pair<GangBackend, const char*>, 7> kNames{
      {{GangBackend::kAuto, "Auto"},
       {GangBackend::kNone, "None"},
       {GangBackend::kKubernetes, "Kubernetes"},
       {GangBackend::kKueue, "Kueue"},
       {GangBackend::kVolcano, "Volcano"},
       {GangBackend::kCoscheduling, "Coscheduling"},
       {GangBackend::kKai, "KAI"}}};
};
template <>
struct EnumNames<FailureAction> {
  static constexpr std::array<std::pair<FailureAction, const char*>, 4> kNames{
      {{FailureAction::kFailJob, "FailJob"},
       {FailureAction::kRestart, "Restart"},
       {FailureAction::kRestartFree, "RestartFree"},
       {FailureAction::kAvoidNodeAndRestart, "AvoidNodeAndRestart"}}};
};
template <>
struct EnumNames<HangAction> {
  static constexpr std::array<std::pair<HangAction, const char*>, 2> kNames{
      {{HangAction::kEvent, "Event"}, {HangAction::kRestart, "Restart"}}};
};
template <>
struct EnumNames<PodRetention> {
  static constexpr std::array<std::pair<PodRetention, const char*>, 3> kNames{
      {{PodRetention::kNone, "None"}, {PodRetention::kFailed, "Failed"}, {PodRetention::kAll, "All"}}};
};

template <>
struct EnumNames<Fabric> {
  static constexpr std::array<std::pair<Fabric, const char*>, 4> kNames{
      {{Fabric::kAuto, "Auto"}, {Fabric::kInfiniBand, "InfiniBand"}, {Fabric::kRoce, "RoCE"}, {Fabric::kNone, "None"}}};
};

// S is T or const T, so that one list serves readers and writers.
template <class S, class T>
concept As = std::same_as<std::remove_const_t<S>, T>;

template <class V, As<ModelSource> S>
void visit_fields(V& v, S& s) {
  v("source", s.source, {});
  v("revision", s.revision, {});
}
template <class V, As<ConfigMapKeyRef> S>
void visit_fields(V& v, S& s) {
  v("name", s.name, {0, 253});
  v("key", s.key, {0, 253});
}
template <class V, As<ConfigSource> S>
void visit_fields(V& v, S& s) {
  v("inline", s.inline_config, {});
  v("configMapRef", s.config_map_ref, {});
  v("path", s.path, {});
  v("overrides", s.overrides, {0, 256});
}
template <class V, As<Parallelism> S>
void visit_fields(V& v, S& s) {
  v("tp", s.tp, kSize);
  v("cp", s.cp, kSize);
  v("ep", s.ep, kSize);
  v("etp", s.etp, kSize);
  v("pp", s.pp, kSize);
  v("dp", s.dp, {1, 65536});
}
template <class V, As<RoleSpec> S>
void visit_fields(V& v, S& s) {
  v("replicas", s.replicas, {1, 4096});
  v("gpusPerPod", s.gpus_per_pod, {0, 64});
  v("processesPerPod", s.processes_per_pod, {1, 256});
  v("parallelism", s.parallelism, {});
  v("gpuResource", s.gpu_resource, {0, 253});
  v("port", s.port, kPort);
  v("minReplicas", s.min_replicas, {1, 4096});
  v("template", s.pod_template, {});
}
template <class V, As<Roles> S>
void visit_fields(V& v, S& s) {
  v("actor", s.actor, {});
  v("critic", s.critic, {});
  v("generation", s.generation, {});
  v("reward", s.reward, {});
}
template <class V, As<Scheduling> S>
void visit_fields(V& v, S& s) {
  v("backend", s.backend, {});
  v("schedulerName", s.scheduler_name, {0, 253});
  v("requiredTopology", s.required_topology, {0, 317});
  v("preferredTopology", s.preferred_topology, {0, 317});
  v("schedulingTimeoutSeconds", s.scheduling_timeout_seconds, {});
}
template <class V, As<Rdma> S>
void visit_fields(V& v, S& s) {
  v("resourceName", s.resource_name, {0, 253});
  v("count", s.count, {1, 64});
  v("require", s.require, {});
  v("devices", s.devices, {0, 253});
  v("gidIndex", s.gid_index, {0, 255});
  v("trafficClass", s.traffic_class, {0, 255});
}
template <class V, As<Network> S>
void visit_fields(V& v, S& s) {
  v("hostNetwork", s.host_network, {});
  v("masterPort", s.master_port, kPort);
  v("workPort", s.work_port, kPort);
  v("metricsPort", s.metrics_port, kPort);
  v("sharedMemory", s.shared_memory, {0, 32});
  v("socketInterface", s.socket_interface, {0, 253});
  v("fabric", s.fabric, {});
  v("rdma", s.rdma, {});
}
template <class V, As<FailureRule> S>
void visit_fields(V& v, S& s) {
  v("onExitCodes", s.on_exit_codes, {});
  v("onSignals", s.on_signals, {});
  v("onPodReasons", s.on_pod_reasons, {});
  v("roles", s.roles, {0, 4});
  v("action", s.action, {});
}
template <class V, As<FailurePolicy> S>
void visit_fields(V& v, S& s) {
  v("maxRestarts", s.max_restarts, {0, 100000});
  v("restartWindowSteps", s.restart_window_steps, {});
  v("rules", s.rules, {0, 32});
  v("maxFreeRestarts", s.max_free_restarts, {0, 100000});
  v("terminationTimeoutSeconds", s.termination_timeout_seconds, {1, 86400});
  v("maxAvoidedNodes", s.max_avoided_nodes, {0, 64});
  v("maxReplacements", s.max_replacements, {0, 100000});
}
template <class V, As<Health> S>
void visit_fields(V& v, S& s) {
  v("startupDeadlineSeconds", s.startup_deadline_seconds, kPositive);
  v("heartbeatTimeoutSeconds", s.heartbeat_timeout_seconds, kPositive);
  v("phaseTimeoutSeconds", s.phase_timeout_seconds, {0, 16});
  v("nodeNotReadyGraceSeconds", s.node_not_ready_grace_seconds, {0, 86400});
  v("generationTimeoutSeconds", s.generation_timeout_seconds, kPositive);
  v("action", s.action, {});
}
template <class V, As<Checkpoint> S>
void visit_fields(V& v, S& s) {
  v("directory", s.directory, {});
  v("onTermination", s.on_termination, {});
  v("timeoutSeconds", s.timeout_seconds, {1, 86400});
}
template <class V, As<RLJobSpec> S>
void visit_fields(V& v, S& s) {
  v("algorithm", s.algorithm, {});
  v("suspend", s.suspend, {});
  v("managedBy", s.managed_by, {0, 253});
  v("queueName", s.queue_name, {0, 253});
  v("priorityClassName", s.priority_class_name, {0, 253});
  v("image", s.image, {});
  v("imagePullPolicy", s.image_pull_policy, {0, 32});
  v("model", s.model, {});
  v("config", s.config, {});
  v("roles", s.roles, {});
  v("scheduling", s.scheduling, {});
  v("network", s.network, {});
  v("failurePolicy", s.failure_policy, {});
  v("health", s.health, {});
  v("checkpoint", s.checkpoint, {});
  v("activeDeadlineSeconds", s.active_deadline_seconds, kPositive);
  v("ttlSecondsAfterFinished", s.ttl_seconds_after_finished, {});
  v("podRetention", s.pod_retention, {});
}

template <class V, As<Condition> S>
void visit_fields(V& v, S& s) {
  v("type", s.type, {0, 316});
  v("status", s.status, {0, 16});
  v("reason", s.reason, {});
  v("message", s.message, kLongText);
  v("lastTransitionTime", s.last_transition_time, {0, 64});
  v("observedGeneration", s.observed_generation, kAnyInt);
}
template <class V, As<RoleStatus> S>
void visit_fields(V& v, S& s) {
  v("name", s.name, {0, 63});
  v("desired", s.desired, {});
  v("created", s.created, {});
  v("scheduled", s.scheduled, {});
  v("ready", s.ready, {});
  v("succeeded", s.succeeded, {});
  v("failed", s.failed, {});
  v("restarts", s.restarts, {});
  v("worldSize", s.world_size, {});
  v("selector", s.selector, {});
}
template <class V, As<Progress> S>
void visit_fields(V& v, S& s) {
  v("step", s.step, kAnyInt);
  v("maxSteps", s.max_steps, kAnyInt);
  v("phase", s.phase, {});
  v("reward", s.reward, {});
  v("stepSeconds", s.step_seconds, {});
  v("tokensPerSecond", s.tokens_per_second, {});
  v("responseLength", s.response_length, {});
  v("validationAccuracy", s.validation_accuracy, {});
  v("phaseSeconds", s.phase_seconds, {0, 64});
  v("weightVersion", s.weight_version, kAnyInt);
  v("trajectoryAge", s.trajectory_age, {});
  v("lastCheckpointStep", s.last_checkpoint_step, kAnyInt);
  v("lastHeartbeatTime", s.last_heartbeat_time, {0, 64});
}
template <class V, As<LastFailure> S>
void visit_fields(V& v, S& s) {
  v("role", s.role, {0, 63});
  v("rank", s.rank, kAnyInt);
  v("pod", s.pod, {0, 253});
  v("podUid", s.pod_uid, {0, 64});
  v("node", s.node, {0, 253});
  v("exitCode", s.exit_code, kAnyInt);
  v("signal", s.signal, kAnyInt);
  v("reason", s.reason, {});
  v("message", s.message, kLongText);
  v("logTail", s.log_tail, kLongText);
  v("action", s.action, {0, 63});
  v("time", s.time, {0, 64});
  v("attempt", s.attempt, kAnyInt);
}
template <class V, As<ScaleStatus> S>
void visit_fields(V& v, S& s) {
  v("replicas", s.replicas, {});
  v("selector", s.selector, {});
}
template <class V, As<AvoidedNode> S>
void visit_fields(V& v, S& s) {
  v("name", s.name, {0, 253});
  v("reason", s.reason, {});
  v("until", s.until, {0, 64});
}
template <class V, As<Rendezvous> S>
void visit_fields(V& v, S& s) {
  v("master", s.master, {0, 253});
  v("port", s.port, {0, 65535});
  v("topologyConfigMap", s.topology_config_map, {0, 253});
}
template <class V, As<RLJobStatus> S>
void visit_fields(V& v, S& s) {
  v("observedGeneration", s.observed_generation, kAnyInt);
  v("phase", s.phase, {0, 63});
  v("waiting", s.waiting, {0, 253});
  v("attempt", s.attempt, kAnyInt);
  v("restarts", s.restarts, kAnyInt);
  v("freeRestarts", s.free_restarts, kAnyInt);
  v("budgetUsed", s.budget_used, kAnyInt);
  v("windowStep", s.window_step, kAnyInt);
  v("freeStreak", s.free_streak, kAnyInt);
  v("freeStep", s.free_step, kAnyInt);
  v("startTime", s.start_time, {0, 64});
  v("admittedTime", s.admitted_time, {0, 64});
  v("attemptStartTime", s.attempt_start_time, {0, 64});
  v("runningTime", s.running_time, {0, 64});
  v("completionTime", s.completion_time, {0, 64});
  v("configHash", s.config_hash, {0, 64});
  v("reservation", s.reservation, {0, 253});
  v("conditions", s.conditions, {0, 16});
  v("roles", s.roles, {0, 8});
  v("generation", s.generation, {});
  v("progress", s.progress, {});
  v("lastFailure", s.last_failure, {});
  v("avoidedNodes", s.avoided_nodes, {0, 64});
  v("rendezvous", s.rendezvous, {});
}
template <class V, As<ObjectMeta> S>
void visit_fields(V& v, S& s) {
  v("name", s.name, {0, 253});
  v("namespace", s.namespace_, {0, 253});
  v("uid", s.uid, {});
  v("resourceVersion", s.resource_version, {});
  v("generation", s.generation, kAnyInt);
  v("creationTimestamp", s.creation_timestamp, {0, 64});
  v("deletionTimestamp", s.deletion_timestamp, {0, 64});
  v("labels", s.labels, {0, 4096});
  v("annotations", s.annotations, {0, 4096});
}

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};
template <class T>
struct IsMap : std::false_type {};
template <class T>
struct IsMap<std::map<std::string, T>> : std::true_type {};

template <class T>
constexpr int64_t max_of(Limits limits) {
  if (limits.max >= 0) return limits.max;
  if constexpr (IsOptional<T>::value) {
    return max_of<typename T::value_type>(limits);
  } else if constexpr (std::same_as<T, std::string>) {
    return kMaxString;
  } else if constexpr (IsVector<T>::value || IsMap<T>::value) {
    return kMaxEntries;
  } else {
    return kMaxInt;
  }
}

}  // namespace trireme::fields
