// PathProbe: asks the address that trainers report to, as they do, whether anything answers there, again and again.
// When nobody is heard of, that tells a broken path from trainers that hang.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "base/clock.h"
#include "operator/controller/reports.h"

namespace trireme::telemetry {

// What a row of such questions tells. Pure: the time is an argument.
class PathAnswers final {
 public:
  // An answer older than `patience` says nothing of now: the asker stood still.
  explicit PathAnswers(Milliseconds patience) : patience_(patience) {}
  void note(bool answered, SteadyClock::time_point now);
  // Broken, and with it the end of answering: two questions in a row without an answer of any kind.
  controller::OwnPath at(SteadyClock::time_point now) const;

 private:
  const Milliseconds patience_;
  int failures_ = 0;
  SteadyClock::time_point since_;
  std::optional<SteadyClock::time_point> last_;  // answer
};

class PathProbe final {
 public:
  // `url`: http(s)://host[:port][/...]. Certificates are not checked: nothing is told and nothing believed.
  explicit PathProbe(const std::string& url, Milliseconds interval = Milliseconds(10000),
                     Milliseconds timeout = Milliseconds(3000));
  ~PathProbe();  // within one timeout
  PathProbe(const PathProbe&) = delete;
  PathProbe& operator=(const PathProbe&) = delete;

  controller::OwnPath found() const;  // any thread

 private:
  void run();
  bool answers() const;

  const std::string origin_;
  const Milliseconds interval_, timeout_;
  mutable std::mutex mutex_;
  PathAnswers answers_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace trireme::telemetry
