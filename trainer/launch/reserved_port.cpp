#include "trainer/launch/reserved_port.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace trireme {

ReservedPort::ReservedPort() {
  sockaddr_storage address{};
  socklen_t length = sizeof(sockaddr_in6);
  address.ss_family = AF_INET6;
  fd_ = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd_ >= 0) {
    const int off = 0;
    ::setsockopt(fd_, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  } else {  // a machine without IPv6
    fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address.ss_family = AF_INET;
    length = sizeof(sockaddr_in);
  }
  const int yes = 1;
  ::setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  if (fd_ < 0 || ::bind(fd_, any, length) != 0 || ::getsockname(fd_, any, &length) != 0) {
    const int code = errno;
    if (fd_ >= 0) ::close(fd_);
    fail_io(std::string("cannot reserve a port: ") + std::strerror(code));
  }
  port_ = ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(any)->sin6_port
                                              : reinterpret_cast<const sockaddr_in*>(any)->sin_port);
}

ReservedPort::~ReservedPort() { ::close(fd_); }

}  // namespace trireme
