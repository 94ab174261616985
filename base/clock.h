// Deadlines on the steady clock: every wait in the project takes one. The time of day as text.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace trireme {

using SteadyClock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

class Deadline final {
 public:
  // Never, where the clock does not reach that far (292 years).
  static Deadline after(Milliseconds duration) {
    const auto now = SteadyClock::now();
    const auto most = std::chrono::duration_cast<Milliseconds>(SteadyClock::time_point::max() - now);
    return Deadline(duration < most ? now + duration : SteadyClock::time_point::max());
  }
  explicit Deadline(SteadyClock::time_point at) : at_(at) {}
  bool passed() const { return SteadyClock::now() >= at_; }
  // Never negative.
  Milliseconds remaining() const {
    return std::max(Milliseconds(0), std::chrono::duration_cast<Milliseconds>(at_ - SteadyClock::now()));
  }
  SteadyClock::time_point at() const { return at_; }

 private:
  SteadyClock::time_point at_;
};

// A deadline for something that may take any time as long as it moves: the time begins anew with each new count.
class Patience final {
 public:
  explicit Patience(Milliseconds time) : time_(time), limit_(Deadline::after(time)) {}
  // Whether `count`, never negative, is another than the last one.
  bool moved(int64_t count) {
    if (std::exchange(count_, count) == count) return false;
    limit_ = Deadline::after(time_);
    return true;
  }
  bool passed() const { return limit_.passed(); }
  int64_t seconds() const { return time_.count() / 1000; }

 private:
  Milliseconds time_;
  Deadline limit_;
  int64_t count_ = -1;
};

class Stopwatch final {
 public:
  double seconds() const { return std::chrono::duration<double>(SteadyClock::now() - start_).count(); }
  // Seconds since the last lap (or construction), and starts the next one.
  double lap() {
    const auto now = SteadyClock::now();
    const double seconds = std::chrono::duration<double>(now - start_).count();
    start_ = now;
    return seconds;
  }

 private:
  SteadyClock::time_point start_ = SteadyClock::now();
};

// Seconds since 1970 of the wall clock: for what others write down, never for a wait.
inline double unix_now_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Seconds since 1970, and now, as RFC 3339: "2026-01-02T03:04:05Z".
std::string utc_time(int64_t unix_s);
std::string utc_now();

}  // namespace trireme
