// The parity matrix: every legal layout of 2, 4 and 8 ranks with every way of sharing state that it can have, under
// each recipe, gives the answer of one rank. `make test` has a sample that shows each pair and triple of axes, each
// axis with each way of sharing and each recipe's parts; TRIREME_WHOLE_MATRIX=1 runs all, with eight layers each.
#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "tests/unit/checkpoint/covering.h"
#include "tests/unit/checkpoint/rollout_recipes.h"

namespace trireme {
namespace {

using test::axes_of;
using test::expect_near;
using test::layout_of;
using test::name_of;
using test::Outcome;
using test::Recipe;
using test::Shared;
using test::Sizes;
using test::Step;
using test::train_rollout;
using test::TrainedRank;
using test::traits_of;

constexpr int64_t kMostLayers = 8;

// Each family with each loss and, but for fine-tuning, each way to make micro-batches.
const std::vector<Recipe> kRecipes = {{ModelFamily::kLlama, "packed", "kl"},   {ModelFamily::kLlama, "dynamic", "gspo"},
                                      {ModelFamily::kLlama, "packed", "sft"},  {ModelFamily::kQwen2, "dynamic", "kl"},
                                      {ModelFamily::kQwen2, "shared", "gspo"}, {ModelFamily::kQwen2, "packed", "sft"},
                                      {ModelFamily::kQwen3, "shared", "kl"},   {ModelFamily::kQwen3, "packed", "gspo"},
                                      {ModelFamily::kQwen3, "packed", "sft"}};

struct Case {
  Sizes sizes;
  size_t recipe = 0;
};

// With stages in several pieces too, where the layers are enough.
std::vector<Sizes> every_layout() {
  const ModelShape shape = test::tiny(ModelFamily::kLlama, kMostLayers).shape();
  std::vector<Sizes> all;
  for (const int64_t world : {2, 4, 8}) {
    for (const Layout& layout : legal_layouts({.world = world, .shape = &shape})) {
      Sizes sizes{.tp = layout.tp, .pp = layout.pp, .dp = layout.dp, .cp = layout.cp};
      all.push_back(sizes);
      const bool shares = layout.dp * layout.cp > 1;
      for (const Shared shared : {Shared::kNothing, Shared::kGradients, Shared::kWeights}) {
        sizes.shared = shared;
        if (shares && (layout.pp == 1 || shared == Shared::kNothing)) all.push_back(sizes);
      }
      sizes.shared = Shared::kState;
      sizes.stages.virtual_stages = 2;
      if (layout.pp > 1 && layout.pp < kMostLayers) all.push_back(sizes);
    }
  }
  return all;
}

std::set<std::string> shown_by(const Case& one) {
  const Recipe& recipe = kRecipes[one.recipe];
  std::set<std::string> axes;
  for (const auto& [axis, size] : axes_of(one.sizes)) {
    if (size > 1) axes.insert(axis);
  }
  std::set<std::string> shown = test::pairs_of(traits_of(one.sizes));
  shown.insert(std::string(to_string(recipe.family)) + " by " + recipe.loss);
  shown.insert(std::string(to_string(recipe.family)) + " in " + recipe.batches);
  shown.insert(name_of(one.sizes.shared) + " by " + recipe.loss);
  for (const auto& [axis, size] : axes_of(one.sizes)) {
    if (size > 1) {
      for (const std::string& part : {std::string(to_string(recipe.family)), recipe.batches, recipe.loss})
        shown.insert(axis + " with " + part);
    }
    if (size > 2) shown.insert(axis + " " + std::to_string(size));
    if (size > 1) axes.erase(axis);
    // Three at once: of each pair, with this one.
    if (size > 1) {
      for (const std::string& pair : test::pairs_of(axes)) shown.insert(axis + " and " + pair);
    }
  }
  return shown;
}

const std::vector<Case>& chosen() {
  static const std::vector<Case> cases = [] {
    std::vector<Case> all;
    for (const Sizes& sizes : every_layout()) {
      for (size_t recipe = 0; recipe < kRecipes.size(); ++recipe) all.push_back({sizes, recipe});
    }
    return test::whole_matrix() ? all : test::covering<Case>(all, shown_by);
  }();
  return cases;
}

// A sample has no more layers than its stages want, or four.
int64_t layers_of(const Sizes& sizes) {
  if (test::whole_matrix()) return kMostLayers;
  return std::max<int64_t>(4, sizes.pp * sizes.stages.virtual_stages);
}

struct Tuned {  // by one rank
  explicit Tuned(const ModelConfig& config) : rank(alone, config) {
    for (int step = 0; step < 3; ++step) steps.push_back(rank.train(step));
  }
  ParallelContext alone;
  TrainedRank rank;
  std::vector<Step> steps;
};

void expect_tuning(const Sizes& sizes, const ModelConfig& config, const Tuned& one) {
  test::on_layout(layout_of(sizes), [&](ParallelContext& context) {
    TrainedRank rank(context, config, sizes);
    for (size_t step = 0; step < one.steps.size(); ++step)
      expect_near(rank.train(static_cast<int>(step)), one.steps[step]);
    test::expect_parameters_of(rank, one.rank.model, name_of(sizes));
    test::expect_equal_ends(rank);
  });
}

class Parity : public ::testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Matrix, Parity, ::testing::Range<size_t>(0, kRecipes.size()),
                         [](const auto& info) { return kRecipes[info.param].name(); });

TEST_P(Parity, OfEveryLayoutWithOneRank) {
  const Recipe& recipe = kRecipes[GetParam()];
  std::map<int64_t, Outcome> rollouts;  // of one rank, by layers
  std::map<int64_t, std::unique_ptr<Tuned>> tuned;
  size_t compared = 0, found = 0;
  for (const Case& one : chosen()) {
    if (one.recipe != GetParam() || !test::in_part(found++)) continue;
    ++compared;
    const int64_t layers = layers_of(one.sizes);
    SCOPED_TRACE(name_of(one.sizes) + ", " + std::to_string(layers) + " layers");
    if (recipe.loss == "sft") {
      const ModelConfig config = test::with_layers(recipe.family, layers);
      std::unique_ptr<Tuned>& alone = tuned[layers];
      if (alone == nullptr) alone = std::make_unique<Tuned>(config);
      expect_tuning(one.sizes, config, *alone);
      continue;
    }
    if (rollouts.count(layers) == 0) rollouts[layers] = train_rollout(recipe, {.tp = 1, .pp = 1, .dp = 1}, layers);
    const Outcome& alone = rollouts.at(layers);
    ASSERT_EQ(alone.result.optimizer_steps, 3);
    const Outcome many = train_rollout(recipe, one.sizes, layers);
    test::expect_answer_of_one(many, alone, name_of(one.sizes));
    EXPECT_EQ(many.result.compared_tokens, alone.result.compared_tokens);
  }
  EXPECT_GT(compared, 0u);
  RecordProperty("compared", static_cast<int>(compared));
}

// What the matrix is of: 33 layouts, eight ranks as three axes at once among them, and a sample that has them.
TEST(ParityMatrix, HasEveryLayoutAndItsSampleEachTripleOfAxes) {
  std::set<std::string> layouts, triples;
  for (const Sizes& sizes : every_layout()) layouts.insert(to_string(layout_of(sizes)));
  EXPECT_EQ(layouts.size(), 33u);
  for (const Layout& layout : {Layout{.tp = 2, .pp = 4}, Layout{.tp = 4, .pp = 2}, Layout{.tp = 2, .cp = 2, .pp = 2}})
    EXPECT_EQ(layouts.count(to_string(layout)), 1u) << to_string(layout);
  for (const Case& one : chosen()) {
    std::string axes;
    for (const auto& [axis, size] : axes_of(one.sizes)) {
      if (size > 1 && axis != "virtual stages") axes += axis + " ";
    }
    triples.insert(axes);
  }
  for (const char* axes : {"cp dp pp ", "cp dp tp ", "cp pp tp ", "dp pp tp "})
    EXPECT_EQ(triples.count(axes), 1u) << axes;
}

}  // namespace
}  // namespace trireme
