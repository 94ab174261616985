// What several keys say together: sizes, settings and names that the folders above ask for.
#include <algorithm>
#include <limits>
#include <map>
#include <type_traits>

#include "base/error.h"
#include "base/text.h"
#include "trainer/config/config.h"
#include "trainer/config/rules.h"

namespace trireme {

int64_t config::saturating_product(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? std::numeric_limits<int64_t>::max() : result;
}

std::vector<std::string> checkpoint_metric_names(const Config& c) {
  if (c.algorithm == "sft") return {"val:loss", "train:loss", "train:grad_norm"};
  std::vector<std::string> names = {"val:accuracy", "val:avg_length"};
  if (c.grpo.val_num_generations_per_prompt > 1) names.emplace_back("val:pass_k");
  for (const char* name :
       {"reward", "loss", "grad_norm", "correct_rate", "truncation_rate", "mean_gen_tokens_per_sample"}) {
    names.push_back(std::string("train:") + name);
  }
  return names;
}

bool has_rollouts(const Config& config) { return config.algorithm != "sft"; }

bool generates_elsewhere(const Config& config) {
  return has_rollouts(config) && !config.policy.generation.colocated.enabled;
}

bool carries_over(const Config& config) {
  return has_rollouts(config) && config.grpo.async_grpo.enabled && !generates_elsewhere(config);
}

int64_t most_age(const Config& config) {
  const bool async = has_rollouts(config) && config.grpo.async_grpo.enabled;
  return async ? config.grpo.async_grpo.max_trajectory_age_steps : 0;
}

int64_t warmup_lead(const Config& config) {
  const bool warms_up = config.algorithm == "ppo" && config.grpo.async_grpo.enabled;
  return std::max(most_age(config), warms_up ? config.ppo.async_ppo.warmup_generation_lead_steps : 0);
}

bool exact_versions(const Config& config) {
  if (!generates_elsewhere(config)) return false;
  return most_age(config) == 0 || !config.grpo.async_grpo.in_flight_weight_updates;
}

bool uses_reward_model(const Config& config) {
  const std::string& only = config.data.train.env_name;
  return has_rollouts(config) && config.env.reward_model.enabled && (only.empty() || only == kRewardModel);
}

bool has_critic(const Config& config) {
  return config.algorithm == "ppo" && config.ppo.adv_estimator.name == PpoEstimator::kGae;
}

Config critic_config(const Config& config) {
  Config critic = config;
  static_cast<ModelTrainingConfig&>(critic.policy) = config.value;
  return critic;
}

int64_t passes_per_rollout(const Config& config) { return config.algorithm == "ppo" ? config.ppo.ppo_epochs : 1; }

std::string checkpoint_metric(const Config& c) {
  // NeMo-RL's names: v0.3's without a group, and those of its validation in the main branch.
  static const std::map<std::string, std::string> kGrpo = {{"default", "val:accuracy"},
                                                           {"val_reward", "val:accuracy"},
                                                           {"val:reward", "val:accuracy"},
                                                           {"val:total_reward/mean", "val:accuracy"},
                                                           {"train:total_reward/mean", "train:reward"}};
  static const std::map<std::string, std::string> kSft = {
      {"default", ""}, {"val_loss", "val:loss"}, {"val:val_loss", "val:loss"}};
  const auto& others = c.algorithm == "sft" ? kSft : kGrpo;
  const auto found = others.find(c.checkpointing.metric_name);
  return found == others.end() ? c.checkpointing.metric_name : found->second;
}

bool gradients_in_fp32(const Config& config) {
  const MegatronConfig& m = config.policy.megatron_cfg;
  return config.policy.precision == "float32" || !m.enabled || m.distributed_data_parallel_config.grad_reduce_in_fp32;
}

namespace {

template <typename Value>
struct SizeKey {
  const char* key;
  Value* value;
  int64_t ParallelSizes::*size;
};

// Of the back-end that is enabled; of a Config or a const one.
template <typename Any>
auto size_keys(Any& config) {
  using Keys = std::vector<SizeKey<std::conditional_t<std::is_const_v<Any>, const int64_t, int64_t>>>;
  if (auto& m = config.policy.megatron_cfg; m.enabled) {
    return Keys{
        {"policy.megatron_cfg.tensor_model_parallel_size", &m.tensor_model_parallel_size, &ParallelSizes::tensor},
        {"policy.megatron_cfg.pipeline_model_parallel_size", &m.pipeline_model_parallel_size, &ParallelSizes::pipeline},
        {"policy.megatron_cfg.context_parallel_size", &m.context_parallel_size, &ParallelSizes::context},
        {"policy.megatron_cfg.expert_model_parallel_size", &m.expert_model_parallel_size, &ParallelSizes::expert},
        {"policy.megatron_cfg.expert_tensor_parallel_size", &m.expert_tensor_parallel_size,
         &ParallelSizes::expert_tensor}};
  }
  if (auto& d = config.policy.dtensor_cfg; d.enabled) {
    return Keys{{"policy.dtensor_cfg.tensor_parallel_size", &d.tensor_parallel_size, &ParallelSizes::tensor},
                {"policy.dtensor_cfg.context_parallel_size", &d.context_parallel_size, &ParallelSizes::context},
                {"policy.dtensor_cfg.expert_parallel_size", &d.expert_parallel_size, &ParallelSizes::expert}};
  }
  return Keys{};
}

}  // namespace

ParallelSizes parallel_sizes(const Config& config) {
  ParallelSizes sizes;
  for (const auto& at : size_keys(config)) sizes.*at.size = *at.value == kAutoSize ? 1 : *at.value;
  return sizes;
}

std::string parallel_size_key(const Config& config, const std::string& axis) {
  const std::map<std::string, int64_t ParallelSizes::*> sizes = {{"tp", &ParallelSizes::tensor},
                                                                 {"pp", &ParallelSizes::pipeline},
                                                                 {"cp", &ParallelSizes::context},
                                                                 {"ep", &ParallelSizes::expert},
                                                                 {"etp", &ParallelSizes::expert_tensor}};
  const auto size = sizes.find(axis);
  for (const auto& at : size_keys(config)) {
    if (size != sizes.end() && at.size == size->second) return at.key;
  }
  return "parallelism." + axis + " of the RLJob, or --layout";
}

std::vector<std::string> auto_sizes(const Config& config) {
  std::vector<std::string> keys;
  for (const auto& at : size_keys(config)) {
    if (*at.value == kAutoSize) keys.emplace_back(at.key);
  }
  return keys;
}

void set_parallel_sizes(Config& config, const ParallelSizes& sizes) {
  for (const auto& at : size_keys(config)) *at.value = sizes.*at.size;
}

RecomputeSetting recompute_setting(const Config& config) {
  const PolicyConfig& p = config.policy;
  RecomputeSetting setting;
  if (const MegatronConfig& m = p.megatron_cfg; m.enabled) {
    const auto has = [&](const char* module) {
      return std::find(m.recompute_modules.begin(), m.recompute_modules.end(), module) != m.recompute_modules.end();
    };
    if (m.recompute_granularity == "selective") {
      setting.norms = has("layernorm");
      setting.swiglu = has("mlp_act");
      setting.experts = has("moe");
    } else if (m.recompute_granularity == "full") {
      setting.all = m.recompute_method == "uniform";
      setting.layers = m.recompute_num_layers;
    } else {
      setting.all = m.activation_checkpointing;
      setting.fit = !setting.all;
    }
    return setting;
  }
  setting.all = p.dtensor_cfg.enabled ? p.dtensor_cfg.activation_checkpointing : p.activation_checkpointing;
  setting.layers = std::max<int64_t>(0, p.recompute_layers);
  setting.fit = !setting.all && p.recompute_layers < 0;
  return setting;
}

StateSharding state_sharding(const Config& config) {
  const MegatronConfig& m = config.policy.megatron_cfg;
  if (!m.enabled) return config.policy.dtensor_cfg.enabled ? StateSharding::kWeights : StateSharding::kOptimizer;
  const DdpConfig& ddp = m.distributed_data_parallel_config;
  if (!ddp.use_custom_fsdp) return StateSharding::kOptimizer;
  return parse_sharding(ddp.data_parallel_sharding_strategy).value();  // the table knows these names only
}

bool overlap_grad_reduce(const Config& config) {
  const MegatronConfig& m = config.policy.megatron_cfg;
  return !m.enabled || m.distributed_data_parallel_config.overlap_grad_reduce;
}

bool overlap_exchanges(const Config& config) {
  const MegatronConfig& m = config.policy.megatron_cfg;
  return !m.enabled || m.tp_comm_overlap;
}

bool overlap_param_gather(const Config& config) {
  const MegatronConfig& m = config.policy.megatron_cfg;
  return !m.enabled || m.distributed_data_parallel_config.overlap_param_gather;
}

double max_grad_norm(const Config& config) {
  return config.policy.megatron_cfg.enabled ? config.policy.megatron_cfg.optimizer.clip_grad
                                            : config.policy.max_grad_norm;
}

int64_t world_size(const Config& config) {
  int64_t nodes = config.cluster.num_nodes, of_node = config.cluster.processes;
  if (generates_elsewhere(config)) {  // of the cluster's devices, these generate
    const ColocatedResources& others = config.policy.generation.colocated.resources;
    if (nodes > 1) {
      nodes = std::max<int64_t>(1, nodes - others.num_nodes);
    } else {
      of_node = std::max<int64_t>(1, of_node - others.gpus_per_node);
    }
  }
  return config::saturating_product(nodes, of_node);
}

int64_t data_parallel_size(const Config& config) {
  const ParallelSizes sizes = parallel_sizes(config);
  const int64_t model =
      config::saturating_product(config::saturating_product(sizes.tensor, sizes.pipeline), sizes.context);
  return std::max<int64_t>(1, world_size(config) / model);
}

int64_t prompts_per_round(const RolloutConfig& config) {
  return static_cast<int64_t>(static_cast<double>(config.num_prompts_per_step) * config.batch_multiplier);
}

int64_t samples_per_step(const Config& config) {
  return config::saturating_product(prompts_per_round(config.grpo), config.grpo.num_generations_per_prompt);
}

int64_t optimizer_steps_per_rollout(const Config& config) {
  return config::saturating_product(config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) /
         config.policy.train_global_batch_size;
}

AdamSettings adam_settings(const Config& config) {
  AdamSettings adam;
  if (const auto& m = config.policy.megatron_cfg; m.enabled) {
    adam = {m.optimizer.lr,         m.optimizer.min_lr,     m.optimizer.weight_decay,
            m.optimizer.adam_beta1, m.optimizer.adam_beta2, m.optimizer.adam_eps};
  } else {
    const auto& k = config.policy.optimizer.kwargs;
    adam = {k.lr, 0.0, k.weight_decay, k.betas.at(0), k.betas.at(1), k.eps};
  }
  return adam;
}

std::vector<std::string> EnvConfig::enabled() const {
  std::vector<std::string> names;
  for (const RewardOptions* reward : all()) {
    if (reward->enabled) names.push_back(reward->type);
  }
  if (reward_model.enabled) names.emplace_back(kRewardModel);
  return names;
}

const RewardOptions& EnvConfig::by_name(const std::string& name) const {
  for (const RewardOptions* reward : all()) {
    if (reward->type == name) return *reward;
  }
  fail_user("there is no env '" + name + "'; there are " + join(reward_names(), ", "));
}

}  // namespace trireme
