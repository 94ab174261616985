#include "base/sigpipe.h"

#include <ctime>

namespace trireme {

void ignore_sigpipe() { ::signal(SIGPIPE, SIG_IGN); }

SigpipeBlocked::SigpipeBlocked() {
  sigemptyset(&signal_);
  sigaddset(&signal_, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &signal_, &before_);
}

SigpipeBlocked::~SigpipeBlocked() {
  const timespec no_wait{0, 0};
  while (::sigtimedwait(&signal_, nullptr, &no_wait) > 0) {
  }
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

}  // namespace trireme
