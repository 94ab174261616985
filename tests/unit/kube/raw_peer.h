// RawPeer: a TCP connection for tests that a well-behaved HTTP client would not make: half requests, junk, silence.
#pragma once

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "base/clock.h"

namespace trireme::kube::testing {

class RawPeer final {
 public:
  // To 127.0.0.1, from any address of 127.0.0.0/8 (each is a peer of its own to the server).
  explicit RawPeer(int port, const std::string& from = "127.0.0.1")
      : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in local{};
    local.sin_family = AF_INET;
    inet_pton(AF_INET, from.c_str(), &local.sin_addr);
    const bool bound = ::bind(fd_, reinterpret_cast<sockaddr*>(&local), sizeof local) == 0;
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(port));
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    connected_ = bound && ::connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0;
  }
  ~RawPeer() { ::close(fd_); }
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  bool connected() const { return connected_; }
  // How much of it the other side's system took; stops when the connection is gone or `wait` is over.
  size_t send(std::string_view bytes, Milliseconds wait = Milliseconds(60000)) {
    const Deadline deadline = Deadline::after(wait);
    size_t sent = 0;
    while (sent < bytes.size() && !deadline.passed()) {
      const ssize_t n = ::send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n >= 0) {
        sent += static_cast<size_t>(n);
      } else if (errno == EAGAIN) {
        pollfd event{fd_, POLLOUT, 0};
        ::poll(&event, 1, 50);
      } else {
        break;
      }
    }
    return sent;
  }
  // What comes up to and with `until`, or all until the other side has ended or `wait` is over. What came behind
  // `until` is the next call's.
  std::string receive(std::string_view until = {}, Milliseconds wait = Milliseconds(60000)) {
    const Deadline deadline = Deadline::after(wait);
    std::string got = std::exchange(kept_, {});
    char piece[4096];
    size_t end = until.empty() ? std::string::npos : got.find(until);
    while (end == std::string::npos) {
      pollfd event{fd_, POLLIN, 0};
      if (deadline.passed() || ::poll(&event, 1, static_cast<int>(deadline.remaining().count()) + 1) <= 0) break;
      const ssize_t n = ::recv(fd_, piece, sizeof piece, 0);
      if (n <= 0) {
        ended_ = true;
        break;
      }
      got.append(piece, static_cast<size_t>(n));
      if (!until.empty()) end = got.find(until);
    }
    if (end != std::string::npos) {
      kept_ = got.substr(end + until.size());
      got.resize(end + until.size());
    }
    return got;
  }
  bool ended() const { return ended_; }  // seen by receive
  // "HTTP/1.1 204 ..." -> 204; -1 without such an answer.
  static int status_of(const std::string& answer) {
    return answer.size() > 12 && answer.compare(0, 9, "HTTP/1.1 ") == 0 ? std::atoi(answer.c_str() + 9) : -1;
  }

 private:
  const int fd_;
  bool connected_ = false;
  bool ended_ = false;
  std::string kept_;
};

}  // namespace trireme::kube::testing
