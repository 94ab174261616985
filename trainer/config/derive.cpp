// Values that follow from others.
#include <algorithm>

#include "trainer/config/config.h"
#include "trainer/config/fields.h"
#include "trainer/config/rules.h"

namespace trireme {
namespace {

using config::required_divisor;
using config::saturating_product;

template <class T, class V>
void fill(T& value, const V& derived) {
  if (value == static_cast<T>(kDerived)) value = static_cast<T>(derived);
}
void fill_text(std::string& value, const std::string& derived) {
  if (value.empty()) value = derived;
}

}  // namespace

void derive_defaults(Config& c) {
  auto& p = c.policy;
  const int64_t longest = p.max_total_sequence_length;
  fill_text(c.compatibility, "main");
  fill_text(p.tokenizer.name, p.model_name);
  if (c.checkpointing.metric_name == "default") c.checkpointing.metric_name = checkpoint_metric(c);
  if (!c.logger.log_dir.empty()) fill_text(c.logger.tensorboard.log_dir, c.logger.log_dir + "/tensorboard");
  c.grpo.val_period = std::max<int64_t>(c.grpo.val_period, 0);
  c.sft.val_period = std::max<int64_t>(c.sft.val_period, 0);
  if (p.sequence_packing.algorithm == "modified_ffd") p.sequence_packing.algorithm = "modified_first_fit_decreasing";
  if (p.tokenizer.chat_template == "default") p.tokenizer.chat_template.clear();
  fill(p.logprob_batch_size, p.train_micro_batch_size);
  fill(p.make_sequence_length_divisible_by, required_divisor(c));
  fill(p.dynamic_batching.train_mb_tokens, saturating_product(longest, p.train_micro_batch_size));
  fill(p.dynamic_batching.logprob_mb_tokens, saturating_product(longest, p.logprob_batch_size));
  fill(p.sequence_packing.train_mb_tokens, saturating_product(longest, p.train_micro_batch_size));
  fill(p.sequence_packing.logprob_mb_tokens, saturating_product(longest, p.logprob_batch_size));
  fill(p.generation.max_new_tokens, longest);
  p.generation.top_k = std::max<int64_t>(p.generation.top_k, 0);
  fill(p.generation.val_temperature, p.generation.temperature);
  fill(p.generation.val_top_p, p.generation.top_p);
  fill(p.generation.val_top_k, p.generation.top_k);
  fill(p.megatron_cfg.optimizer.clip_grad, p.max_grad_norm);
  fill(p.megatron_cfg.scheduler.start_weight_decay, p.megatron_cfg.optimizer.weight_decay);
  fill(p.megatron_cfg.scheduler.end_weight_decay, p.megatron_cfg.optimizer.weight_decay);
  fill(c.grpo.reward_shaping.max_response_length, longest);
  fill(c.data.max_input_seq_length, longest);
  fill(c.data.seed, c.algorithm == "sft" ? c.sft.seed : c.grpo.seed);
  if (c.data.validation.dataset_name.empty() && c.data.validation.data_path.empty() &&
      c.data.validation.mixture.empty()) {
    // Held out of the training file, so with its columns.
    fill_text(c.data.validation.input_key, c.data.train.input_key);
    fill_text(c.data.validation.output_key, c.data.train.output_key);
  }
  for (DatasetConfig* dataset : {&c.data.train, &c.data.validation}) {
    const std::string& columns = dataset->dataset_name.empty() ? c.data.train.dataset_name : dataset->dataset_name;
    if (const auto* known = config::find_dataset(columns)) {
      fill_text(dataset->input_key, known->input_key);
      fill_text(dataset->output_key, known->output_key);
    }
  }
  fill(c.cluster.processes, c.cluster.gpus_per_node);
}

}  // namespace trireme
