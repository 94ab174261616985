// Keys of what is learnt and how: grpo, ppo, sft and their losses.
#include "trainer/config/field_table.h"

namespace trireme::config {

constexpr const char* kAll = "1000000000";  // what null stands for where it means "no bound"

void add_grpo(std::vector<Field>& table) {
  ROLLOUT(num_prompts_per_step)("prompts of one rollout").at_least(1);
  ROLLOUT(num_generations_per_prompt)("responses to each prompt: the size of a group").at_least(1);
  ROLLOUT(max_rollout_turns)("turns of a conversation; 1 is supported").at_least(1);
  ROLLOUT(max_num_epochs)("passes over the training data, at most; each counts its whole batches").at_least(1);
  ROLLOUT(max_num_steps)("steps, at most").at_least(0);
  KEY(grpo.normalize_rewards)("divide advantages by the group's standard deviation");
  KEY(grpo.use_leave_one_out_baseline)("a sample's own reward is left out of its baseline and standard deviation");
  OURS(grpo.biased_group_std)("standard deviation with the biased estimator, as NeMo-RL v0.3 has it");
  KEY(grpo.advantage_clip_low)("advantages below are raised to it, after normalisation");
  KEY(grpo.advantage_clip_high)("advantages above are lowered to it, after normalisation");
  ROLLOUT(val_period)("steps between validations; 0 or -1: never").at_least(-1);
  ROLLOUT(val_start_at)("no periodic validation before this step; -1: from the start").at_least(-1);
  ROLLOUT(val_at_start)("validate before the first step");
  ROLLOUT(val_at_end)("validate after the last step");
  ROLLOUT(max_val_samples)("prompts of a validation, at most; null: all").at_least(1).null_as(kAll);
  ROLLOUT(val_batch_size)("prompts of a validation handed to the engine at once; null: all").at_least(1).null_as(kAll);
  ROLLOUT(val_num_generations_per_prompt)
  ("responses to each validation prompt; above 1 pass@k is reported too").at_least(1);
  ROLLOUT(stop_at_validation_metric)("validation metric that ends the run early, e.g. accuracy").null_default();
  ROLLOUT(stop_at_validation_threshold)("value of that metric from which the run ends");
  ROLLOUT(seed)("seed of sampling and of the data order").at_least(0);
  ROLLOUT(overlong_filtering)("samples cut off at the length limit stay out of the loss (but in the baseline)");
  ROLLOUT(use_dynamic_sampling)("DAPO: groups with equal rewards are replaced by further rollouts");
  ROLLOUT(dynamic_sampling_max_gen_batches)("rollouts one step may take to fill its batch").at_least(1);
  ROLLOUT(batch_multiplier)
  ("prompts of a dynamic-sampling rollout, as a multiple of num_prompts_per_step").at_least(1);
  ROLLOUT(reward_shaping.enabled)("shape rewards by response length");
  ROLLOUT(reward_shaping.overlong_buffer_length)
  ("tokens before max_response_length in which the penalty grows").at_least(1);
  ROLLOUT(reward_shaping.overlong_buffer_penalty)("penalty at max_response_length").at_least(0);
  ROLLOUT(reward_shaping.max_response_length)
  ("length at which the penalty is full").from("policy.max_total_sequence_length").at_least(1);
  ROLLOUT(reward_shaping.stop_properly_penalty_coef)
  ("instead: rewards of truncated samples are multiplied by it").at_least(0).at_most(1);
  ROLLOUT(reward_scaling.enabled)("map rewards from the source range to the target range");
  ROLLOUT(reward_scaling.source_min)("lower end of the source range; rewards are clamped to it");
  ROLLOUT(reward_scaling.source_max)("upper end of the source range");
  ROLLOUT(reward_scaling.target_min)("lower end of the target range");
  ROLLOUT(reward_scaling.target_max)("upper end of the target range");
  KEY(grpo.adv_estimator.name)
  ("how advantages are estimated; gdpo and opd are not supported yet");
  KEY(grpo.adv_estimator.minus_baseline)("reinforce_plus_plus: subtract the group's mean");
  ROLLOUT(skip_reference_policy_logprobs_calculation)
  ("no reference pass; needs loss_fn.reference_policy_kl_penalty 0");
  ROLLOUT(seq_logprob_error_threshold)
  ("sequences whose mean exp(|generation - training log-prob|) exceeds it are masked").above(1);
  OURS(grpo.early_gradients)
  ("gradients of whole groups of the first optimizer step while the last responses are generated, in the part of the "
   "GPU of reference log-probs (policy.generation.background_sms). Strictly on-policy; sums are equal within "
   "rounding, since their order depends on time. A rank then generates whole groups. Gains 2 to 3 % of a step of one "
   "GPU with "
   "long-tailed responses and no reference model, and costs 8 % on four (docs/lab/013-gradients-under-generation.md)");
  OUR_ROLLOUT(shuffle_rewards)("control experiment: rewards are permuted over the batch, so nothing can be learnt");
}

void add_async(std::vector<Field>& table) {
  ASYNC(enabled)
  ("carry-over: places that a step's last responses leave free take groups of the next steps, and what is not finished "
   "when the step is complete goes on with the new weights. With generation on devices of its own: it generates for "
   "the "
   "next steps while others are trained");
  ASYNC(max_trajectory_age_steps)
  ("steps that the weights which drew a token may be older than those that its step begins with; a group is begun only "
   "where this holds, and none is dropped")
      .at_least(0);
  ASYNC(in_flight_weight_updates)
  ("unfinished responses go on with new weights; carry-over needs it. False, on devices of their own: engines change "
   "weights only without unfinished responses, and a step is generated with those of max_trajectory_age_steps before "
   "it, "
   "so that a run is repeatable bit for bit");
  ASYNC(recompute_kv_cache_after_weight_updates)
  ("after an update the keys and values of unfinished responses are computed again, so that each token has the "
   "log-prob "
   "of its weights exactly; false keeps them, and the memory of the cache is not lent to training");
  OUR_ASYNC(ratio_from)
  ("of tokens that older weights drew, the ratio of the loss begins with the log-prob under: training, the weights "
   "before the first optimizer step, by a pass over these samples; generation, those that drew them, without a pass");
  ASYNC(max_generation_failures)
  ("of generation on devices of its own: engines lost in a row with samples in hand, and no group in between, that end "
   "the run; 0: any number, cluster.collective_timeout_s without a group decides")
      .at_least(0);
  OUR_ASYNC(lease_timeout_s)
  ("likewise: seconds without an engine step after which what an engine has in hand goes to others; an engine that is "
   "not heard of at all for 10 s, or this if it is shorter, is lost likewise")
      .above(0);
  OUR_ASYNC(verify_weights_period)
  ("likewise: checksums of the weights are compared after an engine's first transfer and after every so many; 0: after "
   "the first only")
      .at_least(0);
}

void add_ppo(std::vector<Field>& table) {
  for (size_t i = 0, size = table.size(); i < size; ++i) {
    if (const auto get = table[i].of_rollout)
      table.push_back(twin_of(table[i], "grpo.", "ppo.", [get](Config& c) { return get(c.ppo); }));
    Field& last = table.back();
    if (last.path == "ppo.max_num_epochs")
      last.at_least(-1).doc = "passes over the training data, at most; -1: no limit";
  }
  KEY(ppo.ppo_epochs)("passes of critic and actor over each rollout; learning rates move once a pass").at_least(1);
  KEY(ppo.policy_training_start_step)("steps in which only the critic is trained, before the actor is too").at_least(0);
  KEY(ppo.warm_start_value_checkpoint)
  ("folder of a checkpoint (step_N) of another run, whose value/weights a new run's critic begins with").null_default();
  KEY(ppo.adv_estimator.name)
  ("gae: generalized advantage estimation, by a critic; raw_reward: the response's reward, without one");
  KEY(ppo.adv_estimator.gae_lambda)("lambda of advantages and returns").at_least(0).at_most(1);
  KEY(ppo.adv_estimator.gae_gamma)("discount of a token").at_least(0).at_most(1);
  KEY(ppo.adv_estimator.normalize_advantages)("whiten advantages over all valid tokens of a rollout");
  KEY(ppo.adv_estimator.gae_lambda_value)("lambda of returns; null: gae_lambda").at_least(0).at_most(1);
  KEY(ppo.adv_estimator.gae_lambda_policy)("lambda of advantages; null: gae_lambda").at_least(0).at_most(1);
  KEY(ppo.adv_estimator.length_adaptive_alpha)
  ("above 0: lambda of advantages is 1 - 1 / (alpha * tokens of the response), whatever gae_lambda_policy says")
      .at_least(0);
  for (size_t i = 0, size = table.size(); i < size; ++i) {
    if (const auto get = table[i].of_async)
      table.push_back(
          twin_of(table[i], "grpo.async_grpo.", "ppo.async_ppo.", [get](Config& c) { return get(c.ppo.async_ppo); }));
  }
  KEY(ppo.async_ppo.warmup_generation_lead_steps)
  ("while only the critic is trained: steps ahead of the one that is trained whose groups may be made; from then on "
   "max_trajectory_age_steps is. 0 or null: that all the time")
      .at_least(0)
      .null_as("0");
}

void add_sft(std::vector<Field>& table) {
  KEY(sft.max_num_epochs)("passes over the training data, at most; each counts its whole batches").at_least(1);
  KEY(sft.max_num_steps)("optimizer steps, at most").at_least(0);
  KEY(sft.val_period)("steps between validations; 0 or -1: never").at_least(-1);
  KEY(sft.val_batches)("batches of a validation, at most").at_least(1);
  KEY(sft.val_global_batch_size)("examples in a validation batch").at_least(1);
  KEY(sft.val_micro_batch_size)("examples in a validation micro-batch").at_least(1);
  KEY(sft.val_at_start)("validate before the first step");
  KEY(sft.val_at_end)("validate after the last step");
  KEY(sft.stop_at_validation_loss)("the run ends at the first validation whose loss (per token) is at most this");
  KEY(sft.seed)("seed of the data order").at_least(0);
}

void add_loss(std::vector<Field>& table) {
  KEY(loss_fn.reference_policy_kl_penalty)
  ("weight of the KL to the reference model; 0: no reference model").at_least(0);
  KEY(loss_fn.reference_policy_kl_type)("estimator of the KL");
  KEY(loss_fn.kl_input_clamp_value)("clamp of the log-ratio; null: none").above(0);
  KEY(loss_fn.kl_output_clamp_value)("clamp of the estimate; null: none").above(0);
  OURS(loss_fn.kl_score_function_gradient)
  ("gradient of the KL term with its score-function part, as NeMo-RL after v0.3; false: v0.3's");
  KEY(loss_fn.ratio_clip_min)("the ratio is clipped from below at 1 minus it").at_least(0);
  KEY(loss_fn.ratio_clip_max)("the ratio is clipped from above at 1 plus it").at_least(0);
  KEY(loss_fn.ratio_clip_c)("dual clip: bound of the loss for negative advantages").above(1);
  KEY(loss_fn.use_on_policy_kl_approximation)("weight the KL by exp(current - generation log-prob)");
  KEY(loss_fn.use_importance_sampling_correction)("weight tokens by exp(training - generation log-prob)");
  KEY(loss_fn.truncated_importance_sampling_type)
  ("what happens to weights out of range; tis where a file sets only the range, as NeMo-RL v0.4 and v0.5 meant it")
      .null_default();
  KEY(loss_fn.truncated_importance_sampling_ratio)("upper end of that range").above(0);
  KEY(loss_fn.truncated_importance_sampling_ratio_min)("lower end of that range; null: 0").at_least(0);
  KEY(loss_fn.sequence_level_importance_ratios)("GSPO: one ratio per sequence; needs token_level_loss false");
  KEY(loss_fn.token_level_loss)("mean over all tokens; false: mean over sequences of their means");
  KEY(loss_fn.force_on_policy_ratio)("the ratio is exactly 1; needs one optimizer step per rollout");
  KEY(loss_fn.use_kl_in_reward)
  ("the KL penalty is taken off the rewards of tokens instead of being a term of the loss (reinforce_plus_plus)");
  KEY(loss_fn.use_cispo)("CISPO: the clipped ratio weights the log-prob and has no gradient");
  KEY(loss_fn.disable_ppo_ratio)("REINFORCE: the log-prob itself instead of the ratio");
  KEY(loss_fn.positive_example_nll_weight)
  ("weight of the mean negative log-likelihood of the tokens of correct responses").at_least(0);
}

void add_value_loss(std::vector<Field>& table) {
  KEY(value_loss_fn.scale)("factor of the critic's loss").above(0);
  KEY(value_loss_fn.cliprange)
  ("new values count no further than this from those before the rollout's training; 0 or null: as they are")
      .at_least(0);
}

}  // namespace trireme::config
