#include "trainer/algorithms/rollout_metrics.h"

#include <gtest/gtest.h>

namespace trireme {
namespace {

Sample sample(int64_t prompt, int64_t answer, double reward, std::vector<double> parts) {
  Sample s;
  s.prompt = SharedTokens(std::vector<int32_t>(static_cast<size_t>(prompt), 1));
  s.response.assign(static_cast<size_t>(answer), 2);
  s.raw_reward = reward;
  s.reward_parts = std::move(parts);
  return s;
}

TEST(RolloutMetrics, DynamicSamplingTellsWhatWasGeneratedFromWhatIsTrained) {
  // Two rollouts of two groups of two; one group of each differs and is kept.
  const std::vector<Sample> first = {sample(3, 5, 1, {1, 0}), sample(3, 7, 0, {0, 0}), sample(2, 4, 0, {0, 0}),
                                     sample(2, 4, 0, {0, 0})};
  std::vector<Sample> second = {sample(1, 9, 2, {1, 1}), sample(1, 1, 2, {1, 1}), sample(4, 2, 2, {1, 1}),
                                sample(4, 6, 1, {0, 1})};
  GeneratedTotals generated;
  generated.add(first, 2);
  generated.add(second, 2);
  EXPECT_EQ(generated.samples, 8);
  EXPECT_EQ(generated.response_tokens, 5 + 7 + 4 + 4 + 9 + 1 + 2 + 6);
  EXPECT_EQ(generated.tokens, generated.response_tokens + 2 * (3 + 2 + 1 + 4));
  const std::vector<Sample> kept = {first[0], first[1], second[2], second[3]};
  std::map<std::string, double> values;
  describe_rollout(generated, kept, {"math", "format"}, true, values);
  EXPECT_EQ(values.at("train/reward"), 8.0 / 8);
  EXPECT_EQ(values.at("train/filtered_reward"), 4.0 / 4);
  EXPECT_EQ(values.at("train/rewards/math"), 4.0 / 8);
  EXPECT_EQ(values.at("train/rewards/format"), 4.0 / 8);
  EXPECT_EQ(values.at("train/correct_rate"), 5.0 / 8);
  EXPECT_EQ(values.at("train/zero_std_groups"), 2.0 / 4);
  EXPECT_EQ(values.at("train/num_generated_samples"), 8);
  EXPECT_EQ(values.at("train/total_num_tokens"), 2 * 3 + 2 * 4 + 5 + 7 + 2 + 6);
  EXPECT_EQ(values.at("train/mean_gen_tokens_per_sample"), 20.0 / 4);
}

TEST(RolloutMetrics, DroppedSamplesHaveNoRewardAndNoPartInAGroup) {
  std::vector<Sample> all = {sample(1, 2, 1, {1}), sample(1, 2, 0, {0}), sample(1, 2, 0, {0}), sample(1, 2, 0, {0})};
  all[1].dropped = all[2].dropped = all[3].dropped = true;
  EXPECT_TRUE(is_flat(all.begin(), all.begin() + 2));  // one reward is left
  EXPECT_TRUE(is_flat(all.begin() + 2, all.end()));    // none is
  GeneratedTotals generated;
  generated.add(all, 2);
  std::map<std::string, double> values;
  describe_rollout(generated, all, {"math"}, false, values);
  EXPECT_EQ(values.at("train/reward"), 1);
  EXPECT_EQ(values.at("train/rewards/math"), 1);
  EXPECT_EQ(values.at("train/zero_std_groups"), 1);
  EXPECT_EQ(values.count("train/filtered_reward"), 0u);
}

}  // namespace
}  // namespace trireme
