// LogLimit: for a line that would come with every request: at most one in a while, which says how many were left out.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "base/clock.h"

namespace trireme {

// Any thread.
class LogLimit final {
 public:
  explicit LogLimit(Milliseconds gap) : gap_(gap) {}

  // What to append to the line, which is due; nothing: it is left out.
  std::optional<std::string> due(SteadyClock::time_point now = SteadyClock::now()) {
    std::lock_guard lock(mutex_);
    if (said_ && now - *said_ < gap_) {
      ++left_out_;
      return std::nullopt;
    }
    said_ = now;
    const int64_t left_out = left_out_;
    left_out_ = 0;
    return left_out == 0 ? "" : " (and " + std::to_string(left_out) + " more like it before)";
  }

 private:
  const Milliseconds gap_;
  std::mutex mutex_;
  std::optional<SteadyClock::time_point> said_;
  int64_t left_out_ = 0;
};

}  // namespace trireme
