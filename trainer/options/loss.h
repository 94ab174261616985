// LossOptions: the keys loss_fn.*, as the loss takes them.
#pragma once

#include <optional>

#include "trainer/options/names.h"

namespace trireme {

enum class KlEstimator { kK1, kK2, kK3 };
inline Names names_of(KlEstimator) {
  static constexpr const char* kNames[] = {"k1", "k2", "k3"};
  return kNames;
}

enum class TruncatedImportanceSampling { kNone, kTis, kIcepop, kSeqMaskTis };
inline Names names_of(TruncatedImportanceSampling) {
  static constexpr const char* kNames[] = {"", "tis", "icepop", "seq-mask-tis"};
  return kNames;
}

struct ValueLossOptions {  // value_loss_fn
  double scale = 1.0;
  std::optional<double> cliprange;  // 0 or absent: values are not clipped
};

// Of a token that older weights drew: which log-prob the ratio of the loss begins with (grpo.async_grpo.ratio_from).
// kTraining: that of the weights before the first optimizer step; the sampler's is in the importance weight.
// kGeneration: the sampler's; the importance weight is 1.
enum class RatioFrom { kTraining, kGeneration };
inline Names names_of(RatioFrom) {
  static constexpr const char* kNames[] = {"training", "generation"};
  return kNames;
}

struct LossOptions {
  double reference_policy_kl_penalty = 0.01;  // beta; 0: no KL term, no reference model
  KlEstimator reference_policy_kl_type = KlEstimator::kK3;
  std::optional<double> kl_input_clamp_value = 20.0, kl_output_clamp_value = 10.0;  // v0.3: none
  // (ours) true: the weight on the KL carries a gradient (the score-function term); false: v0.3's gradient
  bool kl_score_function_gradient = true;
  double ratio_clip_min = 0.2, ratio_clip_max = 0.2;
  std::optional<double> ratio_clip_c;  // dual clip, > 1
  bool use_on_policy_kl_approximation = false;
  bool use_importance_sampling_correction = false;
  TruncatedImportanceSampling truncated_importance_sampling_type = TruncatedImportanceSampling::kNone;
  std::optional<double> truncated_importance_sampling_ratio, truncated_importance_sampling_ratio_min;
  bool sequence_level_importance_ratios = false;  // GSPO
  bool token_level_loss = true;
  bool force_on_policy_ratio = false;
  bool use_kl_in_reward = false;  // the KL is taken off the rewards of tokens: policy_loss is then told penalty 0
  bool use_cispo = false;
  bool disable_ppo_ratio = false;  // REINFORCE
  double positive_example_nll_weight = 0.0;
};

}  // namespace trireme
