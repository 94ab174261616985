// Watchdog: ends requests that outlive their deadline although bytes keep coming. The HTTP library's time-outs are for
// one read each, so a server that drips a header would hold a caller for as long as it likes.
#pragma once

#include <httplib.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "base/clock.h"

namespace trireme::kube {

// Thread-safe. Its thread begins with the first guard.
class Watchdog final {
 public:
  Watchdog() = default;
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // While it lives, `http` is shut down again and again from `at` on.
  class Guard final {
   public:
    Guard(Watchdog& dog, httplib::ClientImpl& http, SteadyClock::time_point at);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    Watchdog& dog_;
    httplib::ClientImpl& http_;
  };

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<httplib::ClientImpl*, SteadyClock::time_point> guarded_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace trireme::kube
