#include "topology/stages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "topology/topology.h"

namespace trireme {
namespace {

using testing::HasSubstr;
using testing::Not;

// Layers of every stage by trying every number for the stages whose number is not named; empty: there is none.
std::vector<int64_t> tried_counts(int64_t layers, int64_t pp, const StageOptions& o) {
  for (int64_t guess = 1; guess <= layers; ++guess) {
    std::vector<int64_t> counts(static_cast<size_t>(pp), guess);
    if (o.first_layers != 0) counts.front() = o.first_layers;
    if (pp == 1 && o.first_layers != 0 && o.last_layers != 0 && o.first_layers != o.last_layers) return {};
    if (o.last_layers != 0) counts.back() = o.last_layers;
    int64_t sum = 0;
    bool even = true;
    for (const int64_t count : counts) {
      sum += count;
      even = even && count > 0 && count % o.virtual_stages == 0;
    }
    if (sum == layers && even && (pp > 1 || o.virtual_stages == 1)) return counts;
  }
  return {};
}

void expect_pieces(int64_t layers, int64_t pp, const StageOptions& o, const std::vector<int64_t>& counts) {
  std::vector<int> seen(static_cast<size_t>(layers), 0);
  std::vector<std::vector<Range>> stages;
  for (int64_t stage = 0; stage < pp; ++stage) {
    stages.push_back(stage_pieces(layers, pp, stage, o));
    ASSERT_EQ(static_cast<int64_t>(stages.back().size()), o.virtual_stages);
    int64_t own = 0;
    for (const Range& piece : stages.back()) {
      ASSERT_EQ(piece.size() * o.virtual_stages, counts[static_cast<size_t>(stage)]);
      for (int64_t layer = piece.begin; layer < piece.end; ++layer) ++seen.at(static_cast<size_t>(layer));
      own += piece.size();
    }
    ASSERT_EQ(own, counts[static_cast<size_t>(stage)]);
  }
  ASSERT_EQ(seen, std::vector<int>(static_cast<size_t>(layers), 1));
  // A row passes stage after stage, and round again for the next piece.
  int64_t layer = 0;
  for (size_t piece = 0; piece < static_cast<size_t>(o.virtual_stages); ++piece) {
    for (const auto& pieces : stages) {
      ASSERT_EQ(pieces[piece].begin, layer);
      layer = pieces[piece].end;
    }
  }
}

TEST(Stages, EveryChoiceOfUpTo12LayersMatchesTrial) {
  int64_t legal = 0, refused = 0;
  for (int64_t layers = 1; layers <= 12; ++layers)
    for (int64_t pp = 1; pp <= 8; ++pp)
      for (int64_t first = 0; first <= layers + 1; ++first)
        for (int64_t last = 0; last <= layers + 1; ++last)
          for (int64_t pieces = 1; pieces <= 4; ++pieces) {
            const StageOptions o{.first_layers = first, .last_layers = last, .virtual_stages = pieces};
            const std::vector<int64_t> counts = tried_counts(layers, pp, o);
            const auto what = [&] {
              return testing::Message() << layers << " layers, pp " << pp << ", first " << first << ", last " << last
                                        << ", virtual " << pieces;
            };
            ASSERT_EQ(stages_fit(layers, pp, o), !counts.empty()) << what();
            ASSERT_EQ(stage_error(layers, pp, o).has_value(), counts.empty()) << what();
            ++(counts.empty() ? refused : legal);
            if (!counts.empty()) {
              ASSERT_NO_FATAL_FAILURE(expect_pieces(layers, pp, o, counts)) << what();
            }
          }
  EXPECT_GT(legal, 1000);
  EXPECT_GT(refused, 1000);
}

TEST(Stages, AreThoseOfMegatron) {
  // The examples of Megatron's get_num_layers_to_build: 8 layers, 2 stages, 4 and 2 pieces.
  EXPECT_EQ(stage_pieces(8, 2, 0, {.virtual_stages = 4}), (std::vector<Range>{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(stage_pieces(8, 2, 1, {.virtual_stages = 4}), (std::vector<Range>{{1, 2}, {3, 4}, {5, 6}, {7, 8}}));
  EXPECT_EQ(stage_pieces(8, 2, 0, {.virtual_stages = 2}), (std::vector<Range>{{0, 2}, {4, 6}}));
  EXPECT_EQ(stage_pieces(8, 2, 1, {.virtual_stages = 2}), (std::vector<Range>{{2, 4}, {6, 8}}));
  // Qwen3-235B in 8 stages: 11, six times 12, 11.
  const StageOptions uneven{.first_layers = 11, .last_layers = 11};
  EXPECT_EQ(stage_pieces(94, 8, 0, uneven), (std::vector<Range>{{0, 11}}));
  EXPECT_EQ(stage_pieces(94, 8, 1, uneven), (std::vector<Range>{{11, 23}}));
  EXPECT_EQ(stage_pieces(94, 8, 7, uneven), (std::vector<Range>{{83, 94}}));
  // 32 layers whose head weighs as much as two: 17 + 15. One name is enough.
  EXPECT_EQ(stage_pieces(32, 2, 1, {.last_layers = 15}), (std::vector<Range>{{17, 32}}));
  // Uneven and in pieces: 4 + 8 + 4 by halves.
  EXPECT_EQ(stage_pieces(16, 3, 1, {.first_layers = 4, .last_layers = 4, .virtual_stages = 2}),
            (std::vector<Range>{{2, 6}, {10, 14}}));
}

TEST(Stages, ErrorsAreOneSentenceWithKeyValueAndLegalOnes) {
  const auto error = [](int64_t layers, int64_t pp, const StageOptions& o) {
    return stage_error(layers, pp, o).value_or("");
  };
  EXPECT_EQ(error(94, 8, {}),
            "pipeline_model_parallel_size 8 does not divide the 94 layers; with the others as they are, "
            "pipeline_model_parallel_size can be 1, 2, 47, 94, or num_layers_in_first_pipeline_stage can be 3, 10, 17, "
            "24, 31, 38, 45, 52, ..., 87, or num_layers_in_last_pipeline_stage can be 3, 10, 17, 24, 31, 38, 45, 52, "
            "..., 87");
  EXPECT_EQ(error(94, 8, {.first_layers = 11, .last_layers = 12}),
            "num_layers_in_first_pipeline_stage 11 and num_layers_in_last_pipeline_stage 12 leave 71 layers for the 6 "
            "other stages of pipeline_model_parallel_size 8; with the others as they are, pipeline_model_parallel_size "
            "can be 3, 73, or num_layers_in_first_pipeline_stage can be 4, 10, 16, 22, 28, 34, 40, 46, ..., 76, or "
            "num_layers_in_last_pipeline_stage can be 5, 11, 17, 23, 29, 35, 41, 47, ..., 77");
  EXPECT_EQ(
      error(8, 2, {.first_layers = 3, .last_layers = 4}),
      "num_layers_in_first_pipeline_stage 3 and num_layers_in_last_pipeline_stage 4 do not add up to the 8 "
      "layers of pipeline_model_parallel_size 2; with the others as they are, pipeline_model_parallel_size can be "
      "3, or num_layers_in_first_pipeline_stage can be 4, or num_layers_in_last_pipeline_stage can be 5");
  EXPECT_EQ(error(8, 1, {.virtual_stages = 2}),
            "virtual_pipeline_model_parallel_size 2 needs a pipeline, and pipeline_model_parallel_size 1 is none; with "
            "the others as they are, pipeline_model_parallel_size can be 2, 4, or virtual_pipeline_model_parallel_size "
            "can be 1");
  EXPECT_THAT(error(8, 2, {.virtual_stages = 3}),
              HasSubstr("virtual_pipeline_model_parallel_size 3 does not divide the 4 layers of stage 0; with"));
  EXPECT_THAT(error(8, 2, {.virtual_stages = 3}), HasSubstr("virtual_pipeline_model_parallel_size can be 1, 2, 4"));
  EXPECT_THAT(error(8, 2, {.first_layers = 8}), HasSubstr("leaves 0 layers for the other stage of"));
  EXPECT_THAT(error(8, 2, {.first_layers = 9}),
              HasSubstr("num_layers_in_first_pipeline_stage 9 is no number of layers of a model that has 8"));
  EXPECT_THAT(error(8, 1, {.last_layers = 3}), HasSubstr("3 is not all of the 8 layers of the only stage"));
  EXPECT_THAT(error(8, 0, {}), HasSubstr("pipeline_model_parallel_size 0 is no number of stages"));
  EXPECT_THAT(error(8, 2, {.virtual_stages = 0}), HasSubstr("0 is no number of pieces"));
  // Nothing alone puts these right.
  EXPECT_EQ(error(7, 5, {.first_layers = 9, .last_layers = 9}),
            "num_layers_in_first_pipeline_stage 9 is no number of layers of a model that has 7; with nothing else set, "
            "pipeline_model_parallel_size can be 1, 7");
  EXPECT_TRUE(stage_error(0, 1).has_value());
  EXPECT_TRUE(stage_error(INT64_MAX, INT64_MAX - 1, {INT64_MAX, INT64_MAX, INT64_MAX}).has_value());
  EXPECT_THROW(stage_pieces(94, 8, 0), Error);
  EXPECT_THROW(stage_pieces(8, 2, 2), Error);
}

TEST(Stages, KeysOfAConfigurationAreNamedWithTheirSection) {
  EXPECT_EQ(*stage_error(8, 2, {.first_layers = 3, .last_layers = 4}, "policy.megatron_cfg."),
            "policy.megatron_cfg.num_layers_in_first_pipeline_stage 3 and "
            "policy.megatron_cfg.num_layers_in_last_pipeline_stage 4 do not add up to the 8 layers of "
            "policy.megatron_cfg.pipeline_model_parallel_size 2; with the others as they are, "
            "policy.megatron_cfg.pipeline_model_parallel_size can be 3, or "
            "policy.megatron_cfg.num_layers_in_first_pipeline_stage can be 4, or "
            "policy.megatron_cfg.num_layers_in_last_pipeline_stage can be 5");
  const ModelShape big = *known_model_shape("Qwen3-235B-A22B");
  const LayoutCheck check{.world = 8, .shape = &big, .stages = {.virtual_stages = 2}, .stage_section = "value."};
  EXPECT_THAT(check_layout({.dp = 8}, check).errors.front(),
              HasSubstr("value.virtual_pipeline_model_parallel_size 2 needs a pipeline, and "
                        "value.pipeline_model_parallel_size 1 is none; with"));
}

TEST(Stages, DecideWhichLayoutsAreLegal) {
  const ModelShape big = *known_model_shape("Qwen3-235B-A22B");
  LayoutCheck check{.world = 64, .gpus_per_node = 8, .shape = &big};
  const Layout layout{.tp = 2, .dp = 4, .pp = 8};
  EXPECT_THAT(check_layout(layout, check).errors.front(), HasSubstr("pp 8 does not divide the 94 layers"));
  check.stages = {.first_layers = 11, .last_layers = 11};
  EXPECT_TRUE(check_layout(layout, check).ok());
  std::set<int64_t> stages;
  for (const Layout& legal : legal_layouts(check)) stages.insert(legal.pp);
  EXPECT_EQ(stages, (std::set<int64_t>{4, 8}));  // 72 layers between in 2 or 6 stages
  check.stages = {.first_layers = 11, .last_layers = 12};
  EXPECT_THAT(check_layout(layout, check).errors.front(), HasSubstr("leave 71 layers for the 6 other stages"));
  // Memory follows the layers: the first stage has 11 of 94 and the embedding.
  const MemoryOptions memory{.stages = {.first_layers = 11, .last_layers = 11}};
  const RankMemory first = rank_memory(big, layout, 0, memory), second = rank_memory(big, layout, 8, memory);
  EXPECT_EQ(first.expert_params * 12, second.expert_params * 11);
}

}  // namespace
}  // namespace trireme
