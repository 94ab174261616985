// Tracker: where else the values of a run's steps go (TensorBoard, Weights & Biases, MLflow); TrackerQueue feeds them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/clock.h"

namespace trireme {

// What a tracker is told about the run when it begins.
struct TrackedRun {
  nlohmann::json config;     // the resolved configuration, nested
  int64_t resumed_step = 0;  // 0: a new run
};

// The values of one step by full name ("train/reward"); not finite ones are left out by each tracker.
struct TrackedStep {
  int64_t step = 0;
  double wall_time_s = 0;  // since 1970
  std::map<std::string, double> values;
};

// Called from the queue's thread only. What throws is tried again with the same arguments.
class Tracker {
 public:
  virtual ~Tracker() = default;
  virtual const char* name() const = 0;
  virtual void begin(const TrackedRun& run) = 0;
  // Steps come in order; the same step may come again with further values.
  virtual void log(const TrackedStep& step) = 0;
  virtual void end(bool succeeded) = 0;
};

struct TrackerQueueOptions {
  Milliseconds retry{5000};         // after a failure, doubled up to 32 times
  Milliseconds end_timeout{10000};  // of the destructor and of end()
  size_t most_waiting = 10000;      // steps for one tracker
};

// One thread a tracker, so that a server that does not answer holds up no file.
class TrackerQueue final {
 public:
  TrackerQueue(std::vector<std::unique_ptr<Tracker>> trackers, const TrackedRun& run,
               const TrackerQueueOptions& options = {});
  // Like end(false), where end() was not called.
  ~TrackerQueue();
  TrackerQueue(const TrackerQueue&) = delete;
  TrackerQueue& operator=(const TrackerQueue&) = delete;

  // Returns at once. Thread-safe.
  void log(int64_t step, std::map<std::string, double> values);
  // Waits until everything is handed over, for at most `end_timeout`; what is left is lost, and said.
  void end(bool succeeded);

 private:
  class Lane;
  std::vector<std::unique_ptr<Lane>> lanes_;
  Milliseconds end_timeout_{10000};
  bool ended_ = false;
};

}  // namespace trireme
