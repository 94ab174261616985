// Advantages and everything between a raw reward and the number the loss multiplies. Pure, in double.
#pragma once

#include <cstdint>
#include <vector>

#include "trainer/options/advantages.h"

namespace trireme {

// Clamp to [source_min, source_max], then the affine map onto [target_min, target_max].
double scale_reward(double reward, const RewardScaling& scaling);

// DAPO's overlong shaping (Yu et al. 2025, equation 13, not floored as in NeMo-RL), or the stop-properly rule.
double shape_reward(double reward, int64_t response_length, bool truncated, const RewardShaping& shaping);

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
