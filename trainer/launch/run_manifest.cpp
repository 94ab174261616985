#include "trainer/launch/run_manifest.h"

#include <signal.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <thread>

#include "api/runtime.h"
#include "api/validate.h"
#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/subprocess.h"
#include "base/text.h"
#include "trainer/launch/reserved_port.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

bool path_character(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-' || c == '.' || c == '/';
}

// Every string value of a JSON tree, keys untouched.
void map_strings(Json& value, const std::function<std::string(const std::string&)>& map) {
  if (value.is_string()) {
    value = map(value.get<std::string>());
  } else if (value.is_structured()) {
    for (auto& child : value) map_strings(child, map);
  }
}

struct LocalPod {
  std::vector<PathMapping> mappings;
  std::map<std::string, std::string> environment;
};

LocalPod map_volumes(const PodView& pod, const ContainerView& container, const RunOptions& options,
                     const std::string& job) {
  LocalPod local;
  for (const MountView& mount : container.mounts) {
    const auto volume = std::find_if(pod.volumes.begin(), pod.volumes.end(),
                                     [&](const VolumeView& v) { return v.name == mount.volume; });
    if (volume == pod.volumes.end())
      fail_user("container " + container.name + " mounts volume '" + mount.volume +
                "' that the template does not define");
    fs::path folder;
    switch (volume->kind) {
      case VolumeKind::kClaim:
        folder = options.volumes / volume->source;
        break;
      case VolumeKind::kEmptyDir:
        folder = options.volumes / ("." + job + "-" + volume->name);
        break;
      case VolumeKind::kHostPath:
        folder = volume->source;
        break;
      case VolumeKind::kConfigMap:
      case VolumeKind::kSecret:
      case VolumeKind::kOther:
        fail_user("volume '" + volume->name +
                  "' can only be mounted on a cluster; `trireme run` knows claims, emptyDir and hostPath");
    }
    if (!mount.sub_path.empty()) folder /= mount.sub_path;
    fs::create_directories(folder);
    local.mappings.push_back({mount.path, fs::absolute(folder).string()});
  }
  std::sort(local.mappings.begin(), local.mappings.end(),
            [](const PathMapping& a, const PathMapping& b) { return a.container.size() > b.container.size(); });
  if (!container.env_from_cluster.empty()) {
    fail_user("container " + container.name + ": environment variable " + container.env_from_cluster.front() +
              " takes its value from the cluster (valueFrom); `trireme run` needs a literal value");
  }
  for (const auto& [name, value] : container.env) local.environment[name] = map_paths(value, local.mappings);
  return local;
}

// "trireme" in a manifest means the binary that runs it.
std::vector<std::string> local_command(const std::vector<std::string>& argv, const LocalPod& pod,
                                       const fs::path& program) {
  std::vector<std::string> command;
  for (const std::string& argument : argv) command.push_back(map_paths(argument, pod.mappings));
  if (!command.empty() && (command[0] == "trireme" || ends_with(command[0], "/trireme"))) command[0] = program.string();
  return command;
}

void run_init_container(const PodView& pod, const ContainerView& container, const RunOptions& options,
                        const std::string& job, const std::atomic<int>* signal) {
  const LocalPod local = map_volumes(pod, container, options, job);
  std::vector<std::string> argv = container.command;
  argv.insert(argv.end(), container.args.begin(), container.args.end());
  if (argv.empty())
    fail_user("init container " + container.name + " has no command; `trireme run` cannot know its image's");
  log_info("run", "init container " + container.name + ": " + join(argv, " "));
  SpawnOptions spawn;
  spawn.argv = local_command(argv, local, options.program);
  spawn.set_env = local.environment;
  spawn.working_directory = container.working_dir.empty() ? "" : map_paths(container.working_dir, local.mappings);
  Subprocess child = Subprocess::spawn(spawn);
  const Deadline deadline = Deadline::after(options.init_timeout);
  while (true) {
    if (const auto status = child.poll()) {
      if (!status->ok()) fail_user("init container " + container.name + " ended with " + status->describe());
      return;
    }
    if (signal != nullptr && signal->load() != 0) {
      child.terminate(Milliseconds(5000));
      throw Error(ErrorKind::kUser, "interrupted in init container " + container.name);
    }
    if (deadline.passed()) fail_timeout("init container " + container.name + " did not end within its time limit");
    std::this_thread::sleep_for(Milliseconds(20));
  }
}

RLJob read_job(const RunOptions& options) {
  RLJob job = parse_rljob(read_file(options.manifest), options.manifest.string());
  const Validation validation = validate(job);
  if (!validation.ok()) fail_user(to_string(validation.errors, options.manifest.string()));
  for (const Issue& warning : validation.warnings) log_warn("run", warning.path + ": " + warning.message);
  if (job.spec.config.config_map_ref)
    fail_user("spec.config.configMapRef needs a cluster; use spec.config.inline or spec.config.path");
  return job;
}

// The job's paths become those of this machine; an inline configuration becomes the file `config_path`.
void map_job(RLJob& job, const LocalPod& local, const fs::path& config_path) {
  if (!job.spec.config.inline_config.is_null()) {
    Json config = job.spec.config.inline_config;
    map_strings(config, [&](const std::string& text) { return map_paths(text, local.mappings); });
    write_file_atomic(config_path, config.dump(2));  // JSON is YAML
  }
  job.spec.config.path = map_paths(job.spec.config.path, local.mappings);
  for (std::string& override_text : job.spec.config.overrides) override_text = map_paths(override_text, local.mappings);
  job.spec.model.source = map_paths(job.spec.model.source, local.mappings);
  job.spec.checkpoint.directory = map_paths(job.spec.checkpoint.directory, local.mappings);
}

// A role's main container on this machine.
struct LocalRole {
  std::string name;
  int64_t pods = 1;
  LocalPod local;
  std::vector<std::string> command;
  std::string working_directory;
  int64_t gpus = 0;  // of a pod of the trainer's
};

// `first_gpu`: of this machine's, the pod's first. On a cluster each pod sees its own.
Subprocess start_pod(const RLJob& job, const LocalRole& role, const PodPlace& place, const ReservedPort* socket,
                     int64_t first_gpu) {
  SpawnOptions spawn;
  spawn.argv = role.command;
  spawn.working_directory = role.working_directory;
  spawn.set_env = role.local.environment;
  for (const auto& [name, value] : pod_environment(job, place)) {
    // As in a cluster: the template's word counts for what is not reserved.
    if (is_reserved_env(name) || role.local.environment.count(name) == 0) spawn.set_env[name] = value;
  }
  const bool required = spawn.set_env.erase("TRIREME_REQUIRE_RDMA") > 0;
  if (required && role.local.environment.count("NCCL_NET") == 0) spawn.set_env.erase("NCCL_NET");
  if (required && socket != nullptr)
    log_info("run", "spec.network.rdma.require: all pods are on this machine, where no network is between them");
  if (role.gpus > 0) spawn.set_env["LOCAL_RANK"] = spawn.set_env["TRIREME_FIRST_GPU"] = std::to_string(first_gpu);
  spawn.set_env.erase("TRIREME_METRICS_PORT");  // the configuration's own port: several runs may share this machine
  if (job.spec.roles.reward && job.spec.roles.reward->port)
    spawn.set_env["TRIREME_REWARD_URL"] = "http://127.0.0.1:" + std::to_string(*job.spec.roles.reward->port);
  spawn.own_group = true;
  if (socket != nullptr) {
    spawn.set_env["TRIREME_LISTEN_FD"] = std::to_string(socket->fd());
    spawn.keep_fd = socket->fd();
  }
  return Subprocess::spawn(spawn);
}

struct LocalPods {
  std::unique_ptr<ReservedPort> work_port;  // of actor 0, which binds it when its model is loaded
  std::vector<Subprocess> ranks;            // of the actor and the critic: each is needed, and their ends are the run's
  std::vector<std::string> names;
  std::vector<Subprocess> generation;
  std::vector<Subprocess> reward;
};

LocalPods start_pods(const RLJob& job, const std::vector<LocalRole>& roles) {
  PodPlace place;
  place.master_address = "127.0.0.1";
  const ReservedPort reserved;  // the first pod, whose rank 0 listens, has its socket
  place.master_port = reserved.port();
  LocalPods pods;
  if (job.spec.roles.generation) {
    pods.work_port = std::make_unique<ReservedPort>();
    place.work_port = pods.work_port->port();
  }
  int64_t gpus = 0;
  for (const LocalRole& role : roles) {
    std::vector<Subprocess>& started = role.name == "generation" ? pods.generation
                                       : role.name == "reward"   ? pods.reward
                                                                 : pods.ranks;
    place.role = role.name;
    for (place.index = 0; place.index < role.pods; ++place.index) {
      const bool rank0 = role.name == "actor" && place.index == 0;
      if (&started == &pods.ranks) pods.names.push_back(role.name + " pod " + std::to_string(place.index));
      started.push_back(start_pod(job, role, place, rank0 ? &reserved : nullptr, gpus));
      gpus += role.gpus;
    }
  }
  return pods;
}

// Says once of each pod of a service that it has failed: nothing makes it again on this machine. The exit code of the
// last one when all of them have, else nothing.
std::optional<int> lost_service(const std::string& role, std::vector<Subprocess>& pods, std::vector<bool>& told) {
  told.resize(pods.size());
  std::optional<int> failed;
  size_t failures = 0;
  for (size_t i = 0; i < pods.size(); ++i) {
    const auto status = pods[i].poll();
    if (!status || status->ok()) continue;
    ++failures;
    failed = status->signal != 0 ? 128 + status->signal : status->code;
    if (!told[i]) log_error("run", role + " pod " + std::to_string(i) + " ended with " + status->describe());
    told[i] = true;
  }
  return failures == pods.size() ? failed : std::nullopt;
}

// Until all pods of ranks have ended: the first failure's exit code, which the others are given `failure_grace` after;
// of a pod that lost a peer only where no other has failed. So they are when nobody generates any more. A signal is
// handed on once; `grace` later they are killed. Services end last.
int wait_for_pods(LocalPods& pods, const std::atomic<int>* signal, Milliseconds grace, Milliseconds failure_grace) {
  int exit_code = 0;
  bool forwarded = false, killed = false;
  size_t running = pods.ranks.size();
  std::vector<bool> ended(pods.ranks.size(), false);
  std::vector<bool> generation_told, reward_told;
  const Deadline never(SteadyClock::time_point::max());
  Deadline kill_at = never;
  const auto failed = [&](int code) {
    exit_code = code;
    if (kill_at.at() == never.at()) kill_at = Deadline::after(failure_grace);
  };
  while (running > 0) {
    for (size_t i = 0; i < pods.ranks.size(); ++i) {
      if (ended[i]) continue;
      const auto status = pods.ranks[i].poll();
      if (!status) continue;
      ended[i] = true;
      --running;
      // Who had to be killed behind a failure is none.
      if (status->ok() || (exit_code != 0 && (killed || exit_code != kExitCommunication))) continue;
      if (pods.ranks.size() > 1) log_error("run", pods.names[i] + " ended with " + status->describe());
      failed(status->signal != 0 ? 128 + status->signal : status->code);
    }
    lost_service("reward", pods.reward, reward_told);
    const auto nobody = lost_service("generation", pods.generation, generation_told);
    if (nobody && exit_code == 0) failed(*nobody);
    const int number = signal == nullptr ? 0 : signal->load();
    if (number != 0 && !forwarded) {
      forwarded = true;
      for (Subprocess& child : pods.ranks) child.signal(SIGTERM);
      kill_at = Deadline::after(grace);
    }
    if (kill_at.passed()) {
      killed = true;
      for (Subprocess& child : pods.ranks) child.signal_group(SIGKILL);
      kill_at = never;
    }
    std::this_thread::sleep_for(Milliseconds(10));
  }
  for (auto* services : {&pods.generation, &pods.reward}) {
    for (Subprocess& child : *services) child.terminate(Milliseconds(10000));
  }
  return exit_code;
}

}  // namespace

std::string map_paths(const std::string& text, const std::vector<PathMapping>& mappings) {
  std::string result;
  size_t i = 0;
  while (i < text.size()) {
    const bool starts_path = text[i] == '/' && (i == 0 || !path_character(text[i - 1]));
    const PathMapping* match = nullptr;
    if (starts_path) {
      for (const PathMapping& mapping : mappings) {
        const std::string& mount = mapping.container;
        if (mount.empty() || text.compare(i, mount.size(), mount) != 0) continue;
        const size_t end = i + mount.size();
        if (end == text.size() || text[end] == '/' || !path_character(text[end])) {
          match = &mapping;
          break;
        }
      }
    }
    if (match != nullptr) {
      result += match->local;
      i += match->container.size();
    } else {
      result += text[i++];
    }
  }
  return result;
}

int run_manifest(const RunOptions& options, const std::atomic<int>* signal) {
  RLJob job = read_job(options);
  const TemporaryDirectory scratch;
  const fs::path config_path = scratch.path() / "config.yaml";
  std::vector<LocalRole> roles;
  for (const RoleRef& ref : roles_of(job.spec)) {
    const bool reward = ref.name == "reward";
    const char* main = reward ? kRewardContainer : kTrainerContainer;
    const PodView pod = pod_view(job.spec, *ref.spec, main);
    for (const ContainerView& init : pod.init_containers)
      run_init_container(pod, init, options, job.metadata.name, signal);
    const ContainerView* container = pod.container(main);
    TRIREME_CHECK(container != nullptr, "a pod view always has the main container");
    LocalRole role{ref.name, ref.spec->replicas, map_volumes(pod, *container, options, job.metadata.name), {}, {}};
    if (!reward) {
      role.gpus = ref.spec->gpus_per_pod;
      if (ref.name == "actor") map_job(job, role.local, config_path);    // first: the configuration is the actor's
      role.command = role_command(job, ref.name, config_path.string());  // of this machine's paths already
      role.command[0] = options.program.string();
      const LocalPod& paths = roles.empty() ? role.local : roles.front().local;
      for (const std::string& text : options.overrides) role.command.push_back(map_paths(text, paths.mappings));
    } else {
      std::vector<std::string> argv = container->command;
      argv.insert(argv.end(), container->args.begin(), container->args.end());
      if (argv.empty()) fail_user("container reward has no command; `trireme run` cannot know its image's");
      role.command = local_command(argv, role.local, options.program);
      role.working_directory =
          container->working_dir.empty() ? "" : map_paths(container->working_dir, role.local.mappings);
      if (role.pods > 1)
        log_info("run",
                 "one reward pod is started instead of " + std::to_string(role.pods) + ": they would share a port");
      role.pods = 1;
    }
    roles.push_back(std::move(role));
  }
  LocalPods pods = start_pods(job, roles);
  const Milliseconds grace(1000 * (job.spec.checkpoint.timeout_seconds + 30));
  return wait_for_pods(pods, signal, grace, options.failure_grace);
}

}  // namespace trireme
