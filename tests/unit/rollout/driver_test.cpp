// The driver: every sample of a source through the engine, with its hooks in order; a refused span is named.
#include "trainer/rollout/driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/error.h"
#include "tests/unit/model/tiny.h"

namespace trireme {
namespace {

std::unique_ptr<Model> tiny_model() {
  return test::tiny_model({.family = ModelFamily::kLlama,
                           .vocab = 50,
                           .heads = 2,
                           .kv_heads = 1,
                           .head_dim = 16,
                           .positions = 64,
                           .tied = false},
                          2);
}

TEST(Driver, HandsOverEverySampleAndEverySpanOnce) {
  const std::unique_ptr<Model> model = tiny_model();
  Engine engine(*model, nullptr, {.cache_rows = 400, .max_sequences = 5}, {});
  LocalCounter counter;
  SampleQueue queue({.groups = 4, .samples = 3, .places = 5}, counter, "q");
  std::set<std::pair<int64_t, int64_t>> finished;
  std::set<int64_t> complete;
  int64_t steps = 0;
  DriverHooks hooks;
  hooks.request = [](const SampleSpan& span) {
    GroupRequest request;
    request.prompt = {1, static_cast<int32_t>(span.group)};
    request.first_sample_id = static_cast<uint64_t>(100 + span.group * 3 + span.first_sample);
    for (int64_t i = 0; i < span.count; ++i) request.forced_lengths.push_back(span.first_sample + i + 2);
    return request;
  };
  hooks.finished = [&](const FinishedSample& sample) {
    EXPECT_EQ(sample.request.prompt[1], sample.span.group);
    EXPECT_EQ(static_cast<int64_t>(sample.generated.response.size()), sample.index + 2);
    EXPECT_FALSE(complete.count(sample.span.group)) << "a span was complete before its last sample";
    EXPECT_TRUE(finished.emplace(sample.span.group, sample.index).second);
  };
  hooks.complete = [&](const SampleSpan& span, GeneratedGroup group) {
    EXPECT_EQ(group.group_id, span.group);
    EXPECT_EQ(static_cast<int64_t>(group.samples.size()), span.count);
    for (int64_t i = 0; i < span.count; ++i) EXPECT_TRUE(finished.count({span.group, span.first_sample + i}));
    EXPECT_TRUE(complete.insert(span.group).second);
  };
  hooks.between_steps = [&] { ++steps; };
  drive_rollout(engine, queue, hooks);
  EXPECT_EQ(finished.size(), 12u);
  EXPECT_EQ(complete.size(), 4u);
  EXPECT_EQ(steps, engine.stats().steps);
  EXPECT_FALSE(static_cast<bool>(engine.on_sample));
}

TEST(Driver, NamesTheRunThatTheEngineRefuses) {
  const std::unique_ptr<Model> model = tiny_model();
  Engine engine(*model, nullptr, {.cache_rows = 400, .max_sequences = 5}, {});
  LocalCounter counter;
  SampleQueue queue({.groups = 1, .samples = 1, .places = 5}, counter, "q");
  DriverHooks hooks;
  hooks.request = [](const SampleSpan&) {
    GroupRequest request;
    request.prompt.assign(64, 1);
    return request;
  };
  hooks.origin = [](const SampleSpan&) { return std::string("prompts.jsonl:7: "); };
  try {
    drive_rollout(engine, queue, hooks);
    FAIL() << "a prompt without room for a response was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
    EXPECT_EQ(std::string(error.what()).rfind("prompts.jsonl:7: ", 0), 0u) << error.what();
  }
  EXPECT_FALSE(static_cast<bool>(engine.on_sample));
}

// The scheduler is told the limit only: an answer of a forced length ends as by a stop token.
TEST(Driver, ForcedEndsThatTheSchedulerDoesNotKnowChangeNoBit) {
  const std::unique_ptr<Model> model = tiny_model();
  std::vector<std::vector<GeneratedGroup>> groups(2);
  for (const bool known : {false, true}) {
    Engine engine(*model, nullptr, {.cache_rows = 130, .max_sequences = 6, .headroom_rows = 2}, {});
    LocalCounter counter;
    SampleQueue queue({.groups = 5, .samples = 4, .places = 6}, counter, "q");
    DriverHooks hooks;
    hooks.request = [&](const SampleSpan& span) {
      GroupRequest request;
      request.prompt = {1, static_cast<int32_t>(span.group)};
      request.first_sample_id = static_cast<uint64_t>(span.group * 4 + span.first_sample);
      for (int64_t i = 0; i < span.count; ++i) request.forced_lengths.push_back(1 + 9 * (span.first_sample + i));
      request.ends_known = known;
      return request;
    };
    hooks.complete = [&](const SampleSpan&, GeneratedGroup group) { groups[known].push_back(std::move(group)); };
    drive_rollout(engine, queue, hooks);
    std::sort(groups[known].begin(), groups[known].end(),
              [](const GeneratedGroup& a, const GeneratedGroup& b) { return a.group_id < b.group_id; });
    EXPECT_EQ(engine.stats().sampled_tokens, 5 * (1 + 10 + 19 + 28));
  }
  for (size_t g = 0; g < 5; ++g) {
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(groups[0][g].samples[i].response, groups[1][g].samples[i].response);
      EXPECT_EQ(groups[0][g].samples[i].logprobs, groups[1][g].samples[i].logprobs);
      EXPECT_EQ(groups[0][g].samples[i].finish, FinishReason::kStop);
      EXPECT_EQ(groups[1][g].samples[i].finish, FinishReason::kLength);
    }
  }
}

}  // namespace
}  // namespace trireme
