// What was trained before its optimizer step began (grpo.early_gradients): sums that are not divided by the step's
// counts yet, in the policy's gradients and here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "trainer/algorithms/metric_sums.h"
#include "trainer/algorithms/training_batch.h"

namespace trireme {

class EarlyGradients final {
 public:
  // A micro-batch whose gradients are in the sums. `metrics`: of its loss, divided by counts of 1.
  void add(const TrainingBatch& batch, const MetricSums& metrics, int64_t mismatched_tokens);

  // This rank's part of the counts of the step.
  const ValidCounts& counts() const { return counts_; }
  int64_t mismatched_tokens() const { return mismatched_tokens_; }

  // With the step's counts over all ranks: divides `gradients` (when anything was added) and gives the metrics,
  // divided. Nothing is left here.
  MetricSums finish(const ValidCounts& valid, bool token_level_loss, at::Tensor gradients);

 private:
  ValidCounts counts_;
  int64_t mismatched_tokens_ = 0;
  MetricSums metrics_;
};

}  // namespace trireme
