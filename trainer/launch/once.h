// trireme once: one node of a job prepares what all of them use, the others wait for it.
#pragma once

#include <atomic>
#include <filesystem>
#include <string>
#include <vector>

#include "base/clock.h"

namespace trireme {

struct OnceOptions {
  // Written when the command succeeded, with the command in it, on a volume that all nodes mount. While it says the
  // same command, nothing is run; where it says another one, the command runs again.
  std::filesystem::path marker;
  std::vector<std::string> command;
  std::string program;  // runs instead of command[0] (which is then a verb of it); empty: command[0] itself
  int node_rank = 0;    // 0 runs the command, the others wait for the marker
  Milliseconds timeout{3600000};
};

// Exit code: 0 when the marker is there, the command's own (128 + n for signal n), or 128 + the signal that `signal`
// shows. Throws Error(kTimeout) when the command or the wait for it takes longer than the timeout.
int run_once(const OnceOptions& options, const std::atomic<int>* signal);

}  // namespace trireme
