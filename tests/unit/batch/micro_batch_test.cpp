#include "trainer/batch/micro_batch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "base/error.h"
#include "tests/unit/model/testing.h"

namespace trireme {
namespace {

Sample sample(int64_t group, std::vector<int32_t> prompt, std::vector<int32_t> tokens) {
  Sample s;
  s.group = group;
  s.prompt = SharedTokens(std::move(prompt));
  s.response = std::move(tokens);
  for (size_t i = 0; i < s.response.size(); ++i) s.generation_logprobs.push_back(-0.5f - static_cast<float>(i));
  s.raw_reward = 0.25 * static_cast<double>(group);
  s.reward_parts = {1.5, 0.25 * static_cast<double>(group)};
  s.truncated = group == 1;
  s.mixed_context = group == 2;
  s.dropped = group != 1;
  if (group > 0) s.score = static_cast<float>(group - 1);  // 0 is one too
  for (size_t i = 0; i < s.response.size(); ++i) append_version(s.weight_versions, static_cast<int64_t>(i / 2));
  return s;
}

TEST(Samples, PackingRoundTripsAndRefusesCutBuffers) {
  const std::vector<Sample> samples = {sample(0, {1, 2}, {3, 4, 5}), sample(1, {7}, {}), sample(2, {9, 9, 9}, {1})};
  const std::string bytes = pack_samples(samples);
  const std::vector<SharedTokens> prompts = {{1, 2}, {7}, {9, 9, 9}};
  const std::vector<Sample> back = unpack_samples(bytes, prompts);
  ASSERT_EQ(back.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(back[i].prompt, samples[i].prompt);
    EXPECT_EQ(back[i].response, samples[i].response);
    EXPECT_EQ(back[i].generation_logprobs, samples[i].generation_logprobs);
    EXPECT_EQ(back[i].raw_reward, samples[i].raw_reward);
    EXPECT_EQ(back[i].reward_parts, samples[i].reward_parts);
    EXPECT_EQ(back[i].score, samples[i].score);
    EXPECT_EQ(back[i].dropped, samples[i].dropped);
    EXPECT_EQ(back[i].truncated, samples[i].truncated);
    EXPECT_EQ(back[i].weight_versions, samples[i].weight_versions);
    EXPECT_EQ(back[i].mixed_context, samples[i].mixed_context);
  }
  for (size_t cut = 1; cut < bytes.size(); ++cut) {
    try {
      unpack_samples(std::string_view(bytes).substr(0, cut), prompts);  // may end exactly behind a sample
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kData);
    }
  }
  EXPECT_THROW(unpack_samples(bytes, {prompts[0], prompts[1]}), Error);  // no prompt of group 2
}

TEST(Samples, NumbersOfTokensTravelWithThem) {
  Sample full = sample(0, {1, 2}, {3, 4, 5});
  full.loss_mask = {1, 0, 1};
  full.values = {0.5F, -1, 2};
  full.rewards = {0, -0.25, 1};
  full.advantages = {0.1, 0.2, 0.3};
  full.returns = {1, 2, 3};
  const std::vector<SharedTokens> prompts = {{1, 2}};
  const Sample back = unpack_samples(pack_samples({full}), prompts).front();
  EXPECT_EQ(back.loss_mask, full.loss_mask);
  EXPECT_EQ(back.values, full.values);
  EXPECT_EQ(back.rewards, full.rewards);
  EXPECT_EQ(back.advantages, full.advantages);
  EXPECT_EQ(back.returns, full.returns);
  for (const auto spoil : {+[](Sample& s) { s.loss_mask.pop_back(); }, +[](Sample& s) { s.values.push_back(0); },
                           +[](Sample& s) { s.rewards.pop_back(); }, +[](Sample& s) { s.advantages.pop_back(); },
                           +[](Sample& s) { s.returns.push_back(0); }}) {
    Sample spoilt = full;
    spoil(spoilt);
    EXPECT_THROW(unpack_samples(pack_samples({spoilt}), prompts), Error);
  }
}

TEST(Samples, AMaskedTokenOrSampleIsOutOfTheLoss) {
  std::vector<Sample> samples = {sample(0, {1, 2}, {3, 4, 5}), sample(1, {7}, {8, 9}), sample(2, {1}, {2})};
  samples[0].loss_mask = {1, 0, 1};
  samples[1].loss_multiplier = 0;
  for (Sample& s : samples) s.set_advantage(static_cast<double>(s.group) - 0.7);
  samples[0].advantages[2] = 5;
  EXPECT_TRUE(at::equal(loss_mask(samples, {2, 0, 1}), at::tensor(std::vector<float>{1, 1, 0, 1, 0, 0}, at::kFloat)));
  EXPECT_TRUE(at::equal(of_tokens(samples, {2, 0, 1}, &Sample::advantages),
                        at::tensor(std::vector<float>{1.3F, -0.7F, -0.7F, 5, 0.3F, 0.3F}, at::kFloat)));
  EXPECT_EQ(samples[0].valid_tokens(), 2);
  EXPECT_EQ(samples[1].valid_tokens(), 0);
  EXPECT_EQ(samples[2].valid_tokens(), 1);
  EXPECT_THROW(of_tokens(samples, {0}, &Sample::returns), Error);  // nobody has made them
}

TEST(Samples, TheMeanOfEqualAdvantagesIsOneOfThem) {
  Sample s = sample(0, {1}, {2, 3, 4, 5, 6, 7, 8});
  for (const double advantage : {0.1, -1.0 / 3, 1e-17, 123456.789}) {
    s.set_advantage(advantage);
    EXPECT_EQ(s.mean_advantage(), advantage);
  }
  s.advantages = {1, 2, 3, 4, 5, 6, 7};
  EXPECT_DOUBLE_EQ(s.mean_advantage(), 4);
  EXPECT_EQ(sample(0, {1}, {}).mean_advantage(), 0);
}

TEST(Samples, WeightVersionsAreThoseOfTheTokens) {
  Sample s = sample(0, {1}, {3, 4, 5});
  EXPECT_EQ(s.weight_versions, (VersionSpans{{0, 0, 2}, {1, 2, 3}}));
  EXPECT_FALSE(s.is_of(0));
  EXPECT_FALSE(s.is_of(1));
  const auto refused = [&](VersionSpans spans) {
    s.weight_versions = std::move(spans);
    try {
      unpack_samples(pack_samples({s}), {{1}});
      return false;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kData);
      return true;
    }
  };
  EXPECT_TRUE(refused({{0, 0, 2}}));             // a token of nobody
  EXPECT_TRUE(refused({{0, 0, 2}, {1, 2, 4}}));  // one too many
  EXPECT_TRUE(refused({{0, 1, 3}}));
  EXPECT_TRUE(refused({{0, 0, 2}, {1, 1, 3}}));
  EXPECT_TRUE(refused({{1, 0, 2}, {0, 2, 3}}));  // weights do not become older
  EXPECT_TRUE(refused({{0, 0, 2}, {1, 2, 2}, {2, 2, 3}}));
  EXPECT_TRUE(refused({{-1, 0, 3}}));
  EXPECT_FALSE(refused({{7, 0, 3}}));
  EXPECT_TRUE(s.is_of(7));
  s.mixed_context = true;
  EXPECT_FALSE(s.is_of(7));
  EXPECT_FALSE(refused({}));  // nobody said
  s.mixed_context = false;
  EXPECT_TRUE(s.is_of(3));
}

TEST(Samples, MicroBatchPicksTheRowBeforeEachResponseToken) {
  const std::vector<Sample> samples = {sample(0, {1, 2}, {3, 4, 5}), sample(1, {7}, {}), sample(2, {9, 8, 7}, {6})};
  const MicroBatch batch = make_micro_batch(samples, {2, 1, 0});
  // 9 8 7 | 1 2 3 4 : the last answer token of each is never an input
  EXPECT_TRUE(at::equal(batch.input.ids, at::tensor(std::vector<int64_t>{9, 8, 7, 1, 2, 3, 4}, at::kLong)));
  EXPECT_TRUE(at::equal(batch.input.positions, at::tensor(std::vector<int64_t>{0, 1, 2, 0, 1, 2, 3}, at::kLong)));
  EXPECT_EQ(batch.input.starts, (std::vector<int64_t>{0, 3, 7}));
  EXPECT_TRUE(at::equal(batch.rows, at::tensor(std::vector<int64_t>{2, 4, 5, 6}, at::kLong)));
  EXPECT_TRUE(at::equal(batch.targets, at::tensor(std::vector<int64_t>{6, 3, 4, 5}, at::kLong)));
  EXPECT_TRUE(at::equal(batch.sequence, at::tensor(std::vector<int64_t>{0, 2, 2, 2}, at::kLong)));
  const at::Tensor spread_out = spread(samples, {2, 1, 0}, {1, 2, 3});
  EXPECT_TRUE(at::equal(spread_out, at::tensor(std::vector<float>{1, 3, 3, 3}, at::kFloat)));
}

TEST(Samples, ASharedPromptIsThereOnce) {
  const std::vector<Sample> samples = {sample(0, {1, 2}, {3, 4, 5}), sample(7, {9, 8, 7}, {6}), sample(0, {1, 2}, {}),
                                       sample(0, {1, 2}, {6, 7})};
  const MicroBatch batch = make_micro_batch(samples, {0, 1, 2, 3}, /*share_prompts=*/true);
  // 1 2 | 3 4 | 9 8 7 | 6
  EXPECT_TRUE(at::equal(batch.input.ids, at::tensor(std::vector<int64_t>{1, 2, 3, 4, 9, 8, 7, 6}, at::kLong)));
  EXPECT_TRUE(at::equal(batch.input.positions, at::tensor(std::vector<int64_t>{0, 1, 2, 3, 0, 1, 2, 2}, at::kLong)));
  EXPECT_EQ(batch.input.starts, (std::vector<int64_t>{0, 2, 4, 7, 8}));
  EXPECT_EQ(batch.input.prefix, (std::vector<int64_t>{-1, 0, -1, 0}));
  EXPECT_TRUE(at::equal(batch.rows, at::tensor(std::vector<int64_t>{1, 2, 3, 6, 1, 7}, at::kLong)));
  EXPECT_TRUE(at::equal(batch.targets, at::tensor(std::vector<int64_t>{3, 4, 5, 6, 6, 7}, at::kLong)));
  EXPECT_TRUE(at::equal(batch.sequence, at::tensor(std::vector<int64_t>{0, 0, 0, 1, 3, 3}, at::kLong)));
  EXPECT_TRUE(make_micro_batch(samples, {0, 1}).input.prefix.empty());
  const std::vector<Sample> wrong = {sample(0, {1, 2}, {3}), sample(0, {1, 3}, {3})};
  EXPECT_THROW(make_micro_batch(wrong, {0, 1}, true), Error);
}

// A token whose embedding is not a number: its row is the first whose router logits are none.
TEST(Samples, ARowWhoseRouterFailsIsNamedBySampleAndToken) {
  Model model(testing::small_config(ModelFamily::kQwen3Moe), {});
  init_parameters(model, 23);
  {
    const at::NoGradGuard no_grad;
    model.find("model.embed_tokens.weight")->tensor[60].fill_(std::nanf(""));
  }
  const auto error = [&](std::vector<Sample> samples, bool share_prompts) {
    Members members(samples.size());
    std::iota(members.begin(), members.end(), int64_t{0});
    const MicroBatch batch = make_micro_batch(samples, members, share_prompts);
    return testing::error_of([&] { (void)model.forward(batch.input); });
  };
  const Sample good = sample(4, {1, 2}, {3, 4, 5});
  Sample bad_prompt = sample(7, {60, 8}, {6, 9});
  bad_prompt.index = 2;
  const std::string what = "layer 0: the router's logits are not finite at token 0 of ";
  EXPECT_EQ(error({good, bad_prompt}, false), what + "the prompt of response 2 to prompt 7");
  EXPECT_EQ(error({good, bad_prompt}, true), what + "prompt 7");
  Sample bad_response = sample(4, {1, 2}, {60, 9});
  bad_response.index = 1;
  EXPECT_EQ(error({good, bad_response}, true), what + "response 1 to prompt 4");
  EXPECT_EQ(error({good, sample(4, {1, 2}, {9, 60})}, true), "") << "the last token is no input";
  EXPECT_EQ(name_of_token({3, 5, 4}, 6), "token 2 of response 5 to prompt 3");
}

TEST(Values, OfAResponseAreThoseOfTheRowsThatPredictIt) {
  Model model(testing::small_config(ModelFamily::kQwen3).with_value_head(), {});
  init_parameters(model, 23);
  const at::NoGradGuard no_grad;
  std::vector<Sample> samples(3);
  for (size_t i = 0; i < samples.size(); ++i) {
    samples[i].group = i < 2 ? 0 : 1;
    samples[i].index = static_cast<int64_t>(i);
    samples[i].prompt =
        SharedTokens(testing::random_tokens(4 + samples[i].group, 50 + static_cast<uint64_t>(samples[i].group)));
    samples[i].response = testing::random_tokens(3 + static_cast<int64_t>(i), 60 + i);
    samples[i].generation_logprobs.assign(samples[i].response.size(), -1);
  }
  const Members members = {2, 0, 1};
  std::vector<at::Tensor> of_both;
  for (const bool shared : {false, true}) {
    const MicroBatch batch = make_micro_batch(samples, members, shared);
    of_both.push_back(response_values(model, model.forward(batch.input), batch));
  }
  EXPECT_TRUE(testing::same_bits(of_both[0], of_both[1]));
  int64_t at = 0;
  for (const int64_t i : members) {
    const Sample& sample = samples[static_cast<size_t>(i)];
    std::vector<int32_t> whole = *sample.prompt;
    whole.insert(whole.end(), sample.response.begin(), sample.response.end());
    const at::Tensor all = model.values(model.forward(PackedBatch::from_sequences({whole})));
    const auto length = static_cast<int64_t>(sample.response.size());
    // Of the state before each token: from the prompt's last row on, without the last token's own.
    EXPECT_TRUE(testing::same_bits(of_both[0].narrow(0, at, length),
                                   all.narrow(0, static_cast<int64_t>(sample.prompt.size()) - 1, length)));
    at += length;
  }
}

}  // namespace
}  // namespace trireme
