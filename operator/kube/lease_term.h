// LeaseTerm: until when a lease is held. Once anybody was told that it is over, it is over for everybody: who stopped
// working then must not find himself leading again, without having begun anew. Any thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace trireme::kube {

class LeaseTerm final {
 public:
  void begin(SteadyClock::time_point until) { until_ns_ = nanoseconds(until); }
  // Of a term that was begun. False: it was over for somebody before this.
  bool extend(SteadyClock::time_point until) {
    int64_t before = until_ns_.load();
    return before != kOver && until_ns_.compare_exchange_strong(before, nanoseconds(until));
  }
  // False ends the term.
  bool holds(SteadyClock::time_point now) const {
    int64_t until = until_ns_.load();
    while (nanoseconds(now) >= until) {
      if (until_ns_.compare_exchange_weak(until, kOver)) return false;
    }
    return true;
  }
  SteadyClock::time_point until() const { return SteadyClock::time_point{std::chrono::nanoseconds(until_ns_.load())}; }

 private:
  static constexpr int64_t kOver = 0;
  static int64_t nanoseconds(SteadyClock::time_point at) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
  }
  mutable std::atomic<int64_t> until_ns_{kOver};
};

}  // namespace trireme::kube
