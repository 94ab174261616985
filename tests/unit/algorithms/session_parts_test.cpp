// What a process finds out about its ranks and models before it loads any.
#include "trainer/algorithms/session_parts.h"

#include <gtest/gtest.h>

#include "tests/unit/errors.h"
#include "tests/unit/model/tiny.h"

namespace trireme {
namespace {

TEST(SessionParts, TheDevicesAreToldOfEveryModelOfTheProcess) {
  const Config both =
      load_config_text("", {"algorithm=ppo", "cluster.gpus_per_node=2", "value.megatron_cfg.enabled=true",
                            "value.megatron_cfg.pipeline_model_parallel_size=2"});
  RendezvousOptions ranks;
  ranks.world_size = 2;
  const Layout actor{.dp = 2}, critic{.pp = 2};
  EXPECT_EQ(layouts_of_models(both, actor, ranks), (std::vector<Layout>{actor, critic}));
  ranks.critic_ranks = 2;  // of its own: no model of this process
  EXPECT_EQ(layouts_of_models(both, actor, ranks), std::vector<Layout>{actor});
  ranks.of_critic = true;
  EXPECT_EQ(layouts_of_models(both, critic, ranks), std::vector<Layout>{critic});
  // Generation over tensor ranks.
  const Config another = load_config_text("", {"cluster.gpus_per_node=2", "policy.generation.tensor_parallel_size=2"});
  EXPECT_EQ(layouts_of_models(another, actor, {}), (std::vector<Layout>{actor, {.tp = 2}}));
}

// As many ranks as were started on the node count, whatever the configuration says.
TEST(SessionParts, TensorRanksShareANode) {
  const Config config = load_config_text("", {"cluster.gpus_per_node=4", "policy.megatron_cfg.enabled=true",
                                              "policy.megatron_cfg.tensor_model_parallel_size=4"});
  RendezvousOptions ranks;
  EXPECT_EQ(ranks_of_node(config, ranks), 4);
  ranks.local_world = 2;
  EXPECT_EQ(ranks_of_node(config, ranks), 2);
  ModelConfig model = test::tiny_config({.layers = 2});
  model.num_heads = model.num_kv_heads = 4;
  model.intermediate_size = 64;
  const Layout layout{.tp = 4};
  EXPECT_EQ(split_problem(config, "policy", model, "model", layout, 4), std::nullopt);
  const std::string problem = split_problem(config, "policy", model, "model", layout, 2).value_or("");
  EXPECT_MENTIONS(problem, "policy.megatron_cfg.tensor_model_parallel_size: the model of model cannot be split so: ");
  EXPECT_MENTIONS(problem, "tp 4 does not divide the 2 GPUs of a node (tensor parallel ranks must share a node)");
}

// By its whole key, of policy or value.
TEST(SessionParts, UnevenStagesAreRefusedByTheirKeys) {
  const Config config = load_config_text("", {"cluster.gpus_per_node=2", "policy.megatron_cfg.enabled=true",
                                              "policy.megatron_cfg.pipeline_model_parallel_size=2",
                                              "policy.megatron_cfg.num_layers_in_last_pipeline_stage=3"});
  const ModelConfig model = test::tiny_config({.layers = 2});
  for (const std::string section : {"policy", "value"}) {
    const std::string problem = split_problem(config, section, model, "model", {.pp = 2}, 2).value_or("");
    EXPECT_MENTIONS(problem, "the model of model cannot be split so: " + section +
                                 ".megatron_cfg.num_layers_in_last_pipeline_stage 3 is no number of layers");
  }
}

}  // namespace
}  // namespace trireme
