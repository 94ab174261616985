// What a configuration asks for and this version lacks, or passes over.
#include <functional>

#include "base/error.h"
#include "base/text.h"
#include "trainer/config/config.h"
#include "trainer/config/fields.h"
#include "trainer/config/rules.h"

namespace trireme {
namespace {

constexpr const char* kNotYet = " is not supported yet by this version";

// Data sets and environments that are not here.
void refuse_data(const Config& c, const std::function<void(bool, const std::string&, const std::string&)>& refuse) {
  for (const auto& [section, dataset] :
       {std::pair{"data.train.", &c.data.train}, std::pair{"data.validation.", &c.data.validation}}) {
    const std::string& name = dataset->dataset_name;
    if (!name.empty() && dataset->data_path.empty() && dataset->mixture.empty() && !config::find_dataset(name) &&
        name.find('/') == std::string::npos) {
      std::vector<std::string> known;
      for (const auto& entry : config::known_datasets()) known.push_back(entry.name);
      const auto near = nearest(name, known);
      refuse(true, section + std::string("dataset_name"),
             "the data set '" + name + "'" + (near ? " (did you mean '" + *near + "'?)" : "") + " without a file (" +
                 section + "data_path)");
    }
    if (!has_rollouts(c) || dataset->env_name.empty()) continue;
    if (const auto* environment = config::missing_environment(dataset->env_name))
      refuse(true, section + std::string("env_name"), environment->feature);
  }
}

// What is said of a rollout's keys, by those of the algorithm.
std::vector<std::string> by_own_keys(std::vector<std::string> reasons, const Config& c) {
  if (c.algorithm != "ppo") return reasons;
  for (std::string& reason : reasons) reason = replace_all(reason, "grpo.", "ppo.");
  return reasons;
}

// What a critic cannot have, which an actor may.
void refuse_critic(const Config& c, const std::function<void(bool, const std::string&, const std::string&)>& refuse) {
  const MegatronConfig& m = c.value.megatron_cfg;
  refuse(c.value.dtensor_cfg.enabled && c.value.dtensor_cfg.cpu_offload, "value.dtensor_cfg.cpu_offload",
         "keeping weights on the host");
  refuse(m.enabled && m.optimizer.params_dtype != "float32", "value.megatron_cfg.optimizer.params_dtype",
         "a master copy of the weights in " + m.optimizer.params_dtype);
  refuse(m.enabled && m.moe_router_load_balancing_type != "none", "value.megatron_cfg.moe_router_load_balancing_type",
         "balancing the experts of a critic");
}

void refuse_elsewhere(const Config& c,
                      const std::function<void(bool, const std::string&, const std::string&)>& refuse) {
  refuse(parallel_sizes(c).expert_tensor > 1, "policy.generation.colocated.enabled",
         "generation on devices of its own from a policy of expert tensor parallel size " +
             std::to_string(parallel_sizes(c).expert_tensor));
}

}  // namespace

std::vector<std::string> config::unsupported_features(const Config& c) {
  std::vector<std::string> reasons;
  const auto refuse = [&](bool asked, const std::string& key, const std::string& what) {
    if (asked) reasons.push_back(key + ": " + what + kNotYet);
  };
  for (const auto& family : unsupported_families()) {
    refuse(starts_with(c.policy.model_name, family.prefix), "policy.model_name",
           "the architecture of " + family.family);
  }
  for (const std::string& missing : c.missing_features) reasons.push_back(missing + kNotYet);
  refuse_data(c, refuse);
  const auto& d = c.policy.dtensor_cfg;
  const auto& m = c.policy.megatron_cfg;
  refuse(c.grpo.max_rollout_turns > 1, "grpo.max_rollout_turns", std::to_string(c.grpo.max_rollout_turns) + " turns");
  refuse(c.grpo.adv_estimator.name == AdvantageEstimator::kGdpo, "grpo.adv_estimator.name",
         "an advantage of each reward (GDPO)");
  refuse(c.grpo.adv_estimator.name == AdvantageEstimator::kOpd, "grpo.adv_estimator.name", "on-policy distillation");
  if (generates_elsewhere(c)) refuse_elsewhere(c, refuse);
  refuse(d.enabled && d.cpu_offload, "policy.dtensor_cfg.cpu_offload", "keeping weights on the host");
  refuse(c.policy.offload_optimizer_for_logprob, "policy.offload_optimizer_for_logprob",
         "moving optimizer state to the host");
  refuse(m.enabled && m.optimizer.params_dtype != "float32", "policy.megatron_cfg.optimizer.params_dtype",
         "a master copy of the weights in " + m.optimizer.params_dtype);
  if (has_critic(c)) refuse_critic(c, refuse);
  return by_own_keys(std::move(reasons), c);
}

void validate_supported(const Config& c) {
  std::vector<std::string> reasons = config::unsupported_features(c);
  const auto refuse = [&](bool asked, const std::string& key, const std::string& what) {
    if (asked) reasons.push_back(key + ": " + what + kNotYet);
  };
  for (const std::string& key : auto_sizes(c)) {
    reasons.push_back(key +
                      ": auto is for trireme plan, which says what it comes to; a run takes that size from the "
                      "configuration");
  }
  if (has_critic(c)) {
    for (const std::string& key : auto_sizes(critic_config(c)))
      reasons.push_back(replace_all(key, "policy.", "value.") +
                        ": auto is for the policy, by trireme plan; write the size that the critic shall have");
  }
  refuse(!c.grpo.stop_at_validation_metric.empty() && c.grpo.stop_at_validation_metric != "accuracy",
         "grpo.stop_at_validation_metric", "a metric other than accuracy");
  refuse(!c.data.validation.env_name.empty() && c.data.validation.env_name != c.data.train.env_name,
         "data.validation.env_name", "another reward for validation than for training");
  if (!reasons.empty()) fail_user(join(by_own_keys(std::move(reasons), c), "\n"));
}

namespace {

using Note = std::function<void(bool set, const std::string& key, const std::string& why)>;

// Of a model that is trained: the policy of `c`, whose keys stand below `section`.
void note_of_model(const Config& c, const std::string& section, const Note& note) {
  const ModelTrainingConfig& m = c.policy;
  note(m.megatron_cfg.enabled && !m.megatron_cfg.optimizer.use_distributed_optimizer,
       section + ".megatron_cfg.optimizer.use_distributed_optimizer",
       section + ".megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy decides");
  const DdpConfig& ddp = m.megatron_cfg.distributed_data_parallel_config;
  note(m.megatron_cfg.enabled && !ddp.use_custom_fsdp && ddp.data_parallel_sharding_strategy != "optim",
       section + ".megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy",
       "use_custom_fsdp beside it is false, so that it counts as optim");
  const std::string rows = "rows are always sharded over the tensor ranks outside of attention and MLP";
  note(m.megatron_cfg.enabled && m.megatron_cfg.tensor_model_parallel_size != 1 && !m.megatron_cfg.sequence_parallel,
       section + ".megatron_cfg.sequence_parallel", rows);
  note(m.dtensor_cfg.enabled && m.dtensor_cfg.tensor_parallel_size != 1 && !m.dtensor_cfg.sequence_parallel,
       section + ".dtensor_cfg.sequence_parallel", rows);
  note(m.megatron_cfg.enabled && !m.megatron_cfg.defer_fp32_logits, section + ".megatron_cfg.defer_fp32_logits",
       "logits always become fp32 chunk by chunk");
  note(m.make_sequence_length_divisible_by != 1, section + ".make_sequence_length_divisible_by",
       "sequences are packed without padding, so there is no length to round up");
}

}  // namespace

std::vector<std::string> keys_without_effect(const Config& c) {
  std::vector<std::string> notes;
  const Note note = [&](bool set, const std::string& key, const std::string& why) {
    if (set) notes.push_back(key + " has no effect in this version: " + why);
  };
  const PolicyConfig& p = c.policy;
  const bool by_tokens = p.sequence_packing.enabled || p.dynamic_batching.enabled;
  note(p.logprob_chunk_size != PolicyConfig{}.logprob_chunk_size, "policy.logprob_chunk_size",
       "the vocabulary op chooses its own chunk of rows");
  note(c.algorithm == "sft" && by_tokens && c.sft.val_micro_batch_size != 1, "sft.val_micro_batch_size",
       "with packing or dynamic batching validation has the micro-batches of training");
  const AsyncGrpoConfig& async = c.grpo.async_grpo;
  note(async.enabled && exact_versions(c) && !async.recompute_kv_cache_after_weight_updates,
       "grpo.async_grpo.recompute_kv_cache_after_weight_updates",
       "engines change weights without unfinished responses, so there are no keys to keep");
  notes = by_own_keys(std::move(notes), c);
  note_of_model(c, "policy", note);
  if (has_critic(c)) note_of_model(critic_config(c), "value", note);
  note(c.env.math.enabled && c.env.math.math_verify_impl != RewardOptions{}.math_verify_impl,
       "env.math.math_verify_impl",
       "the built-in verifier stands in for " + c.env.math.math_verify_impl +
           "; trainer/rewards/README.md says where it differs");
  return notes;
}

}  // namespace trireme
