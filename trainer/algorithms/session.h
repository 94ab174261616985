// Session: what the training loops share. Ranks, model, optimizer, checkpoints, telemetry, signals.
#pragma once

#include <atomic>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "trainer/algorithms/failure.h"
#include "trainer/algorithms/reporting.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config/config.h"
#include "trainer/model/model.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/parallel/context.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {

struct TrainOptions {
  Layout layout;
  RendezvousOptions rendezvous;
  std::filesystem::path hf_home;
  ReportingOptions reporting;
  const std::atomic<int>* stop_signal = nullptr;  // non-zero: finish the step, save, leave
  bool checkpoint_on_stop = true;
  std::function<void()> on_ready;  // called when the loop is about to begin: from then on stop_signal is read
  Fault fault;                     // for tests
};

enum class LoopEnd { kFinished, kStopped };  // kStopped: by a signal or checkpoint_must_save_by

struct TrainSummary {
  LoopEnd end = LoopEnd::kFinished;
  int64_t steps = 0;
  std::optional<double> validation;  // the last accuracy (GRPO) or loss (SFT)
};

class Session final {
 public:
  // Collective. Meets the other ranks, loads tokenizer and model, resumes from the newest checkpoint when there is one.
  // `steps`: how many the loop will run, for displays.
  Session(const Config& config, const TrainOptions& options, int64_t steps);

  const Config config;
  ParallelContext context;
  std::filesystem::path model_dir;
  std::shared_ptr<const Tokenizer> tokenizer;
  std::unique_ptr<Model> policy;
  bool exact_linear = true;
  std::unique_ptr<DistributedAdamW> optimizer;
  std::unique_ptr<CheckpointManager> checkpoints;
  std::optional<CheckpointInfo> resumed;
  Reporting reporting;

  // The loop begins after `step` steps. Collective.
  void ready(int64_t step);
  // True on every rank when any was asked to stop, or the time to save by has come. Collective.
  bool should_stop();
  // Whether a stopped run saves first; a deadline to save by always does.
  bool checkpoint_on_stop() const { return checkpoint_on_stop_ || save_by_.has_value(); }
  // Saves when checkpointing is enabled and `step` is not saved yet. Collective. Returns the seconds it took.
  double save(int64_t step, const nlohmann::json& state, const std::map<std::string, double>& metrics);
  // For tests: what TrainOptions::fault says, when it is due.
  void cause_fault(int64_t step) { trireme::cause_fault(fault_, step, context, *policy); }

 private:
  const Fault fault_;
  const std::atomic<int>* stop_signal_;
  const std::function<void()> on_ready_;
  bool checkpoint_on_stop_ = true;
  std::optional<SteadyClock::time_point> save_by_;
};

}  // namespace trireme
