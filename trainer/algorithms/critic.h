// CriticTrainer: values of a rollout's states, and the optimizer steps of the model that gives them.
#pragma once

#include <functional>
#include <vector>

#include "trainer/algorithms/metric_sums.h"
#include "trainer/algorithms/token_passes.h"
#include "trainer/batch/micro_batch.h"
#include "trainer/config/config.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/parallel/context.h"

namespace trireme {

class CriticTrainer final {
 public:
  // `config`: critic_config() of the run's. `context`: all of the critic's ranks, in the layout that its model is split
  // by. All outlive the trainer.
  CriticTrainer(const Config& config, Model& critic, DistributedAdamW& optimizer, ParallelContext& context);

  // Sample::values of all samples, on all ranks. Collective. Throws Error(kData) that names sample and token where a
  // value is not finite.
  void fill_values(std::vector<Sample>& samples);
  // The same of this rank alone: no other takes part. Where values_alone(): not where ranks share the weights, or split
  // the model.
  void fill_own_values(std::vector<Sample>& samples);
  bool values_alone() const { return context_.world_size() == 1 || is_whole(); }
  // Sample::values of finished samples from another thread, while this one neither trains nor computes values; with the
  // bits of the above. Of a critic that is whole on this rank.
  TokenScorer scorer() const;
  bool is_whole() const { return trireme::is_whole(critic_); }

  // Collective: every rank passes the same samples, with values and returns. Trains this data parallel rank's share,
  // value.train_global_batch_size samples an optimizer step, in as many passes over all. Returns loss, grad_norm, lr,
  // values_{mean,min,max}, returns_mean, explained_var and vf_clipfrac, over all ranks and steps.
  MetricSums train(const std::vector<Sample>& samples, int64_t passes);
  // How many passes were trained before: where the schedules of learning rate and weight decay are.
  void set_passes_done(int64_t passes) { passes_done_ = passes; }

  // Called after every micro-batch, for heartbeats. May be empty.
  std::function<void()> on_progress;
  // Frees memory of the device that training may have until the next rollout. May be empty.
  std::function<void()> make_room;

 private:
  struct Batch {  // one micro-batch of this rank, on the host; tensors [T] float32
    MicroBatch micro_batch;
    at::Tensor old_values, returns, mask;
  };
  using OptimizerBatch = std::vector<Batch>;
  struct Moments;

  void fill(std::vector<Sample>& samples, ParallelContext& context);
  std::vector<OptimizerBatch> prepare_steps(const std::vector<Sample>& samples);
  MetricSums backward_passes(const OptimizerBatch& batch, double valid);
  void train_step(const OptimizerBatch& batch, double learning_rate, double decay, bool last, Moments& moments);

  const Config& config_;
  Model& critic_;
  DistributedAdamW& optimizer_;
  ParallelContext& context_;
  ParallelContext alone_;
  int64_t passes_done_ = 0;
};

}  // namespace trireme
