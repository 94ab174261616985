// Reporting: one object through which the loops tell the world what happens (step log, Prometheus, terminal, operator).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "trainer/config/config.h"
#include "trainer/telemetry/phases.h"
#include "trainer/telemetry/rollout_log.h"

namespace trireme {

struct ReportingOptions {
  bool terminal = true;    // rank 0 prints steps
  std::string status_url;  // operator; empty: none
  std::string status_token_file;
  std::string status_ca_file;
  std::string attempt = "0";
  // MLflow's own variables: where its server is unless the configuration says, and who asks.
  std::string mlflow_tracking_uri, mlflow_token, mlflow_username, mlflow_password;
};

struct StepReport {
  int64_t step = 0;
  PhaseTimes phases;                     // of this rank
  double tokens = 0;                     // prompts and responses of all that was generated, all ranks
  double generated_tokens = 0;           // of these: responses
  double trained_tokens = -1;            // of `tokens`; less under dynamic sampling, -1: all
  double samples = 0;                    // trained
  std::map<std::string, double> values;  // NeMo-RL's names: train/..., validation/...
};

// Called from the training thread. Nothing here blocks on the network or fails a run once it is constructed.
class Reporting final {
 public:
  Reporting(const Config& config, const ReportingOptions& options, int rank, int world_size, int64_t total_steps);
  ~Reporting();
  Reporting(const Reporting&) = delete;
  Reporting& operator=(const Reporting&) = delete;

  // All ranks have met and everything is loaded; the run goes on after `resumed_step` (0: a new run).
  void ready(int64_t resumed_step);
  void phase(const std::string& name, int64_t step);
  void heartbeat();
  // Generation processes that are there, and that were lost or left since the start.
  void engines(int64_t live, int64_t lost);
  void step(const StepReport& report);
  void validation(int64_t step, double accuracy, double length, double seconds);
  // The log of rollouts; whether this rank writes one of this step, else no texts need to be made.
  bool wants_rollouts(int64_t step) const;
  void rollouts(int64_t step, const std::vector<RolloutLine>& lines);
  // A validation that no step's report carries: before the first step, or after the last.
  void log_validation(int64_t step, const std::map<std::string, double>& values);
  void checkpointed(int64_t step);
  // The ranks have given up waiting for `rank`: the operator is told.
  void stuck(int rank);
  // The loop has ended well: writes the report page, waits (10 s at most) for the trackers.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
