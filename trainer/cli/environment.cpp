#include "trainer/cli/environment.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "api/runtime.h"
#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/cli/exit_codes.h"
#include "trainer/rewards/http_headers.h"

namespace trireme {
namespace {

// By what it sets.
void read_log_of_nccl(TransportCheck& check) {
  try {
    check.scratch = std::make_shared<TemporaryDirectory>();
  } catch (const Error& error) {
    log_warn("parallel", std::string("what carries NCCL's traffic will not be in the log: ") + error.what());
    return;
  }
  check.log = nccl_log_settings(environment_variable, (check.scratch->path() / "nccl.log").string());
  if (check.log)
    for (const auto& [name, value] : check.log->set) ::setenv(name.c_str(), value.c_str(), 1);
}

}  // namespace

std::string environment(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : std::string(value);
}

std::optional<std::string> environment_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

int64_t environment_int(const char* name, int64_t otherwise) {
  const std::string text = environment(name, "");
  if (text.empty()) return otherwise;
  const auto value = parse_int(text);
  if (!value) fail_user(std::string("environment variable ") + name + " is '" + text + "', not a number");
  return *value;
}

int say_error(const std::exception& error) {
  const auto shortage = describe_memory_shortage(error, "");
  const bool ours = dynamic_cast<const Error*>(&error) != nullptr;
  const std::string what = !ours && shortage ? *shortage : (ours ? "" : "internal: ") + std::string(error.what());
  std::fprintf(stderr, "error: %s\n", what.c_str());
  return exit_code_of(error);
}

RendezvousOptions rendezvous_from_environment(double timeout_s) {
  RendezvousOptions r;
  r.rank = static_cast<int>(environment_int("RANK", 0));
  r.world_size = static_cast<int>(environment_int("WORLD_SIZE", 1));
  r.local_rank = static_cast<int>(environment_int("LOCAL_RANK", 0));
  r.local_world = static_cast<int>(environment_int("LOCAL_WORLD_SIZE", 0));
  r.master_address = environment("MASTER_ADDR", "127.0.0.1");
  r.master_port = static_cast<int>(environment_int("MASTER_PORT", 0));
  r.attempt = environment("TRIREME_ATTEMPT", "0");
  r.launcher_fd = static_cast<int>(environment_int("TRIREME_LAUNCHER_FD", -1));
  r.listen_fd = static_cast<int>(environment_int("TRIREME_LISTEN_FD", -1));
  if (r.listen_fd >= 0) ::fcntl(r.listen_fd, F_SETFD, FD_CLOEXEC);  // what this process starts has no part in it
  r.timeout = Milliseconds(static_cast<int64_t>(timeout_s * 1000));
  r.of_critic = is_critic_by_environment();
  r.actor_ranks = r.of_critic ? static_cast<int>(environment_int("TRIREME_ACTOR_RANKS", 0)) : 0;
  r.critic_ranks = static_cast<int>(environment_int("TRIREME_CRITIC_RANKS", r.of_critic ? r.world_size : 0));
  if (r.of_critic && r.actor_ranks < 1)
    fail_user("TRIREME_ROLE is critic but TRIREME_ACTOR_RANKS, how many ranks the actor has, is not set");
  if (r.of_critic && r.critic_ranks != r.world_size) {
    fail_user("TRIREME_ROLE is critic, WORLD_SIZE is " + std::to_string(r.world_size) +
              " but TRIREME_CRITIC_RANKS is " + std::to_string(r.critic_ranks) + ": both say how many ranks it has");
  }
  if (r.critic_ranks < 0) fail_user("TRIREME_CRITIC_RANKS is " + std::to_string(r.critic_ranks) + ", less than 0");
  if (r.critic_ranks > 0 && r.master_port == 0)
    fail_user("a critic has ranks of its own (TRIREME_CRITIC_RANKS) but MASTER_PORT is not set");
  if (r.world_size > 1 && r.master_port == 0)
    fail_user("WORLD_SIZE is " + std::to_string(r.world_size) + " but MASTER_PORT is not set");
  // The training thread cannot be asked: it waits for the device, or for nobody knows what.
  r.on_stuck = [](const std::string& what) {
    log_error("train", what + "; leaving with the code of a node that is at fault");
    ::_exit(kExitNode);
  };
  r.on_deadline = [](const std::string& what) {
    log_error("train", what);
    ::_exit(kExitCommunication);
  };
  r.on_unwinding = [](const std::exception& error) { ::_exit(say_error(error)); };
  return r;
}

bool is_critic_by_environment() { return environment("TRIREME_ROLE", "actor") == "critic"; }

Fault fault_from_environment() { return parse_fault(environment("TRIREME_FAULT", "")); }

EngineFault engine_fault_from_environment() { return parse_engine_fault(environment("TRIREME_ENGINE_FAULT", "")); }

int local_world_from_environment() { return static_cast<int>(environment_int("LOCAL_WORLD_SIZE", 1)); }

TransportCheck transport_from_environment(int world_size, const std::string& device, bool sends_weights) {
  TransportCheck check;
  check.required = environment_int("TRIREME_REQUIRE_RDMA", 0) != 0;
  check.spans_nodes = world_size > local_world_from_environment();
  check.environment = environment_variable;
  if (device == "cpu") return check;
  if (check.spans_nodes) read_log_of_nccl(check);
  if (!check.spans_nodes && !sends_weights) return check;
  if (const auto problem = socket_setting(check)) throw Error(ErrorKind::kUnavailable, *problem);
  return check;
}

std::filesystem::path hf_home_from_environment() {
  const std::string home = environment("HF_HOME", "");
  if (!home.empty()) return home;
  return std::filesystem::path(environment("HOME", "/")) / ".cache" / "huggingface";
}

ReportingOptions reporting_from_environment() {
  ReportingOptions options;
  options.status_url = environment("TRIREME_STATUS_URL", "");
  options.status_token_file = environment("TRIREME_STATUS_TOKEN_FILE", "");
  options.status_ca_file = environment("TRIREME_STATUS_CA_FILE", "");
  options.attempt = environment("TRIREME_ATTEMPT", "0");
  options.mlflow_tracking_uri = environment("MLFLOW_TRACKING_URI", "");
  options.mlflow_token = environment("MLFLOW_TRACKING_TOKEN", "");
  options.mlflow_username = environment("MLFLOW_TRACKING_USERNAME", "");
  options.mlflow_password = environment("MLFLOW_TRACKING_PASSWORD", "");
  return options;
}

RewardPlace reward_place_from_environment(const Config& config) {
  RewardPlace place;
  place.url = environment("TRIREME_REWARD_URL", "");
  for (const std::string& name : environment_of_headers(config.env.http.headers))
    place.environment[name] = environment(name.c_str(), "");
  return place;
}

std::string program_path() {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) fail_io("cannot read /proc/self/exe: " + error.message());
  return path.string();
}

}  // namespace trireme
