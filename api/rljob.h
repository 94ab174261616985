// RLJob trireme.dev/v1alpha1: the manifest's types, their defaults (the member initialisers), JSON and YAML forms.
// Shared by the operator and the trainer's local runner. Every field is listed once in api/fields.h, which drives
// reading, writing and the test that compares these types with crds/trireme.dev_rljobs.yaml.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

using Json = nlohmann::json;

inline constexpr const char* kApiGroup = "trireme.dev";
inline constexpr const char* kApiVersion = "trireme.dev/v1alpha1";
inline constexpr const char* kRLJobKind = "RLJob";
inline constexpr const char* kRLJobPlural = "rljobs";
inline constexpr const char* kDefaultImage = "docker.io/trireme/trainer:0.1.0";
inline constexpr const char* kDefaultManager = "trireme.dev/operator";

enum class Algorithm { kGrpo, kSft, kPpo };  // "GRPO" "SFT" "PPO"
enum class GangBackend {
  kAuto,
  kNone,
  kKubernetes,
  kKueue,
  kVolcano,
  kCoscheduling,
  kKai
};                                                                                    // "Auto" "None" ...  "KAI"
enum class FailureAction { kFailJob, kRestart, kRestartFree, kAvoidNodeAndRestart };  // "FailJob" "Restart" ...
enum class HangAction { kEvent, kRestart };                                           // "Event" "Restart"
enum class PodRetention { kNone, kFailed, kAll };                                     // "None" "Failed" "All"
enum class Fabric { kAuto, kInfiniBand, kRoce, kNone };                               // "Auto" "InfiniBand" ...

const char* to_string(Algorithm value);
const char* to_string(GangBackend value);
const char* to_string(FailureAction value);
const char* to_string(HangAction value);
const char* to_string(PodRetention value);
const char* to_string(Fabric value);

// ---- spec --------------------------------------------------------------------------------------------------------

struct ModelSource {
  std::string source;  // directory in the pod, or hub id in its cache; wins over policy.model_name. Empty: the config's
  std::string revision;
};

struct ConfigMapKeyRef {
  std::string name;
  std::string key = "config.yaml";
};

// The trainer's own configuration (NeMo-RL keys): exactly one of inline, configMapRef, path.
struct ConfigSource {
  Json inline_config;  // "inline"; null if absent, else an object, verbatim
  std::optional<ConfigMapKeyRef> config_map_ref;
  std::string path;                    // a file in the trainer image, e.g. configs/quickstart.yaml
  std::vector<std::string> overrides;  // key.sub=value, applied last
};

struct Parallelism {
  int64_t tp = 1;
  int64_t cp = 1;
  int64_t ep = 1;
  int64_t etp = 1;
  int64_t pp = 1;
  std::optional<int64_t> dp;  // derived from the role's size if absent
};

struct RoleSpec {
  int64_t replicas = 1;                      // pods; those of generation may be changed while the job runs
  int64_t gpus_per_pod = 0;                  // "gpusPerPod"; 0: CPU
  std::optional<int64_t> processes_per_pod;  // absent: one per GPU, or 1 on CPU
  Parallelism parallelism;
  std::string gpu_resource = "nvidia.com/gpu";
  std::optional<int64_t> port;          // reward role: where its HTTP service listens
  std::optional<int64_t> min_replicas;  // "minReplicas", generation role: so many must be ready; absent: 1
  Json pod_template;                    // "template": a PodTemplateSpec, verbatim; null if absent
};

struct Roles {
  std::optional<RoleSpec> actor;  // required by validation
  std::optional<RoleSpec> critic;
  std::optional<RoleSpec> generation;  // dedicated generation pods; absent: the actor generates (colocated)
  std::optional<RoleSpec> reward;      // pods with an HTTP reward service
};

struct Scheduling {
  GangBackend backend = GangBackend::kAuto;
  std::string scheduler_name;
  std::string required_topology;             // node label key: the whole gang inside one value of it
  std::string preferred_topology;            // the same as a wish
  int64_t scheduling_timeout_seconds = 600;  // a gang that cannot be placed by then is released; 0: never
};

struct Rdma {
  std::string resource_name;  // e.g. rdma/ib
  int64_t count = 1;          // per pod
  bool require = true;        // NCCL_NET is set and may name no sockets: NCCL fails instead of falling back to them
  std::string devices;        // NCCL_IB_HCA: mlx5, =mlx5_0:1,mlx5_1:1, ^mlx5_bond_0. Empty: NCCL takes all it sees
  std::optional<int64_t> gid_index;      // NCCL_IB_GID_INDEX, with RoCE only; absent: NCCL finds it
  std::optional<int64_t> traffic_class;  // NCCL_IB_TC; absent: NCCL's own
};

struct Network {
  bool host_network = false;
  int64_t master_port = 29500;
  int64_t work_port = 29501;  // actor 0's server of work for generation pods
  int64_t metrics_port = 9400;
  std::string shared_memory = "8Gi";  // size limit of /dev/shm (a Kubernetes quantity)
  std::string socket_interface;       // NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME
  Fabric fabric = Fabric::kAuto;      // which of NCCL's settings pods get; a template's own win
  std::optional<Rdma> rdma;
};

// Fields of one rule are ANDed, entries of one list ORed; an empty list matches everything.
struct FailureRule {
  std::vector<int64_t> on_exit_codes;
  std::vector<int64_t> on_signals;
  std::vector<std::string> on_pod_reasons;  // OOMKilled, Evicted, Preempted, NodeLost, Deleted, ...
  std::vector<std::string> roles;
  FailureAction action = FailureAction::kRestart;
};

struct FailurePolicy {
  int64_t max_restarts = 3;
  int64_t restart_window_steps = 0;           // this many good steps forgive all counted restarts; 0: never
  std::vector<FailureRule> rules;             // first match wins; the built-in rules come after them
  int64_t max_free_restarts = 50;             // in a row, without a new step or ten minutes of running between them
  int64_t termination_timeout_seconds = 300;  // a pod that takes longer to go is named in the condition Terminating
  int64_t max_avoided_nodes = 8;
  // So many failures in a row (each within ten minutes of running) of one generation or reward pod are mended by a new
  // pod in the same attempt.
  int64_t max_replacements = 10;
};

struct Health {
  int64_t startup_deadline_seconds = 1800;
  int64_t heartbeat_timeout_seconds = 600;
  std::map<std::string, int64_t> phase_timeout_seconds;  // per phase name; wins over the heartbeat timeout
  int64_t node_not_ready_grace_seconds = 300;  // a node that is NotReady for less has not taken its pods along
  int64_t generation_timeout_seconds = 600;    // with fewer than minReplicas of generation ready the attempt fails
  HangAction action = HangAction::kRestart;    // of a hang, and of a start that takes too long
};

struct Checkpoint {
  std::string directory;       // wins over checkpointing.checkpoint_dir. Empty: the config's
  bool on_termination = true;  // save on SIGTERM
  int64_t timeout_seconds = 300;
};

struct RLJobSpec {
  Algorithm algorithm = Algorithm::kGrpo;
  bool suspend = false;
  std::string managed_by = kDefaultManager;
  std::string queue_name;
  std::string priority_class_name;
  std::string image = kDefaultImage;  // of the containers in the templates that name none
  std::string image_pull_policy;
  ModelSource model;
  ConfigSource config;
  Roles roles;
  Scheduling scheduling;
  Network network;
  FailurePolicy failure_policy;
  Health health;
  Checkpoint checkpoint;
  std::optional<int64_t> active_deadline_seconds;  // since status.admittedTime
  std::optional<int64_t> ttl_seconds_after_finished;
  PodRetention pod_retention = PodRetention::kFailed;
};

// ---- status ------------------------------------------------------------------------------------------------------

struct Condition {
  std::string type;    // Accepted Admitted GangScheduled PodsReady Running Progressing Suspended Restarting Terminating
                       // Complete Failed
  std::string status;  // True False Unknown
  std::string reason;
  std::string message;
  std::string last_transition_time;
  std::optional<int64_t> observed_generation;
};

struct RoleStatus {
  std::string name;
  int64_t desired = 0;
  int64_t created = 0;
  int64_t scheduled = 0;
  int64_t ready = 0;
  int64_t succeeded = 0;
  int64_t failed = 0;
  int64_t restarts = 0;  // pods of this attempt that were replaced alone
  int64_t world_size = 0;
  std::string selector;
};

struct Progress {
  int64_t step = 0;
  int64_t max_steps = 0;
  std::string phase;
  std::optional<double> reward;
  std::optional<double> step_seconds;
  std::optional<double> tokens_per_second;
  std::optional<double> response_length;
  std::optional<double> validation_accuracy;
  std::map<std::string, double> phase_seconds;
  std::optional<int64_t> weight_version;
  std::optional<double> trajectory_age;  // of a sample's oldest token, in weight versions; mean
  std::optional<int64_t> last_checkpoint_step;
  std::string last_heartbeat_time;
};

struct LastFailure {
  std::string role;
  std::optional<int64_t> rank;
  std::string pod;
  std::string pod_uid;
  std::string node;
  std::optional<int64_t> exit_code;
  std::optional<int64_t> signal;
  std::string reason;
  std::string message;   // the operator's account
  std::string log_tail;  // the container's last lines, as they are
  std::string action;    // a FailureAction, or ReplacePod
  std::string time;
  int64_t attempt = 0;
};

// Of the generation role, for the scale subresource, whose paths may not reach into status.roles.
struct ScaleStatus {
  int64_t replicas = 0;  // pods that are there
  std::string selector;
};

struct AvoidedNode {
  std::string name;
  std::string reason;
  std::string until;  // RFC 3339
};

struct Rendezvous {
  std::string master;
  int64_t port = 0;
  std::string topology_config_map;
};

struct RLJobStatus {
  int64_t observed_generation = 0;
  std::string phase;    // Pending Queued Starting Running Restarting Suspended Complete Failed
  std::string waiting;  // why the job does not run, as one word: ErrImagePull, QuotaExceeded, PodNotGone, ...
  int64_t attempt = 0;
  int64_t restarts = 0;       // counted against the budget, all time
  int64_t free_restarts = 0;  // preemption, node loss, and the like
  int64_t budget_used = 0;    // restarts since the window last forgave them
  int64_t window_step = 0;    // step at which the last counted restart happened
  int64_t free_streak = 0;    // free restarts since the job last got on
  int64_t free_step = 0;      // highest step at a free restart
  std::string start_time;
  std::string admitted_time;  // when all pods of an attempt first had a node, since the start or the last resume
  std::string attempt_start_time;
  std::string running_time;  // when this attempt's rendezvous was complete
  std::string completion_time;
  std::string config_hash;
  std::string reservation;  // Kueue's pod group, which attempts may share; empty: the attempt's own
  std::vector<Condition> conditions;
  std::vector<RoleStatus> roles;
  std::optional<ScaleStatus> generation;
  std::optional<Progress> progress;
  std::optional<LastFailure> last_failure;
  std::vector<AvoidedNode> avoided_nodes;
  std::optional<Rendezvous> rendezvous;
};

struct ObjectMeta {
  std::string name;
  std::string namespace_;  // "namespace"
  std::string uid;
  std::string resource_version;
  int64_t generation = 0;
  std::string creation_timestamp;
  std::string deletion_timestamp;
  std::map<std::string, std::string> labels;
  std::map<std::string, std::string> annotations;
};

struct RLJob {
  ObjectMeta metadata;
  RLJobSpec spec;
  RLJobStatus status;
};

// ---- reading and writing -----------------------------------------------------------------------------------------

// Something wrong with one field.
struct Issue {
  std::string path;     // spec.roles.actor.parallelism.tp
  std::string message;  // one sentence, does not repeat the path
  int line = 0;         // in the YAML file, 1-based; 0: unknown
};
// What one object is told at most.
inline constexpr size_t kMaxIssues = 200;
// "FILE:12: spec.x: message" per line (without what is unknown), at most `limit` lines.
std::string to_string(const std::vector<Issue>& issues, std::string_view file = {}, size_t limit = 20);

struct ParseOptions {
  bool strict = true;  // unknown fields are errors; false for objects from a server that may be newer
};

// Never throws for bad input: what could not be read is in `issues` and has its default in the result.
RLJob rljob_from_json(const Json& object, std::vector<Issue>& issues, const ParseOptions& options = {});
// Throws Error(kUser) with all issues.
RLJob rljob_from_json(const Json& object, const ParseOptions& options = {});

// With every default written out; empty optionals, strings, lists and maps are left out. Without status if it is empty.
Json to_json(const RLJob& job);
Json spec_to_json(const RLJobSpec& spec);
Json status_to_json(const RLJobStatus& status);

// A manifest file: the RLJobs in it, and the other documents (claims, config maps) verbatim.
struct Manifest {
  std::vector<RLJob> jobs;
  std::vector<Json> others;
  // Line of a field path in jobs[i] ("spec.roles.actor"), of its nearest parent if it is not in the file; 0: unknown
  // (JSON).
  int line_of(size_t job, const std::string& path) const;
  // Fills in the lines of issues about jobs[job], e.g. those of validate().
  void add_lines(size_t job, std::vector<Issue>& issues) const;
  std::vector<std::map<std::string, int>> lines;  // per job: path -> line
};

// YAML or JSON text, one or more documents. Throws Error(kUser) that names `file`, lines, field paths, nearest keys.
Manifest parse_manifest(std::string_view text, std::string_view file);
// The same for a file that must hold exactly one RLJob.
RLJob parse_rljob(std::string_view text, std::string_view file);

// JSON text with bounds on size, depth and number of values (hostile input gives Error(kUser), never a crash). The
// bounds hold while it is parsed: what is refused was never built.
Json parse_json_bounded(std::string_view text, std::string_view what);

inline constexpr size_t kMaxManifestBytes = 3 << 20;
inline constexpr int kMaxDepth = 64;
// Of one document; a key counts as a value, too. A value takes up to about 100 bytes of memory beside its text, so that
// a tree has at most some 10 MB and its text.
inline constexpr size_t kMaxValues = 100000;
// Of a specification, with its defaults: as JSON text, and its values and keys. A pod's body is about as large as its
// role's template, and an attempt makes thousands of pods. Two specifications fit into kMaxValues.
inline constexpr size_t kMaxSpecBytes = 256 << 10;
inline constexpr size_t kMaxSpecValues = 40000;

}  // namespace trireme
