#include "trainer/cli/role_layout.h"

#include <gtest/gtest.h>

#include "tests/unit/errors.h"

namespace trireme {
namespace {

using test::user_error_of;

TEST(RoleLayout, TheConfigurationSaysWhatTheRLJobSaysOrNothing) {
  const auto refusal = [](const ParallelSizes& sizes, const Layout& layout, const std::string& role) {
    return user_error_of([&] { check_layout_agrees(sizes, layout, role); });
  };
  EXPECT_EQ(refusal({}, {.tp = 4, .cp = 2, .ep = 8, .dp = 3, .pp = 2, .etp = 2}, "actor"), "");
  EXPECT_EQ(refusal({.tensor = 4, .pipeline = 2, .context = 2, .expert = 8, .expert_tensor = 2},
                    {.tp = 4, .cp = 2, .ep = 8, .dp = 3, .pp = 2, .etp = 2}, "actor"),
            "");
  EXPECT_EQ(refusal({.tensor = 2}, {}, "actor"),
            "the configuration says tp 2, but the RLJob (--layout) says 1; the RLJob decides: set "
            "spec.roles.actor.parallelism.tp or change the configuration");
  EXPECT_EQ(refusal({.tensor = 4, .pipeline = 4}, {.tp = 4, .pp = 2}, "critic"),
            "the configuration says pp 4 of the critic, but the RLJob (--layout) says 2; the RLJob decides: set "
            "spec.roles.critic.parallelism.pp or change the configuration");
  EXPECT_MENTIONS(refusal({.context = 2}, {}, "actor"), "actor.parallelism.cp");
  EXPECT_MENTIONS(refusal({.expert = 2}, {}, "actor"), "actor.parallelism.ep");
  EXPECT_MENTIONS(refusal({.expert_tensor = 2}, {}, "actor"), "actor.parallelism.etp");
}

TEST(RoleLayout, AnEngineHasTheRolesSizesWhereItSaysSome) {
  const auto refusal = [](int64_t tensor, int64_t expert, const Parallelism& engine) {
    Config config;
    config.policy.generation.tensor_parallel_size = tensor;
    config.policy.generation.expert_parallel_size = expert;
    return user_error_of([&] { check_engine_agrees(config, engine); });
  };
  EXPECT_EQ(refusal(0, 0, {}), "");
  EXPECT_EQ(refusal(4, 2, {}), "");
  EXPECT_EQ(refusal(4, 2, {.tp = 4, .ep = 2}), "");
  EXPECT_EQ(refusal(2, 0, {.tp = 4}),
            "the configuration says tp 2 of an engine, but the RLJob says 4; the RLJob decides: set "
            "spec.roles.generation.parallelism.tp or change the configuration");
  EXPECT_MENTIONS(refusal(1, 1, {.tp = 4}), "says tp 1 of an engine, but the RLJob says 4");
  EXPECT_MENTIONS(refusal(4, 4, {.tp = 4, .ep = 2}), "spec.roles.generation.parallelism.ep");
}

TEST(RoleLayout, WhoGeneratesIsSaidTheSameTwice) {
  Config config;
  const auto refusal = [&](bool has_role) { return user_error_of([&] { check_generation_role(config, has_role); }); };
  EXPECT_EQ(refusal(false), "");
  EXPECT_MENTIONS(refusal(true), "the RLJob has pods that generate (spec.roles.generation)");
  config.policy.generation.colocated.enabled = false;
  EXPECT_EQ(refusal(true), "");
  EXPECT_MENTIONS(refusal(false), "the RLJob has no pods that generate: add spec.roles.generation");
}

}  // namespace
}  // namespace trireme
