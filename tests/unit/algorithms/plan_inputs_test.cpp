#include "trainer/algorithms/plan_inputs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tests/unit/errors.h"

namespace trireme {
namespace {

using test::error_of;
using testing::Each;
using testing::HasSubstr;

int64_t sum(const std::vector<int64_t>& values) { return std::accumulate(values.begin(), values.end(), int64_t{0}); }

TEST(PlanInputs, AStepIsWhatTheConfigurationSays) {
  const Config config = load_config_text(
      "", {"grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=16",
           "policy.max_total_sequence_length=1000", "policy.sequence_packing.train_mb_tokens=3000",
           "policy.sequence_packing.share_prompts=true", "policy.generation.max_running_samples=7",
           "loss_fn.reference_policy_kl_penalty=0.1"});
  const Workload work = planned_work(config, {.prompt = 100, .response = 300});
  EXPECT_TRUE(work.generates);
  EXPECT_TRUE(work.reference);
  EXPECT_TRUE(work.share_prompts);
  EXPECT_EQ(work.prompts.size(), 8U);
  EXPECT_EQ(work.outputs.size(), 32U);
  EXPECT_NEAR(sum(work.outputs) / 32.0, 300, 1);
  EXPECT_NEAR(sum(work.prompts) / 8.0, 100, 40);
  EXPECT_EQ(work.longest, 1000);
  EXPECT_EQ(work.optimizer_steps, 2);
  EXPECT_EQ(work.train_tokens, 3000);
  EXPECT_EQ(work.train_samples, 0);
  EXPECT_EQ(work.places, 7);
  // Of a quarter where nothing is said.
  EXPECT_NEAR(sum(planned_work(config, {}).outputs) / 32.0, 200, 1);
  EXPECT_THAT(error_of([&] { planned_work(config, {.prompt = 1000}); }), HasSubstr("leave no room for a response"));
  EXPECT_THAT(error_of([&] { planned_work(config, {.response = 900}); }), HasSubstr("are more than the 800"));
}

TEST(PlanInputs, ForcedLengthsCount) {
  const Config config = load_config_text(
      "", {"grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=8",
           "policy.generation.forced_lengths=synthetic:2x2:mean=50:max=50:prompt=10"});
  const Workload work = planned_work(config, {.prompt = 99, .response = 99});
  EXPECT_EQ(work.prompts.size(), 4U);
  EXPECT_EQ(work.outputs.size(), 8U);
  EXPECT_THAT(work.outputs, Each(50));
  EXPECT_THAT(work.prompts, Each(10));
}

TEST(PlanInputs, FineTuningGeneratesNothing) {
  const Config config =
      load_config_text("", {"algorithm=sft", "policy.train_global_batch_size=16", "policy.train_micro_batch_size=2",
                            "policy.sequence_packing.enabled=false"});
  const Workload work = planned_work(config, {});
  EXPECT_FALSE(work.generates);
  EXPECT_FALSE(work.reference);
  EXPECT_EQ(work.outputs.size(), 16U);
  EXPECT_EQ(work.optimizer_steps, 1);
  EXPECT_EQ(work.train_samples, 2);
}

TEST(PlanInputs, OptionsFollowTheKeys) {
  const PlanOptions plain = plan_options(load_config_text("", {}));
  EXPECT_EQ(plain.element_bytes, 2);
  EXPECT_EQ(plain.gradient_bytes, 4);
  EXPECT_TRUE(plain.fit_recompute);
  const PlanOptions megatron = plan_options(
      load_config_text("", {"policy.megatron_cfg.enabled=true", "policy.megatron_cfg.recompute_granularity=full",
                            "policy.megatron_cfg.recompute_method=block", "policy.megatron_cfg.recompute_num_layers=3",
                            "policy.megatron_cfg.virtual_pipeline_model_parallel_size=2",
                            "policy.megatron_cfg.pipeline_model_parallel_size=2", "cluster.gpus_per_node=2",
                            "policy.generation.kv_cache_tokens=5000"}));
  EXPECT_EQ(megatron.gradient_bytes, 2);
  EXPECT_FALSE(megatron.fit_recompute);
  EXPECT_EQ(megatron.recomputed_layers, 3);
  EXPECT_EQ(megatron.stages.virtual_stages, 2);
  EXPECT_EQ(megatron.stage_section, "policy.megatron_cfg.");
  EXPECT_EQ(megatron.cache_rows, 5000);
  const PlanOptions all = plan_options(load_config_text("", {"policy.activation_checkpointing=true"}));
  EXPECT_EQ(all.recomputed_layers, kEveryLayer);
  EXPECT_EQ(plan_options(load_config_text("", {"policy.precision=float32"})).element_bytes, 4);
  EXPECT_FALSE(plain.keeps_cache);
  std::vector<std::string> carry = {"grpo.async_grpo.enabled=true", "grpo.async_grpo.in_flight_weight_updates=true",
                                    "loss_fn.use_importance_sampling_correction=true"};
  EXPECT_FALSE(plan_options(load_config_text("", carry)).keeps_cache);
  carry.emplace_back("grpo.async_grpo.recompute_kv_cache_after_weight_updates=false");
  EXPECT_TRUE(plan_options(load_config_text("", carry)).keeps_cache);
}

TEST(PlanInputs, WaysToRunAStep) {
  const auto of = [](std::vector<std::string> more, bool elsewhere) {
    more.insert(more.begin(), {"grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4",
                               "policy.train_global_batch_size=16", "loss_fn.use_importance_sampling_correction=true",
                               "loss_fn.reference_policy_kl_penalty=0.1"});
    if (elsewhere) more.emplace_back("policy.generation.colocated.enabled=false");
    return planned_work(load_config_text("", more), {});
  };
  const std::string async = "grpo.async_grpo.enabled=true", in_flight = "grpo.async_grpo.in_flight_weight_updates=true";
  const Workload in_step = of({}, false);
  EXPECT_EQ(in_step.engines, 0);
  EXPECT_EQ(in_step.age, 0);
  EXPECT_FALSE(in_step.previous_pass);
  const Workload carried = of({async, in_flight, "grpo.async_grpo.max_trajectory_age_steps=2"}, false);
  EXPECT_EQ(carried.engines, 0);
  EXPECT_EQ(carried.age, 2);
  EXPECT_TRUE(carried.previous_pass);
  EXPECT_TRUE(carried.recomputes_keys);
  EXPECT_EQ(carried.background_processors, 0);
  const Workload in_turn = of({"cluster.gpus_per_node=2"}, true);
  EXPECT_EQ(in_turn.engines, 2);  // nothing says how many
  EXPECT_FALSE(in_turn.engines_near);
  EXPECT_EQ(in_turn.age, 0);
  EXPECT_FALSE(in_turn.in_flight);
  EXPECT_EQ(in_turn.background_processors, 0);
  const Workload exact = of({async, "cluster.gpus_per_node=8", "policy.generation.colocated.resources.gpus_per_node=6",
                             "grpo.async_grpo.ratio_from=generation"},
                            true);
  EXPECT_EQ(exact.engines, 6);
  EXPECT_TRUE(exact.engines_near);
  EXPECT_EQ(exact.age, 1);
  EXPECT_FALSE(exact.in_flight);
  EXPECT_FALSE(exact.previous_pass);
  const Workload flying = of({async, in_flight, "cluster.gpus_per_node=4", "cluster.num_nodes=3",
                              "policy.generation.colocated.resources.num_nodes=1",
                              "grpo.async_grpo.recompute_kv_cache_after_weight_updates=false"},
                             true);
  EXPECT_EQ(flying.engines, 4);
  EXPECT_FALSE(flying.engines_near);
  EXPECT_TRUE(flying.in_flight);
  EXPECT_FALSE(flying.recomputes_keys);
}

TEST(PlanInputs, AnEnginesDevicesAreOnOneNode) {
  const auto config = [](std::vector<std::string> more, int64_t devices) {
    more.emplace_back("policy.generation.colocated.enabled=false");
    more.push_back("policy.generation.tensor_parallel_size=" + std::to_string(devices));
    return load_config_text("", more);
  };
  const std::vector<std::string> nodes = {"cluster.gpus_per_node=4", "cluster.num_nodes=4",
                                          "policy.generation.colocated.resources.num_nodes=3"};
  EXPECT_EQ(planned_engines(config(nodes, 4)), 3);
  EXPECT_EQ(planned_engines(config(nodes, 2)), 6);
  EXPECT_EQ(planned_engines(config(nodes, 3)), 3);  // twelve devices, but one is left over on each node
  EXPECT_EQ(planned_engines(config(nodes, 8)), 0);
  const auto few = [&](int64_t of_node, int64_t devices) {
    return too_few_engine_devices(
               config({"cluster.gpus_per_node=" + std::to_string(4 + of_node),
                       "policy.generation.colocated.resources.gpus_per_node=" + std::to_string(of_node)},
                      devices))
        .value_or("");
  };
  EXPECT_EQ(few(2, 2), "");
  EXPECT_EQ(few(0, 2), "");
  EXPECT_EQ(few(1, 2),
            "policy.generation.colocated.resources.gpus_per_node is 1, fewer than the 2 devices of an engine "
            "(policy.generation.tensor_parallel_size): raise it, or leave it out");
}

TEST(PlanInputs, ACriticReadsThePolicysSamplesInMicroBatchesOfItsOwn) {
  const Config config = load_config_text(
      "", {"algorithm=ppo", "policy.train_global_batch_size=128", "value.train_global_batch_size=64",
           "policy.max_total_sequence_length=512", "value.max_total_sequence_length=1024", "ppo.ppo_epochs=2",
           "value.sequence_packing.train_mb_tokens=5000", "value.precision=float32", "policy.precision=bfloat16",
           "value.dtensor_cfg.enabled=true", "loss_fn.reference_policy_kl_penalty=0.1"});
  const ModelShape shape = *known_model_shape("qwen3-1.7b");
  const Workload policy = planned_work(config, {.response = 100});
  const PlannedModel critic = planned_critic(config, shape, {.response = 100});
  EXPECT_TRUE(critic.shape.value_head);
  EXPECT_FALSE(critic.shape.tied);
  EXPECT_EQ(critic.work.outputs, policy.outputs);
  EXPECT_EQ(critic.work.prompts, policy.prompts);
  EXPECT_EQ(critic.work.train_tokens, 5000);
  EXPECT_EQ(critic.work.optimizer_steps, 2 * policy.optimizer_steps);
  EXPECT_FALSE(critic.work.generates);
  EXPECT_FALSE(critic.work.reference);
  EXPECT_EQ(critic.options.element_bytes, 4);
  EXPECT_EQ(critic.options.sharding, StateSharding::kWeights);
  EXPECT_EQ(critic.layout, Layout{});
  const PlannedModel scorer = planned_reward_model(config, shape, {.response = 100});
  EXPECT_EQ(scorer.options.element_bytes, 2);
  EXPECT_EQ(scorer.work.logprob_tokens, policy.logprob_tokens);
}

TEST(PlanInputs, ACriticIsSplitByItsOwnSizes) {
  const Config config = load_config_text(
      "", {"algorithm=ppo", "cluster.gpus_per_node=8", "policy.megatron_cfg.enabled=true",
           "policy.megatron_cfg.tensor_model_parallel_size=4", "value.megatron_cfg.enabled=true",
           "value.megatron_cfg.tensor_model_parallel_size=2", "value.megatron_cfg.context_parallel_size=2",
           "value.megatron_cfg.pipeline_model_parallel_size=2",
           "value.megatron_cfg.virtual_pipeline_model_parallel_size=2"});
  const PlannedModel critic = planned_critic(config, *known_model_shape("qwen3-1.7b"), {});
  EXPECT_EQ(critic.layout, (Layout{.tp = 2, .cp = 2, .pp = 2}));
  EXPECT_EQ(critic.options.stages.virtual_stages, 2);
  EXPECT_EQ(critic.options.stage_section, "value.megatron_cfg.");
}

TEST(PlanInputs, PassesUnderGenerationAreThoseOfTheConfiguration) {
  const auto of = [](std::vector<std::string> overrides) { return planned_work(load_config_text("", overrides), {}); };
  const std::string reference = "loss_fn.reference_policy_kl_penalty=0.1",
                    none = "loss_fn.reference_policy_kl_penalty=0";
  EXPECT_EQ(of({reference}).background_processors, 32);
  EXPECT_EQ(of({reference, "policy.generation.background_sms=48"}).background_processors, 48);
  EXPECT_EQ(of({reference, "policy.generation.background_sms=0"}).background_processors, 0);
  EXPECT_EQ(of({none}).background_processors, 0);
  EXPECT_EQ(of({none, "algorithm=ppo", "ppo.adv_estimator.name=gae"}).background_processors, 32);  // values
  EXPECT_FALSE(of({reference}).early_gradients);
  const Workload early = of({none, "grpo.early_gradients=true"});
  EXPECT_TRUE(early.early_gradients);
  EXPECT_EQ(early.background_processors, 32);
}

}  // namespace
}  // namespace trireme
