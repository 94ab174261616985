#include "trainer/algorithms/advantages.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace trireme {

double scale_reward(double reward, const RewardScaling& scaling) {
  if (!scaling.enabled) return reward;
  const double clamped = std::clamp(reward, scaling.source_min, scaling.source_max);
  const double share = (clamped - scaling.source_min) / (scaling.source_max - scaling.source_min);
  return scaling.target_min + share * (scaling.target_max - scaling.target_min);
}

double shape_reward(double reward, int64_t response_length, bool truncated, const RewardShaping& shaping) {
  if (!shaping.enabled) return reward;
  if (shaping.stop_properly_penalty_coef) return truncated ? reward * *shaping.stop_properly_penalty_coef : reward;
  const double free_length = static_cast<double>(shaping.max_response_length - shaping.overlong_buffer_length);
  const double exceed = static_cast<double>(response_length) - free_length;
  const double penalty =
      -exceed / static_cast<double>(shaping.overlong_buffer_length) * shaping.overlong_buffer_penalty;
  return reward + std::min(penalty, 0.0);
}

bool all_equal(const std::vector<double>& rewards) {
  return std::all_of(rewards.begin(), rewards.end(), [&](double reward) { return reward == rewards.front(); });
}

double clip_advantage(double advantage, const AdvantageOptions& options) {
  if (options.advantage_clip_low) advantage = std::max(advantage, *options.advantage_clip_low);
  if (options.advantage_clip_high) advantage = std::min(advantage, *options.advantage_clip_high);
  return advantage;
}

std::vector<double> group_advantages(const std::vector<double>& rewards, const AdvantageOptions& options) {
  const size_t n = rewards.size();
  std::vector<double> advantages(n, 0.0);
  if (options.adv_estimator.name == AdvantageEstimator::kReinforcePlusPlus && !options.adv_estimator.minus_baseline)
    return rewards;
  // Differences from the first reward: the same advantages, and no digits lost where rewards are large and close.
  std::vector<double> centered(rewards);
  for (double& reward : centered) reward -= rewards.front();
  if (options.adv_estimator.name == AdvantageEstimator::kReinforcePlusPlus) {
    double mean = 0;
    for (const double reward : centered) mean += reward / static_cast<double>(n);
    for (size_t i = 0; i < n; ++i) advantages[i] = centered[i] - mean;
    return advantages;  // clipped after whitening, by the caller
  }
  if (n <= 1 || all_equal(rewards)) return advantages;
  for (size_t i = 0; i < n; ++i) {
    double sum = 0, count = 0;
    for (size_t j = 0; j < n; ++j) {
      if (options.use_leave_one_out_baseline && j == i) continue;
      sum += centered[j];
      count += 1;
    }
    const double baseline = sum / count;
    double variance = 0;  // two passes: no cancellation
    bool others_equal = true;
    double first = std::nan("");
    for (size_t j = 0; j < n; ++j) {
      if (options.use_leave_one_out_baseline && j == i) continue;
      if (std::isnan(first)) first = rewards[j];
      others_equal = others_equal && rewards[j] == first;
      variance += (centered[j] - baseline) * (centered[j] - baseline) / count;
    }
    double deviation = 0;
    if (!others_equal) {
      if (!options.biased_group_std) variance = count > 1 ? variance * count / (count - 1) : 0;
      deviation = std::sqrt(variance);
    }
    double advantage = centered[i] - baseline;
    if (options.normalize_rewards && deviation > 0) advantage /= deviation + (options.biased_group_std ? 0.0 : 1e-6);
    advantages[i] = clip_advantage(advantage, options);
  }
  return advantages;
}

std::vector<double> whiten(std::vector<double> advantages, const std::vector<double>& tokens) {
  TRIREME_CHECK(advantages.size() == tokens.size(), "whiten: a number of tokens for each advantage expected");
  double count = 0, mean = 0, variance = 0;
  for (const double n : tokens) count += n;
  if (count <= 0) return std::vector<double>(advantages.size(), 0.0);
  const double first = advantages.front();
  for (double& advantage : advantages) advantage -= first;
  for (size_t i = 0; i < tokens.size(); ++i) mean += tokens[i] * advantages[i] / count;
  for (size_t i = 0; i < tokens.size(); ++i)
    variance += tokens[i] * (advantages[i] - mean) * (advantages[i] - mean) / count;
  const double deviation = std::sqrt(std::max(variance, 1e-8));
  for (double& advantage : advantages) advantage = (advantage - mean) / deviation;
  return advantages;
}

}  // namespace trireme
