// Plans of weights to engines carried out on numbers: each element of the model has its own, ranks of training have
// those of their slices, and an engine's rank gets its own from what its sources send.
#include "topology/weight_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>

#include "base/error.h"
#include "tests/unit/topology/numbered.h"

namespace trireme {
namespace {

using test::kNothing;
using test::Memory;
using testing::ElementsAre;

constexpr int64_t kElementBytes = 2;

std::vector<int64_t> ranks_of(const WeightPlan& plan) {
  std::vector<int64_t> ranks;
  for (const WeightSource& source : plan.sources) ranks.push_back(source.actor_rank);
  return ranks;
}

// All plans of two layouts.
class Planned final {
 public:
  Planned(const ModelShape& shape, const EngineLayouts& layouts)
      : shape_(shape),
        layouts_(layouts),
        parameters_(model_parameters(shape)),
        trained_(test::memories(shape, parameters_, layouts.training, layouts.stages)),
        wanted_(test::memories(shape, parameters_, layouts.engine, {})) {}

  WeightPlan plan(int64_t engine, int64_t rank) const {
    return weight_plan(shape_, parameters_, layouts_, weight_plan_number(layouts_, engine, rank), rank, kElementBytes);
  }

  void expect_right(int64_t engine, int64_t rank) const {
    const WeightPlan found = plan(engine, rank);
    ASSERT_NO_FATAL_FAILURE(expect_whole(found, rank));
    ASSERT_NO_FATAL_FAILURE(expect_one_copy(found));
    bool same = false;  // some rank of the copy has what is wanted and nothing else
    for (const int64_t from : group_of(layouts_.training, Axis::kCopyPp, ranks_of(found).front()))
      same |= trained_[static_cast<size_t>(from)] == wanted_[static_cast<size_t>(rank)];
    for (const WeightSource& source : found.sources) ASSERT_EQ(source.whole, same);
    if (same) {
      ASSERT_EQ(found.sources.size(), 1u);
      ASSERT_EQ(trained_[static_cast<size_t>(found.sources.front().actor_rank)], wanted_[static_cast<size_t>(rank)]);
    } else {
      ASSERT_NO_FATAL_FAILURE(expect_even(found));
    }
  }

 private:
  // Each element once, from a rank that has it, and nothing that is not wanted.
  void expect_whole(const WeightPlan& found, int64_t rank) const {
    const Memory& wanted = wanted_[static_cast<size_t>(rank)];
    Memory got;
    for (const auto& parameter : wanted) got.emplace_back(parameter.size(), kNothing);
    int64_t bytes = 0;
    for (const WeightSource& source : found.sources) {
      int64_t of_source = 0, before = 0;
      for (const RefitCopy& copy : source.copies) {
        ASSERT_EQ(copy.from, source.actor_rank);
        ASSERT_EQ(copy.to, rank);
        ASSERT_GE(copy.parameter, before);
        before = copy.parameter;
        const auto parameter = static_cast<size_t>(copy.parameter);
        int64_t elements = 0;
        test::visit_places(parameters_[parameter], copy.dimension, copy.range, [&](size_t place) {
          ASSERT_EQ(got[parameter][place], kNothing) << "an element came twice";
          got[parameter][place] = trained_[static_cast<size_t>(copy.from)][parameter][place];
          ++elements;
        });
        ASSERT_EQ(copy.bytes(), elements * kElementBytes);
        of_source += copy.bytes();
      }
      ASSERT_GT(of_source, 0);
      ASSERT_EQ(source.bytes, of_source);
      bytes += of_source;
    }
    ASSERT_EQ(got, wanted);
    ASSERT_EQ(found.bytes, bytes);
  }

  // The sources are of one replica: of ranks that hold the model together, and of no others.
  void expect_one_copy(const WeightPlan& found) const {
    const std::vector<int64_t> ranks = ranks_of(found);
    const std::vector<int64_t> copy = group_of(layouts_.training, Axis::kCopyPp, ranks.front());
    for (const int64_t rank : ranks) ASSERT_TRUE(std::binary_search(copy.begin(), copy.end(), rank));
    ASSERT_EQ(std::set<int64_t>(ranks.begin(), ranks.end()).size(), ranks.size());
    // Ascending from some rank on, and round.
    const auto falls = std::adjacent_find(ranks.begin(), ranks.end(), std::greater<>());
    if (falls != ranks.end()) {
      ASSERT_TRUE(std::is_sorted(falls + 1, ranks.end()));
      ASSERT_LT(ranks.back(), ranks.front());
    }
  }

  // A rank's last copy was its turn: whoever of the replica could have sent it instead had sent as much by then.
  void expect_even(const WeightPlan& found) const {
    std::map<int64_t, int64_t> sent;
    for (const int64_t rank : group_of(layouts_.training, Axis::kCopyPp, ranks_of(found).front())) sent[rank] = 0;
    for (const WeightSource& source : found.sources) sent[source.actor_rank] = source.bytes;
    for (const WeightSource& source : found.sources) {
      const RefitCopy& last = source.copies.back();
      const auto parameter = static_cast<size_t>(last.parameter);
      for (const auto& [rank, bytes] : sent) {
        bool has = true;
        test::visit_places(parameters_[parameter], last.dimension, last.range, [&, rank = rank](size_t place) {
          has &= trained_[static_cast<size_t>(rank)][parameter][place] != kNothing;
        });
        if (!has) continue;
        ASSERT_LE(source.bytes, bytes + last.bytes());
      }
    }
  }

  const ModelShape shape_;
  const EngineLayouts layouts_;
  std::vector<ModelParameter> parameters_;
  std::vector<Memory> trained_, wanted_;  // of each rank
};

std::vector<Layout> engines_of(const ModelShape& shape) {
  std::vector<Layout> layouts{{}};
  for (const Layout& layout : {Layout{.tp = 2}, Layout{.tp = 4}, Layout{.tp = 4, .ep = 2}, Layout{.tp = 2, .ep = 2}}) {
    if (layout.ep > 1 && shape.experts == 0) continue;
    if (check_layout(layout, {.world = layout.world(), .shape = &shape}).ok()) layouts.push_back(layout);
  }
  return layouts;
}

TEST(WeightPlan, EveryElementComesOnceFromOneReplicaInEveryLayout) {
  int64_t planned = 0;
  std::vector<ModelShape> shapes = test::small_shapes();
  shapes.push_back(test::small_mixture());
  for (const ModelShape& shape : shapes) {
    for (const int64_t world : {1, 2, 3, 4, 6, 8}) {
      for (const StageOptions& stages : test::kStages) {
        for (const Layout& training : legal_layouts({.world = world, .shape = &shape, .stages = stages})) {
          for (const Layout& engine : engines_of(shape)) {
            const Planned all(shape, {training, stages, engine});
            for (int64_t e = 0; e < 3; ++e) {
              for (int64_t rank = 0; rank < engine.world(); ++rank) {
                ASSERT_NO_FATAL_FAILURE(all.expect_right(e, rank))
                    << to_string(training) << " to rank " << rank << " of engine " << e << " of " << to_string(engine);
                ++planned;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(planned, 3000);
}

TEST(WeightPlan, OfWholeModelsIsOneRankAfterTheOther) {
  const ModelShape shape = test::small(8, 4, 8, 33);
  for (const Layout& training : {Layout{.dp = 6}, Layout{.cp = 2, .dp = 3}}) {
    const Planned all(shape, {.training = training});
    for (int64_t engine = 0; engine < 13; ++engine) {
      const WeightPlan plan = all.plan(engine, 0);
      EXPECT_THAT(ranks_of(plan), ElementsAre(engine % 6));
      EXPECT_TRUE(plan.sources.front().whole);
    }
  }
}

// Of two engines of two ranks each of the four ranks that train sends to one; of eight, to two.
TEST(WeightPlan, EnginesThatAreSplitAsTrainingIsSpreadOverItsRanks) {
  const ModelShape shape = test::small(8, 4, 8, 33);
  for (const auto& [training, engine] :
       {std::pair{Layout{.tp = 2, .dp = 2}, Layout{.tp = 2}}, std::pair{Layout{.tp = 4, .dp = 2}, Layout{.tp = 4}},
        std::pair{Layout{.dp = 4}, Layout{.tp = 2}}}) {
    const Planned all(shape, {.training = training, .engine = engine});
    const int64_t engines = 2 * training.world() / engine.world();
    std::map<int64_t, int64_t> receivers;
    for (int64_t e = 0; e < engines; ++e) {
      for (int64_t rank = 0; rank < engine.world(); ++rank)
        for (const int64_t from : ranks_of(all.plan(e, rank))) ++receivers[from];
    }
    ASSERT_EQ(receivers.size(), static_cast<size_t>(training.world())) << to_string(training);
    for (const auto& [rank, count] : receivers) EXPECT_EQ(count, 2) << "rank " << rank << " of " << to_string(training);
  }
}

TEST(WeightPlan, EnginesSpreadOverReplicasAndBeginWithDifferentStages) {
  const ModelShape shape = test::small(8, 4, 8, 33);
  const Planned all(shape, {.training = {.tp = 2, .dp = 2, .pp = 2}});  // replicas 0, 1, 4, 5 and 2, 3, 6, 7
  EXPECT_THAT(ranks_of(all.plan(0, 0)), ElementsAre(0, 1, 4, 5));
  EXPECT_THAT(ranks_of(all.plan(1, 0)), ElementsAre(2, 3, 6, 7));
  EXPECT_THAT(ranks_of(all.plan(2, 0)), ElementsAre(1, 4, 5, 0));
  EXPECT_THAT(ranks_of(all.plan(3, 0)), ElementsAre(3, 6, 7, 2));
  EXPECT_THAT(ranks_of(all.plan(6, 0)), ElementsAre(5, 0, 1, 4));
  EXPECT_THAT(ranks_of(all.plan(8, 0)), ElementsAre(0, 1, 4, 5)) << "as many plans as ranks, round and round";
}

TEST(WeightPlan, OfTensorRanksWhatAllHaveComesFromOneAndSlicesFromEach) {
  ModelShape shape = test::small(2, 2, 4, 16);
  shape.layers = 1;
  const WeightPlan plan =
      weight_plan(shape, model_parameters(shape), {.training = {.tp = 2}}, /*number=*/0, 0, kElementBytes);
  ASSERT_EQ(plan.sources.size(), 2U);
  std::map<std::string, std::vector<Range>> second;  // what rank 1 sends
  const std::vector<ModelParameter> parameters = model_parameters(shape);
  for (const RefitCopy& copy : plan.sources[1].copies)
    second[parameters[static_cast<size_t>(copy.parameter)].name].push_back(copy.range);
  // A tie, by the number, then to whoever has sent less.
  EXPECT_THAT(second["model.embed_tokens.weight"], ElementsAre(Range{8, 16}));
  EXPECT_THAT(second["model.layers.0.self_attn.o_proj.weight"], ElementsAre(Range{1, 2}));
  EXPECT_EQ(second.count("model.layers.0.input_layernorm.weight"), 0U);
  EXPECT_EQ(second.count("model.layers.0.post_attention_layernorm.weight"), 1U);
}

// Expert ranks that are data parallel ones too: the rest of the model is on each of them. Embedding and head, of 0.6 GB
// each, go at once.
TEST(WeightPlan, WhatSeveralExpertRanksHaveIsSpreadOverThem) {
  const ModelShape shape = *known_model_shape("qwen3-30b-a3b");
  const WeightPlan plan =
      weight_plan(shape, model_parameters(shape), {.training = {.ep = 8, .dp = 8}}, /*number=*/3, 0, kElementBytes);
  ASSERT_EQ(plan.sources.size(), 8U);
  EXPECT_EQ(plan.bytes, kElementBytes * parameter_count(shape));
  for (const WeightSource& source : plan.sources)
    EXPECT_NEAR(static_cast<double>(source.bytes), static_cast<double>(plan.bytes) / 8, 0.6e9);
}

TEST(WeightPlan, RefusesLayoutsByTheirSizes) {
  const ModelShape shape = test::small_mixture();
  const auto refusal = [&](const EngineLayouts& layouts) -> std::string {
    try {
      (void)weight_plan(shape, model_parameters(shape), layouts, 0, 0, kElementBytes);
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kUser ? error.what() : "";
    }
    return "";
  };
  EXPECT_THAT(refusal({.training = {.dp = 3, .etp = 3}}), testing::HasSubstr("etp=3"));
  EXPECT_THAT(refusal({.training = {}, .engine = {.pp = 2}}), testing::HasSubstr("pp=2"));
  EXPECT_THAT(refusal({.training = {}, .engine = {.dp = 2}}), testing::HasSubstr("dp=2"));
  EXPECT_THAT(refusal({.training = {}, .engine = {.cp = 2}}), testing::HasSubstr("cp=2"));
}

}  // namespace
}  // namespace trireme
