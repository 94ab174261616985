// Answers that are set aside, and new weights in their middle: no bit changes that should not.
#include <algorithm>
#include <set>

#include "tests/gpu/engine/models.h"
#include "trainer/rollout/step_runner.h"

namespace trireme::gpu {
namespace {

// Set aside with answers under way, the cache's memory given away and others' answers generated meanwhile; with room
// for all of them and with so little that some are preempted.
TEST_P(Batching, SuspendedAnswersGoOnAsIfNothingHadHappened) {
  const auto model = gpu_model(config_of(GetParam()));
  const auto wanted = requests(kPrompts, 8);
  const Groups whole = generate(*model, {}, sampling_options(), wanted);
  for (const int64_t rows : {2'000, 200'000}) {
    for (const int64_t every : {3, 17}) {
      const std::string what = std::to_string(rows) + " rows, every " + std::to_string(every) + " steps";
      Engine engine(*model, nullptr, {.cache_rows = rows, .max_sequences = 32, .max_total_length = 2048},
                    sampling_options());
      for (const GroupRequest& request : wanted) engine.submit(request);
      Answers answers;
      int64_t suspensions = 0;
      while (!engine.idle()) {
        answers.steps(engine, every);
        const int64_t unfinished = engine.unfinished_samples();
        answers.keep(engine.suspend());
        ++suspensions;
        EXPECT_TRUE(engine.idle());
        EXPECT_LE(engine.suspended_samples(), unfinished);
        engine.release_cache();
        EXPECT_EQ(engine.stats().cache_rows, 0);
        if (suspensions % 4 == 1) {  // the same numbers of samples: nothing is mixed up
          GroupRequest other = wanted[1];
          other.group_id = 99;
          engine.submit(other);
          Answers others;
          others.keep(engine.run());
          Groups expected;
          expected.emplace(99, whole.at(1));
          expect_same(expected, others.groups, what + ", others");
        }
        engine.resume();
        EXPECT_EQ(engine.suspended_samples(), 0);
      }
      EXPECT_GT(suspensions, 2) << what;
      EXPECT_GT(engine.stats().recomputed_rows, 0) << what;
      expect_same(whole, answers.groups, what);
    }
  }
}

// Weights of version v are those of seed 1 + v; what a model has is drawn anew. Tokens whose log-prob is not, by
// memcmp, that of a packed forward under the weights of their version.
int64_t differing_from_their_weights(const Model& model, const Groups& groups, bool marked_too) {
  const at::NoGradGuard no_grad;
  std::set<int64_t> versions;
  for (const auto& [id, group] : groups) {
    for (const GeneratedSample& sample : group.samples) {
      EXPECT_TRUE(spans_tile(sample.versions, static_cast<int64_t>(sample.response.size())));
      for (const VersionSpan& span : sample.versions) versions.insert(span.version);
    }
  }
  int64_t tokens = 0;
  for (const int64_t version : versions) {
    draw_weights(model, 1 + static_cast<uint64_t>(version));
    const Packed packed = pack(groups, [&](const GeneratedSample& sample, int64_t token) {
      if (sample.mixed_context && !marked_too) return false;
      return std::any_of(sample.versions.begin(), sample.versions.end(), [&](const VersionSpan& span) {
        return span.version == version && span.from <= token && token < span.to;
      });
    });
    if (packed.rows.empty()) continue;
    tokens += differing(logprobs_of_the_loss(model, packed, sampling_options().logprob_options()), packed.expected);
  }
  return tokens;
}

// Weights are written while the device still has the step before; a token is of those that its step was begun with.
TEST_P(Batching, NewWeightsAreUsedFromTheNextTokenOn) {
  const auto model = gpu_model(config_of(GetParam()));
  auto wanted = requests({5, 64, 33}, 4);
  for (GroupRequest& request : wanted) request.forced_lengths.assign(4, 24);
  Engine engine(*model, nullptr, {.cache_rows = 20'000, .max_total_length = 2048}, sampling_options());
  for (const GroupRequest& request : wanted) engine.submit(request);
  Answers answers;
  answers.steps(engine, 5);
  EXPECT_TRUE(answers.groups.empty());
  draw_weights(*model, 1 + 3);
  engine.weights_changed(3);
  answers.keep(engine.run());
  ASSERT_EQ(answers.groups.size(), wanted.size());
  for (const auto& [id, group] : answers.groups) {
    for (const GeneratedSample& sample : group.samples) {
      EXPECT_EQ(sample.versions, (VersionSpans{{0, 0, 5}, {3, 5, 24}})) << "group " << id;
      EXPECT_FALSE(sample.mixed_context);
    }
  }
  EXPECT_EQ(differing_from_their_weights(*model, answers.groups, true), 0);
}

// Answers of several weights, by steps and by graphs: each token has the log-prob that a packed forward under its
// weights gives. With kept keys some have not, and those samples say so.
TEST_P(Batching, EveryTokenHasTheLogProbOfItsWeightsUnlessKeysAreKept) {
  const auto run = [&](const Model& model, bool suspend, KeptCache kept) {
    draw_weights(model, 1);
    // Fewer places than samples: some begin under later weights.
    Engine engine(model, nullptr, {.cache_rows = 20'000, .max_sequences = 40, .max_total_length = 2048},
                  sampling_options());
    for (const GroupRequest& request : requests(kPrompts, 8)) engine.submit(request);
    Answers answers;
    for (int64_t version = 1; !engine.idle(); ++version) {
      answers.steps(engine, 9);
      if (suspend) {
        answers.keep(engine.suspend());
        engine.release_cache();
      }
      draw_weights(model, 1 + static_cast<uint64_t>(version));
      engine.weights_changed(version, kept);
      if (suspend) engine.resume();
    }
    EXPECT_EQ(answers.groups.size(), kPrompts.size());
    return answers.groups;
  };
  const auto model = gpu_model(config_of(GetParam()));
  for (const bool suspend : {false, true}) {
    const Groups exact = run(*model, suspend, KeptCache::kNothing);
    int64_t spanning = 0;
    for (const auto& [id, group] : exact) {
      for (const GeneratedSample& sample : group.samples) {
        EXPECT_FALSE(sample.mixed_context);
        spanning += sample.versions.size() > 1 ? 1 : 0;
      }
    }
    EXPECT_GT(spanning, 8);
    EXPECT_EQ(differing_from_their_weights(*model, exact, true), 0) << (suspend ? "suspended" : "between two steps");
  }
  const Groups kept = run(*model, /*suspend=*/false, KeptCache::kKept);
  int64_t marked = 0;
  for (const auto& [id, group] : kept) {
    for (const GeneratedSample& sample : group.samples) {
      marked += sample.mixed_context ? 1 : 0;
      EXPECT_TRUE(sample.mixed_context || sample.versions.size() == 1);
    }
  }
  EXPECT_GT(marked, 0);
  EXPECT_EQ(differing_from_their_weights(*model, kept, false), 0) << "of those that are not marked";
  EXPECT_GT(differing_from_their_weights(*model, kept, true), 0) << "this test would not notice keys of other weights";
}

// Training has the cache's memory while answers are set aside; their graphs hold afterwards.
TEST(Engine, TheCacheIsLentWhileAnswersAreSetAside) {
  const auto model = gpu_model(config_of(ModelFamily::kLlama));
  const auto wanted = requests(kPrompts, 8);
  const Groups whole = generate(*model, {}, sampling_options(), wanted);
  Engine engine(*model, nullptr, {.cache_rows = 600'000, .max_total_length = 2048}, sampling_options());
  const auto free = [&] { return device_available_bytes(model->options().device); };
  const int64_t bytes = 600'000 * KvArena::bytes_per_row(model->config(), at::kBFloat16);
  for (const GroupRequest& request : wanted) engine.submit(request);
  Answers answers;
  for (int round = 0; round < 3; ++round) {
    answers.steps(engine, 8);
    answers.keep(engine.suspend());
    ASSERT_GT(engine.suspended_samples(), 0);
    const int64_t before = free();
    engine.release_cache();
    EXPECT_EQ(engine.stats().cache_rows, 0);
    EXPECT_GT(free(), before + bytes / 10 * 9);
    {
      const at::Tensor other =
          at::full({free() / 10 * 8}, 0x7f, at::TensorOptions().dtype(at::kByte).device(model->options().device));
      EXPECT_EQ(other[-1].item<uint8_t>(), 0x7f);
    }
    engine.resume();
    EXPECT_EQ(engine.stats().cache_rows, 600'000);
  }
  answers.keep(engine.run());
  expect_same(whole, answers.groups, "set aside three times");
}

}  // namespace
}  // namespace trireme::gpu
