#include "trainer/algorithms/advantages.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/fs.h"
#include "trainer/algorithms/sample_advantages.h"

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

// From tests/parity/make_value_goldens.py: sums over the tokens that follow, no recursion, no code shared.
nlohmann::json token_goldens() { return nlohmann::json::parse(read_file("tests/data/value_goldens.json")).at("gae"); }

GaeOptions gae_options(const nlohmann::json& given) {
  GaeOptions o;
  o.gae_lambda = given.at("lambda");
  o.gae_gamma = given.at("gamma");
  o.gae_lambda_value = optional_of(given.at("lambda_value"));
  o.gae_lambda_policy = optional_of(given.at("lambda_policy"));
  o.length_adaptive_alpha = given.at("alpha");
  return o;
}

KlEstimator kl_named(const std::string& name) {
  return name == "k1" ? KlEstimator::kK1 : name == "k2" ? KlEstimator::kK2 : KlEstimator::kK3;
}

void expect_near(const std::vector<double>& values, const nlohmann::json& expected, const std::string& what) {
  ASSERT_EQ(values.size(), expected.size()) << what;
  for (size_t i = 0; i < values.size(); ++i) {
    const double golden = expected[i].get<double>();
    EXPECT_NEAR(values[i], golden, 1e-10 * std::max(1.0, std::abs(golden))) << what << " token " << i;
  }
}

TEST(TokenAdvantages, MatchTheIndependentImplementation) {
  const nlohmann::json all = token_goldens();
  ASSERT_GE(all.size(), 160u);
  for (const auto& golden : all) {
    const nlohmann::json& given = golden.at("options");
    const GaeOptions options = gae_options(given);
    const double penalty = given.at("penalty");
    std::vector<double> valid, whitened;
    for (size_t i = 0; i < golden.at("batch").size(); ++i) {
      const nlohmann::json& sample = golden.at("batch")[i];
      const std::string what = golden.at("kind").get<std::string>() + " " + given.dump() + " " + std::to_string(i);
      const auto mask = sample.at("mask").get<std::vector<uint8_t>>();
      std::vector<double> kl;
      for (size_t t = 0; t < mask.size() && penalty != 0; ++t)
        kl.push_back(token_kl(sample.at("logprobs")[t], sample.at("reference")[t], kl_named(given.at("kl"))));
      const std::vector<double> rewards = token_rewards(sample.at("reward"), mask, kl, penalty);
      expect_near(rewards, golden.at("rewards")[i], "rewards " + what);
      const TokenAdvantages made =
          generalized_advantages(rewards, sample.at("values").get<std::vector<float>>(), mask, options);
      expect_near(made.advantages, golden.at("advantages")[i], "advantages " + what);
      expect_near(made.returns, golden.at("returns")[i], "returns " + what);
      for (size_t t = 0; t < mask.size(); ++t) {
        if (mask[t] == 0) continue;
        valid.push_back(made.advantages[t]);
        whitened.push_back(golden.at("whitened")[i][t]);
      }
    }
    whiten_unbiased(valid);
    // Of several tokens the divisor is near 1 in these goldens; a single one is exactly 0.
    for (size_t k = 0; k < valid.size(); ++k) EXPECT_NEAR(valid[k], whitened[k], 1e-10) << given.dump();
  }
}

TEST(TokenAdvantages, OfSamplesAreThoseOfTheirTokens) {
  for (const auto& golden : token_goldens()) {
    const nlohmann::json& given = golden.at("options");
    std::vector<Sample> samples;
    for (const auto& from : golden.at("batch")) {
      Sample& s = samples.emplace_back();
      s.loss_mask = from.at("mask").get<std::vector<uint8_t>>();
      s.response.assign(s.loss_mask.size(), 1);
      s.values = from.at("values").get<std::vector<float>>();
      s.generation_logprobs = from.at("logprobs").get<std::vector<float>>();
      s.reference_logprobs = from.at("reference").get<std::vector<float>>();
      s.reward = from.at("reward");
    }
    // A sample that is out of the loss changes nothing, and its tokens count nothing.
    samples.push_back(samples.front());
    samples.back().loss_multiplier = 0;
    samples.back().reward = 100;
    const MetricSums metrics =
        assign_token_advantages(samples, gae_options(given), given.at("penalty"), kl_named(given.at("kl")));
    double sum = 0, count = 0;
    for (size_t i = 0; i + 1 < samples.size(); ++i) {
      const std::string what = golden.at("kind").get<std::string>() + " " + given.dump() + " " + std::to_string(i);
      expect_near(samples[i].returns, golden.at("returns")[i], what);
      expect_near(samples[i].rewards, golden.at("rewards")[i], what);
      for (size_t t = 0; t < samples[i].advantages.size(); ++t) {
        EXPECT_NEAR(samples[i].advantages[t], golden.at("whitened")[i][t].get<double>(), 1e-10) << what;
        sum += samples[i].advantages[t];
        count += samples[i].counts(t) ? 1 : 0;
      }
    }
    for (const double advantage : samples.back().advantages) EXPECT_EQ(advantage, 0);
    EXPECT_NEAR(metrics.at("advantages/mean"), sum / std::max(1.0, count), 1e-12);
    EXPECT_EQ(metrics.count("kl_penalty"), given.at("penalty").get<double>() != 0 ? 1u : 0u);
  }
}

TEST(TokenAdvantages, KlIsAgainstTheLogProbsBeforeTheStepWhereThereAreSome) {
  Sample s;
  s.response = {1};
  s.values = {0};
  s.generation_logprobs = {-1};
  s.reference_logprobs = {-3};
  std::vector<Sample> samples = {s, s};
  samples[1].previous_logprobs = {-2};
  assign_token_advantages(samples, {}, 0.5, KlEstimator::kK1);
  EXPECT_DOUBLE_EQ(samples[0].rewards[0], -0.5 * 2);
  EXPECT_DOUBLE_EQ(samples[1].rewards[0], -0.5 * 1);
}

TEST(TokenAdvantages, RawRewardsNeedNoValues) {
  Sample s;
  s.response = {1, 2, 3};
  std::vector<Sample> samples = {s, s};
  samples[0].reward = 1;
  samples[1].response = {4};
  GaeOptions options;
  options.name = PpoEstimator::kRawReward;
  options.normalize_advantages = false;
  assign_token_advantages(samples, options, 0, KlEstimator::kK1);
  EXPECT_EQ(samples[0].advantages, (std::vector<double>{1, 1, 1}));
  EXPECT_EQ(samples[1].advantages, (std::vector<double>{0}));
  EXPECT_TRUE(samples[0].returns.empty());
  options.normalize_advantages = true;  // biased, over tokens: mean 3/4, variance 3/16
  assign_token_advantages(samples, options, 0, KlEstimator::kK1);
  for (const double advantage : samples[0].advantages) EXPECT_NEAR(advantage, 0.25 / std::sqrt(3.0 / 16), 1e-12);
  EXPECT_NEAR(samples[1].advantages[0], -0.75 / std::sqrt(3.0 / 16), 1e-12);
}

TEST(TokenAdvantages, WorkedExample) {
  // gamma 0.5, lambda 0.5, the middle token masked: deltas 0.5 * 3 - 1 = 0.5, and 8 - 3 = 5.
  GaeOptions options;
  options.gae_gamma = options.gae_lambda = 0.5;
  const TokenAdvantages made = generalized_advantages({0, 0, 8}, {1, 7, 3}, {1, 0, 1}, options);
  EXPECT_EQ(made.advantages, (std::vector<double>{0.5 + 0.25 * 5, 0, 5}));
  EXPECT_EQ(made.returns, (std::vector<double>{1.75 + 1, 0, 8}));
  options.length_adaptive_alpha = 1;  // two valid tokens: lambda 1/2 again; returns have gae_lambda
  options.gae_lambda_policy = 1;
  EXPECT_EQ(generalized_advantages({0, 0, 8}, {1, 7, 3}, {1, 0, 1}, options).advantages, made.advantages);
  EXPECT_EQ(policy_lambda(1, options), 0);
}

TEST(TokenAdvantages, OneTokenAndNoneAreWhitenedToZero) {
  std::vector<double> one = {7};
  whiten_unbiased(one);
  EXPECT_EQ(one, std::vector<double>{0});
  std::vector<double> none;
  whiten_unbiased(none);
  EXPECT_TRUE(none.empty());
  std::vector<double> equal(5, 1e6 + 0.1);
  whiten_unbiased(equal);
  for (const double advantage : equal) EXPECT_EQ(advantage, 0);
}

}  // namespace
}  // namespace trireme
