#include "trainer/algorithms/advantages.h"

#include <gtest/gtest.h>

#include <cmath>

namespace trireme {
namespace {

TEST(Advantages, LeaveOneOutWorkedExample) {
  const std::vector<double> a = group_advantages({1, 0, 0, 0}, {});
  EXPECT_NEAR(a[0], 1.0, 1e-12);  // the others are all equal: their std is 0, nothing is divided
  const double std_others = std::sqrt((1.0 / 3 - 1.0 / 9) * 3 / 2);
  for (int i = 1; i < 4; ++i) EXPECT_NEAR(a[static_cast<size_t>(i)], -(1.0 / 3) / (std_others + 1e-6), 1e-12);
}

TEST(Advantages, BiasedStdIsTheOlderRule) {
  AdvantageOptions old;
  old.unbiased_std = false;
  const std::vector<double> a = group_advantages({1, 0, 0, 0}, old);
  EXPECT_NEAR(a[1], -0.70710678118, 1e-9);
}

TEST(Advantages, WithoutLeaveOneOut) {
  AdvantageOptions plain;
  plain.use_leave_one_out_baseline = false;
  const std::vector<double> rewards = {2, 0, 1, 5};
  const std::vector<double> a = group_advantages(rewards, plain);
  const double variance = (0.0 + 4 + 1 + 9) / 3;
  const double expected[] = {0, -2, -1, 3};
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(a[i], expected[i] / (std::sqrt(variance) + 1e-6), 1e-12);
  plain.normalize_rewards = false;
  EXPECT_NEAR(group_advantages(rewards, plain)[3], 3, 1e-12);
}

TEST(Advantages, EqualRewardsGiveExactlyZero) {
  for (const double reward : {0.0, 0.7, 1.0, -3.3}) {
    for (const double a : group_advantages(std::vector<double>(8, reward), {})) EXPECT_EQ(a, 0.0);
  }
  EXPECT_EQ(group_advantages({1.0}, {}), std::vector<double>{0.0});
}

TEST(Advantages, ClipsAfterNormalising) {
  AdvantageOptions o;
  o.clip_low = -0.1;
  o.clip_high = 0.5;
  const std::vector<double> a = group_advantages({1, 0, 0, 0}, o);
  EXPECT_EQ(a[0], 0.5);
  EXPECT_EQ(a[1], -0.1);
}

TEST(Rewards, ScaleClampsThenMaps) {
  const RewardScaling s{true, 0, 1, -1, 3};
  EXPECT_EQ(scale_reward(0.5, s), 1.0);
  EXPECT_EQ(scale_reward(7, s), 3.0);
  EXPECT_EQ(scale_reward(-7, s), -1.0);
  EXPECT_EQ(scale_reward(-7, {}), -7.0);
}

TEST(Rewards, OverlongShaping) {
  RewardShaping s;
  s.enabled = true;
  s.max_response_length = 100;
  s.overlong_buffer_length = 20;
  s.overlong_buffer_penalty = 2;
  EXPECT_EQ(shape_reward(1, 80, false, s), 1.0);
  EXPECT_NEAR(shape_reward(1, 90, false, s), 0.0, 1e-12);
  EXPECT_NEAR(shape_reward(1, 110, true, s), -2.0, 1e-12);  // not floored
  s.stop_properly_penalty_coef = 0.25;
  EXPECT_EQ(shape_reward(1, 110, true, s), 0.25);
  EXPECT_EQ(shape_reward(1, 110, false, s), 1.0);
}

TEST(Whiten, MatchesTheDefinition) {
  // values 1 (3 tokens), -1 (1 token): mean 0.5, variance 0.75
  EXPECT_NEAR(whiten(1, 2, 4, 4), 0.5 / std::sqrt(0.75), 1e-12);
  EXPECT_NEAR(whiten(-1, 2, 4, 4), -1.5 / std::sqrt(0.75), 1e-12);
}

}  // namespace
}  // namespace trireme
