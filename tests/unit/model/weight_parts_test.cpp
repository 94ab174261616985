// Weights of split models to engines in pieces of flat buffers: every layout of up to eight ranks, element by element.
#include "trainer/model/weight_parts.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/unit/errors.h"
#include "tests/unit/model/tiny.h"
#include "tests/unit/parallel/ranks.h"

namespace trireme {
namespace {

// The number of an element: which parameter it is of, and where in the whole one.
double number_of(size_t parameter, int64_t place) { return static_cast<double>(parameter) * 100000 + 1.0 + place; }

// The flat buffer of a rank, by its parameters one after another and each element of them; 0 in gaps.
at::Tensor flat_of(const ParameterLayout& layout, const std::vector<ModelParameter>& all) {
  at::Tensor flat = at::zeros({layout.elements + layout.frozen_elements}, at::kDouble);
  double* numbers = flat.mutable_data_ptr<double>();
  for (const PlacedParameter& parameter : layout.parameters) {
    size_t index = 0;
    while (all[index].name != parameter.name) ++index;
    const std::vector<int64_t> own = parameter.shape();
    const int64_t columns = own.size() > 1 ? own[1] : 1;
    const int64_t of_whole = own.size() > 1 ? parameter.slice.shape[1] : 1;
    const bool by_columns = parameter.slice.dimension == 1;
    const int64_t pitch = own.size() > 1 ? parameter.held[1] : 1;  // of a row; behind its elements are zeros
    for (int64_t i = 0; i < own[0] * columns; ++i) {
      int64_t row = i / columns, column = i % columns;
      const int64_t at = row * pitch + column;
      (by_columns ? column : row) += parameter.slice.range.begin;
      numbers[parameter.offset + at] = number_of(index, row * of_whole + column);
    }
  }
  return flat;
}

struct Rank {
  std::unique_ptr<WeightParts> parts;
  at::Tensor flat;
};

// Padded where the widths are no multiples of 8, as on CUDA.
Rank rank_of_layout(const ModelConfig& config, const ModelSplit& split, const EngineLayouts& layouts) {
  const ParameterLayout layout = parameter_layout(config, split, /*freeze_router=*/true, /*padded=*/true);
  return {std::make_unique<WeightParts>(config, layout.parameters, layouts, 8),
          flat_of(layout, model_parameters(config.shape()))};
}

// All parts from the ranks of training into the engine's rank, cut every `elements`.
void expect_moved(const ModelConfig& config, const EngineLayouts& layouts, int64_t engine, int64_t rank,
                  int64_t elements) {
  const Rank here = rank_of_layout(config, model_split(config.shape(), layouts.engine, rank), layouts);
  at::Tensor got = at::zeros_like(here.flat);
  std::vector<int64_t> sources;
  for (const WeightPart& received : here.parts->received(engine, rank)) {
    sources.push_back(received.actor_rank);
    const ModelSplit split = model_split(config.shape(), layouts.training, received.actor_rank, layouts.stages);
    const Rank there = rank_of_layout(config, split, layouts);
    ASSERT_EQ(there.parts->sources(engine, rank), here.parts->sources(engine, rank));
    const WeightPart sent = there.parts->sent(received.actor_rank, engine, rank);
    ASSERT_EQ(sent.whole, received.whole);
    ASSERT_EQ(sent.digest, received.digest);
    if (sent.whole) {
      got.copy_(there.flat);
      continue;
    }
    const std::vector<WeightChunk> from = chunks_of(sent, elements), to = chunks_of(received, elements);
    ASSERT_EQ(from.size(), to.size());
    for (size_t c = 0; c < from.size(); ++c) {
      ASSERT_EQ(from[c].elements, to[c].elements);
      const at::Tensor packed = at::empty({from[c].elements}, at::kDouble);
      gather_chunk(there.flat, from[c], packed);
      scatter_chunk(packed, to[c], got);
    }
    ASSERT_EQ(part_checksum(there.flat, sent), part_checksum(got, received));
  }
  ASSERT_EQ(sources, here.parts->sources(engine, rank));
  ASSERT_TRUE(at::equal(got, here.flat));
}

TEST(WeightParts, BringEveryElementToItsPlaceInEveryLayout) {
  int64_t moved = 0;
  for (const ModelFamily family : {ModelFamily::kQwen2, ModelFamily::kQwen3Moe}) {
    const ModelConfig config = test::tiny_config({.family = family,
                                                  .vocab = 50,
                                                  .hidden = 8,
                                                  .intermediate = 8,
                                                  .layers = 4,
                                                  .heads = 4,
                                                  .kv_heads = 4,
                                                  .head_dim = 2,
                                                  .tied = family == ModelFamily::kQwen2});
    const ModelShape shape = config.shape();
    for (const int64_t world : {1, 2, 4, 8}) {
      for (const StageOptions& stages : {StageOptions{}, StageOptions{.virtual_stages = 2}}) {
        for (const Layout& training : legal_layouts({.world = world, .shape = &shape, .stages = stages})) {
          for (const Layout& engine : {Layout{}, Layout{.tp = 2}}) {
            const EngineLayouts layouts{training, stages, engine};
            ASSERT_NO_FATAL_FAILURE(expect_moved(config, layouts, moved % 5, engine.tp - 1, 100 + moved % 3 * 777))
                << to_string(training) << " to " << to_string(engine);
            ++moved;
          }
        }
      }
    }
  }
  EXPECT_GT(moved, 100);
}

TEST(WeightParts, BringEveryElementToItsPlaceBetweenPaddedWidths) {
  const ModelConfig config = test::tiny_config({.family = ModelFamily::kQwen2,
                                                .vocab = 50,
                                                .hidden = 12,
                                                .intermediate = 20,
                                                .layers = 2,
                                                .heads = 4,
                                                .kv_heads = 4,
                                                .head_dim = 2});
  const ModelShape shape = config.shape();
  int64_t moved = 0;
  for (const int64_t world : {2, 4}) {
    for (const Layout& training : legal_layouts({.world = world, .shape = &shape})) {
      for (const Layout& engine : {Layout{}, Layout{.tp = 2}}) {
        ASSERT_NO_FATAL_FAILURE(expect_moved(config, {training, {}, engine}, moved % 3, engine.tp - 1, 37))
            << to_string(training) << " to " << to_string(engine);
        ++moved;
      }
    }
  }
  EXPECT_GT(moved, 10);
}

TEST(WeightParts, OfAModelAreThoseOfItsFlatBuffer) {
  const ModelConfig config = test::tiny_config({.layers = 2});
  const EngineLayouts layouts{.training = {.tp = 2}};
  const auto engine = test::tiny_model({.layers = 2});
  test::on_layout({.tp = 2}, [&](ParallelContext& context) {
    ModelOptions options;
    set_split(options, config.shape(), context);
    Model actor(config, options);
    init_parameters(actor, 1);
    const WeightPart sent = WeightParts(actor, layouts).sent(context.rank(), /*engine=*/3);
    for (const WeightPart& received : WeightParts(*engine, layouts).received(3)) {
      if (received.actor_rank != context.rank()) continue;
      EXPECT_EQ(sent.digest, received.digest);
      // The values of an element follow from its name and index: what arrives is there already.
      EXPECT_EQ(part_checksum(actor.flat_parameters(), sent), part_checksum(engine->flat_parameters(), received));
    }
  });
}

TEST(WeightParts, AWidthOfExpertsThatRanksShareIsRefusedByItsSize) {
  const ModelConfig config = test::tiny_config({.family = ModelFamily::kQwen3Moe});
  const EngineLayouts layouts{.training = {.dp = 2, .etp = 2}};
  const ParameterLayout layout = parameter_layout(config, whole_model(config));
  const WeightParts parts(config, layout.parameters, layouts, 4);
  EXPECT_MENTIONS(test::user_error_of([&] { (void)parts.sources(0); }), "etp=2");
}

}  // namespace
}  // namespace trireme
