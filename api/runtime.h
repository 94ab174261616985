// What the operator and the local runner both derive from an RLJob: sizes, names, the trainer's command line and
// environment, the topology document, and a view of the parts of a pod template that matter to them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "api/rljob.h"
#include "topology/topology.h"

namespace trireme {

// ---- sizes -------------------------------------------------------------------------------------------------------

int64_t processes_per_pod(const RoleSpec& role);
int64_t world_size(const RoleSpec& role);  // replicas x processes per pod
// dp filled in; equals the given sizes with dp 1 if they do not divide the world (validation refuses that). Of
// generation pods tp and ep are an engine's, and dp is the number of engines.
Layout layout_of(const RoleSpec& role);

struct RoleRef {
  std::string name;  // "actor", ...
  const RoleSpec* spec;
};
// The roles that are present, in the order actor, critic, generation, reward.
std::vector<RoleRef> roles_of(const RLJobSpec& spec);
const RoleSpec& actor_of(const RLJobSpec& spec);  // throws Error(kUser) if there is none
int64_t total_pods(const RLJobSpec& spec);
// Pods of a role without which no step ends: all of them, of generation minReplicas.
int64_t core_pods(const RoleRef& role);
int64_t core_pods(const RLJobSpec& spec);
int64_t total_gpus(const RLJobSpec& spec);
// Do the role's pods ask for RDMA devices? Those of trainers with GPUs do; a reward role speaks HTTP only.
bool uses_rdma(const RLJobSpec& spec, const std::string& role);
// Do they exchange bytes with other pods by NCCL, which must go over RDMA (spec.network.rdma.require)?
bool needs_rdma(const RLJobSpec& spec, const std::string& role);
// A role's pods are in the network of their nodes, by spec.network.hostNetwork or their template.
bool uses_host_network(const RLJobSpec& spec, const RoleSpec& role);

// ---- names -------------------------------------------------------------------------------------------------------

std::string pod_hostname(const std::string& job, const std::string& role, int64_t index);  // j-actor-0
// j-actor-0-a1. A generation or reward pod that is made again in its attempt is told apart by its incarnation, which is
// above 0: j-reward-0-a1-i2.
std::string pod_name(const std::string& job, const std::string& role, int64_t index, int64_t attempt,
                     int64_t incarnation = 0);
std::string attempt_service_name(const std::string& job, int64_t attempt);      // j-a1
std::string topology_config_map_name(const std::string& job, int64_t attempt);  // j-topology-a1
std::string config_config_map_name(const std::string& job);                     // j-config
std::string reward_service_name(const std::string& job);                        // j-reward
std::string network_policy_name(const std::string& job);                        // j-network
std::string pod_address(const std::string& job, const std::string& role, int64_t index,
                        int64_t attempt);  // j-actor-0.j-a1

// ---- command line and environment --------------------------------------------------------------------------------

inline constexpr const char* kTrainerContainer = "trainer";
inline constexpr const char* kRewardContainer = "reward";
inline constexpr const char* kConfigMountPath = "/etc/trireme/config";                // config.yaml in it
inline constexpr const char* kTopologyMountPath = "/etc/trireme/topology";            // topology.json in it
inline constexpr const char* kStatusTokenMountPath = "/var/run/secrets/trireme.dev";  // token, ca.crt
inline constexpr const char* kStatusCaKey = "ca.crt";  // in the attempt's ConfigMap, and beside the token
inline constexpr const char* kStatusTokenAudience = "trireme.dev/status";

// Exit codes of the trainer, part of the contract with the failure policy.
inline constexpr int kExitConfig = 10;         // a mistake in the configuration: never retried
inline constexpr int kExitCommunication = 20;  // a peer or the network failed
inline constexpr int kExitNumerics = 21;       // NaN guard
inline constexpr int kExitNode = 30;           // the node's device is at fault: avoid it
inline constexpr int kExitCheckpointed = 40;   // SIGTERM, checkpoint written: free restart

// Of the configuration: how many ranks an engine has, and how many of them share its experts.
inline constexpr const char* kEngineTensorKey = "policy.generation.tensor_parallel_size";
inline constexpr const char* kEngineExpertKey = "policy.generation.expert_parallel_size";

// trireme launch --nproc-per-node P -- train --algorithm grpo --config FILE --layout tp=..,.. [key=value ...]
// The file is `config_path` (the mounted or local file), unless spec.config.path names one in the image. Of the critic
// P and the layout are its own, all else is the actor's: the trainer compares their configurations. `role` is actor or
// critic; throws Error(kUser) if the job has no such role.
std::vector<std::string> trainer_command(const RLJob& job, const std::string& config_path,
                                         const std::string& role = "actor");
// trireme engine --config FILE algorithm=grpo [key=value ...], with the actor's file and overrides: a generation pod
// whose configuration differs from the actor's may not join. A pod of several processes: trireme launch
// --nproc-per-node P -- engine ...; P / tp engines, each of tp ranks in a row.
std::vector<std::string> engine_command(const RLJob& job, const std::string& config_path);
// What a role's pods run, unless their template says otherwise: empty for the reward role, whose image knows.
std::vector<std::string> role_command(const RLJob& job, const std::string& role, const std::string& config_path);
// The overrides at the end of both: model, checkpoint folder, cluster sizes, an engine's sizes that are above 1, then
// spec.config.overrides.
std::vector<std::string> trainer_overrides(const RLJob& job);

struct PodPlace {
  std::string role = "actor";
  int64_t index = 0;
  int64_t attempt = 1;
  int64_t incarnation = 0;
  std::string master_address;  // host name or IP of actor 0
  int64_t master_port = 0;     // 0: spec.network.masterPort
  int64_t work_port = 0;       // 0: spec.network.workPort
  std::string topology_file;   // empty: not set
};
// MASTER_ADDR MASTER_PORT NODE_RANK NNODES PET_* TRIREME_*; set by us on every container of the pod. NODE_RANK, NNODES
// and PET_* are of the pod's role. Where the critic has pods actor and critic get TRIREME_CRITIC_RANKS, and the critic,
// which meets at the actor's MASTER_ADDR, TRIREME_ACTOR_RANKS: its ranks of the job stand behind the actor's.
// Generation pods get no NODE_RANK, NNODES, PET_* but TRIREME_WORK_URL, where actor 0 gives work out (it is told the
// port by TRIREME_WORK_PORT, which is set only when the job has a generation role), and TRIREME_ENGINE_NAME. The
// operator adds TRIREME_POD_NAME and TRIREME_NODE_NAME, and to actor pods TRIREME_STATUS_URL, TRIREME_STATUS_TOKEN_FILE
// and TRIREME_STATUS_CA_FILE.
// NCCL_* and GLOO_* by spec.network are not reserved: where a container's template sets one, that one counts.
// TRIREME_REQUIRE_RDMA=1 with NCCL_NET (IB, of /efa resources "AWS Libfabric"): NCCL fails instead of talking to other
// nodes over sockets, and the trainer ends. Another plugin's name is the template's to say, but not that of sockets.
std::map<std::string, std::string> pod_environment(const RLJob& job, const PodPlace& place);
// Of it what init containers get: what they run is no rank of the job, and has no others to wait for.
std::map<std::string, std::string> init_environment(std::map<std::string, std::string> of_pod);
// Names users may not set in a template: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, NODE_RANK, NNODES,
// PET_*, and TRIREME_* names that we set.
bool is_reserved_env(const std::string& name);

// topology.json:
// {"job","attempt","layout":{...},"nodes":[{"index","role","host","ranks":[first,last]}],"groups":{"tp":[[...]],...},
// "roles":[{"name","replicas","processesPerPod","engine":{"tp","ep"}}]}. Nodes are the pods of actor and critic, with
// ranks of the job: the critic's stand behind the actor's. Of the rest all but roles are the actor's. Groups are left
// out above 4096 ranks (they follow from the layout). hosts, critic_hosts: one per pod of the role. Of generation,
// replicas is the number that the attempt began with; engine is there where the role says that one has several ranks,
// its ep where the role says one above 1: what the role leaves out the configuration may say.
Json topology_document(const RLJob& job, int64_t attempt, const std::vector<std::string>& hosts,
                       const std::vector<std::string>& critic_hosts = {});

// What a process of a pod (PodPlace) was started with: RANK, WORLD_SIZE, TRIREME_ATTEMPT, NODE_RANK and --layout.
struct RankPlace {
  int64_t rank = 0;
  int64_t world = 1;
  int64_t attempt = -1;    // -1: not known
  int64_t node_rank = -1;  // of its pod; -1: not known
  Layout layout;
};
// Compares a topology document, read from `file`, with what the actor's rank that read it has been given otherwise:
// attempt, world, layout, the pod it lies in, its groups. Throws Error(kUser) naming the file and the first difference.
void check_topology_document(const Json& document, const std::string& file, const RankPlace& place);

// ---- pod templates -----------------------------------------------------------------------------------------------

struct MountView {
  std::string volume;
  std::string path;
  std::string sub_path;
  bool read_only = false;
};
struct ContainerView {
  std::string name;
  std::string image;  // spec.image if the template names none
  std::vector<std::string> command;
  std::vector<std::string> args;
  std::vector<std::pair<std::string, std::string>> env;  // literal values only, in order
  std::vector<std::string> env_from_cluster;             // names whose value only a cluster knows (valueFrom)
  std::string working_dir;
  std::vector<MountView> mounts;
};
enum class VolumeKind { kClaim, kEmptyDir, kConfigMap, kSecret, kHostPath, kOther };
struct VolumeView {
  std::string name;
  VolumeKind kind = VolumeKind::kOther;
  std::string source;  // claim, config map or secret name, or host path
};
struct PodView {
  std::vector<ContainerView> init_containers;
  std::vector<ContainerView> containers;  // the trainer's is there even if the template does not mention it
  std::vector<VolumeView> volumes;
  const ContainerView* container(const std::string& name) const;  // null if absent
};
// Tolerant of anything: parts of a wrong type read as absent (validation reports them).
PodView pod_view(const RLJobSpec& spec, const RoleSpec& role, const std::string& main_container = kTrainerContainer);
// Each claim of the templates, and how many pods of which roles mount it.
struct ClaimUse {
  std::string claim;
  int64_t pods = 0;
  std::vector<std::string> roles;
};
std::vector<ClaimUse> claim_uses(const RLJobSpec& spec);

}  // namespace trireme
