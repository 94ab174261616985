// The reward model as a scorer: its numbers against a pass over each whole sample, on one rank and on several.
#include "trainer/algorithms/reward_model.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/unit/algorithms/recorded_rollout.h"
#include "tests/unit/errors.h"
#include "trainer/algorithms/options.h"

namespace trireme {
namespace {

ModelOptions frozen() {
  ModelOptions options;
  options.trainable = false;
  return options;
}

std::vector<Sample> scored_samples() {
  std::vector<Sample> samples = test::recorded();
  samples[4].response.clear();  // nothing but its prompt
  return samples;
}

MicroBatchOptions packed(int64_t tokens, bool share_prompts) {
  MicroBatchOptions size;
  size.rule = MicroBatchOptions::Rule::kPacked;
  size.tokens = tokens;
  size.share_prompts = share_prompts;
  return size;
}

std::vector<float> scores_of(const Layout& layout, const MicroBatchOptions& size) {
  std::vector<std::vector<float>> scores(static_cast<size_t>(layout.world()));
  test::on_layout(layout, [&](ParallelContext& context) {
    Model model(test::tiny().with_value_head(), frozen());
    init_parameters(model, 9);
    scores[static_cast<size_t>(context.rank())] = reward_model_scores(scored_samples(), model, size, context, {});
  });
  for (const std::vector<float>& of_rank : scores) EXPECT_EQ(of_rank, scores.front());
  return scores.front();
}

std::vector<float> scores_of(int world, const MicroBatchOptions& size) { return scores_of(Layout{.dp = world}, size); }

// Each prompt and response by itself, and the value of its last row.
std::vector<float> by_definition() {
  const c10::NoGradGuard no_grad;
  Model model(test::tiny().with_value_head(), frozen());
  init_parameters(model, 9);
  std::vector<float> scores;
  for (const Sample& s : scored_samples()) {
    std::vector<int32_t> whole = *s.prompt;
    whole.insert(whole.end(), s.response.begin(), s.response.end());
    const at::Tensor values = model.values(model.forward(PackedBatch::from_sequences({whole})));
    scores.push_back(values[static_cast<int64_t>(whole.size()) - 1].item<float>());
  }
  return scores;
}

TEST(RewardModel, ScoresTheLastTokenWithTheSameBitsInAnyBatch) {
  const std::vector<float> expected = by_definition();
  EXPECT_NE(expected[0], expected[1]);
  int64_t longest = 0;
  for (const Sample& s : scored_samples()) longest = std::max(longest, s.length());
  for (const int world : {1, 3}) {
    for (const bool shared : {false, true}) {
      for (const int64_t tokens : {longest, int64_t{256}}) {  // the longest sample fills a micro-batch
        const std::vector<float> scores = scores_of(world, packed(tokens, shared));
        ASSERT_EQ(scores.size(), expected.size());
        EXPECT_EQ(std::memcmp(scores.data(), expected.data(), scores.size() * sizeof(float)), 0)
            << world << " ranks, " << tokens << " tokens, shared prompts " << shared;
      }
    }
  }
  MicroBatchOptions fixed;
  fixed.samples = 3;
  EXPECT_EQ(scores_of(2, fixed), expected);
  MicroBatchOptions dynamic;
  dynamic.rule = MicroBatchOptions::Rule::kDynamic;
  dynamic.tokens = longest;
  dynamic.round = 4;
  EXPECT_EQ(scores_of(2, dynamic), expected);
}

// As they come from beside generation: whoever has one keeps it, and an empty response is scored by its prompt.
TEST(RewardModel, SamplesThatHaveAScoreKeepIt) {
  std::vector<Sample> samples = scored_samples();
  std::vector<float> expected = by_definition();
  for (const size_t i : {0, 3}) samples[i].score = expected[i] = 7.5f + static_cast<float>(i);
  ParallelContext context;
  Model model(test::tiny().with_value_head(), frozen());
  init_parameters(model, 9);
  EXPECT_EQ(reward_model_scores(samples, model, packed(256, true), context, {}), expected);
  for (size_t i = 0; i < samples.size(); ++i) EXPECT_EQ(samples[i].score.has_value(), i == 0 || i == 3);
}

// It is whole on every rank, of which each has a share.
TEST(RewardModel, RanksThatSplitThePolicyScoreLikeAnyOthers) {
  const std::vector<float> expected = by_definition();
  for (const Layout& layout : {Layout{.tp = 2}, Layout{.pp = 2}, Layout{.cp = 2, .dp = 2}, Layout{.tp = 2, .pp = 2}})
    EXPECT_EQ(scores_of(layout, packed(256, true)), expected) << to_string(layout);
}

TEST(RewardModel, AScoreThatIsNotFiniteIsNamed) {
  ParallelContext context;
  Model model(test::tiny().with_value_head(), frozen());
  init_parameters(model, 9);
  model.find("score.weight")->tensor.detach()[0][0] = std::numeric_limits<float>::quiet_NaN();
  try {
    reward_model_scores(scored_samples(), model, packed(256, false), context, {});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kData);
    EXPECT_MENTIONS(error.what(), "the reward model's score of response 0 of group 0 is not finite");
  }
}

TEST(RewardModel, AScoreIsTheLastPartOfTheSum) {
  std::vector<Sample> samples = test::recorded();
  samples.resize(2);
  samples[0].raw_reward = 1;
  samples[0].reward_parts = {1, 0};
  samples[1].raw_reward = 0;
  samples[1].reward_parts = {0, 0};
  add_scores(samples, {-0.5f, 4.0f}, 0.25);
  EXPECT_EQ(samples[0].raw_reward, 0.875);
  EXPECT_EQ(samples[0].reward_parts, (std::vector<double>{1, 0, -0.5}));
  EXPECT_EQ(samples[1].raw_reward, 1);
  EXPECT_EQ(samples[1].reward_parts, (std::vector<double>{0, 0, 4}));
}

}  // namespace
}  // namespace trireme
