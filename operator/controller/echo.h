// Echo: how long the watch may take to tell of the pods of an attempt that we made, or saw all of, before somebody asks
// the API server itself. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "operator/controller/observed.h"

namespace trireme::controller {

class Echo final {
 public:
  // Pods are about to be made, or their attempt is over: nothing is to be waited for until made().
  void nothing() { attempt_ = -1; }
  void made(int64_t attempt, SteadyClock::time_point now, Milliseconds wait) {
    attempt_ = attempt;
    since_ = now;
    wait_ = wait;
  }
  // All of them are there, and the watch is late. Waiting twice as long as before keeps each news of the job from
  // making another look. `known`: it was waited for them already.
  void late(bool known, int64_t attempt, SteadyClock::time_point now, Milliseconds first, Milliseconds most) {
    made(attempt, now, known && attempt_ == attempt ? std::min(2 * wait_, most) : first);
  }
  // Are pods of this status, which the cache shows, waited for?
  bool awaits(const RLJobStatus& cached) const { return cached.phase == phase::kQueued && attempt_ == cached.attempt; }
  // How much longer; nothing: it is time to ask.
  std::optional<Milliseconds> left(const RLJobStatus& cached, SteadyClock::time_point now) const {
    const auto since = std::chrono::duration_cast<Milliseconds>(now - since_);
    if (!awaits(cached) || since >= wait_) return std::nullopt;
    return wait_ - since;
  }

 private:
  int64_t attempt_ = -1;
  SteadyClock::time_point since_{};
  Milliseconds wait_{0};
};

}  // namespace trireme::controller
