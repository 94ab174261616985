// PolicyTrainer: one rollout -> reference log-probs, loss, gradients, optimizer steps.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "trainer/algorithms/advantages.h"
#include "trainer/algorithms/loss.h"
#include "trainer/algorithms/samples.h"
#include "trainer/config/config.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/parallel/context.h"

namespace trireme {

LossOptions loss_options(const Config& config);
AdvantageOptions advantage_options(const Config& config);
LogprobOptions sampling_distribution(const Config& config);   // what the sampler drew from, replayed in the loss
LogprobOptions reference_distribution(const Config& config);  // the same without filters

struct TrainResult {
  std::map<std::string, double> metrics;  // names of NeMo-RL's train/* group; over all ranks
  int64_t optimizer_steps = 0;
  int64_t buckets_reduced_in_backward = 0;  // of all optimizer steps
  int64_t mismatched_tokens = 0;            // first optimizer step: sampler's and loss's log-probs with different bits
  double logprob_seconds = 0;               // this rank
  double training_seconds = 0;
};

// Rewards -> scaled and shaped rewards, advantages, loss multipliers. Pure; samples in data order, `group_size` apart.
void assign_advantages(std::vector<RolloutSample>& samples, int64_t group_size, const Config& config);

class PolicyTrainer final {
 public:
  // `reference` may be null (no KL term). `exact`: the sampler's log-probs are the previous log-probs.
  PolicyTrainer(const Config& config, Model& policy, const Model* reference, DistributedAdamW& optimizer,
                ParallelContext& context, bool exact);

  // Collective: every rank passes the same samples. Trains this rank's share in as many optimizer steps as the batch
  // arithmetic says. Advantages must have been assigned. When `dump` is given, the tensors of this rank's first
  // optimizer step are written there as safetensors.
  TrainResult train(const std::vector<RolloutSample>& samples, const std::string& dump = {});

  // Adds the gradients of samples of the first optimizer step of the next train() before all of its samples are there,
  // not divided by the batch's counts yet. They must have what train() wants of samples and, with a KL term, reference
  // log-probs; train() gets them with trained_early set. Returns when the gradients are there. From any one thread,
  // while nobody trains; where rows are exact and the configuration could have grpo.early_gradients.
  void train_early(const std::vector<RolloutSample>& samples);

  // Called after every micro-batch, for heartbeats. May be empty.
  std::function<void()> on_progress;
  // Frees memory of the device that training may have until the next rollout (set_recompute). May be empty.
  std::function<void()> make_room;

 private:
  struct Prepared {  // one micro-batch of this rank
    MicroBatch batch;
    at::Tensor generation, previous, reference, advantages, mask, sequence_mask, positive;
  };
  struct MicroBatchSize {  // which one counts says the configuration
    int64_t dynamic_tokens, packed_tokens, samples;
  };
  // Of each of `ranks`; positions in `members`, which are positions in `samples`.
  std::vector<std::vector<Bin>> micro_batches(const std::vector<RolloutSample>& samples, const Bin& members,
                                              const MicroBatchSize& size, int64_t ranks, uint64_t seed) const;
  std::vector<Bin> own_bins(const std::vector<RolloutSample>& samples, const Bin& members, uint64_t seed) const;
  // Log-probs of the answers of every sample in `bins` under `model`, in micro-batches of the log-prob passes' own
  // size, given back in the bins' order: one [T] a bin. `known`: where a sample has them already, or null.
  std::vector<at::Tensor> logprob_pass(const Model& model, const std::vector<RolloutSample>& samples,
                                       const std::vector<Bin>& bins, const LogprobOptions& options,
                                       std::vector<float> RolloutSample::*known = nullptr);
  Prepared prepare(const std::vector<RolloutSample>& samples, const Bin& bin) const;
  struct Trained {
    at::Tensor logprobs;  // [T], detached
    LossOutput output;
  };
  // Forward and backward of a micro-batch.
  Trained train_micro_batch(const Prepared& prepared, double valid_tokens, double valid_sequences);
  // Of train_early() since the last train(): sums whose counts are 1.
  struct Early {
    double tokens = 0, sequences = 0;
    int64_t mismatched_tokens = 0;
    std::map<std::string, double> metrics;
  };
  // Early sums become those of the whole batch.
  void divide_early(double valid_tokens, double valid_sequences);
  void mask_mismatched_sequences(Prepared& prepared) const;

  const Config& config_;
  Model& policy_;
  const Model* reference_;
  DistributedAdamW& optimizer_;
  ParallelContext& context_;
  LossOptions loss_;
  LogprobOptions distribution_;
  bool exact_ = true;
  Early early_;
};

}  // namespace trireme
