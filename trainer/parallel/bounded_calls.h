// BoundedCalls: a deadline for calls of a library that may never return.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace trireme {

// The calls run on a thread of its own, one at a time, in the order in which they come, from any thread. One that does
// not return is left behind with the thread and all that it owns: it cannot be ended.
class BoundedCalls final {
 public:
  explicit BoundedCalls(Milliseconds limit);
  // No call is under way but such a one.
  ~BoundedCalls();
  BoundedCalls(const BoundedCalls&) = delete;
  BoundedCalls& operator=(const BoundedCalls&) = delete;

  // Returns or throws what `fn` does. Throws Error(kTimeout) when it has not returned `limit` after the call, calls
  // before it included; then all who wait throw, and every later call does at once. `fn` must own what it uses: it may
  // outlive the caller.
  template <typename Fn>
  auto call(Fn fn) {
    const auto task = std::make_shared<std::packaged_task<decltype(fn())()>>(std::move(fn));
    auto result = task->get_future();
    run([task] { (*task)(); });
    return result.get();
  }
  bool lost() const;  // a call has not returned in time

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state);
  void run(std::function<void()> task);

  const Milliseconds limit_;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace trireme
