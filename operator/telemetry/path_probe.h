// PathProbe: asks the address that trainers report to, as they do, whether anything answers there. When nobody is heard
// of, that tells a broken path from trainers that hang.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "base/clock.h"

namespace trireme::telemetry {

class PathProbe final {
 public:
  // `url`: http(s)://host[:port][/...]. Certificates are not checked: nothing is told and nothing believed.
  explicit PathProbe(const std::string& url, Milliseconds interval = Milliseconds(10000),
                     Milliseconds timeout = Milliseconds(3000));
  ~PathProbe();  // within one timeout
  PathProbe(const PathProbe&) = delete;
  PathProbe& operator=(const PathProbe&) = delete;

  // The last two questions had no answer of any kind. Any thread.
  bool broken() const { return failures_ >= 2; }

 private:
  void run();
  bool answers() const;

  const std::string origin_;
  const Milliseconds interval_, timeout_;
  std::atomic<int> failures_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace trireme::telemetry
