// What refuses a run without a device: sizes that do not fit the model, and what no rank could do.
#include "trainer/algorithms/model_problem.h"

#include <gtest/gtest.h>

#include "tests/unit/errors.h"

namespace trireme {
namespace {

// Of a Megatron back-end with these keys, on as many devices as are asked for at most.
Config with(const std::vector<std::string>& keys) {
  std::vector<std::string> overrides = {"cluster.gpus_per_node=8", "policy.megatron_cfg.enabled=true"};
  for (const std::string& key : keys) overrides.push_back("policy." + key);
  return load_config_text("", overrides);
}

std::string problem_of(const std::vector<std::string>& keys, const std::string& shape, const ModelRanks& ranks,
                       const std::string& section = "policy") {
  return model_problem(with(keys), section, *known_model_shape(shape), "a model", ranks).value_or("");
}

TEST(ModelProblem, TensorRanksShareANode) {
  const std::vector<std::string> four = {"megatron_cfg.tensor_model_parallel_size=4"};
  EXPECT_EQ(problem_of(four, "qwen3-1.7b", {{.tp = 4}, 4}), "");
  EXPECT_EQ(problem_of(four, "qwen3-1.7b", {{.tp = 4}, 2}),
            "policy.megatron_cfg.tensor_model_parallel_size: the model of a model cannot be split so: tp 4 does not "
            "divide the 2 GPUs of a node (tensor parallel ranks must share a node); legal values of tp here: 1, 2");
}

// By its whole key, of policy or value.
TEST(ModelProblem, UnevenStagesAreRefusedByTheirKeys) {
  for (const std::string section : {"policy", "value"}) {
    EXPECT_MENTIONS(
        problem_of({"megatron_cfg.num_layers_in_last_pipeline_stage=29"}, "qwen3-1.7b", {{.pp = 2}}, section),
        "the model of a model cannot be split so: " + section +
            ".megatron_cfg.num_layers_in_last_pipeline_stage 29 is no number of layers of a model that has "
            "28");
  }
}

TEST(ModelProblem, VirtualStagesShareAHost) {
  const std::vector<std::string> two = {"megatron_cfg.virtual_pipeline_model_parallel_size=2"};
  const Layout layout{.tp = 2, .dp = 2, .pp = 2};  // a stage is ranks 0 to 3, the other 4 to 7
  EXPECT_EQ(problem_of(two, "qwen3-1.7b", {layout, 4, /*gpus=*/true}, "value"),
            "value.megatron_cfg.virtual_pipeline_model_parallel_size is 2, but the stages of "
            "tp=2,cp=1,ep=1,dp=2,pp=2,etp=1 are on several nodes of 4 GPUs: virtual stages need GPUs that see each "
            "other's memory, as those of one host over NVLink; set it to 1");
  EXPECT_EQ(problem_of(two, "qwen3-1.7b", {layout, 4, /*gpus=*/false}), "");
  EXPECT_EQ(problem_of(two, "qwen3-1.7b", {layout, 8, /*gpus=*/true}), "");
  EXPECT_EQ(problem_of(two, "qwen3-1.7b", {layout, 0, /*gpus=*/true}), "");
  EXPECT_EQ(problem_of({}, "qwen3-1.7b", {layout, 4, /*gpus=*/true}), "");
}

TEST(ModelProblem, StagesShareNoGradients) {
  const std::vector<std::string> keys = {
      "megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy=optim_grads"};
  EXPECT_MENTIONS(problem_of(keys, "qwen3-1.7b", {{.dp = 2, .pp = 2}}), "share no state over 2 pipeline stages");
  EXPECT_EQ(problem_of(keys, "qwen3-1.7b", {{.dp = 2, .pp = 2}, 0, false, StateSharding::kOptimizer}), "");
  EXPECT_EQ(problem_of(keys, "qwen3-1.7b", {{.dp = 4}}), "");
}

TEST(ModelProblem, OfExperts) {
  const std::string mixture = "Qwen3-30B-A3B";
  const ModelRanks ranks{{.ep = 4, .dp = 4}};
  const std::string loss = "megatron_cfg.moe_router_load_balancing_type=aux_loss";
  EXPECT_EQ(problem_of({}, mixture, ranks), "");
  EXPECT_EQ(problem_of({loss}, mixture, ranks, "value"),
            "value.megatron_cfg.moe_router_load_balancing_type is aux_loss, but value.megatron_cfg.freeze_moe_router "
            "keeps routers from being trained: set one of them");
  EXPECT_EQ(problem_of({loss, "megatron_cfg.freeze_moe_router=false"}, mixture, ranks), "");
  EXPECT_MENTIONS(problem_of({"megatron_cfg.moe_router_bias_update_rate=0.001"}, mixture, ranks),
                  "policy.megatron_cfg.moe_router_bias_update_rate above 0 is not supported");
  EXPECT_MENTIONS(problem_of({"moe_combine_blocks=2"}, mixture, ranks),
                  "cannot be split so: ep 4 does not divide the 2 blocks");
  EXPECT_MENTIONS(problem_of({"moe_combine_blocks=3"}, mixture, ranks, "value"), "so: value.moe_combine_blocks is 3");
  // A dense model has none of it.
  EXPECT_EQ(problem_of({loss, "megatron_cfg.moe_router_bias_update_rate=0.001"}, "qwen3-1.7b", {{.dp = 4}}), "");
}

TEST(ModelProblem, ABalancingLossThatDoesNothingIsAWarning) {
  const auto warning = [](const std::vector<std::string>& keys, const std::string& shape) {
    return balance_warning(with(keys), "policy", *known_model_shape(shape), "a model").value_or("");
  };
  const std::string dense = "qwen3-1.7b", mixture = "Qwen3-30B-A3B", router = "policy.megatron_cfg.moe_router_",
                    loss = "megatron_cfg.moe_router_load_balancing_type=aux_loss",
                    weight = "megatron_cfg.moe_aux_loss_coeff=0.01";
  EXPECT_EQ(warning({}, dense), "");
  EXPECT_EQ(warning({loss, weight}, dense),
            router +
                "load_balancing_type is aux_loss, moe_aux_loss_coeff 0.01, which have no effect: the model of a "
                "model has no experts to balance");
  EXPECT_MENTIONS(warning({loss}, dense), "have no effect");
  EXPECT_MENTIONS(warning({weight}, dense), "have no effect");
  EXPECT_EQ(warning({}, mixture), "");
  EXPECT_EQ(warning({loss, weight}, mixture), "");
  EXPECT_EQ(warning({weight}, mixture), "experts are not balanced: " + router +
                                            "load_balancing_type is none, moe_aux_loss_coeff 0.01; a loss takes both");
  EXPECT_MENTIONS(warning({loss}, mixture), "experts are not balanced");
  // Of a back-end that is off nothing is asked.
  const Config off = load_config_text("", {"policy." + loss, "policy." + weight});
  EXPECT_EQ(balance_warning(off, "policy", *known_model_shape(dense), "a model"), std::nullopt);
}

TEST(ModelProblem, APolicyGeneratesToo) {
  const ModelShape mixture = *known_model_shape("Qwen3-30B-A3B");
  const Config config = with({"generation.tensor_parallel_size=2"});
  EXPECT_EQ(model_problem(config, "policy", mixture, "a model", {{.dp = 8}}), std::nullopt);
  EXPECT_MENTIONS(policy_problem(config, mixture, "a model", {{.dp = 8}}).value_or(""),
                  "policy.generation.tensor_parallel_size 2: the model of a model has 128 experts");
}

}  // namespace
}  // namespace trireme
