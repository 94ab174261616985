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

double token_kl(double logprob, double reference, KlEstimator estimator) {
  constexpr double kInputClamp = 20, kOutputClamp = 10;
  const double log_ratio = std::clamp(reference - logprob, -kInputClamp, kInputClamp);
  double kl = 0;
  switch (estimator) {
    case KlEstimator::kK1:
      kl = -log_ratio;
      break;
    case KlEstimator::kK2:
      kl = log_ratio * log_ratio / 2;
      break;
    case KlEstimator::kK3:
      kl = std::exp(log_ratio) - 1 - log_ratio;
      break;
  }
  return std::clamp(kl, -kOutputClamp, kOutputClamp);
}

std::vector<double> token_rewards(double reward, const std::vector<uint8_t>& mask, const std::vector<double>& kl,
                                  double penalty) {
  TRIREME_CHECK(kl.empty() || kl.size() == mask.size(), "token_rewards: a KL of each token expected");
  std::vector<double> rewards(mask.size(), 0.0);
  bool last = true;
  for (size_t t = mask.size(); t-- > 0;) {
    if (mask[t] == 0) continue;
    if (!kl.empty()) rewards[t] = -penalty * kl[t];
    if (last) rewards[t] += reward;
    last = false;
  }
  return rewards;
}

double policy_lambda(int64_t valid_tokens, const GaeOptions& options) {
  if (options.length_adaptive_alpha <= 0) return options.gae_lambda_policy.value_or(options.gae_lambda);
  return 1 - 1 / std::max(options.length_adaptive_alpha * static_cast<double>(valid_tokens), 1.0);
}

TokenAdvantages generalized_advantages(const std::vector<double>& rewards, const std::vector<float>& values,
                                       const std::vector<uint8_t>& mask, const GaeOptions& options) {
  const size_t tokens = mask.size();
  TRIREME_CHECK(rewards.size() == tokens && values.size() == tokens,
                "generalized_advantages: a reward and a value of each token expected");
  const auto valid = std::count_if(mask.begin(), mask.end(), [](uint8_t token) { return token != 0; });
  const double of_policy = options.gae_gamma * policy_lambda(static_cast<int64_t>(valid), options);
  const double of_value = options.gae_gamma * options.gae_lambda_value.value_or(options.gae_lambda);
  TokenAdvantages result{std::vector<double>(tokens, 0.0), std::vector<double>(tokens, 0.0)};
  double next_value = 0, advantage = 0, to_return = 0;
  for (size_t t = tokens; t-- > 0;) {
    if (mask[t] == 0) continue;
    const double value = values[t];
    const double delta = rewards[t] + options.gae_gamma * next_value - value;
    advantage = delta + of_policy * advantage;
    to_return = delta + of_value * to_return;
    next_value = value;
    result.advantages[t] = advantage;
    result.returns[t] = to_return + value;
  }
  return result;
}

void whiten_unbiased(std::vector<double>& advantages) {
  if (advantages.empty()) return;
  const auto count = static_cast<double>(advantages.size());
  const double first = advantages.front();  // differences from it: no digits lost where all are large and close
  double mean = 0, variance = 0;
  for (double& advantage : advantages) advantage -= first;
  for (const double advantage : advantages) mean += advantage;
  mean /= count;
  for (const double advantage : advantages) variance += (advantage - mean) * (advantage - mean);
  variance = count > 1 ? variance / (count - 1) : 0;
  const double deviation = std::sqrt(variance + 1e-8);
  for (double& advantage : advantages) advantage = (advantage - mean) / deviation;
}

}  // namespace trireme
