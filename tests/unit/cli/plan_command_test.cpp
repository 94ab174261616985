// trireme plan of configurations: whether it says what a run would.
#include "tests/unit/cli/plan_command.h"

#include <gtest/gtest.h>

#include "tests/unit/errors.h"

namespace trireme {
namespace {

// The line that says whether this version can run a recipe.
std::string verdict(const std::string& recipe, std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(), {"--config", "configs/" + recipe + ".yaml"});
  const std::string text = test::plan(overrides);
  const size_t begin = text.find("\nthis version ");
  if (begin == std::string::npos) return "no line in " + text;
  return text.substr(begin + 1, text.find('\n', begin + 1) - begin - 1);
}

TEST(PlanCommand, VirtualStagesBetweenHostsAreRefusedAsByARun) {
  const std::string two = "policy.megatron_cfg.virtual_pipeline_model_parallel_size=2";
  EXPECT_MENTIONS(verdict("llama3.1_70b", {}), "can run it");
  EXPECT_MENTIONS(verdict("llama3.1_70b", {two}),
                  "cannot run it: policy.megatron_cfg.virtual_pipeline_model_parallel_size is 2, but the stages of "
                  "tp=4,cp=1,ep=1,dp=4,pp=4,etp=1 are on several nodes of 8 GPUs");
  EXPECT_MENTIONS(verdict("llama3.1_70b", {two, "cluster.device=cpu"}), " can run it");
  EXPECT_MENTIONS(verdict("llama3.1_70b", {two, "cluster.num_nodes=1", "cluster.gpus_per_node=16"}), " can run it");
}

TEST(PlanCommand, WhatExpertsCannotIsRefusedAsByARun) {
  const std::string mixture = "qwen3_30b_a3b", router = "policy.megatron_cfg.moe_router_";
  EXPECT_MENTIONS(verdict(mixture, {}), " can run it");
  EXPECT_MENTIONS(verdict(mixture, {router + "load_balancing_type=aux_loss"}),
                  "cannot run it: policy.megatron_cfg.moe_router_load_balancing_type is aux_loss, but policy.");
  EXPECT_MENTIONS(
      verdict(mixture, {router + "load_balancing_type=aux_loss", "policy.megatron_cfg.freeze_moe_router=false"}),
      " can run it");
  EXPECT_MENTIONS(verdict(mixture, {router + "bias_update_rate=0.001"}),
                  "cannot run it: policy.megatron_cfg.moe_router_bias_update_rate above 0");
  EXPECT_MENTIONS(verdict(mixture, {"policy.moe_combine_blocks=4"}), "ep 8 does not divide the 4 blocks");
}

TEST(PlanCommand, ACriticIsJudgedToo) {
  const std::vector<std::string> mixture = {"value.model_name=Qwen/Qwen3-30B-A3B", "value.dtensor_cfg.enabled=false",
                                            "value.megatron_cfg.enabled=true",
                                            "value.megatron_cfg.moe_router_bias_update_rate=0.001"};
  EXPECT_MENTIONS(verdict("ppo_gsm8k_1.5b", {}), " can run it");
  EXPECT_MENTIONS(verdict("ppo_gsm8k_1.5b", mixture),
                  "cannot run it: value.megatron_cfg.moe_router_bias_update_rate above 0");
  std::vector<std::string> apart = mixture;
  apart.insert(apart.begin(), {"--critic-ranks", "4"});
  EXPECT_MENTIONS(verdict("ppo_gsm8k_1.5b", apart), "cannot run it: value.megatron_cfg.moe_router_bias_update_rate");
}

TEST(PlanCommand, LayoutsKeepTheExpertTensorSize) {
  const auto of = [](const std::string& recipe, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"--config", "configs/" + recipe + ".yaml",
                                          "policy.megatron_cfg.expert_tensor_parallel_size=2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return test::plan(arguments);
  };
  const std::string ranking = of("qwen3_30b_a3b", {"--gpus", "16"});
  EXPECT_MENTIONS(ranking, ",etp=2");
  EXPECT_EQ(ranking.find(",etp=1"), std::string::npos) << ranking;
  const std::string chosen =
      of("qwen3_30b_a3b", {"cluster.num_nodes=2", "policy.megatron_cfg.expert_model_parallel_size=auto"});
  EXPECT_MENTIONS(chosen, ",etp=2 is the fastest of ");
  EXPECT_MENTIONS(chosen, ",etp=2 (16 ranks)");
  EXPECT_EQ(chosen.find(",etp=1"), std::string::npos) << chosen;
  EXPECT_EQ(test::user_error_of([&] {
              of("llama3.1_8b", {"--gpus", "8"});
            }),
            "there is no legal layout of 8 ranks with etp 2 (policy.megatron_cfg.expert_tensor_parallel_size)");
}

}  // namespace
}  // namespace trireme
