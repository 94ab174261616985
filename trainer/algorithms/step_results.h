// What rollout and training of a step tell of themselves, for its log. Plain data.
#pragma once

#include <cstdint>
#include <vector>

#include "trainer/algorithms/metric_sums.h"

namespace trireme {

// How the model replicas shared one or more rollouts; of each replica, the same on all ranks.
struct RankShares {
  std::vector<double> idle_seconds;  // between its last sample and the last replica's
  std::vector<int64_t> samples;      // it generated
};

// Of the optimizer steps of one train().
struct TrainResult {
  MetricSums metrics;  // names of NeMo-RL's train/* group; over all ranks
  int64_t optimizer_steps = 0;
  int64_t buckets_reduced_in_backward = 0;  // of all optimizer steps
  // Tokens that were trained while the weights were those that had sampled them: of the first optimizer step, and of
  // the following ones as long as the learning rate was 0.
  int64_t compared_tokens = 0, compared_optimizer_steps = 0;
  int64_t mismatched_tokens = 0;  // of these: sampler's and loss's log-probs with different bits
};

}  // namespace trireme
