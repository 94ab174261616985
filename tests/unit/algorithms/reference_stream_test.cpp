// What a reference, a critic and a reward model say beside generation has the bits of the passes after it.
#include "trainer/algorithms/reference_stream.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "base/error.h"
#include "tests/unit/algorithms/recorded_rollout.h"
#include "tests/unit/errors.h"
#include "tests/unit/model/tiny.h"
#include "trainer/algorithms/critic.h"
#include "trainer/algorithms/reward_model.h"

namespace trireme {
namespace {

constexpr int64_t kVocabulary = 90;

std::unique_ptr<Model> model_of(uint64_t seed) {
  return test::tiny_model({.vocab = kVocabulary, .layers = 2, .initializer_range = 0.3}, seed);
}

struct Rollout {
  std::vector<Sample> samples;
  int64_t filled = 0;
};

// 3 prompts of 14 responses, of 1 to 40 tokens. Waits in mid-generation until each of the stream's models has got to
// one of them.
Rollout generate(const Model& policy, ReferenceStream* stream) {
  SamplingOptions sampling;
  sampling.seed = 9;
  Engine engine(policy, nullptr, {.cache_rows = 4000, .max_sequences = 64}, sampling);
  Rollout rollout;
  std::mt19937 random(3);
  std::vector<GroupRequest> groups;
  for (int64_t g = 0; g < 3; ++g) {
    GroupRequest group;
    group.first_sample_id = static_cast<uint64_t>(g * 14);
    for (int64_t t = 0; t < 4 + g; ++t) group.prompt.push_back(static_cast<int32_t>(random() % kVocabulary));
    for (int64_t i = 0; i < 14; ++i) group.forced_lengths.push_back(1 + static_cast<int64_t>(random() % 40));
    groups.push_back(std::move(group));
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  DriverHooks hooks;
  hooks.request = [&](const SampleSpan& span) { return groups[static_cast<size_t>(span.group)]; };
  hooks.complete = [&](const SampleSpan& span, GeneratedGroup group) {
    for (size_t i = 0; i < group.samples.size(); ++i) {
      Sample sample;
      sample.group = span.group;
      sample.index = static_cast<int64_t>(i);
      sample.prompt = SharedTokens(group.prompt);
      sample.response = group.samples[i].response;
      sample.generation_logprobs = group.samples[i].logprobs;
      rollout.samples.push_back(std::move(sample));
    }
  };
  if (stream != nullptr) {
    hooks.finished = [&](const FinishedSample& sample) { stream->add(sample); };
    hooks.between_steps = [&] {
      stream->after_step(engine);
      while (engine.unfinished_samples() == 10 && stream->computed() == 0 &&
             std::chrono::steady_clock::now() < deadline)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
  }
  LocalCounter counter;
  SampleQueue queue({.groups = 3, .samples = 14, .places = 64}, counter, "rollout");
  const ReferenceRollout until_the_end(stream);
  drive_rollout(engine, queue, hooks);
  if (stream != nullptr) rollout.filled = stream->finish(engine, rollout.samples);
  return rollout;
}

class ReferenceStreams : public testing::TestWithParam<bool> {};

TEST_P(ReferenceStreams, HaveTheBitsOfThePassAfterGeneration) {
  const std::unique_ptr<Model> policy = model_of(1), reference = model_of(2);
  const LogprobOptions options = SamplingOptions().logprob_options();
  ReferenceStream stream({reference_scorer(*reference, options, GetParam())}, nullptr, /*timeout_s=*/60, nullptr,
                         /*micro_batch_tokens=*/64);
  for (int round = 0; round < 2; ++round) {
    const Rollout rollout = generate(*policy, &stream);
    ASSERT_EQ(rollout.samples.size(), 42u);
    EXPECT_GT(rollout.filled, 0);
    EXPECT_LT(rollout.filled, 42) << "the last sample ends with generation";
    Members all;
    for (size_t i = 0; i < rollout.samples.size(); ++i) all.push_back(static_cast<int64_t>(i));
    const at::NoGradGuard no_grad;
    const at::Tensor expected = response_logprobs(*reference, make_micro_batch(rollout.samples, all), options);
    const float* value = expected.const_data_ptr<float>();
    int64_t filled = 0;
    for (const Sample& sample : rollout.samples) {
      if (!sample.reference_logprobs.empty()) {
        ++filled;
        ASSERT_EQ(sample.reference_logprobs.size(), sample.response.size());
        EXPECT_EQ(0, std::memcmp(sample.reference_logprobs.data(), value, sample.response.size() * sizeof(float)));
      }
      value += sample.response.size();
    }
    EXPECT_EQ(filled, rollout.filled);
    const Rollout alone = generate(*policy, nullptr);
    for (size_t i = 0; i < alone.samples.size(); ++i) EXPECT_EQ(alone.samples[i].response, rollout.samples[i].response);
  }
}
INSTANTIATE_TEST_SUITE_P(SharedPrompts, ReferenceStreams, testing::Bool());

// A value model, which its trainer may change between rollouts.
class WithCritic {
 public:
  explicit WithCritic(bool share_prompts) : config(settings(share_prompts)) {
    ModelOptions frozen;
    frozen.trainable = false;
    reward_model = std::make_unique<Model>(shape(), frozen);
    init_parameters(*reward_model, 5);
  }
  static ModelConfig shape() {
    return test::tiny_config({.vocab = kVocabulary, .layers = 2, .initializer_range = 0.3}).with_value_head();
  }
  static Config settings(bool share_prompts) {
    Config c = test::settings(/*dynamic=*/false);
    c.policy.sequence_packing.share_prompts = share_prompts;
    c.loss_fn.reference_policy_kl_penalty = 0;
    c.policy.optimizer.kwargs.lr = 1e-2;
    return c;
  }

  const Config config;
  ParallelContext context;
  Model critic{shape(), ModelOptions{}};
  DistributedAdamW optimizer{(init_parameters(critic, 4), critic), context.data_parallel(), AdamWOptions{}};
  CriticTrainer trainer{config, critic, optimizer, context};
  std::unique_ptr<Model> reward_model;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Values and scores of what is in `samples`, on this rank alone, each in the pass after generation.
void expect_those_afterwards(WithCritic& with, const std::vector<Sample>& samples) {
  std::vector<Sample> afterwards = samples;
  for (Sample& sample : afterwards) {
    sample.values.clear();
    sample.score.reset();
  }
  MicroBatchOptions size;
  size.rule = MicroBatchOptions::Rule::kPacked;
  size.tokens = 256;
  size.share_prompts = with.config.policy.sequence_packing.share_prompts;
  with.trainer.fill_values(afterwards);
  const std::vector<float> scores = reward_model_scores(afterwards, *with.reward_model, size, with.context, {});
  // Whoever computes the rest keeps what came beside generation.
  std::vector<Sample> completed = samples;
  with.trainer.fill_values(completed);
  EXPECT_TRUE(same_bits(reward_model_scores(completed, *with.reward_model, size, with.context, {}), scores));
  int64_t with_values = 0, with_scores = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    ASSERT_EQ(afterwards[i].values.size(), samples[i].response.size());
    EXPECT_TRUE(same_bits(completed[i].values, afterwards[i].values)) << "sample " << i;
    if (!samples[i].values.empty()) {
      ++with_values;
      EXPECT_TRUE(same_bits(samples[i].values, afterwards[i].values)) << "sample " << i;
    }
    if (samples[i].score) {
      ++with_scores;
      EXPECT_TRUE(same_bits({*samples[i].score}, {scores[i]})) << "sample " << i;
    }
  }
  EXPECT_GT(with_values, 0);
  EXPECT_GT(with_scores, 0);
}

TEST_P(ReferenceStreams, GiveValuesOfThePresentCriticAndScoresToo) {
  const std::unique_ptr<Model> policy = model_of(1), reference = model_of(2);
  WithCritic with(GetParam());
  ReferenceStream stream({reference_scorer(*reference, SamplingOptions().logprob_options(), GetParam()),
                          with.trainer.scorer(), reward_model_scorer(*with.reward_model, GetParam())},
                         nullptr, /*timeout_s=*/60, nullptr, /*micro_batch_tokens=*/64);
  std::vector<float> before;
  for (int round = 0; round < 2; ++round) {
    Rollout rollout = generate(*policy, &stream);
    ASSERT_EQ(rollout.samples.size(), 42u);
    int64_t filled = 0;
    for (const Sample& s : rollout.samples)
      filled += (s.reference_logprobs.empty() ? 0 : 1) + (s.values.empty() ? 0 : 1) + (s.score ? 1 : 0);
    EXPECT_EQ(filled, rollout.filled);
    expect_those_afterwards(with, rollout.samples);
    // The critic trains between two rollouts: the same samples get other values.
    with.trainer.fill_values(rollout.samples);
    EXPECT_FALSE(same_bits(rollout.samples.front().values, before)) << "round " << round;
    before = rollout.samples.front().values;
    for (Sample& s : rollout.samples) s.returns.assign(s.response.size(), 3);
    rollout.samples.resize(24);
    with.trainer.train(rollout.samples, 1);
  }
}

// Steps until the stream has said what its thread has met; false where it has said nothing.
bool comes_out(const Model& policy, ReferenceStream& stream, const std::function<void(const Error&)>& look) {
  Engine engine(policy, nullptr, {.cache_rows = 400, .max_sequences = 4}, SamplingOptions());
  GroupRequest group;
  group.prompt = {1};
  group.forced_lengths = {30};
  engine.submit(group);
  std::vector<Sample> none;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  bool thrown = false;
  while (!thrown && std::chrono::steady_clock::now() < deadline) {
    if (!engine.idle()) engine.step();
    if (!engine.idle()) stream.after_step(engine);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (!engine.idle()) continue;
    try {
      EXPECT_EQ(stream.finish(engine, none), 0);
      break;
    } catch (const Error& error) {
      thrown = true;
      look(error);
    }
  }
  EXPECT_EQ(stream.finish(engine, none), 0);  // and once only
  return thrown;
}

TEST(ReferenceStream, AnErrorOfItsThreadComesOutAtTheEnd) {
  const std::unique_ptr<Model> policy = model_of(1), reference = model_of(2);
  ReferenceStream stream({reference_scorer(*reference, SamplingOptions().logprob_options(), false)}, nullptr, 60,
                         nullptr);
  const SampleSpan span{0, 0, 1};
  GroupRequest request;
  request.prompt = {1, 2};
  GeneratedSample bad;
  bad.response = {3, kVocabulary + 5, 4};  // no such row of the embedding
  stream.add({span, 0, request, bad});
  EXPECT_TRUE(comes_out(*policy, stream,
                        [](const Error& error) { EXPECT_EQ(error.kind(), ErrorKind::kData) << error.what(); }));
}

TEST(ReferenceStream, AValueThatIsNotFiniteIsNamed) {
  const std::unique_ptr<Model> policy = model_of(1);
  WithCritic with(false);
  with.critic.find("score.weight")->tensor.detach()[0][0] = std::numeric_limits<float>::quiet_NaN();
  ReferenceStream stream({with.trainer.scorer()}, nullptr, 60, nullptr);
  GroupRequest request;
  request.prompt = {1, 2};
  GeneratedSample sample;
  sample.response = {3, 5, 4};
  stream.add({SampleSpan{7, 2, 1}, 2, request, sample});
  EXPECT_TRUE(comes_out(*policy, stream, [](const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kData);
    EXPECT_MENTIONS(error.what(), "value before token 0 of the response of sample 2 of group 7 is not finite");
  }));
}

}  // namespace
}  // namespace trireme
