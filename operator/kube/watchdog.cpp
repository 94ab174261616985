#include "operator/kube/watchdog.h"

#include <algorithm>

namespace trireme::kube {
namespace {

constexpr Milliseconds kTick{100};  // guards that begin and end in between cost nothing but a map entry
constexpr Milliseconds kAgain{20};  // between two shutdowns of one connection

}  // namespace

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Watchdog::Guard::Guard(Watchdog& dog, httplib::ClientImpl& http, SteadyClock::time_point at) : dog_(dog), http_(http) {
  std::lock_guard lock(dog_.mutex_);
  const bool first = dog_.guarded_.empty();
  dog_.guarded_[&http] = at;
  if (!dog_.thread_.joinable()) dog_.thread_ = std::thread([&dog] { dog.run(); });
  if (first) dog_.wake_.notify_all();
}

// Under the mutex: when it returns, the thread no longer touches the client.
Watchdog::Guard::~Guard() {
  std::lock_guard lock(dog_.mutex_);
  dog_.guarded_.erase(&http_);
}

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (guarded_.empty()) {
      wake_.wait(lock);
      continue;
    }
    const auto now = SteadyClock::now();
    bool late = false;
    for (auto& [http, at] : guarded_) {
      if (now < at) continue;
      late = true;
      http->stop();
    }
    wake_.wait_for(lock, late ? kAgain : kTick, [this] { return stopping_; });
  }
}

}  // namespace trireme::kube
