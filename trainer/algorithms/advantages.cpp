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
  if (options.clip_low) advantage = std::max(advantage, *options.clip_low);
  if (options.clip_high) advantage = std::min(advantage, *options.clip_high);
  return advantage;
}

std::vector<double> group_advantages(const std::vector<double>& rewards, const AdvantageOptions& options) {
  const size_t n = rewards.size();
  std::vector<double> advantages(n, 0.0);
  if (options.estimator == AdvantageEstimator::kReinforcePlusPlus) {
    double mean = 0;
    for (const double reward : rewards) mean += reward / static_cast<double>(n);
    for (size_t i = 0; i < n; ++i) advantages[i] = options.minus_baseline ? rewards[i] - mean : rewards[i];
    return advantages;  // clipped after whitening, by the caller
  }
  if (n <= 1 || all_equal(rewards)) return advantages;
  for (size_t i = 0; i < n; ++i) {
    double sum = 0, squares = 0;
    double count = 0;
    for (size_t j = 0; j < n; ++j) {
      if (options.use_leave_one_out_baseline && j == i) continue;
      sum += rewards[j];
      squares += rewards[j] * rewards[j];
      count += 1;
    }
    const double baseline = sum / count;
    double variance = 0;  // two passes: no cancellation for rewards such as 0.7
    bool others_equal = true;
    double first = std::nan("");
    for (size_t j = 0; j < n; ++j) {
      if (options.use_leave_one_out_baseline && j == i) continue;
      if (std::isnan(first)) first = rewards[j];
      others_equal = others_equal && rewards[j] == first;
      variance += (rewards[j] - baseline) * (rewards[j] - baseline) / count;
    }
    double deviation = 0;
    if (!others_equal) {
      if (options.unbiased_std) variance = count > 1 ? variance * count / (count - 1) : 0;
      deviation = std::sqrt(variance);
    }
    double advantage = rewards[i] - baseline;
    if (options.normalize_rewards && deviation > 0) advantage /= deviation + (options.unbiased_std ? 1e-6 : 0.0);
    advantages[i] = clip_advantage(advantage, options);
  }
  return advantages;
}

double whiten(double advantage, double sum, double sum_of_squares, double count) {
  if (count <= 0) return 0;
  const double mean = sum / count;
  const double variance = std::max(sum_of_squares / count - mean * mean, 1e-8);
  return (advantage - mean) / std::sqrt(variance);
}

}  // namespace trireme
