// Rules across keys, each with a sentence that says what to change.
#include <algorithm>
#include <cmath>
#include <functional>

#include "base/text.h"
#include "base/url.h"
#include "topology/topology.h"
#include "trainer/config/config.h"
#include "trainer/config/fields.h"
#include "trainer/config/rules.h"

namespace trireme {
namespace {

using config::saturating_product;

using Problems = std::vector<config::Problem>;

std::string number(int64_t value) { return std::to_string(value); }

// Whether so many data parallel ranks can share an optimizer step's samples.
void check_dealt(const Config& c, int64_t dp, Problems& out) {
  const auto& p = c.policy;
  const int64_t gbs = p.train_global_batch_size;
  if (gbs % dp != 0) {
    out.push_back({"policy.train_global_batch_size",
                   number(gbs) + " cannot be divided by the " + number(dp) + " data parallel ranks"});
  } else if (!p.sequence_packing.enabled && !p.dynamic_batching.enabled &&
             gbs % saturating_product(dp, p.train_micro_batch_size) != 0) {
    out.push_back({"policy.train_global_batch_size",
                   number(gbs) + " cannot be divided by train_micro_batch_size " + number(p.train_micro_batch_size) +
                       " x " + number(dp) + " data parallel ranks; turn sequence_packing on or change one of them"});
  }
}

// Whether a rollout is whole optimizer steps.
void check_optimizer_steps(const Config& c, Problems& out) {
  if (!has_rollouts(c)) return;
  const int64_t gbs = c.policy.train_global_batch_size;
  const int64_t samples = saturating_product(c.grpo.num_prompts_per_step, c.grpo.num_generations_per_prompt);
  const std::string product = number(samples) + " samples of a step (num_prompts_per_step " +
                              number(c.grpo.num_prompts_per_step) + " x num_generations_per_prompt " +
                              number(c.grpo.num_generations_per_prompt) + ")";
  if (gbs > samples) {
    out.push_back({"policy.train_global_batch_size", number(gbs) + " is more than the " + product});
  } else if (samples % gbs != 0) {
    out.push_back({"policy.train_global_batch_size", number(gbs) + " does not divide the " + product});
  }
  if (c.loss_fn.force_on_policy_ratio && gbs != samples) {
    out.push_back({"loss_fn.force_on_policy_ratio",
                   "needs one optimizer step per rollout: set policy.train_global_batch_size to the " + product});
  }
}

// By the keys of the sizes above 1: only these can be too large.
config::Problem problem_of_product(const Config& c, ProductProblem product) {
  std::erase_if(product.sizes, [](const ProductProblem::Size& size) { return size.size == 1; });
  for (ProductProblem::Size& size : product.sizes) size.name = parallel_size_key(c, size.name);
  const bool elsewhere = generates_elsewhere(c);
  product.ranks += std::string(elsewhere ? " that train" : "") + " (cluster.num_nodes " + number(c.cluster.num_nodes) +
                   " x cluster.processes " + number(c.cluster.processes) +
                   (elsewhere ? ", without policy.generation.colocated.resources)" : ")");
  // The first by which alone it could be put right.
  const auto wrong = std::find_if(product.sizes.begin(), product.sizes.end(),
                                  [](const ProductProblem::Size& size) { return !size.legal.empty(); });
  return {(wrong == product.sizes.end() ? product.sizes.front() : *wrong).name, to_string(product)};
}

void check_batches(const Config& c, Problems& out) {
  const ParallelSizes sizes = parallel_sizes(c);
  const Layout layout{
      .tp = sizes.tensor, .cp = sizes.context, .ep = sizes.expert, .pp = sizes.pipeline, .etp = sizes.expert_tensor};
  bool dealt = true;
  for (ProductProblem& product : product_problems(layout, world_size(c), c.cluster.processes)) {
    dealt = dealt && product.sizes.front().name != "tp";  // else how many data parallel ranks there are is not known
    out.push_back(problem_of_product(c, std::move(product)));
  }
  if (!dealt) return;
  const bool sized = auto_sizes(c).empty();  // nor is it here
  const int64_t dp = sized ? data_parallel_size(c) : 1;
  check_dealt(c, dp, out);
  check_optimizer_steps(c, out);
}

void check_lengths(const Config& c, Problems& out) {
  const auto& p = c.policy;
  const int64_t longest = p.max_total_sequence_length;
  if (p.generation.max_new_tokens > longest) {
    out.push_back(
        {"policy.generation.max_new_tokens",
         number(p.generation.max_new_tokens) + " is more than policy.max_total_sequence_length " + number(longest)});
  }
  if (c.data.max_input_seq_length > longest) {
    out.push_back(
        {"data.max_input_seq_length",
         number(c.data.max_input_seq_length) + " is more than policy.max_total_sequence_length " + number(longest)});
  }
  const auto check_tokens = [&](const std::string& key, int64_t tokens) {
    if (tokens < longest)
      out.push_back(
          {key, number(tokens) + " cannot hold one sequence of policy.max_total_sequence_length " + number(longest)});
  };
  if (p.sequence_packing.enabled && p.dynamic_batching.enabled) {
    out.push_back(
        {"policy.dynamic_batching.enabled", "excludes policy.sequence_packing.enabled; turn one of them off"});
  } else if (p.sequence_packing.enabled) {
    check_tokens("policy.sequence_packing.train_mb_tokens", p.sequence_packing.train_mb_tokens);
    check_tokens("policy.sequence_packing.logprob_mb_tokens", p.sequence_packing.logprob_mb_tokens);
  } else if (p.dynamic_batching.enabled) {
    check_tokens("policy.dynamic_batching.train_mb_tokens", p.dynamic_batching.train_mb_tokens);
    check_tokens("policy.dynamic_batching.logprob_mb_tokens", p.dynamic_batching.logprob_mb_tokens);
  }
  if (p.sequence_packing.share_prompts && !p.sequence_packing.enabled) {
    out.push_back(
        {"policy.sequence_packing.share_prompts",
         "needs policy.sequence_packing.enabled; without it micro-batches are cut by samples, not by groups"});
  } else if (p.sequence_packing.share_prompts && c.algorithm == "sft") {
    out.push_back({"policy.sequence_packing.share_prompts",
                   "is for GRPO and PPO, where the responses of a group have one prompt; leave it out of an SFT run"});
  }
  if (p.generation.kv_cache_tokens > 0 && p.generation.kv_cache_tokens < longest) {
    out.push_back({"policy.generation.kv_cache_tokens",
                   number(p.generation.kv_cache_tokens) +
                       " cannot hold one sequence of policy.max_total_sequence_length " + number(longest)});
  }
}

// Of processes that generate for ranks elsewhere: how many a machine has is not the configuration's to know.
void check_engine(const Config& c, Problems& out) {
  const GenerationConfig& g = c.policy.generation;
  const int64_t tensor = std::max<int64_t>(1, g.tensor_parallel_size);
  if (g.expert_parallel_size > 1 && tensor % g.expert_parallel_size != 0) {
    out.push_back({"policy.generation.expert_parallel_size",
                   number(g.expert_parallel_size) + " does not divide the " + number(tensor) +
                       " tensor ranks of an engine (policy.generation.tensor_parallel_size)"});
  }
}

void check_generation(const Config& c, Problems& out) {
  const GenerationConfig& g = c.policy.generation;
  if (g.fold_pipeline && parallel_sizes(c).pipeline == 1 && auto_sizes(c).empty()) {
    out.push_back({"policy.generation.fold_pipeline",
                   "folds pipeline stages, and policy.megatron_cfg.pipeline_model_parallel_size is 1: leave it false"});
  }
  if (g.fold_pipeline && g.pipeline_lanes > 0) {
    out.push_back({"policy.generation.pipeline_lanes", number(g.pipeline_lanes) +
                                                           " lanes need stages, and policy.generation.fold_pipeline "
                                                           "generates without: leave one of them out"});
  }
  const int64_t stages = g.fold_pipeline ? 1 : parallel_sizes(c).pipeline;
  if (generates_elsewhere(c)) {
    check_engine(c, out);
  } else if (g.expert_parallel_size > 0) {
    out.push_back({"policy.generation.expert_parallel_size",
                   "is for engines (policy.generation.colocated.enabled false); ranks that train generate with the "
                   "experts that they train: leave it 0"});
  } else if (g.tensor_parallel_size > 1 && world_size(c) % saturating_product(g.tensor_parallel_size, stages) != 0) {
    out.push_back({"policy.generation.tensor_parallel_size", number(g.tensor_parallel_size) + " x " + number(stages) +
                                                                 " stages do not divide the " + number(world_size(c)) +
                                                                 " ranks"});
  } else if (g.tensor_parallel_size > 1 && c.cluster.processes % g.tensor_parallel_size != 0) {
    out.push_back({"policy.generation.tensor_parallel_size",
                   number(g.tensor_parallel_size) + " does not divide the " + number(c.cluster.processes) +
                       " ranks of a node (cluster.processes), and tensor parallel ranks share one"});
  }
  if (g.pipeline_lanes > 0 && parallel_sizes(c).pipeline == 1) {
    out.push_back({"policy.generation.pipeline_lanes",
                   number(g.pipeline_lanes) +
                       " lanes need stages: set policy.megatron_cfg.pipeline_model_parallel_size above 1, or 0 lanes"});
  }
}

void check_recompute(const Config& c, Problems& out) {
  const MegatronConfig& m = c.policy.megatron_cfg;
  if (!m.enabled) {
    const bool all = c.policy.dtensor_cfg.enabled ? c.policy.dtensor_cfg.activation_checkpointing
                                                  : c.policy.activation_checkpointing;
    if (all && c.policy.recompute_layers >= 0)
      out.push_back(
          {"policy.recompute_layers", "contradicts activation_checkpointing, which means every layer; set one"});
    return;
  }
  if (m.recompute_granularity == "full" && m.recompute_method == "uniform" && m.recompute_num_layers != 1) {
    out.push_back({"policy.megatron_cfg.recompute_num_layers",
                   number(m.recompute_num_layers) +
                       " layers a chunk is not supported with recompute_method uniform, which keeps each layer's "
                       "input; set 1, or recompute_method block for the first " +
                       number(m.recompute_num_layers) + " layers"});
  }
  for (const std::string& module : m.recompute_modules) {
    if (module == "layernorm" || module == "mlp_act" || module == "moe" || module == "core_attn") continue;
    out.push_back({"policy.megatron_cfg.recompute_modules",
                   "'" + module +
                       "' is not known; take some of layernorm, mlp_act (SwiGLU), moe (gate and up of experts) and "
                       "core_attn (always so here: attention keeps no probabilities)"});
  }
}

void check_grpo(const Config& c, Problems& out) {
  const auto& g = c.grpo;
  const bool group_baseline =
      c.algorithm == "grpo" && (g.adv_estimator.name == AdvantageEstimator::kGrpo || g.adv_estimator.minus_baseline);
  if (g.num_generations_per_prompt < 2 && group_baseline) {
    out.push_back(
        {"grpo.num_generations_per_prompt", "a group of 1 has no baseline, so every advantage is 0; set at least 2"});
  }
  if (g.advantage_clip_low && g.advantage_clip_high && *g.advantage_clip_low > *g.advantage_clip_high) {
    out.push_back({"grpo.advantage_clip_low", "is above grpo.advantage_clip_high"});
  }
  if (g.reward_scaling.enabled && !(g.reward_scaling.source_min < g.reward_scaling.source_max)) {
    out.push_back({"grpo.reward_scaling.source_min", "must be below source_max"});
  }
  if (g.reward_shaping.enabled && !g.reward_shaping.stop_properly_penalty_coef &&
      g.reward_shaping.overlong_buffer_length > g.reward_shaping.max_response_length) {
    out.push_back({"grpo.reward_shaping.overlong_buffer_length",
                   "is longer than max_response_length " + number(g.reward_shaping.max_response_length)});
  }
  if (g.batch_multiplier != 1.0) {
    const double prompts = g.batch_multiplier * static_cast<double>(g.num_prompts_per_step);
    if (!g.use_dynamic_sampling) out.push_back({"grpo.batch_multiplier", "needs grpo.use_dynamic_sampling"});
    if (prompts != std::floor(prompts) || prompts > 1e12) {
      out.push_back({"grpo.batch_multiplier",
                     "times num_prompts_per_step " + number(g.num_prompts_per_step) + " is not a number of prompts"});
    }
  }
  if (g.stop_at_validation_metric.empty() != !g.stop_at_validation_threshold.has_value()) {
    out.push_back({"grpo.stop_at_validation_metric",
                   "belongs together with grpo.stop_at_validation_threshold: set both or neither"});
  }
  if (g.use_dynamic_sampling && g.num_generations_per_prompt < 2)
    out.push_back({"grpo.use_dynamic_sampling",
                   "keeps groups whose rewards differ, and groups of 1 have one: set grpo.num_generations_per_prompt "
                   "to at least 2, or switch it off"});
  if (g.max_num_epochs == 0) out.push_back({"grpo.max_num_epochs", "must be at least 1, or -1 for no limit"});
  if (g.early_gradients && c.algorithm == "grpo") {
    const char* why =
        g.adv_estimator.name == AdvantageEstimator::kReinforcePlusPlus
            ? "cannot be used where advantages are whitened over the whole batch"
        : g.use_dynamic_sampling ? "cannot be used with dynamic sampling, which decides late what a batch is"
        : g.shuffle_rewards      ? "cannot be used with grpo.shuffle_rewards"
        : c.loss_fn.positive_example_nll_weight != 0
            ? "cannot be used with loss_fn.positive_example_nll_weight, which is divided by another count"
        : c.policy.train_global_batch_size < g.num_generations_per_prompt
            ? "cannot be used where an optimizer step has less than a whole group (policy.train_global_batch_size "
              "below "
              "num_generations_per_prompt)"
        : c.policy.generation.background_sms == 0 ? "needs policy.generation.background_sms other than 0"
                                                  : nullptr;
    if (why != nullptr) out.push_back({"grpo.early_gradients", why});
  }
  if (g.skip_reference_policy_logprobs_calculation && c.loss_fn.reference_policy_kl_penalty != 0) {
    out.push_back({"grpo.skip_reference_policy_logprobs_calculation", "needs loss_fn.reference_policy_kl_penalty 0"});
  }
}

// Generation on devices of its own (trainer/work), steps that overlap or not.
void check_elsewhere(const Config& c, Problems& out) {
  const auto& g = c.grpo;
  if (!generates_elsewhere(c)) return;
  const ColocatedResources& r = c.policy.generation.colocated.resources;
  // Whole nodes of several, as in NeMo-RL; devices of the only one.
  const bool all = c.cluster.num_nodes > 1 ? r.num_nodes >= c.cluster.num_nodes
                                           : r.gpus_per_node > 0 && r.gpus_per_node >= c.cluster.gpus_per_node;
  if (all) {
    out.push_back({"policy.generation.colocated.resources",
                   "leave no device to train on: they are of those of cluster.gpus_per_node and cluster.num_nodes"});
  }
  if (c.policy.generation.fold_pipeline) {
    out.push_back({"policy.generation.fold_pipeline",
                   "is for ranks that train and generate; with policy.generation.colocated.enabled false engines have "
                   "no stages: leave it false"});
  }
  if (g.early_gradients) {
    out.push_back(
        {"grpo.early_gradients",
         "are computed beside generation on the same device, and policy.generation.colocated.enabled is false: "
         "switch one off"});
  }
  if (g.batch_multiplier != 1.0) {
    out.push_back(
        {"grpo.batch_multiplier",
         "is the size of rounds, and with policy.generation.colocated.enabled false a group of equal rewards is "
         "replaced at once: leave it 1"});
  }
  if (g.use_dynamic_sampling && exact_versions(c) && most_age(c) > 0) {
    out.push_back(
        {"grpo.async_grpo.in_flight_weight_updates",
         "must be true with dynamic sampling and an age: which step a group is of is not known when it begins, "
         "and so not with which weights"});
  }
  if (g.use_dynamic_sampling && (g.shuffle_rewards || uses_reward_model(c))) {
    out.push_back({"grpo.use_dynamic_sampling",
                   "decides where generation is what a batch is, and cannot be used there with grpo.shuffle_rewards or "
                   "env.reward_model, which come later: switch one off"});
  }
}

// Steps that overlap: carry-over (trainer/algorithms/carry_over.h), or beside generation elsewhere.
void check_async(const Config& c, Problems& out) {
  const auto& g = c.grpo;
  const AsyncGrpoConfig& a = g.async_grpo;
  if (!a.enabled) return;
  const bool carries = carries_over(c);
  if (a.max_trajectory_age_steps == 0) {
    if (!carries) return;
    out.push_back(
        {"grpo.async_grpo.max_trajectory_age_steps",
         "0 leaves nothing to carry over where generation and training take turns on the same devices; set at "
         "least 1, or grpo.async_grpo.enabled to false"});
    return;
  }
  if (carries && !a.in_flight_weight_updates) {
    out.push_back({"grpo.async_grpo.in_flight_weight_updates",
                   "must be true for carry-over, whose unfinished responses go on with the new weights; set it, or "
                   "grpo.async_grpo.enabled to false"});
  }
  // NeMo-RL's recipes of asynchronous GRPO set it, its asynchronous PPO refuses it. The one optimizer step begins with
  // the log-probs that a pass would give, and the correction weighs older tokens by them.
  if (c.loss_fn.force_on_policy_ratio && c.algorithm == "ppo") {
    out.push_back({"loss_fn.force_on_policy_ratio",
                   "takes every ratio for 1, and with grpo.async_grpo.enabled older weights draw tokens; set one of "
                   "them to false"});
  } else if (c.loss_fn.force_on_policy_ratio && a.ratio_from == RatioFrom::kGeneration) {
    out.push_back({"loss_fn.force_on_policy_ratio",
                   "takes every ratio for 1, and grpo.async_grpo.ratio_from: generation means that of the sampler: "
                   "leave out one"});
  }
  if (carries && g.early_gradients) {
    out.push_back({"grpo.early_gradients",
                   "is for strictly on-policy steps; with grpo.async_grpo.enabled the places of its last responses are "
                   "filled: switch one off"});
  }
  if (a.ratio_from == RatioFrom::kTraining && !c.loss_fn.use_importance_sampling_correction) {
    out.push_back({"loss_fn.use_importance_sampling_correction",
                   "must be true with grpo.async_grpo.enabled, since older weights draw tokens; or set "
                   "grpo.async_grpo.ratio_from to generation, whose ratio begins with these"});
  }
  if (carries && g.batch_multiplier != 1.0) {
    out.push_back({"grpo.batch_multiplier",
                   "is the size of rounds, and with grpo.async_grpo.enabled a group of equal rewards is replaced at "
                   "once: leave it 1"});
  }
  if (carries && g.shuffle_rewards && g.use_dynamic_sampling) {
    out.push_back(
        {"grpo.shuffle_rewards",
         "cannot be used with grpo.async_grpo.enabled and dynamic sampling, which decides by the rewards what "
         "a batch is before they could be shuffled"});
  }
}

void check_loss(const Config& c, Problems& out) {
  const auto& l = c.loss_fn;
  if (l.sequence_level_importance_ratios && l.token_level_loss) {
    out.push_back({"loss_fn.sequence_level_importance_ratios", "needs loss_fn.token_level_loss false"});
  }
  if (l.use_cispo) {
    if (!l.token_level_loss) out.push_back({"loss_fn.use_cispo", "needs loss_fn.token_level_loss true"});
    if (l.ratio_clip_c) out.push_back({"loss_fn.use_cispo", "excludes loss_fn.ratio_clip_c"});
    if (l.force_on_policy_ratio) out.push_back({"loss_fn.use_cispo", "excludes loss_fn.force_on_policy_ratio"});
    if (l.sequence_level_importance_ratios)
      out.push_back({"loss_fn.use_cispo", "excludes loss_fn.sequence_level_importance_ratios"});
  }
  if (l.disable_ppo_ratio) {
    if (l.use_cispo) out.push_back({"loss_fn.disable_ppo_ratio", "excludes loss_fn.use_cispo"});
    if (l.force_on_policy_ratio) out.push_back({"loss_fn.disable_ppo_ratio", "excludes loss_fn.force_on_policy_ratio"});
    if (l.sequence_level_importance_ratios)
      out.push_back({"loss_fn.disable_ppo_ratio", "excludes loss_fn.sequence_level_importance_ratios"});
  }
  if (l.truncated_importance_sampling_type == TruncatedImportanceSampling::kNone) {
    for (const auto& [key, value] :
         {std::pair{"loss_fn.truncated_importance_sampling_ratio", l.truncated_importance_sampling_ratio},
          std::pair{"loss_fn.truncated_importance_sampling_ratio_min", l.truncated_importance_sampling_ratio_min}}) {
      if (value) out.push_back({key, "needs loss_fn.truncated_importance_sampling_type: tis, icepop or seq-mask-tis"});
    }
  } else {
    if (!l.use_importance_sampling_correction) {
      out.push_back({"loss_fn.truncated_importance_sampling_type", "needs loss_fn.use_importance_sampling_correction"});
    }
    if (!l.truncated_importance_sampling_ratio) {
      out.push_back({"loss_fn.truncated_importance_sampling_type",
                     std::string("'") + name_of(l.truncated_importance_sampling_type) +
                         "' needs loss_fn.truncated_importance_sampling_ratio"});
    }
  }
  if (l.truncated_importance_sampling_ratio && l.truncated_importance_sampling_ratio_min &&
      *l.truncated_importance_sampling_ratio_min > *l.truncated_importance_sampling_ratio) {
    out.push_back(
        {"loss_fn.truncated_importance_sampling_ratio_min", "is above loss_fn.truncated_importance_sampling_ratio"});
  }
  if (l.use_kl_in_reward && c.algorithm == "ppo") {
    if (!has_critic(c))
      out.push_back({"loss_fn.use_kl_in_reward",
                     "needs ppo.adv_estimator.name gae; raw_reward has no reward of a token, so that the KL would be "
                     "neither in the rewards nor in the loss"});
  } else if (l.use_kl_in_reward && c.grpo.adv_estimator.name != AdvantageEstimator::kReinforcePlusPlus) {
    out.push_back({"loss_fn.use_kl_in_reward",
                   "needs grpo.adv_estimator.name reinforce_plus_plus; the grpo estimator has no reward of a token, so "
                   "that the KL would be neither in the rewards nor in the loss"});
  }
}

void check_optimizer(const Config& c, Problems& out) {
  const auto& p = c.policy;
  if (p.optimizer.kwargs.betas.size() != 2)
    out.push_back({"policy.optimizer.kwargs.betas",
                   "expected two numbers, got " + number(static_cast<int64_t>(p.optimizer.kwargs.betas.size()))});
  const auto& s = p.scheduler;
  if (!s.milestones.empty()) {
    if (s.milestones.size() + 1 != s.pieces.size()) {
      out.push_back({"policy.scheduler", number(static_cast<int64_t>(s.pieces.size())) + " schedulers need " +
                                             number(static_cast<int64_t>(s.pieces.size()) - 1) + " milestones, got " +
                                             number(static_cast<int64_t>(s.milestones.size()))});
    }
    if (s.milestones.front() < 1 ||
        std::adjacent_find(s.milestones.begin(), s.milestones.end(), std::greater_equal<>()) != s.milestones.end()) {
      out.push_back({"policy.scheduler", "milestones must rise and begin at 1 or later"});
    }
  }
  if (p.megatron_cfg.enabled && p.dtensor_cfg.enabled) {
    out.push_back({"policy.megatron_cfg.enabled", "excludes policy.dtensor_cfg.enabled; turn one of them off"});
  }
  const auto& m = p.megatron_cfg;
  if (m.enabled && m.pipeline_model_parallel_size > 1 && state_sharding(c) > StateSharding::kOptimizer) {
    out.push_back({"policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy",
                   m.distributed_data_parallel_config.data_parallel_sharding_strategy +
                       " needs policy.megatron_cfg.pipeline_model_parallel_size 1, not " +
                       number(m.pipeline_model_parallel_size) + "; pipeline stages take no_shard or optim"});
  }
  if (m.enabled && m.optimizer.min_lr > m.optimizer.lr)
    out.push_back({"policy.megatron_cfg.optimizer.min_lr", "is above lr"});
  if (m.enabled && m.scheduler.lr_decay_style != "constant" &&
      m.scheduler.lr_decay_iters <= m.scheduler.lr_warmup_iters) {
    out.push_back({"policy.megatron_cfg.scheduler.lr_decay_iters",
                   "must be above lr_warmup_iters " + number(m.scheduler.lr_warmup_iters)});
  }
}

// What would stand in checkpoints and the report is no place for a secret. Values are not quoted for the same reason.
// Whether what has this name, in lower case, is likely a secret.
bool names_secret(const std::string& name) {
  for (const char* word : {"authorization", "cookie", "token", "secret", "key", "password", "auth"}) {
    if (name.find(word) != std::string::npos) return true;
  }
  return false;
}

void check_http(const RewardOptions& http, Problems& out) {
  const auto set = [&](const char* key, bool is_set) {
    if (is_set && !http.enabled) out.push_back({key, "is set, but env.http.enabled is false"});
  };
  set("env.http.url", !http.url.empty());
  set("env.http.headers", !http.headers.empty());
  set("env.http.ca_file", !http.ca_file.empty());
  const Url url = split_url(http.url);
  if (http.enabled && !http.url.empty() && url.scheme != "http" && url.scheme != "https") {
    out.push_back({"env.http.url", "must begin with http:// or https://"});
  } else if (url.names_user()) {
    out.push_back({"env.http.url", "must not hold a user or password; send them with env.http.headers"});
  }
  // A query's values would be shown with the URL.
  for (const std::string& part : split(http.url.substr(std::min(http.url.find('?'), http.url.size())), '&')) {
    const std::string name(trim(std::string_view(part).substr(0, part.find('='))));
    if (!names_secret(to_lower(name))) continue;
    out.push_back({"env.http.url", "must not hold a secret in its query; send it with env.http.headers"});
  }
  if (!http.ca_file.empty() && url.scheme == "http")
    out.push_back({"env.http.ca_file", "needs an env.http.url with https://"});
  for (const std::string& header : http.headers) {
    const size_t colon = header.find(':');
    const std::string name(trim(std::string_view(header).substr(0, colon))), lower = to_lower(name);
    if (colon == std::string::npos || name.empty() || name.find_first_of(" \t{}\"") != std::string::npos) {
      out.push_back({"env.http.headers", "each must be \"Name: value\""});
      continue;
    }
    const std::string value = header.substr(colon + 1);
    const bool reference = value.find("{env:") != std::string::npos || value.find("{file:") != std::string::npos;
    if (reference || !names_secret(lower)) continue;
    out.push_back({"env.http.headers", name + " holds its value itself, which checkpoints and the report would show; " +
                                           "write {env:NAME} or {file:PATH} in its place"});
  }
}

// Not before generation has ended does every response have its score.
void check_reward_model(const Config& c, Problems& out) {
  if (!uses_reward_model(c)) return;
  if (c.env.reward_model.model_name.empty()) {
    out.push_back({"env.reward_model.model_name",
                   "names no model; name the folder of a ...ForSequenceClassification with one label"});
  }
  if (c.grpo.early_gradients) {
    out.push_back({"grpo.early_gradients",
                   "cannot be used with env.reward_model, whose scores come behind generation: switch one off"});
  }
  if (carries_over(c) && c.grpo.use_dynamic_sampling) {
    out.push_back({"env.reward_model.enabled",
                   "cannot be used with grpo.async_grpo.enabled and grpo.use_dynamic_sampling, which decides by the "
                   "rewards what a batch is before the reward model has scored: switch one of them off"});
  }
}

void check_env(const Config& c, Problems& out) {
  const auto& e = c.env;
  if (e.command.enabled && e.command.command.empty()) out.push_back({"env.command.command", "names no program"});
  if (!e.command.enabled && !e.command.command.empty())
    out.push_back({"env.command.command", "is set, but env.command.enabled is false"});
  if (e.format.enabled && e.format.pattern.empty() && e.format.tags.empty()) {
    out.push_back({"env.format.enabled", "needs env.format.pattern or env.format.tags"});
  }
  check_http(e.http, out);
  check_reward_model(c, out);
  if (has_rollouts(c) && e.enabled().empty())
    out.push_back({"env.math.enabled",
                   "no reward is enabled; turn on one of " + join(reward_names(), ", ") + ", " + kRewardModel});
  for (const auto& [key, name] : {std::pair{"data.train.env_name", &c.data.train.env_name},
                                  {"data.validation.env_name", &c.data.validation.env_name}}) {
    if (name->empty() || !has_rollouts(c) || config::missing_environment(*name) != nullptr) continue;
    const auto enabled = e.enabled();
    if (std::find(enabled.begin(), enabled.end(), *name) == enabled.end()) {
      out.push_back(
          {key, "'" + *name + "' is not an enabled env; enabled: " + (enabled.empty() ? "none" : join(enabled, ", "))});
    }
  }
}

void check_checkpointing(const Config& c, Problems& out) {
  const std::string metric = checkpoint_metric(c);
  const std::vector<std::string> known = checkpoint_metric_names(c);
  if (!metric.empty() && std::find(known.begin(), known.end(), metric) == known.end()) {
    out.push_back({"checkpointing.metric_name", "there is no value '" + c.checkpointing.metric_name +
                                                    "' in this run; there are " + join(known, ", ") +
                                                    ", and null for the newest checkpoints"});
  }
}

void check_ppo(const Config& c, Problems& out) {
  const PpoConfig& p = c.ppo;
  if (c.loss_fn.force_on_policy_ratio && p.ppo_epochs > 1)
    out.push_back({"loss_fn.force_on_policy_ratio",
                   "needs one pass over a rollout, and ppo.ppo_epochs is " + number(p.ppo_epochs) + ": set it to 1"});
  const int64_t lead = p.async_ppo.warmup_generation_lead_steps;
  if (p.async_ppo.enabled && lead > 0 && p.policy_training_start_step == 0) {
    out.push_back({"ppo.async_ppo.warmup_generation_lead_steps",
                   "is for steps that train only the critic, and ppo.policy_training_start_step is 0: leave it out"});
  }
  if (p.async_ppo.enabled && lead > 0 && lead < p.async_ppo.max_trajectory_age_steps) {
    out.push_back({"ppo.async_ppo.warmup_generation_lead_steps",
                   number(lead) + " is less than ppo.async_ppo.max_trajectory_age_steps " +
                       number(p.async_ppo.max_trajectory_age_steps) +
                       ", how far ahead groups are made later: raise it, or leave it out"});
  }
  if (has_critic(c)) return;
  if (p.policy_training_start_step > 0)
    out.push_back({"ppo.policy_training_start_step",
                   "is for a critic, which ppo.adv_estimator.name raw_reward does without: set 0"});
  if (!p.warm_start_value_checkpoint.empty())
    out.push_back({"ppo.warm_start_value_checkpoint",
                   "is for a critic, which ppo.adv_estimator.name raw_reward does without: leave it out"});
}

// Of the rules of policy.*, what they say of value.*, by its keys.
void tell_of_critic(const Problems& found, Problems& out) {
  for (const config::Problem& problem : found) {
    if (!starts_with(problem.key, "policy.") || starts_with(problem.key, "policy.generation.")) continue;
    out.push_back({replace_all(problem.key, "policy.", "value."), replace_all(problem.message, "policy.", "value.")});
  }
}

// What does not depend on how many ranks the critic has: critic_problems.
void check_critic(const Config& c, Problems& out) {
  if (c.value.max_total_sequence_length < c.policy.max_total_sequence_length) {
    out.push_back({"value.max_total_sequence_length",
                   number(c.value.max_total_sequence_length) + " is less than policy.max_total_sequence_length " +
                       number(c.policy.max_total_sequence_length) + ": the critic reads every sample"});
  }
  const Config critic = critic_config(c);
  Problems found;
  check_optimizer_steps(critic, found);
  check_recompute(critic, found);
  check_lengths(critic, found);
  check_optimizer(critic, found);
  tell_of_critic(found, out);
}

void check_rest(const Config& c, Problems& out) {
  if (c.sft.stop_at_validation_loss && c.sft.val_period == 0)
    out.push_back({"sft.stop_at_validation_loss", "needs sft.val_period above 0"});
  const double held_out = c.data.train.split_validation_size;
  if (held_out >= 1 && held_out != std::floor(held_out)) {
    out.push_back({"data.train.split_validation_size",
                   "must be a share below 1 or a whole number of rows, got " + format_double(held_out)});
  }
  for (const auto& [key, dataset] :
       {std::pair{"data.train.mixture", &c.data.train}, {"data.validation.mixture", &c.data.validation}}) {
    if (!dataset->mixture.empty() && !(dataset->data_path.empty() && dataset->dataset_name.empty()))
      out.push_back({key, "names all sources; leave data_path and dataset_name out, or put them into it"});
  }
  if (!c.data.train.mixture.empty() && c.data.train.repeat > 1)
    out.push_back({"data.train.repeat",
                   "has no meaning beside data.train.mixture, whose weights say how often a source's rows come"});
  if (c.policy.model_name.empty()) out.push_back({"policy.model_name", "is empty; name a folder or a Hub id"});
  if (c.logger.log_dir.empty()) out.push_back({"logger.log_dir", "is empty; name a folder"});
  if (c.checkpointing.enabled && c.checkpointing.checkpoint_dir.empty())
    out.push_back({"checkpointing.checkpoint_dir", "is empty; name a folder"});
  if (c.logger.prometheus.enabled && c.logger.prometheus.per_rank && c.logger.prometheus.port != 0 &&
      c.logger.prometheus.port + c.cluster.processes - 1 > 65535) {
    out.push_back({"logger.prometheus.port", "plus the ranks of a node is above 65535"});
  }
  const std::string& limit = c.checkpointing.checkpoint_must_save_by;
  if (!limit.empty()) {
    const auto parts = split(limit, ':');
    const bool whole = parts.size() == 4 && std::all_of(parts.begin(), parts.end(), [](const std::string& part) {
                         const auto value = parse_int(part);
                         return value && *value >= 0 && *value < 1000000;
                       });
    if (!whole)
      out.push_back({"checkpointing.checkpoint_must_save_by",
                     "expected days:hours:minutes:seconds, e.g. 00:03:30:00, got '" + limit + "'"});
  }
}

}  // namespace

std::vector<config::Problem> config::cross_check(const Config& config) {
  Problems problems;
  if (config.algorithm == "ppo" && config.grpo.async_grpo.enabled && !config.ppo.async_ppo.enabled)
    return {{"grpo.async_grpo.enabled", "is a key of GRPO; of a PPO run it is ppo.async_ppo.enabled"}};
  check_batches(config, problems);
  check_recompute(config, problems);
  check_lengths(config, problems);
  check_generation(config, problems);
  if (has_rollouts(config)) {
    check_grpo(config, problems);
    check_async(config, problems);
    check_elsewhere(config, problems);
    check_loss(config, problems);
  }
  if (config.algorithm == "ppo") check_ppo(config, problems);
  check_optimizer(config, problems);
  check_env(config, problems);
  check_checkpointing(config, problems);
  check_rest(config, problems);
  if (config.algorithm == "ppo") {  // whose rollout has the rules of GRPO's, and keys of its own
    for (config::Problem& problem : problems) {
      problem.key = replace_all(problem.key, "grpo.", "ppo.");
      problem.message = replace_all(problem.message, "grpo.", "ppo.");
    }
  }
  if (has_critic(config)) check_critic(config, problems);
  return problems;
}

std::vector<std::string> find_problems(const Config& config) {
  std::vector<std::string> lines;
  for (const auto& [key, message] : config::cross_check(config)) lines.push_back(key + ": " + message);
  return lines;
}

std::vector<std::string> critic_problems(const Config& config, int64_t data_parallel_ranks) {
  if (!has_critic(config)) return {};
  Problems found, told;
  check_dealt(critic_config(config), data_parallel_ranks, found);
  tell_of_critic(found, told);
  std::vector<std::string> lines;
  for (const auto& [key, message] : told)
    lines.push_back(key + ": " + replace_all(message, "data parallel ranks", "data parallel ranks of the critic"));
  return lines;
}

}  // namespace trireme
