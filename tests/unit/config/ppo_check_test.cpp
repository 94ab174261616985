// PPO's sections: what they mean, which rules hold across them, and what is told by their own keys.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/errors.h"
#include "trainer/config/config.h"

namespace trireme {
namespace {

using test::error_of;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::string load_error(const std::vector<std::string>& overrides) {
  return error_of([&] { load_config_text("", overrides); });
}

TEST(Ppo, ASectionMakesItTheAlgorithmAndItsRolloutCounts) {
  const Config config = load_config_text("ppo:\n  num_prompts_per_step: 64\n  ppo_epochs: 2\n  seed: 7\n");
  EXPECT_EQ(config.algorithm, "ppo");
  EXPECT_EQ(config.grpo.num_prompts_per_step, 64);  // what rollouts read
  EXPECT_EQ(config.grpo.seed, 7);
  EXPECT_EQ(config.data.seed, 7);
  EXPECT_EQ(config.grpo.val_period, 20);
  EXPECT_EQ(passes_per_rollout(config), 2);
  EXPECT_TRUE(has_rollouts(config) && has_critic(config));
  EXPECT_EQ(load_config_text("grpo:\n  seed: 3\nppo:\n  seed: 7\n").algorithm, "grpo");
  EXPECT_EQ(load_config_text("algorithm: ppo\n").algorithm, "ppo");
  EXPECT_FALSE(has_critic(load_config_text("", {"ppo.adv_estimator.name=raw_reward"})));
  EXPECT_EQ(load_config_text("ppo:\n  max_num_epochs: -1\n").grpo.max_num_epochs, 1000000000);
  EXPECT_NO_THROW(validate_supported(config));
}

TEST(Ppo, TheCriticFollowsThePolicyWhereNothingElseIsSaid) {
  const Config config = load_config_text(
      "ppo: {}\n", {"algorithm=ppo", "policy.model_name=org/actor", "policy.train_global_batch_size=128",
                    "policy.max_total_sequence_length=1024", "policy.precision=float32",
                    "value.optimizer.kwargs.lr=2e-5", "value.train_micro_batch_size=2"});
  EXPECT_EQ(config.value.model_name, "org/actor");
  EXPECT_EQ(config.value.train_global_batch_size, 128);
  EXPECT_EQ(config.value.precision, "float32");
  EXPECT_EQ(config.value.sequence_packing.train_mb_tokens, 2 * 1024);
  EXPECT_EQ(config.value.megatron_cfg.optimizer.clip_grad, 1.0);
  const Config critic = critic_config(config);
  EXPECT_EQ(adam_settings(critic).lr, 2e-5);
  EXPECT_EQ(critic.policy.train_micro_batch_size, 2);
  EXPECT_EQ(critic.policy.generation.max_new_tokens, config.policy.generation.max_new_tokens);
}

TEST(Ppo, MistakesAreToldByItsOwnKeys) {
  const auto with = [](std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(), "algorithm=ppo");
    return load_error(overrides);
  };
  EXPECT_THAT(with({"ppo.num_prompts_per_step=5"}),
              HasSubstr("policy.train_global_batch_size: 512 is more than the 80 samples"));
  EXPECT_THAT(with({"value.train_global_batch_size=384"}),
              HasSubstr("value.train_global_batch_size: 384 does not divide the 512 samples"));
  EXPECT_THAT(with({"ppo.batch_multiplier=2"}), HasSubstr("ppo.batch_multiplier: needs ppo.use_dynamic_sampling"));
  EXPECT_THAT(with({"value.max_total_sequence_length=100"}),
              HasSubstr("value.max_total_sequence_length: 100 is less than policy.max_total_sequence_length 512"));
  EXPECT_THAT(with({"value.megatron_cfg.enabled=true", "value.dtensor_cfg.enabled=true"}),
              HasSubstr("value.megatron_cfg.enabled: excludes value.dtensor_cfg.enabled"));
  EXPECT_THAT(with({"ppo.adv_estimator.name=raw_reward", "ppo.policy_training_start_step=3"}),
              HasSubstr("ppo.policy_training_start_step: is for a critic"));
  EXPECT_THAT(with({"ppo.adv_estimator.name=raw_reward", "loss_fn.use_kl_in_reward=true"}),
              HasSubstr("loss_fn.use_kl_in_reward: needs ppo.adv_estimator.name gae"));
  EXPECT_THAT(with({"ppo.num_generations_per_prompt=1", "ppo.num_prompts_per_step=512", "ppo.batch_multiplier=1",
                    "ppo.use_dynamic_sampling=true"}),
              HasSubstr("ppo.use_dynamic_sampling: keeps groups whose rewards differ"));
  EXPECT_NO_THROW(load_config_text("", {"algorithm=ppo", "ppo.num_generations_per_prompt=1",
                                        "ppo.num_prompts_per_step=512", "loss_fn.use_kl_in_reward=true"}));
}

TEST(Ppo, TheCriticsBatchIsSharedByItsOwnRanksAndNotTheActors) {
  const auto with = [](const std::string& batch) {
    return std::vector<std::string>{"algorithm=ppo",
                                    "cluster.gpus_per_node=8",
                                    "ppo.num_prompts_per_step=24",
                                    "ppo.num_generations_per_prompt=8",
                                    "policy.train_global_batch_size=64",
                                    "value.train_global_batch_size=" + batch};
  };
  ASSERT_EQ(load_error(with("12")), "") << "8 ranks of the actor cannot share it, and need not";
  const Config config = load_config_text("", with("12"));
  EXPECT_THAT(critic_problems(config, 3), testing::IsEmpty());
  EXPECT_THAT(
      critic_problems(config, 8),
      testing::ElementsAre("value.train_global_batch_size: 12 cannot be divided by the 8 data parallel ranks of "
                           "the critic"));
  EXPECT_THAT(critic_problems(load_config_text("", with("64")), 3), testing::SizeIs(1));
  std::vector<std::string> unpacked = with("12");
  unpacked.insert(unpacked.end(), {"value.sequence_packing.enabled=false", "value.train_micro_batch_size=2"});
  EXPECT_THAT(critic_problems(load_config_text("", unpacked), 3), testing::IsEmpty());
  unpacked.back() = "value.train_micro_batch_size=3";
  EXPECT_THAT(critic_problems(load_config_text("", unpacked), 3),
              testing::ElementsAre(HasSubstr("12 cannot be divided by train_micro_batch_size 3 x 3 data parallel ranks "
                                             "of the critic; turn sequence_packing on")));
  EXPECT_THAT(critic_problems(load_config_text(""), 7), testing::IsEmpty()) << "GRPO has none";
}

TEST(Ppo, ActorAndCriticAreSplitEachByItsOwnSizes) {
  const auto refusal = [](std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(), {"algorithm=ppo", "cluster.gpus_per_node=4", "cluster.device=cpu"});
    const Config config = load_config_text("", overrides);
    return error_of([&] { validate_supported(config); });
  };
  const std::string critic = "value.megatron_cfg.enabled=true", actor = "policy.megatron_cfg.enabled=true";
  EXPECT_EQ(refusal({"value.dtensor_cfg.enabled=true", "value.dtensor_cfg.tensor_parallel_size=2"}), "");
  EXPECT_EQ(refusal({critic, "value.megatron_cfg.pipeline_model_parallel_size=2"}), "");
  EXPECT_EQ(refusal({critic, "value.megatron_cfg.expert_model_parallel_size=2"}), "");
  EXPECT_EQ(refusal({actor, "policy.megatron_cfg.context_parallel_size=2"}), "");
  EXPECT_EQ(refusal({actor, "policy.megatron_cfg.tensor_model_parallel_size=4", critic,
                     "value.megatron_cfg.pipeline_model_parallel_size=2"}),
            "");
  EXPECT_EQ(
      refusal({actor, "policy.megatron_cfg.pipeline_model_parallel_size=2", "policy.generation.fold_pipeline=true"}),
      "");
  EXPECT_EQ(refusal({"value.dtensor_cfg.enabled=true"}), "");  // shared weights
  EXPECT_EQ(refusal({critic, "value.megatron_cfg.tensor_model_parallel_size=auto"}),
            "value.megatron_cfg.tensor_model_parallel_size: auto is for the policy, by trireme plan; write the size "
            "that the critic shall have");
  EXPECT_EQ(refusal({critic, "value.megatron_cfg.expert_tensor_parallel_size=2", "cluster.device=cuda"}), "");
  EXPECT_THAT(refusal({"ppo.max_rollout_turns=3"}), HasSubstr("ppo.max_rollout_turns: 3 turns is not supported"));
}

TEST(Ppo, AsynchronousStepsHaveTheRulesOfGrposByOwnKeys) {
  const std::vector<std::string> carry = {"algorithm=ppo", "ppo.async_ppo.enabled=true",
                                          "ppo.async_ppo.in_flight_weight_updates=true",
                                          "loss_fn.use_importance_sampling_correction=true"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), carry.begin(), carry.end());
    return load_error(more);
  };
  EXPECT_EQ(with({}), "");
  const Config config = load_config_text("", carry);
  EXPECT_EQ(error_of([&] { validate_supported(config); }), "");
  EXPECT_TRUE(carries_over(config));
  EXPECT_EQ(most_age(config), 1);
  EXPECT_TRUE(config.grpo.async_grpo.in_flight_weight_updates);  // whoever makes rollouts asks there
  EXPECT_TRUE(load_config_text(to_yaml(config)).grpo.async_grpo.enabled);
  // In what was printed, as a checkpoint has it, they can be switched off.
  EXPECT_FALSE(carries_over(load_config_text(to_yaml(config), {"ppo.async_ppo.enabled=false"})));
  const auto apart = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"policy.generation.colocated.enabled=false"});
    return with(more);
  };
  EXPECT_EQ(apart({}), "");
  EXPECT_EQ(apart({"ppo.async_ppo.in_flight_weight_updates=false"}), "");
  EXPECT_THAT(with({"ppo.async_ppo.in_flight_weight_updates=false"}),
              HasSubstr("ppo.async_ppo.in_flight_weight_updates: must be true for carry-over"));
  EXPECT_THAT(with({"ppo.async_ppo.max_trajectory_age_steps=0"}), HasSubstr("or ppo.async_ppo.enabled to false"));
  EXPECT_THAT(with({"loss_fn.use_importance_sampling_correction=false"}),
              HasSubstr("must be true with ppo.async_ppo.enabled"));
  EXPECT_EQ(with({"loss_fn.use_importance_sampling_correction=false", "ppo.async_ppo.ratio_from=generation"}), "");
  const std::vector<std::string> forced = {"loss_fn.force_on_policy_ratio=true", "ppo.ppo_epochs=1"};
  for (const std::string& refusal : {with(forced), apart(forced)})
    EXPECT_THAT(refusal, HasSubstr("loss_fn.force_on_policy_ratio: takes every ratio for 1, and with "
                                   "ppo.async_ppo.enabled older weights draw tokens; set one of them to false"));
  EXPECT_EQ(apart({forced[0], forced[1], "ppo.async_ppo.max_trajectory_age_steps=0"}), "") << "no token is older";
  EXPECT_EQ(load_error({"algorithm=ppo", forced[0], forced[1]}), "");
  EXPECT_THAT(load_error({"algorithm=ppo", "grpo.async_grpo.enabled=true"}),
              HasSubstr("grpo.async_grpo.enabled: is a key of GRPO; of a PPO run it is ppo.async_ppo.enabled"));
}

TEST(Ppo, TheLeadOfTheCriticsOwnStepsIsTheAgesAtLeast) {
  const auto with = [](std::vector<std::string> more) {
    more.insert(more.begin(),
                {"algorithm=ppo", "ppo.async_ppo.enabled=true", "ppo.async_ppo.in_flight_weight_updates=true",
                 "loss_fn.use_importance_sampling_correction=true"});
    return more;
  };
  const std::string lead = "ppo.async_ppo.warmup_generation_lead_steps", start = "ppo.policy_training_start_step=5";
  const auto lead_of = [&](std::vector<std::string> more) { return warmup_lead(load_config_text("", with(more))); };
  EXPECT_EQ(lead_of({start}), 1);
  EXPECT_EQ(lead_of({start, "ppo.async_ppo.max_trajectory_age_steps=2"}), 2);
  EXPECT_EQ(lead_of({start, lead + "=3"}), 3);
  EXPECT_EQ(lead_of({start, lead + "=null"}), 1);
  EXPECT_EQ(warmup_lead(load_config_text("", {"algorithm=ppo", start, lead + "=3"})), 0) << "steps do not overlap";
  EXPECT_THAT(load_error(with({lead + "=3"})), HasSubstr(lead + ": is for steps that train only the critic"));
  EXPECT_THAT(load_error(with({start, lead + "=2", "ppo.async_ppo.max_trajectory_age_steps=3"})),
              HasSubstr(lead + ": 2 is less than ppo.async_ppo.max_trajectory_age_steps 3"));
}

TEST(Ppo, ResumedChangesAndRanksAreToldOnceByItsKeys) {
  const Config one = load_config_text("", {"algorithm=ppo", "ppo.seed=1"});
  const Config other = load_config_text(
      "", {"algorithm=ppo", "ppo.seed=2", "data.seed=1", "ppo.val_period=3", "value.logprob_batch_size=2"});
  EXPECT_THAT(changes_since(one, other), ElementsAre("ppo.seed was 1, is 2"));
  EXPECT_THAT(*first_difference(one, other), HasSubstr("ppo."));
}

}  // namespace
}  // namespace trireme
