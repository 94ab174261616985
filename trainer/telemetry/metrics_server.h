// MetricsServer: /metrics (Prometheus text) and /healthz of one rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "trainer/telemetry/step_log.h"

namespace trireme {

struct MetricsOptions {
  std::string address = "0.0.0.0";
  int port = 9400;     // 0: chosen by the system, see port()
  int64_t rank = 0;    // label of every series
  double stall_s = 0;  // /healthz answers 503 when beat() was not called for so long; 0: never
};

// Thread-safe; requests are answered on threads of its own. Listens from construction to destruction.
class MetricsServer final {
 public:
  // Throws Error(kIo) when the port is taken or not allowed.
  explicit MetricsServer(const MetricsOptions& options);
  ~MetricsServer();

  int port() const;
  // A finished step: last values, and the histograms of step and phase seconds.
  void observe(const StepRecord& record);
  // Counted apart from steps, as it happens.
  void count_reward_failures(int64_t failures);
  // Generation processes that are there, and that were lost or left since the start.
  void set_engines(int64_t live, int64_t lost);
  void set_checkpoint_step(int64_t step);
  // A sign of life (also given by observe).
  void beat();
  // The text that /metrics serves.
  std::string scrape() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
