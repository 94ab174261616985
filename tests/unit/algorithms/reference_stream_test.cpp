// Reference log-probs computed beside generation have the bits of the pass after it.
#include "trainer/algorithms/reference_stream.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "base/error.h"
#include "tests/unit/model/tiny.h"

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

// 3 prompts of 14 responses, of 1 to 40 tokens. Waits in mid-generation until the stream has got to one of them.
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
  ReferenceStream stream(reference.get(), options, GetParam(), nullptr, /*timeout_s=*/60, nullptr,
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

TEST(ReferenceStream, AnErrorOfItsThreadComesOutAtTheEnd) {
  const std::unique_ptr<Model> policy = model_of(1), reference = model_of(2);
  ReferenceStream stream(reference.get(), SamplingOptions().logprob_options(), false, nullptr, 60, nullptr);
  const SampleSpan span{0, 0, 1};
  GroupRequest request;
  request.prompt = {1, 2};
  GeneratedSample bad;
  bad.response = {3, kVocabulary + 5, 4};  // no such row of the embedding
  stream.add({span, 0, request, bad});
  Engine engine(*policy, nullptr, {.cache_rows = 400, .max_sequences = 4}, SamplingOptions());
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
      EXPECT_EQ(error.kind(), ErrorKind::kData) << error.what();
    }
  }
  EXPECT_TRUE(thrown);
  EXPECT_EQ(stream.finish(engine, none), 0);  // and once only
}

}  // namespace
}  // namespace trireme
