// SIGPIPE: a write to a pipe or socket whose other end has gone is to be an error (EPIPE), not the end of the process.
#pragma once

#include <signal.h>

namespace trireme {

// For the whole process, for good. Programs call it in main; libraries that write to sockets call it once more, for
// programs that do not.
void ignore_sigpipe();

// For this thread and scope, in a process that may keep the signal for itself: it is blocked, and one that a write of
// ours raised is taken back at the end.
class SigpipeBlocked final {
 public:
  SigpipeBlocked();
  ~SigpipeBlocked();
  SigpipeBlocked(const SigpipeBlocked&) = delete;
  SigpipeBlocked& operator=(const SigpipeBlocked&) = delete;

 private:
  sigset_t signal_, before_;
};

}  // namespace trireme
