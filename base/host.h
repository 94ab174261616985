// What the machine says of itself and of the call that failed last.
#pragma once

#include <cstdint>
#include <string>

namespace trireme {

std::string host_name();  // "unknown" where it has none
// Bytes of the machine's memory, and of those that nobody uses. 1 GiB where it does not say.
int64_t total_memory_bytes();
int64_t available_memory_bytes();
// strerror of this thread's errno: "No such file or directory".
std::string errno_text();

}  // namespace trireme
