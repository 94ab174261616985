// trireme plan -f: of an RLJob, by the sizes of its roles, and what of them the trainer would refuse.
#include <gtest/gtest.h>

#include "base/fs.h"
#include "tests/unit/cli/plan_command.h"
#include "tests/unit/errors.h"
#include "trainer/cli/role_layout.h"

namespace trireme {
namespace {

using test::user_error_of;

// What `trireme plan -f` prints of a job: `job` is the manifest's lines below spec.
std::string plan_of(const std::string& job, const std::vector<std::string>& overrides = {}) {
  const TemporaryDirectory dir;
  const std::string file = (dir.path() / "job.yaml").string();
  write_file_atomic(file, "apiVersion: trireme.dev/v1alpha1\nkind: RLJob\nmetadata: {name: planned}\nspec:\n" + job);
  std::vector<std::string> arguments = {"-f", file};
  arguments.insert(arguments.end(), overrides.begin(), overrides.end());
  return test::plan(arguments);
}

// Of an actor on 64 GPUs; the configuration says tp 4 and pp 4.
std::string in_stages(const std::string& parallelism) {
  return "  model: {source: meta-llama/Llama-3.1-70B-Instruct}\n  config: {path: configs/llama3.1_70b.yaml}\n"
         "  roles:\n    actor: {replicas: 8, gpusPerPod: 8, parallelism: " +
         parallelism + "}\n";
}

// PPO with a critic on four GPUs of its own; `overrides` say of value.* how it is split.
std::string with_critic(const std::string& overrides, const std::string& parallelism) {
  return "  algorithm: PPO\n  config:\n    path: configs/ppo_gsm8k_1.5b.yaml\n    overrides: "
         "[policy.generation.colocated.enabled=true, ppo.async_ppo.enabled=false, value.dtensor_cfg.enabled=false" +
         overrides +
         "]\n  roles:\n    actor: {gpusPerPod: 8}\n    critic: {gpusPerPod: 4, parallelism: " + parallelism + "}\n";
}

TEST(PlanOfManifest, ActorsSizesAreRefusedInTheTrainersWords) {
  const auto trainers = [](const Layout& layout) {
    return user_error_of([&] { check_layout_agrees({.tensor = 4, .pipeline = 4}, layout, "actor"); });
  };
  const std::string tensor = trainers({.tp = 8, .pp = 4}), pipeline = trainers({.tp = 4});
  EXPECT_MENTIONS(tensor, "says tp 4");
  EXPECT_EQ(user_error_of([] { plan_of(in_stages("{tp: 8, pp: 4}")); }), tensor);
  EXPECT_EQ(user_error_of([] { plan_of(in_stages("{tp: 4}")); }), pipeline);
  EXPECT_MENTIONS(plan_of(in_stages("{tp: 4, pp: 4}")), "tp=4,cp=1,ep=1,dp=4,pp=4,etp=1 (64 ranks)");
  // Also where only the command says another size.
  EXPECT_MENTIONS(
      user_error_of([] { plan_of(in_stages("{tp: 4, pp: 4}"), {"policy.megatron_cfg.tensor_model_parallel_size=2"}); }),
      "says tp 2, but the RLJob (--layout) says 4");
}

TEST(PlanOfManifest, StagesMayBeUneven) {
  EXPECT_MENTIONS(plan_of("  model: {source: Qwen/Qwen3-235B-A22B}\n  config:\n    path: configs/qwen3_30b_a3b.yaml\n"
                          "    overrides: [policy.megatron_cfg.num_layers_in_first_pipeline_stage=11, "
                          "policy.megatron_cfg.num_layers_in_last_pipeline_stage=11]\n"
                          "  roles:\n    actor: {replicas: 8, gpusPerPod: 8, parallelism: {tp: 2, ep: 8, pp: 8}}\n"),
                  "tp=2,cp=1,ep=8,dp=4,pp=8,etp=1 (64 ranks)");
}

TEST(PlanOfManifest, ACriticOnPodsOfItsOwnHasTheSizesOfItsRole) {
  const std::string split = ", value.megatron_cfg.enabled=true, value.megatron_cfg.tensor_model_parallel_size=2";
  EXPECT_EQ(user_error_of([&] { plan_of(with_critic(split, "{}")); }),
            user_error_of([] { check_layout_agrees({.tensor = 2}, {}, "critic"); }));
  const std::string in_two = "tp=2,cp=1,ep=1,dp=2,pp=1,etp=1 (4 ranks)";
  EXPECT_MENTIONS(plan_of(with_critic(split, "{tp: 2}")), in_two);
  EXPECT_MENTIONS(plan_of(with_critic("", "{tp: 2}")), in_two);
  EXPECT_MENTIONS(plan_of(with_critic("", "{}")), "tp=1,cp=1,ep=1,dp=4,pp=1,etp=1 (4 ranks)");
}

TEST(PlanOfManifest, GenerationIsWhereTheRolesSay) {
  const std::string job =
      "  model: {source: Qwen/Qwen3-32B}\n  config: {path: configs/llama3.1_8b.yaml, "
      "overrides: [policy.generation.colocated.enabled=false]}\n"
      "  roles:\n    actor: {replicas: 2, gpusPerPod: 8, parallelism: {tp: 4, pp: 2}}\n";
  const std::string engines = "    generation: {gpusPerPod: 8, parallelism: {tp: 4}}\n";
  EXPECT_MENTIONS(plan_of(job + engines), "2 engines of 4 devices");
  EXPECT_MENTIONS(
      user_error_of([&] { plan_of(job + engines, {"policy.generation.tensor_parallel_size=2"}); }),
      "says tp 2 of an engine, but the RLJob says 4; the RLJob decides: set spec.roles.generation.parallelism.tp");
  EXPECT_MENTIONS(user_error_of([&] {
                    plan_of(job + "    generation: {gpusPerPod: 8}\n", {"policy.generation.colocated.enabled=true"});
                  }),
                  "policy.generation.colocated.enabled is true: set it to false, or leave the role out");
  // Of a configuration that admission does not see.
  EXPECT_MENTIONS(user_error_of([] {
                    plan_of(
                        "  algorithm: PPO\n  config:\n    path: configs/ppo_gsm8k_1.5b.yaml\n"
                        "    overrides: [policy.generation.colocated.resources.gpus_per_node=null]\n"
                        "  roles:\n    actor: {gpusPerPod: 4}\n");
                  }),
                  "policy.generation.colocated.enabled is false, but the RLJob has no pods that generate");
}

}  // namespace
}  // namespace trireme
