#include "operator/kube/gate_connection.h"

#include <openssl/err.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace trireme::kube {
namespace {

constexpr size_t kPiece = 16u << 10;
constexpr size_t kHeldBack = 64u << 10;  // of an answer; more goes out before the handler writes on

Io tls_result(SSL* ssl, int result) {
  const int error = SSL_get_error(ssl, result);
  ERR_clear_error();
  if (error == SSL_ERROR_WANT_READ) return Io::kWantRead;
  if (error == SSL_ERROR_WANT_WRITE) return Io::kWantWrite;
  return Io::kDead;
}

}  // namespace

Gate::Connection::~Connection() { ::close(fd); }

Io Gate::Connection::handshake() {
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl.get());
  return result == 1 ? Io::kDone : tls_result(ssl.get(), result);
}

Io Gate::Connection::read(size_t most) {
  std::array<char, kPiece> piece;
  while (in.size() < most) {
    const size_t room = std::min(piece.size(), most - in.size());
    if (ssl) {
      ERR_clear_error();
      const int got = SSL_read(ssl.get(), piece.data(), static_cast<int>(room));
      if (got <= 0) {
        if (SSL_get_error(ssl.get(), got) == SSL_ERROR_ZERO_RETURN) {
          eof = true;
          return Io::kDone;
        }
        return tls_result(ssl.get(), got);
      }
      in.append(piece.data(), static_cast<size_t>(got));
    } else {
      const ssize_t got = ::recv(fd, piece.data(), room, 0);
      if (got == 0) {
        eof = true;
        return Io::kDone;
      }
      if (got < 0) {
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK ? Io::kWantRead : Io::kDead;
      }
      in.append(piece.data(), static_cast<size_t>(got));
    }
  }
  return Io::kDone;
}

Io Gate::Connection::flush() {
  size_t sent = 0;
  Io result = Io::kDone;
  while (sent < out.size()) {
    if (ssl) {
      ERR_clear_error();
      const int took = SSL_write(ssl.get(), out.data() + sent, static_cast<int>(std::min(out.size() - sent, kPiece)));
      if (took <= 0) {
        result = tls_result(ssl.get(), took);
        break;
      }
      sent += static_cast<size_t>(took);
    } else {
      const ssize_t took = ::send(fd, out.data() + sent, out.size() - sent, MSG_NOSIGNAL);
      if (took < 0) {
        if (errno == EINTR) continue;
        result = errno == EAGAIN || errno == EWOULDBLOCK ? Io::kWantWrite : Io::kDead;
        break;
      }
      sent += static_cast<size_t>(took);
    }
  }
  out.erase(0, sent);
  if (out.empty() && out.capacity() > kHeldBack) out.shrink_to_fit();
  return result;
}

bool Gate::Connection::flush_all() {
  while (true) {
    const Io result = flush();
    if (result == Io::kDone) return true;
    if (result == Io::kDead) return false;
    const Milliseconds left = Deadline(until).remaining();
    pollfd event{fd, static_cast<short>(result == Io::kWantWrite ? POLLOUT : POLLIN), 0};
    if (left <= Milliseconds(0) || ::poll(&event, 1, static_cast<int>(left.count())) == 0) return false;
  }
}

void Gate::Connection::say_goodbye() {
  if (ssl) {
    ERR_clear_error();
    SSL_shutdown(ssl.get());
    ERR_clear_error();
  }
  ::shutdown(fd, SHUT_WR);
}

bool Gate::Connection::discard(size_t most) {
  std::array<char, kPiece> piece;
  while (discarded < most) {
    const ssize_t got = ::recv(fd, piece.data(), piece.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    if (got == 0) return false;
    discarded += static_cast<size_t>(got);
  }
  return false;
}

ssize_t Gate::Exchange::read(char* to, size_t size) {
  const size_t count = std::min(size, c_.request_size - at_);
  std::memcpy(to, c_.in.data() + at_, count);
  at_ += count;
  return static_cast<ssize_t>(count);
}

ssize_t Gate::Exchange::write(const char* from, size_t size) {
  if (failed_) return -1;
  if (!began_) {  // the library writes a head in one piece
    began_ = true;
    const std::string_view head(from, size);
    said_close_ = head.substr(0, head.find("\r\n\r\n")).find("\r\nConnection: close") != std::string_view::npos;
  }
  c_.out.append(from, size);
  // A small answer is written by the gate's thread when its peer takes it; a long one keeps only this thread waiting.
  failed_ = c_.out.size() > kHeldBack && !c_.flush_all();
  return failed_ ? -1 : static_cast<ssize_t>(size);
}

void Gate::Exchange::get_remote_ip_and_port(std::string& ip, int& port) const {
  ip = c_.peer;
  port = 0;
}

void Gate::Exchange::get_local_ip_and_port(std::string& ip, int& port) const {
  ip.clear();
  port = 0;
}

}  // namespace trireme::kube
