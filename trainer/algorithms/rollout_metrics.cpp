#include "trainer/algorithms/rollout_metrics.h"

#include <algorithm>

#include "trainer/algorithms/advantages.h"

namespace trireme {
namespace {

double share(double part, double whole) { return whole > 0 ? part / whole : 0; }

}  // namespace

bool is_flat(std::vector<Sample>::const_iterator begin, std::vector<Sample>::const_iterator end) {
  std::vector<double> rewards;
  for (auto sample = begin; sample != end; ++sample) {
    if (!sample->dropped) rewards.push_back(sample->raw_reward);
  }
  return rewards.empty() || all_equal(rewards);
}

std::vector<RolloutLine> rollout_lines(const std::vector<Sample>& samples, int64_t group_size, int64_t max_samples,
                                       const std::vector<std::string>& reward_names, const Tokenizer& tokenizer) {
  const int64_t groups = std::max<int64_t>(1, max_samples / group_size);
  std::vector<RolloutLine> lines;
  for (size_t i = 0; i < samples.size() && static_cast<int64_t>(i) < groups * group_size; ++i) {
    const Sample& sample = samples[i];
    RolloutLine line;
    line.group = sample.group;
    line.index = sample.index;
    line.prompt = tokenizer.decode(*sample.prompt, /*skip_special=*/false);
    line.response = tokenizer.decode(sample.response, /*skip_special=*/false);
    line.raw_reward = sample.raw_reward;
    line.reward = sample.reward;
    for (size_t k = 0; k < std::min(reward_names.size(), sample.reward_parts.size()); ++k)
      line.rewards.emplace_back(reward_names[k], sample.reward_parts[k]);
    line.advantage = sample.mean_advantage();
    line.truncated = sample.truncated;
    line.dropped = sample.dropped;
    line.prompt_tokens = static_cast<int64_t>(sample.prompt.size());
    line.response_tokens = static_cast<int64_t>(sample.response.size());
    for (const VersionSpan& span : sample.weight_versions)
      line.weight_versions.push_back({span.version, span.from, span.to});
    lines.push_back(std::move(line));
  }
  return lines;
}

void GeneratedTotals::add(const std::vector<Sample>& more, int64_t group_size) {
  for (const Sample& sample : more) {
    ++samples;
    tokens += sample.length();
    response_tokens += static_cast<int64_t>(sample.response.size());
    if (sample.dropped) continue;
    ++rewarded;
    reward += sample.raw_reward;
    correct += sample.raw_reward > 0 ? 1 : 0;
    parts.resize(std::max(parts.size(), sample.reward_parts.size()));
    for (size_t k = 0; k < sample.reward_parts.size(); ++k) parts[k] += sample.reward_parts[k];
  }
  const auto size = static_cast<size_t>(group_size);
  for (size_t begin = 0; begin + size <= more.size(); begin += size) {
    const auto first = more.begin() + static_cast<int64_t>(begin);
    ++groups;
    flat_groups += is_flat(first, first + group_size) ? 1 : 0;
  }
}

void describe_rollout(const GeneratedTotals& generated, const std::vector<Sample>& trained,
                      const std::vector<std::string>& reward_names, bool filtered,
                      std::map<std::string, double>& values) {
  const auto rewarded = static_cast<double>(generated.rewarded);
  values["train/reward"] = share(generated.reward, rewarded);
  for (size_t k = 0; k < std::min(reward_names.size(), generated.parts.size()); ++k)
    values["train/rewards/" + reward_names[k]] = share(generated.parts[k], rewarded);
  values["train/correct_rate"] = share(static_cast<double>(generated.correct), rewarded);
  values["train/zero_std_groups"] =
      share(static_cast<double>(generated.flat_groups), static_cast<double>(generated.groups));
  values["train/num_generated_samples"] = static_cast<double>(generated.samples);
  double reward = 0, rewards = 0, lengths = 0, longest = 0, prompts = 0, truncated = 0, valid = 0;
  double advantages = 0, least = 0, most = 0;
  bool any = false;
  for (const Sample& s : trained) {
    const auto length = static_cast<double>(s.response.size());
    if (!s.dropped) {
      reward += s.raw_reward;
      rewards += 1;
    }
    lengths += length;
    longest = std::max(longest, length);
    prompts += static_cast<double>(s.prompt.size());
    truncated += s.truncated ? 1 : 0;
    valid += s.loss_multiplier > 0 ? 1 : 0;
    advantages += s.mean_advantage();
    for (size_t t = 0; t < s.advantages.size(); ++t) {
      least = any ? std::min(least, s.advantages[t]) : s.advantages[t];
      most = any ? std::max(most, s.advantages[t]) : s.advantages[t];
      any = true;
    }
  }
  const auto count = static_cast<double>(trained.size());
  if (filtered) values["train/filtered_reward"] = share(reward, rewards);
  values["train/mean_gen_tokens_per_sample"] = share(lengths, count);
  values["train/max_gen_tokens_per_sample"] = longest;
  values["train/mean_prompt_length"] = share(prompts, count);
  values["train/mean_total_tokens_per_sample"] = share(prompts + lengths, count);
  values["train/total_num_tokens"] = prompts + lengths;
  values["train/truncation_rate"] = share(truncated, count);
  values["train/natural_termination_rate"] = 1 - share(truncated, count);
  values["train/num_valid_samples"] = valid;
  values["train/advantages/mean"] = share(advantages, count);
  values["train/advantages/max"] = most;
  values["train/advantages/min"] = least;
}

void describe_shares(const RankShares& shares, std::map<std::string, double>& values) {
  if (shares.samples.size() < 2) return;
  const auto [least, most] = std::minmax_element(shares.idle_seconds.begin(), shares.idle_seconds.end());
  values["performance/generation_idle_s_fastest_rank"] = *most;
  values["performance/generation_idle_s_slowest_rank"] = *least;
  const auto [fewest, largest] = std::minmax_element(shares.samples.begin(), shares.samples.end());
  values["performance/rank_samples_fewest"] = static_cast<double>(*fewest);
  values["performance/rank_samples_most"] = static_cast<double>(*largest);
}

void describe_training(const TrainResult& trained, std::map<std::string, double>& values) {
  for (const auto& [name, value] : trained.metrics) values["train/" + name] = value;
  values["performance/buckets_reduced_in_backward"] = static_cast<double>(trained.buckets_reduced_in_backward);
  values["train/logprob_mismatch_tokens"] = static_cast<double>(trained.mismatched_tokens);
  values["train/logprob_compared_tokens"] = static_cast<double>(trained.compared_tokens);
  values["train/logprob_compared_optimizer_steps"] = static_cast<double>(trained.compared_optimizer_steps);
}

void describe_ages(const std::vector<Sample>& trained, int64_t version, std::map<std::string, double>& values) {
  double ages = 0, oldest = 0, stale = 0, spanning = 0, mixed = 0;
  for (const Sample& s : trained) {
    const VersionSpans& spans = s.weight_versions;
    if (!spans.empty()) ages += static_cast<double>(version - spans.front().version);
    for (const VersionSpan& span : spans) {
      oldest = std::max(oldest, static_cast<double>(version - span.version));
      stale += span.version < version ? static_cast<double>(span.to - span.from) : 0;
    }
    spanning += spans.size() > 1 ? 1 : 0;
    mixed += s.mixed_context ? static_cast<double>(s.response.size()) : 0;
  }
  values["train/avg_trajectory_age"] = share(ages, static_cast<double>(trained.size()));
  values["train/max_trajectory_age"] = oldest;
  values["train/stale_tokens"] = stale;
  values["train/spanning_samples"] = spanning;
  values["train/mixed_context_tokens"] = mixed;
}

double share_trained_early(const std::vector<Sample>& samples) {
  const auto count = std::count_if(samples.begin(), samples.end(), [](const Sample& s) { return s.trained_early; });
  return share(static_cast<double>(count), static_cast<double>(samples.size()));
}

double share_with_reference(const std::vector<Sample>& samples) {
  const auto count =
      std::count_if(samples.begin(), samples.end(), [](const Sample& s) { return !s.reference_logprobs.empty(); });
  return share(static_cast<double>(count), static_cast<double>(samples.size()));
}

double share_with_score(const std::vector<Sample>& samples) {
  const auto count = std::count_if(samples.begin(), samples.end(), [](const Sample& s) { return s.score.has_value(); });
  return share(static_cast<double>(count), static_cast<double>(samples.size()));
}

double share_with_values(const std::vector<Sample>& samples) {
  const auto count = std::count_if(samples.begin(), samples.end(), [](const Sample& s) { return !s.values.empty(); });
  return share(static_cast<double>(count), static_cast<double>(samples.size()));
}

}  // namespace trireme
