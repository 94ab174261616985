#include "trainer/algorithms/advantages.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/fs.h"

namespace trireme {
namespace {

// From tests/parity/make_advantage_goldens.py, which computes in exact fractions and shares no code with
// advantages.cpp.
nlohmann::json goldens() { return nlohmann::json::parse(read_file("tests/data/advantage_goldens.json")); }

std::optional<double> optional_of(const nlohmann::json& value) {
  return value.is_null() ? std::nullopt : std::optional(value.get<double>());
}

void expect_all_near(const std::vector<double>& values, const nlohmann::json& golden) {
  const auto expected = golden.at("advantages").get<std::vector<double>>();
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(values[i], expected[i], 1e-10 * std::max(1.0, std::abs(expected[i])))
        << golden.at("options").dump() << " " << golden.at("rewards").dump() << " " << i;
  }
}

TEST(Advantages, MatchTheIndependentImplementation) {
  const nlohmann::json all = goldens().at("grpo");
  ASSERT_GE(all.size(), 800u);
  for (const auto& golden : all) {
    const nlohmann::json& given = golden.at("options");
    AdvantageOptions o;
    o.use_leave_one_out_baseline = given.at("leave_one_out");
    o.normalize_rewards = given.at("normalize");
    o.biased_group_std = !given.at("unbiased").get<bool>();
    o.advantage_clip_low = optional_of(given.at("clip_low"));
    o.advantage_clip_high = optional_of(given.at("clip_high"));
    expect_all_near(group_advantages(golden.at("rewards").get<std::vector<double>>(), o), golden);
  }
}

TEST(Advantages, ReinforcePlusPlusMatchesTheIndependentImplementation) {
  const nlohmann::json all = goldens().at("reinforce_plus_plus");
  ASSERT_GE(all.size(), 16u);
  for (const auto& golden : all) {
    AdvantageOptions o;
    o.adv_estimator.name = AdvantageEstimator::kReinforcePlusPlus;
    o.adv_estimator.minus_baseline = golden.at("options").at("minus_baseline");
    o.advantage_clip_low = optional_of(golden.at("options").at("clip_low"));
    o.advantage_clip_high = optional_of(golden.at("options").at("clip_high"));
    std::vector<double> values;
    std::vector<double> tokens;
    for (size_t g = 0; g < golden.at("rewards").size(); ++g) {
      for (const double value : group_advantages(golden.at("rewards")[g].get<std::vector<double>>(), o))
        values.push_back(value);
      for (const double count : golden.at("lengths")[g]) tokens.push_back(count);
    }
    values = whiten(std::move(values), tokens);
    for (double& value : values) value = clip_advantage(value, o);
    expect_all_near(values, golden);
  }
}

TEST(Rewards, ScalingAndShapingMatchTheIndependentImplementation) {
  const nlohmann::json all = goldens();
  for (const auto& golden : all.at("scaling")) {
    const nlohmann::json& given = golden.at("options");
    const RewardScaling s{true, given.at("source_min"), given.at("source_max"), given.at("target_min"),
                          given.at("target_max")};
    EXPECT_NEAR(scale_reward(golden.at("reward"), s), golden.at("scaled").get<double>(), 1e-12) << golden.dump();
  }
  for (const auto& golden : all.at("shaping")) {
    const nlohmann::json& given = golden.at("options");
    RewardShaping s;
    s.enabled = true;
    s.max_response_length = given.at("longest");
    s.overlong_buffer_length = given.at("buffer");
    s.overlong_buffer_penalty = given.at("penalty");
    s.stop_properly_penalty_coef = optional_of(given.at("stop_properly"));
    EXPECT_NEAR(shape_reward(golden.at("reward"), golden.at("length"), golden.at("truncated"), s),
                golden.at("shaped").get<double>(), 1e-12)
        << golden.dump();
  }
  EXPECT_GE(all.at("scaling").size() + all.at("shaping").size(), 100u);
}

TEST(Advantages, LeaveOneOutWorkedExample) {
  const std::vector<double> a = group_advantages({1, 0, 0, 0}, {});
  EXPECT_NEAR(a[0], 1.0, 1e-12);  // the others are all equal: their std is 0, nothing is divided
  const double std_others = std::sqrt((1.0 / 3 - 1.0 / 9) * 3 / 2);
  for (int i = 1; i < 4; ++i) EXPECT_NEAR(a[static_cast<size_t>(i)], -(1.0 / 3) / (std_others + 1e-6), 1e-12);
}

TEST(Advantages, BiasedStdIsTheOlderRule) {
  AdvantageOptions old;
  old.biased_group_std = true;
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
  o.advantage_clip_low = -0.1;
  o.advantage_clip_high = 0.5;
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
  const std::vector<double> a = whiten({1, -1}, {3, 1});  // mean 0.5, variance 0.75
  EXPECT_NEAR(a[0], 0.5 / std::sqrt(0.75), 1e-12);
  EXPECT_NEAR(a[1], -1.5 / std::sqrt(0.75), 1e-12);
  EXPECT_EQ(whiten({2, 3}, {0, 0}), std::vector<double>(2, 0.0));
}

}  // namespace
}  // namespace trireme
