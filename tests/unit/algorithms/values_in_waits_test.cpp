// What PPO computes of some samples ahead of others: values while a rank waits, previous log-probs of older samples.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/unit/algorithms/recorded_rollout.h"
#include "trainer/algorithms/critic_role.h"

namespace trireme {
namespace {

TEST(ValuesInWaits, AreTheBitsOfThoseThatAllSamplesGetTogether) {
  Config config = test::settings(/*dynamic=*/false);
  config.loss_fn.reference_policy_kl_penalty = 0;
  ParallelContext context;
  Model model(test::tiny().with_value_head(), ModelOptions{});
  init_parameters(model, 9);
  DistributedAdamW optimizer(model, context.data_parallel(), AdamWOptions{});
  LocalCritic critic(std::make_unique<CriticTrainer>(config, model, optimizer, context));
  EXPECT_FALSE(critic.works_ahead()) << "beside generation on the same device it would stand in its way";
  ASSERT_TRUE(critic.works_in_waits());
  std::vector<Sample> together = test::recorded(), apart = test::recorded();
  critic.begin_values(together, 1);
  critic.finish_values(together);
  std::vector<Sample> some(apart.begin() + 4, apart.begin() + 6);
  critic.in_wait(some);
  for (size_t i = 0; i < some.size(); ++i) apart[4 + i].values = some[i].values;
  critic.begin_values(apart, 1);
  critic.finish_values(apart);
  for (size_t i = 0; i < together.size(); ++i) {
    ASSERT_EQ(apart[i].values.size(), apart[i].response.size());
    EXPECT_EQ(std::memcmp(apart[i].values.data(), together[i].values.data(), apart[i].values.size() * sizeof(float)), 0)
        << "sample " << i;
  }
}

TEST(WithSome, VisitsThoseThatAreWantedAndPutsThemBack) {
  std::vector<Sample> samples = test::recorded();
  const std::vector<Sample> before = samples;
  const auto odd = [](const Sample& sample) { return sample.index % 2 == 1; };
  int calls = 0;
  with_some(samples, odd, [&](std::vector<Sample>& some) {
    ++calls;
    EXPECT_EQ(some.size(), samples.size() / 2);
    for (Sample& sample : some)
      sample.previous_logprobs.assign(sample.response.size(), static_cast<float>(sample.group));
  });
  EXPECT_EQ(calls, 1);
  for (size_t i = 0; i < samples.size(); ++i) {
    EXPECT_EQ(samples[i].response, before[i].response);
    EXPECT_EQ(samples[i].group, before[i].group);
    const size_t filled = odd(samples[i]) ? samples[i].response.size() : 0;
    EXPECT_EQ(samples[i].previous_logprobs, std::vector<float>(filled, static_cast<float>(samples[i].group)));
  }
  with_some(
      samples, [](const Sample&) { return false; }, [&](std::vector<Sample>&) { ++calls; });
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace trireme
