// TCP sockets between processes of a job, and the secrets by which they know each other. No LibTorch.
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.h"

namespace trireme {

// A listening socket (non-blocking, on all addresses) and the port that the kernel chose. Throws Error(kIo) that says
// for `whom`.
int listen_anywhere(uint16_t& port, const std::string& whom);

// A connected socket (non-blocking), or -1 with the reason in `why`. Tries every address that the name has.
int connect_to(const std::string& host, const std::string& port, const Deadline& deadline, std::string& why);

// The kernel asks and answers: a process that is stopped or busy is reachable, a machine that is gone is not, and its
// connection ends after `unreachable`. Small messages go at once.
void watch_by_kernel(int fd, Milliseconds unreachable);

// 32 hexadecimal digits.
std::string new_secret();

}  // namespace trireme
