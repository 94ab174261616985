// Orphans: processes that a launcher's ranks have left behind.
#pragma once

#include <sys/types.h>

#include <set>

#include "base/clock.h"

namespace trireme {

// While there is one, processes whose parent ends come to this process instead of to the first of the machine: workers
// of a reward's program whose rank was killed, say. The destructor ends them. One at a time in a process; children that
// it had before are left alone, others that it starts meanwhile must be named to keep().
class Orphans final {
 public:
  Orphans();
  ~Orphans();
  Orphans(const Orphans&) = delete;
  Orphans& operator=(const Orphans&) = delete;

  void keep(pid_t child);    // it is ours, and somebody else waits for it ...
  void forget(pid_t child);  // ... and has done so
  void reap();               // takes leave of those that have ended by themselves; cheap
  // Kills all and what they leave behind in turn. Returns how many.
  int end_all(const Deadline& deadline);

 private:
  int before_ = 0;  // whether this process took orphans already
  std::set<pid_t> kept_;
};

}  // namespace trireme
