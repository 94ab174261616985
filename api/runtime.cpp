// Derived sizes, names, the trainer's command line and environment, the topology document.
#include "api/runtime.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"

namespace trireme {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

// What a fabric says about NCCL. What NCCL finds out better by itself is left to it: the GID index of RoCE changes with
// each virtual function that a pod gets, and NCCL takes the one of RoCE v2 and IPv4.
void set_fabric(const Network& network, bool rdma, bool between_pods, std::map<std::string, std::string>& env) {
  switch (network.fabric) {
    case Fabric::kAuto:
      break;
    case Fabric::kInfiniBand:
      env["NCCL_IB_DISABLE"] = "0";
      break;
    case Fabric::kRoce:
      env["NCCL_IB_DISABLE"] = "0";
      env["NCCL_IB_ROCE_VERSION_NUM"] = "2";
      break;
    case Fabric::kNone:
      env["NCCL_IB_DISABLE"] = "1";
      break;
  }
  if (!rdma) return;
  if (!network.rdma->devices.empty()) env["NCCL_IB_HCA"] = network.rdma->devices;
  if (network.rdma->gid_index) env["NCCL_IB_GID_INDEX"] = number(*network.rdma->gid_index);
  if (network.rdma->traffic_class) env["NCCL_IB_TC"] = number(*network.rdma->traffic_class);
  if (!network.rdma->require) return;
  env["TRIREME_REQUIRE_RDMA"] = "1";
  // So that NCCL fails where it would fall back to sockets. One pod needs no network, nor has NCCL to find one there.
  if (between_pods) env["NCCL_NET"] = ends_with(network.rdma->resource_name, "/efa") ? "AWS Libfabric" : "IB";
}

// The actor, or PPO's critic.
const RoleSpec& trainer_role(const RLJobSpec& spec, const std::string& role) {
  if (role != "critic") return actor_of(spec);
  if (!spec.roles.critic) fail_user("spec.roles.critic is missing");
  return *spec.roles.critic;
}

// Of a pod whose processes are ranks of the job, numbered within their role.
void set_ranks(const RLJobSpec& spec, const PodPlace& place, std::map<std::string, std::string>& env) {
  const RoleSpec& own = trainer_role(spec, place.role);
  env["PET_MASTER_ADDR"] = env["MASTER_ADDR"];
  env["PET_MASTER_PORT"] = env["MASTER_PORT"];
  env["NODE_RANK"] = env["PET_NODE_RANK"] = number(place.index);
  env["NNODES"] = env["PET_NNODES"] = number(own.replicas);
  env["PET_NPROC_PER_NODE"] = number(processes_per_pod(own));
  env["TRIREME_LAYOUT"] = to_string(layout_of(own));
  if (!spec.roles.critic) return;
  env["TRIREME_CRITIC_RANKS"] = number(world_size(*spec.roles.critic));
  if (place.role == "critic") env["TRIREME_ACTOR_RANKS"] = number(world_size(actor_of(spec)));
}

constexpr int64_t kMaxRanksWithGroups = 4096;

}  // namespace

int64_t processes_per_pod(const RoleSpec& role) {
  return role.processes_per_pod.value_or(std::max<int64_t>(role.gpus_per_pod, 1));
}

int64_t world_size(const RoleSpec& role) { return role.replicas * processes_per_pod(role); }

Layout layout_of(const RoleSpec& role) {
  const Parallelism& p = role.parallelism;
  Layout layout{.tp = p.tp, .cp = p.cp, .ep = p.ep, .dp = 1, .pp = p.pp, .etp = p.etp};
  layout.dp = p.dp ? *p.dp : derive_dp(layout, world_size(role)).value_or(1);
  return layout;
}

std::vector<RoleRef> roles_of(const RLJobSpec& spec) {
  std::vector<RoleRef> roles;
  const auto add = [&](const char* name, const std::optional<RoleSpec>& role) {
    if (role) roles.push_back({name, &*role});
  };
  add("actor", spec.roles.actor);
  add("critic", spec.roles.critic);
  add("generation", spec.roles.generation);
  add("reward", spec.roles.reward);
  return roles;
}

const RoleSpec& actor_of(const RLJobSpec& spec) {
  if (!spec.roles.actor) fail_user("spec.roles.actor is missing");
  return *spec.roles.actor;
}

int64_t total_pods(const RLJobSpec& spec) {
  int64_t total = 0;
  for (const RoleRef& role : roles_of(spec)) total += role.spec->replicas;
  return total;
}

int64_t core_pods(const RoleRef& role) {
  if (role.name != "generation") return role.spec->replicas;
  return std::min(role.spec->replicas, role.spec->min_replicas.value_or(1));
}

int64_t core_pods(const RLJobSpec& spec) {
  int64_t total = 0;
  for (const RoleRef& role : roles_of(spec)) total += core_pods(role);
  return total;
}

int64_t total_gpus(const RLJobSpec& spec) {
  int64_t total = 0;
  for (const RoleRef& role : roles_of(spec)) total += role.spec->replicas * role.spec->gpus_per_pod;
  return total;
}

bool uses_rdma(const RLJobSpec& spec, const std::string& role) {
  if (!spec.network.rdma || role == "reward") return false;
  const std::vector<RoleRef> roles = roles_of(spec);
  return std::any_of(roles.begin(), roles.end(),
                     [&](const RoleRef& ref) { return ref.name == role && ref.spec->gpus_per_pod > 0; });
}

bool needs_rdma(const RLJobSpec& spec, const std::string& role) {
  if (!uses_rdma(spec, role) || !spec.network.rdma->require) return false;
  // Of the critic only its own ranks talk to each other by NCCL.
  if (role == "critic") return spec.roles.critic->replicas > 1;
  return spec.roles.generation || actor_of(spec).replicas > 1;
}

bool uses_host_network(const RLJobSpec& spec, const RoleSpec& role) {
  if (spec.network.host_network) return true;
  if (!role.pod_template.is_object()) return false;
  const auto pod = role.pod_template.find("spec");
  if (pod == role.pod_template.end() || !pod->is_object()) return false;
  const auto host = pod->find("hostNetwork");
  return host != pod->end() && host->is_boolean() && host->get<bool>();
}

std::string pod_hostname(const std::string& job, const std::string& role, int64_t index) {
  return job + "-" + role + "-" + number(index);
}
std::string pod_name(const std::string& job, const std::string& role, int64_t index, int64_t attempt,
                     int64_t incarnation) {
  return pod_hostname(job, role, index) + "-a" + number(attempt) +
         (incarnation > 0 ? "-i" + number(incarnation) : std::string());
}
std::string attempt_service_name(const std::string& job, int64_t attempt) { return job + "-a" + number(attempt); }
std::string topology_config_map_name(const std::string& job, int64_t attempt) {
  return job + "-topology-a" + number(attempt);
}
std::string config_config_map_name(const std::string& job) { return job + "-config"; }
std::string reward_service_name(const std::string& job) { return job + "-reward"; }
std::string network_policy_name(const std::string& job) { return job + "-network"; }
std::string pod_address(const std::string& job, const std::string& role, int64_t index, int64_t attempt) {
  return pod_hostname(job, role, index) + "." + attempt_service_name(job, attempt);
}

std::vector<std::string> trainer_overrides(const RLJob& job) {
  const RLJobSpec& spec = job.spec;
  const RoleSpec& actor = actor_of(spec);
  std::vector<std::string> overrides;
  if (!spec.model.source.empty()) overrides.push_back("policy.model_name=" + spec.model.source);
  if (!spec.checkpoint.directory.empty())
    overrides.push_back("checkpointing.checkpoint_dir=" + spec.checkpoint.directory);
  overrides.push_back("cluster.num_nodes=" + number(actor.replicas));
  overrides.push_back("cluster.gpus_per_node=" + number(processes_per_pod(actor)));
  if (spec.roles.generation) {
    const Parallelism& engine = spec.roles.generation->parallelism;
    if (engine.tp > 1) overrides.push_back(kEngineTensorKey + ("=" + number(engine.tp)));
    if (engine.ep > 1) overrides.push_back(kEngineExpertKey + ("=" + number(engine.ep)));
  }
  overrides.insert(overrides.end(), spec.config.overrides.begin(), spec.config.overrides.end());
  return overrides;
}

std::vector<std::string> trainer_command(const RLJob& job, const std::string& config_path, const std::string& role) {
  const RLJobSpec& spec = job.spec;
  const RoleSpec& own = trainer_role(spec, role);
  std::vector<std::string> command = {"trireme",
                                      "launch",
                                      "--nproc-per-node",
                                      number(processes_per_pod(own)),
                                      "--",
                                      "train",
                                      "--algorithm",
                                      to_lower(to_string(spec.algorithm)),
                                      "--config",
                                      spec.config.path.empty() ? config_path : spec.config.path,
                                      "--layout",
                                      to_string(layout_of(own))};
  for (std::string& item : trainer_overrides(job)) command.push_back(std::move(item));
  return command;
}

std::vector<std::string> engine_command(const RLJob& job, const std::string& config_path) {
  const RLJobSpec& spec = job.spec;
  std::vector<std::string> command = {"trireme"};
  const int64_t processes = spec.roles.generation ? processes_per_pod(*spec.roles.generation) : 1;
  if (processes > 1) command.insert(command.end(), {"launch", "--nproc-per-node", number(processes), "--"});
  command.insert(command.end(), {"engine", "--config", spec.config.path.empty() ? config_path : spec.config.path,
                                 "algorithm=" + to_lower(to_string(spec.algorithm))});
  for (std::string& item : trainer_overrides(job)) command.push_back(std::move(item));
  return command;
}

std::vector<std::string> role_command(const RLJob& job, const std::string& role, const std::string& config_path) {
  if (role == "reward") return {};
  return role == "generation" ? engine_command(job, config_path) : trainer_command(job, config_path, role);
}

std::map<std::string, std::string> pod_environment(const RLJob& job, const PodPlace& place) {
  const RLJobSpec& spec = job.spec;
  (void)actor_of(spec);  // throws where there is none
  std::map<std::string, std::string> env = {
      {"TRIREME_JOB", job.metadata.name},
      {"TRIREME_JOB_UID", job.metadata.uid},
      {"TRIREME_NAMESPACE", job.metadata.namespace_},
      {"TRIREME_ROLE", place.role},
      {"TRIREME_POD_INDEX", number(place.index)},
      {"TRIREME_ATTEMPT", number(place.attempt)},
      {"TRIREME_METRICS_PORT", number(spec.network.metrics_port)},
  };
  if (spec.roles.reward && spec.roles.reward->port) {
    env["TRIREME_REWARD_URL"] =
        "http://" + reward_service_name(job.metadata.name) + ":" + number(*spec.roles.reward->port);
  }
  if (place.role == "reward") {
    if (spec.roles.reward->port) env["TRIREME_REWARD_PORT"] = number(*spec.roles.reward->port);
    return env;
  }
  const std::string port = number(place.master_port > 0 ? place.master_port : spec.network.master_port);
  const std::string work_port = number(place.work_port > 0 ? place.work_port : spec.network.work_port);
  env["MASTER_ADDR"] = place.master_address;
  env["MASTER_PORT"] = port;
  if (place.role == "generation") {
    env["TRIREME_WORK_URL"] = "http://" + place.master_address + ":" + work_port;
    env["TRIREME_ENGINE_NAME"] = pod_name(job.metadata.name, place.role, place.index, place.attempt, place.incarnation);
  } else {
    set_ranks(spec, place, env);
    if (place.role == "actor" && spec.roles.generation) env["TRIREME_WORK_PORT"] = work_port;
    env["TRIREME_CHECKPOINT_ON_TERMINATION"] = spec.checkpoint.on_termination ? "1" : "0";
    env["TRIREME_TERMINATION_SECONDS"] = number(spec.checkpoint.timeout_seconds);
  }
  if (!place.topology_file.empty()) env["TRIREME_TOPOLOGY_FILE"] = place.topology_file;
  if (!spec.network.socket_interface.empty()) {
    env["NCCL_SOCKET_IFNAME"] = env["GLOO_SOCKET_IFNAME"] = spec.network.socket_interface;
  }
  set_fabric(spec.network, uses_rdma(spec, place.role), needs_rdma(spec, place.role), env);
  return env;
}

std::map<std::string, std::string> init_environment(std::map<std::string, std::string> of_pod) {
  for (const char* name : {"TRIREME_CRITIC_RANKS", "TRIREME_ACTOR_RANKS", "TRIREME_WORK_PORT"}) of_pod.erase(name);
  return of_pod;
}

bool is_reserved_env(const std::string& name) {
  static const std::vector<std::string> names = {"RANK",        "LOCAL_RANK",  "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                                                 "MASTER_ADDR", "MASTER_PORT", "NODE_RANK",  "NNODES"};
  return starts_with(name, "PET_") || starts_with(name, "TRIREME_") ||
         std::find(names.begin(), names.end(), name) != names.end();
}

Json topology_document(const RLJob& job, int64_t attempt, const std::vector<std::string>& hosts,
                       const std::vector<std::string>& critic_hosts) {
  const RoleSpec& actor = actor_of(job.spec);
  const Layout layout = layout_of(actor);
  const int64_t processes = processes_per_pod(actor);
  Json document = {{"job", job.metadata.name},
                   {"attempt", attempt},
                   {"worldSize", layout.world()},
                   {"processesPerPod", processes},
                   {"layout",
                    {{"tp", layout.tp},
                     {"cp", layout.cp},
                     {"ep", layout.ep},
                     {"dp", layout.dp},
                     {"pp", layout.pp},
                     {"etp", layout.etp}}}};
  Json nodes = Json::array();
  const auto add_nodes = [&](const char* role, const std::vector<std::string>& of, int64_t first, int64_t each) {
    for (size_t i = 0; i < of.size(); ++i, first += each)
      nodes.push_back({{"index", i}, {"role", role}, {"host", of[i]}, {"ranks", {first, first + each - 1}}});
  };
  add_nodes("actor", hosts, 0, processes);
  if (job.spec.roles.critic)
    add_nodes("critic", critic_hosts, world_size(actor), processes_per_pod(*job.spec.roles.critic));
  document["nodes"] = std::move(nodes);
  Json roles = Json::array();
  for (const RoleRef& role : roles_of(job.spec)) {
    roles.push_back(
        {{"name", role.name}, {"replicas", role.spec->replicas}, {"processesPerPod", processes_per_pod(*role.spec)}});
    const Parallelism& p = role.spec->parallelism;
    if (role.name != "generation" || p.tp == 1) continue;
    Json& engine = roles.back()["engine"] = {{"tp", p.tp}};
    if (p.ep > 1) engine["ep"] = p.ep;
  }
  document["roles"] = std::move(roles);
  if (layout.world() <= kMaxRanksWithGroups) {
    Json all = Json::object();
    for (const Axis axis : {Axis::kTp, Axis::kCp, Axis::kDp, Axis::kPp, Axis::kEtp, Axis::kEp, Axis::kEdp}) {
      if (group_size(layout, axis) > 1) all[to_string(axis)] = groups(layout, axis);
    }
    document["groups"] = std::move(all);
  }
  return document;
}

void check_topology_document(const Json& document, const std::string& file, const RankPlace& place) {
  const auto differ = [&](const std::string& what, const std::string& theirs, const std::string& ours) {
    fail_user(file + " says " + what + " " + theirs + ", but this rank was started with " + ours +
              "; both must come from the same attempt of the same RLJob");
  };
  const auto same_number = [&](const std::string& what, int64_t theirs, int64_t ours) {
    if (theirs != ours) differ(what, number(theirs), number(ours));
  };
  try {
    if (place.attempt >= 0) same_number("attempt", document.at("attempt").get<int64_t>(), place.attempt);
    same_number("worldSize", document.at("worldSize").get<int64_t>(), place.world);
    const Json& sizes = document.at("layout");
    const auto size = [&](const char* key) { return sizes.at(key).get<int64_t>(); };
    const Layout theirs{
        .tp = size("tp"), .cp = size("cp"), .ep = size("ep"), .dp = size("dp"), .pp = size("pp"), .etp = size("etp")};
    if (theirs != place.layout) differ("layout", to_string(theirs), to_string(place.layout));
    if (place.node_rank >= 0) {
      bool found = false;
      for (const Json& node : document.at("nodes")) {
        if (node.value("role", "actor") != "actor") continue;
        const int64_t first = node.at("ranks").at(0), last = node.at("ranks").at(1);
        if (place.rank < first || place.rank > last) continue;
        found = true;
        same_number("that rank " + number(place.rank) + " lies in pod", node.at("index").get<int64_t>(),
                    place.node_rank);
      }
      if (!found) fail_user(file + " names no pod for rank " + number(place.rank));
    }
    if (!document.contains("groups")) return;
    for (const Axis axis : {Axis::kTp, Axis::kCp, Axis::kDp, Axis::kPp, Axis::kEtp, Axis::kEp, Axis::kEdp}) {
      if (group_size(place.layout, axis) <= 1) continue;
      if (document.at("groups").at(to_string(axis)) != Json(groups(place.layout, axis))) {
        fail_user(file + " has other " + to_string(axis) + " groups than this trainer makes of the layout " +
                  to_string(place.layout) + "; operator and trainer must be of the same version");
      }
    }
  } catch (const Json::exception& error) {
    fail_user(file + " is not a topology document: " + error.what());
  }
}

}  // namespace trireme
