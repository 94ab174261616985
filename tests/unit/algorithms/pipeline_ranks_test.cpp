// The same recorded rollout under pipeline stages: loss, gradients and weights of one rank.
#include <gtest/gtest.h>

#include "tests/unit/algorithms/recorded_rollout.h"

namespace trireme {
namespace {

using test::Outcome;
using test::run;
using test::RunSetup;

void expect_same_answer(const Outcome& many, const Outcome& one, const std::string& where) {
  test::expect_answer_of_one(many, one, where);
  EXPECT_EQ(many.result.metrics.size(), one.result.metrics.size()) << where;
  EXPECT_EQ(many.result.compared_tokens, one.result.compared_tokens) << where;
  EXPECT_EQ(many.result.mismatched_tokens, one.result.mismatched_tokens) << where;
}

// The same under pipeline stages, one or several pieces each; packed, dynamic, shared prompts, KL in loss or rewards,
// sequence-level ratios.
TEST(Ranks, PipelineRanksGiveTheAnswerOfOne) {
  struct Recipe {
    const char* name;
    ModelFamily family;
    bool dynamic;
    std::function<void(Config&)> change;
  };
  const auto in_rewards = [](Config& c) {
    c.grpo.adv_estimator.name = AdvantageEstimator::kReinforcePlusPlus;
    c.loss_fn.reference_policy_kl_penalty = 0.3;
    c.loss_fn.use_kl_in_reward = true;
  };
  const std::vector<Recipe> recipes = {
      {"packed, KL", ModelFamily::kLlama, false, [](Config& c) { c.policy.sequence_packing.train_mb_tokens = 64; }},
      {"dynamic", ModelFamily::kQwen2, true, {}},
      {"KL in rewards, tied", ModelFamily::kQwen3, true, in_rewards},
      {"GSPO, shared prompts, tied", ModelFamily::kQwen3, false, [](Config& c) {
         c.policy.sequence_packing.share_prompts = true;
         c.policy.sequence_packing.train_mb_tokens = 128;
         c.loss_fn.sequence_level_importance_ratios = true;
         c.loss_fn.token_level_loss = false;
         c.loss_fn.reference_policy_kl_penalty = 0;
       }}};
  struct Split {
    int world;
    int64_t tp, pp;
    StageOptions stages;
  };
  const std::vector<Split> splits = {{2, 1, 2, {}},
                                     {4, 1, 4, {}},
                                     {4, 1, 2, {}},
                                     {4, 2, 2, {.virtual_stages = 2}},
                                     {3, 1, 3, {.first_layers = 1, .last_layers = 1}}};
  for (const Recipe& recipe : recipes) {
    RunSetup setup;
    setup.family = recipe.family;
    setup.layers = 4;
    const auto change = [&recipe](Config& c) {
      test::take_three_steps(c);
      if (recipe.change) recipe.change(c);
    };
    const Outcome one = run(1, recipe.dynamic, change, setup);
    ASSERT_EQ(one.result.optimizer_steps, 3) << recipe.name;
    for (const Split& split : splits) {
      setup.tp = split.tp;
      setup.pp = split.pp;
      setup.stages = split.stages;
      expect_same_answer(run(split.world, recipe.dynamic, change, setup), one,
                         std::string(recipe.name) + ", " + std::to_string(split.world) + " ranks, tp " +
                             std::to_string(split.tp) + ", pp " + std::to_string(split.pp));
    }
  }
}

// One micro-batch for four stages, and, of two replicas, none for one.
TEST(Ranks, PipelinesWithFewMicroBatchesGiveTheAnswerOfOne) {
  for (const int64_t batch : {12, 1}) {
    const auto few = [batch](Config& c) {
      c.policy.megatron_cfg.enabled = true;
      c.policy.megatron_cfg.optimizer.lr = 1e-4;
      c.policy.train_global_batch_size = batch;
      c.policy.sequence_packing.train_mb_tokens = 2000;
      derive_defaults(c);
    };
    RunSetup setup;
    setup.layers = 4;
    setup.bucket_elements = 1000;
    const Outcome one = run(1, false, few, setup);
    setup.pp = 4;
    if (batch == 12) expect_same_answer(run(4, false, few, setup), one, "one micro-batch");
    setup.pp = 2;
    expect_same_answer(run(4, false, few, setup), one, "batches of " + std::to_string(batch));
  }
}

// What begins to be reduced while the last micro-batch is differentiated is whole by then, on every stage.
TEST(Ranks, PipelinesReduceBesideTheLastBackward) {
  const auto overlapped = [](bool on) {
    return [on](Config& c) {
      c.policy.megatron_cfg.enabled = true;
      c.policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce = on;
      c.policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather = on;
      c.policy.megatron_cfg.optimizer.lr = 1e-3;
      c.policy.sequence_packing.train_mb_tokens = 64;
      derive_defaults(c);
    };
  };
  for (const int64_t virtual_stages : {1, 2}) {
    RunSetup setup;
    setup.layers = 4;
    setup.pp = 2;
    setup.bucket_elements = 1000;
    setup.stages.virtual_stages = virtual_stages;
    const Outcome after = run(4, false, overlapped(false), setup), beside = run(4, false, overlapped(true), setup);
    ASSERT_TRUE(beside.weights.defined());
    EXPECT_EQ(beside.result.buckets_reduced_in_backward > 0, virtual_stages == 1);
    EXPECT_EQ(after.result.buckets_reduced_in_backward, 0);
    EXPECT_TRUE(at::equal(beside.weights, after.weights));
    EXPECT_TRUE(at::equal(beside.moments, after.moments));
  }
}

}  // namespace
}  // namespace trireme
