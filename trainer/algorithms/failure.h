// Failures of a rank: what is said about them, and to whom. Faults on purpose, for tests of that.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>

#include "trainer/model/model.h"
#include "trainer/parallel/context.h"

namespace trireme {

// One sentence for an error of an allocator (device or host): what was asked for, what was free, and the keys to lower
// in `phase` (empty: not known). Nothing when `error` is another one.
std::optional<std::string> describe_memory_shortage(const std::exception& error, const std::string& phase);

// Runs the loop of a rank. What it throws is told to the other ranks, unless it is the echo of theirs, and thrown on
// with rank, host and phase before it (with one rank as it is). A memory shortage becomes its sentence, as Error(kIo).
void run_and_report(ParallelContext& context, const std::function<void()>& loop);

// A failure on purpose, on one rank in one step: before its training phase, or for a kill when it enters `phase`.
struct Fault {
  enum class Kind {
    kNone,
    kNan,         // a weight of this rank becomes NaN
    kMemory,      // more memory is asked for than there is
    kHang,        // the training thread stops for good
    kDeviceHang,  // the current stream stops for good; on CPU as kHang
    kStay,        // an error is thrown, behind which the session does not end, as where a device waits in vain
    kKill,        // the process ends by SIGKILL
  };
  Kind kind = Kind::kNone;
  int64_t step = 0;
  int rank = 0;  // of the job: the critic's own ranks are behind the actor's
  std::string phase = "training";
};
// "nan@2:1" (kind, step, rank), kinds nan, memory, hang, device-hang, stay; "kill@2:1:generation", with a phase; "":
// none. Throws Error(kUser) otherwise.
Fault parse_fault(const std::string& text);
void cause_fault(const Fault& fault, int64_t step, const ParallelContext& context, Model& policy);
// Of a session's destructor.
void cause_stay(const Fault& fault, const ParallelContext& context);
// A kill, when `phase` of the step begins.
void cause_kill(const Fault& fault, int64_t step, const std::string& phase, const ParallelContext& context);

}  // namespace trireme
