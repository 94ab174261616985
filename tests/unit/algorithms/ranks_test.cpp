// The same recorded rollout on 1, 2 and 4 ranks (threads with a communicator each): loss and every gradient agree.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tests/unit/algorithms/recorded_rollout.h"

namespace trireme {
namespace {

using test::expect_answer_of_one;
using test::Outcome;
using test::run;
using test::RunSetup;

TEST(Ranks, OneTwoAndFourGiveTheSameLossAndGradients) {
  for (const bool dynamic : {false, true}) {
    const Outcome one = run(1, dynamic);
    EXPECT_EQ(one.result.optimizer_steps, 2);
    ASSERT_TRUE(one.moments.defined());
    const double largest = one.moments.abs().max().item<double>();
    EXPECT_GT(largest, 0);
    for (const int world : {2, 4}) {
      const Outcome many = run(world, dynamic);
      ASSERT_TRUE(many.weights.defined());
      EXPECT_NEAR(many.result.metrics.at("loss"), one.result.metrics.at("loss"),
                  1e-5 * std::max(1.0, std::abs(one.result.metrics.at("loss"))));
      EXPECT_NEAR(many.result.metrics.at("grad_norm"), one.result.metrics.at("grad_norm"),
                  1e-5 * one.result.metrics.at("grad_norm"));
      EXPECT_LE((many.moments.narrow(0, 0, one.weights.numel()) - one.moments.narrow(0, 0, one.weights.numel()))
                    .abs()
                    .max()
                    .item<double>(),
                1e-5 * largest)
          << world << " ranks";
      EXPECT_EQ(many.result.metrics.at("global_valid_toks"), one.result.metrics.at("global_valid_toks"));
    }
  }
}

std::function<void(Config&)> in_three_steps(const std::function<void(Config&)>& change) {
  return [change](Config& config) {
    test::take_three_steps(config);
    if (change) change(config);
  };
}

// What a recipe may ask for, with each family: the answer of one rank, whoever holds which slice.
TEST(Ranks, TensorRanksGiveTheAnswerOfOne) {
  struct Recipe {
    const char* name;
    ModelFamily family;
    bool dynamic;
    std::function<void(Config&)> change;
  };
  const std::vector<Recipe> recipes = {{"packed, KL", ModelFamily::kLlama, false, {}},
                                       {"dynamic", ModelFamily::kQwen2, true, {}},
                                       {"shared prompts", ModelFamily::kQwen3, false,
                                        [](Config& c) {
                                          c.policy.sequence_packing.share_prompts = true;
                                          c.policy.sequence_packing.train_mb_tokens = 128;
                                        }},
                                       {"GSPO", ModelFamily::kQwen3, false, [](Config& c) {
                                          c.loss_fn.sequence_level_importance_ratios = true;
                                          c.loss_fn.token_level_loss = false;
                                          c.loss_fn.reference_policy_kl_penalty = 0;
                                        }}};
  for (const Recipe& recipe : recipes) {
    RunSetup setup;
    setup.family = recipe.family;
    const auto change = in_three_steps(recipe.change);
    const Outcome one = run(1, recipe.dynamic, change, setup);
    ASSERT_EQ(one.result.optimizer_steps, 3) << recipe.name;
    for (const auto& [world, tp] : {std::pair{2, 2}, {4, 4}, {4, 2}, {8, 4}}) {
      setup.tp = tp;
      const Outcome many = run(world, recipe.dynamic, change, setup);
      const std::string where =
          std::string(recipe.name) + ", " + std::to_string(world) + " ranks, tp " + std::to_string(tp);
      expect_answer_of_one(many, one, where);
    }
  }
}

// Whole micro-batches go to context ranks, whose losses see whole sequences: the answer of one rank, also where prompts
// are shared over ranks, and where most ranks have no rows.
TEST(Ranks, ContextRanksGiveTheAnswerOfOne) {
  struct Recipe {
    const char* name;
    bool dynamic;
    std::function<void(Config&)> change;
  };
  const std::vector<Recipe> recipes = {{"packed, KL", false, {}},
                                       {"one sample each", true,
                                        [](Config& c) {
                                          c.policy.dynamic_batching.enabled = false;
                                          c.policy.train_micro_batch_size = 1;
                                        }},
                                       {"shared prompts", false,
                                        [](Config& c) {
                                          c.policy.sequence_packing.share_prompts = true;
                                          c.policy.sequence_packing.train_mb_tokens = 128;
                                        }},
                                       {"GSPO", false, [](Config& c) {
                                          c.loss_fn.sequence_level_importance_ratios = true;
                                          c.loss_fn.token_level_loss = false;
                                          c.loss_fn.reference_policy_kl_penalty = 0;
                                        }}};
  for (const Recipe& recipe : recipes) {
    const auto change = in_three_steps(recipe.change);
    const Outcome one = run(1, recipe.dynamic, change);
    ASSERT_EQ(one.result.optimizer_steps, 3) << recipe.name;
    struct Sizes {
      int world, tp, pp, cp;
    };
    for (const auto& [world, tp, pp, cp] :
         {Sizes{2, 1, 1, 2}, {4, 1, 1, 2}, {4, 2, 1, 2}, {4, 1, 2, 2}, {4, 1, 1, 4}}) {
      RunSetup setup;
      setup.tp = tp;
      setup.pp = pp;
      setup.cp = cp;
      const Outcome many = run(world, recipe.dynamic, change, setup);
      const std::string where = std::string(recipe.name) + ", " + std::to_string(world) + " ranks, tp " +
                                std::to_string(tp) + " pp " + std::to_string(pp) + " cp " + std::to_string(cp);
      expect_answer_of_one(many, one, where);
      EXPECT_EQ(many.result.compared_tokens, one.result.compared_tokens) << where;
    }
  }
}

// Whatever of the training state ranks share: the answer of one rank, also where some have fewer micro-batches than
// others, or none.
TEST(Ranks, SharedStateGivesTheAnswerOfOne) {
  struct Recipe {
    const char* name;
    std::function<void(Config&)> change;
  };
  const std::vector<Recipe> recipes = {{"packed, KL", {}},
                                       {"four samples a step",
                                        [](Config& c) {
                                          c.policy.train_global_batch_size = 4;
                                          c.policy.sequence_packing.train_mb_tokens = 64;
                                        }},
                                       {"everything again", [](Config& c) {
                                          c.policy.activation_checkpointing = true;
                                          c.loss_fn.token_level_loss = false;
                                        }}};
  struct Sizes {
    int world, tp, pp, cp;
  };
  for (const Recipe& recipe : recipes) {
    const auto change = in_three_steps(recipe.change);
    const Outcome one = run(1, false, change);
    ASSERT_GE(one.result.optimizer_steps, 3) << recipe.name;
    for (const StateSharding shared : {StateSharding::kNothing, StateSharding::kGradients, StateSharding::kWeights}) {
      const bool stages = shared == StateSharding::kNothing;
      for (const auto& [world, tp, pp, cp] :
           {Sizes{2, 1, 1, 1}, {4, 1, 1, 1}, {4, 2, 1, 1}, {4, 1, 1, 2}, {4, 1, 2, 1}}) {
        if (pp > 1 && !stages) continue;
        RunSetup setup;
        setup.tp = tp;
        setup.pp = pp;
        setup.cp = cp;
        setup.shared = shared;
        const Outcome many = run(world, false, change, setup);
        const std::string where = std::string(recipe.name) + ", " + std::to_string(world) + " ranks, tp " +
                                  std::to_string(tp) + " pp " + std::to_string(pp) + " cp " + std::to_string(cp) +
                                  ", sharing " + std::to_string(static_cast<int>(shared));
        expect_answer_of_one(many, one, where);
        EXPECT_EQ(many.result.compared_tokens, one.result.compared_tokens) << where;
      }
    }
  }
}

}  // namespace
}  // namespace trireme
