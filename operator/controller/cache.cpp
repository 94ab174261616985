#include "operator/controller/cache.h"

#include <zlib.h>

#include <algorithm>
#include <set>

#include "api/runtime.h"
#include "base/error.h"
#include "base/text.h"
#include "operator/controller/network_policy.h"
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

// What a kubelet says when it does not admit a pod (pkg/kubelet: lifecycle, topologymanager, cpumanager, sysctl,
// volumemanager). OutOf is followed by the resource.
bool refused_by_kubelet(const std::string& reason) {
  static const std::set<std::string> kReasons = {"AppArmor",
                                                 "InitContainerRestartPolicyForbidden",
                                                 "InvalidNodeInfo",
                                                 "NodeAffinity",
                                                 "NodeName",
                                                 "NodePorts",
                                                 "PodFeatureUnsupported",
                                                 "PodLevelResourcesNotSupported",
                                                 "PodOSNotSupported",
                                                 "PodOSSelectorNodeLabelDoesNotMatch",
                                                 "SMTAlignmentError",
                                                 "SupplementalGroupsPolicyNotSupported",
                                                 "SysctlForbidden",
                                                 "TaintToleration",
                                                 "TopologyAffinityError",
                                                 "UnexpectedAdmissionError",
                                                 "UnexpectedPredicateFailureType",
                                                 "UnknownReason",
                                                 "VolumeAttachmentLimitExceeded",
                                                 "inconsistentCPUAllocationError"};
  return kReasons.count(reason) > 0 || starts_with(reason, "OutOf");
}

std::string pod_reason(const std::string& reason) {
  if (reason == "Preempting" || reason == "Preempted") return "Preempted";
  if (reason == "Shutdown" || reason == "NodeShutdown" || reason == "Terminated") return "NodeShutdown";
  return refused_by_kubelet(reason) ? "AdmissionRejected" : reason;
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
void read_last_words(const std::string& message, CachedPod::Trouble& trouble) {
  const Json account = message.empty() || message[0] != '{' ? Json() : Json::parse(message, nullptr, false);
  if (!account.is_object() || !account.contains("rank") || !account.contains("logTail")) {
    trouble.log = message;
    return;
  }
  const std::string whose = text(account, "role") == "critic" ? "critic rank " : "rank ";
  trouble.message = whose + std::to_string(number(account, "rank")) + " failed first (" + text(account, "cause") + ")";
  trouble.log = text(account, "logTail");
}

// The kubelet says by turns that the pull failed and that it waits before the next.
std::string waiting_word(const std::string& reason) {
  return reason == "ImagePullBackOff" || reason == "RegistryUnavailable" ? "ErrImagePull" : reason;
}

void read_waiting(const Json& status, CachedPod::Trouble& trouble) {
  for (const char* list : {"initContainerStatuses", "containerStatuses"}) {
    const Json& containers = at(status, list);
    if (!containers.is_array()) continue;
    for (const Json& container : containers) {
      const Json& waiting = at(at(container, "state"), "waiting");
      const std::string reason = text(waiting, "reason");
      if (reason.empty() || reason == "ContainerCreating" || reason == "PodInitializing") continue;
      const std::string message = text(waiting, "message");
      trouble.waiting = waiting_word(reason);
      trouble.message = message.empty() ? reason : reason + ": " + message;
      return;
    }
  }
}

// Exit code of the container that the pod is about, when it has ended.
std::optional<int32_t> main_exit(const Json& status, const std::string& role) {
  const Json& containers = at(status, "containerStatuses");
  if (!containers.is_array()) return std::nullopt;
  for (const Json& container : containers) {
    if (text(container, "name") != (role == "reward" ? kRewardContainer : kTrainerContainer)) continue;
    const Json& ended = at(at(container, "state"), "terminated");
    if (ended.is_object()) return static_cast<int32_t>(number(ended, "exitCode"));
  }
  return std::nullopt;
}

void cut(std::string& text) {
  if (text.size() > kMaxMessageBytes) text.erase(0, text.size() - kMaxMessageBytes);
}

void read_trouble(const Json& status, CachedPod& pod) {
  CachedPod::Trouble trouble;
  if (const Json* disrupted = condition(status, "DisruptionTarget");
      disrupted && text(*disrupted, "status") == "True") {
    trouble.reason = disruption_reason(text(*disrupted, "reason"));
    trouble.message = text(*disrupted, "message");
  }
  if (pod.main_exit.value_or(pod.phase == PodPhase::kFailed) != 0) {
    const std::string own = pod_reason(text(status, "reason"));
    if (trouble.reason.empty()) trouble.reason = own;
    if (const Json* ended = failed_container(status)) {
      trouble.exit_code = number(*ended, "exitCode");
      if (const int64_t signal = number(*ended, "signal"); signal > 0) trouble.signal = signal;
      if (trouble.reason.empty()) trouble.reason = text(*ended, "reason");
      read_last_words(text(*ended, "message"), trouble);
      trouble.finished_ms = kube::parse_time(text(*ended, "finishedAt")).value_or(0);
      const int64_t started_ms = kube::parse_time(text(*ended, "startedAt")).value_or(trouble.finished_ms);
      trouble.lived_ms = std::max<int64_t>(0, trouble.finished_ms - started_ms);
    }
    if (trouble.message.empty()) trouble.message = text(status, "message");
    if (trouble.reason.empty()) trouble.reason = "Error";
  } else if (pod.phase == PodPhase::kPending && trouble.reason.empty()) {
    if (const Json* scheduled = condition(status, "PodScheduled"); scheduled && text(*scheduled, "status") != "True") {
      trouble.message = text(*scheduled, "message");
    } else {
      read_waiting(status, trouble);
    }
  }
  if (trouble.reason.empty() && trouble.message.empty()) return;
  cut(trouble.message);
  cut(trouble.log);
  pod.trouble = std::make_unique<CachedPod::Trouble>(std::move(trouble));
}

const Json* controller_of(const Json& metadata) {
  const Json& owners = at(metadata, "ownerReferences");
  if (!owners.is_array()) return nullptr;
  for (const Json& owner : owners) {
    const Json& controls = at(owner, "controller");
    if (controls.is_boolean() && controls.get<bool>()) return text(owner, "kind") == kRLJobKind ? &owner : nullptr;
  }
  return nullptr;
}

bool controlled_as_labelled(const Json& metadata) {
  const Json* owner = controller_of(metadata);
  const Json& labels = at(metadata, "labels");
  const std::string uid = text(labels, kLabelJobUid);
  return owner && !uid.empty() && text(*owner, "uid") == uid && text(*owner, "name") == text(labels, kLabelJob);
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
  return kube::JsonFields({"metadata.namespace",
                           "metadata.name",
                           "metadata.uid",
                           "metadata.resourceVersion",
                           "metadata.labels",
                           "metadata.deletionTimestamp",
                           "metadata.ownerReferences.kind",
                           "metadata.ownerReferences.name",
                           "metadata.ownerReferences.uid",
                           "metadata.ownerReferences.controller",
                           "spec.nodeName",
                           "spec.schedulingGates",
                           "status.phase",
                           "status.reason",
                           "status.message",
                           "status.conditions.type",
                           "status.conditions.status",
                           "status.conditions.reason",
                           "status.conditions.message",
                           "status.containerStatuses.name",
                           "status.containerStatuses.state",
                           "status.initContainerStatuses.name",
                           "status.initContainerStatuses.state"});
}

kube::JsonFields service_fields() {
  return kube::JsonFields({"metadata.uid", "metadata.labels", "metadata.deletionTimestamp",
                           "metadata.ownerReferences.kind", "metadata.ownerReferences.name",
                           "metadata.ownerReferences.uid", "metadata.ownerReferences.controller"});
}

kube::JsonFields policy_fields() {
  return kube::JsonFields({"metadata.uid", "metadata.ownerReferences.kind", "metadata.ownerReferences.uid",
                           "metadata.ownerReferences.controller", "spec"});
}

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
  const Json* terminating = condition(status, "Terminating");
  job.terminating = terminating && text(*terminating, "status") == "True";
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
  pod.job_uid = hash64(text(labels, kLabelJobUid));
  pod.status_ca = text(labels, kLabelStatusCa);
  pod.rank = static_cast<int32_t>(label_number(metadata, kLabelRank, -1));
  pod.attempt = static_cast<int32_t>(label_number(metadata, kLabelAttempt, 0));
  pod.incarnation = static_cast<int32_t>(label_number(metadata, kLabelIncarnation, 0));
  pod.failures = static_cast<int32_t>(label_number(metadata, kLabelFailures, 0));
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
  pod.owned = controlled_as_labelled(metadata);
  pod.main_exit = main_exit(status, pod.role);
  read_trouble(status, pod);
  return pod;
}

CachedService read_service(const Json& object) {
  const Json& metadata = at(object, "metadata");
  const Json& labels = at(metadata, "labels");
  return {text(metadata, "uid"), text(labels, kLabelJob), text(labels, kLabelGang),
          label_number(metadata, kLabelAttempt, 0), controlled_as_labelled(metadata)};
}

CachedPolicy read_policy(const Json& object) {
  const Json& metadata = at(object, "metadata");
  const Json* owner = controller_of(metadata);
  return {text(metadata, "uid"), owner ? hash64(text(*owner, "uid")) : 0, policy_fingerprint(at(object, "spec"))};
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

bool is_own(const kube::ObjectKey& key, const CachedPod& pod, const kube::ObjectKey& job) {
  return key.ns == job.ns && pod.owned && pod.job == job.name && pod.rank >= 0 && pod.attempt > 0 &&
         key.name == pod_name(job.name, pod.role, pod.rank, pod.attempt, pod.incarnation);
}

bool is_own(const kube::ObjectKey& key, const CachedService& service, const kube::ObjectKey& job) {
  return key.ns == job.ns && service.owned && service.job == job.name && service.attempt > 0 &&
         key.name == attempt_service_name(job.name, service.attempt);
}

bool controlled_by(const Json& object, const std::string& job_uid) {
  const Json* owner = controller_of(at(object, "metadata"));
  return owner && (job_uid.empty() || text(*owner, "uid") == job_uid);
}

ObservedPod observe(const std::string& name, const CachedPod& cached) {
  ObservedPod pod;
  pod.name = name;
  pod.uid = cached.uid;
  pod.role = cached.role;
  pod.rank = cached.rank;
  pod.attempt = cached.attempt;
  pod.incarnation = cached.incarnation;
  pod.failures_before = std::max<int32_t>(0, cached.failures);
  pod.phase = cached.phase;
  pod.scheduled = cached.scheduled;
  pod.ready = cached.ready;
  pod.gated = cached.gated;
  pod.deleting = cached.deleting;
  pod.node = cached.node;
  pod.status_ca = cached.status_ca;
  if (cached.main_exit) pod.main_exit = *cached.main_exit;
  if (cached.trouble) {
    pod.reason = cached.trouble->reason;
    pod.message = cached.trouble->message;
    pod.log = cached.trouble->log;
    pod.waiting = cached.trouble->waiting;
    pod.lived_ms = cached.trouble->lived_ms;
    pod.exit_code = cached.trouble->exit_code;
    pod.signal = cached.trouble->signal;
    pod.finished_ms = cached.trouble->finished_ms;
  }
  return pod;
}

}  // namespace trireme::controller
