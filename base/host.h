// What the machine says of itself and of the call that failed last.
#pragma once

#include <string>

namespace trireme {

std::string host_name();  // "unknown" where it has none
// strerror of this thread's errno: "No such file or directory".
std::string errno_text();

}  // namespace trireme
