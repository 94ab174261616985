#include "trainer/launch/run_manifest.h"

#include <signal.h>

#include <algorithm>
#include <functional>
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
  if (job.spec.roles.reward)
    fail_user("spec.roles.reward: reward pods need a cluster; `trireme run` starts only the actor");
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
  for (std::string& override_text : job.spec.config.overrides) override_text = map_paths(override_text, local.mappings);
  job.spec.model.source = map_paths(job.spec.model.source, local.mappings);
  job.spec.checkpoint.directory = map_paths(job.spec.checkpoint.directory, local.mappings);
}

std::vector<Subprocess> start_pods(const RLJob& job, const LocalPod& local, const std::vector<std::string>& command) {
  PodPlace place;
  place.master_address = "127.0.0.1";
  const ReservedPort reserved;  // the first pod, whose rank 0 listens, has its socket
  place.master_port = reserved.port();
  std::vector<Subprocess> pods;
  for (int64_t index = 0; index < job.spec.roles.actor->replicas; ++index) {
    place.index = index;
    SpawnOptions spawn;
    spawn.argv = command;
    spawn.set_env = local.environment;
    for (const auto& [name, value] : pod_environment(job, place)) {
      // As in a cluster: the template's word counts for what is not reserved.
      if (is_reserved_env(name) || local.environment.count(name) == 0) spawn.set_env[name] = value;
    }
    if (spawn.set_env.erase("TRIREME_REQUIRE_RDMA") > 0 && index == 0)
      log_info("run", "spec.network.rdma.require: all pods are on this machine, where no network is between them");
    spawn.set_env.erase("TRIREME_METRICS_PORT");  // the configuration's own port: several runs may share this machine
    spawn.own_group = true;
    if (index == 0) {
      spawn.set_env["TRIREME_LISTEN_FD"] = std::to_string(reserved.fd());
      spawn.keep_fd = reserved.fd();
    }
    pods.push_back(Subprocess::spawn(spawn));
  }
  return pods;
}

// Until all have ended: the first failure's exit code, which the others are given a minute after. A signal is handed on
// once; `grace` later they are killed.
int wait_for_pods(std::vector<Subprocess>& pods, const std::atomic<int>* signal, Milliseconds grace) {
  int exit_code = 0;
  bool forwarded = false;
  size_t running = pods.size();
  std::vector<bool> ended(pods.size(), false);
  const Deadline never(SteadyClock::time_point::max());
  Deadline kill_at = never;
  while (running > 0) {
    for (size_t i = 0; i < pods.size(); ++i) {
      if (ended[i]) continue;
      const auto status = pods[i].poll();
      if (!status) continue;
      ended[i] = true;
      --running;
      if (status->ok() || exit_code != 0) continue;
      exit_code = status->signal != 0 ? 128 + status->signal : status->code;
      if (pods.size() > 1) log_error("run", "pod " + std::to_string(i) + " ended with " + status->describe());
      if (kill_at.at() == never.at()) kill_at = Deadline::after(Milliseconds(60000));
    }
    const int number = signal == nullptr ? 0 : signal->load();
    if (number != 0 && !forwarded) {
      forwarded = true;
      for (Subprocess& child : pods) child.signal(SIGTERM);
      kill_at = Deadline::after(grace);
    }
    if (kill_at.passed()) {
      for (Subprocess& child : pods) child.signal_group(SIGKILL);
      kill_at = never;
    }
    std::this_thread::sleep_for(Milliseconds(10));
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
  const PodView pod = pod_view(job.spec, *job.spec.roles.actor);
  for (const ContainerView& init : pod.init_containers)
    run_init_container(pod, init, options, job.metadata.name, signal);

  const ContainerView* trainer = pod.container(kTrainerContainer);
  TRIREME_CHECK(trainer != nullptr, "a pod view always has the trainer's container");
  const LocalPod local = map_volumes(pod, *trainer, options, job.metadata.name);
  const TemporaryDirectory scratch;
  const fs::path config_path = scratch.path() / "config.yaml";
  map_job(job, local, config_path);
  std::vector<std::string> command = local_command(trainer_command(job, config_path.string()), local, options.program);
  for (const std::string& text : options.overrides) command.push_back(map_paths(text, local.mappings));
  std::vector<Subprocess> pods = start_pods(job, local, command);
  return wait_for_pods(pods, signal, Milliseconds(1000 * (job.spec.checkpoint.timeout_seconds + 30)));
}

}  // namespace trireme
