// The critic: values of a recorded rollout and its training, on one rank and on two.
#include "trainer/algorithms/critic.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "tests/unit/algorithms/recorded_rollout.h"
#include "tests/unit/errors.h"
#include "trainer/algorithms/token_passes.h"

namespace trireme {
namespace {

Config critic_settings(bool share_prompts = false) {
  Config c = test::settings(/*dynamic=*/false);
  c.policy.sequence_packing.share_prompts = share_prompts;
  c.loss_fn.reference_policy_kl_penalty = 0;
  c.policy.optimizer.kwargs.lr = 1e-2;
  c.value_loss_fn = {.scale = 1, .cliprange = 0.5};
  return c;
}

struct CriticOutcome {
  std::vector<Sample> samples;  // with values of before training
  MetricSums metrics;
  at::Tensor weights;
};

CriticOutcome run_critic(int world, const Config& config, int64_t passes,
                         StateSharding shared = StateSharding::kOptimizer) {
  CriticOutcome outcome;
  Layout layout;
  layout.dp = world;
  test::on_layout(layout, [&](ParallelContext& context) {
    ModelOptions options;
    options.sharding = test::sharding_of(shared, context, 4096);
    Model critic(test::tiny().with_value_head(), options);
    init_parameters(critic, 9);
    AdamWOptions adam;
    adam.bucket_elements = 4096;
    adam.shard_state = shared != StateSharding::kNothing;
    DistributedAdamW optimizer(critic, context.data_parallel(), adam);
    CriticTrainer trainer(config, critic, optimizer, context);
    std::vector<Sample> samples = test::recorded();
    samples[3].loss_multiplier = 0;
    samples[5].loss_mask.assign(samples[5].response.size(), 1);
    samples[5].loss_mask[0] = 0;
    trainer.fill_values(samples);
    for (Sample& s : samples) s.returns.assign(s.response.size(), s.raw_reward - 1);
    const MetricSums metrics = trainer.train(samples, passes);
    if (critic.units() != nullptr) critic.units()->gather();
    if (!context.is_main()) return;
    outcome.samples = samples;
    outcome.metrics = metrics;
    outcome.weights = critic.flat_parameters().detach().clone();
  });
  return outcome;
}

TEST(TokenShares, AreRunsOfAboutAsManyTokens) {
  std::vector<Sample> samples = test::recorded();
  samples[2].values.assign(samples[2].response.size(), 1);  // has them
  samples[4].response.clear();                              // has none to have
  int64_t total = 0, longest = 0;
  for (const Sample& s : samples) {
    longest = std::max(longest, s.length());
    total += s.values.empty() && !s.response.empty() ? s.length() : 0;
  }
  for (const int64_t ranks : {1, 2, 3, 5, 40}) {
    int64_t next = 0;
    for (const Members& share : shares_of_tokens(samples, &Sample::values, ranks)) {
      int64_t tokens = 0;
      for (const int64_t i : share) {
        while (next == 2 || next == 4) ++next;
        EXPECT_EQ(i, next++);
        tokens += samples[static_cast<size_t>(i)].length();
      }
      EXPECT_LE(tokens, total / ranks + longest + 1);
    }
    EXPECT_EQ(next, 24);
  }
}

TEST(TokenShares, NoMicroBatchHasMoreTokensThanIsSaid) {
  using Rule = MicroBatchOptions::Rule;
  const std::vector<Sample> samples = test::recorded();
  Members all(samples.size());
  std::iota(all.begin(), all.end(), int64_t{0});
  int64_t longest = 0;
  for (const Sample& s : samples) longest = std::max(longest, s.length());
  for (const MicroBatchOptions& size : {MicroBatchOptions{.rule = Rule::kFixed, .samples = 3},
                                        MicroBatchOptions{.rule = Rule::kPacked, .tokens = 3 * longest},
                                        MicroBatchOptions{.rule = Rule::kDynamic, .tokens = 2 * longest, .round = 4}}) {
    const int64_t most = most_tokens_of_a_pass(samples, size);
    int64_t largest = 0;
    for (const auto& rank : make_micro_batches(samples, all, size, 2)) {
      for (const Members& members : rank)
        largest = std::max(largest, make_micro_batch(samples, members, size.share_prompts).input.tokens());
    }
    EXPECT_LE(largest, most);
    EXPECT_GT(4 * largest, most);
  }
}

TEST(CriticRanks, ValuesHaveTheSameBitsOnAnyNumberOfRanks) {
  const CriticOutcome one = run_critic(1, critic_settings(), 1);
  for (const bool shared_prompts : {false, true}) {
    const CriticOutcome other = run_critic(3, critic_settings(shared_prompts), 1);
    ASSERT_EQ(one.samples.size(), other.samples.size());
    for (size_t i = 0; i < one.samples.size(); ++i) {
      const std::vector<float>&a = one.samples[i].values, &b = other.samples[i].values;
      ASSERT_EQ(a.size(), one.samples[i].response.size());
      ASSERT_EQ(a.size(), b.size());
      EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << i;
    }
  }
}

TEST(CriticRanks, TrainingIsThatOfOneRank) {
  Config config = critic_settings();
  config.policy.optimizer.kwargs.lr = 1e-4;
  const CriticOutcome one = run_critic(1, config, 2);
  for (const StateSharding shared :
       {StateSharding::kNothing, StateSharding::kOptimizer, StateSharding::kGradients, StateSharding::kWeights}) {
    const CriticOutcome two = run_critic(2, config, 2, shared);
    // Adam makes a whole step of a gradient that is nothing but rounding: in the mean, not element by element.
    EXPECT_LE((one.weights - two.weights).abs().mean().item<double>(), 2e-6);
    ASSERT_EQ(one.metrics.size(), two.metrics.size());
    for (const auto& [name, value] : one.metrics)
      EXPECT_NEAR(two.metrics.at(name), value, 1e-5 * std::max(1.0, std::abs(value))) << name;
  }
}

TEST(Critic, LearnsTheReturns) {
  Config config = critic_settings();
  config.value_loss_fn.cliprange.reset();
  const CriticOutcome once = run_critic(1, config, 1), often = run_critic(1, config, 40);
  EXPECT_LT(often.metrics.at("loss"), once.metrics.at("loss"));
  EXPECT_GT(often.metrics.at("explained_var"), once.metrics.at("explained_var"));
  EXPECT_EQ(once.metrics.at("lr"), 1e-2);
  double sum = 0, tokens = 0;
  for (const Sample& s : once.samples) {
    for (size_t t = 0; t < s.response.size(); ++t) {
      sum += s.counts(t) ? s.returns[t] : 0;
      tokens += s.counts(t) ? 1 : 0;
    }
  }
  EXPECT_NEAR(once.metrics.at("returns_mean"), sum / tokens, 1e-6);  // masked ones are not in it
}

TEST(Critic, AValueThatIsNotFiniteIsNamed) {
  const Config config = critic_settings();
  ParallelContext context;
  Model critic(test::tiny().with_value_head(), {});
  init_parameters(critic, 9);
  DistributedAdamW optimizer(critic, context.data_parallel(), {});
  CriticTrainer trainer(config, critic, optimizer, context);
  std::vector<Sample> samples = test::recorded();
  {
    const at::NoGradGuard no_grad;
    critic.find("score.weight")->tensor.detach()[0][0] = std::numeric_limits<float>::quiet_NaN();
  }
  try {
    trainer.fill_values(samples);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kData);  // code 21
    EXPECT_MENTIONS(error.what(), "the critic's value before token 0 of the response of sample");
    EXPECT_MENTIONS(error.what(), "(group ");
  }
}

}  // namespace
}  // namespace trireme
