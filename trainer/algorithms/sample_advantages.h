// From rewards to what a token counts in the loss.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "trainer/algorithms/loss.h"
#include "trainer/algorithms/metric_sums.h"
#include "trainer/algorithms/training_batch.h"
#include "trainer/batch/sample.h"
#include "trainer/config/config.h"

namespace trireme {

// Raw rewards -> scaled and shaped rewards, loss multipliers. Pure.
void assign_rewards(std::vector<Sample>& samples, const Config& config);

// Samples whose mean exp(|generation - previous log-prob|) over valid tokens exceeds `threshold` leave the loss. Of a
// token that the filters dropped, whose previous log-prob is -infinity, 0 is taken in its place. Pure.
void mask_mismatched_samples(std::vector<Sample>& samples, double threshold);

// Calls `visit` with the samples that are `wanted`, in their order, as if they were all; not where none is. Collective
// where `visit` is.
void with_some(std::vector<Sample>& samples, const std::function<bool(const Sample&)>& wanted,
               const std::function<void(std::vector<Sample>& some)>& visit);

// PPO, behind assign_rewards: rewards of tokens, advantages and, with GAE, returns of all samples of a rollout, which
// must then have values, and with a `kl_penalty` reference log-probs. Advantages are whitened over all valid tokens
// where the options say so. Pure, in float64: the same on all ranks. Returns advantages/{mean,min,max} over valid
// tokens, and with a penalty the mean KL as kl_penalty.
MetricSums assign_token_advantages(std::vector<Sample>& samples, const GaeOptions& options, double kl_penalty,
                                   KlEstimator estimator);

// Raw rewards -> scaled and shaped rewards, advantages, loss multipliers. Pure; samples in data order, `group_size`
// apart. With a KL in the rewards of tokens the advantages are left as they are before whitening and clipping, since
// they then differ from token to token: take_kl_off_advantages() finishes them.
void assign_advantages(std::vector<Sample>& samples, int64_t group_size, const Config& config);

// use_kl_in_reward (Hu 2025, Reinforce++): the reward of a token is the response's, its baseline off, less `penalty`
// times the KL of the token; whitened over all tokens of the rollout and clipped. `batches`: all of this rank, with
// previous and reference log-probs. Collective. Returns kl_penalty and advantages/{mean,min,max}.
MetricSums take_kl_off_advantages(std::vector<TrainingBatch*> batches, double penalty, KlEstimator estimator,
                                  const Config& config, Communicator& ranks);

}  // namespace trireme
