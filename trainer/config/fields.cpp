#include "trainer/config/fields.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "base/text.h"

namespace trireme::config {
namespace {

FieldRef reference(auto& member) { return &member; }
FieldRef reference(Named auto& member) { return ChoiceRef(&member); }

#define KEY(member) add(table, #member, [](Config& c) { return reference(c.member); })
#define OURS(member) \
  add(               \
      table, #member, [](Config& c) { return reference(c.member); }, true)
// Keys of grpo that ppo has too, and of policy that value has too.
#define ROLLOUT(member) add_rollout(table, #member, [](RolloutConfig& c) { return reference(c.member); })
#define OUR_ROLLOUT(member) \
  add_rollout(              \
      table, #member, [](RolloutConfig& c) { return reference(c.member); }, true)
#define MODEL(member) add_model(table, #member, [](ModelTrainingConfig& c) { return reference(c.member); })
#define OUR_MODEL(member) \
  add_model(              \
      table, #member, [](ModelTrainingConfig& c) { return reference(c.member); }, true)

struct Entry {
  Field* field;
  Field& operator()(const char* doc) const {
    field->doc = doc;
    return *field;
  }
};

Entry add(std::vector<Field>& table, const std::string& path, std::function<FieldRef(Config&)> get, bool ours = false) {
  Field field;
  field.path = path;
  field.get = std::move(get);
  field.ours = ours;
  Config defaults;
  const FieldRef ref = field.get(defaults);
  if (const auto* choice = std::get_if<ChoiceRef>(&ref))
    field.choices.assign(choice->names.begin(), choice->names.end());
  table.push_back(std::move(field));
  return Entry{&table.back()};
}

Entry add_rollout(std::vector<Field>& table, const std::string& name, FieldRef (*get)(RolloutConfig&),
                  bool ours = false) {
  const Entry entry = add(
      table, "grpo." + name, [get](Config& c) { return get(c.grpo); }, ours);
  entry.field->of_rollout = get;
  return entry;
}

Entry add_model(std::vector<Field>& table, const std::string& name, FieldRef (*get)(ModelTrainingConfig&),
                bool ours = false) {
  const Entry entry = add(
      table, "policy." + name, [get](Config& c) { return get(c.policy); }, ours);
  entry.field->of_model = get;
  return entry;
}

// The same key of another section, by the same words.
Field twin_of(const Field& field, const std::string& from, const std::string& to,
              std::function<FieldRef(Config&)> get) {
  Field twin = field;
  twin.path = to + field.path.substr(from.size());
  twin.doc = replace_all(field.doc, from, to);
  twin.derived = replace_all(field.derived, from, to);
  twin.get = std::move(get);
  return twin;
}

constexpr const char* kAll = "1000000000";  // what null stands for where it means "no bound"

// The table by sections, in the order of the page.

void add_grpo(std::vector<Field>& table) {
  ROLLOUT(num_prompts_per_step)("prompts of one rollout").at_least(1);
  ROLLOUT(num_generations_per_prompt)("responses to each prompt: the size of a group").at_least(1);
  ROLLOUT(max_rollout_turns)("turns of a conversation; 1 is supported").at_least(1);
  ROLLOUT(max_num_epochs)("passes over the training data, at most").at_least(1);
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
  KEY(grpo.async_grpo.enabled)
  ("carry-over: places that a step's last responses leave free take groups of the next steps, and what is not finished "
   "when the step is complete goes on with the new weights. With generation on devices of its own: it generates for "
   "the "
   "next steps while others are trained");
  KEY(grpo.async_grpo.max_trajectory_age_steps)
  ("steps that the weights which drew a token may be older than those that its step begins with; a group is begun only "
   "where this holds, and none is dropped")
      .at_least(0);
  KEY(grpo.async_grpo.in_flight_weight_updates)
  ("unfinished responses go on with new weights; carry-over needs it. False, on devices of their own: engines change "
   "weights only without unfinished responses, and a step is generated with those of max_trajectory_age_steps before "
   "it, "
   "so that a run is repeatable bit for bit");
  KEY(grpo.async_grpo.recompute_kv_cache_after_weight_updates)
  ("after an update the keys and values of unfinished responses are computed again, so that each token has the "
   "log-prob "
   "of its weights exactly; false keeps them, and the memory of the cache is not lent to training");
  OURS(grpo.async_grpo.ratio_from)
  ("of tokens that older weights drew, the ratio of the loss begins with the log-prob under: training, the weights "
   "before the first optimizer step, by a pass over these samples; generation, those that drew them, without a pass");
  KEY(grpo.async_grpo.max_generation_failures)
  ("of generation on devices of its own: engines lost in a row with samples in hand, and no group in between, that end "
   "the run; 0: any number, cluster.collective_timeout_s without a group decides")
      .at_least(0);
  OURS(grpo.async_grpo.lease_timeout_s)
  ("likewise: seconds without an engine step after which what an engine has in hand goes to others; an engine that is "
   "not heard of at all for 10 s, or this if it is shorter, is lost likewise")
      .above(0);
  OURS(grpo.async_grpo.verify_weights_period)
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
}

void add_value_loss(std::vector<Field>& table) {
  KEY(value_loss_fn.scale)("factor of the critic's loss").above(0);
  KEY(value_loss_fn.cliprange)
  ("new values count no further than this from those before the rollout's training; 0 or null: as they are")
      .at_least(0);
}

void add_value(std::vector<Field>& table) {
  for (size_t i = 0, size = table.size(); i < size; ++i) {
    const auto get = table[i].of_model;
    if (get == nullptr) continue;
    table.push_back(twin_of(table[i], "policy.", "value.", [get](Config& c) { return get(c.value); }));
    Field& twin = table.back();
    const std::string name = twin.path.substr(std::string("value.").size());
    if (name == "model_name") {
      twin.from("policy.model_name").doc =
          "the critic: a folder in Hugging Face format (...ForSequenceClassification with one label, or a causal "
          "model, "
          "under a head of zeros), or a Hub id in the local cache";
      twin.null_means.reset();
    }
    for (const char* of_policy :
         {"train_global_batch_size", "train_micro_batch_size", "max_total_sequence_length", "precision"}) {
      if (name == of_policy) twin.from("policy." + name);
    }
  }
}

void add_sft(std::vector<Field>& table) {
  KEY(sft.max_num_epochs)("passes over the training data, at most").at_least(1);
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

void add_policy(std::vector<Field>& table) {
  MODEL(model_name)
  ("a folder in Hugging Face format, a checkpoint directory (its newest step), or a Hub id in the local cache")
      .null_as("");
  KEY(policy.tokenizer.name)("folder or Hub id of the tokenizer").from("policy.model_name");
  KEY(policy.tokenizer.chat_template)
  ("template text or file; default or empty: the model's own; none or null: no template").null_as("none");
  KEY(policy.tokenizer.chat_template_kwargs)("variables for the template").null_default();
  MODEL(train_global_batch_size)("samples in one optimizer step").at_least(1);
  MODEL(train_micro_batch_size)("samples in one forward and backward pass").at_least(1);
  MODEL(logprob_batch_size)("samples in one log-prob pass").from("policy.train_micro_batch_size").at_least(1);
  MODEL(max_total_sequence_length)("tokens of prompt and response together, at most").at_least(2);
  MODEL(precision)("dtype of the live weights and activations").one_of({"bfloat16", "float32"});
  MODEL(max_grad_norm)("gradients are scaled down to this norm; 0 or null: never").at_least(0).null_as("0");
  MODEL(make_sequence_length_divisible_by)
  ("read by NeMo-RL's files; sequences are packed without padding, so there is no length to round up").at_least(1);
  KEY(policy.logprob_chunk_size)
  ("read by NeMo-RL's files; the vocabulary op chooses its own chunk of rows").at_least(1).null_default();
  KEY(policy.offload_optimizer_for_logprob)("optimizer state on the host during log-prob passes");
  OUR_MODEL(activation_checkpointing)
  ("keep only the input of each layer for backward; for runs with neither dtensor_cfg nor megatron_cfg");
  OUR_MODEL(recompute_layers)
  ("keep only the input of the first so many layers, for runs without megatron_cfg; -1: on CUDA as many as the memory "
   "asks for, "
   "after the norms and SwiGLU of all, on CPU none")
      .at_least(-1);
  OUR_MODEL(moe_combine_blocks)
  ("mixtures of experts: in so many runs of experts by id the results of a token are added up and rounded, then those; "
   "0: 8, or the most below it that divides the experts. Expert parallel ranks must divide it")
      .at_least(0);
  OURS(policy.random_weights)
  ("for measurements only: policy, reference model and critic have weights drawn with grpo.seed; of "
   "policy.model_name's folder "
   "only config.json and the tokenizer are read (trireme init-model --shape NAME --no-weights)");
}

void add_batching(std::vector<Field>& table) {
  MODEL(dynamic_batching.enabled)("micro-batches by number of tokens; excludes sequence_packing");
  MODEL(dynamic_batching.train_mb_tokens)
  ("tokens of a training micro-batch").from("max_total_sequence_length * train_micro_batch_size").at_least(1);
  MODEL(dynamic_batching.logprob_mb_tokens)
  ("tokens of a log-prob micro-batch").from("max_total_sequence_length * logprob_batch_size").at_least(1);
  MODEL(dynamic_batching.sequence_length_round)("lengths are rounded up to a multiple of it").at_least(1);
  MODEL(sequence_packing.enabled)("several sequences in one row; off by itself where dynamic_batching is on");
  MODEL(sequence_packing.train_mb_tokens)
  ("tokens of a training row").from("max_total_sequence_length * train_micro_batch_size").at_least(1);
  MODEL(sequence_packing.logprob_mb_tokens)
  ("tokens of a log-prob row").from("max_total_sequence_length * logprob_batch_size").at_least(1);
  MODEL(sequence_packing.algorithm)
  ("how sequences are put into rows; modified_ffd is short for modified_first_fit_decreasing")
      .one_of({"modified_first_fit_decreasing", "concatenative", "first_fit_decreasing", "first_fit_shuffle",
               "modified_ffd"});
  MODEL(sequence_packing.sequence_length_round)
  ("read by NeMo-RL's files; rows are packed without rounding").at_least(1);
  MODEL(sequence_packing.microbatch_order)("order of the rows").one_of({"packer", "largest_first"});
  OUR_MODEL(sequence_packing.share_prompts)
  ("a group's prompt is computed once in a row, in training and log-prob passes; the same log-probs, gradients within "
   "rounding");
}

void add_optimizer(std::vector<Field>& table) {
  MODEL(optimizer.name)
  ("AdamW under any of its names")
      .one_of({"torch.optim.AdamW", "AdamW", "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"});
  MODEL(optimizer.kwargs.lr)("learning rate").at_least(0);
  MODEL(optimizer.kwargs.weight_decay)("decoupled weight decay").at_least(0);
  MODEL(optimizer.kwargs.betas)("decay of the two moments").at_least(0).below(1);
  MODEL(optimizer.kwargs.eps)("added to the root of the second moment").above(0);
  MODEL(scheduler)
  ("list of learning-rate schedulers {name, kwargs}, then {milestones: [...]}; they move once a step of the run (a "
   "rollout with all its optimizer steps), as NeMo-RL's do")
      .null_default();
}

void add_generation(std::vector<Field>& table) {
  KEY(policy.generation.backend)
  ("one engine serves all; other names are accepted")
      .one_of({"trireme", "vllm", "sglang", "megatron", "trtllm", "dynamo"});
  KEY(policy.generation.max_new_tokens)
  ("tokens of a response, at most").from("policy.max_total_sequence_length").at_least(1);
  KEY(policy.generation.temperature)("logits are divided by it").above(0);
  KEY(policy.generation.top_p)
  ("sample from the most likely tokens that together have this probability").above(0).at_most(1);
  KEY(policy.generation.top_k)
  ("sample from this many most likely tokens; 0, -1 or null: all").at_least(-1).null_as("0");
  OURS(policy.generation.min_p)
  ("leave out tokens less likely than this times the most likely; 0: none").at_least(0).below(1);
  KEY(policy.generation.val_temperature)("temperature in validation; 0: greedy").from("temperature").at_least(0);
  KEY(policy.generation.val_top_p)("top_p in validation").from("top_p").above(0).at_most(1);
  KEY(policy.generation.val_top_k)("top_k in validation").from("top_k").at_least(0);
  KEY(policy.generation.stop_token_ids)
  ("tokens that end a response, besides the model's own").at_least(0).null_default();
  KEY(policy.generation.stop_strings)("texts that end a response").null_default();
  OURS(policy.generation.max_running_samples)("samples decoded at once, per rank").at_least(1);
  OURS(policy.generation.prefill_chunk_tokens)("prompt tokens prefilled in one engine step").at_least(1);
  OURS(policy.generation.kv_cache_tokens)("rows of the key-value cache, per rank; 0: as many as fit").at_least(0);
  OURS(policy.generation.kv_cache_memory_fraction)
  ("when kv_cache_tokens is 0: its share of the device's memory that everything else leaves, captured graphs and the "
   "largest step included")
      .above(0)
      .below(1);
  OURS(policy.generation.pipeline_lanes)
  ("under pipeline parallelism: schedulers that take turns, so that stages compute at the same time; 0: as many as "
   "stages. Fewer where the cache has no room for so many of the longest sequences. No sample depends on it")
      .at_least(0);
  OURS(policy.generation.tensor_parallel_size)
  ("tensor parallel ranks of generation; 0: as in training. Another number takes memory for a second copy of the "
   "weights while generating, filled before each rollout (phase refit), and makes previous log-probs a pass of their "
   "own")
      .at_least(0);
  OURS(policy.generation.fold_pipeline)
  ("generate without the pipeline stages of training: each rank has its part of all layers, in a second copy of the "
   "weights, filled before each rollout (phase refit). No sample depends on it");
  OURS(policy.generation.background_sms)
  ("SMs of a GPU, in eights and at most half, that compute reference log-probs of finished responses while "
   "at most 32 are left to be generated; 0: computed afterwards; -1: about 32 of a GPU, 0 on a CPU, where any other "
   "number means a thread of its own. No bit of a result changes (but see grpo.early_gradients)")
      .at_least(-1);
  OURS(policy.generation.forced_lengths)
  ("for measurements only: training responses have these lengths and prompts are cut or repeated to theirs, whatever "
   "the model says, and rewards are drawn. A file {\"prompt_lengths\": [...], \"output_lengths\": [...]} "
   "(bench/README.md) or synthetic:PROMPTSxSAMPLES:mean=M[:max=X][:prompt=P][:seed=S], with "
   "grpo.num_generations_per_prompt responses for each prompt; prompts beyond the last begin again with the first. "
   "Empty: responses end by themselves");
  KEY(policy.generation.colocated.enabled)
  ("generate on the training devices; false: other processes generate (trireme engine), training's ranks only for "
   "validation");
  KEY(policy.generation.colocated.resources.gpus_per_node)
  ("of a cluster of one node, devices that generate when not colocated: the others train. How many engines there are "
   "is "
   "the RLJob's or the launcher's to say")
      .at_least(0)
      .null_as("0");
  KEY(policy.generation.colocated.resources.num_nodes)
  ("of several nodes, those that generate when not colocated: the others train").at_least(0).null_as("0");
}

void add_megatron(std::vector<Field>& table) {
  MODEL(megatron_cfg.enabled)("the Megatron-style back-end: its sizes, optimizer and scheduler count");
  MODEL(megatron_cfg.tensor_model_parallel_size)
  ("ranks that share each layer. A size that is auto is chosen by `trireme plan` (docs/layouts.md) and refused by a "
   "run")
      .at_least(1)
      .or_auto();
  MODEL(megatron_cfg.pipeline_model_parallel_size)("pipeline stages").at_least(1).or_auto();
  MODEL(megatron_cfg.context_parallel_size)("ranks that share each sequence").at_least(1).or_auto();
  MODEL(megatron_cfg.expert_model_parallel_size)("ranks that share the experts").at_least(1).or_auto();
  MODEL(megatron_cfg.expert_tensor_parallel_size)("ranks that share each expert").at_least(1);
  MODEL(megatron_cfg.sequence_parallel)
  ("read by NeMo-RL's files; rows are sharded over the tensor ranks outside of attention and MLP, whether or not");
  OUR_MODEL(megatron_cfg.tp_comm_overlap)
  ("tensor-parallel ranks exchange rows while they compute the products around, in training; the bits are the same");
  MODEL(megatron_cfg.num_layers_in_first_pipeline_stage)("layers of the first stage").from("evenly").at_least(1);
  MODEL(megatron_cfg.num_layers_in_last_pipeline_stage)("layers of the last stage").from("evenly").at_least(1);
  OUR_MODEL(megatron_cfg.virtual_pipeline_model_parallel_size)
  ("pieces of each stage, which take turns (Megatron's interleaved schedule): less waiting, more messages")
      .at_least(1)
      .null_as("1");
  MODEL(megatron_cfg.activation_checkpointing)
  ("keep only the input of each layer for backward; counts where recompute_granularity is null");
  MODEL(megatron_cfg.recompute_granularity)
  ("what backward computes again; full: layers, selective: recompute_modules of every layer; null: what "
   "activation_checkpointing says, and where that is false as little as the device's memory asks for. With "
   "activation_checkpointing false it counts as null, as in NeMo-RL; alone it sets activation_checkpointing")
      .one_of({"auto", "full", "selective"})
      .null_as("auto");
  MODEL(megatron_cfg.recompute_method)
  ("with full: every layer (uniform), or the first recompute_num_layers (block)").one_of({"uniform", "block"});
  MODEL(megatron_cfg.recompute_num_layers)
  ("layers of each piece of a stage computed again with block; 1 with uniform").at_least(0);
  MODEL(megatron_cfg.recompute_modules)
  ("with selective: layernorm, mlp_act (SwiGLU), moe (gate and up of experts), core_attn (always so here)")
      .null_default();
  MODEL(megatron_cfg.freeze_moe_router)("routers are not trained");
  MODEL(megatron_cfg.moe_router_dtype)("dtype of router logits").one_of({"fp64", "fp32"}).null_as("fp32");
  MODEL(megatron_cfg.moe_router_load_balancing_type)
  ("loss that balances experts: of a micro-batch's tokens (aux_loss), of each sample's (seq_aux_loss)")
      .one_of({"none", "aux_loss", "seq_aux_loss"});
  MODEL(megatron_cfg.moe_aux_loss_coeff)("its weight").at_least(0);
  MODEL(megatron_cfg.moe_router_bias_update_rate)("step of the loss-free balancing bias").at_least(0);
  MODEL(megatron_cfg.defer_fp32_logits)("logits become fp32 chunk by chunk (always so here)");
}

void add_megatron_optimizer(std::vector<Field>& table) {
  MODEL(megatron_cfg.optimizer.optimizer)("kind of optimizer").one_of({"adam"});
  MODEL(megatron_cfg.optimizer.lr)("learning rate").at_least(0);
  MODEL(megatron_cfg.optimizer.min_lr)("learning rate at the end of the decay").at_least(0);
  MODEL(megatron_cfg.optimizer.weight_decay)("decoupled weight decay").at_least(0);
  MODEL(megatron_cfg.optimizer.adam_beta1)("decay of the first moment").at_least(0).below(1);
  MODEL(megatron_cfg.optimizer.adam_beta2)("decay of the second moment").at_least(0).below(1);
  MODEL(megatron_cfg.optimizer.adam_eps)("added to the root of the second moment").above(0);
  MODEL(megatron_cfg.optimizer.params_dtype)
  ("dtype of the master weights; bfloat16 is not supported yet").one_of({"float32", "bfloat16"});
  MODEL(megatron_cfg.optimizer.use_distributed_optimizer)
  ("optimizer state sharded over data parallel ranks; here data_parallel_sharding_strategy decides");
  MODEL(megatron_cfg.optimizer.clip_grad)
  ("gradients are scaled down to this norm; 0: never").from("policy.max_grad_norm").at_least(0);
  MODEL(megatron_cfg.scheduler.start_weight_decay)
  ("weight decay at the start").from("optimizer.weight_decay").at_least(0);
  MODEL(megatron_cfg.scheduler.end_weight_decay)
  ("weight decay at the end").from("optimizer.weight_decay").at_least(0);
  MODEL(megatron_cfg.scheduler.weight_decay_incr_style)
  ("how it goes from start to end").one_of({"constant", "linear", "cosine"});
  MODEL(megatron_cfg.scheduler.lr_decay_style)
  ("how the learning rate falls after the warm-up").one_of({"constant", "linear", "cosine", "inverse-square-root"});
  MODEL(megatron_cfg.scheduler.lr_decay_iters)
  ("steps (rollouts) of warm-up and decay together").at_least(1).null_default();
  MODEL(megatron_cfg.scheduler.lr_warmup_iters)("steps (rollouts) of the linear warm-up").at_least(0);
  MODEL(megatron_cfg.scheduler.lr_warmup_init)("learning rate at its start").at_least(0);
  MODEL(megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32)
  ("gradients are summed over ranks in fp32");
  MODEL(megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce)
  ("gradients are summed over ranks bucket by bucket while the backward pass runs; the bits are the same");
  MODEL(megatron_cfg.distributed_data_parallel_config.overlap_param_gather)
  ("weights are gathered bucket by bucket while the next forward pass runs; the bits are the same");
  MODEL(megatron_cfg.distributed_data_parallel_config.use_custom_fsdp)
  ("whether data_parallel_sharding_strategy counts; false, as in NeMo-RL's files: optim, whatever it says");
  MODEL(megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy)
  ("what data parallel ranks share: nothing, optimizer state, gradients too, weights too (layouts.md)")
      .one_of({"no_shard", "optim", "optim_grads", "optim_grads_params"});
}

void add_dtensor(std::vector<Field>& table) {
  MODEL(dtensor_cfg.enabled)
  ("the FSDP-style back-end: its sizes and policy.optimizer, policy.scheduler count; state is optim_grads_params");
  MODEL(dtensor_cfg.tensor_parallel_size)("ranks that share each layer").at_least(1).or_auto();
  MODEL(dtensor_cfg.context_parallel_size)("ranks that share each sequence").at_least(1).or_auto();
  MODEL(dtensor_cfg.sequence_parallel)
  ("read by NeMo-RL's files; rows are sharded over the tensor ranks outside of attention and MLP, whether or not");
  MODEL(dtensor_cfg.cpu_offload)("weights and optimizer state on the host; not supported yet");
  MODEL(dtensor_cfg.activation_checkpointing)("keep only the input of each layer for backward");
}

#define DATASET(which)                                                                                               \
  KEY(data.which.dataset_name)                                                                                       \
  ("a known data set (see below), the Hub's id of any other (org/name), or any name with data_path").null_default(); \
  KEY(data.which.data_path)                                                                                          \
  ("a file (.jsonl, .json, .parquet; .gz, .zst), a pattern with *, or a folder: all its files, or those of split")   \
      .null_default();                                                                                               \
  OURS(data.which.mixture)                                                                                           \
  ("instead: \"WEIGHT SOURCE\" each, with a path as above, or a data set and its split (gsm8k, org/name:split)")     \
      .null_default();                                                                                               \
  OURS(data.which.format)("format of the files").one_of({"auto", "jsonl", "parquet"});                               \
  KEY(data.which.input_key)                                                                                          \
  ("name of the prompt's column, or a path into one: prompt[0].content")                                             \
      .from("from the data set, else from its columns");                                                             \
  KEY(data.which.output_key)                                                                                         \
  ("name of the column of golds, or a path: answers.text[0]").from("from the data set, else from its columns");      \
  OURS(data.which.system_key)                                                                                        \
  ("name of a column, or a path, with the system message of each row").from("from the data set, else none");         \
  KEY(data.which.split)("its name, as the files have it: SPLIT.*, SPLIT-00000-of-00002.*");                          \
  KEY(data.which.prompt_file)("text with {} where the prompt goes").null_default();                                  \
  KEY(data.which.system_prompt_file)("system message of rows without their own").null_default();                     \
  KEY(data.which.env_name)("only this env grades; empty: every enabled one, weighted").null_default()

void add_data(std::vector<Field>& table) {
  KEY(data.max_input_seq_length)
  ("longer prompts are skipped and counted").from("policy.max_total_sequence_length").at_least(1);
  KEY(data.shuffle)("a new order in every epoch, by seed");
  OURS(data.seed)("seed of that order").from("grpo.seed or sft.seed").at_least(0);
  OURS(data.max_bad_lines)("malformed lines that may be skipped before the run stops").at_least(0);
  OURS(data.fail_on_long_prompt)("a prompt longer than max_input_seq_length stops the run instead");
  OURS(data.apply_chat_template)("render prompts with the chat template; false: as they stand in the file");
  DATASET(train);
  KEY(data.train.split_validation_size)
  ("held out for validation where data.validation names no data: a share, or rows when 1 or more").at_least(0);
  KEY(data.train.seed)("seed of the hold-out").at_least(0).null_default();
  DATASET(validation);
}

#define REWARD(which)                                                                        \
  OURS(env.which.enabled)("use this reward");                                                \
  OURS(env.which.weight)("its weight in the sum");                                           \
  KEY(env.which.num_workers)("responses to prompts graded at once").at_least(1);             \
  OURS(env.which.timeout_s)("seconds the responses to a prompt may take together").above(0); \
  OURS(env.which.failure_policy)                                                             \
  ("a reward that fails counts 0, leaves its sample out, or stops the run")

void add_env(std::vector<Field>& table) {
  OURS(env.max_failed_share)
  ("the run stops when a reward fails for more than this share of a step's responses").at_least(0).at_most(1);
  OURS(env.startup_timeout_s)
  ("seconds in which each reward must answer a probe before the first step; 0: no probe").at_least(0);
  REWARD(math);
  KEY(env.math.math_verify_impl)
  ("the built-in verifier under any of its names").one_of({"trireme", "hf_math_verify", "dapo_math_verify"});
  REWARD(format);
  OURS(env.format.pattern)("RE2 expression that must be found in the response");
  OURS(env.format.tags)("<tag>...</tag> blocks that must stand exactly once each, in this order").null_default();
  REWARD(command);
  OURS(env.command.command)("program and arguments; gets one JSON object a line, answers one a line").null_default();
  OURS(env.command.answer_timeout_s)("seconds one response may take; 0: only timeout_s").at_least(0);
  REWARD(http);
  OURS(env.http.url)("responses are POSTed to it; empty: to TRIREME_REWARD_URL, which the operator sets");
  OURS(env.http.headers)
  ("\"Name: value\" of each request; {env:NAME} and {file:PATH} in a value are read when it is sent and kept nowhere")
      .null_default();
  OURS(env.http.ca_file)("PEM file of the authorities that may sign the server's certificate; empty: the system's");
  OURS(env.http.max_batch)("responses in one POST").at_least(1);
  OURS(env.http.max_attempts)("tries of one POST").at_least(1);
  OURS(env.reward_model.enabled)
  ("use the score of a reward model on the trainer's devices; also by data.train.env_name reward_model");
  KEY(env.reward_model.model_name)
  ("folder of a ...ForSequenceClassification with one label and the policy's vocabulary, or a Hub id in the local "
   "cache");
  OURS(env.reward_model.weight)("its weight in the sum");
}

void add_logger(std::vector<Field>& table) {
  KEY(logger.log_dir)("folder of the step log, the report and dumps");
  KEY(logger.num_val_samples_to_print)("validation responses shown after each validation").at_least(0);
  KEY(logger.tensorboard_enabled)("write event files for TensorBoard");
  KEY(logger.wandb_enabled)
  ("write an offline run to log_dir/wandb; `wandb sync log_dir/wandb/offline-run-*` uploads it");
  KEY(logger.mlflow_enabled)("send steps to an MLflow server");
  KEY(logger.tensorboard.log_dir)("their folder").from("logger.log_dir/tensorboard");
  KEY(logger.wandb.project)("its project").null_as("");
  KEY(logger.wandb.name)("its name; empty: chosen by W&B").null_as("");
  KEY(logger.wandb.entity)("its user or team; empty: whoever uploads it").null_as("");
  KEY(logger.wandb.group)("its group").null_as("");
  KEY(logger.wandb.tags)("its tags").null_default();
  KEY(logger.mlflow.experiment_name)("its experiment; made where there is none");
  KEY(logger.mlflow.run_name)("the run's name; empty: chosen by the server").null_as("");
  KEY(logger.mlflow.tracking_uri)
  ("http(s)://host[:port]; empty: MLFLOW_TRACKING_URI. Credentials come from MLFLOW_TRACKING_TOKEN, or "
   "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
      .null_as("");
  OURS(logger.prometheus.enabled)("serve /metrics and /healthz");
  OURS(logger.prometheus.address)("address to listen on");
  OURS(logger.prometheus.port)("port; 0: chosen by the system").at_least(0).at_most(65535);
  OURS(logger.prometheus.per_rank)("every rank serves, at port + rank");
  OURS(logger.rollouts.enabled)
  ("write log_dir/train_data_step_N.jsonl: a line a sample with prompt, response, reward, its parts by name, "
   "advantage");
  OURS(logger.rollouts.period)("steps between two of them").at_least(1);
  OURS(logger.rollouts.max_samples)("samples in one, at most: whole groups from the first on").at_least(1);
  OURS(logger.rollouts.keep_steps)("files kept; older ones are removed").at_least(1);
  OURS(logger.report)("write log_dir/report.html");
  OURS(logger.report_period)("steps between its updates").at_least(1);
  OURS(logger.dump_steps)("steps whose tensors are written to log_dir").at_least(0).null_default();
}

void add_checkpointing(std::vector<Field>& table) {
  KEY(checkpointing.enabled)("write checkpoints");
  KEY(checkpointing.checkpoint_dir)("their folder");
  KEY(checkpointing.metric_name)
  ("value that ranks them, of the step they belong to; one without it ranks last; null: the newest are kept. GRPO: "
   "val:accuracy (the default), val:avg_length, val:pass_k, train:reward, train:loss, train:grad_norm, "
   "train:correct_rate, train:truncation_rate, train:mean_gen_tokens_per_sample. SFT: val:loss, train:loss, "
   "train:grad_norm")
      .null_as("");
  KEY(checkpointing.higher_is_better)("direction of that metric");
  KEY(checkpointing.keep_top_k)("checkpoints kept; 0 or null: all").at_least(0).null_as("0");
  KEY(checkpointing.save_period)("steps between checkpoints").at_least(1);
  KEY(checkpointing.save_optimizer)("with optimizer state, so that a run can be resumed");
  KEY(checkpointing.checkpoint_must_save_by)
  ("days:hours:minutes:seconds after the start at which a checkpoint is written and the run ends").null_default();
  OURS(checkpointing.staging_gib)
  ("GiB of host memory in which a rank keeps what is copied and not written yet; 0: all that its part of a checkpoint "
   "needs, but no more than its share of half of the memory available at the start")
      .at_least(0);
}

void add_cluster(std::vector<Field>& table) {
  KEY(cluster.gpus_per_node)("devices on each node").at_least(1);
  KEY(cluster.num_nodes)("nodes").at_least(1);
  OURS(cluster.processes)("ranks on each node").from("cluster.gpus_per_node").at_least(1);
  OURS(cluster.device)("auto: cuda where there is one").one_of({"auto", "cpu", "cuda"});
  OURS(cluster.collective_timeout_s)("deadline of every collective and of the rendezvous").above(0);
}

std::string quote(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

template <class T, class F>
std::string list_text(const std::vector<T>& values, F&& one) {
  std::vector<std::string> parts;
  for (const auto& value : values) parts.push_back(one(value));
  return "[" + join(parts, ", ") + "]";
}

std::string scheduler_text(const SchedulerConfig& scheduler) {
  std::vector<std::string> parts;
  for (const auto& piece : scheduler.pieces) {
    std::vector<std::string> kwargs;
    for (const auto& [name, value] : piece.kwargs) kwargs.push_back(name + ": " + format_double(value));
    parts.push_back("{name: torch.optim.lr_scheduler." + piece.name + ", kwargs: {" + join(kwargs, ", ") + "}}");
  }
  if (!scheduler.milestones.empty()) {
    parts.push_back("{milestones: " + list_text(scheduler.milestones, [](int64_t v) { return std::to_string(v); }) +
                    "}");
  }
  return "[" + join(parts, ", ") + "]";
}

}  // namespace

bool ChoiceRef::set(const std::string& name) const {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return false;
  set_(at_, static_cast<size_t>(found - names.begin()));
  return true;
}

const std::vector<Field>& fields() {
  static const std::vector<Field> kFields = [] {
    std::vector<Field> table;
    add(
        table, "algorithm", [](Config& c) -> FieldRef { return &c.algorithm; }, true)(
        "what is run; where no file says it: ppo for a file with a section ppo and none grpo, sft likewise, else grpo")
        .one_of({"grpo", "ppo", "sft"});
    add(
        table, "compatibility", [](Config& c) -> FieldRef { return &c.compatibility; }, true)(
        "the version of NeMo-RL whose defaults the keys of 'Defaults by version' take where the file says nothing")
        .one_of({"v0.3", "main"})
        .from("v0.3 where the file has a key that only v0.3 has (policy.fsdp_offload_enabled), else main");
    for (const auto add_section :
         {add_grpo, add_async, add_ppo, add_sft, add_loss, add_value_loss, add_policy, add_batching, add_optimizer,
          add_generation, add_megatron, add_megatron_optimizer, add_dtensor, add_value, add_data, add_env, add_logger,
          add_checkpointing, add_cluster}) {
      add_section(table);
    }
    return table;
  }();
  return kFields;
}

const std::vector<AliasKey>& alias_keys() {
  static const std::vector<AliasKey> kKeys = [] {
    std::vector<AliasKey> keys = {
        {"grpo.adv_estimator.normalize_rewards", {"grpo.normalize_rewards"}, true},
        {"grpo.adv_estimator.use_leave_one_out_baseline", {"grpo.use_leave_one_out_baseline"}, true},
        {"policy.generation.background_processors", {"policy.generation.background_sms"}, false, true},
        {"data.train_data_path", {"data.train.data_path"}},
        {"data.val_data_path", {"data.validation.data_path"}},
    };
    // v0.3 has data-set keys directly under data, later versions under data.default: both stand for train and
    // validation alike (validation inherits no path: it would be the training data).
    for (const char* name : {"input_key", "output_key", "prompt_file", "system_prompt_file", "env_name"}) {
      for (const char* from : {"data.", "data.default."}) {
        keys.push_back(
            {std::string(from) + name, {std::string("data.train.") + name, std::string("data.validation.") + name}});
      }
    }
    for (const char* name : {"dataset_name", "split", "split_validation_size"}) {
      for (const char* from : {"data.", "data.default."}) {
        keys.push_back({std::string(from) + name, {std::string("data.train.") + name}});
      }
    }
    keys.push_back({"data.default.data_path", {"data.train.data_path"}});
    return keys;
  }();
  return kKeys;
}

const char* type_name(const FieldRef& ref) {
  static const char* const kNames[] = {
      "true or false",     "an integer",      "a number",  "a number or null",     "text", "a list of integers",
      "a list of numbers", "a list of texts", "a mapping", "a list of schedulers", "text"};
  return kNames[ref.index()];
}

std::string flow_text(const FieldRef& ref) {
  struct Visitor {
    std::string operator()(bool* v) const { return *v ? "true" : "false"; }
    std::string operator()(int64_t* v) const { return std::to_string(*v); }
    std::string operator()(double* v) const { return format_double(*v); }
    std::string operator()(std::optional<double>* v) const { return *v ? format_double(**v) : "null"; }
    std::string operator()(std::string* v) const { return quote(*v); }
    std::string operator()(std::vector<int64_t>* v) const {
      return list_text(*v, [](int64_t x) { return std::to_string(x); });
    }
    std::string operator()(std::vector<double>* v) const {
      return list_text(*v, [](double x) { return format_double(x); });
    }
    std::string operator()(std::vector<std::string>* v) const { return list_text(*v, quote); }
    std::string operator()(nlohmann::json* v) const {
      return v->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    }
    std::string operator()(SchedulerConfig* v) const { return scheduler_text(*v); }
    std::string operator()(const ChoiceRef& v) const { return quote(v.name()); }
  };
  return std::visit(Visitor{}, ref);
}

std::string file_text(const Field& field, const FieldRef& ref) {
  if (is_derived_mark(field, ref)) return "null";
  const auto* number = std::get_if<int64_t*>(&ref);
  if (field.may_be_auto && number != nullptr && **number == kAutoSize) return "auto";
  return flow_text(ref);
}

bool is_derived_mark(const Field& field, const FieldRef& ref) {
  if (field.derived.empty()) return false;
  if (const auto* number = std::get_if<int64_t*>(&ref)) return **number == kDerived;
  if (const auto* number = std::get_if<double*>(&ref)) return **number == static_cast<double>(kDerived);
  if (const auto* text = std::get_if<std::string*>(&ref)) return (*text)->empty();
  return false;
}

const std::map<std::string, std::map<std::string, double>>& known_schedulers() {
  static const double kRequired = std::nan("");
  static const std::map<std::string, std::map<std::string, double>> kSchedulers = {
      {"LinearLR", {{"start_factor", 1.0 / 3.0}, {"end_factor", 1.0}, {"total_iters", 5}}},
      {"ConstantLR", {{"factor", 1.0 / 3.0}, {"total_iters", 5}}},
      {"CosineAnnealingLR", {{"T_max", kRequired}, {"eta_min", 0.0}}},
      {"ExponentialLR", {{"gamma", kRequired}}},
  };
  return kSchedulers;
}

const std::vector<KnownDataset>& known_datasets() {
  static const std::vector<KnownDataset> kDatasets = {
      {"gsm8k", "openai/gsm8k", "question", "answer"},
      {"DeepScaler", "agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer", {"deepscaler.json"}},
      {"OpenMathInstruct-2", "nvidia/OpenMathInstruct-2", "problem", "expected_answer"},
      {"squad", "rajpurkar/squad", "question", "answers.text[0]", {}, "context", "validation"},
      {"DAPOMath17K", "BytedTsinghua-SIA/DAPO-Math-17k", "prompt[0].content", "reward_model.ground_truth"},
      {"DAPOMathAIME2024", "BytedTsinghua-SIA/AIME-2024", "prompt[0].content", "reward_model.ground_truth"},
  };
  return kDatasets;
}

const KnownDataset* find_dataset(const std::string& name) {
  const auto letters = [](const std::string& text) {  // "openmathinstruct2", as v0.3 writes it, is OpenMathInstruct-2
    std::string kept;
    for (const char c : to_lower(text)) {
      if (std::isalnum(static_cast<unsigned char>(c))) kept += c;
    }
    return kept;
  };
  for (const KnownDataset& known : known_datasets()) {
    if (name == known.hub_id || letters(name) == letters(known.name)) return &known;
  }
  return nullptr;
}

}  // namespace trireme::config
