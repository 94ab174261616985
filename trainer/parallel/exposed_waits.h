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
// Of exchanges those of rows for experts are told apart: where rows or counts are awaited that experts want.
// On a CPU that is what the host waits; on a device what the stream stands still, in kernels that exchange too. Counted
// from start() to take(): elsewhere, as in the thousands of steps of a rollout, nothing is measured. Any thread.
class ExposedWaits final {
 public:
  enum class Kind { kExchange, kStage };
  struct Seconds {
    double exchange = 0, stage = 0;
    double experts = 0;  // of `exchange`
  };
  // While it lives, what this thread waits for exchanges is for experts' rows.
  class ForExperts final {
   public:
    ForExperts();
    ~ForExperts();
    ForExperts(const ForExperts&) = delete;
    ForExperts& operator=(const ForExperts&) = delete;

   private:
    bool before_;
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
    bool for_experts;
    TimeMark begin, end;
  };
  void count(Kind kind, bool for_experts, double seconds);  // with the lock held

  std::mutex mutex_;
  std::atomic<bool> counts_ = false;
  Seconds seconds_;
  std::vector<Queued> queued_;
};

}  // namespace trireme
