#include "trainer/parallel/link_pair.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/error.h"
#include "trainer/parallel/own_address.h"

namespace trireme {
namespace {

constexpr int64_t kPieceBytes = int64_t{32} << 20;
constexpr size_t kPiecesUnderWay = 2;
constexpr Milliseconds kPatience{200};     // in which a wait for a key does not look whether it is cancelled
constexpr Milliseconds kLongestPause{10};  // between two looks for a key: a hundred a second, of each who waits

std::string first_line_of(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

// c10d takes 0 for no limit, and connects with whole seconds.
Milliseconds at_least(Milliseconds least, Milliseconds time) { return std::max(least, time); }

}  // namespace

void LinkCancel::cancel() {
  const std::lock_guard<std::mutex> lock(mutex_);
  cancelled_ = true;
  if (abort_) abort_();
}

void LinkCancel::reset() {
  const std::lock_guard<std::mutex> lock(mutex_);
  cancelled_ = false;
}

void LinkCancel::check() const {
  if (cancelled()) throw Error(ErrorKind::kUnavailable, "it was given up");
}

struct LinkStore::Impl {
  std::string where;
  c10::intrusive_ptr<c10d::PrefixStore> scoped;

  template <typename Fn>
  auto call(const char* operation, const std::string& key, Fn&& fn) {
    try {
      return fn();
    } catch (const std::exception& error) {
      throw Error(ErrorKind::kUnavailable, std::string("the job's store at ") + where + ": " + operation + " of '" +
                                               key + "' failed: " + first_line_of(error));
    }
  }
};

LinkStore::LinkStore(const std::string& address, int port, const std::string& attempt, Milliseconds timeout)
    : impl_(std::make_unique<Impl>()) {
  impl_->where = address + ":" + std::to_string(port);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = false;
  options.waitWorkers = false;
  options.timeout = at_least(Milliseconds(1000), timeout);
  try {
    impl_->scoped = c10::make_intrusive<c10d::PrefixStore>("attempt-" + attempt,
                                                           c10::make_intrusive<c10d::TCPStore>(address, options));
  } catch (const std::exception& error) {
    fail_timeout("the job's store at " + impl_->where + " cannot be reached: " + first_line_of(error));
  }
}

LinkStore::~LinkStore() = default;

int64_t LinkStore::add(const std::string& key, int64_t amount) {
  return impl_->call("add", key, [&] { return impl_->scoped->add(key, amount); });
}

void LinkStore::set(const std::string& key, const std::string& value) {
  impl_->call("set", key, [&] { impl_->scoped->set(key, std::vector<uint8_t>(value.begin(), value.end())); });
}

void LinkStore::erase(const std::string& key) {
  impl_->call("delete", key, [&] { impl_->scoped->deleteKey(key); });
}

// c10d's own wait writes a warning whenever it ends without the key.
std::optional<std::string> LinkStore::poll(const std::string& key, Milliseconds patience) {
  const Deadline deadline = Deadline::after(patience);
  return impl_->call("get", key, [&]() -> std::optional<std::string> {
    for (Milliseconds pause(1);; pause = std::min(2 * pause, kLongestPause)) {
      if (impl_->scoped->check({key})) {
        const std::vector<uint8_t> bytes = impl_->scoped->get(key);
        return std::string(bytes.begin(), bytes.end());
      }
      if (deadline.passed()) return std::nullopt;
      std::this_thread::sleep_for(std::min(pause, deadline.remaining()));
    }
  });
}

std::string LinkStore::get(const std::string& key, const Deadline& deadline, const LinkCancel& cancel,
                           const std::string& missing) {
  for (;;) {
    cancel.check();
    if (auto value = poll(key, std::min(kPatience, deadline.remaining()))) return *value;
    if (deadline.passed()) fail_timeout(missing);
  }
}

struct LinkPair::Impl {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo;
  int side = 0;
  std::string peer;
  LinkCancel* cancel = nullptr;
};

LinkPair::LinkPair(LinkStore& store, const std::string& name, int side, const std::string& address,
                   const std::string& peer, const Deadline& deadline, LinkCancel& cancel)
    : impl_(std::make_unique<Impl>()) {
  impl_->side = side;
  impl_->peer = peer;
  impl_->cancel = &cancel;
  auto options = c10d::ProcessGroupGloo::Options::create(at_least(Milliseconds(1), deadline.remaining()));
  options->threads = 1;
  try {
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(own_address_towards(address)));
    impl_->gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<c10d::PrefixStore>(name, store.impl().scoped), side, 2, options);
  } catch (const std::exception& error) {
    throw Error(deadline.passed() ? ErrorKind::kTimeout : ErrorKind::kUnavailable,
                "the connection '" + name + "' to " + peer + " could not be made: " + first_line_of(error));
  }
}

LinkPair::~LinkPair() = default;

void LinkPair::exchange(const at::Tensor& tensor, bool sends, const Deadline& deadline,
                        const std::function<void(int64_t)>& on_bytes) {
  TRIREME_CHECK(tensor.is_cpu() && tensor.is_contiguous(), "a link takes contiguous CPU tensors");
  const at::Tensor bytes = tensor.detach().view({-1}).view(at::kByte);
  struct Piece {
    c10::intrusive_ptr<c10d::Work> work;
    int64_t end = 0;
  };
  std::deque<Piece> under_way;
  LinkCancel& cancel = *impl_->cancel;
  const auto finish_oldest = [&] {
    const Piece piece = under_way.front();
    {
      const std::lock_guard<std::mutex> lock(cancel.mutex_);
      cancel.check();
      cancel.abort_ = [work = piece.work] { work->abort(); };
    }
    std::string problem;
    try {
      if (!piece.work->wait(at_least(Milliseconds(1), deadline.remaining()))) problem = "it was ended";
    } catch (const std::exception& error) {
      problem = first_line_of(error);
    }
    {
      const std::lock_guard<std::mutex> lock(cancel.mutex_);
      cancel.abort_ = nullptr;
    }
    cancel.check();
    if (!problem.empty()) {
      const bool late = deadline.passed();
      throw Error(late ? ErrorKind::kTimeout : ErrorKind::kUnavailable,
                  impl_->peer + (late ? " stood still until the deadline: " : " has gone: ") + problem);
    }
    under_way.pop_front();
    if (on_bytes) on_bytes(piece.end);
  };
  for (int64_t begin = 0; begin < bytes.numel(); begin += kPieceBytes) {
    const int64_t size = std::min(kPieceBytes, bytes.numel() - begin);
    std::vector<at::Tensor> part{bytes.narrow(0, begin, size)};
    try {
      under_way.push_back(
          {sends ? impl_->gloo->send(part, 1 - impl_->side, 0) : impl_->gloo->recv(part, 1 - impl_->side, 0),
           begin + size});
    } catch (const std::exception& error) {
      throw Error(ErrorKind::kUnavailable, impl_->peer + " has gone: " + first_line_of(error));
    }
    while (under_way.size() >= kPiecesUnderWay) finish_oldest();
  }
  while (!under_way.empty()) finish_oldest();
}

void LinkPair::send(const at::Tensor& tensor, const Deadline& deadline, const std::function<void(int64_t)>& on_bytes) {
  exchange(tensor, /*sends=*/true, deadline, on_bytes);
}

void LinkPair::receive(at::Tensor tensor, const Deadline& deadline, const std::function<void(int64_t)>& on_bytes) {
  exchange(tensor, /*sends=*/false, deadline, on_bytes);
}

}  // namespace trireme
