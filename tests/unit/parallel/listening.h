// A port of the loopback interface that stays ours until a JobStore takes it over: tests of several ranks in one
// process.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <stdexcept>

#include "trainer/parallel/communicator.h"

namespace trireme {

class ListeningPort final {
 public:
  ListeningPort() : fd_(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int off = 0;
    sockaddr_in6 address{};  // any address, of either family: what the store would bind itself
    address.sin6_family = AF_INET6;
    socklen_t length = sizeof address;
    if (fd_ < 0) {  // a machine without IPv6
      fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      address = {};
      reinterpret_cast<sockaddr_in&>(address).sin_family = AF_INET;
      length = sizeof(sockaddr_in);
    } else {
      ::setsockopt(fd_, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    if (fd_ < 0 || ::bind(fd_, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(fd_, 64) != 0 ||
        ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
      throw std::runtime_error("cannot listen on a port");
    }
    disable_flight_recorder();         // whose ranks are threads
    port_ = ntohs(address.sin6_port);  // sin_port lies at the same place
  }
  ~ListeningPort() {
    if (!taken_) ::close(fd_);
  }
  ListeningPort(const ListeningPort&) = delete;
  ListeningPort& operator=(const ListeningPort&) = delete;

  // A rank's place. Rank 0's store owns the socket afterwards: ask once for it.
  RendezvousOptions place(int rank, int world, Milliseconds timeout) {
    RendezvousOptions options;
    options.rank = rank;
    options.world_size = world;
    options.master_port = port_;
    options.timeout = timeout;
    if (rank == 0 && world > 1) {
      options.listen_fd = fd_;
      taken_ = true;
    }
    return options;
  }

 private:
  int fd_;
  int port_ = 0;
  bool taken_ = false;  // read by the destructor only, after the ranks' threads have ended
};

}  // namespace trireme
