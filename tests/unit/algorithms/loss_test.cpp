#include "trainer/algorithms/loss.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/fs.h"

namespace trireme {
namespace {

std::optional<double> optional_number(const nlohmann::json& value) {
  return value.is_null() ? std::nullopt : std::optional<double>(value.get<double>());
}

LossOptions read_options(const nlohmann::json& j) {
  LossOptions o;
  o.reference_policy_kl_penalty = j.at("kl_penalty");
  const std::string kl = j.at("kl_estimator");
  o.reference_policy_kl_type = kl == "k1" ? KlEstimator::kK1 : kl == "k2" ? KlEstimator::kK2 : KlEstimator::kK3;
  o.kl_input_clamp_value = optional_number(j.at("kl_input_clamp"));
  o.kl_output_clamp_value = optional_number(j.at("kl_output_clamp"));
  o.kl_score_function_gradient = j.at("kl_score_function_gradient");
  o.use_on_policy_kl_approximation = j.at("on_policy_kl_approximation");
  o.ratio_clip_min = j.at("clip_min");
  o.ratio_clip_max = j.at("clip_max");
  o.ratio_clip_c = optional_number(j.at("clip_c"));
  o.use_importance_sampling_correction = j.at("importance_sampling_correction");
  const std::string kind = j.at("truncated_is");
  if (kind == "tis") o.truncated_importance_sampling_type = TruncatedImportanceSampling::kTis;
  if (kind == "icepop") o.truncated_importance_sampling_type = TruncatedImportanceSampling::kIcepop;
  if (kind == "seq-mask-tis") o.truncated_importance_sampling_type = TruncatedImportanceSampling::kSeqMaskTis;
  o.truncated_importance_sampling_ratio = optional_number(j.at("truncated_is_ratio"));
  o.truncated_importance_sampling_ratio_min = optional_number(j.at("truncated_is_ratio_min"));
  o.sequence_level_importance_ratios = j.at("sequence_level_ratios");
  o.token_level_loss = j.at("token_level_loss");
  o.force_on_policy_ratio = j.at("force_on_policy_ratio");
  o.use_cispo = j.at("cispo");
  o.disable_ppo_ratio = j.at("disable_ppo_ratio");
  o.positive_example_nll_weight = j.at("positive_example_nll_weight");
  return o;
}

LossInputs read_inputs(const nlohmann::json& j, at::ScalarType dtype) {
  const auto get = [&](const char* name) {
    return at::tensor(j.at("inputs").at(name).get<std::vector<double>>(), at::kDouble).to(dtype);
  };
  LossInputs in;
  in.current = get("current");
  in.current.set_requires_grad(true);
  in.previous = get("previous");
  in.generation = get("generation");
  in.reference = get("reference");
  in.advantages = get("advantages");
  in.mask = get("mask");
  in.positive = get("positive");
  std::vector<int64_t> sequence;
  const auto lengths = j.at("lengths").get<std::vector<int64_t>>();
  for (size_t s = 0; s < lengths.size(); ++s)
    sequence.insert(sequence.end(), static_cast<size_t>(lengths[s]), static_cast<int64_t>(s));
  in.sequence = at::tensor(sequence, at::kLong);
  in.sequence_mask = at::tensor(j.at("sequence_mask").get<std::vector<double>>(), at::kDouble).to(dtype);
  in.global_valid_tokens = j.at("global_valid_tokens");
  in.global_valid_sequences = j.at("global_valid_sequences");
  in.global_positive_tokens = j.at("global_positive_tokens");
  return in;
}

// tests/data/loss_goldens.json comes from tests/parity/make_loss_goldens.py, which shares no code with the loss.
void compare(at::ScalarType dtype, double tolerance) {
  const nlohmann::json goldens = nlohmann::json::parse(read_file("tests/data/loss_goldens.json"));
  ASSERT_GE(goldens.size(), 50u);
  for (const auto& golden : goldens) {
    LossInputs in = read_inputs(golden, dtype);
    const LossOutput out = policy_loss(in, read_options(golden.at("options")));
    out.loss.backward();
    const double loss = golden.at("loss");
    EXPECT_NEAR(out.loss.item<double>(), loss, tolerance * std::max(1.0, std::abs(loss)))
        << golden.at("options").dump();
    const at::Tensor expected = at::tensor(golden.at("gradient").get<std::vector<double>>(), at::kDouble);
    const double largest = expected.abs().max().item<double>();
    EXPECT_LE((in.current.grad().to(at::kDouble) - expected).abs().max().item<double>(),
              tolerance * std::max(largest, 1e-3))
        << golden.at("options").dump();
  }
}

TEST(Loss, MatchesTheIndependentImplementationInFloat64) { compare(at::kDouble, 1e-10); }
TEST(Loss, MatchesTheIndependentImplementationInFloat32) { compare(at::kFloat, 1e-5); }

// tests/data/value_goldens.json comes from tests/parity/make_value_goldens.py, which shares no code with the loss.
void compare_values(at::ScalarType dtype, double tolerance) {
  const nlohmann::json goldens = nlohmann::json::parse(read_file("tests/data/value_goldens.json")).at("value_loss");
  ASSERT_GE(goldens.size(), 24u);
  for (const auto& golden : goldens) {
    const auto get = [&](const char* name) {
      return at::tensor(golden.at(name).get<std::vector<double>>(), at::kDouble).to(dtype);
    };
    ValueLossInputs in;
    in.values = get("values").set_requires_grad(true);
    in.old_values = get("old_values");
    in.returns = get("returns");
    in.mask = get("mask");
    in.global_valid_tokens = golden.at("global_valid_tokens");
    ValueLossOptions options;
    options.scale = golden.at("scale");
    options.cliprange = optional_number(golden.at("cliprange"));
    const LossOutput out = value_loss(in, options);
    out.loss.backward();
    const double loss = golden.at("loss");
    EXPECT_NEAR(out.loss.item<double>(), loss, tolerance * std::max(1.0, std::abs(loss)));
    const at::Tensor expected = get("gradient").to(at::kDouble);
    const double largest = expected.abs().max().item<double>();
    EXPECT_LE((in.values.grad().to(at::kDouble) - expected).abs().max().item<double>(),
              tolerance * std::max(largest, 1e-3));
    for (const char* name : {"vf_clipfrac", "values_mean", "returns_mean", "returns_sq_mean", "residual_sq_mean",
                             "values_min", "values_max"}) {
      if (golden.at(name).is_null()) {
        EXPECT_EQ(out.metrics.count(name), 0u);
        continue;
      }
      EXPECT_NEAR(out.metrics.at(name), golden.at(name).get<double>(), 10 * tolerance) << name;
    }
  }
}

TEST(ValueLoss, MatchesTheIndependentImplementationInFloat64) { compare_values(at::kDouble, 1e-10); }
TEST(ValueLoss, MatchesTheIndependentImplementationInFloat32) { compare_values(at::kFloat, 1e-5); }

TEST(ValueLoss, NothingOfAMaskedTokenReachesIt) {
  ValueLossInputs in;
  const double infinity = std::numeric_limits<double>::infinity();
  in.values = at::tensor({1.0, infinity, 3.0}, at::kDouble).set_requires_grad(true);
  in.old_values = at::tensor({1.0, std::nan(""), 2.0}, at::kDouble);
  in.returns = at::tensor({2.0, std::nan(""), 2.0}, at::kDouble);
  in.mask = at::tensor({1.0, 0.0, 1.0}, at::kDouble);
  in.global_valid_tokens = 2;
  const LossOutput out = value_loss(in, {.scale = 1, .cliprange = 0.25});
  out.loss.backward();
  EXPECT_NEAR(out.loss.item<double>(), 0.5 * (1 + 1) / 2, 1e-8);
  EXPECT_TRUE(at::isfinite(in.values.grad()).all().item<bool>());
  EXPECT_EQ(in.values.grad()[1].item<double>(), 0);
  EXPECT_EQ(out.metrics.at("values_max"), 3);
}

TEST(ValueLoss, ExplainedVarianceComesFromMoments) {
  const nlohmann::json goldens =
      nlohmann::json::parse(read_file("tests/data/value_goldens.json")).at("explained_variance");
  for (const auto& golden : goldens) {
    ValueLossInputs in;
    in.values = at::tensor(golden.at("values").get<std::vector<double>>(), at::kDouble);
    in.returns = at::tensor(golden.at("returns").get<std::vector<double>>(), at::kDouble);
    in.old_values = in.values;
    in.mask = at::ones_like(in.values);
    in.global_valid_tokens = static_cast<double>(in.values.size(0));
    const std::map<std::string, double> m = value_loss(in, {}).metrics;
    const double expected = golden.at("expected");
    EXPECT_NEAR(explained_variance(m.at("values_mean"), m.at("returns_mean"), m.at("returns_sq_mean"),
                                   m.at("residual_sq_mean")),
                expected, 1e-7 * std::max(1.0, std::abs(expected)));
  }
}

TEST(Loss, InfinityOnAMaskedTokenDoesNotPoison) {
  const nlohmann::json golden = nlohmann::json::parse(read_file("tests/data/loss_goldens.json")).at(0);
  LossInputs in = read_inputs(golden, at::kDouble);
  const LossOutput clean = policy_loss(in, read_options(golden.at("options")));
  at::Tensor poisoned = in.current.detach().clone();
  const int64_t masked = (in.mask == 0).nonzero()[0].item<int64_t>();
  poisoned[masked] = -std::numeric_limits<double>::infinity();
  poisoned.set_requires_grad(true);
  in.current = poisoned;
  const LossOutput out = policy_loss(in, read_options(golden.at("options")));
  out.loss.backward();
  EXPECT_EQ(out.loss.item<double>(), clean.loss.item<double>());
  EXPECT_TRUE(at::isfinite(poisoned.grad()).all().item<bool>());
}

TEST(Loss, MicroBatchesAddUp) {
  const nlohmann::json golden = nlohmann::json::parse(read_file("tests/data/loss_goldens.json")).at(3);
  const LossOptions options = read_options(golden.at("options"));
  const LossInputs whole = read_inputs(golden, at::kDouble);
  double sum = 0;
  for (const auto& [from, to] : std::vector<std::pair<int64_t, int64_t>>{{0, 2}, {2, 4}}) {
    const at::Tensor picked = at::logical_and(whole.sequence >= from, whole.sequence < to).nonzero().view({-1});
    LossInputs part = whole;
    for (at::Tensor* t : {&part.current, &part.previous, &part.generation, &part.reference, &part.advantages,
                          &part.mask, &part.positive}) {
      *t = t->detach().index_select(0, picked);
    }
    part.sequence = whole.sequence.index_select(0, picked) - from;
    part.sequence_mask = whole.sequence_mask.slice(0, from, to);
    sum += policy_loss(part, options).loss.item<double>();
  }
  EXPECT_NEAR(sum, golden.at("loss").get<double>(), 1e-12);
}

TEST(Loss, TheImportanceRatioIsMeasuredWithoutTheCorrectionToo) {
  LossInputs in;
  in.current = at::tensor({-1.0, -2.0, -3.0}, at::kDouble);
  in.previous = at::tensor({-1.0, -2.0, -3.0}, at::kDouble);
  in.generation = in.previous - at::tensor({2.0, 0.5, 9.0}, at::kDouble).log();  // ratios 2, 0.5; 9 on a masked token
  in.advantages = at::ones({3}, at::kDouble);
  in.mask = at::tensor({1.0, 1.0, 0.0}, at::kDouble);
  in.sequence = at::zeros({3}, at::kLong);
  in.sequence_mask = at::ones({1}, at::kDouble);
  in.global_valid_tokens = 2;
  in.global_valid_sequences = 1;
  LossOptions options;
  options.reference_policy_kl_penalty = 0;
  const LossOutput off = policy_loss(in, options);
  EXPECT_NEAR(off.metrics.at("sampling_importance_ratio"), 1.25, 1e-6);
  EXPECT_NEAR(off.loss.item<double>(), -1, 1e-6);  // and weighs nothing
  options.use_importance_sampling_correction = true;
  EXPECT_NEAR(policy_loss(in, options).metrics.at("sampling_importance_ratio"), 1.25, 1e-6);
  options.truncated_importance_sampling_type = TruncatedImportanceSampling::kTis;
  options.truncated_importance_sampling_ratio = 1;
  EXPECT_NEAR(policy_loss(in, options).metrics.at("sampling_importance_ratio"), 0.75, 1e-6);
}

// By hand: 3 valid tokens of correct answers in the whole batch, with log-probs -1, -2 and -4; 5 valid tokens.
TEST(Loss, PositiveExamplesAreAMeanOverTheTokensOfCorrectAnswers) {
  LossOptions options;
  options.reference_policy_kl_penalty = 0;
  options.positive_example_nll_weight = 1;
  const auto part = [&](const std::vector<double>& current, const std::vector<double>& positive,
                        const std::vector<double>& mask) {
    LossInputs in;
    in.current = at::tensor(current, at::kDouble);
    in.previous = in.generation = in.current.clone();
    in.advantages = at::zeros_like(in.current);
    in.positive = at::tensor(positive, at::kDouble);
    in.mask = at::tensor(mask, at::kDouble);
    in.sequence = at::zeros({in.current.size(0)}, at::kLong);
    in.sequence_mask = at::ones({1}, at::kDouble);
    in.global_valid_tokens = 5;
    in.global_valid_sequences = 2;
    in.global_positive_tokens = 3;
    return policy_loss(in, options).metrics.at("positive_nll_loss");
  };
  const double first = part({-1, -2, -9}, {1, 1, 0}, {1, 1, 1});
  const double second = part({-4, -8, -16}, {1, 1, 0}, {1, 0, 1});
  EXPECT_NEAR(first, 3.0 / 3, 1e-6);
  EXPECT_NEAR(second, 4.0 / 3, 1e-6);
  EXPECT_NEAR(first + second, (1.0 + 2 + 4) / 3, 1e-6);
}

TEST(Loss, CombinationsWithoutMeaningAreRefused) {
  LossOptions o;
  o.ratio_clip_c = 0.5;
  EXPECT_THROW(validate(o), Error);
  o = {};
  o.sequence_level_importance_ratios = true;
  EXPECT_THROW(validate(o), Error);
  o = {};
  o.use_cispo = true;
  o.ratio_clip_c = 2;
  EXPECT_THROW(validate(o), Error);
  o = {};
  o.truncated_importance_sampling_type = TruncatedImportanceSampling::kTis;
  EXPECT_THROW(validate(o), Error);
  EXPECT_NO_THROW(validate(LossOptions{}));
}

}  // namespace
}  // namespace trireme
