// PolicyTrainer: one rollout -> reference log-probs, loss, gradients, optimizer steps.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "trainer/algorithms/early_gradients.h"
#include "trainer/algorithms/loss.h"
#include "trainer/algorithms/step_dump.h"
#include "trainer/algorithms/step_results.h"
#include "trainer/algorithms/training_batch.h"
#include "trainer/config/config.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/parallel/context.h"
#include "trainer/telemetry/phases.h"

namespace trireme {

class PolicyTrainer final {
 public:
  // `reference` may be null (no KL). `row_exact`: linear layers are, so that the sampler's log-probs are the previous
  // log-probs. `timer` gets the phases logprobs and training. All outlive the trainer.
  PolicyTrainer(const Config& config, Model& policy, const Model* reference, DistributedAdamW& optimizer,
                ParallelContext& context, PhaseTimer& timer, bool row_exact);

  // Collective: every rank passes the same samples. Trains this rank's share in as many optimizer steps as the batch
  // arithmetic says. Weights that ranks share are whole before and after, not in between. Advantages must have been
  // assigned. When `dump` is given, the tensors of this rank's first optimizer step are written there as safetensors;
  // only on a pipeline's last stage, which has them. `version`: of the weights as they are. Samples of these weights
  // have the sampler's log-probs as previous ones where rows are exact; for older ones a pass gives them, or, with
  // grpo.async_grpo.ratio_from generation, they have the sampler's too. `passes` over the samples, in all of which the
  // previous log-probs are those of before the first one.
  TrainResult train(const std::vector<Sample>& samples, const std::string& dump = {}, int64_t version = 0,
                    int64_t passes = 1);
  // How many passes over rollouts were trained before: where the schedules of learning rate and weight decay are, which
  // move once a pass. For a resumed run.
  void set_passes_done(int64_t passes) { passes_done_ = passes; }
  int64_t passes_done() const { return passes_done_; }

  // Whether a sample's previous log-probs, under weights of `version`, need no pass: they are there, or the sampler's.
  bool knows_previous(const Sample& sample, int64_t version) const {
    return known_previous(sample, version) != nullptr;
  }

  // Adds the gradients of samples of the first optimizer step of the next train() before all of its samples are there,
  // not divided by the batch's counts yet. They must have what train() wants of samples and, with a KL term, reference
  // log-probs; train() gets them with trained_early set. Returns when the gradients are there. From any one thread,
  // while nobody trains; where rows are exact and the configuration could have grpo.early_gradients.
  void train_early(const std::vector<Sample>& samples);

  // Called after every micro-batch, for heartbeats. May be empty.
  std::function<void()> on_progress;
  // Frees memory of the device that training may have until the next rollout (set_recompute). May be empty.
  std::function<void()> make_room;
  // Whether weights that ranks share are whole behind train(), for whatever generates with them.
  bool gathers_weights = true;

 private:
  using OptimizerBatch = std::vector<TrainingBatch>;  // this rank's micro-batches of one optimizer step

  // Everything that belongs to the weights before the first optimizer step: all micro-batches, with reference and
  // previous log-probs. One for each optimizer step, on every rank as many.
  std::vector<OptimizerBatch> prepare_steps(const std::vector<Sample>& samples, int64_t version, bool dumped);
  // The log-probs of a sample that need no pass; null: one must compute them.
  using Known = std::function<const std::vector<float>*(const Sample&)>;
  const std::vector<float>* known_previous(const Sample& sample, int64_t version) const;
  // This rank's micro-batches of samples [begin, end) that were not trained early.
  std::vector<Members> own_micro_batches(const std::vector<Sample>& samples, int64_t begin, int64_t end) const;
  // Log-probs of the responses of every sample in `micro_batches` under `model`, in micro-batches of the log-prob
  // passes' own size, given back in the given ones' order: one [T] each.
  std::vector<at::Tensor> logprob_pass(const Model& model, const std::vector<Sample>& samples,
                                       const std::vector<Members>& micro_batches, const LogprobOptions& options,
                                       const Known& known);

  struct Trained {
    at::Tensor logprobs;    // [T], detached
    at::Tensor unfiltered;  // likewise, where the KL has others (kl_needs_unfiltered); else undefined
    LossOutput output;
  };
  // The loss of a micro-batch from its hidden states, not differentiated yet.
  Trained loss_of(const TrainingBatch& batch, const at::Tensor& hidden, const ValidCounts& valid) const;
  // Sums over ranks of what the batch and, in the first step, what was trained early count.
  ValidCounts count_valid(const OptimizerBatch& batch, bool first);
  struct Schedule {
    double learning_rate = 0, weight_decay = 0;
  };
  struct StepSums {  // over the micro-batches of this rank's pipeline
    MetricSums metrics;
    int64_t compared_tokens = 0, mismatched_tokens = 0;
  };
  // Backward of all micro-batches of an optimizer step, added to `sums`, on all stages of a pipeline.
  void backward_passes(const OptimizerBatch& batch, const ValidCounts& valid, bool sampled_these, StepDump& dump,
                       StepSums& sums);
  // One optimizer step: these, then the update. Metrics are added to `result`. `last`: no forward follows before the
  // rollout.
  void train_step(const OptimizerBatch& batch, const Schedule& schedule, bool first, bool last, bool sampled_these,
                  const std::string& dump, TrainResult& result);

  const Config& config_;
  Model& policy_;
  const Model* reference_;
  DistributedAdamW& optimizer_;
  ParallelContext& context_;
  PhaseTimer& timer_;
  LossOptions loss_;
  double reward_kl_ = 0;
  LogprobOptions distribution_;
  bool row_exact_ = true;  // linear layers keep a row's bits: the sampler's log-probs are those of the loss
  int64_t passes_done_ = 0;
  EarlyGradients early_;
  std::shared_ptr<RouterWatch> routers_;  // null: the model has no experts
};

}  // namespace trireme
