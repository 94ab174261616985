// Session: what the training loops share. Ranks, model, optimizer, checkpoints, telemetry, signals.
#pragma once

#include <atomic>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trainer/algorithms/critic_role.h"
#include "trainer/algorithms/failure.h"
#include "trainer/algorithms/reporting.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config/config.h"
#include "trainer/model/model.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/parallel/context.h"
#include "trainer/parallel/transport.h"
#include "trainer/rewards/place.h"
#include "trainer/telemetry/phases.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {

struct TrainOptions {
  Layout layout;
  RendezvousOptions rendezvous;
  std::filesystem::path hf_home;
  ReportingOptions reporting;
  const std::atomic<int>* stop_signal = nullptr;  // non-zero: finish the step, save, leave
  bool checkpoint_on_stop = true;
  std::string job;                 // the RLJob's UID: attempts of one job are ordered (Fence); empty: none
  std::function<void()> on_ready;  // called when the loop is about to begin: from then on stop_signal is read
  Fault fault;                     // for tests
  RewardPlace rewards;
  TransportCheck transport;
  int work_port = 0;  // of rank 0, where generation processes get their work; 0: the system chooses
};

enum class LoopEnd { kFinished, kStopped };  // kStopped: by a signal or checkpoint_must_save_by

struct TrainSummary {
  LoopEnd end = LoopEnd::kFinished;
  int64_t steps = 0;
  std::optional<double> validation;  // the last accuracy (GRPO) or loss (SFT)
};

// Of what a step measured, by its names in the log, what its checkpoint keeps (checkpoint_metric_names).
std::map<std::string, double> metrics_of_step(const Config& config, const std::map<std::string, double>& measured);

// Whether log-probs of the sampler are those of the loss: products and exchanges keep a row's bits, whatever the other
// rows, in passes of the configuration's sizes. `generates`: by this model, whose exchanges of decode steps count too.
// Of all ranks, since how they share the samples depends on it. Collective.
bool rows_are_exact(const Model& model, const Config& config, ParallelContext& context, bool generates);

// The model of a run from its folder, or with policy.random_weights drawn for the configuration there.
std::unique_ptr<Model> load_or_draw_model(const Config& config, const std::filesystem::path& dir,
                                          const ModelOptions& options);

// The critic of a PPO run, as far as this rank has it.
struct CriticState {
  std::unique_ptr<ParallelContext> apart;  // the actor's ranks in the critic's layout; null: that is theirs
  ParallelContext* ranks = nullptr;        // the critic's
  Config config;                           // critic_config() of the run's
  std::filesystem::path model_dir;
  std::unique_ptr<Model> model;
  std::unique_ptr<DistributedAdamW> optimizer;
};

// While there is one, the ranks that the context's thread finds absent are reported.
class AbsenceReports final {
 public:
  AbsenceReports(ParallelContext& context, Reporting& reporting) : context_(context) {
    context.set_on_absent([&](const std::vector<int>& ranks) {
      if (ranks.front() < context.world_size()) reporting.stuck(ranks.front());
    });
  }
  ~AbsenceReports() { context_.set_on_absent({}); }
  AbsenceReports(const AbsenceReports&) = delete;
  AbsenceReports& operator=(const AbsenceReports&) = delete;

 private:
  ParallelContext& context_;
};

class Session final {
 public:
  // Collective. Meets the other ranks, looks at what carries their collectives, loads tokenizer and model, resumes from
  // the newest checkpoint when there is one.
  // `steps`: how many the loop will run, for displays.
  Session(const Config& config, const TrainOptions& options, int64_t steps);
  ~Session() { cause_stay(fault_, context); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Config config;
  ParallelContext context;
  std::filesystem::path model_dir;
  std::shared_ptr<const Tokenizer> tokenizer;
  std::unique_ptr<Model> policy;
  bool linear_is_row_exact = true;
  std::unique_ptr<DistributedAdamW> optimizer;
  std::unique_ptr<CriticState> critic;      // on the actor's ranks; null: the algorithm has none, or it is ...
  std::unique_ptr<CriticLink> critic_link;  // ... on ranks of its own; else null
  std::unique_ptr<Model> reward_model;      // whole on every rank; null: none is used
  std::unique_ptr<CheckpointManager> checkpoints;
  std::optional<CheckpointInfo> resumed;
  Reporting reporting;
  PhaseTimer timer;  // of this rank's steps; an optimizer step's wait for a checkpoint is its own

  // This rank goes on: whoever watches the run, or waits for it, hears so.
  void heartbeat();
  // The loop begins after `step` steps. Collective.
  void ready(int64_t step);
  // True on every rank when any was asked to stop, or the time to save by has come. Throws on every rank when a save
  // that was under way has failed on any. Collective.
  bool should_stop();
  // Whether a stopped run saves first; a deadline to save by always does.
  bool checkpoint_on_stop() const { return checkpoint_on_stop_ || save_by_.has_value(); }
  // Begins to save when checkpointing is enabled and `step` is not saved yet; a save that is still under way is waited
  // for first. Collective. What goes wrong later is thrown by should_stop() of the next step, or by finish_saves().
  // `files`: further ones of rank 0, by their names in the checkpoint's folder.
  void save(int64_t step, const nlohmann::json& state, const std::map<std::string, double>& metrics,
            const std::map<std::string, std::string>& files = {});
  // Returns when what is under way is durable. Collective; at the end of a run, however it ends.
  void finish_saves();
  // Around training: what ranks wait for each other there, in the mean, by its names in the log. Nothing of one rank.
  // Collective.
  void start_waits() { context.start_waits(); }
  void describe_waits(std::map<std::string, double>& values);
  // The step that phases belong to from now on.
  void begin_step(int64_t step) { step_ = step; }
  // For tests: what TrainOptions::fault says, when it is due.
  void cause_fault(int64_t step) {
    if (fault_.kind != Fault::Kind::kNone && fault_.kind != Fault::Kind::kKill && fault_.step == step)
      checkpoints->wait_copied();
    trireme::cause_fault(fault_, step, context, *policy);
  }

 private:
  void tell_saved();
  // `critic_model`: of the algorithm's critic, wherever it is; null: it has none.
  void make_checkpoints(const TrainOptions& options, const ModelConfig* critic_model);
  void watch_phases() {
    if (fault_.kind != Fault::Kind::kKill) return;
    context.set_on_phase([this](const std::string& phase) { cause_kill(fault_, step_, phase, context); });
  }

  const AbsenceReports absences_;  // behind what it reports to, before which it ends
  const Fault fault_;
  int64_t step_ = 0;
  const std::atomic<int>* stop_signal_;
  const std::function<void()> on_ready_;
  bool checkpoint_on_stop_ = true;
  std::optional<SteadyClock::time_point> save_by_;
};

}  // namespace trireme
