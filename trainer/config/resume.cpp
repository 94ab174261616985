// What a resumed run does otherwise than the run that wrote its checkpoint.
#include "base/text.h"
#include "trainer/config/config.h"
#include "trainer/config/fields.h"
#include "trainer/config/tree.h"

namespace trireme {
namespace {

// Keys, and beginnings of keys (those that end with a dot or an underscore).
const char* const kNoMatter[] = {"algorithm",
                                 "logger.",
                                 "checkpointing.",
                                 "cluster.",
                                 "data.validation.",
                                 "data.max_bad_lines",
                                 "env.max_failed_share",
                                 "env.startup_timeout_s",
                                 "env.http.headers",
                                 "env.http.ca_file",
                                 "grpo.max_num_steps",
                                 "grpo.max_num_epochs",
                                 "grpo.max_val_samples",
                                 "grpo.val_",
                                 "grpo.stop_at_validation_",
                                 "sft.max_num_steps",
                                 "sft.max_num_epochs",
                                 "sft.val_",
                                 "sft.stop_at_validation_",
                                 "policy.generation.val_",
                                 "policy.generation.kv_cache_tokens",
                                 "policy.generation.max_running_samples",
                                 "policy.generation.pipeline_lanes",
                                 "policy.generation.fold_pipeline",
                                 "policy.dynamic_batching.logprob_mb_tokens",
                                 "policy.sequence_packing.logprob_mb_tokens",
                                 "policy.logprob_batch_size",
                                 "policy.logprob_chunk_size",
                                 "policy.activation_checkpointing",
                                 "policy.recompute_layers",
                                 "policy.dtensor_cfg.activation_checkpointing",
                                 "policy.dtensor_cfg.sequence_parallel",
                                 "policy.megatron_cfg.sequence_parallel",
                                 "policy.megatron_cfg.defer_fp32_logits",
                                 "policy.megatron_cfg.activation_checkpointing",
                                 "policy.megatron_cfg.recompute_",
                                 "policy.megatron_cfg.tp_comm_overlap",
                                 "policy.megatron_cfg.distributed_data_parallel_config.overlap_",
                                 "policy.optimizer.name"};  // two names of one

// Keys of ppo.* and value.* are those of grpo.* and policy.*.
bool matters(const std::string& given) {
  const std::string key = starts_with(given, "ppo.")     ? "grpo." + given.substr(4)
                          : starts_with(given, "value.") ? "policy." + given.substr(6)
                                                         : given;
  for (const std::string entry : kNoMatter) {
    if (key == entry || ((entry.back() == '.' || entry.back() == '_') && starts_with(key, entry))) return false;
  }
  return true;
}

// What is said once already: of a PPO run grpo.* is filled from ppo.*.
bool is_copy(const std::string& key, const Config& config) {
  return config.algorithm == "ppo" && starts_with(key, "grpo.");
}

}  // namespace

std::vector<std::string> changes_since(const Config& saved, const Config& now) {
  std::vector<std::string> changes;
  Config before = saved, after = now;
  for (const config::Field& field : config::fields()) {
    if (!matters(field.path) || is_copy(field.path, now)) continue;
    const std::string was = config::flow_text(field.get(before)), is = config::flow_text(field.get(after));
    if (was != is) changes.push_back(field.path + " was " + was + ", is " + is);
  }
  return changes;
}

std::optional<std::string> first_difference(const Config& of_first, const Config& own) {
  Config first = of_first, other = own;
  for (const config::Field& field : config::fields()) {
    if (starts_with(field.path, "logger.") || starts_with(field.path, config::kSecretKeys)) continue;
    if (is_copy(field.path, own)) continue;
    const std::string there = config::flow_text(field.get(first)), here = config::flow_text(field.get(other));
    if (there != here) return field.path + " is " + there + " there and " + here + " here";
  }
  return std::nullopt;
}

}  // namespace trireme
