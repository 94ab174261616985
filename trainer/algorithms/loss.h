// The clipped policy-gradient loss with every option of the reference, on flat response tokens.
//
// Formulas: PPO (Schulman et al. 2017), dual clip (Ye et al. 2020), GRPO (Shao et al. 2024), GSPO (Zheng et al. 2025),
// CISPO (MiniMax-M1, 2025), truncated importance sampling (Yao et al. 2025), KL estimators k1, k2, k3 (Schulman 2020).
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>

#include "trainer/options/loss.h"

namespace trireme {

// Throws Error(kUser) for combinations that have no meaning (CISPO with dual clip, GSPO with token-level loss, ...).
void validate(const LossOptions& options);

// T response tokens of S sequences, in any floating dtype. Tokens of masked sequences have mask 0.
struct LossInputs {
  at::Tensor current;              // [T] log-probs that carry the gradient
  at::Tensor current_unfiltered;   // [T] likewise, without top_k, top_p and min_p: for the KL; undefined: current
  at::Tensor previous;             // [T] of the weights before the first optimizer step of this rollout
  at::Tensor generation;           // [T] returned by the sampler
  at::Tensor reference;            // [T]; undefined when the penalty is 0
  at::Tensor advantages;           // [T]
  at::Tensor mask;                 // [T] 0 or 1
  at::Tensor sequence;             // [T] int64, 0..S-1
  at::Tensor sequence_mask;        // [S] 0 or 1
  at::Tensor positive;             // [T] 1 on tokens of correct responses; may be undefined when its weight is 0
  double global_valid_tokens = 0;  // over all ranks and micro-batches of the optimizer step
  double global_valid_sequences = 0;
  double global_positive_tokens = 0;  // valid tokens of correct responses; for positive_example_nll_weight
  // current and previous are of filtered distributions. A token that the filters of one of them drop (-infinity) has no
  // part in the policy's term, but counts in what sums are divided by, and in the KL.
  bool filters = false;
};

struct LossOutput {
  at::Tensor loss;  // scalar; micro-batch losses add up to the loss of the optimizer step
  // Sums over this micro-batch, already divided by the global counts: add them over micro-batches and ranks.
  // Keys that end in _min or _max are combined by min and max.
  std::map<std::string, double> metrics;
};

// Per-token estimate of the KL of the policy to the reference, both clamped as given. Carries the gradient of
// `current`.
at::Tensor kl_estimate(const at::Tensor& current, const at::Tensor& reference, KlEstimator estimator,
                       const std::optional<double>& input_clamp, const std::optional<double>& output_clamp);

LossOutput policy_loss(const LossInputs& inputs, const LossOptions& options);

// T response tokens, in any floating dtype.
struct ValueLossInputs {
  at::Tensor values;      // [T] they carry the gradient
  at::Tensor old_values;  // [T] of the weights before the first optimizer step of this rollout
  at::Tensor returns;     // [T]
  at::Tensor mask;        // [T] 0 or 1
  double global_valid_tokens = 0;
};

// PPO's value loss: scale / 2 times the mean over global valid tokens of max((V - R)^2, (clip(V, V_old - e, V_old + e)
// - R)^2). Of the metrics, explained_variance() needs values_mean, returns_mean, returns_sq_mean and residual_sq_mean.
LossOutput value_loss(const ValueLossInputs& inputs, const ValueLossOptions& options);

// 1 - Var(returns - values) / Var(returns), of means over all tokens of a step; the denominator is at least 1e-8.
double explained_variance(double values_mean, double returns_mean, double returns_sq_mean, double residual_sq_mean);

// Sum of -log-prob over masked tokens divided by the global count.
LossOutput sft_loss(const at::Tensor& current, const at::Tensor& mask, double global_valid_tokens);

}  // namespace trireme
