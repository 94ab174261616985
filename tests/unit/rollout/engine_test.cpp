// The engine on tiny random models: samples are a pure function of (seed, sample id, weights), and their log-probs have
// the bits of the loss's own forward.
#include "trainer/rollout/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/errors.h"
#include "tests/unit/rollout/byte_model.h"

namespace trireme {
namespace {

using test::byte_model;

std::vector<GroupRequest> requests(int64_t groups, int64_t samples) {
  std::vector<GroupRequest> result;
  std::mt19937 random(7);
  for (int64_t g = 0; g < groups; ++g) {
    GroupRequest request;
    request.group_id = g;
    request.samples = samples;
    request.first_sample_id = static_cast<uint64_t>(1000 + g * samples);
    const int64_t length = 1 + static_cast<int64_t>(random() % 40);
    for (int64_t i = 0; i < length; ++i) request.prompt.push_back(static_cast<int32_t>(random() % 256));
    result.push_back(std::move(request));
  }
  return result;
}

SamplingOptions sampling_options() {
  SamplingOptions sampling;
  sampling.temperature = 0.8;
  sampling.max_new_tokens = 24;
  sampling.stop_ids = {3, 70, 130};
  sampling.seed = 42;
  return sampling;
}

std::map<int64_t, GeneratedGroup> by_id(std::vector<GeneratedGroup> groups) {
  std::map<int64_t, GeneratedGroup> result;
  for (GeneratedGroup& group : groups) {
    const int64_t id = group.group_id;
    EXPECT_TRUE(result.emplace(id, std::move(group)).second) << "group " << id << " came twice";
  }
  return result;
}

std::map<int64_t, GeneratedGroup> generate(Engine& engine, const std::vector<GroupRequest>& groups) {
  for (const GroupRequest& request : groups) engine.submit(request);
  return by_id(engine.run());
}

void expect_same_bits(const std::map<int64_t, GeneratedGroup>& a, const std::map<int64_t, GeneratedGroup>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [id, group] : a) {
    const GeneratedGroup& other = b.at(id);
    ASSERT_EQ(group.prompt, other.prompt);
    ASSERT_EQ(group.samples.size(), other.samples.size());
    for (size_t i = 0; i < group.samples.size(); ++i) {
      const GeneratedSample& s = group.samples[i];
      const GeneratedSample& t = other.samples[i];
      ASSERT_EQ(s.response, t.response) << "group " << id << " sample " << i;
      ASSERT_EQ(s.finish, t.finish);
      ASSERT_EQ(s.logprobs.size(), t.logprobs.size());
      ASSERT_EQ(0, std::memcmp(s.logprobs.data(), t.logprobs.data(), s.logprobs.size() * sizeof(float)))
          << "log-prob bits differ in group " << id << " sample " << i;
    }
  }
}

// The loss's way: all samples packed into one batch, one forward, one log-prob call. Compares from token `from` on.
void expect_log_probs_of_the_loss(const Model& model, const std::map<int64_t, GeneratedGroup>& groups,
                                  const LogprobOptions& options, size_t from = 0) {
  const at::NoGradGuard no_grad;
  std::vector<std::vector<int32_t>> sequences;
  std::vector<int64_t> rows, targets;
  std::vector<float> expected;
  int64_t offset = 0;
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) {  // another order than the engine's
    for (const GeneratedSample& sample : group->second.samples) {
      std::vector<int32_t> ids = group->second.prompt;
      for (size_t i = 0; i < sample.response.size(); ++i) {
        if (i >= from) {
          rows.push_back(offset + static_cast<int64_t>(ids.size()) - 1);
          targets.push_back(sample.response[i]);
          expected.push_back(sample.logprobs[i]);
        }
        ids.push_back(sample.response[i]);
      }
      offset += static_cast<int64_t>(ids.size());
      sequences.push_back(std::move(ids));
    }
  }
  ASSERT_FALSE(rows.empty());
  const at::Tensor hidden = model.forward(PackedBatch::from_sequences(sequences));
  const at::Tensor logprobs = token_logprobs(hidden.index_select(0, at::tensor(rows, at::kLong)), model.head_weight(),
                                             at::tensor(targets, at::kLong), options)
                                  .contiguous();
  ASSERT_EQ(0, std::memcmp(logprobs.data_ptr<float>(), expected.data(), expected.size() * sizeof(float)));
}

class EngineOf : public ::testing::TestWithParam<ModelFamily> {};
INSTANTIATE_TEST_SUITE_P(Families, EngineOf,
                         ::testing::Values(ModelFamily::kQwen3, ModelFamily::kQwen3Moe, ModelFamily::kMixtral),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(EngineOf, LogProbsHaveTheBitsOfTheLoss) {
  const auto model = byte_model(1, GetParam());
  Engine engine(*model, nullptr, {.max_sequences = 24}, sampling_options());
  const auto groups = generate(engine, requests(12, 4));
  expect_log_probs_of_the_loss(*model, groups, engine.sampling().logprob_options());
  // And they do depend on the weights.
  const auto other = byte_model(2, GetParam());
  Engine second(*other, nullptr, {.max_sequences = 24}, sampling_options());
  EXPECT_NE(generate(second, requests(12, 4)).at(0).samples[0].response, groups.at(0).samples[0].response);
}

TEST(Engine, FilteredLogProbsHaveTheBitsOfTheLoss) {
  const auto model = byte_model();
  for (const int variant : {0, 1, 2}) {
    SamplingOptions sampling = sampling_options();
    if (variant == 0) sampling.top_k = 5;
    if (variant == 1) sampling.top_p = 0.7;
    if (variant == 2) sampling.min_p = 0.1;
    Engine engine(*model, nullptr, {}, sampling);
    expect_log_probs_of_the_loss(*model, generate(engine, requests(4, 3)), engine.sampling().logprob_options());
  }
}

// Each variant changes how the work is cut into steps; the reference is one sample at a time.
TEST_P(EngineOf, SamplesDoNotDependOnHowTheyAreBatched) {
  const auto model = byte_model(1, GetParam());
  const std::vector<GroupRequest> groups = requests(10, 4);
  std::map<int64_t, GeneratedGroup> reference;
  for (const GroupRequest& request : groups) {
    GeneratedGroup group{request.group_id, request.first_sample_id, request.prompt, {}};
    for (int64_t i = 0; i < request.samples; ++i) {
      GroupRequest single = request;
      single.samples = 1;
      single.first_sample_id += static_cast<uint64_t>(i);
      Engine engine(*model, nullptr, {.max_sequences = 1}, sampling_options());
      engine.submit(single);
      group.samples.push_back(engine.run().at(0).samples.at(0));
    }
    reference.emplace(request.group_id, std::move(group));
  }
  const auto expect_equal = [&](const EngineOptions& options, const std::vector<GroupRequest>& order) {
    Engine engine(*model, nullptr, options, sampling_options());
    expect_same_bits(reference, generate(engine, order));
    return engine.stats();
  };
  {
    SCOPED_TRACE("one big batch");
    const EngineStats stats = expect_equal({.max_sequences = 64}, groups);
    EXPECT_EQ(stats.preemptions, 0);
    int64_t prompt_tokens = 0;
    for (const GroupRequest& request : groups) prompt_tokens += static_cast<int64_t>(request.prompt.size());
    EXPECT_EQ(stats.prefill_tokens, prompt_tokens);  // once a group
  }
  {
    SCOPED_TRACE("chunks of 3 tokens, few places");
    expect_equal({.max_sequences = 7, .prefill_chunk_tokens = 3}, groups);
  }
  {
    SCOPED_TRACE("reversed");
    expect_equal({.max_sequences = 9}, {groups.rbegin(), groups.rend()});
  }
  {
    SCOPED_TRACE("preempted");
    EngineOptions options{.cache_rows = 130, .max_sequences = 32, .prefill_chunk_tokens = 16, .headroom_rows = 1};
    const EngineStats stats = expect_equal(options, groups);
    EXPECT_GT(stats.preemptions, 0);
    EXPECT_GT(stats.copied_rows, 0);
    EXPECT_LE(stats.peak_cache_rows, 130);
  }
  {
    SCOPED_TRACE("late stops");
    const EngineStats stats = expect_equal({.max_sequences = 16, .late_stops = true}, groups);
    EXPECT_GT(stats.surplus_tokens, 0);
  }
  {
    SCOPED_TRACE("late stops, preempted");
    const EngineStats stats = expect_equal(
        {.cache_rows = 130, .max_sequences = 32, .prefill_chunk_tokens = 16, .headroom_rows = 1, .late_stops = true},
        groups);
    EXPECT_GT(stats.preemptions, 0);
  }
}

TEST(Engine, GroupsComeWhenCompleteAndTheEngineGoesOn) {
  const auto model = byte_model();
  SamplingOptions sampling = sampling_options();
  sampling.stop_ids.clear();
  Engine engine(*model, nullptr, {}, sampling);
  std::vector<GroupRequest> groups = requests(2, 3);
  groups[0].forced_lengths = {2, 9, 4};
  groups[1].forced_lengths = {1, 3, 2};
  for (const GroupRequest& request : groups) engine.submit(request);
  EXPECT_EQ(engine.unfinished_samples(), 6);
  std::map<int64_t, int> step_of;
  for (int step = 1; !engine.idle(); ++step) {
    for (const GeneratedGroup& group : engine.step()) step_of[group.group_id] = step;
    if (step == 5) engine.submit(requests(3, 1)[2]);  // arrives on the way
  }
  EXPECT_EQ(step_of.at(1), 3);
  EXPECT_EQ(step_of.at(0), 9);
  EXPECT_EQ(step_of.size(), 3u);
  EXPECT_TRUE(engine.step().empty());
  EXPECT_EQ(engine.unfinished_samples(), 0);
}

TEST(Engine, ForcedLengthsAndLimits) {
  const auto model = byte_model();
  SamplingOptions sampling = sampling_options();
  for (int32_t id = 0; id < 259; ++id) sampling.stop_ids.push_back(id);  // every token would stop
  Engine engine(*model, nullptr, {.max_total_length = 60}, sampling);
  std::vector<GroupRequest> groups = requests(3, 2);
  groups[0].prompt.resize(20, 5);
  groups[0].forced_lengths = {13, 40};
  groups[1].prompt.resize(59, 5);
  groups[2].max_new_tokens = 1;
  const auto result = generate(engine, groups);
  EXPECT_EQ(result.at(0).samples[0].response.size(), 13u);
  EXPECT_EQ(result.at(0).samples[1].response.size(), 40u);
  EXPECT_EQ(result.at(0).samples[0].finish, FinishReason::kLength);
  EXPECT_EQ(result.at(1).samples[0].response.size(), 1u);
  EXPECT_EQ(result.at(2).samples[0].finish, FinishReason::kStop);

  sampling.stop_ids.clear();
  Engine unstopped(*model, nullptr, {.max_total_length = 60}, sampling);
  groups = requests(2, 1);
  groups[0].prompt.resize(50, 5);
  groups[1].max_new_tokens = 7;
  const auto limited = generate(unstopped, groups);
  EXPECT_EQ(limited.at(0).samples[0].response.size(), 10u);  // max_total_length
  EXPECT_EQ(limited.at(1).samples[0].response.size(), 7u);
  EXPECT_EQ(limited.at(1).samples[0].finish, FinishReason::kLength);
}

TEST(Engine, StopIdsEndASampleAndAreKept) {
  const auto model = byte_model();
  SamplingOptions sampling = sampling_options();
  sampling.stop_ids.clear();
  Engine free(*model, nullptr, {}, sampling);
  const auto whole = generate(free, requests(6, 4));
  sampling.stop_ids = {17, 200};
  int stopped = 0;
  for (const bool late : {false, true}) {
    Engine engine(*model, nullptr, {.late_stops = late}, sampling);
    for (const auto& [id, group] : generate(engine, requests(6, 4))) {
      for (size_t i = 0; i < group.samples.size(); ++i) {
        const std::vector<int32_t>& all = whole.at(id).samples[i].response;
        const auto stop =
            std::find_first_of(all.begin(), all.end(), sampling.stop_ids.begin(), sampling.stop_ids.end());
        const std::vector<int32_t> expected(all.begin(), stop == all.end() ? stop : stop + 1);
        EXPECT_EQ(group.samples[i].response, expected);
        EXPECT_EQ(group.samples[i].logprobs.size(), expected.size());
        EXPECT_EQ(group.samples[i].finish, stop == all.end() ? FinishReason::kLength : FinishReason::kStop);
        stopped += stop == all.end() ? 0 : 1;
      }
    }
  }
  EXPECT_GT(stopped, 0);
}

TEST(Engine, StopStringsAreFoundAcrossTokens) {
  const TemporaryDirectory dir;
  make_byte_tokenizer(dir.path());
  const auto tokenizer = Tokenizer::load(dir.path());
  const auto model = byte_model();
  SamplingOptions sampling = sampling_options();
  sampling.stop_ids.clear();
  sampling.max_new_tokens = 60;
  Engine free(*model, tokenizer.get(), {}, sampling);
  const auto whole = generate(free, requests(4, 2));
  int tried = 0;
  for (const auto& [id, group] : whole) {
    for (size_t i = 0; i < group.samples.size(); ++i) {
      // Two neighbouring letters, each a token of its own, become the stop string; not the first, which start the text.
      const std::vector<int32_t>& all = group.samples[i].response;
      const auto letter = [](int32_t token) { return token > 32 && token < 127; };
      size_t at = 4;
      while (at + 1 < all.size() && !(letter(all[at]) && letter(all[at + 1]))) ++at;
      if (at + 1 >= all.size()) continue;
      const std::string stop = {static_cast<char>(all[at]), static_cast<char>(all[at + 1])};
      size_t end = 1;  // where it occurs for the first time
      while (!(all[end - 1] == all[at] && all[end] == all[at + 1])) ++end;
      for (const bool late : {false, true}) {
        SamplingOptions with_stop = sampling;
        with_stop.stop_strings = {"a string that does not occur", stop};
        Engine engine(*model, tokenizer.get(), {.late_stops = late}, with_stop);
        const auto result = generate(engine, requests(4, 2));
        const GeneratedSample& sample = result.at(id).samples[i];
        EXPECT_EQ(sample.response,
                  std::vector<int32_t>(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(end) + 1));
        EXPECT_EQ(sample.finish, FinishReason::kStop);
      }
      ++tried;
    }
  }
  EXPECT_GT(tried, 0);
}

TEST(Engine, AStopStringMayBeASpecialToken) {
  const TemporaryDirectory dir;
  make_byte_tokenizer(dir.path());
  const auto tokenizer = Tokenizer::load(dir.path());
  const auto model = byte_model();
  SamplingOptions sampling = sampling_options();
  sampling.max_new_tokens = 60;
  sampling.stop_ids = {kByteImEnd};
  Engine by_id_engine(*model, tokenizer.get(), {}, sampling);
  const auto expected = generate(by_id_engine, requests(8, 4));
  sampling.stop_ids.clear();
  sampling.stop_strings = {"<|im_end|>"};
  Engine by_text_engine(*model, tokenizer.get(), {}, sampling);
  expect_same_bits(expected, generate(by_text_engine, requests(8, 4)));
  int64_t stopped = 0;
  for (const auto& [id, group] : expected) {
    for (const GeneratedSample& sample : group.samples) stopped += sample.finish == FinishReason::kStop ? 1 : 0;
  }
  EXPECT_GT(stopped, 0);
}

TEST(Engine, GreedyTakesTheLargestLogit) {
  const auto model = byte_model();
  SamplingOptions sampling;
  sampling.temperature = 0.0;
  sampling.max_new_tokens = 12;
  Engine engine(*model, nullptr, {}, sampling);
  const auto groups = generate(engine, requests(3, 2));
  const at::NoGradGuard no_grad;
  for (const auto& [id, group] : groups) {
    EXPECT_EQ(group.samples[0].response, group.samples[1].response);
    std::vector<int32_t> ids = group.prompt;
    for (const int32_t token : group.samples[0].response) {
      const at::Tensor hidden = model->forward(PackedBatch::from_sequences({ids}));
      const at::Tensor logits = head_logits(hidden.slice(0, hidden.size(0) - 1), model->head_weight());
      EXPECT_EQ(token, logits.argmax(1).item<int64_t>());
      ids.push_back(token);
    }
  }
  expect_log_probs_of_the_loss(*model, groups, sampling.logprob_options());

  // One engine serves both: greedy requests among sampled ones.
  Engine mixed(*model, nullptr, {}, sampling_options());
  std::vector<GroupRequest> both = requests(3, 2);
  both[1].sampling = sampling;
  const auto result = generate(mixed, both);
  EXPECT_EQ(result.at(1).samples[0].response, groups.at(1).samples[0].response);
  EXPECT_NE(result.at(0).samples[0].response, result.at(0).samples[1].response);
}

TEST(Engine, NewWeightsAreUsedFromTheNextTokenOn) {
  for (const bool late : {false, true}) {
    const auto model = byte_model(1);
    SamplingOptions sampling = sampling_options();
    sampling.stop_ids.clear();
    Engine engine(*model, nullptr, {.late_stops = late}, sampling);
    for (const GroupRequest& request : requests(3, 2)) engine.submit(request);
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(engine.step().empty());
    init_parameters(*model, 9);
    engine.weights_changed(3);
    EXPECT_EQ(engine.weights_version(), 3);
    const auto groups = by_id(engine.run());
    expect_log_probs_of_the_loss(*model, groups, engine.sampling().logprob_options(), /*from=*/5);
    // A token is of the weights that its step was begun with, whenever it was looked at.
    for (const auto& [id, group] : groups) {
      for (const GeneratedSample& sample : group.samples)
        EXPECT_EQ(sample.versions, (VersionSpans{{0, 0, 5}, {3, 5, 24}}));
    }
    const auto later = generate(engine, requests(1, 1));
    EXPECT_EQ(later.at(0).samples[0].versions, (VersionSpans{{3, 0, 24}}));
    EXPECT_THROW(engine.weights_changed(2), Error);
  }
}

// Set aside at any step, with the cache's memory given away and others' samples generated meanwhile.
TEST(Engine, SuspendedSamplesGoOnAsIfNothingHadHappened) {
  const auto model = byte_model();
  const std::vector<GroupRequest> groups = requests(6, 4);
  Engine whole(*model, nullptr, {}, sampling_options());
  const auto expected = generate(whole, groups);
  for (const bool late : {false, true}) {
    for (const int64_t rows : {int64_t{130}, int64_t{2000}}) {
      for (const int every : {1, 3, 7}) {
        SCOPED_TRACE(std::to_string(late) + " " + std::to_string(rows) + " " + std::to_string(every));
        const EngineOptions options{.cache_rows = rows,
                                    .max_sequences = 12,
                                    // Between two suspensions some sample is computed again, and decoded.
                                    .prefill_chunk_tokens = every == 1 ? 1024 : 64,
                                    .headroom_rows = 1,
                                    .late_stops = late};
        Engine engine(*model, nullptr, options, sampling_options());
        for (const GroupRequest& request : groups) engine.submit(request);
        std::vector<GeneratedGroup> complete;
        const auto keep = [&](std::vector<GeneratedGroup> more) {
          for (GeneratedGroup& group : more) complete.push_back(std::move(group));
        };
        int64_t suspensions = 0;
        for (int step = 1; !engine.idle(); ++step) {
          keep(engine.step());
          if (step % every != 0) continue;
          const int64_t unfinished = engine.unfinished_samples();
          keep(engine.suspend());
          ++suspensions;
          EXPECT_TRUE(engine.idle());
          EXPECT_LE(engine.suspended_samples(), unfinished);
          engine.release_cache();
          EXPECT_EQ(engine.stats().cache_rows, 0);
          if (suspensions % 4 == 1) {  // the same numbers of samples: nothing is mixed up
            std::vector<GroupRequest> others = {groups[1]};
            others[0].group_id = 99;
            EXPECT_EQ(generate(engine, others).at(99).samples[0].response, expected.at(1).samples[0].response);
          }
          engine.resume();
          EXPECT_EQ(engine.suspended_samples(), 0);
        }
        EXPECT_GT(suspensions, 2);
        EXPECT_GT(engine.stats().recomputed_rows, 0);
        expect_same_bits(expected, by_id(std::move(complete)));
      }
    }
  }
}

// Samples of two weights: each token has the log-prob that a packed forward under its weights gives, by memcmp. With
// kept keys some have not, and those samples say so.
TEST(Engine, EveryTokenHasTheLogProbOfItsWeightsUnlessKeysAreKept) {
  SamplingOptions sampling = sampling_options();
  sampling.stop_ids.clear();
  const auto run = [&](bool suspend, KeptCache kept, bool late) {
    const auto model = byte_model(1);
    Engine engine(*model, nullptr, {.max_sequences = 10, .late_stops = late}, sampling);
    for (const GroupRequest& request : requests(4, 4)) engine.submit(request);
    std::vector<GeneratedGroup> complete;
    const auto keep = [&](std::vector<GeneratedGroup> more) {
      for (GeneratedGroup& group : more) complete.push_back(std::move(group));
    };
    for (int64_t version = 1; !engine.idle(); ++version) {
      for (int i = 0; i < 9 && !engine.idle(); ++i) keep(engine.step());
      if (suspend) keep(engine.suspend());
      init_parameters(*model, 1 + static_cast<uint64_t>(version));
      engine.weights_changed(version, kept);
      if (suspend) engine.resume();
    }
    return by_id(std::move(complete));
  };
  const at::NoGradGuard no_grad;
  const auto differing = [&](const std::map<int64_t, GeneratedGroup>& groups, bool marked_too) {
    int64_t tokens = 0;
    for (const auto& [id, group] : groups) {
      for (const GeneratedSample& sample : group.samples) {
        EXPECT_TRUE(spans_tile(sample.versions, static_cast<int64_t>(sample.response.size())));
        if (sample.mixed_context && !marked_too) continue;
        std::vector<int32_t> ids = group.prompt;
        ids.insert(ids.end(), sample.response.begin(), sample.response.end());
        for (const VersionSpan& span : sample.versions) {
          const auto of_version = byte_model(1 + static_cast<uint64_t>(span.version));
          const at::Tensor hidden = of_version->forward(PackedBatch::from_sequences({ids}));
          const auto first = static_cast<int64_t>(group.prompt.size()) - 1;
          const at::Tensor logprobs =
              token_logprobs(hidden.slice(0, first + span.from, first + span.to), of_version->head_weight(),
                             at::tensor(std::vector<int64_t>(sample.response.begin() + span.from,
                                                             sample.response.begin() + span.to),
                                        at::kLong),
                             sampling_options().logprob_options())
                  .contiguous();
          for (int64_t t = span.from; t < span.to; ++t) {
            tokens += std::memcmp(logprobs.data_ptr<float>() + t - span.from, &sample.logprobs[static_cast<size_t>(t)],
                                  sizeof(float)) != 0
                          ? 1
                          : 0;
          }
        }
      }
    }
    return tokens;
  };
  int64_t spanning = 0, marked = 0;
  for (const bool late : {false, true}) {
    for (const bool suspend : {false, true}) {
      const auto exact = run(suspend, KeptCache::kNothing, late);
      EXPECT_EQ(differing(exact, true), 0) << "late " << late << ", suspended " << suspend;
      for (const auto& [id, group] : exact) {
        for (const GeneratedSample& sample : group.samples) {
          EXPECT_FALSE(sample.mixed_context);
          spanning += sample.versions.size() > 1 ? 1 : 0;
        }
      }
    }
    const auto kept = run(false, KeptCache::kKept, late);
    EXPECT_EQ(differing(kept, false), 0) << "of those that are not marked";
    EXPECT_GT(differing(kept, true), 0) << "this test would not notice keys of other weights";
    for (const auto& [id, group] : kept) {
      for (const GeneratedSample& sample : group.samples) {
        marked += sample.mixed_context ? 1 : 0;
        EXPECT_TRUE(sample.mixed_context || sample.versions.size() == 1);
      }
    }
  }
  EXPECT_GT(spanning, 0);
  EXPECT_GT(marked, 0);
}

TEST(Engine, TheCacheCanBeGivenBack) {
  const auto model = byte_model();
  Engine engine(*model, nullptr, {.cache_rows = 500}, sampling_options());
  EXPECT_EQ(engine.stats().cache_rows, 0);
  const auto first = generate(engine, requests(3, 2));
  EXPECT_EQ(engine.stats().cache_rows, 500);
  EXPECT_GT(engine.stats().peak_cache_rows, 0);
  EXPECT_GT(engine.stats().occupancy(engine.options().max_sequences), 0.0);
  engine.release_cache();
  EXPECT_EQ(engine.stats().cache_rows, 0);
  engine.reset_stats();
  expect_same_bits(first, generate(engine, requests(3, 2)));
  int64_t tokens = 0;
  for (const auto& [id, group] : first) {
    for (const GeneratedSample& sample : group.samples) tokens += static_cast<int64_t>(sample.response.size());
  }
  EXPECT_EQ(engine.stats().sampled_tokens, tokens);
}

template <typename Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUser) << e.what();
    return e.what();
  }
  return "no error";
}

// Of a mixture a row whose router fails is told by its sample: in prefill, in whatever pieces, and in decode.
TEST(Engine, ARowWhoseRouterFailsIsNamedBySampleAndToken) {
  const auto model = test::tiny_model({.family = ModelFamily::kQwen3Moe, .layers = 2, .tied = false});
  const at::Tensor& embedding = model->find("model.embed_tokens.weight")->tensor;
  const auto error = [&](const EngineOptions& options, std::vector<std::vector<int32_t>> prompts) {
    Engine engine(*model, nullptr, options, {.max_new_tokens = 12, .seed = 5});
    return test::error_of([&] {
      for (size_t g = 0; g < prompts.size(); ++g)
        engine.submit({.group_id = static_cast<int64_t>(g) + 3, .prompt = prompts[g], .samples = 2});
      (void)engine.run();
    });
  };
  const at::Tensor kept = embedding.clone();
  embedding[60].fill_(std::nanf(""));
  const std::string what = "layer 0: the router's logits are not finite at token ";
  for (const int64_t chunk : {2, 100}) {
    EXPECT_EQ(error({.cache_rows = 500, .prefill_chunk_tokens = chunk}, {{1, 2, 3}, {60, 2, 3}}),
              what + "0 of the prompt of response 0 to prompt 4");
  }
  // Whatever is drawn, but the prompts' own token, has none.
  embedding.fill_(std::nanf(""));
  embedding[1].copy_(kept[1]);
  for (const bool late : {false, true}) {
    const std::string message = error({.cache_rows = 500, .late_stops = late}, {{1, 1}, {1}});
    EXPECT_MENTIONS(message, what);
    EXPECT_MENTIONS(message, " of response ");
    EXPECT_EQ(message.find("the prompt"), std::string::npos) << message;
  }
}

TEST(Engine, LogitsThatAreNotFiniteNameTheSample) {
  const auto model = test::tiny_model({.tied = false});
  model->find("model.embed_tokens.weight")->tensor[60].fill_(std::nanf(""));
  for (const bool late : {false, true}) {
    Engine engine(*model, nullptr, {.cache_rows = 500, .late_stops = late}, {.max_new_tokens = 3, .seed = 5});
    engine.submit({.group_id = 3, .prompt = {1, 2, 3}, .samples = 2});
    engine.submit({.group_id = 4, .prompt = {60, 2}});
    EXPECT_EQ(test::error_of([&] { (void)engine.run(); }),
              "the model's logits are not finite for token 0 of response 0 to prompt 4");
  }
}

TEST(Engine, ImpossibleRequestsNameTheGroupAndLeaveTheEngineAlone) {
  const auto model = byte_model();
  Engine engine(*model, nullptr, {.cache_rows = 60, .max_total_length = 100}, sampling_options());
  const auto submit = [&engine](auto change) {
    GroupRequest request = requests(1, 2)[0];
    request.group_id = 31;
    change(request);
    return message_of([&] { engine.submit(request); });
  };
  EXPECT_NE(submit([](GroupRequest& r) { r.prompt.clear(); }).find("group 31: the prompt has no tokens"),
            std::string::npos);
  EXPECT_NE(submit([](GroupRequest& r) { r.prompt.assign(100, 1); }).find("no room for an answer within 100"),
            std::string::npos);
  EXPECT_NE(submit([](GroupRequest& r) { r.prompt.assign(50, 1); }).find("needs 73 cache rows"), std::string::npos);
  EXPECT_NE(submit([](GroupRequest& r) { r.forced_lengths = {1}; }).find("1 forced lengths for 2 samples"),
            std::string::npos);
  EXPECT_NE(submit([](GroupRequest& r) { r.samples = 0; }).find("samples must be at least 1"), std::string::npos);
  EXPECT_NE(submit([](GroupRequest& r) {
              r.sampling = SamplingOptions();
              r.sampling->top_p = 0.0;
            }).find("top_p must be in (0, 1]"),
            std::string::npos);
  EXPECT_TRUE(engine.idle());
  EXPECT_EQ(generate(engine, requests(1, 2)).size(), 1u);

  SamplingOptions sampling;
  sampling.temperature = -1.0;
  EXPECT_NE(message_of([&] { Engine(*model, nullptr, {}, sampling); }).find("temperature"), std::string::npos);
  sampling.temperature = 1.0;
  sampling.stop_strings = {"x"};
  EXPECT_NE(message_of([&] { Engine(*model, nullptr, {}, sampling); }).find("need a tokenizer"), std::string::npos);
  EXPECT_NE(message_of([&] { Engine(*model, nullptr, {.max_sequences = 0}, {}); }).find("max_sequences"),
            std::string::npos);
}

}  // namespace
}  // namespace trireme
