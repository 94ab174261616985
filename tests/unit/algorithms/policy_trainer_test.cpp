// A rollout's training: early gradients, a KL in the rewards, positive examples, the schedule.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/fs.h"
#include "tests/unit/algorithms/recorded_rollout.h"
#include "trainer/algorithms/policy_trainer.h"
#include "trainer/algorithms/sample_advantages.h"
#include "trainer/model/safetensors.h"

namespace trireme {
namespace {

using test::OneRank;
using test::Outcome;
using test::recorded;
using test::run;
using test::settings;
using test::tiny;

TEST(EarlyGradients, ABatchWithoutAValidTokenTrainsNothing) {
  for (const bool by_tokens : {true, false}) {
    Config config = settings(false);
    config.grpo.overlong_filtering = true;
    config.loss_fn.reference_policy_kl_penalty = 0;
    config.loss_fn.token_level_loss = by_tokens;
    OneRank rank(config);
    const at::Tensor before = rank.policy.flat_parameters().detach().clone();
    std::vector<Sample> samples = recorded();
    for (Sample& sample : samples) sample.truncated = true;
    assign_advantages(samples, 4, config);
    rank.trainer.train_early({samples.begin(), samples.begin() + 4});
    for (size_t i = 0; i < 4; ++i) samples[i].trained_early = true;
    const TrainResult result = rank.trainer.train(samples);
    EXPECT_EQ(result.metrics.at("loss"), 0);
    EXPECT_EQ(result.metrics.at("grad_norm"), 0);
    for (const auto& [key, value] : result.metrics) EXPECT_TRUE(std::isfinite(value)) << key;
    EXPECT_EQ(result.compared_tokens, 0);
    EXPECT_TRUE(at::isfinite(rank.policy.flat_parameters()).all().item<bool>());
    EXPECT_LT((rank.policy.flat_parameters() - before).abs().max().item<double>(), 1e-5);  // weight decay only
  }
}

void kl_in_reward(Config& c) {
  c.grpo.adv_estimator.name = AdvantageEstimator::kReinforcePlusPlus;
  c.grpo.overlong_filtering = true;
  c.grpo.advantage_clip_high = 1.5;
  c.loss_fn.use_kl_in_reward = true;
  c.loss_fn.reference_policy_kl_penalty = 0.3;
}

// The formula once more, from the paper: r - mean of the group - beta * KL of the token, whitened over the batch's
// tokens.
TEST(KlInReward, IsTakenOffEveryTokenBeforeWhitening) {
  const TemporaryDirectory dir;
  Config config = settings(false);
  kl_in_reward(config);
  config.policy.sequence_packing.enabled = false;  // one micro-batch, samples in order
  config.policy.train_global_batch_size = config.policy.train_micro_batch_size = 24;
  ParallelContext context(Layout{}, {});
  Model policy(tiny(), {}), reference(tiny(), {});
  init_parameters(policy, 5);
  init_parameters(reference, 6);
  DistributedAdamW optimizer(policy, context.data_parallel(), {});
  PhaseTimer timer;
  PolicyTrainer trainer(config, policy, &reference, optimizer, context, timer, /*exact=*/true);
  std::vector<Sample> samples = recorded();
  samples[7].truncated = true;  // in its group's mean, not in the loss
  samples[9].dropped = true;    // in neither
  assign_advantages(samples, 4, config);
  const TrainResult result = trainer.train(samples, (dir.path() / "dump.safetensors").string());
  const SafetensorsFile file(dir.path() / "dump.safetensors");
  const auto get = [&](const char* name) {
    const at::Tensor flat = file.tensor(std::string("micro_batch.0.") + name).to(at::kDouble).contiguous();
    return std::vector<double>(flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel());
  };
  const std::vector<double> previous = get("previous_logprobs"), other = get("reference_logprobs");
  EXPECT_EQ(get("weight_versions"), std::vector<double>(previous.size(), -1)) << "nobody said";
  std::vector<double> tokens;
  std::vector<bool> valid;
  double kl_sum = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    double mean = 0, members = 0;
    for (size_t j = i / 4 * 4; j < i / 4 * 4 + 4; ++j) {
      if (samples[j].dropped) continue;
      mean += samples[j].raw_reward;
      members += 1;
    }
    for (size_t t = 0; t < samples[i].response.size(); ++t) {
      const double x = other.at(tokens.size()) - previous.at(tokens.size()), kl = std::exp(x) - 1 - x;
      valid.push_back(i != 7 && i != 9);
      kl_sum += valid.back() ? kl : 0;
      tokens.push_back(samples[i].raw_reward - mean / members - 0.3 * kl);
    }
  }
  double count = 0, sum = 0, squares = 0;
  for (size_t t = 0; t < tokens.size(); ++t) {
    count += valid[t] ? 1 : 0;
    sum += valid[t] ? tokens[t] : 0;
  }
  for (size_t t = 0; t < tokens.size(); ++t) squares += valid[t] ? std::pow(tokens[t] - sum / count, 2) : 0;
  const std::vector<double> advantages = get("advantages");
  ASSERT_EQ(advantages.size(), tokens.size());
  bool clipped = false;
  for (size_t t = 0; t < tokens.size(); ++t) {
    if (!valid[t]) continue;
    const double white = (tokens[t] - sum / count) / std::sqrt(squares / count);
    EXPECT_NEAR(advantages[t], std::min(white, 1.5), 1e-5) << t;
    clipped = clipped || white > 1.5;
  }
  EXPECT_TRUE(clipped);
  EXPECT_NEAR(result.metrics.at("kl_penalty"), kl_sum / count, 1e-6);
  EXPECT_EQ(result.metrics.at("advantages/max"), 1.5);
}

TEST(KlInReward, OneTwoAndFourRanksAgree) {
  const Outcome one = run(1, false, kl_in_reward);
  ASSERT_TRUE(one.moments.defined());
  for (const int world : {2, 4}) {
    const Outcome many = run(world, false, kl_in_reward);
    ASSERT_TRUE(many.moments.defined());
    for (const char* key : {"loss", "grad_norm", "kl_penalty", "advantages/min", "advantages/mean"}) {
      EXPECT_NEAR(many.result.metrics.at(key), one.result.metrics.at(key),
                  1e-5 * std::max(1.0, std::abs(one.result.metrics.at(key))))
          << key;
    }
  }
}

TEST(PositiveExamples, TheirMeanDoesNotDependOnRanksOrMicroBatches) {
  const auto with = [](int world, int64_t micro_batch_tokens) {
    return run(world, false, [=](Config& c) {
      c.loss_fn.positive_example_nll_weight = 0.5;
      c.policy.sequence_packing.train_mb_tokens = micro_batch_tokens;
    });
  };
  const Outcome one = with(1, 2000);
  const double nll = one.result.metrics.at("positive_nll_loss");
  EXPECT_GT(nll, 3.5);  // nearly a uniform guess among 60 tokens: log 60 = 4.1, for each token of a correct answer
  EXPECT_LT(nll, 4.7);
  for (const auto& [world, tokens] : {std::pair{1, 64}, {2, 64}, {4, 128}}) {
    const Outcome cut = with(world, tokens);
    ASSERT_TRUE(cut.moments.defined());
    EXPECT_NEAR(cut.result.metrics.at("positive_nll_loss"), nll, 1e-5 * nll) << world << " " << tokens;
    EXPECT_NEAR(cut.result.metrics.at("grad_norm"), one.result.metrics.at("grad_norm"),
                1e-5 * one.result.metrics.at("grad_norm"));
  }
}

TEST(Schedule, MovesOnceARolloutWhateverTheNumberOfOptimizerSteps) {
  Config config = settings(false);
  config.loss_fn.reference_policy_kl_penalty = 0;
  config.policy.optimizer.kwargs.lr = 0.008;
  config.policy.scheduler.pieces = {{"LinearLR", {{"start_factor", 0.25}, {"end_factor", 1.0}, {"total_iters", 3}}}};
  const auto rates = [&](int64_t optimizer_batch, int64_t rollouts_before) {
    config.policy.train_global_batch_size = optimizer_batch;
    OneRank rank(config);
    if (rollouts_before > 0) rank.trainer.set_passes_done(rollouts_before);  // a resumed run, without optimizer state
    std::vector<Sample> samples = recorded();
    assign_advantages(samples, 4, config);
    std::vector<double> seen;
    for (int64_t r = rollouts_before; r < 4; ++r) seen.push_back(rank.trainer.train(samples).metrics.at("lr"));
    EXPECT_EQ(rank.optimizer.steps_done(), (4 - rollouts_before) * 24 / optimizer_batch);
    return seen;
  };
  for (const int64_t optimizer_batch : {24, 6}) {
    const std::vector<double> seen = rates(optimizer_batch, 0);
    for (size_t r = 0; r < seen.size(); ++r) EXPECT_NEAR(seen[r], 0.002 * static_cast<double>(r + 1), 1e-12);
    const std::vector<double> rest = rates(optimizer_batch, 2);
    EXPECT_EQ(rest, std::vector<double>(seen.begin() + 2, seen.end()));
  }
}

}  // namespace
}  // namespace trireme
