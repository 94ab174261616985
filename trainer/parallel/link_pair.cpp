#include "trainer/parallel/link_pair.h"

#include <ATen/ATen.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "base/error.h"
#include "trainer/parallel/bounded_calls.h"
#include "trainer/parallel/own_address.h"
#include "trainer/parallel/sockets.h"

namespace trireme {
namespace {

constexpr int64_t kPieceBytes = int64_t{32} << 20;
constexpr Milliseconds kPatience{200};  // in which a wait does not look whether it is cancelled
constexpr Milliseconds kHello{2000};    // from a connection to its secret
constexpr Milliseconds kUnreachable{20000};
constexpr Milliseconds kBetweenKeys{10};  // between two looks for a key: a hundred a second, of each who waits

std::string first_line_of(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

// c10d takes 0 for no limit, and connects with whole seconds.
Milliseconds at_least(Milliseconds least, Milliseconds time) { return std::max(least, time); }

// Until the socket can be read or written. Throws Error(kTimeout) that says `late` at the deadline.
void wait_for(int fd, short events, const Deadline& deadline, const LinkCancel& cancel, const std::string& late) {
  for (;;) {
    cancel.check();
    pollfd wanted{fd, events, 0};
    const auto patience = std::min(kPatience, deadline.remaining());
    if (::poll(&wanted, 1, static_cast<int>(patience.count())) > 0) return;
    if (deadline.passed()) fail_timeout(late);
  }
}

}  // namespace

void LinkCancel::check() const {
  if (cancelled()) throw Error(ErrorKind::kUnavailable, "it was given up");
}

struct LinkStore::Impl {
  // c10d waits without limit for most of its answers. Its own deadline, where it has one, says more.
  explicit Impl(Milliseconds timeout) : calls(timeout + Milliseconds(1000)) {}

  std::string where;
  BoundedCalls calls;
  c10::intrusive_ptr<c10d::PrefixStore> scoped;

  // `fn` owns what it uses (BoundedCalls).
  template <typename Fn>
  auto call(const char* operation, const std::string& key, Fn&& fn) {
    try {
      return calls.call(std::forward<Fn>(fn));
    } catch (const std::exception& error) {
      throw Error(ErrorKind::kUnavailable, std::string("the job's store at ") + where + ": " + operation + " of '" +
                                               key + "' failed: " + first_line_of(error));
    }
  }
};

LinkStore::LinkStore(const std::string& address, int port, const std::string& attempt, Milliseconds timeout)
    : impl_(std::make_unique<Impl>(at_least(Milliseconds(1000), timeout))) {
  impl_->where = address + ":" + std::to_string(port);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = false;
  options.waitWorkers = false;
  options.timeout = at_least(Milliseconds(1000), timeout);
  try {
    impl_->scoped = c10::make_intrusive<c10d::PrefixStore>("attempt-" + attempt, impl_->calls.call([address, options] {
      return c10::make_intrusive<c10d::TCPStore>(address, options);
    }));
  } catch (const std::exception& error) {
    fail_timeout("the job's store at " + impl_->where + " cannot be reached: " + first_line_of(error));
  }
}

LinkStore::~LinkStore() = default;

int64_t LinkStore::add(const std::string& key, int64_t amount) {
  return impl_->call("add", key, [store = impl_->scoped, key, amount] { return store->add(key, amount); });
}

void LinkStore::set(const std::string& key, const std::string& value) {
  impl_->call("set", key, [store = impl_->scoped, key, bytes = std::vector<uint8_t>(value.begin(), value.end())] {
    store->set(key, bytes);
  });
}

void LinkStore::erase(const std::string& key) {
  impl_->call("delete", key, [store = impl_->scoped, key] { store->deleteKey(key); });
}

// c10d's own wait writes a warning whenever it ends without the key.
std::optional<std::string> LinkStore::poll(const std::string& key, Milliseconds patience) {
  const Deadline deadline = Deadline::after(patience);
  const auto look = [store = impl_->scoped, key]() -> std::optional<std::string> {
    if (!store->check({key})) return std::nullopt;
    const std::vector<uint8_t> bytes = store->get(key);
    return std::string(bytes.begin(), bytes.end());
  };
  for (Milliseconds pause(1);; pause = std::min(2 * pause, kBetweenKeys)) {
    if (auto value = impl_->call("get", key, look)) return value;
    if (deadline.passed()) return std::nullopt;
    std::this_thread::sleep_for(std::min(pause, deadline.remaining()));
  }
}

std::string LinkStore::get(const std::string& key, const Deadline& deadline, const LinkCancel& cancel,
                           const std::string& missing) {
  for (;;) {
    cancel.check();
    if (auto value = poll(key, std::min(kPatience, deadline.remaining()))) return *value;
    if (deadline.passed()) fail_timeout(missing);
  }
}

LinkPair::LinkPair(const std::string& peer, LinkCancel& cancel) : peer_(peer), cancel_(cancel) {}

// By the other constructor, so that the destructor closes what there is when this one throws.
LinkPair::LinkPair(LinkStore& store, const std::string& name, int side, const std::string& address,
                   const std::string& peer, const Deadline& deadline, LinkCancel& cancel)
    : LinkPair(peer, cancel) {
  if (side == 0) {
    listen(store, name, address, deadline);
  } else {
    connect(store, name, deadline);
  }
  watch_by_kernel(fd_, kUnreachable);
}

LinkPair::~LinkPair() {
  if (fd_ >= 0) ::close(fd_);
}

void LinkPair::listen(LinkStore& store, const std::string& name, const std::string& address, const Deadline& deadline) {
  uint16_t port = 0;
  const int listener = listen_anywhere(port, peer_);
  const auto close_listener = [&](const int*) { ::close(listener); };
  const std::unique_ptr<const int, decltype(close_listener)> closed(&listener, close_listener);
  const std::string secret = new_secret();
  store.set(name + "/address", own_address_towards(address) + " " + std::to_string(port) + " " + secret);
  for (;;) {
    wait_for(listener, POLLIN, deadline, cancel_, peer_ + " did not come to the connection '" + name + "'");
    const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) continue;  // it has gone again
    fd_ = fd;
    // A stranger holds nobody up for long.
    std::string hello(secret.size(), '\0');
    try {
      move(nullptr, hello.data(), static_cast<int64_t>(hello.size()),
           Deadline(std::min(deadline.at(), SteadyClock::now() + kHello)));
    } catch (const Error&) {
      cancel_.check();
    }
    if (hello == secret) return;
    ::close(std::exchange(fd_, -1));
  }
}

void LinkPair::connect(LinkStore& store, const std::string& name, const Deadline& deadline) {
  const std::string text =
      store.get(name + "/address", deadline, cancel_, peer_ + " did not come to the connection '" + name + "'");
  const size_t first = text.find(' '), second = text.find(' ', first + 1);
  if (first == std::string::npos || second == std::string::npos)
    throw Error(ErrorKind::kUnavailable, "the connection '" + name + "' has no address");
  const std::string host = text.substr(0, first), port = text.substr(first + 1, second - first - 1);
  std::string why;
  fd_ = connect_to(host, port, deadline, why);
  if (fd_ < 0) {
    throw Error(deadline.passed() ? ErrorKind::kTimeout : ErrorKind::kUnavailable,
                peer_ + " cannot be reached at " + host + " port " + port + ": " + why);
  }
  const std::string secret = text.substr(second + 1);
  move(secret.data(), nullptr, static_cast<int64_t>(secret.size()), deadline);
}

void LinkPair::move(const char* to_send, char* to_fill, int64_t size, const Deadline& deadline) {
  for (int64_t done = 0; done < size;) {
    cancel_.check();
    const auto rest = static_cast<size_t>(size - done);
    const ssize_t moved =
        to_send != nullptr ? ::send(fd_, to_send + done, rest, MSG_NOSIGNAL) : ::recv(fd_, to_fill + done, rest, 0);
    if (moved > 0) {
      done += moved;
    } else if (moved < 0 && (errno == EAGAIN || errno == EINTR)) {
      wait_for(fd_, to_send != nullptr ? POLLOUT : POLLIN, deadline, cancel_,
               peer_ + " stood still until the deadline");
    } else {
      throw Error(ErrorKind::kUnavailable,
                  peer_ + " has gone: " + (moved == 0 ? "it has closed the connection" : std::strerror(errno)));
    }
  }
}

void LinkPair::check_peer() const {
  char next = 0;
  const ssize_t there = ::recv(fd_, &next, 1, MSG_PEEK | MSG_DONTWAIT);
  if (there > 0 || (there < 0 && (errno == EAGAIN || errno == EINTR))) return;
  throw Error(ErrorKind::kUnavailable,
              peer_ + " has gone: " + (there == 0 ? "it has closed the connection" : std::strerror(errno)));
}

void LinkPair::exchange(const at::Tensor& tensor, bool sends, const Deadline& deadline,
                        const std::function<void(int64_t)>& on_bytes) {
  TRIREME_CHECK(tensor.is_cpu() && tensor.is_contiguous(), "a link takes contiguous CPU tensors");
  char* const bytes = static_cast<char*>(tensor.data_ptr());
  const auto size = static_cast<int64_t>(tensor.nbytes());
  for (int64_t begin = 0; begin < size; begin += kPieceBytes) {
    const int64_t end = std::min(size, begin + kPieceBytes);
    move(sends ? bytes + begin : nullptr, sends ? nullptr : bytes + begin, end - begin, deadline);
    if (on_bytes) on_bytes(end);
  }
}

void LinkPair::send(const at::Tensor& tensor, const Deadline& deadline, const std::function<void(int64_t)>& on_bytes) {
  exchange(tensor, /*sends=*/true, deadline, on_bytes);
}

void LinkPair::receive(at::Tensor tensor, const Deadline& deadline, const std::function<void(int64_t)>& on_bytes) {
  exchange(tensor, /*sends=*/false, deadline, on_bytes);
}

}  // namespace trireme
