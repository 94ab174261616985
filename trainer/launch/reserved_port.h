// ReservedPort: a TCP port of this machine that is ours from now on, for a socket that a child listens with.
#pragma once

namespace trireme {

// Bound to every address of either family, and not listening: who connects too early is refused and comes again, as
// where nobody has the port. It ends with the last process that has the socket. A child that is given only the number
// may bind it too, with SO_REUSEADDR; the system gives it to nobody who asks for any port.
class ReservedPort final {
 public:
  ReservedPort();  // throws Error(kIo)
  ~ReservedPort();
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;

  int port() const { return port_; }
  int fd() const { return fd_; }  // for SpawnOptions::keep_fd; closed by exec elsewhere

 private:
  int fd_ = -1;
  int port_ = 0;
};

}  // namespace trireme
