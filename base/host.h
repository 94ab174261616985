// What the machine says of itself and of the call that failed last.
#pragma once

#include <cstdint>
#include <string>

namespace trireme {

std::string host_name();  // "unknown" where it has none
// Bytes of the machine's memory, and of those that nobody uses. 1 GiB where it does not say.
int64_t total_memory_bytes();
int64_t available_memory_bytes();
// CPUs that this process may use: of its affinity mask, and no more than its cgroup's quota gives (a container's limit,
// rounded up).
int usable_cpus();
// CPUs that the text of a cgroup's cpu.max gives ("200000 100000": 2), rounded up; 0: no limit, or no such text.
int cpus_of_quota(const std::string& cpu_max);
// strerror of this thread's errno: "No such file or directory".
std::string errno_text();

}  // namespace trireme
