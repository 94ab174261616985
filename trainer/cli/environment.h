// The environment variables that `trireme` reads. Nothing below the verbs reads any but NCCL.
#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>

#include "trainer/algorithms/engine_fault.h"
#include "trainer/algorithms/failure.h"
#include "trainer/algorithms/reporting.h"
#include "trainer/config/config.h"
#include "trainer/parallel/communicator.h"
#include "trainer/parallel/transport.h"
#include "trainer/rewards/place.h"

namespace trireme {

std::string environment(const char* name, const std::string& otherwise);
// For ${oc.env:NAME} in configurations; an empty variable is one.
std::optional<std::string> environment_variable(const std::string& name);
// Throws Error(kUser) that names the variable when it is not a number.
int64_t environment_int(const char* name, int64_t otherwise);

// Says the error on stderr, as the last line of a process that it ends, and returns the exit code.
int say_error(const std::exception& error);
// RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TRIREME_ATTEMPT, TRIREME_LAUNCHER_FD,
// TRIREME_LISTEN_FD. A rank that is stuck ends the process with the code of a node at fault, one whose device waits in
// vain, or one whose peer has died, with that of a failed peer; one that has failed itself, and whose device keeps it
// from ending, with that of its error, which is said.
// Where PPO's critic has ranks of its own: TRIREME_CRITIC_RANKS on all, TRIREME_ROLE=critic and TRIREME_ACTOR_RANKS on
// the critic's, whose RANK and WORLD_SIZE are among themselves.
RendezvousOptions rendezvous_from_environment(double timeout_s);
bool is_critic_by_environment();
// TRIREME_FAULT: a failure on purpose, for tests (parse_fault).
Fault fault_from_environment();
// TRIREME_ENGINE_FAULT: the same of a generation process (parse_engine_fault).
EngineFault engine_fault_from_environment();
int local_world_from_environment();  // LOCAL_WORLD_SIZE
// TRIREME_REQUIRE_RDMA. Where ranks of `world_size` are on several nodes (LOCAL_WORLD_SIZE) and `device` is not "cpu",
// NCCL is made to write its log: its variables are set here, so this comes before threads and before NCCL. Throws
// Error(kUnavailable) where RDMA is required, NCCL_NET names sockets, and bytes leave the node: between these ranks or,
// with `sends_weights`, to engines.
TransportCheck transport_from_environment(int world_size, const std::string& device, bool sends_weights = false);
// HF_HOME, else ~/.cache/huggingface.
std::filesystem::path hf_home_from_environment();
// TRIREME_STATUS_URL, TRIREME_STATUS_TOKEN_FILE, TRIREME_STATUS_CA_FILE.
ReportingOptions reporting_from_environment();

// TRIREME_REWARD_URL, and the variables that env.http.headers name.
RewardPlace reward_place_from_environment(const Config& config);

std::string program_path();  // of this executable

}  // namespace trireme
