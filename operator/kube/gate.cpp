#include "operator/kube/gate.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "base/log.h"
#include "base/sigpipe.h"
#include "operator/kube/gate_connection.h"

namespace trireme::kube {
namespace {

constexpr Milliseconds kLook{100};        // between two looks at what is late
constexpr Milliseconds kDrain{1000};      // for a peer to read our last answer before its socket goes
constexpr Milliseconds kStop{2000};       // for answers that are on their way when the server stops
constexpr size_t kDrainBytes = 4u << 20;  // taken and forgotten meanwhile
constexpr int kAcceptsInARow = 64;
constexpr int kBacklog = 1024;

std::string peer_name(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(address).sin_addr, text, sizeof text);
  } else if (address.ss_family == AF_INET6) {
    const in6_addr& v6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(&v6)) {
      inet_ntop(AF_INET, v6.s6_addr + 12, text, sizeof text);
    } else {
      inet_ntop(AF_INET6, &v6, text, sizeof text);
    }
  }
  return text;
}

int use_current_identity(SSL* ssl, void* find) {
  const auto identity = (*static_cast<const Gate::FindIdentity*>(find))();
  return identity && use_identity(ssl, *identity) ? 1 : 0;
}

}  // namespace

Gate::Gate(GateOptions options, Serve serve, FindIdentity identity)
    : options_(std::move(options)), serve_(std::move(serve)), find_identity_(std::move(identity)) {
  if (!find_identity_) return;
  context_.reset(SSL_CTX_new(TLS_server_method()));
  if (!context_) fail_internal("a TLS context could not be made: " + openssl_error());
  SSL_CTX_set_min_proto_version(context_.get(), TLS1_2_VERSION);
  SSL_CTX_set_options(context_.get(), SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_mode(context_.get(),
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_session_cache_mode(context_.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_cert_cb(context_.get(), use_current_identity, const_cast<FindIdentity*>(&find_identity_));
}

Gate::~Gate() { stop(); }

void Gate::listen() {
  const std::string where = options_.address + ":" + std::to_string(options_.port);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(options_.address.c_str(), std::to_string(options_.port).c_str(), &hints, &found) != 0)
    fail_io("the " + options_.name + " server cannot listen on " + where + ": that is no address");
  const std::unique_ptr<addrinfo, OpenSslFree<freeaddrinfo>> address(found);
  listener_ = ::socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int on = 1, off = 0;
  if (listener_ >= 0) {
    setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address->ai_family == AF_INET6) setsockopt(listener_, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (listener_ < 0 || ::bind(listener_, address->ai_addr, address->ai_addrlen) != 0 ||
      ::listen(listener_, kBacklog) != 0 || getsockname(listener_, reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    const std::string why = std::strerror(errno);
    if (listener_ >= 0) ::close(listener_);
    listener_ = -1;
    fail_io("the " + options_.name + " server cannot listen on " + where + ": " + why);
  }
  port_ = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                            : reinterpret_cast<sockaddr_in&>(bound).sin_port);
}

void Gate::start() {
  TRIREME_CHECK(!thread_.joinable(), "an HTTP server starts once");
  ignore_sigpipe();
  listen();
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (epoll_ < 0 || wake_ < 0) fail_io("the " + options_.name + " server: " + std::strerror(errno));
  for (const int fd : {listener_, wake_}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  }
  const auto threads = static_cast<size_t>(std::max(1, options_.threads));
  pool_ = std::make_unique<httplib::ThreadPool>(threads, threads, options_.max_waiting);
  thread_ = std::thread([this] { run(); });
  log_debug(options_.name, "listening on " + options_.address + ":" + std::to_string(port_));
}

void Gate::stop() {
  stopping_ = true;
  if (thread_.joinable()) {
    wake();
    thread_.join();
  }
  if (pool_) pool_->shutdown();
  pool_.reset();
  for (int* fd : {&epoll_, &wake_}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

void Gate::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof one);  // full: it is awake anyway
}

void Gate::run() {
  std::array<epoll_event, 256> events;
  std::optional<Deadline> stop_by;
  while (true) {
    const int count = epoll_wait(epoll_, events.data(), events.size(), static_cast<int>(kLook.count()));
    for (int i = 0; i < count; ++i) {
      const int fd = events[static_cast<size_t>(i)].data.fd;
      if (fd == wake_) {
        uint64_t times = 0;
        [[maybe_unused]] const ssize_t taken = ::read(wake_, &times, sizeof times);
      } else if (fd == listener_) {
        accept_some();
      } else if (const auto found = connections_.find(fd); found != connections_.end()) {
        on_event(*found->second);
      }
    }
    take_returned();
    expire();
    if (!stopping_) continue;
    if (!stop_by) {
      stop_by = Deadline::after(kStop);
      ::close(listener_);
      listener_ = -1;
    }
    std::vector<Connection*> idle;
    for (const auto& [fd, c] : connections_) {
      if (c->state != Connection::State::kBusy && (c->state != Connection::State::kWriting || stop_by->passed()))
        idle.push_back(c.get());
    }
    for (Connection* c : idle) close(*c);
    if (connections_.empty()) return;
  }
}

void Gate::accept_some() {
  for (int i = 0; i < kAcceptsInARow && listener_ >= 0; ++i) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    const int fd = accept4(listener_, reinterpret_cast<sockaddr*>(&address), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EMFILE && errno != ENFILE) return;
      if (evict(nullptr)) continue;
      std::this_thread::sleep_for(Milliseconds(10));  // all descriptors are somebody else's
      return;
    }
    auto c = std::make_unique<Connection>(fd, peer_name(address));
    const auto known = peers_.find(c->peer);
    if ((known != peers_.end() && known->second >= options_.max_per_peer && !evict(&c->peer)) ||
        (connections_.size() >= options_.max_connections && !evict(nullptr))) {
      continue;  // closes it
    }
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (context_) {
      c->ssl.reset(SSL_new(context_.get()));
      if (!c->ssl || SSL_set_fd(c->ssl.get(), fd) != 1) continue;
      SSL_set_accept_state(c->ssl.get());
      c->state = Connection::State::kHandshake;
    }
    c->wait_until(options_.request_timeout);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLONESHOT;
    event.data.fd = fd;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) continue;
    ++peers_[c->peer];
    connections_.emplace(fd, std::move(c));
  }
}

// Closes the one that we have waited for longest, of one peer or of all. False when all are being answered.
bool Gate::evict(const std::string* peer) {
  Connection* oldest = nullptr;
  for (const auto& [fd, c] : connections_) {
    if (c->state == Connection::State::kBusy || c->state == Connection::State::kWriting) continue;
    if (peer && c->peer != *peer) continue;
    if (!oldest || c->since < oldest->since) oldest = c.get();
  }
  if (oldest) close(*oldest);
  return oldest != nullptr;
}

void Gate::close(Connection& c) {
  buffered_ -= c.counted;
  const auto peer = peers_.find(c.peer);
  if (--peer->second == 0) peers_.erase(peer);
  connections_.erase(c.fd);  // c is gone
}

void Gate::arm(Connection& c, uint32_t events) {
  epoll_event event{};
  event.events = events | EPOLLONESHOT;
  event.data.fd = c.fd;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, c.fd, &event);
}

void Gate::on_event(Connection& c) {
  switch (c.state) {
    case Connection::State::kHandshake:
      if (!shake_hands(c)) return;
      [[fallthrough]];
    case Connection::State::kReading:
      read_some(c);
      return;
    case Connection::State::kWriting:
      go_on(c);
      return;
    case Connection::State::kDraining:
      drain(c);
      return;
    case Connection::State::kBusy:
      return;
  }
}

// True when it is done; else the connection waits for more, or is gone.
bool Gate::shake_hands(Connection& c) {
  const Io result = c.handshake();
  if (result == Io::kDone) {
    c.state = Connection::State::kReading;
    return true;
  }
  if (result == Io::kDead) {
    close(c);
  } else {
    arm(c, result == Io::kWantWrite ? EPOLLOUT : EPOLLIN);
  }
  return false;
}

void Gate::read_some(Connection& c) {
  // No more than the longest request: what follows one waits in the kernel.
  const size_t most = options_.limits.max_head_bytes + options_.limits.max_body_bytes;
  const bool first = c.in.empty();
  const Io result = c.read(most);
  if (result == Io::kDead) {
    close(c);
    return;
  }
  if (first && !c.in.empty() && c.served > 0) c.wait_until(options_.request_timeout);
  buffered_ += c.in.size() - c.counted;
  c.counted = c.in.size();
  const int fd = c.fd;
  while (buffered_ > options_.max_buffered_bytes && evict(nullptr)) {
    if (connections_.count(fd) == 0) return;
  }
  c.want = result == Io::kWantWrite ? EPOLLOUT : EPOLLIN;
  advance(c);
}

// Something to answer in what was read? Else waits for more.
void Gate::advance(Connection& c) {
  const RequestScan scan = scan_request(c.in, options_.limits);
  if (scan.state == RequestScan::State::kRefused) {
    answer_now(c, scan.status, scan.why);
  } else if (scan.state == RequestScan::State::kWhole) {
    if (scan.expect_at > 0) c.hide_expectation(scan.expect_at);
    c.request_size = scan.size;
    dispatch(c);
  } else if (c.eof) {
    close(c);
  } else {
    if (scan.expect_at > 0) {
      c.hide_expectation(scan.expect_at);
      c.out += "HTTP/1.1 100 Continue\r\n\r\n";
      if (c.flush() == Io::kDead) {
        close(c);
        return;
      }
    }
    arm(c, c.want);
  }
}

void Gate::dispatch(Connection& c) {
  if (busy_ + c.counted > options_.max_buffered_bytes) return answer_now(c, 503, "busy");
  buffered_ -= c.counted;
  busy_ += c.counted;
  c.state = Connection::State::kBusy;
  c.until = SteadyClock::now() + options_.answer_timeout;
  const bool taken = pool_->enqueue([this, &c] {  // c stays until it has come back
    Exchange exchange(c);
    bool keep = false;
    try {
      keep = serve_(exchange);
    } catch (const std::exception& e) {
      log_error(options_.name, e.what());
    }
    c.keep = keep && !exchange.said_close() && !exchange.failed();
    c.dead = exchange.failed();
    {
      std::lock_guard lock(returned_mutex_);
      returned_.push_back(c.fd);
    }
    wake();
  });
  if (taken) return;
  busy_ -= c.counted;
  buffered_ += c.counted;
  answer_now(c, 503, "busy");
}

void Gate::take_returned() {
  std::vector<int> returned;
  {
    std::lock_guard lock(returned_mutex_);
    returned.swap(returned_);
  }
  for (const int fd : returned) {
    Connection& c = *connections_.at(fd);
    ++c.served;
    busy_ -= c.counted;
    c.in.erase(0, c.request_size);
    c.in.shrink_to_fit();  // what is not counted is not held
    c.counted = c.in.size();
    buffered_ += c.counted;
    c.keep = c.keep && !c.eof && !stopping_;
    if (c.dead) {
      close(c);
      continue;
    }
    c.state = Connection::State::kWriting;
    go_on(c);
  }
}

// Writes what is left of the answer; then the next request, or the end.
void Gate::go_on(Connection& c) {
  const Io result = c.flush();
  if (result == Io::kDead) {
    close(c);
  } else if (result != Io::kDone) {
    arm(c, result == Io::kWantWrite ? EPOLLOUT : EPOLLIN);
  } else if (!c.keep) {
    c.say_goodbye();
    c.state = Connection::State::kDraining;
    c.wait_until(kDrain);
    drain(c);
  } else {
    c.state = Connection::State::kReading;
    c.wait_until(c.in.empty() ? options_.keep_alive : options_.request_timeout);
    c.want = EPOLLIN;
    if (c.in.empty() && !c.pending()) {
      arm(c, EPOLLIN);
    } else {
      read_some(c);
    }
  }
}

// Closing a socket with unread bytes resets the connection, and the peer might never read why it was refused.
void Gate::drain(Connection& c) {
  if (c.discard(kDrainBytes)) {
    arm(c, EPOLLIN);
  } else {
    close(c);
  }
}

void Gate::answer_now(Connection& c, int status, const std::string& message) {
  c.out += "HTTP/1.1 " + std::to_string(status) + " " + httplib::status_message(status) +
           "\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: " +
           std::to_string(message.size() + 1) + "\r\n" + (status == 503 ? "Retry-After: 1\r\n" : "") + "\r\n" +
           message + "\n";
  c.keep = false;
  c.in.clear();  // nothing of it is read any more
  c.in.shrink_to_fit();
  buffered_ -= c.counted;
  c.counted = 0;
  c.state = Connection::State::kWriting;
  c.until = SteadyClock::now() + options_.answer_timeout;
  go_on(c);
}

void Gate::expire() {
  const auto now = SteadyClock::now();
  if (now < next_look_) return;
  next_look_ = now + kLook;
  std::vector<Connection*> late;
  for (const auto& [fd, c] : connections_) {
    if (c->state != Connection::State::kBusy && now >= c->until) late.push_back(c.get());
  }
  for (Connection* c : late) close(*c);
}

}  // namespace trireme::kube
