// The environment variables that `trireme` reads. Nothing below the verbs reads any.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "trainer/algorithms/failure.h"
#include "trainer/algorithms/reporting.h"
#include "trainer/parallel/communicator.h"

namespace trireme {

std::string environment(const char* name, const std::string& otherwise);
// Throws Error(kUser) that names the variable when it is not a number.
int64_t environment_int(const char* name, int64_t otherwise);

// RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TRIREME_ATTEMPT, TRIREME_LAUNCHER_FD. A rank that is stuck
// ends the process with the code of a node at fault, one whose device waits in vain, or one whose peer has died, with
// that of a failed peer.
RendezvousOptions rendezvous_from_environment(double timeout_s);
// TRIREME_FAULT: a failure on purpose, for tests (parse_fault).
Fault fault_from_environment();
int local_world_from_environment();  // LOCAL_WORLD_SIZE
// HF_HOME, else ~/.cache/huggingface.
std::filesystem::path hf_home_from_environment();
// TRIREME_STATUS_URL, TRIREME_STATUS_TOKEN_FILE, TRIREME_STATUS_CA_FILE.
ReportingOptions reporting_from_environment();

std::string program_path();  // of this executable

}  // namespace trireme
