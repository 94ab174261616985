// One rollout on one and on several ranks: the same samples bit for bit, shared evenly, whole where they must be.
#include "trainer/algorithms/rollouts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/algorithms/samples.h"
#include "tests/unit/model/tiny.h"
#include "tests/unit/parallel/ranks.h"
#include "topology/split.h"

namespace trireme {
namespace {

using test::expect_same;

constexpr int64_t kVocabulary = 90;

struct Case {
  int64_t groups = 6, samples = 8, places = 64;
  bool whole_groups = false;
  int rollouts = 1;       // one after another, as under dynamic sampling
  bool together = false;  // nobody takes a second step before all have taken their first
  Layout model = {};      // that each replica's model is split over
};

struct Seen {
  std::vector<std::vector<Sample>> rollouts;
  RankShares shares;
  std::vector<int64_t> whole;  // groups handed over whole on this rank, in the last rollout
};

Seen collect(ParallelContext& context, const Case& setup, std::barrier<>* all_began = nullptr) {
  const ModelConfig config = test::tiny_config({.vocab = kVocabulary, .layers = 2, .initializer_range = 0.3});
  ModelOptions options;
  options.trainable = false;
  if (context.holders().size() > 1) {
    options.split = model_split(config.shape(), context.layout(), context.rank());
    options.tensor = &context.tensor_parallel();
    options.links = context.stage_links();
  }
  const auto model = std::make_unique<Model>(config, options);
  init_parameters(*model, 1);
  SamplingOptions sampling;
  sampling.seed = 4;
  Engine engine(*model, nullptr, {.cache_rows = 4000, .max_sequences = setup.places, .lanes = context.layout().pp},
                sampling);
  PhaseTimer timer;
  RolloutCollector collector(engine, nullptr, nullptr, context, timer, 100);
  std::vector<PromptExample> prompts(static_cast<size_t>(setup.groups));
  for (size_t p = 0; p < prompts.size(); ++p) prompts[p].prompt = {static_cast<int32_t>(p + 1), 7, 9};
  RolloutLengths lengths;
  lengths.prompts.assign(prompts.size(), 3);
  for (int64_t s = 0; s < setup.groups * setup.samples; ++s) lengths.outputs.push_back(1 + s * 7 % 23);
  Seen seen;
  for (int r = 0; r < setup.rollouts; ++r) {
    RolloutRequest request;
    request.prompts = &prompts;
    request.samples_per_prompt = setup.samples;
    request.first_sample_id = static_cast<uint64_t>(1000 * r);
    request.name = "test-" + std::to_string(r);
    request.sampling = sampling;
    request.forced_lengths = &lengths;
    request.drawn_rewards = 3;
    seen.whole.clear();
    bool began = false;
    collector.on_progress = [&] {
      if (all_began != nullptr && !std::exchange(began, true)) all_began->arrive_and_wait();
    };
    if (setup.whole_groups) {
      request.on_group = [&](std::vector<Sample> group) {
        EXPECT_EQ(static_cast<int64_t>(group.size()), setup.samples);
        for (size_t i = 0; i < group.size(); ++i) EXPECT_EQ(group[i].index, static_cast<int64_t>(i));
        seen.whole.push_back(group.front().group);
      };
    }
    seen.rollouts.push_back(collector.collect(request, seen.shares));
  }
  return seen;
}

std::vector<Seen> on_ranks(int world, const Case& setup) {
  std::vector<Seen> seen(static_cast<size_t>(world));
  if (world == 1) {
    ParallelContext alone;
    seen[0] = collect(alone, setup);
    return seen;
  }
  std::barrier all_began(world);
  Layout layout = setup.model;
  layout.dp = world / (layout.tp * layout.pp);
  test::on_layout(layout, [&](ParallelContext& context) {
    seen[static_cast<size_t>(context.rank())] = collect(context, setup, setup.together ? &all_began : nullptr);
  });
  return seen;
}

TEST(Rollouts, AreTheSameOnAnyNumberOfRanksAndSharedEvenly) {
  const Seen alone = on_ranks(1, {.rollouts = 2}).front();
  ASSERT_EQ(alone.rollouts.front().size(), 48u);
  EXPECT_EQ(alone.shares.idle_seconds, std::vector<double>{0});
  for (size_t s = 0; s < 48; ++s) {
    const Sample& sample = alone.rollouts.front()[s];
    EXPECT_EQ(sample.group * 8 + sample.index, static_cast<int64_t>(s));
    EXPECT_EQ(sample.response.size(), 1 + s * 7 % 23) << "not the forced length";
    EXPECT_EQ(sample.weight_versions, (VersionSpans{{0, 0, static_cast<int64_t>(sample.response.size())}}));
  }
  for (const int world : {2, 4}) {
    const std::vector<Seen> ranks = on_ranks(world, {.rollouts = 2, .together = true});
    for (const Seen& seen : ranks) {
      for (size_t r = 0; r < 2; ++r) expect_same(seen.rollouts[r], alone.rollouts[r]);
      // All know of all.
      EXPECT_EQ(seen.shares.samples, std::vector<int64_t>(static_cast<size_t>(world), 2 * 48 / world));
      EXPECT_EQ(seen.shares.idle_seconds, ranks.front().shares.idle_seconds);
      EXPECT_GE(*std::min_element(seen.shares.idle_seconds.begin(), seen.shares.idle_seconds.end()), 0);
    }
  }
}

// Pipelines generate in lanes and are given what their leader took when they come to it; tensor ranks beside it at
// once.
TEST(Rollouts, OfPipelinesAreThoseOfOneRank) {
  const Case few{.groups = 1, .samples = 2}, many{.groups = 12, .samples = 4, .places = 8, .rollouts = 2};
  for (Case setup : {few, many}) {
    const Seen alone = on_ranks(1, setup).front();
    for (const auto& [tp, pp] : {std::pair<int64_t, int64_t>{1, 2}, {2, 2}}) {
      setup.model.tp = tp;
      setup.model.pp = pp;
      for (const Seen& seen : on_ranks(static_cast<int>(2 * tp * pp), setup)) {
        ASSERT_EQ(seen.rollouts.size(), alone.rollouts.size());
        EXPECT_EQ(seen.shares.samples.size(), 2u);  // replicas
        for (size_t r = 0; r < alone.rollouts.size(); ++r) {
          // A tp has bits of its own.
          if (tp == 1) expect_same(seen.rollouts[r], alone.rollouts[r]);
          EXPECT_EQ(seen.rollouts[r].size(), alone.rollouts[r].size());
        }
      }
    }
  }
}

TEST(Rollouts, HaveFewerSamplesThanRanksOrMoreThanPlaces) {
  const Case few{.groups = 1, .samples = 2}, many{.groups = 12, .samples = 4, .places = 4};
  for (const Case& setup : {few, many}) {
    const Seen alone = on_ranks(1, setup).front();
    for (const Seen& seen : on_ranks(3, setup)) expect_same(seen.rollouts.front(), alone.rollouts.front());
  }
}

TEST(Rollouts, GroupsAreWholeOnARankWhereTheyMustBe) {
  const Case setup{.groups = 7, .samples = 4, .whole_groups = true};
  const Seen alone = on_ranks(1, setup).front();
  EXPECT_EQ(std::set<int64_t>(alone.whole.begin(), alone.whole.end()).size(), 7u);
  std::set<int64_t> whole;
  for (const Seen& seen : on_ranks(3, setup)) {
    expect_same(seen.rollouts.front(), alone.rollouts.front());
    for (const int64_t group : seen.whole) EXPECT_TRUE(whole.insert(group).second);
  }
  EXPECT_EQ(whole.size(), 7u);
}

TEST(Rollouts, DrawnRewardsLeaveNoGroupWithoutVariance) {
  for (const int64_t size : {2, 3, 8}) {
    for (int64_t group = 0; group < 50; ++group) {
      std::set<double> seen;
      for (int64_t i = 0; i < size; ++i) seen.insert(drawn_reward(9, group, i, size));
      EXPECT_EQ(seen, (std::set<double>{0, 1}));
    }
  }
}

// Whoever trains groups early has no time left for those whose rewards come after generation.
TEST(Rollouts, AnnounceNoGroupAfterGeneration) {
  const TemporaryDirectory dir;
  make_byte_tokenizer(dir.path());
  const auto tokenizer = Tokenizer::load(dir.path());
  const auto model = test::tiny_model({.vocab = tokenizer->vocab_size(), .initializer_range = 0.3});
  SamplingOptions sampling;
  sampling.max_new_tokens = 3;
  ParallelContext alone;
  PhaseTimer timer;
  std::vector<PromptExample> prompts(2);
  for (PromptExample& prompt : prompts) prompt.prompt = {7, 9};
  RewardOptions slow{.type = "command"};
  slow.command = {"sh", "-c", "while read -r line; do sleep 2; echo '{\"reward\": 1}'; done"};
  RewardPool rewards({slow});
  Engine engine(*model, tokenizer.get(), {.cache_rows = 400}, sampling);
  RolloutCollector collector(engine, tokenizer.get(), &rewards, alone, timer, 100);
  RolloutRequest request;
  request.prompts = &prompts;
  request.samples_per_prompt = 2;
  request.name = "test";
  request.sampling = sampling;
  int64_t groups = 0;
  request.on_group = [&](const std::vector<Sample>&) { ++groups; };
  RankShares shares;
  for (const Sample& sample : collector.collect(request, shares)) EXPECT_EQ(sample.raw_reward, 1);
  EXPECT_EQ(groups, 0);
}

}  // namespace
}  // namespace trireme
