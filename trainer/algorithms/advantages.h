// Advantages and everything between a raw reward and the number the loss multiplies. Pure, in double.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace trireme {

struct RewardScaling {
  bool enabled = false;
  double source_min = 0, source_max = 1, target_min = 0, target_max = 1;
};

// Clamp to [source_min, source_max], then the affine map onto [target_min, target_max].
double scale_reward(double reward, const RewardScaling& scaling);

struct RewardShaping {
  bool enabled = false;
  int64_t overlong_buffer_length = 128;
  double overlong_buffer_penalty = 1;
  int64_t max_response_length = 0;
  std::optional<double>
      stop_properly_penalty_coef;  // truncated responses: reward *= coef, instead of the overlong rule
};

// DAPO's overlong shaping (Yu et al. 2025, equation 13, not floored as in NeMo-RL), or the stop-properly rule.
double shape_reward(double reward, int64_t response_length, bool truncated, const RewardShaping& shaping);

enum class AdvantageEstimator { kGrpo, kReinforcePlusPlus };

struct AdvantageOptions {
  AdvantageEstimator estimator = AdvantageEstimator::kGrpo;
  bool normalize_rewards = true;
  bool use_leave_one_out_baseline = true;
  bool unbiased_std = true;    // false: v0.3's group std (no N/(N-1)), and no epsilon in the division
  bool minus_baseline = true;  // Reinforce++: subtract the group's mean
  std::optional<double> clip_low, clip_high;
};

// One group of n responses to one prompt -> n advantages. Groups whose rewards are all equal give zeros.
// GRPO: b_i = mean of the others, std_i of the others (leave one out), A_i = (r_i - b_i) / (std_i + 1e-6) where std_i >
// 0.
std::vector<double> group_advantages(const std::vector<double>& rewards, const AdvantageOptions& options);

// True when every reward of the group is the same number (decided on the rewards, not on a rounded std).
bool all_equal(const std::vector<double>& rewards);

// Reinforce++: whitens the advantages of tokens over the whole batch: (A - mean) * rsqrt(max(variance, 1e-8)), biased
// variance. tokens[i]: how many valid tokens have advantages[i]; without any all become 0.
std::vector<double> whiten(std::vector<double> advantages, const std::vector<double>& tokens);

double clip_advantage(double advantage, const AdvantageOptions& options);

}  // namespace trireme
