// Derived values, rules across fields, what is refused, the cache of models, and the recipes of configs/.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/fs.h"
#include "tests/unit/errors.h"
#include "trainer/config/config.h"

namespace trireme {
namespace {

using test::error_of;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

std::string load_error(const std::vector<std::string>& overrides) {
  return error_of([&] { load_config_text("", overrides); });
}

TEST(ConfigCheck, BatchArithmetic) {
  EXPECT_THAT(
      load_error({"policy.train_global_batch_size=1024"}),
      HasSubstr(
          "1024 is more than the 512 samples of a step (num_prompts_per_step 32 x num_generations_per_prompt 16)"));
  EXPECT_THAT(load_error({"policy.train_global_batch_size=384"}), HasSubstr("384 does not divide the 512 samples"));
  EXPECT_THAT(load_error({"cluster.gpus_per_node=3"}), HasSubstr("cannot be divided by the 3 data parallel ranks"));
  EXPECT_THAT(load_error({"policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=3"}),
              HasSubstr("cannot be divided by train_micro_batch_size 3 x 1"));
  EXPECT_EQ(load_error({"policy.train_micro_batch_size=3"}), "");  // packed rows need not divide
  EXPECT_THAT(load_error({"policy.train_global_batch_size=256", "loss_fn.force_on_policy_ratio=true"}),
              HasSubstr("needs one optimizer step per rollout"));
  EXPECT_THAT(load_error({"grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=32"}),
              HasSubstr("a group of 1 has no baseline"));
  EXPECT_EQ(load_error({"algorithm=sft", "policy.train_global_batch_size=7777"}), "");  // no rollout to divide
  EXPECT_THAT(load_error({"checkpointing.metric_name=val:acc"}), HasSubstr("there is no value 'val:acc' in this run"));
  EXPECT_THAT(load_error({"checkpointing.metric_name=val_loss"}), HasSubstr("val:accuracy, val:avg_length"));
  EXPECT_THAT(load_error({"checkpointing.metric_name=val:pass_k"}), HasSubstr("there is no value 'val:pass_k'"));
  EXPECT_EQ(load_error({"checkpointing.metric_name=val:pass_k", "grpo.val_num_generations_per_prompt=4"}), "");
  EXPECT_EQ(load_error({"checkpointing.metric_name=train:loss"}), "");
  EXPECT_EQ(load_error({"checkpointing.metric_name=val_reward"}), "");
  EXPECT_EQ(checkpoint_metric(load_config_text("checkpointing: {metric_name: val_reward}")), "val:accuracy");
  EXPECT_EQ(checkpoint_metric(load_config_text("")), "val:accuracy");
  EXPECT_EQ(checkpoint_metric(load_config_text("algorithm: sft\n")), "");
  EXPECT_EQ(checkpoint_metric(load_config_text("algorithm: sft\ncheckpointing: {metric_name: val_loss}")), "val:loss");
  EXPECT_THAT(load_error({"algorithm=sft", "checkpointing.metric_name=val:accuracy"}),
              HasSubstr("there are val:loss, train:loss"));
  EXPECT_EQ(load_error({"grpo.early_gradients=true"}), "");
  EXPECT_THAT(load_error({"grpo.early_gradients=true", "policy.train_global_batch_size=8"}),
              HasSubstr("cannot be used where an optimizer step has less than a whole group"));
}

TEST(ConfigCheck, RecomputationAndSharedPrompts) {
  const std::string m = "policy.megatron_cfg.";
  EXPECT_THAT(load_error({m + "enabled=true", m + "recompute_granularity=full", m + "recompute_num_layers=4"}),
              HasSubstr("4 layers a chunk is not supported with recompute_method uniform"));
  EXPECT_THAT(load_error({m + "enabled=true", m + "recompute_modules=[mlp]"}), HasSubstr("'mlp' is not known; take"));
  EXPECT_THAT(load_error({"policy.activation_checkpointing=true", "policy.recompute_layers=3"}),
              HasSubstr("contradicts activation_checkpointing"));
  EXPECT_THAT(load_error({"policy.sequence_packing.share_prompts=true", "policy.sequence_packing.enabled=false"}),
              HasSubstr("needs policy.sequence_packing.enabled"));
  EXPECT_THAT(load_error({"policy.sequence_packing.share_prompts=true", "algorithm=sft"}), HasSubstr("is for GRPO"));
}

// What the configuration holds, checkpoints and the report hold too.
TEST(ConfigCheck, SecretsOfTheRewardServiceAreRefusedAndNotQuoted) {
  const auto with = [](const std::string& override_text) {
    return load_error({"env.http.enabled=true", "env.http.url=https://a", override_text});
  };
  EXPECT_EQ(with("env.http.headers=[\"Authorization: Bearer {env:TOKEN}\", \"X-Api-Key: {file:/run/key}\"]"), "");
  EXPECT_EQ(with("env.http.headers=[\"X-Team: rl\"]"), "");
  for (const char* header : {"Authorization: Bearer hunter2", "x-api-key: hunter2", "Cookie: hunter2"}) {
    const std::string error = with(std::string("env.http.headers=[\"") + header + "\"]");
    EXPECT_THAT(error, HasSubstr("env.http.headers: "));
    EXPECT_THAT(error, HasSubstr("{env:NAME}"));
    EXPECT_EQ(error.find("hunter2"), std::string::npos) << error;
  }
  EXPECT_THAT(with("env.http.headers=[\"no colon\"]"), HasSubstr("each must be"));
  const std::string error = with("env.http.url=https://me:hunter2@a/score");
  EXPECT_THAT(error, HasSubstr("must not hold a user or password"));
  EXPECT_EQ(error.find("hunter2"), std::string::npos) << error;
  for (const char* form :
       {"env.http.headers=Authorization:hunter2", "+env.http.headers=[\"Authorization: hunter2\"]",
        " ++env.http.headers=[\"Authorization: hunter2\"]", "env.http.url=https://a/s?api_key=hunter2",
        "+env.http.headers={a: hunter2}", "env.http.timeout_s=hunter2"}) {
    const std::string of_form = with(form);
    EXPECT_THAT(of_form, HasSubstr("env.http.")) << form;
    EXPECT_EQ(of_form.find("hunter2"), std::string::npos) << of_form;
  }
  EXPECT_EQ(with("env.http.url=https://a/s?model=judge"), "");
  EXPECT_THAT(load_error({"env.http.enabled=true", "env.http.url=http://a", "env.http.ca_file=ca.pem"}),
              HasSubstr("env.http.ca_file: needs an env.http.url with https://"));
  EXPECT_THAT(load_error({"env.http.headers=[\"A: b\"]"}), HasSubstr("is set, but env.http.enabled is false"));
  EXPECT_EQ(load_config_text("").env.command.failure_policy, RewardFailurePolicy::kDrop);
  EXPECT_EQ(load_config_text("").env.http.failure_policy, RewardFailurePolicy::kDrop);
  EXPECT_EQ(load_config_text("").env.math.failure_policy, RewardFailurePolicy::kZero);
}

TEST(ConfigCheck, AnAxisHasAKey) {
  const Config megatron = load_config_text("", {"policy.megatron_cfg.enabled=true"});
  EXPECT_EQ(parallel_size_key(megatron, "tp"), "policy.megatron_cfg.tensor_model_parallel_size");
  EXPECT_EQ(parallel_size_key(megatron, "etp"), "policy.megatron_cfg.expert_tensor_parallel_size");
  const Config dtensor = load_config_text("", {"policy.dtensor_cfg.enabled=true"});
  EXPECT_EQ(parallel_size_key(dtensor, "cp"), "policy.dtensor_cfg.context_parallel_size");
  EXPECT_EQ(parallel_size_key(dtensor, "ep"), "policy.dtensor_cfg.expert_parallel_size");
  EXPECT_EQ(parallel_size_key(dtensor, "pp"), "parallelism.pp of the RLJob, or --layout");
}

TEST(ConfigCheck, Lengths) {
  EXPECT_THAT(load_error({"policy.generation.max_new_tokens=513"}),
              HasSubstr("is more than policy.max_total_sequence_length 512"));
  EXPECT_THAT(load_error({"data.max_input_seq_length=513"}), HasSubstr("data.max_input_seq_length: 513 is more"));
  EXPECT_THAT(load_error({"policy.sequence_packing.train_mb_tokens=511"}), HasSubstr("cannot hold one sequence"));
  EXPECT_THAT(load_error({"policy.generation.kv_cache_tokens=100"}), HasSubstr("cannot hold one sequence"));
  const std::vector<std::string> context = {
      "cluster.gpus_per_node=8", "policy.megatron_cfg.enabled=true", "policy.megatron_cfg.context_parallel_size=2",
      "policy.megatron_cfg.tensor_model_parallel_size=4", "policy.megatron_cfg.sequence_parallel=true"};
  // No length needs a divisor, whatever a recipe says: of the tensor ranks, mostly.
  for (const char* divisor : {"1", "4", "7"}) {
    auto any = context;
    any.push_back(std::string("policy.make_sequence_length_divisible_by=") + divisor);
    EXPECT_EQ(load_error(any), "");
  }
}

TEST(ConfigCheck, LossCombinations) {
  EXPECT_THAT(load_error({"loss_fn.sequence_level_importance_ratios=true"}),
              HasSubstr("needs loss_fn.token_level_loss false"));
  EXPECT_EQ(load_error({"loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"}), "");
  EXPECT_THAT(load_error({"loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=3"}),
              HasSubstr("excludes loss_fn.ratio_clip_c"));
  EXPECT_THAT(load_error({"loss_fn.ratio_clip_c=1"}), HasSubstr("must be above 1"));
  EXPECT_THAT(load_error({"loss_fn.truncated_importance_sampling_type=tis"}),
              HasSubstr("needs loss_fn.use_importance_sampling_correction"));
  EXPECT_THAT(load_error({"loss_fn.use_kl_in_reward=true"}), HasSubstr("reinforce_plus_plus"));
  EXPECT_NO_THROW(validate_supported(load_config_text("", {"loss_fn.use_kl_in_reward=true",
                                                           "grpo.adv_estimator.name="
                                                           "reinforce_plus_plus"})));
  EXPECT_THAT(load_error({"grpo.early_gradients=true", "loss_fn.positive_example_nll_weight=0.1"}),
              HasSubstr("divided by another count"));
  EXPECT_THAT(load_error({"grpo.skip_reference_policy_logprobs_calculation=true"}),
              HasSubstr("needs loss_fn.reference_policy_kl_penalty 0"));
  EXPECT_THAT(load_error({"loss_fn.disable_ppo_ratio=true", "loss_fn.use_cispo=true"}),
              HasSubstr("excludes loss_fn.use_cispo"));
}

TEST(ConfigCheck, GrpoAndEnv) {
  EXPECT_THAT(load_error({"grpo.batch_multiplier=1.5"}), HasSubstr("needs grpo.use_dynamic_sampling"));
  EXPECT_THAT(load_error({"grpo.batch_multiplier=1.01", "grpo.use_dynamic_sampling=true"}),
              HasSubstr("is not a number of prompts"));
  EXPECT_THAT(load_error({"grpo.stop_at_validation_metric=accuracy"}), HasSubstr("set both or neither"));
  EXPECT_THAT(load_error({"policy.generation.background_sms=8", "policy.generation.background_processors=0"}),
              HasSubstr("is the older name of policy.generation.background_sms"));
  EXPECT_THAT(load_error({"sft.stop_at_validation_loss=0.5", "sft.val_period=0"}), HasSubstr("needs sft.val_period"));
  EXPECT_THAT(load_error({"env.math.enabled=false"}), HasSubstr("no reward is enabled"));
  EXPECT_THAT(load_error({"env.command.enabled=true"}), HasSubstr("names no program"));
  EXPECT_THAT(load_error({"env.command.command=[grade]"}), HasSubstr("is set, but env.command.enabled is false"));
  EXPECT_THAT(load_error({"env.http.enabled=true", "env.http.url=rewards"}), HasSubstr("must begin with http://"));
  EXPECT_EQ(load_error({"env.http.enabled=true"}), "");  // then TRIREME_REWARD_URL counts
  EXPECT_THAT(load_error({"data.train.env_name=http"}), HasSubstr("'http' is not an enabled env; enabled: math"));
  EXPECT_THAT(load_error({"checkpointing.checkpoint_must_save_by=3h"}),
              HasSubstr("expected days:hours:minutes:seconds"));
}

TEST(ConfigCheck, ASizeThatIsAutoIsForPlanOnly) {
  const std::vector<std::string> open = {"policy.megatron_cfg.enabled=true", "cluster.gpus_per_node=48",
                                         "policy.megatron_cfg.tensor_model_parallel_size=auto",
                                         "policy.megatron_cfg.context_parallel_size=3",
                                         "policy.dtensor_cfg.tensor_parallel_size=auto"};
  Config config = load_config_text("", open);  // 16 data parallel ranks: whether they divide the batch is not known
  EXPECT_THAT(auto_sizes(config), ElementsAre("policy.megatron_cfg.tensor_model_parallel_size"));
  EXPECT_EQ(parallel_sizes(config).tensor, 1);
  EXPECT_EQ(parallel_sizes(config).context, 3);
  EXPECT_THAT(to_yaml(config), HasSubstr("tensor_model_parallel_size: auto\n"));
  EXPECT_EQ(to_yaml(load_config_text(to_yaml(config))), to_yaml(config));
  EXPECT_THAT(error_of([&] { validate_supported(config); }),
              HasSubstr("policy.megatron_cfg.tensor_model_parallel_size: auto is for trireme plan"));
  EXPECT_THAT(load_error({"policy.megatron_cfg.expert_tensor_parallel_size=auto"}), HasSubstr("expected an integer"));
  EXPECT_THAT(load_error({"policy.megatron_cfg.tensor_model_parallel_size=0"}), HasSubstr("must be at least 1"));

  ParallelSizes sizes = parallel_sizes(config);
  sizes.tensor = 2;
  sizes.pipeline = 4;
  set_parallel_sizes(config, sizes);
  EXPECT_THAT(auto_sizes(config), IsEmpty());
  EXPECT_EQ(parallel_sizes(config).tensor, 2);
  EXPECT_EQ(parallel_sizes(config).pipeline, 4);
  EXPECT_EQ(data_parallel_size(config), 2);
  EXPECT_EQ(config.policy.dtensor_cfg.tensor_parallel_size, kAutoSize);  // the other back-end's
}

TEST(ConfigCheck, BackEndChoosesSizesAndOptimizer) {
  Config config = load_config_text(
      "", {"policy.optimizer.kwargs.lr=1e-3", "policy.megatron_cfg.optimizer.lr=2e-3", "policy.max_grad_norm=3"});
  EXPECT_EQ(adam_settings(config).lr, 1e-3);
  EXPECT_EQ(max_grad_norm(config), 3);
  config.policy.megatron_cfg.enabled = true;
  config.policy.megatron_cfg.tensor_model_parallel_size = 2;
  config.cluster.processes = 8;
  EXPECT_EQ(adam_settings(config).lr, 2e-3);
  EXPECT_EQ(max_grad_norm(config), 3);
  EXPECT_EQ(parallel_sizes(config).tensor, 2);
  EXPECT_EQ(data_parallel_size(config), 4);
  EXPECT_EQ(optimizer_steps_per_rollout(config), 1);
  EXPECT_THAT(load_error({"policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=true"}),
              HasSubstr("excludes policy.dtensor_cfg.enabled"));
}

TEST(ConfigCheck, WhatRanksShareFollowsFromTheBackEnd) {
  const std::string ddp = "policy.megatron_cfg.distributed_data_parallel_config.";
  const auto shared = [&](std::vector<std::string> overrides) {
    return state_sharding(load_config_text("", overrides));
  };
  const std::string megatron = "policy.megatron_cfg.enabled=true", strategy = ddp + "data_parallel_sharding_strategy=";
  EXPECT_EQ(shared({}), StateSharding::kOptimizer);
  EXPECT_EQ(shared({strategy + "no_shard"}), StateSharding::kOptimizer) << "the back-end is off";
  EXPECT_EQ(shared({"policy.dtensor_cfg.enabled=true"}), StateSharding::kWeights);
  EXPECT_EQ(shared({megatron}), StateSharding::kOptimizer);
  EXPECT_EQ(shared({megatron, strategy + "no_shard"}), StateSharding::kNothing);
  EXPECT_EQ(shared({megatron, strategy + "optim"}), StateSharding::kOptimizer);
  EXPECT_EQ(shared({megatron, strategy + "optim_grads"}), StateSharding::kGradients);
  EXPECT_EQ(shared({megatron, strategy + "optim_grads_params"}), StateSharding::kWeights);
  const std::vector<std::string> nemo_rl = {megatron, strategy + "optim_grads_params", ddp + "use_custom_fsdp=false"};
  EXPECT_EQ(shared(nemo_rl), StateSharding::kOptimizer);
  EXPECT_THAT(keys_without_effect(load_config_text("", nemo_rl)),
              testing::ElementsAre(HasSubstr("data_parallel_sharding_strategy has no effect")));
  const std::string stages = "policy.megatron_cfg.pipeline_model_parallel_size=2";
  EXPECT_THAT(load_error({megatron, stages, "cluster.gpus_per_node=2", strategy + "optim_grads_params"}),
              HasSubstr("optim_grads_params needs policy.megatron_cfg.pipeline_model_parallel_size 1, not 2"));
  EXPECT_THAT(load_error({megatron, stages, "cluster.gpus_per_node=2", strategy + "optim_grads"}),
              HasSubstr("optim_grads needs policy.megatron_cfg.pipeline_model_parallel_size 1, not 2; pipeline stages "
                        "take no_shard or optim"));
  EXPECT_EQ(shared({megatron, stages, "cluster.gpus_per_node=2", strategy + "no_shard"}), StateSharding::kNothing);
}

// With the key that is wrong first, and what each could be.
TEST(ConfigCheck, ParallelSizesDivideTheRanks) {
  const auto with = [](const std::string& gpus, std::vector<std::string> keys) {
    for (std::string& key : keys) key.insert(0, "policy.megatron_cfg.");
    keys.insert(keys.begin(), {"cluster.gpus_per_node=" + gpus, "policy.megatron_cfg.enabled=true",
                               "policy.train_global_batch_size=" + gpus});
    return load_error(keys);
  };
  const std::string tp = "tensor_model_parallel_size", cp = "context_parallel_size",
                    pp = "pipeline_model_parallel_size", ep = "expert_model_parallel_size",
                    etp = "expert_tensor_parallel_size", mega = "policy.megatron_cfg.";
  EXPECT_THAT(with("8", {tp + "=3"}),
              HasSubstr(mega + tp + ": " + mega + tp + " 3 does not divide the 8 ranks (cluster.num_nodes 1 x " +
                        "cluster.processes 8); " + mega + tp + " can be 1, 2, 4, 8"));
  EXPECT_THAT(with("8", {tp + "=4", pp + "=4"}),
              HasSubstr(mega + tp + ": " + mega + tp + " 4 x " + mega + pp + " 4 = 16 does not divide the 8 ranks " +
                        "(cluster.num_nodes 1 x cluster.processes 8); with the others as they are, " + mega + tp +
                        " can be 1, 2, or " + mega + pp + " can be 1, 2"));
  EXPECT_THAT(with("8", {tp + "=2", cp + "=3"}),
              HasSubstr(mega + cp + ": " + mega + tp + " 2 x " + mega + cp + " 3 = 6 does not divide the 8 ranks"));
  EXPECT_THAT(with("8", {cp + "=3", pp + "=5"}), HasSubstr("= 15 does not divide the 8 ranks (cluster.num_nodes 1 x "
                                                           "cluster.processes 8); the product can be 1, 2, 4, 8"));
  EXPECT_THAT(with("6", {ep + "=4"}),
              HasSubstr(mega + ep + ": " + mega + ep + " 4 does not divide the 6 ranks (cluster.num_nodes 1 x " +
                        "cluster.processes 6); " + mega + ep + " can be 1, 2, 3, 6"));
  EXPECT_THAT(with("6", {ep + "=2", etp + "=2"}),
              HasSubstr(mega + etp + ": " + mega + etp + " 2 x " + mega + ep + " 2 = 4 does not divide the 6 ranks"));
  EXPECT_THAT(with("6", {ep + "=3"}), Not(HasSubstr("the 6 ranks")));
  EXPECT_THAT(load_error({"cluster.gpus_per_node=8", "policy.dtensor_cfg.enabled=true",
                          "policy.dtensor_cfg.tensor_parallel_size=3", "policy.generation.colocated.enabled=false",
                          "policy.generation.colocated.resources.gpus_per_node=4"}),
              HasSubstr("policy.dtensor_cfg.tensor_parallel_size 3 does not divide the 4 ranks that train "
                        "(cluster.num_nodes 1 x cluster.processes 8, without policy.generation.colocated.resources); "
                        "policy.dtensor_cfg.tensor_parallel_size can be 1, 2, 4"));
  EXPECT_THAT(with("8", {tp + "=9000000000000000000", pp + "=9"}),
              HasSubstr(" = 9223372036854775807 does not divide the 8 ranks"));
}

// NeMo-RL's key of its other back-end, where experts are shared by data parallel and context ranks too.
TEST(ConfigCheck, TheOtherBackEndSharesExpertsToo) {
  const auto of = [](std::vector<std::string> more) {
    more.insert(more.begin(), {"cluster.gpus_per_node=8", "policy.dtensor_cfg.enabled=true"});
    return more;
  };
  const std::string ep = "policy.dtensor_cfg.expert_parallel_size=";
  const Config config = load_config_text("", of({ep + "4"}));
  EXPECT_NO_THROW(validate_supported(config));
  EXPECT_EQ(parallel_sizes(config).expert, 4);
  EXPECT_EQ(parallel_sizes(config).expert_tensor, 1);
  EXPECT_EQ(data_parallel_size(config), 8);
  EXPECT_THAT(load_error(of({ep + "3"})),
              HasSubstr("policy.dtensor_cfg.expert_parallel_size 3 does not divide the 8 ranks"));
  EXPECT_THAT(auto_sizes(load_config_text("", of({ep + "auto"}))),
              ElementsAre("policy.dtensor_cfg.expert_parallel_size"));
  const Config critic = critic_config(load_config_text(
      "", of({"algorithm=ppo", "value.dtensor_cfg.enabled=true", "value.dtensor_cfg.expert_parallel_size=2"})));
  EXPECT_EQ(parallel_sizes(critic).expert, 2);
  EXPECT_EQ(parallel_sizes(load_config_text("", {ep + "4"})).expert, 1) << "of a back-end that is off";
}

TEST(ConfigCheck, WhatIsNotBuiltYetIsRefusedByName) {
  EXPECT_NO_THROW(validate_supported(load_config_text("", {"cluster.gpus_per_node=8"})));
  std::vector<std::string> four = {"cluster.gpus_per_node=8", "policy.megatron_cfg.enabled=true",
                                   "policy.megatron_cfg.tensor_model_parallel_size=4"};
  EXPECT_NO_THROW(validate_supported(load_config_text("", four)));
  four[2] = "policy.megatron_cfg.expert_model_parallel_size=4";
  EXPECT_NO_THROW(validate_supported(load_config_text("", four)));
  four[2] = "policy.megatron_cfg.expert_tensor_parallel_size=4";
  EXPECT_NO_THROW(validate_supported(load_config_text("", four)));
  four.push_back("cluster.device=cpu");
  EXPECT_NO_THROW(validate_supported(load_config_text("", four)));
  four[2] = "policy.megatron_cfg.expert_model_parallel_size=4";
  EXPECT_NO_THROW(validate_supported(load_config_text("", four)));
  four[2] = "policy.megatron_cfg.pipeline_model_parallel_size=4";
  EXPECT_NO_THROW(validate_supported(load_config_text("", four)));
  for (const char* ask : {"grpo.max_rollout_turns=2", "policy.offload_optimizer_for_logprob=true"}) {
    EXPECT_THAT(error_of([&] { validate_supported(load_config_text("", {ask})); }), HasSubstr("not supported yet"));
  }
  // Sizes of a back-end that is off mean nothing.
  EXPECT_NO_THROW(validate_supported(load_config_text("", {"policy.megatron_cfg.tensor_model_parallel_size=4"})));
}

TEST(ConfigCheck, CarryOver) {
  const std::vector<std::string> carry = {"grpo.async_grpo.enabled=true",
                                          "grpo.async_grpo.in_flight_weight_updates=true",
                                          "loss_fn.use_importance_sampling_correction=true"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), carry.begin(), carry.end());
    return load_error(more);
  };
  EXPECT_EQ(with({}), "");
  EXPECT_NO_THROW(validate_supported(load_config_text("", carry)));
  EXPECT_THAT(with({"grpo.async_grpo.max_trajectory_age_steps=0"}), HasSubstr("0 leaves nothing to carry over"));
  EXPECT_THAT(with({"grpo.async_grpo.in_flight_weight_updates=false"}), HasSubstr("must be true for carry-over"));
  EXPECT_EQ(with({"loss_fn.force_on_policy_ratio=true"}), "");
  EXPECT_THAT(with({"loss_fn.force_on_policy_ratio=true", "grpo.async_grpo.ratio_from=generation"}),
              HasSubstr("takes every ratio for 1"));
  EXPECT_THAT(with({"grpo.early_gradients=true"}), HasSubstr("is for strictly on-policy steps"));
  EXPECT_THAT(with({"loss_fn.use_importance_sampling_correction=false"}), HasSubstr("since older weights draw tokens"));
  EXPECT_EQ(with({"loss_fn.use_importance_sampling_correction=false", "grpo.async_grpo.ratio_from=generation"}), "");
  EXPECT_THAT(with({"grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2"}), HasSubstr("replaced at once"));
  EXPECT_THAT(with({"grpo.use_dynamic_sampling=true", "grpo.shuffle_rewards=true"}),
              HasSubstr("decides by the rewards"));
  EXPECT_EQ(with({"grpo.shuffle_rewards=true"}), "");
  EXPECT_EQ(load_error({"grpo.async_grpo.max_trajectory_age_steps=0"}), "") << "where it is off";
  for (const char* split :
       {"policy.megatron_cfg.tensor_model_parallel_size=2", "policy.megatron_cfg.pipeline_model_parallel_size=2",
        "policy.megatron_cfg.expert_model_parallel_size=2", "policy.megatron_cfg.context_parallel_size=2",
        "policy.generation.tensor_parallel_size=2"}) {
    std::vector<std::string> all = carry;
    all.insert(all.end(), {"cluster.gpus_per_node=2", "policy.megatron_cfg.enabled=true", split});
    EXPECT_NO_THROW(validate_supported(load_config_text("", all))) << split;
  }
}

TEST(ConfigCheck, GenerationElsewhere) {
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"policy.generation.colocated.enabled=false"});
    return load_error(more);
  };
  const auto refusal = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"policy.generation.colocated.enabled=false"});
    return error_of([&] { validate_supported(load_config_text("", more)); });
  };
  const std::vector<std::string> async = {"grpo.async_grpo.enabled=true",
                                          "loss_fn.use_importance_sampling_correction=true"};
  const auto and_async = [&](std::vector<std::string> more) {
    more.insert(more.begin(), async.begin(), async.end());
    return more;
  };
  EXPECT_EQ(with({}), "");
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(with(and_async({})), "") << "in turn, or with versions that follow from the step";
  EXPECT_EQ(with(and_async({"grpo.async_grpo.in_flight_weight_updates=true"})), "");
  EXPECT_EQ(with(and_async({"grpo.async_grpo.max_trajectory_age_steps=0"})), "");
  EXPECT_THAT(with({"grpo.early_gradients=true"}), HasSubstr("beside generation on the same device"));
  EXPECT_THAT(with({"grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2"}), HasSubstr("replaced at once"));
  EXPECT_THAT(with(and_async({"grpo.use_dynamic_sampling=true"})), HasSubstr("which step a group is of is not known"));
  EXPECT_EQ(with(and_async({"grpo.use_dynamic_sampling=true", "grpo.async_grpo.in_flight_weight_updates=true"})), "");
  EXPECT_THAT(with({"grpo.use_dynamic_sampling=true", "grpo.shuffle_rewards=true"}), HasSubstr("which come later"));
  EXPECT_EQ(with(and_async({"loss_fn.force_on_policy_ratio=true"})), "");
  EXPECT_THAT(with(and_async({"loss_fn.force_on_policy_ratio=true", "grpo.async_grpo.ratio_from=generation"})),
              HasSubstr("takes every ratio for 1"));
  EXPECT_THAT(load_error({"policy.generation.colocated.enabled=false", "grpo.async_grpo.enabled=true"}),
              HasSubstr("since older weights draw tokens"));
  EXPECT_THAT(with({"policy.generation.colocated.resources.gpus_per_node=1"}),
              HasSubstr("leave no device to train on"));
  for (const char* size : {"tensor_model_parallel_size=2", "pipeline_model_parallel_size=2", "context_parallel_size=2",
                           "expert_model_parallel_size=2"}) {
    EXPECT_EQ(refusal({"cluster.gpus_per_node=2", "policy.megatron_cfg.enabled=true",
                       std::string("policy.megatron_cfg.") + size, "policy.generation.tensor_parallel_size=1"}),
              "")
        << "each rank of training sends its part: " << size;
  }
  EXPECT_EQ(refusal({"cluster.gpus_per_node=2", "policy.dtensor_cfg.enabled=true",
                     "policy.dtensor_cfg.tensor_parallel_size=2"}),
            "");
  EXPECT_THAT(refusal({"cluster.gpus_per_node=2", "cluster.device=cpu", "policy.megatron_cfg.enabled=true",
                       "policy.megatron_cfg.expert_tensor_parallel_size=2"}),
              HasSubstr("from a policy of expert tensor parallel size 2 is not supported"));
  EXPECT_EQ(refusal({"policy.generation.tensor_parallel_size=3"}), "") << "of any number of ranks that train";
  EXPECT_EQ(refusal({"policy.generation.tensor_parallel_size=4", "policy.generation.expert_parallel_size=2"}), "");
  EXPECT_THAT(with({"policy.generation.tensor_parallel_size=4", "policy.generation.expert_parallel_size=3"}),
              HasSubstr("3 does not divide the 4 tensor ranks of an engine"));
  EXPECT_THAT(load_error({"policy.generation.expert_parallel_size=2"}), HasSubstr("is for engines"));
  EXPECT_THAT(with({"cluster.gpus_per_node=2", "policy.megatron_cfg.enabled=true",
                    "policy.megatron_cfg.pipeline_model_parallel_size=2", "policy.generation.fold_pipeline=true"}),
              HasSubstr("engines have no stages"));
  EXPECT_EQ(refusal({"cluster.gpus_per_node=2", "policy.dtensor_cfg.enabled=true"}), "") << "weights that ranks share";
  // Of one node its devices are shared out, whatever num_nodes says (as NeMo-RL's recipes write it).
  EXPECT_EQ(world_size(load_config_text("", {"cluster.gpus_per_node=4", "policy.generation.colocated.enabled=false",
                                             "policy.generation.colocated.resources.gpus_per_node=3",
                                             "policy.generation.colocated.resources.num_nodes=1"})),
            1);
  Config config = load_config_text(
      "", {"cluster.gpus_per_node=4", "cluster.num_nodes=3", "policy.generation.colocated.enabled=false",
           "policy.generation.colocated.resources.num_nodes=1"});
  EXPECT_EQ(world_size(config), 8);
  EXPECT_TRUE(exact_versions(config));
  EXPECT_EQ(most_age(config), 0);
}

struct Recipe {
  const char* file;
  const char* refused;  // part of the reason, "" when it runs
};

class Recipes : public testing::TestWithParam<Recipe> {};

TEST_P(Recipes, LoadsAndIsRefusedOnlyForItsSplit) {
  std::vector<std::string> warnings;
  const Config config = load_config(std::filesystem::path("configs") / GetParam().file, {}, &warnings);
  EXPECT_THAT(warnings, IsEmpty());
  EXPECT_THAT(find_problems(config), IsEmpty());
  const std::string refusal = error_of([&] { validate_supported(config); });
  if (*GetParam().refused) {
    EXPECT_THAT(refusal, HasSubstr(GetParam().refused));
  } else {
    EXPECT_EQ(refusal, "");
  }
  EXPECT_EQ(to_yaml(load_config_text(to_yaml(config))), to_yaml(config));
  for (const std::string& file : {config.data.train.prompt_file, config.data.validation.prompt_file}) {
    if (!file.empty()) {
      EXPECT_TRUE(std::filesystem::exists(file)) << file;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Configs, Recipes,
                         testing::Values(Recipe{"quickstart.yaml", ""}, Recipe{"quickstart_sft.yaml", ""},
                                         Recipe{"grpo.yaml", ""}, Recipe{"measure_step.yaml", ""},
                                         Recipe{"sft.yaml", ""}, Recipe{"megatron.yaml", ""},
                                         Recipe{"gsm8k_0.5b.yaml", ""}, Recipe{"gsm8k_1.5b.yaml", ""},
                                         Recipe{"ppo_gsm8k_1.5b.yaml", ""}, Recipe{"quickstart_ppo.yaml", ""},
                                         Recipe{"deepscaler_1.5b_8k.yaml", ""}, Recipe{"deepscaler_1.5b_16k.yaml", ""},
                                         Recipe{"deepscaler_1.5b_24k.yaml", ""}, Recipe{"llama3.1_8b.yaml", ""},
                                         Recipe{"llama3.1_70b.yaml", ""}, Recipe{"llama3.3_70b_16k.yaml", ""},
                                         Recipe{"qwen3_32b.yaml", ""}, Recipe{"qwen3_30b_a3b.yaml", ""}),
                         [](const auto& info) {
                           std::string name = info.param.file;
                           for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           return name;
                         });

TEST(Recipes, EveryFileIsTested) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator("configs")) files += entry.path().extension() == ".yaml";
  EXPECT_EQ(files, 18u) << "add the new recipe to the list above";
}

TEST(Recipes, TableRows) {
  const Config config = load_config("configs/llama3.1_8b.yaml");
  EXPECT_EQ(samples_per_step(config), 2048);
  EXPECT_EQ(optimizer_steps_per_rollout(config), 4);
  EXPECT_EQ(config.policy.max_total_sequence_length, 4096);
  EXPECT_EQ(data_parallel_size(config), 8);
  EXPECT_EQ(data_parallel_size(load_config("configs/llama3.1_70b.yaml")), 4);
  EXPECT_EQ(data_parallel_size(load_config("configs/qwen3_32b.yaml")), 8);
  EXPECT_EQ(data_parallel_size(load_config("configs/qwen3_30b_a3b.yaml")), 32);
}

class Hub : public testing::Test {
 protected:
  void touch(const std::string& name, const std::string& text = "{}") {
    const auto path = home_.path() / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  TemporaryDirectory home_;
};

TEST(Resume, WhatChangesTheNumbersIsNamedAndNothingElse) {
  const Config saved = load_config_text("");
  EXPECT_THAT(changes_since(saved, load_config_text(to_yaml(saved))), IsEmpty());
  EXPECT_THAT(changes_since(saved, load_config_text("", {"grpo.max_num_steps=77", "logger.log_dir=elsewhere",
                                                         "checkpointing.keep_top_k=9", "grpo.val_period=3",
                                                         "policy.generation.kv_cache_tokens=65536"})),
              IsEmpty());
  EXPECT_THAT(changes_since(saved, load_config_text("", {"policy.optimizer.kwargs.lr=0.25", "grpo.seed=1234",
                                                         "grpo.num_prompts_per_step=64"})),
              testing::IsSupersetOf({HasSubstr("policy.optimizer.kwargs.lr was "), HasSubstr("grpo.seed was "),
                                     HasSubstr("grpo.num_prompts_per_step was 32, is 64")}));
}

TEST(KeysWithoutEffect, AreNamedOnlyWhenSet) {
  EXPECT_THAT(keys_without_effect(load_config_text("")), IsEmpty());
  const auto notes = keys_without_effect(
      load_config_text("", {"policy.logprob_chunk_size=7", "policy.make_sequence_length_divisible_by=8",
                            "env.math.enabled=true", "env.math.math_verify_impl=hf_math_verify"}));
  EXPECT_THAT(notes,
              testing::ElementsAre(
                  HasSubstr("policy.logprob_chunk_size"), HasSubstr("policy.make_sequence_length_divisible_by"),
                  testing::AllOf(HasSubstr("env.math.math_verify_impl"), HasSubstr("stands in for hf_math_verify"))));
  // The critic's by its own name, where there is one.
  const std::vector<std::string> critic = {"value.megatron_cfg.enabled=true",
                                           "value.megatron_cfg.optimizer.use_distributed_optimizer=false"};
  EXPECT_THAT(keys_without_effect(load_config_text("", critic)), IsEmpty());
  EXPECT_THAT(keys_without_effect(load_config_text("algorithm: ppo\n", critic)),
              testing::ElementsAre(HasSubstr("value.megatron_cfg.optimizer.use_distributed_optimizer")));
  // What is always so is said where a file wants something else, of the back-end that is enabled.
  const std::vector<std::string> megatron = {"cluster.gpus_per_node=2", "policy.megatron_cfg.enabled=true",
                                             "policy.megatron_cfg.tensor_model_parallel_size=2"};
  const std::vector<std::string> dtensor = {"cluster.gpus_per_node=2", "policy.dtensor_cfg.enabled=true",
                                            "policy.dtensor_cfg.tensor_parallel_size=2"};
  const std::vector<std::string> others = {"policy.megatron_cfg.sequence_parallel=false",
                                           "policy.megatron_cfg.defer_fp32_logits=false",
                                           "policy.dtensor_cfg.sequence_parallel=false"};
  const auto notes_of = [](std::vector<std::string> all, const std::vector<std::string>& more) {
    all.insert(all.end(), more.begin(), more.end());
    return keys_without_effect(load_config_text("", all));
  };
  EXPECT_THAT(notes_of({}, others), IsEmpty());
  EXPECT_THAT(notes_of(megatron, {}), IsEmpty());
  EXPECT_THAT(notes_of(dtensor, {}), IsEmpty());
  EXPECT_THAT(notes_of(megatron, others),
              testing::ElementsAre(HasSubstr("policy.megatron_cfg.sequence_parallel has no effect in this version: "
                                             "rows are always sharded over the tensor ranks"),
                                   HasSubstr("policy.megatron_cfg.defer_fp32_logits has no effect")));
  EXPECT_THAT(notes_of(dtensor, others),
              testing::ElementsAre(HasSubstr("policy.dtensor_cfg.sequence_parallel has no")));
  EXPECT_THAT(notes_of({megatron[0], megatron[1]}, {others[0]}), IsEmpty()) << "one tensor rank has all rows";
  EXPECT_THAT(
      notes_of({"algorithm=ppo", "value.megatron_cfg.enabled=true"}, {"value.megatron_cfg.defer_fp32_logits=false"}),
      testing::ElementsAre(HasSubstr("value.megatron_cfg.defer_fp32_logits has no effect")));
  EXPECT_THAT(changes_since(load_config_text("", others), load_config_text("")), IsEmpty());
  // With fixed micro-batches the key counts; with packing those of training do.
  EXPECT_THAT(keys_without_effect(load_config_text(
                  "", {"algorithm=sft", "sft.val_micro_batch_size=2", "policy.sequence_packing.enabled=false"})),
              IsEmpty());
  EXPECT_THAT(keys_without_effect(load_config_text(
                  "", {"algorithm=sft", "sft.val_micro_batch_size=2", "policy.sequence_packing.enabled=true"})),
              testing::ElementsAre(HasSubstr("sft.val_micro_batch_size")));
}

TEST_F(Hub, FolderIdAndDownloadCommand) {
  touch("local/config.json");
  EXPECT_EQ(resolve_model((home_.path() / "local").string(), home_.path()), home_.path() / "local");
  touch("hub/models--Qwen--Qwen3-1.7B/refs/main", "abc123\n");
  touch("hub/models--Qwen--Qwen3-1.7B/snapshots/abc123/config.json");
  touch("hub/models--Qwen--Qwen3-1.7B/snapshots/old/config.json");
  EXPECT_EQ(resolve_model("Qwen/Qwen3-1.7B", home_.path()),
            home_.path() / "hub/models--Qwen--Qwen3-1.7B/snapshots/abc123");
  EXPECT_THAT(error_of([&] { resolve_model("Qwen/Qwen3-8B", home_.path()); }),
              HasSubstr("download it with: hf download Qwen/Qwen3-8B"));
  EXPECT_THAT(error_of([&] { resolve_model("/no/such/folder", home_.path()); }), HasSubstr("there is no folder"));
  touch("empty/x");
  EXPECT_THAT(error_of([&] { resolve_model((home_.path() / "empty").string(), home_.path()); }),
              HasSubstr("has no config.json and no checkpoints"));
  // A directory of checkpoints is its newest complete step; an unfinished one has another name.
  for (const char* step : {"step_9", "step_10", "tmp_step_11", "step_x"})
    touch(std::string("run/") + step + "/policy/weights/config.json");
  touch("run/step_12/manifest.json");
  EXPECT_EQ(resolve_model((home_.path() / "run").string(), home_.path()), home_.path() / "run/step_10/policy/weights");
  // A snapshot without its ref, as an interrupted download leaves it, is used only when it is the only one.
  touch("hub/models--a--b/snapshots/one/config.json");
  EXPECT_EQ(resolve_model("a/b", home_.path()), home_.path() / "hub/models--a--b/snapshots/one");
  touch("hub/models--a--b/snapshots/two/config.json");
  EXPECT_NE(error_of([&] { resolve_model("a/b", home_.path()); }), "");
}

TEST_F(Hub, Datasets) {
  const auto files = [&](const DatasetConfig& dataset) {
    std::vector<std::string> names;
    for (const DatasetFiles& source : resolve_dataset(dataset, home_.path())) {
      for (const auto& file : source.files) names.push_back(std::filesystem::relative(file, home_.path()).string());
    }
    return names;
  };
  touch("mine.jsonl");
  DatasetConfig dataset;
  dataset.data_path = (home_.path() / "mine.jsonl").string();
  EXPECT_THAT(files(dataset), ElementsAre("mine.jsonl"));
  dataset.data_path = (home_.path() / "other.jsonl").string();
  EXPECT_THAT(error_of([&] { files(dataset); }), HasSubstr("other.jsonl"));
  dataset.data_path.clear();
  dataset.dataset_name = "gsm8k";
  EXPECT_THAT(error_of([&] { files(dataset); }), HasSubstr("hf download --repo-type dataset openai/gsm8k"));
  touch("hub/datasets--openai--gsm8k/refs/main", "r");
  touch("hub/datasets--openai--gsm8k/snapshots/r/main/test-00000-of-00001.parquet");
  dataset.split = "test";
  EXPECT_THAT(files(dataset), ElementsAre("hub/datasets--openai--gsm8k/snapshots/r/main/test-00000-of-00001.parquet"));
  dataset.split = "train";
  EXPECT_THAT(error_of([&] { files(dataset); }), HasSubstr("data set gsm8k has no split 'train'; it has test"));
  dataset.dataset_name = "gsm8";
  EXPECT_THAT(error_of([&] { files(dataset); }), HasSubstr("did you mean 'gsm8k'?"));
}

TEST_F(Hub, ShardsAndSplitsByTheirRealNames) {
  const std::string folder = "hub/datasets--nvidia--OpenMathInstruct-2/snapshots/r/";
  touch("hub/datasets--nvidia--OpenMathInstruct-2/refs/main", "r");
  for (const char* name : {"train-00000-of-00002", "train-00001-of-00002", "train_1M-00000-of-00001"})
    touch(folder + "data/" + name + ".parquet");
  touch(folder + "README.md");
  const auto names = [&](const std::string& split) {
    DatasetConfig dataset;
    dataset.dataset_name = "OpenMathInstruct-2";
    dataset.split = split;
    std::vector<std::string> out;
    const auto sources = resolve_dataset(dataset, home_.path());
    for (const auto& file : sources.at(0).files) out.push_back(file.filename().string());
    return out;
  };
  EXPECT_THAT(names("train"), ElementsAre("train-00000-of-00002.parquet", "train-00001-of-00002.parquet"));
  EXPECT_THAT(names("train_1M"), ElementsAre("train_1M-00000-of-00001.parquet"));
  EXPECT_THAT(names(""), ElementsAre("train_1M-00000-of-00001.parquet")) << "the set's own";
  DatasetConfig mixed;
  mixed.mixture = {"1 OpenMathInstruct-2", "1 OpenMathInstruct-2:train"};
  EXPECT_EQ(resolve_dataset(mixed, home_.path()).at(0).files.size(), 1u);
  EXPECT_EQ(resolve_dataset(mixed, home_.path()).at(1).files.size(), 2u);
  mixed.split = "train";
  EXPECT_EQ(resolve_dataset(mixed, home_.path()).at(0).files.size(), 2u);
  EXPECT_THAT(error_of([&] { names("train_2M"); }), HasSubstr("has no split 'train_2M'; it has train, train_1M"));
}

TEST_F(Hub, KnownSetsAreFoundWhereTheHubKeepsThem) {
  const std::string squad = "hub/datasets--rajpurkar--squad/snapshots/r/plain_text/";
  for (const char* split : {"train", "validation"}) touch(squad + split + "-00000-of-00001.parquet");
  touch("hub/datasets--BytedTsinghua-SIA--DAPO-Math-17k/snapshots/r/data/dapo-math-17k.parquet");
  DatasetConfig dataset;
  dataset.dataset_name = "squad";
  dataset.split = "validation";
  EXPECT_THAT(resolve_dataset(dataset, home_.path()).at(0).files,
              ElementsAre(home_.path() / (squad + "validation-00000-of-00001.parquet")));
  dataset.dataset_name = "DAPOMath17K";
  dataset.split = "train";
  EXPECT_EQ(resolve_dataset(dataset, home_.path()).at(0).files.at(0).filename(), "dapo-math-17k.parquet");
  dataset.dataset_name.clear();
  dataset.mixture = {"1 squad"};
  const auto mixed = resolve_dataset(dataset, home_.path());
  EXPECT_THAT(mixed.at(0).files, ElementsAre(home_.path() / (squad + "train-00000-of-00001.parquet")));
  EXPECT_EQ(mixed.at(0).output_key, "answers.text[0]");
  EXPECT_EQ(mixed.at(0).system_key, "context");
}

TEST_F(Hub, FoldersPatternsAndMixtures) {
  for (const char* name : {"rows/b.jsonl", "rows/a.json.zst", "rows/notes.txt", "shards/x-1.jsonl", "shards/x-2.jsonl"})
    touch(name);
  const std::string home = home_.path().string();
  DatasetConfig dataset;
  dataset.data_path = home + "/rows";
  EXPECT_THAT(resolve_dataset(dataset, home_.path()).at(0).files,
              ElementsAre(home_.path() / "rows/a.json.zst", home_.path() / "rows/b.jsonl"));
  dataset.data_path = home + "/shards/x-*.jsonl";
  EXPECT_EQ(resolve_dataset(dataset, home_.path()).at(0).files.size(), 2U);
  dataset.data_path = home + "/shards/y-*.jsonl";
  EXPECT_THAT(error_of([&] { resolve_dataset(dataset, home_.path()); }), HasSubstr("no file matches"));
  touch("hub/datasets--org--sums/snapshots/r/test.jsonl");
  dataset.data_path.clear();
  dataset.mixture = {"0.75 " + home + "/rows/b.jsonl", "0.25 org/sums:test"};
  const auto sources = resolve_dataset(dataset, home_.path());
  ASSERT_EQ(sources.size(), 2U);
  EXPECT_EQ(sources[0].weight, 0.75);
  EXPECT_THAT(sources[1].files, ElementsAre(home_.path() / "hub/datasets--org--sums/snapshots/r/test.jsonl"));
  for (const char* wrong : {"rows.jsonl", "0 rows.jsonl", "-1 rows.jsonl", "0.5 "}) {
    dataset.mixture = {wrong};
    EXPECT_THAT(error_of([&] { resolve_dataset(dataset, home_.path()); }), HasSubstr("is not \"WEIGHT SOURCE\""))
        << wrong;
  }
}

TEST(RewardModelKeys, AnEnvSwitchesItOnAndIsNamedWithTheOthers) {
  const std::string model = "env.reward_model.model_name=org/scores";
  const Config off = load_config_text("", {model});
  EXPECT_FALSE(uses_reward_model(off));
  const Config beside = load_config_text("", {model, "env.reward_model.enabled=true"});
  EXPECT_TRUE(uses_reward_model(beside));
  EXPECT_THAT(beside.env.enabled(), ElementsAre("math", "reward_model"));
  const Config alone = load_config_text("", {model, "data.train.env_name=reward_model"});  // as NeMo-RL's file has it
  EXPECT_TRUE(uses_reward_model(alone));
  EXPECT_EQ(load_config_text(to_yaml(alone)).env.reward_model.enabled, true);
  EXPECT_FALSE(
      uses_reward_model(load_config_text("", {model, "env.reward_model.enabled=true", "data.train.env_name=math"})));
  EXPECT_FALSE(uses_reward_model(load_config_text("", {model, "env.reward_model.enabled=true", "algorithm=sft"})));
  EXPECT_TRUE(
      uses_reward_model(load_config_text("", {model, "env.reward_model.enabled=true", "env.math.enabled=false"})));
}

TEST(RewardModelKeys, WhatCannotBeIsToldByName) {
  const std::vector<std::string> on = {"env.reward_model.model_name=org/scores", "env.reward_model.enabled=true"};
  const auto with = [&](std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(), on.begin(), on.end());
    return overrides;
  };
  EXPECT_THAT(load_error({"env.reward_model.enabled=true"}), HasSubstr("env.reward_model.model_name: names no model"));
  EXPECT_THAT(load_error(with({"grpo.early_gradients=true"})),
              HasSubstr("grpo.early_gradients: cannot be used with env.reward_model"));
  const std::vector<std::string> carry = {"grpo.async_grpo.enabled=true",
                                          "grpo.async_grpo.in_flight_weight_updates=true",
                                          "loss_fn.use_importance_sampling_correction=true"};
  EXPECT_NO_THROW(load_config_text("", with(carry)));
  std::vector<std::string> refill = carry;
  refill.emplace_back("grpo.use_dynamic_sampling=true");
  EXPECT_THAT(load_error(with(refill)),
              HasSubstr("env.reward_model.enabled: cannot be used with grpo.async_grpo.enabled and "
                        "grpo.use_dynamic_sampling"));
  EXPECT_NO_THROW(load_config_text("", with({"grpo.use_dynamic_sampling=true"})));
  const auto refusal = [&](std::vector<std::string> overrides) {
    overrides.insert(overrides.end(), {"cluster.gpus_per_node=2", "cluster.device=cpu"});
    const Config config = load_config_text("", with(std::move(overrides)));
    return error_of([&] { validate_supported(config); });
  };
  EXPECT_EQ(refusal({}), "");
  // It is whole on every rank, whatever these have of the policy.
  EXPECT_EQ(refusal({"policy.generation.tensor_parallel_size=2"}), "");
  EXPECT_EQ(refusal({"policy.dtensor_cfg.enabled=true", "policy.dtensor_cfg.tensor_parallel_size=2"}), "");
  EXPECT_EQ(refusal({"policy.megatron_cfg.enabled=true", "policy.megatron_cfg.pipeline_model_parallel_size=2"}), "");
}

}  // namespace
}  // namespace trireme
