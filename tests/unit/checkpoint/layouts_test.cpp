// Training of mixtures and checkpoints under layouts: one answer, and any layout goes on where any other has stopped.
// `make test` has a sample of the layouts that shows each pair of their traits; TRIREME_WHOLE_MATRIX=1 runs them all.
// Dense models and eight ranks: tests/unit/layouts.
#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/fs.h"
#include "tests/unit/checkpoint/covering.h"
#include "tests/unit/checkpoint/trained_rank.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/parallel/stage_links.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;
using test::axes_of;
using test::expect_near;
using test::four_layers;
using test::expect_parameters_of;
using test::layout_of;
using test::name_of;
using test::Shared;
using test::Sizes;
using test::Step;
using test::TrainedRank;
using test::traits_of;
using testing::eight_heads;
using testing::part_of;
using testing::same_bits;

const std::vector<Sizes> kLayouts = {{1, 1, 1},
                                     {2, 1, 1},
                                     {4, 1, 1},
                                     {1, 1, 4},
                                     {2, 1, 2},
                                     {1, 4, 1},
                                     {2, 2, 1},
                                     {1, 2, 2},
                                     {1, 2, 1, {.virtual_stages = 2}},
                                     {.tp = 1, .pp = 2, .dp = 1, .cp = 2},
                                     {.tp = 1, .pp = 1, .dp = 4, .shared = Shared::kNothing},
                                     {.tp = 1, .pp = 2, .dp = 2, .shared = Shared::kNothing},
                                     {.tp = 1, .pp = 1, .dp = 2, .shared = Shared::kGradients},
                                     {.tp = 1, .pp = 1, .dp = 4, .shared = Shared::kGradients},
                                     {.tp = 2, .pp = 1, .dp = 2, .shared = Shared::kGradients},
                                     {.tp = 1, .pp = 1, .dp = 2, .cp = 2, .shared = Shared::kGradients},
                                     {.tp = 1, .pp = 1, .dp = 2, .shared = Shared::kWeights},
                                     {.tp = 1, .pp = 1, .dp = 4, .shared = Shared::kWeights},
                                     {.tp = 2, .pp = 1, .dp = 2, .shared = Shared::kWeights},
                                     {.tp = 1, .pp = 1, .dp = 2, .cp = 2, .shared = Shared::kWeights}};
// Experts are whole or split, and take the rows of tensor ranks as those of data parallel ones.
std::vector<Sizes> layouts_for(const ModelConfig& config) {
  return config.num_experts > 0
             ? std::vector<Sizes>{{1, 1, 1},
                                  {1, 1, 2},
                                  {1, 2, 1},
                                  {1, 2, 2},
                                  {.tp = 1, .pp = 1, .dp = 1, .cp = 2},
                                  {2, 1, 1},
                                  {2, 1, 2},
                                  {2, 2, 1},
                                  {.tp = 2, .pp = 1, .dp = 1, .cp = 2},
                                  {.tp = 2, .pp = 1, .dp = 2, .shared = Shared::kNothing},
                                  {.tp = 2, .pp = 1, .dp = 2, .shared = Shared::kGradients},
                                  {.tp = 2, .pp = 1, .dp = 2, .shared = Shared::kWeights},
                                  {.tp = 1, .pp = 1, .dp = 2, .ep = 2},
                                  {.tp = 1, .pp = 1, .dp = 4, .ep = 2},
                                  {.tp = 1, .pp = 1, .dp = 4, .ep = 4},
                                  {.tp = 1, .pp = 1, .dp = 8, .ep = 4},
                                  {.tp = 1, .pp = 1, .dp = 4, .ep = 2, .shared = Shared::kNothing},
                                  {.tp = 1, .pp = 1, .dp = 4, .ep = 2, .shared = Shared::kGradients},
                                  {.tp = 2, .pp = 1, .dp = 2, .ep = 2},
                                  {.tp = 2, .pp = 1, .dp = 2, .ep = 4},
                                  {.tp = 1, .pp = 1, .dp = 2, .ep = 4, .cp = 2},
                                  {.tp = 1, .pp = 2, .dp = 2, .ep = 2},
                                  {.tp = 1, .pp = 2, .dp = 2, .stages = {.virtual_stages = 2}, .ep = 2},
                                  {.tp = 2, .pp = 2, .dp = 2, .ep = 2, .etp = 2},
                                  {.tp = 1, .pp = 1, .dp = 2, .etp = 2},
                                  {.tp = 2, .pp = 1, .dp = 1, .etp = 2},
                                  {.tp = 2, .pp = 1, .dp = 2, .ep = 2, .etp = 2},
                                  {.tp = 1, .pp = 1, .dp = 4, .etp = 2, .shared = Shared::kNothing},
                                  {.tp = 1, .pp = 1, .dp = 4, .etp = 2, .shared = Shared::kWeights},
                                  {.tp = 1, .pp = 2, .dp = 2, .ep = 2, .shared = Shared::kNothing},
                                  {.tp = 2, .pp = 1, .dp = 2, .ep = 2, .shared = Shared::kNothing},
                                  {.tp = 2, .pp = 1, .dp = 2, .ep = 4, .shared = Shared::kGradients},
                                  {.tp = 2, .pp = 1, .dp = 2, .ep = 2, .shared = Shared::kWeights},
                                  {.tp = 1, .pp = 1, .dp = 2, .ep = 2, .shared = Shared::kWeights},
                                  {.tp = 1, .pp = 1, .dp = 4, .ep = 2, .shared = Shared::kWeights}}
             : kLayouts;
}

// Where a model's three optimizer steps are compared with one rank's: under each layout, or under a sample of layouts
// and models that has each pair of traits, the model among them, and each size.
struct TrainedCase {
  ModelFamily family;
  Sizes sizes;
};

std::set<std::string> shown_by_training(const TrainedCase& one) {
  std::set<std::string> traits = traits_of(one.sizes);
  traits.insert(std::string(to_string(one.family)));
  std::set<std::string> shown = test::pairs_of(traits);
  for (const auto& [axis, size] : axes_of(one.sizes)) {
    if (size > 2) shown.insert(axis + " " + std::to_string(size));
  }
  return shown;
}

std::vector<TrainedCase> trained_cases() {
  std::vector<TrainedCase> cases;
  for (const ModelFamily family : testing::kAllFamilies) {
    const ModelConfig config = four_layers(family);
    if (config.num_experts == 0) continue;
    for (const Sizes& sizes : layouts_for(config)) cases.push_back({family, sizes});
  }
  return test::whole_matrix() ? cases : test::covering<TrainedCase>(cases, shown_by_training);
}

class OneAnswer : public ::testing::TestWithParam<ModelFamily> {};
INSTANTIATE_TEST_SUITE_P(Layouts, OneAnswer, ::testing::Values(ModelFamily::kQwen3Moe, ModelFamily::kMixtral),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(OneAnswer, ThreeOptimizerStepsAreThoseOfOneRank) {
  const ModelConfig config = four_layers(GetParam());
  ParallelContext alone;
  TrainedRank whole(alone, config);
  std::vector<Step> wanted;
  for (int step = 0; step < 3; ++step) wanted.push_back(whole.train(step));
  const std::vector<TrainedCase> cases = trained_cases();
  EXPECT_TRUE(std::any_of(cases.begin(), cases.end(), [&](const auto& one) { return one.family == GetParam(); }));
  for (const TrainedCase& one : cases) {
    if (one.family != GetParam()) continue;
    const Sizes& sizes = one.sizes;
    SCOPED_TRACE(name_of(sizes));
    test::on_layout(layout_of(sizes), [&](ParallelContext& context) {
      TrainedRank rank(context, config, sizes);
      for (int step = 0; step < 3; ++step) expect_near(rank.train(step), wanted[static_cast<size_t>(step)]);
      expect_parameters_of(rank, whole.model, name_of(sizes));
    });
  }
}

// The log-probs of a first step, of replicas with other numbers of micro-batches: a stage of one makes passes without
// rows.
TEST(Layouts, ExpertsOverRanksOfAStageHaveTheBitsOfWholeOnes) {
  const ModelConfig config = four_layers(ModelFamily::kQwen3Moe);
  for (const StageOptions& stages : {StageOptions{}, StageOptions{.virtual_stages = 2}}) {
    std::vector<double> losses;
    for (const int64_t ep : {1, 2}) {
      const Sizes sizes{.tp = 1, .pp = 2, .dp = 2, .stages = stages, .ep = ep};
      test::on_layout(layout_of(sizes), [&](ParallelContext& context) {
        TrainedRank rank(context, config, sizes);
        const double loss = rank.train(0).loss;
        if (context.is_main()) losses.push_back(loss);
      });
    }
    ASSERT_EQ(losses.size(), 2u);
    EXPECT_EQ(losses[0], losses[1]);
  }
}

// Tensor groups {0, 1} {2, 3} {4, 5}, expert groups {0, 1, 2} {3, 4, 5}: passes and copies are of all six.
TEST(Layouts, ExpertGroupsMayEndInsideOfReplicas) {
  ModelConfig config = four_layers(ModelFamily::kMixtral);
  config.num_experts = 6;
  ParallelContext alone;
  TrainedRank whole(alone, config);
  std::vector<Step> wanted;
  for (int step = 0; step < 3; ++step) wanted.push_back(whole.train(step));
  for (const Shared shared : {Shared::kNothing, Shared::kState, Shared::kWeights}) {
    const Sizes sizes{.tp = 2, .pp = 1, .dp = 3, .ep = 3, .shared = shared};
    const TemporaryDirectory dir;
    test::on_layout(layout_of(sizes), [&](ParallelContext& context) {
      TrainedRank rank(context, config, sizes);
      const auto manager = rank.checkpoints(dir.path());
      for (int step = 0; step < 2; ++step) expect_near(rank.train(step), wanted[static_cast<size_t>(step)]);
      manager->save(2, rank.model, rank.optimizer, {{"a", 1}}, {}, "b: 2\n");
      expect_near(rank.train(2), wanted[2]);
      expect_parameters_of(rank, whole.model, name_of(sizes));
    });
    ParallelContext again;
    TrainedRank loaded(again, config);
    const auto manager = loaded.checkpoints(dir.path());
    ASSERT_TRUE(manager->load_latest(loaded.model, loaded.optimizer).has_value());
    expect_near(loaded.train(2), wanted[2]);
    expect_parameters_of(loaded, whole.model, name_of(sizes) + ", then one rank");
  }
}

// From three replicas on a sum's bits follow from its order: that of the two copies must be one.
TEST(TiedEmbedding, ItsTwoCopiesStayEqualOverThreeReplicas) {
  const ModelConfig config = four_layers(ModelFamily::kQwen3);
  ASSERT_TRUE(config.tie_word_embeddings);
  std::vector<at::Tensor> copies(6);
  test::on_layout(layout_of({1, 2, 3}), [&](ParallelContext& context) {
    TrainedRank rank(context, config);
    for (int step = 0; step < 3; ++step) (void)rank.train(step);
    copies[static_cast<size_t>(context.rank())] = rank.model.find("model.embed_tokens.weight")->tensor.detach().clone();
  });
  for (size_t replica = 0; replica < 3; ++replica) EXPECT_TRUE(same_bits(copies[replica], copies[replica + 3]));
}

// Whether a state that one has saved is loaded under another: one of each kind is enough where pipelines are among
// them, or experts, of which there are many.
bool meet(const ModelConfig& config, const Sizes& saved, const Sizes& loaded) {
  const Sizes one{1, 1, 1}, both{2, 2, 1};
  if (saved == loaded) return true;
  // Of mixtures each of these under each: expert groups of replicas, of tensor ranks of two, of a stage's shared ones.
  const std::vector<Sizes> far_apart = {one,
                                        {.tp = 1, .pp = 1, .dp = 8, .ep = 4},
                                        {.tp = 2, .pp = 1, .dp = 2, .ep = 4},
                                        {.tp = 2, .pp = 2, .dp = 2, .ep = 2, .etp = 2}};
  const auto is_one_of = [&](const Sizes& sizes) {
    return std::find(far_apart.begin(), far_apart.end(), sizes) != far_apart.end();
  };
  if (config.num_experts > 0 && is_one_of(saved) && is_one_of(loaded)) return true;
  // Where another sharing than today's is among them: one rank and four ranks of one stage.
  if (saved.shared != Shared::kState || loaded.shared != Shared::kState) {
    const auto stands_for_all = [&](const Sizes& sizes) {
      return sizes == one || (sizes.pp == 1 && sizes.cp == 1 && sizes.tp * sizes.dp == 4);
    };
    const bool alone = saved == one || loaded == one;
    return stands_for_all(saved) && stands_for_all(loaded) &&
           (alone || (config.num_experts == 0 && saved.tp == loaded.tp));
  }
  if (loaded == both) return true;
  if (saved.pp > 1) return loaded == one;
  if (loaded.pp > 1) return false;
  const auto stands_for_all = [&](const Sizes& sizes) {
    return sizes == one || (sizes.tp == 2 && sizes.dp == 2 && (sizes.ep == 4 || sizes.etp == 2));
  };
  return config.num_experts == 0 || stands_for_all(saved) || stands_for_all(loaded);
}

struct LoadedCase {
  Sizes saved, loaded;
};

// Each trait of a layout that saves with each of one that loads, and each where the two are the same.
std::set<std::string> shown_by_loading(const LoadedCase& one) {
  std::set<std::string> shown;
  for (const std::string& saved : traits_of(one.saved)) {
    if (one.saved == one.loaded) shown.insert(saved + " again");
    for (const std::string& loaded : traits_of(one.loaded)) shown.insert(saved + " under " + loaded);
  }
  return shown;
}

std::vector<LoadedCase> loaded_cases(const ModelConfig& config) {
  std::vector<LoadedCase> cases;
  for (const Sizes& saved : layouts_for(config)) {
    for (const Sizes& loaded : layouts_for(config)) {
      if (meet(config, saved, loaded)) cases.push_back({saved, loaded});
    }
  }
  return test::whole_matrix() ? cases : test::covering<LoadedCase>(cases, shown_by_loading);
}

// Saved under each, loaded under others.
class GoingOn : public ::testing::TestWithParam<ModelFamily> {};
INSTANTIATE_TEST_SUITE_P(Layouts, GoingOn, ::testing::Values(ModelFamily::kQwen3, ModelFamily::kQwen3Moe),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(GoingOn, WhereAnotherHasStopped) {
  const ModelConfig config = four_layers(GetParam());
  const std::vector<LoadedCase> cases = loaded_cases(config);
  const int steps = test::whole_matrix() ? 2 : 1;  // before the save
  // What is not disturbed. Its weights after the save follow from the moments that were saved, and so show them.
  ParallelContext alone;
  TrainedRank whole(alone, config);
  for (int step = 0; step <= steps; ++step) (void)whole.train(step);
  for (const Sizes& sizes : layouts_for(config)) {
    if (std::none_of(cases.begin(), cases.end(), [&](const auto& one) { return one.saved == sizes; })) continue;
    const TemporaryDirectory dir;
    Step next;  // of the undisturbed run
    std::vector<at::Tensor> weights(static_cast<size_t>(layout_of(sizes).world()));
    test::on_layout(layout_of(sizes), [&](ParallelContext& context) {
      TrainedRank rank(context, config, sizes);
      const auto manager = rank.checkpoints(dir.path());
      for (int step = 0; step < steps; ++step) (void)rank.train(step);
      manager->save(steps, rank.model, rank.optimizer, {{"a", 1}}, {}, "b: 2\n");
      const Step following = rank.train(steps);
      if (context.is_main()) next = following;
      weights[static_cast<size_t>(context.rank())] = rank.model.flat_parameters().detach().clone();
    });
    const fs::path policy = dir.path() / ("step_" + std::to_string(steps)) / "policy";
    Model exported(config, {});
    load_parameters(exported, policy / "weights");
    for (const LoadedCase& one : cases) {
      if (!(one.saved == sizes)) continue;
      const Sizes& other = one.loaded;
      SCOPED_TRACE(name_of(sizes) + ", then " + name_of(other));
      test::on_layout(layout_of(other), [&](ParallelContext& context) {
        TrainedRank rank(context, config, other);
        const auto manager = rank.checkpoints(dir.path());
        const auto found = manager->load_latest(rank.model, rank.optimizer);
        ASSERT_TRUE(found);
        EXPECT_EQ(found->step, steps);
        EXPECT_EQ(rank.optimizer.steps_done(), steps);
        for (const Parameter& parameter : rank.model.parameters()) {
          EXPECT_TRUE(
              same_bits(parameter.tensor.detach(), part_of(parameter, exported.find(parameter.name)->tensor.detach())))
              << parameter.name;
        }
        expect_near(rank.train(steps), next);
        expect_parameters_of(rank, whole.model, name_of(sizes) + ", then " + name_of(other));
        if (other == sizes) {
          EXPECT_TRUE(same_bits(rank.model.flat_parameters().detach(), weights[static_cast<size_t>(context.rank())]));
        }
      });
    }
  }
}

TEST(Layouts, AStateThatLacksAPieceSaysWhich) {
  const ModelConfig config = eight_heads(ModelFamily::kLlama, false);
  const TemporaryDirectory dir;
  test::on_layout(layout_of({2, 1, 1}), [&](ParallelContext& context) {
    TrainedRank rank(context, config);
    (void)rank.train(0);
    rank.optimizer.save(dir.path());
  });
  // The second rank's file in the first one's place: of cut parameters the first slice is missing.
  fs::copy_file(dir.path() / "rank_00001.safetensors", dir.path() / "rank_00000.safetensors",
                fs::copy_options::overwrite_existing);
  ParallelContext alone;
  TrainedRank rank(alone, config);
  const std::string error = test::error_of([&] { rank.optimizer.load(dir.path()); });
  EXPECT_NE(error.find("of model.embed_tokens.weight (slice 0 to 61 of dimension 0) element 0 is the first"),
            std::string::npos)
      << error;
}

}  // namespace
}  // namespace trireme
