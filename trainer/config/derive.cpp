// Values that follow from others.
#include <algorithm>

#include "trainer/config/config.h"
#include "trainer/config/fields.h"
#include "trainer/config/rules.h"

namespace trireme {
namespace {

using config::saturating_product;

template <class T, class V>
void fill(T& value, const V& derived) {
  if (value == static_cast<T>(kDerived)) value = static_cast<T>(derived);
}
void fill_text(std::string& value, const std::string& derived) {
  if (value.empty()) value = derived;
}

constexpr int64_t kNoLimit = 1'000'000'000;

// Of policy or value.
void derive_model(ModelTrainingConfig& p) {
  const int64_t longest = p.max_total_sequence_length;
  if (p.sequence_packing.algorithm == "modified_ffd") p.sequence_packing.algorithm = "modified_first_fit_decreasing";
  fill(p.logprob_batch_size, p.train_micro_batch_size);
  fill(p.dynamic_batching.train_mb_tokens, saturating_product(longest, p.train_micro_batch_size));
  fill(p.dynamic_batching.logprob_mb_tokens, saturating_product(longest, p.logprob_batch_size));
  fill(p.sequence_packing.train_mb_tokens, saturating_product(longest, p.train_micro_batch_size));
  fill(p.sequence_packing.logprob_mb_tokens, saturating_product(longest, p.logprob_batch_size));
  fill(p.megatron_cfg.optimizer.clip_grad, p.max_grad_norm);
  fill(p.megatron_cfg.scheduler.start_weight_decay, p.megatron_cfg.optimizer.weight_decay);
  fill(p.megatron_cfg.scheduler.end_weight_decay, p.megatron_cfg.optimizer.weight_decay);
}

void derive_value(Config& c) {
  ValueConfig& v = c.value;
  fill_text(v.model_name, c.policy.model_name);
  fill_text(v.precision, c.policy.precision);
  fill(v.train_global_batch_size, c.policy.train_global_batch_size);
  fill(v.train_micro_batch_size, c.policy.train_micro_batch_size);
  fill(v.max_total_sequence_length, c.policy.max_total_sequence_length);
  derive_model(v);
}

void derive_rollouts(RolloutConfig& r, int64_t longest) {
  if (r.max_num_epochs < 0) r.max_num_epochs = kNoLimit;
  r.val_period = std::max<int64_t>(r.val_period, 0);
  fill(r.reward_shaping.max_response_length, longest);
}

bool names_data(const DatasetConfig& dataset) {
  return !dataset.dataset_name.empty() || !dataset.data_path.empty() || !dataset.mixture.empty();
}

// The split of a data set that names none; of files of one's own it is train, whatever set they are of.
std::string default_split(const DatasetConfig& dataset) {
  const auto* known = dataset.data_path.empty() ? config::find_dataset(dataset.dataset_name) : nullptr;
  return known ? known->split : "train";
}

// As NeMo-RL's classes of data sets have it: most of those that are known by name do not read what a file says.
void derive_hold_out(DatasetConfig& train) {
  const auto* known = config::find_dataset(train.dataset_name);
  const bool whole_set = known && train.data_path.empty() && train.mixture.empty();
  if (whole_set && known->held_out == 0) train.split_validation_size = 0;
  fill(train.split_validation_size, known && train.mixture.empty() ? known->held_out : 0);
}

// `with_validation`: a set that is only named brings what it is validated on, as NeMo-RL's v0.3 has it.
void derive_data(DataConfig& data, bool with_validation) {
  const auto* named = config::find_dataset(data.train.dataset_name);
  if (with_validation && named && data.train.data_path.empty() && data.train.mixture.empty() &&
      !named->validation_set.empty() && !names_data(data.validation)) {
    data.validation.dataset_name = named->validation_set;
    fill_text(data.validation.split, named->validation_split);
    if (data.validation.repeat == 1) data.validation.repeat = named->validation_repeat;
  }
  for (DatasetConfig* dataset : {&data.train, &data.validation}) {
    if (dataset->mixture.empty()) fill_text(dataset->split, default_split(*dataset));
  }
  derive_hold_out(data.train);
  if (!names_data(data.validation)) {
    // Held out of the training file, so with its columns.
    fill_text(data.validation.input_key, data.train.input_key);
    fill_text(data.validation.output_key, data.train.output_key);
    fill_text(data.validation.system_key, data.train.system_key);
  }
  for (DatasetConfig* dataset : {&data.train, &data.validation}) {
    const std::string& columns = dataset->dataset_name.empty() ? data.train.dataset_name : dataset->dataset_name;
    if (const auto* known = config::find_dataset(columns)) {
      fill_text(dataset->input_key, known->input_key);
      fill_text(dataset->output_key, known->output_key);
      if (dataset->input_key == known->input_key) fill_text(dataset->system_key, known->system_key);
    }
  }
}

}  // namespace

void derive_defaults(Config& c) {
  auto& p = c.policy;
  const int64_t longest = p.max_total_sequence_length;
  fill_text(c.compatibility, "main");
  fill_text(p.tokenizer.name, p.model_name);
  if (c.checkpointing.metric_name == "default") c.checkpointing.metric_name = checkpoint_metric(c);
  if (!c.logger.log_dir.empty()) fill_text(c.logger.tensorboard.log_dir, c.logger.log_dir + "/tensorboard");
  derive_rollouts(c.grpo, longest);
  derive_rollouts(c.ppo, longest);
  if (c.algorithm == "ppo") {
    static_cast<RolloutConfig&>(c.grpo) = c.ppo;
    c.grpo.early_gradients = false;  // advantages are whitened over the whole batch
    const bool of_grpo = c.grpo.async_grpo.enabled && !c.ppo.async_ppo.enabled;
    c.grpo.async_grpo = static_cast<const AsyncGrpoConfig&>(c.ppo.async_ppo);
    if (of_grpo) c.grpo.async_grpo.enabled = true;  // cross_check says where it belongs
  }
  c.sft.val_period = std::max<int64_t>(c.sft.val_period, 0);
  if (p.tokenizer.chat_template == "default") p.tokenizer.chat_template.clear();
  derive_model(p);
  derive_value(c);
  fill(p.generation.max_new_tokens, longest);
  p.generation.top_k = std::max<int64_t>(p.generation.top_k, 0);
  fill(p.generation.val_temperature, p.generation.temperature);
  fill(p.generation.val_top_p, p.generation.top_p);
  fill(p.generation.val_top_k, p.generation.top_k);
  fill(c.data.max_input_seq_length, longest);
  fill(c.data.seed, c.algorithm == "sft" ? c.sft.seed : c.grpo.seed);
  derive_data(c.data, c.compatibility == "v0.3");
  // NeMo-RL's files switch it on by this name alone.
  if (c.data.train.env_name == kRewardModel) c.env.reward_model.enabled = true;
  fill(c.cluster.processes, c.cluster.gpus_per_node);
}

}  // namespace trireme
