// Failures of a generation process on purpose, for tests of who goes on without it, and of what it had.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

namespace trireme {

struct EngineFault {
  enum class Kind {
    kNone,
    kKill,  // the process ends by SIGKILL
    kCut,   // a transfer of weights breaks when bytes of it have come
  };
  Kind kind = Kind::kNone;
  std::string phase;   // whose beginning it is
  int64_t time = 1;    // that it begins, of a cut the first one
  int64_t in_row = 1;  // of a cut: so many transfers
};

// "kill@2:applying": at the second time that the phase begins. Phases: joining, fetching (weights are asked for),
// transfer (bytes of them have come; on a CPU), applying, generation (a run's samples begin), rewards (they are
// scored), bringing and brought (the actor has them, and this process does not know yet). "cut@2": the second transfer;
// "cut@2:3": three from it on. "": none. Throws Error(kUser) otherwise.
EngineFault parse_engine_fault(const std::string& text);

// Counts phases, and fails when it is time. From any thread.
class EngineFaults final {
 public:
  explicit EngineFaults(EngineFault fault) : fault_(std::move(fault)) {}

  // Throws Error(kUnavailable) for a cut.
  void begins(const std::string& phase);

 private:
  const EngineFault fault_;
  std::mutex mutex_;
  int64_t seen_ = 0;
};

}  // namespace trireme
