// What a process finds out about its ranks and models before it loads any.
#include "trainer/algorithms/session_parts.h"

#include <gtest/gtest.h>

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
TEST(SessionParts, RanksOfANodeAreThoseThatWereStarted) {
  const Config config = load_config_text("", {"cluster.gpus_per_node=4"});
  RendezvousOptions ranks;
  EXPECT_EQ(ranks_of_node(config, ranks), 4);
  ranks.local_world = 2;
  EXPECT_EQ(ranks_of_node(config, ranks), 2);
}

}  // namespace
}  // namespace trireme
