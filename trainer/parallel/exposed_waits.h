// ExposedWaits: what this rank's computing has waited for the others.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "trainer/parallel/device_group.h"

namespace trireme {

// Seconds in which nothing was computed since something of another rank was not there: of exchanges, and of pipeline
// stages that had nothing to do (the bubble, with what a message takes). What travels beside computing is not counted.
// On a CPU that is what the host waits; on a device what the stream stands still, in kernels that exchange too. Counted
// from start() to take(): elsewhere, as in the thousands of steps of a rollout, nothing is measured. Any thread.
class ExposedWaits final {
 public:
  enum class Kind { kExchange, kStage };
  struct Seconds {
    double exchange = 0, stage = 0;
  };

  void start();
  // Since start(). Waits for the device.
  Seconds take();

  void add(Kind kind, double seconds);
  // Measures what the current stream does for what `launch` queues.
  void queue(Kind kind, const std::function<void()>& launch);

 private:
  struct Queued {
    Kind kind;
    TimeMark begin, end;
  };
  double& of(Kind kind) { return kind == Kind::kStage ? seconds_.stage : seconds_.exchange; }

  std::mutex mutex_;
  std::atomic<bool> counts_ = false;
  Seconds seconds_;
  std::vector<Queued> queued_;
};

}  // namespace trireme
