#include "trainer/parallel/own_address.h"

#include <dlfcn.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"

// In front of libc's for the whole program, LibTorch included: a name for an address is only ever for a message, and
// c10d asks DNS for that of each peer before it connects (pytorch/pytorch#159007). Where the server drops such
// questions, that is 10 s a process and longer than some deadlines.
extern "C" __attribute__((visibility("default"))) int getnameinfo(const sockaddr* address, socklen_t length, char* host,
                                                                  socklen_t host_length, char* service,
                                                                  socklen_t service_length, int flags) {
  using Function = decltype(&::getnameinfo);
  static const auto next = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "getnameinfo"));
  return next == nullptr ? EAI_SYSTEM
                         : next(address, length, host, host_length, service, service_length, flags | NI_NUMERICHOST);
}

namespace trireme {

std::string own_address_towards(const std::string& peer) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(peer.c_str(), "9", &hints, &found) != 0 || found == nullptr) {
    throw Error(ErrorKind::kUnavailable, "cannot resolve the master address '" + peer + "'");
  }
  std::string text = "127.0.0.1";
  const int fd = ::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd >= 0) {
    sockaddr_storage local{};
    socklen_t length = sizeof local;
    if (::connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) == 0) {
      char buffer[NI_MAXHOST];
      if (::getnameinfo(reinterpret_cast<sockaddr*>(&local), length, buffer, sizeof buffer, nullptr, 0,
                        NI_NUMERICHOST) == 0) {
        text = buffer;
      }
    }
    ::close(fd);
  }
  ::freeaddrinfo(found);
  return text;
}

}  // namespace trireme
