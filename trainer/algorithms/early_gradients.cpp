#include "trainer/algorithms/early_gradients.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace trireme {

void EarlyGradients::add(const TrainingBatch& batch, const MetricSums& metrics, int64_t mismatched_tokens) {
  counts_.tokens += batch.mask.sum().item<double>();
  counts_.sequences += batch.sequence_mask.sum().item<double>();
  mismatched_tokens_ += mismatched_tokens;
  add_metrics(metrics_, metrics);
}

MetricSums EarlyGradients::finish(const ValidCounts& valid, bool token_level_loss, at::Tensor gradients) {
  MetricSums metrics = std::exchange(*this, {}).metrics_;
  if (metrics.empty()) return metrics;
  // A batch without a valid token has sums of 0.
  const double tokens = std::max(1.0, valid.tokens);
  const double by_loss = token_level_loss ? tokens : std::max(1.0, valid.sequences);
  gradients.mul_(1 / by_loss);
  for (auto& [name, value] : metrics) {
    if (is_extreme(name)) continue;
    const bool of_loss = name == "loss" || name == "actor_loss" || name == "kl_penalty";
    value /= of_loss ? by_loss : tokens;
  }
  return metrics;
}

}  // namespace trireme
