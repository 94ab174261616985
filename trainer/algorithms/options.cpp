#include "trainer/algorithms/options.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "trainer/ops/philox.h"

namespace trireme {
namespace {

// A number where it was measured on H200: docs/lab/012-reference-under-generation.md.
constexpr int64_t kBackgroundSms = 32;

SamplingOptions sampling_of(const Config& config, const Tokenizer& tokenizer) {
  const GenerationConfig& g = config.policy.generation;
  SamplingOptions s;
  s.temperature = g.temperature;
  s.top_k = g.top_k;
  s.top_p = g.top_p;
  s.min_p = g.min_p;
  s.max_new_tokens = g.max_new_tokens;
  s.stop_ids = tokenizer.eos_ids();
  for (const int64_t id : g.stop_token_ids) s.stop_ids.push_back(static_cast<int32_t>(id));
  s.stop_strings = g.stop_strings;
  s.seed = static_cast<uint64_t>(config.grpo.seed);
  return s;
}

// What all kinds have in common: by the configuration's rule, with the numbers of its use.
MicroBatchOptions micro_batch_options(const Config& config, int64_t samples, int64_t packed_tokens,
                                      int64_t dynamic_tokens) {
  using Rule = MicroBatchOptions::Rule;
  const PolicyConfig& p = config.policy;
  MicroBatchOptions o;
  o.samples = samples;
  if (p.dynamic_batching.enabled) {
    o.rule = Rule::kDynamic;
    o.tokens = dynamic_tokens;
    o.round = p.dynamic_batching.sequence_length_round;
  } else if (p.sequence_packing.enabled) {
    o.rule = Rule::kPacked;
    o.tokens = packed_tokens;
    o.algorithm = parse_packing_algorithm(p.sequence_packing.algorithm);
    o.share_prompts = p.sequence_packing.share_prompts;
    o.largest_first = p.sequence_packing.microbatch_order == "largest_first";
  }
  o.seed = static_cast<uint64_t>(config.grpo.seed);
  return o;
}

}  // namespace

SamplingOptions training_sampling(const Config& config, const Tokenizer& tokenizer) {
  return sampling_of(config, tokenizer);
}

SamplingOptions validation_sampling(const Config& config, const Tokenizer& tokenizer) {
  const GenerationConfig& g = config.policy.generation;
  SamplingOptions s = sampling_of(config, tokenizer);
  s.temperature = g.val_temperature;
  s.top_p = g.val_top_p;
  s.top_k = g.val_top_k;
  s.greedy = s.temperature == 0;
  s.seed = hash64("validation", s.seed);  // its own random numbers
  return s;
}

EngineOptions engine_options(const Config& config, std::shared_ptr<const DevicePartition> partition) {
  const GenerationConfig& g = config.policy.generation;
  EngineOptions o;
  o.cache_rows = g.kv_cache_tokens;
  o.cache_memory_fraction = g.kv_cache_memory_fraction;
  o.max_sequences = g.max_running_samples;
  o.prefill_chunk_tokens = g.prefill_chunk_tokens;
  o.max_total_length = config.policy.max_total_sequence_length;
  o.lanes = g.pipeline_lanes > 0 ? g.pipeline_lanes : g.fold_pipeline ? 1 : parallel_sizes(config).pipeline;
  o.partition = std::move(partition);
  return o;
}

int64_t background_sms(const Config& config) {
  const int64_t sms = config.policy.generation.background_sms;
  return sms < 0 ? kBackgroundSms : sms;
}

std::shared_ptr<const DevicePartition> partition_for(const Config& config, at::Device device, bool wanted) {
  return wanted ? split_device(device, background_sms(config)) : nullptr;
}

std::vector<RewardOptions> reward_options(const Config& config, const RewardPlace& place) {
  std::vector<RewardOptions> all;
  std::vector<std::string> names = config.env.enabled();
  const std::string& only = config.data.train.env_name;
  if (!only.empty()) {
    if (std::find(names.begin(), names.end(), only) == names.end()) {
      fail_user("data.train.env_name is '" + only + "' but env." + only + " is not enabled");
    }
    names = {only};
  }
  for (const std::string& name : names) {
    if (name == kRewardModel) continue;  // no program or service: see reward_model.h
    RewardOptions o = config.env.by_name(name);
    if (o.url.empty()) o.url = place.url;
    if (name == "http" && o.url.empty())
      fail_user("env.http.url is empty, and so is TRIREME_REWARD_URL, which the operator sets: name a URL");
    o.environment = place.environment;
    all.push_back(o);
  }
  return all;
}

double reward_kl_penalty(const Config& config) {
  return config.loss_fn.use_kl_in_reward ? config.loss_fn.reference_policy_kl_penalty : 0;
}

bool reads_previous_logprobs(const Config& config) {
  return !config.loss_fn.force_on_policy_ratio || config.grpo.seq_logprob_error_threshold ||
         reward_kl_penalty(config) != 0;
}

bool needs_reference(const Config& config) {
  return loss_options(config).reference_policy_kl_penalty != 0 || reward_kl_penalty(config) != 0;
}

LossOptions loss_options(const Config& config) {
  LossOptions o = config.loss_fn;
  if (config.grpo.skip_reference_policy_logprobs_calculation || o.use_kl_in_reward) o.reference_policy_kl_penalty = 0;
  return o;
}

LogprobOptions sampling_distribution(const Config& config) {
  const GenerationConfig& g = config.policy.generation;
  LogprobOptions o;
  o.temperature = g.temperature;
  o.top_k = g.top_k;
  o.top_p = g.top_p;
  o.min_p = g.min_p;
  // After the first optimizer step a sampled token may fall outside the filters of the moved distribution: it has no
  // part in the policy's term (LossInputs::filters).
  o.allow_filtered = o.filters();
  return o;
}

LogprobOptions reference_distribution(const Config& config) {
  LogprobOptions o = sampling_distribution(config);
  o.top_k = 0;
  o.top_p = 1;
  o.min_p = 0;
  return o;
}

bool kl_needs_unfiltered(const Config& config) {
  return loss_options(config).reference_policy_kl_penalty != 0 && sampling_distribution(config).filters();
}

StageOptions stage_options(const Config& config) {
  const MegatronConfig& m = config.policy.megatron_cfg;
  if (!m.enabled) return {};
  const auto named = [](int64_t layers) { return layers == kDerived ? 0 : layers; };
  return {.first_layers = named(m.num_layers_in_first_pipeline_stage),
          .last_layers = named(m.num_layers_in_last_pipeline_stage),
          .virtual_stages = m.virtual_pipeline_model_parallel_size};
}

Layout layout_of(const ParallelSizes& sizes) {
  return {
      .tp = sizes.tensor, .cp = sizes.context, .ep = sizes.expert, .pp = sizes.pipeline, .etp = sizes.expert_tensor};
}

Layout critic_layout(const Config& config, int64_t ranks) {
  return critic_layout(layout_of(parallel_sizes(critic_config(config))), ranks);
}

Layout critic_layout(const Layout& sizes, int64_t ranks) {
  Layout layout = sizes;
  const auto dp = derive_dp(layout, ranks);
  if (!dp) {
    fail_user("the critic's " + std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks") +
              " cannot be divided by the " + std::to_string(layout.tp * layout.cp * layout.pp) +
              " of its tensor x pipeline x context parallel size (value.megatron_cfg, value.dtensor_cfg, or an RLJob's "
              "spec.roles.critic.parallelism)");
  }
  layout.dp = *dp;
  return layout;
}

MicroBatchOptions training_micro_batches(const Config& config) {
  const PolicyConfig& p = config.policy;
  return micro_batch_options(config, p.train_micro_batch_size, p.sequence_packing.train_mb_tokens,
                             p.dynamic_batching.train_mb_tokens);
}

MicroBatchOptions logprob_micro_batches(const Config& config) {
  const PolicyConfig& p = config.policy;
  return micro_batch_options(config, p.logprob_batch_size, p.sequence_packing.logprob_mb_tokens,
                             p.dynamic_batching.logprob_mb_tokens);
}

MicroBatchOptions sft_micro_batches(const Config& config, bool train) {
  MicroBatchOptions o = training_micro_batches(config);
  o.samples = train ? config.policy.train_micro_batch_size : config.sft.val_micro_batch_size;
  o.share_prompts = false;  // every example has a prompt of its own
  o.seed = static_cast<uint64_t>(config.sft.seed);
  return o;
}

const MegatronConfig& router_settings(const Config& config) {
  static const MegatronConfig none;
  return config.policy.megatron_cfg.enabled ? config.policy.megatron_cfg : none;
}

}  // namespace trireme
