#include "trainer/algorithms/sample_advantages.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "trainer/algorithms/advantages.h"
#include "trainer/algorithms/options.h"
#include "trainer/parallel/communicator.h"

namespace trireme {

namespace {

// The log-probs before the rollout's first optimizer step: the sampler's, where those are exact.
const std::vector<float>& previous_logprobs(const Sample& s) {
  return s.previous_logprobs.empty() ? s.generation_logprobs : s.previous_logprobs;
}

// Of each token; empty without a penalty. `sum` gets those of valid tokens.
std::vector<double> kls_of_tokens(const Sample& s, const std::vector<uint8_t>& mask, double penalty,
                                  KlEstimator estimator, double& sum) {
  std::vector<double> kl;
  if (penalty == 0) return kl;
  const std::vector<float>& previous = previous_logprobs(s);
  TRIREME_CHECK(s.reference_logprobs.size() == mask.size() && previous.size() == mask.size(),
                "a KL in rewards needs reference log-probs of every sample");
  for (size_t t = 0; t < mask.size(); ++t) {
    const bool counts = mask[t] != 0 && !std::isinf(previous[t]);  // not where the filters dropped the token
    kl.push_back(counts ? token_kl(previous[t], s.reference_logprobs[t], estimator) : 0);
    sum += kl.back();
  }
  return kl;
}

}  // namespace

void assign_rewards(std::vector<Sample>& samples, const Config& config) {
  for (Sample& s : samples) {
    s.reward = shape_reward(scale_reward(s.raw_reward, config.grpo.reward_scaling),
                            static_cast<int64_t>(s.response.size()), s.truncated, config.grpo.reward_shaping);
    s.loss_multiplier = s.dropped || (config.grpo.overlong_filtering && s.truncated) ? 0 : 1;
  }
}

void mask_mismatched_samples(std::vector<Sample>& samples, double threshold) {
  for (Sample& s : samples) {
    double error = 0, tokens = 0;
    for (size_t t = 0; t < s.previous_logprobs.size(); ++t) {
      if (!s.counts(t)) continue;
      const float previous = std::isinf(s.previous_logprobs[t]) ? 0 : s.previous_logprobs[t];
      error += std::exp(std::abs(s.generation_logprobs[t] - previous));
      tokens += 1;
    }
    if (tokens > 0 && !(error / tokens <= threshold)) s.loss_multiplier = 0;
  }
}

void with_some(std::vector<Sample>& samples, const std::function<bool(const Sample&)>& wanted,
               const std::function<void(std::vector<Sample>& some)>& visit) {
  std::vector<size_t> places;
  std::vector<Sample> some;
  for (size_t i = 0; i < samples.size(); ++i) {
    if (!wanted(samples[i])) continue;
    places.push_back(i);
    some.push_back(std::move(samples[i]));
  }
  if (some.empty()) return;
  visit(some);
  for (size_t k = 0; k < places.size(); ++k) samples[places[k]] = std::move(some[k]);
}

MetricSums assign_token_advantages(std::vector<Sample>& samples, const GaeOptions& options, double kl_penalty,
                                   KlEstimator estimator) {
  const bool gae = options.name == PpoEstimator::kGae;
  std::vector<double> valid;  // advantages of valid tokens, in the order of the samples
  double kl_sum = 0;
  for (Sample& s : samples) {
    std::vector<uint8_t> mask;
    for (size_t t = 0; t < s.response.size(); ++t) mask.push_back(s.counts(t) ? 1 : 0);
    s.rewards = token_rewards(s.reward, mask, kls_of_tokens(s, mask, kl_penalty, estimator, kl_sum), kl_penalty);
    if (gae) {
      TokenAdvantages made = generalized_advantages(s.rewards, s.values, mask, options);
      s.advantages = std::move(made.advantages);
      s.returns = std::move(made.returns);
    } else {
      s.set_advantage(s.reward);
    }
    for (size_t t = 0; t < mask.size(); ++t) {
      if (mask[t] != 0) valid.push_back(s.advantages[t]);
    }
  }
  const auto tokens = static_cast<double>(valid.size());
  if (options.normalize_advantages && gae) whiten_unbiased(valid);
  if (options.normalize_advantages && !gae) valid = whiten(std::move(valid), std::vector<double>(valid.size(), 1.0));
  MetricSums metrics;
  if (kl_penalty != 0) metrics["kl_penalty"] = kl_sum / std::max(tokens, 1.0);
  metrics["advantages/mean"] = std::accumulate(valid.begin(), valid.end(), 0.0) / std::max(tokens, 1.0);
  metrics["advantages/min"] = valid.empty() ? 0 : *std::min_element(valid.begin(), valid.end());
  metrics["advantages/max"] = valid.empty() ? 0 : *std::max_element(valid.begin(), valid.end());
  auto next = valid.begin();
  for (Sample& s : samples) {
    for (size_t t = 0; t < s.response.size(); ++t) s.advantages[t] = s.counts(t) ? *next++ : 0;
  }
  return metrics;
}

void assign_advantages(std::vector<Sample>& samples, int64_t group_size, const Config& config) {
  assign_rewards(samples, config);
  for (Sample& s : samples) s.set_advantage(0);
  const AdvantageOptions& options = config.grpo;
  for (size_t begin = 0; begin < samples.size(); begin += static_cast<size_t>(group_size)) {
    std::vector<double> rewards;
    std::vector<size_t> members;
    for (size_t i = begin; i < std::min(samples.size(), begin + static_cast<size_t>(group_size)); ++i) {
      if (samples[i].dropped) continue;
      rewards.push_back(samples[i].reward);
      members.push_back(i);
    }
    const std::vector<double> advantages = group_advantages(rewards, options);
    for (size_t k = 0; k < members.size(); ++k) samples[members[k]].set_advantage(advantages[k]);
  }
  if (options.adv_estimator.name != AdvantageEstimator::kReinforcePlusPlus || reward_kl_penalty(config) != 0) return;
  std::vector<double> advantages, tokens;  // of each sample, whose tokens are still alike
  for (const Sample& s : samples) {
    advantages.push_back(s.mean_advantage());
    tokens.push_back(static_cast<double>(s.valid_tokens()));
  }
  const std::vector<double> whitened = whiten(std::move(advantages), tokens);
  for (size_t i = 0; i < samples.size(); ++i) {
    if (samples[i].loss_multiplier > 0) samples[i].set_advantage(clip_advantage(whitened[i], options));
  }
}

MetricSums take_kl_off_advantages(std::vector<TrainingBatch*> batches, double penalty, KlEstimator estimator,
                                  const Config& config, Communicator& ranks) {
  // Clamps are those that NeMo-RL's estimator has whatever the configuration says.
  constexpr double kInputClamp = 20, kOutputClamp = 10;
  double tokens = 0, sum = 0, kl_sum = 0;
  for (TrainingBatch* b : batches) {
    const at::Tensor valid = b->mask > 0;
    const at::Tensor mask = valid.to(at::kDouble), zero = at::zeros_like(mask);
    const at::Tensor kl = at::where(
        at::logical_and(valid, at::logical_not(at::isneginf(b->previous))),  // not where the filters dropped the token
        kl_estimate(b->previous.to(at::kDouble), b->reference.to(at::kDouble), estimator, kInputClamp, kOutputClamp),
        zero);
    b->advantages = b->advantages.to(at::kDouble) - penalty * kl;
    tokens += mask.sum().item<double>();
    sum += (b->advantages * mask).sum().item<double>();
    kl_sum += kl.sum().item<double>();
  }
  tokens = std::max(1.0, ranks.all_reduce_sum(tokens));
  const double mean = ranks.all_reduce_sum(sum) / tokens;
  double squares = 0;
  for (const TrainingBatch* b : batches) squares += ((b->advantages - mean).square() * b->mask).sum().item<double>();
  const double deviation = std::sqrt(std::max(ranks.all_reduce_sum(squares) / tokens, 1e-8));
  double least = std::numeric_limits<double>::infinity(), most = -least, total = 0;
  for (TrainingBatch* b : batches) {
    b->advantages = (b->advantages - mean) / deviation;
    if (config.grpo.advantage_clip_low) b->advantages = b->advantages.clamp_min(*config.grpo.advantage_clip_low);
    if (config.grpo.advantage_clip_high) b->advantages = b->advantages.clamp_max(*config.grpo.advantage_clip_high);
    const at::Tensor picked = b->advantages.masked_select(b->mask > 0);
    if (picked.numel() > 0) {
      least = std::min(least, picked.min().item<double>());
      most = std::max(most, picked.max().item<double>());
      total += picked.sum().item<double>();
    }
    b->advantages = b->advantages.to(at::kFloat);
  }
  least = -ranks.all_reduce_max(-least);
  most = ranks.all_reduce_max(most);
  MetricSums metrics;
  metrics["kl_penalty"] = ranks.all_reduce_sum(kl_sum) / tokens;
  metrics["advantages/mean"] = ranks.all_reduce_sum(total) / tokens;
  metrics["advantages/min"] = std::isfinite(least) ? least : 0;
  metrics["advantages/max"] = std::isfinite(most) ? most : 0;
  return metrics;
}

}  // namespace trireme
