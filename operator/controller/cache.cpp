#include "operator/controller/cache.h"

#include <zlib.h>

#include <set>

#include "api/runtime.h"
#include "base/error.h"
#include "base/text.h"
#include "operator/kube/events.h"

namespace trireme::controller {
namespace {

constexpr size_t kMaxMessageBytes = 4096;  // of a container's last lines, as the kubelet caps them

const Json& at(const Json& object, const char* key) {
  static const Json kNull;
  if (!object.is_object()) return kNull;
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}

std::string text(const Json& object, const char* key) {
  const Json& value = at(object, key);
  return value.is_string() ? value.get<std::string>() : std::string();
}

int64_t number(const Json& object, const char* key, int64_t otherwise = 0) {
  const Json& value = at(object, key);
  return value.is_number_integer() ? value.get<int64_t>() : otherwise;
}

bool has_number(const Json& object, const char* key, double& out) {
  const Json& value = at(object, key);
  if (!value.is_number()) return false;
  out = value.get<double>();
  return true;
}

int64_t label_number(const Json& metadata, const char* label, int64_t otherwise) {
  return parse_int(text(at(metadata, "labels"), label)).value_or(otherwise);
}

const Json* condition(const Json& status, const char* type) {
  const Json& list = at(status, "conditions");
  if (!list.is_array()) return nullptr;
  for (const Json& entry : list) {
    if (text(entry, "type") == type) return &entry;
  }
  return nullptr;
}

// One vocabulary for what kubelets, schedulers and controllers call the same thing.
std::string disruption_reason(const std::string& reason) {
  if (reason == "PreemptionByScheduler") return "Preempted";
  if (reason == "DeletionByTaintManager" || reason == "DeletionByPodGC") return "NodeLost";
  if (reason == "EvictionByEvictionAPI" || reason == "TerminationByKubelet") return "Evicted";
  return reason;
}

std::string pod_reason(const std::string& reason) {
  if (reason == "Preempting" || reason == "Preempted") return "Preempted";
  if (reason == "Shutdown" || reason == "NodeShutdown" || reason == "Terminated") return "NodeShutdown";
  if (reason == "UnexpectedAdmissionError" || reason == "NodeAffinity" || starts_with(reason, "OutOf"))
    return "AdmissionRejected";
  return reason;
}

// The container whose end explains the pod's: the main one if it failed, else the first that failed.
const Json* failed_container(const Json& status) {
  const Json* first = nullptr;
  for (const char* list : {"containerStatuses", "initContainerStatuses"}) {
    const Json& containers = at(status, list);
    if (!containers.is_array()) continue;
    for (const Json& container : containers) {
      const Json& ended = at(at(container, "state"), "terminated");
      if (!ended.is_object() || number(ended, "exitCode") == 0) continue;
      const std::string name = text(container, "name");
      if (name == kTrainerContainer || name == kRewardContainer) return &ended;
      if (!first) first = &ended;
    }
  }
  return first;
}

// A launcher leaves an account of the rank that failed first (trainer/launch/launch.h); anything else is text.
std::string explanation(const std::string& message) {
  const Json account = message.empty() || message[0] != '{' ? Json() : Json::parse(message, nullptr, false);
  if (!account.is_object() || !account.contains("rank") || !account.contains("logTail")) return message;
  return "rank " + std::to_string(number(account, "rank")) + " failed first (" + text(account, "cause") + "):\n" +
         text(account, "logTail");
}

std::string waiting_reason(const Json& status) {
  for (const char* list : {"initContainerStatuses", "containerStatuses"}) {
    const Json& containers = at(status, list);
    if (!containers.is_array()) continue;
    for (const Json& container : containers) {
      const Json& waiting = at(at(container, "state"), "waiting");
      const std::string reason = text(waiting, "reason");
      if (reason.empty() || reason == "ContainerCreating" || reason == "PodInitializing") continue;
      const std::string message = text(waiting, "message");
      return message.empty() ? reason : reason + ": " + message;
    }
  }
  return {};
}

void read_trouble(const Json& status, CachedPod& pod) {
  CachedPod::Trouble trouble;
  if (const Json* disrupted = condition(status, "DisruptionTarget");
      disrupted && text(*disrupted, "status") == "True") {
    trouble.reason = disruption_reason(text(*disrupted, "reason"));
    trouble.message = text(*disrupted, "message");
  }
  if (pod.phase == PodPhase::kFailed) {
    const std::string own = pod_reason(text(status, "reason"));
    if (trouble.reason.empty()) trouble.reason = own;
    if (const Json* ended = failed_container(status)) {
      trouble.exit_code = number(*ended, "exitCode");
      if (const int64_t signal = number(*ended, "signal"); signal > 0) trouble.signal = signal;
      if (trouble.reason.empty()) trouble.reason = text(*ended, "reason");
      if (const std::string log = text(*ended, "message"); !log.empty()) trouble.message = explanation(log);
      trouble.finished_ms = kube::parse_time(text(*ended, "finishedAt")).value_or(0);
    }
    if (trouble.message.empty()) trouble.message = text(status, "message");
    if (trouble.reason.empty()) trouble.reason = "Error";
  } else if (pod.phase == PodPhase::kPending && trouble.reason.empty()) {
    if (const Json* scheduled = condition(status, "PodScheduled"); scheduled && text(*scheduled, "status") != "True") {
      trouble.message = text(*scheduled, "message");
    } else {
      trouble.message = waiting_reason(status);
    }
  }
  if (trouble.reason.empty() && trouble.message.empty()) return;
  if (trouble.message.size() > kMaxMessageBytes) trouble.message.erase(0, trouble.message.size() - kMaxMessageBytes);
  pod.trouble = std::make_unique<CachedPod::Trouble>(std::move(trouble));
}

// What most jobs have in common: a job's own text is packed into a few hundred bytes beside it.
const std::string& dictionary() {
  static const std::string text = to_json(RLJob{}).dump();
  return text;
}

constexpr int kWindowBits = -13;  // 8 KiB, no header
constexpr int kMemoryLevel = 6;

std::string pack(std::string& text) {
  z_stream z{};
  TRIREME_CHECK(
      deflateInit2(&z, Z_DEFAULT_COMPRESSION, Z_DEFLATED, kWindowBits, kMemoryLevel, Z_DEFAULT_STRATEGY) == Z_OK,
      "zlib could not start to pack");
  deflateSetDictionary(&z, reinterpret_cast<const Bytef*>(dictionary().data()), static_cast<uInt>(dictionary().size()));
  std::string packed(deflateBound(&z, static_cast<uLong>(text.size())), '\0');
  z.next_in = reinterpret_cast<Bytef*>(text.data());
  z.avail_in = static_cast<uInt>(text.size());
  z.next_out = reinterpret_cast<Bytef*>(packed.data());
  z.avail_out = static_cast<uInt>(packed.size());
  const int result = deflate(&z, Z_FINISH);
  packed.resize(z.total_out);
  deflateEnd(&z);
  TRIREME_CHECK(result == Z_STREAM_END, "zlib could not pack a job");
  return std::string(packed);  // of its own size
}

std::string unpack(std::string packed, size_t size) {
  z_stream z{};
  TRIREME_CHECK(inflateInit2(&z, kWindowBits) == Z_OK, "zlib could not start to unpack");
  inflateSetDictionary(&z, reinterpret_cast<const Bytef*>(dictionary().data()), static_cast<uInt>(dictionary().size()));
  std::string text(size, '\0');
  z.next_in = reinterpret_cast<Bytef*>(packed.data());
  z.avail_in = static_cast<uInt>(packed.size());
  z.next_out = reinterpret_cast<Bytef*>(text.data());
  z.avail_out = static_cast<uInt>(text.size());
  const int result = inflate(&z, Z_FINISH);
  const bool whole = result == Z_STREAM_END && z.total_out == size;
  inflateEnd(&z);
  TRIREME_CHECK(whole, "zlib could not unpack a job");
  return text;
}

}  // namespace

Json CachedJob::json() const { return Json::parse(unpack(packed, unpacked_size)); }

kube::JsonFields job_fields() {
  return kube::JsonFields(
      {"metadata.generation", "metadata.creationTimestamp", "metadata.deletionTimestamp", "spec", "status"});
}

kube::JsonFields pod_fields() {
  return kube::JsonFields({"metadata.namespace", "metadata.name", "metadata.uid", "metadata.resourceVersion",
                           "metadata.labels", "metadata.deletionTimestamp", "spec.nodeName", "spec.schedulingGates",
                           "status.phase", "status.reason", "status.message", "status.conditions.type",
                           "status.conditions.status", "status.conditions.reason", "status.conditions.message",
                           "status.containerStatuses.name", "status.containerStatuses.state",
                           "status.initContainerStatuses.name", "status.initContainerStatuses.state"});
}

kube::JsonFields service_fields() { return kube::JsonFields({"metadata.labels", "metadata.deletionTimestamp"}); }

kube::JsonFields node_fields() {
  return kube::JsonFields({"status.conditions.type", "status.conditions.status", "spec.taints.key"});
}

CachedJob read_job(const Json& object, const std::string& manager_name) {
  CachedJob job;
  Json typed = object;  // items of a list carry no type
  typed["apiVersion"] = kApiVersion;
  typed["kind"] = kRLJobKind;
  std::string whole = typed.dump();
  job.unpacked_size = static_cast<uint32_t>(whole.size());
  job.packed = pack(whole);
  const Json& metadata = at(object, "metadata");
  job.uid = text(metadata, "uid");
  job.resource_version = text(metadata, "resourceVersion");
  job.generation = number(metadata, "generation");
  job.deleting = !text(metadata, "deletionTimestamp").empty();
  const std::string manager = text(at(object, "spec"), "managedBy");
  job.managed = manager.empty() || manager == manager_name;
  const Json& status = at(object, "status");
  job.phase = text(status, "phase");
  job.attempt = number(status, "attempt");
  job.restarts = number(status, "restarts");
  job.free_restarts = number(status, "freeRestarts");
  if (const Json& roles = at(status, "roles"); roles.is_array()) {
    for (const Json& role : roles) {
      job.pods_wanted += number(role, "desired");
      job.pods_created += number(role, "created");
      job.pods_ready += number(role, "ready");
    }
  }
  if (const Json& progress = at(status, "progress"); progress.is_object()) {
    job.has_progress = true;
    job.step = number(progress, "step");
    job.max_steps = number(progress, "maxSteps");
    job.checkpoint_step = number(progress, "lastCheckpointStep", -1);
    job.has_reward = has_number(progress, "reward", job.reward);
    has_number(progress, "stepSeconds", job.step_seconds);
    has_number(progress, "tokensPerSecond", job.tokens_per_second);
  }
  return job;
}

CachedPod read_pod(const Json& object) {
  CachedPod pod;
  const Json& metadata = at(object, "metadata");
  const Json& labels = at(metadata, "labels");
  const Json& spec = at(object, "spec");
  const Json& status = at(object, "status");
  pod.uid = text(metadata, "uid");
  pod.job = text(labels, kLabelJob);
  pod.role = text(labels, kLabelRole);
  pod.rank = static_cast<int32_t>(label_number(metadata, kLabelRank, -1));
  pod.attempt = static_cast<int32_t>(label_number(metadata, kLabelAttempt, 0));
  pod.deleting = !text(metadata, "deletionTimestamp").empty();
  pod.node = text(spec, "nodeName");
  pod.scheduled = !pod.node.empty();
  pod.gated = at(spec, "schedulingGates").is_array() && !at(spec, "schedulingGates").empty();
  const std::string phase = text(status, "phase");
  pod.phase = phase == "Running"     ? PodPhase::kRunning
              : phase == "Succeeded" ? PodPhase::kSucceeded
              : phase == "Failed"    ? PodPhase::kFailed
                                     : PodPhase::kPending;
  const Json* ready = condition(status, "Ready");
  pod.ready = ready && text(*ready, "status") == "True";
  read_trouble(status, pod);
  return pod;
}

CachedService read_service(const Json& object) {
  const Json& metadata = at(object, "metadata");
  return {text(at(metadata, "labels"), kLabelJob), label_number(metadata, kLabelAttempt, 0)};
}

CachedNode read_node(const Json& object) {
  CachedNode node;
  const Json* ready = condition(at(object, "status"), "Ready");
  if (ready && text(*ready, "status") != "True") node.state = NodeState::kNotReady;
  const Json& taints = at(at(object, "spec"), "taints");
  if (taints.is_array()) {
    for (const Json& taint : taints) {
      if (text(taint, "key") == "node.kubernetes.io/out-of-service") node.state = NodeState::kGone;
    }
  }
  return node;
}

ObservedPod observe(const std::string& name, const CachedPod& cached) {
  ObservedPod pod;
  pod.name = name;
  pod.uid = cached.uid;
  pod.role = cached.role;
  pod.rank = cached.rank;
  pod.attempt = cached.attempt;
  pod.phase = cached.phase;
  pod.scheduled = cached.scheduled;
  pod.ready = cached.ready;
  pod.gated = cached.gated;
  pod.deleting = cached.deleting;
  pod.node = cached.node;
  if (cached.trouble) {
    pod.reason = cached.trouble->reason;
    pod.message = cached.trouble->message;
    pod.exit_code = cached.trouble->exit_code;
    pod.signal = cached.trouble->signal;
    pod.finished_ms = cached.trouble->finished_ms;
  }
  return pod;
}

}  // namespace trireme::controller
