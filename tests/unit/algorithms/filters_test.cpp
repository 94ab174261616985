// Training where top_k, top_p or min_p restrict what is sampled: tokens that the filters of the moved weights drop.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/fs.h"
#include "tests/unit/algorithms/recorded_rollout.h"
#include "trainer/algorithms/loss.h"
#include "trainer/algorithms/policy_trainer.h"
#include "trainer/algorithms/sample_advantages.h"
#include "trainer/algorithms/training_batch.h"
#include "trainer/model/safetensors.h"

namespace trireme {
namespace {

using test::OneRank;
using test::Outcome;
using test::recorded;
using test::run;
using test::settings;

constexpr double kDropped = -std::numeric_limits<double>::infinity();

// Two sequences, of 4 and 2 tokens, of a batch of 8 tokens and 3 sequences. The second token is outside the present
// distribution, the fourth outside the previous one. Log-ratios of the others: -0.2, 0.1; -0.1, 0.4.
LossInputs with_dropped_tokens() {
  LossInputs in;
  in.current = at::tensor({-1.2, kDropped, -0.4, -2.0, -0.9, -1.1}, at::kDouble).set_requires_grad(true);
  in.previous = at::tensor({-1.0, -0.7, -0.5, kDropped, -0.8, -1.5}, at::kDouble);
  in.generation = at::tensor({-1.05, -0.75, -0.45, -2.1, -0.85, -1.4}, at::kDouble);
  in.advantages = at::tensor({1.5, 1.5, 1.5, 1.5, -0.5, -0.5}, at::kDouble);
  in.mask = at::ones({6}, at::kDouble);
  in.sequence = at::tensor({0, 0, 0, 0, 1, 1}, at::kLong);
  in.sequence_mask = at::ones({2}, at::kDouble);
  in.global_valid_tokens = 8;
  in.global_valid_sequences = 3;
  in.filters = true;
  return in;
}

LossOptions without_kl() {
  LossOptions options;
  options.reference_policy_kl_penalty = 0;
  return options;
}

// `loss` and `gradient` are worked out by hand.
std::map<std::string, double> expect_loss(const LossOptions& options, double loss,
                                          const std::vector<double>& gradient) {
  const LossInputs in = with_dropped_tokens();
  const LossOutput out = policy_loss(in, options);
  EXPECT_NEAR(out.loss.item<double>(), loss, 1e-7);
  out.loss.backward();
  const at::Tensor got = in.current.grad();
  for (size_t t = 0; t < gradient.size(); ++t)
    EXPECT_NEAR(got[static_cast<int64_t>(t)].item<double>(), gradient[t], 1e-7) << t;
  for (const auto& [name, value] : out.metrics) EXPECT_TRUE(std::isfinite(value)) << name;
  return out.metrics;
}

TEST(DroppedTokens, HaveNoPartInThePolicysTermAndCountInItsMean) {
  const double a = std::exp(-0.2), b = std::exp(0.1), c = std::exp(-0.1), d = std::exp(0.4);
  const std::map<std::string, double> metrics =
      expect_loss(without_kl(), (-1.5 * a - 1.5 * b + 0.5 * c + 0.5 * d) / 8,
                  {-1.5 * a / 8, 0, -1.5 * b / 8, 0, 0.5 * c / 8, 0.5 * d / 8});
  EXPECT_NEAR(metrics.at("filtered_token_fraction"), 2.0 / 8, 1e-7);
  EXPECT_NEAR(metrics.at("probs_ratio"), (a + b + c + d) / 8, 1e-7);
  EXPECT_NEAR(metrics.at("probs_ratio_min"), a, 1e-12);
  EXPECT_NEAR(metrics.at("probs_ratio_max"), d, 1e-12);
  // Previous against the sampler's: the fourth token's is not known.
  EXPECT_NEAR(metrics.at("token_mult_prob_error"), (4 * std::exp(0.05) + 1 + std::exp(0.1)) / 8, 1e-7);
}

TEST(DroppedTokens, HaveNoPartInMeansOfSequences) {
  LossOptions options = without_kl();
  options.token_level_loss = false;
  const double a = std::exp(-0.2), b = std::exp(0.1), c = std::exp(-0.1), d = std::exp(0.4);
  expect_loss(options, (-1.5 * (a + b) / 4 + 0.5 * (c + d) / 2) / 3,
              {-1.5 * a / 12, 0, -1.5 * b / 12, 0, 0.5 * c / 6, 0.5 * d / 6});
}

TEST(DroppedTokens, LeaveTheRatioOfTheirSequence) {
  LossOptions options = without_kl();
  options.token_level_loss = false;
  options.sequence_level_importance_ratios = true;
  const double first = std::exp(-0.1 / 4), second = std::exp(0.3 / 2);
  expect_loss(options, (-1.5 * first * 2 / 4 + 0.5 * second) / 3,
              {-1.5 * first / 2 / 4 / 3, 0, -1.5 * first / 2 / 4 / 3, 0, 0.5 * second / 2 / 3, 0.5 * second / 2 / 3});
}

TEST(DroppedTokens, WeighNothingInCispo) {
  LossOptions options = without_kl();
  options.use_cispo = true;
  const double a = std::exp(-0.2), b = std::exp(0.1), c = std::exp(-0.1), d = 1.2;  // the last is clipped
  expect_loss(options, (1.5 * a * 1.2 + 1.5 * b * 0.4 - 0.5 * c * 0.9 - 0.5 * d * 1.1) / 8,
              {-1.5 * a / 8, 0, -1.5 * b / 8, 0, 0.5 * c / 8, 0.5 * d / 8});
}

TEST(DroppedTokens, HaveNoImportanceWeight) {
  LossOptions options = without_kl();
  options.use_importance_sampling_correction = true;
  const double a = std::exp(-0.15), b = std::exp(0.05), c = std::exp(-0.05), d = std::exp(0.3);  // current / generation
  expect_loss(options, (-1.5 * a - 1.5 * b + 0.5 * c + 0.5 * d) / 8,
              {-1.5 * a / 8, 0, -1.5 * b / 8, 0, 0.5 * c / 8, 0.5 * d / 8});
}

// A log-prob that neither filter nor sampler explains is still a failure.
TEST(DroppedTokens, AreKnownByTheirFiltersOnly) {
  LossInputs in = with_dropped_tokens();
  in.filters = false;
  EXPECT_FALSE(std::isfinite(policy_loss(in, without_kl()).metrics.at("probs_ratio_max")));
}

TEST(DroppedTokens, LeaveTheirSequenceInTheLoss) {
  TrainingBatch batch;
  batch.micro_batch.sequence = at::zeros({4}, at::kLong);
  const float half = std::log(0.5f);
  batch.generation = at::full({4}, half, at::kFloat);
  batch.previous = at::tensor({half, half, static_cast<float>(kDropped), half}, at::kFloat);
  batch.mask = at::ones({4}, at::kFloat);
  batch.sequence_mask = at::ones({1}, at::kFloat);
  mask_mismatched_sequences(batch, 1.3);  // (3 * 1 + 2) / 4 = 1.25
  EXPECT_EQ(batch.sequence_mask[0].item<float>(), 1);
  mask_mismatched_sequences(batch, 1.2);
  EXPECT_EQ(batch.sequence_mask[0].item<float>(), 0);
  Sample sample;
  sample.response = {1, 2, 3, 4};
  sample.generation_logprobs.assign(4, half);
  sample.previous_logprobs = {half, half, static_cast<float>(kDropped), half};
  std::vector<Sample> samples = {sample};
  mask_mismatched_samples(samples, 1.3);
  EXPECT_EQ(samples[0].loss_multiplier, 1);
  mask_mismatched_samples(samples, 1.2);
  EXPECT_EQ(samples[0].loss_multiplier, 0);
}

TEST(DroppedTokens, TakeNoKlOffTheRewards) {
  Sample sample;
  sample.response = {1, 2};
  sample.values = {0, 0};
  sample.generation_logprobs = {-1, -1};
  sample.previous_logprobs = {static_cast<float>(kDropped), -1};
  sample.reference_logprobs = {-3, -3};
  std::vector<Sample> samples = {sample};
  assign_token_advantages(samples, {}, 0.5, KlEstimator::kK1);
  EXPECT_EQ(samples[0].rewards, (std::vector<double>{0, -1}));
}

// Logits [T, vocabulary] of the response tokens of all samples, in float64.
at::Tensor logits_of(const Model& policy, const MicroBatch& batch) {
  const c10::NoGradGuard no_grad;
  const at::Tensor hidden = policy.forward(batch.input).index_select(0, batch.rows).to(at::kDouble);
  return hidden.mm(policy.head_weight().detach().to(at::kDouble).t());
}

// Random tokens of a vocabulary of 60, of which the filter keeps 30: about half are dropped from the first optimizer
// step on.
TEST(Filters, ATokenThatTheyDropIsNoFailure) {
  Config config = settings(false);
  config.policy.generation.top_k = 30;
  config.policy.train_global_batch_size = 24;
  config.policy.optimizer.kwargs.lr = 0;
  config.loss_fn.reference_policy_kl_penalty = 0;
  OneRank rank(config);
  std::vector<Sample> samples = recorded();
  assign_advantages(samples, 4, config);
  Members all(samples.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  const MicroBatch batch = make_micro_batch(samples, all);
  const at::Tensor logits = logits_of(rank.policy, batch);
  double loss = 0, tokens = 0, dropped = 0;
  for (const Sample& sample : samples) {
    for (size_t t = 0; t < sample.response.size(); ++t) {
      const at::Tensor row = logits[static_cast<int64_t>(tokens)].contiguous();
      tokens += 1;
      std::vector<double> sorted(row.const_data_ptr<double>(), row.const_data_ptr<double>() + row.numel());
      const double own = sorted.at(static_cast<size_t>(sample.response[t]));
      std::sort(sorted.rbegin(), sorted.rend());
      if (own < sorted.at(29)) {
        dropped += 1;
        continue;
      }
      double mass = 0;
      for (size_t k = 0; k < 30; ++k) mass += std::exp(sorted[k] - own);
      const double ratio = 1 / mass / std::exp(static_cast<double>(sample.generation_logprobs[t]));
      const double advantage = sample.advantages[t], clipped = std::min(std::max(ratio, 0.8), 1.2);
      loss -= std::min(advantage * ratio, advantage * clipped);
    }
  }
  ASSERT_GT(dropped, tokens / 4);
  ASSERT_LT(dropped, 3 * tokens / 4);
  const TrainResult result = rank.trainer.train(samples);
  EXPECT_NEAR(result.metrics.at("filtered_token_fraction"), dropped / tokens, 1e-6);
  EXPECT_NEAR(result.metrics.at("loss"), loss / tokens, 1e-5 * std::max(1.0, std::abs(loss / tokens)));
  for (const auto& [name, value] : result.metrics) EXPECT_TRUE(std::isfinite(value)) << name;
}

// The reference has no filters: a KL of the same model to itself is 0, whatever the filters keep of the policy.
TEST(FilteredKl, IsZeroWhereThePolicyIsTheReference) {
  Config config = settings(false);
  config.policy.generation.top_k = 30;
  config.policy.train_global_batch_size = 24;
  config.policy.optimizer.kwargs.lr = 0;
  config.loss_fn.reference_policy_kl_penalty = 0.5;
  ParallelContext context(Layout{}, {});
  Model policy(test::tiny(), {}), reference(test::tiny(), {});
  init_parameters(policy, 5);
  init_parameters(reference, 5);
  DistributedAdamW optimizer(policy, context.data_parallel(), {});
  PhaseTimer timer;
  PolicyTrainer trainer(config, policy, &reference, optimizer, context, timer, /*row_exact=*/true);
  std::vector<Sample> samples = recorded();
  for (Sample& sample : samples) sample.set_advantage(0);
  const TemporaryDirectory dir;
  const std::string dump = (dir.path() / "dump.safetensors").string();
  const TrainResult same = trainer.train(samples, dump);
  EXPECT_GT(same.metrics.at("filtered_token_fraction"), 0.25);
  EXPECT_NEAR(same.metrics.at("kl_penalty"), 0, 1e-9);
  EXPECT_NEAR(same.metrics.at("grad_norm"), 0, 1e-6) << "k3 has no slope where both are the same";
  const SafetensorsFile file(dump);
  EXPECT_TRUE(
      at::equal(file.tensor("micro_batch.0.unfiltered_logprobs"), file.tensor("micro_batch.0.reference_logprobs")));
  // A token that the filters drop is in it.
  init_parameters(reference, 6);
  const std::string second = (dir.path() / "second.safetensors").string();
  const TrainResult other = trainer.train(samples, second);
  const SafetensorsFile of_other(second);
  double kl = 0, tokens = 0;
  for (int64_t b = 0; of_other.contains("micro_batch." + std::to_string(b) + ".targets"); ++b) {
    const auto get = [&](const char* name) {
      return of_other.tensor("micro_batch." + std::to_string(b) + "." + name).to(at::kDouble).contiguous();
    };
    const at::Tensor own = get("unfiltered_logprobs"), theirs = get("reference_logprobs");
    for (int64_t t = 0; t < own.numel(); ++t) {
      const double x = theirs[t].item<double>() - own[t].item<double>();
      kl += std::exp(x) - 1 - x;
      tokens += 1;
    }
  }
  ASSERT_GT(kl, 0);
  EXPECT_NEAR(other.metrics.at("kl_penalty"), kl / tokens, 1e-5 * kl / tokens);
  EXPECT_GT(other.metrics.at("grad_norm"), 0);
}

// The slope of k2 is the log-ratio itself: of the unfiltered log-prob, for a dropped token too.
TEST(FilteredKl, HasItsOwnGradient) {
  LossInputs in = with_dropped_tokens();
  in.advantages = at::zeros({6}, at::kDouble);
  in.current_unfiltered = at::tensor({-1.9, -3.0, -0.8, -2.5, -1.0, -1.3}, at::kDouble).set_requires_grad(true);
  in.reference = at::tensor({-1.9, -2.0, -1.3, -2.0, -1.5, -1.3}, at::kDouble);
  LossOptions options;
  options.reference_policy_kl_penalty = 2;
  options.reference_policy_kl_type = KlEstimator::kK2;
  options.kl_score_function_gradient = false;
  const LossOutput out = policy_loss(in, options);
  out.loss.backward();
  EXPECT_NEAR(out.metrics.at("kl_penalty"), (1 + 0.25 + 0.25 + 0.25) / 2 / 8, 1e-8);
  EXPECT_NEAR(out.loss.item<double>(), (1 + 0.25 + 0.25 + 0.25) / 8, 1e-8);
  const std::vector<double> slopes = {0, -1.0, 0.5, -0.5, 0.5, 0};
  for (size_t t = 0; t < slopes.size(); ++t) {
    const auto at = static_cast<int64_t>(t);
    EXPECT_NEAR(in.current_unfiltered.grad()[at].item<double>(), 2 * slopes[t] / 8, 1e-8) << t;
    EXPECT_EQ(in.current.grad()[at].item<double>(), 0) << t;
  }
}

// The filters see whole rows, however the vocabulary and the rows are split.
TEST(Filters, DropTheSameTokensUnderEveryLayout) {
  const auto filtered = [](Config& c) { c.policy.generation.top_k = 30; };
  const Outcome one = run(1, false, filtered);
  ASSERT_TRUE(one.moments.defined());
  const double fraction = one.result.metrics.at("filtered_token_fraction");
  EXPECT_GT(fraction, 0.25);
  EXPECT_LT(fraction, 0.75);
  for (const auto& [name, setup] : {std::pair{"tensor", test::RunSetup{.tp = 2}},
                                    {"pipeline", test::RunSetup{.pp = 2}},
                                    {"context", test::RunSetup{.cp = 2}},
                                    {"data", test::RunSetup{}}}) {
    const Outcome many = run(2, false, filtered, setup);
    ASSERT_TRUE(many.moments.defined()) << name;
    test::expect_answer_of_one(many, one, name);
    EXPECT_NEAR(many.result.metrics.at("filtered_token_fraction"), fraction, 1e-6) << name;
  }
}

}  // namespace
}  // namespace trireme
