// From a raw reward to an advantage: keys of grpo.* and ppo.*, as trainer/algorithms/advantages.h takes them.
#pragma once

#include <cstdint>
#include <optional>

#include "trainer/options/names.h"

namespace trireme {

struct RewardScaling {  // grpo.reward_scaling
  bool enabled = false;
  double source_min = 0.0, source_max = 1.0, target_min = 0.0, target_max = 1.0;
};

struct RewardShaping {  // grpo.reward_shaping
  bool enabled = false;
  int64_t overlong_buffer_length = 128;
  double overlong_buffer_penalty = 1.0;
  int64_t max_response_length = 0;  // of a configuration: derived
  std::optional<double>
      stop_properly_penalty_coef;  // truncated responses: reward *= coef, instead of the overlong rule
};

enum class AdvantageEstimator { kGrpo, kReinforcePlusPlus, kGdpo, kOpd };  // the last two are not supported yet
inline Names names_of(AdvantageEstimator) {
  static constexpr const char* kNames[] = {"grpo", "reinforce_plus_plus", "gdpo", "opd"};
  return kNames;
}

enum class PpoEstimator { kGae, kRawReward };
inline Names names_of(PpoEstimator) {
  static constexpr const char* kNames[] = {"gae", "raw_reward"};
  return kNames;
}

struct GaeOptions {  // ppo.adv_estimator
  PpoEstimator name = PpoEstimator::kGae;
  double gae_lambda = 0.95;
  double gae_gamma = 1.0;
  bool normalize_advantages = true;
  std::optional<double> gae_lambda_value, gae_lambda_policy;  // of returns, of advantages; absent: gae_lambda
  double length_adaptive_alpha = 0.0;  // above 0: lambda of advantages is 1 - 1 / (alpha * length)
};

struct AdvantageOptions {  // grpo
  struct Estimator {       // grpo.adv_estimator
    AdvantageEstimator name = AdvantageEstimator::kGrpo;
    bool minus_baseline = true;  // Reinforce++: subtract the group's mean
  };
  Estimator adv_estimator;
  bool normalize_rewards = true;
  bool use_leave_one_out_baseline = true;
  // (ours) true: v0.3's standard deviation of a group (no N/(N-1)), and no epsilon in the division
  bool biased_group_std = false;
  std::optional<double> advantage_clip_low, advantage_clip_high;
};

}  // namespace trireme
