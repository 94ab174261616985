// Mixtures of experts by the trainer itself: a recorded rollout under each legal layout of 2, 4 and 8 ranks, with each
// way of sharing state that it can have and several recipes, gives one rank's loss, norm, moments and weights after
// three optimizer steps. `make test` has a sample that shows each pair of axes and each axis with each way of sharing
// and each recipe; TRIREME_WHOLE_MATRIX=1 runs all.
#include <set>
#include <string>
#include <vector>

#include "tests/unit/checkpoint/covering.h"
#include "tests/unit/checkpoint/rollout_recipes.h"
#include "topology/topology.h"

namespace trireme {
namespace {

using test::axes_of;
using test::name_of;
using test::Outcome;
using test::Recipe;
using test::Shared;
using test::Sizes;
using test::train_rollout;

constexpr int64_t kLayers = 4;

const std::vector<Recipe> kRecipes = {{ModelFamily::kQwen3Moe, "packed", "kl"},
                                      {ModelFamily::kMixtral, "dynamic", "gspo"},
                                      {ModelFamily::kQwen3Moe, "shared", "kl"}};

std::vector<Sizes> every_layout() {
  const ModelShape shape = test::tiny(ModelFamily::kQwen3Moe, kLayers).shape();
  std::vector<Sizes> all;
  for (const int64_t world : {2, 4, 8}) {
    for (const int64_t etp : {1, 2, 4}) {
      for (const Layout& layout : legal_layouts({.world = world, .shape = &shape}, etp)) {
        if (layout.ep * layout.etp == 1) continue;  // as a dense model
        Sizes sizes{
            .tp = layout.tp, .pp = layout.pp, .dp = layout.dp, .ep = layout.ep, .cp = layout.cp, .etp = layout.etp};
        all.push_back(sizes);
        for (const Shared shared : {Shared::kNothing, Shared::kGradients, Shared::kWeights}) {
          sizes.shared = shared;
          const bool shares = layout.dp * layout.cp > 1;
          if (shares && (layout.pp == 1 || shared == Shared::kNothing)) all.push_back(sizes);
        }
      }
    }
  }
  return all;
}

struct Case {
  Sizes sizes;
  size_t recipe = 0;
};

std::set<std::string> shown_by(const Case& one) {
  std::set<std::string> shown = test::pairs_of(test::traits_of(one.sizes));
  for (const auto& [axis, size] : axes_of(one.sizes)) {
    if (size > 1) shown.insert(axis + " with " + kRecipes[one.recipe].name());
  }
  shown.insert(name_of(one.sizes.shared) + " with " + kRecipes[one.recipe].name());
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

class MixtureRecipes : public ::testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Matrix, MixtureRecipes, ::testing::Range<size_t>(0, kRecipes.size()),
                         [](const auto& info) { return kRecipes[info.param].name(); });

TEST_P(MixtureRecipes, UnderEveryLayoutAsOnOneRank) {
  const Recipe& recipe = kRecipes[GetParam()];
  const Outcome alone = train_rollout(recipe, {.tp = 1, .pp = 1, .dp = 1}, kLayers);
  ASSERT_EQ(alone.result.optimizer_steps, 3);
  size_t compared = 0, found = 0;
  for (const Case& one : chosen()) {
    if (one.recipe != GetParam() || !test::in_part(found++)) continue;
    SCOPED_TRACE(name_of(one.sizes));
    ++compared;
    const Outcome many = train_rollout(recipe, one.sizes, kLayers);
    test::expect_answer_of_one(many, alone, name_of(one.sizes));
    EXPECT_EQ(many.result.compared_tokens, alone.result.compared_tokens);
  }
  EXPECT_GT(compared, 0u);
  RecordProperty("compared", static_cast<int>(compared));
}

TEST(MixtureMatrix, HasEveryPairOfAxesAndItsSampleEachWithEachWayOfSharing) {
  std::vector<Case> all;
  for (const Sizes& sizes : every_layout()) all.push_back({sizes, 0});
  EXPECT_GT(all.size(), 150u);
  std::set<std::string> shown;
  for (const Case& one : chosen()) shown.merge(shown_by(one));
  for (const char* what : {"ep with tp", "cp with ep", "ep with pp", "dp with ep", "ep with etp", "etp with tp",
                           "cp with etp", "etp with pp", "dp with etp"})
    EXPECT_EQ(shown.count(what), 1u) << what;
  if (!test::whole_matrix()) {
    EXPECT_LT(chosen().size(), 40u);
  }
}

}  // namespace
}  // namespace trireme
