#include "trainer/algorithms/plan_inputs.h"

#include <algorithm>

#include "base/error.h"
#include "trainer/algorithms/engine_layout.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/reference_stream.h"
#include "trainer/rollout/lengths.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {
namespace {

constexpr int64_t kUsualPrompt = 200;
static_assert(kBackgroundSamples == kSharedDeviceSamples && kBackgroundTokens == kStreamTokens);

RolloutLengths drawn_lengths(const Config& config, const PlannedLengths& asked, int64_t prompts, int64_t responses) {
  const int64_t longest = config.policy.max_total_sequence_length;
  const int64_t prompt = asked.prompt > 0 ? asked.prompt : std::max<int64_t>(1, std::min(kUsualPrompt, longest / 4));
  const int64_t new_tokens = has_rollouts(config) ? config.policy.generation.max_new_tokens : longest;
  const int64_t most = std::min(new_tokens, longest - prompt);
  if (most < 1) {
    fail_user("prompts of " + std::to_string(prompt) + " tokens leave no room for a response in the " +
              std::to_string(longest) + " of policy.max_total_sequence_length");
  }
  const int64_t mean = asked.response > 0 ? asked.response : std::max<int64_t>(1, most / 4);
  if (mean > most) {
    fail_user("responses of " + std::to_string(mean) + " tokens in the mean are more than the " + std::to_string(most) +
              " that a prompt of " + std::to_string(prompt) + " leaves");
  }
  if (prompts * responses == 1) {  // one draw has no mean and longest of its own
    RolloutLengths one;
    one.prompts = {prompt};
    one.outputs = {mean};
    return one;
  }
  // Prompts vary by 0.4 of their mean: the longest sample is then a little above what is allowed, as the mean is what
  // counts.
  return synthetic_lengths("synthetic:" + std::to_string(prompts) + "x" + std::to_string(responses) + ":mean=" +
                           std::to_string(mean) + ":max=" + std::to_string(most) + ":prompt=" + std::to_string(prompt));
}

// How steps follow each other, and who generates.
void add_way(const Config& config, Workload& work) {
  const AsyncGrpoConfig& async = config.grpo.async_grpo;
  work.age = most_age(config);
  work.in_flight = work.age > 0 && !exact_versions(config);
  work.recomputes_keys = async.recompute_kv_cache_after_weight_updates;
  work.previous_pass = work.age > 0 && async.ratio_from == RatioFrom::kTraining && reads_previous_logprobs(config);
  if (!generates_elsewhere(config)) return;
  const int64_t engines = planned_engines(config), devices = engine_ranks(config);
  work.engine.tp = devices;
  work.engines = engines > 0 ? engines : std::max<int64_t>(1, world_size(config) / devices);
  work.engines_near =
      config.cluster.num_nodes == 1 && world_size(config) + work.engines * devices <= config.cluster.gpus_per_node;
}

}  // namespace

int64_t planned_engines(const Config& config) {
  if (!generates_elsewhere(config)) return 0;
  const ColocatedResources& resources = config.policy.generation.colocated.resources;
  if (config.cluster.num_nodes > 1) return resources.num_nodes * (config.cluster.processes / engine_ranks(config));
  return resources.num_nodes == 0 ? resources.gpus_per_node / engine_ranks(config) : 0;
}

std::optional<std::string> too_few_engine_devices(const Config& config) {
  const ColocatedResources& resources = config.policy.generation.colocated.resources;
  const bool said = generates_elsewhere(config) && config.cluster.num_nodes == 1 && resources.num_nodes == 0 &&
                    resources.gpus_per_node > 0;
  if (!said || resources.gpus_per_node >= engine_ranks(config)) return std::nullopt;
  return "policy.generation.colocated.resources.gpus_per_node is " + std::to_string(resources.gpus_per_node) +
         ", fewer than the " + std::to_string(engine_ranks(config)) +
         " devices of an engine (policy.generation.tensor_parallel_size): raise it, or leave it out";
}

PlanOptions plan_options(const Config& config) {
  PlanOptions options;
  const bool whole = config.policy.precision == "float32";
  options.element_bytes = whole ? 4 : 2;
  options.gradient_bytes = gradients_in_fp32(config) ? 4 : 2;
  options.stages = stage_options(config);
  options.stage_section = "policy.megatron_cfg.";
  const RecomputeSetting setting = recompute_setting(config);
  options.fit_recompute = setting.fit;
  options.recomputed_layers = setting.all ? kEveryLayer : setting.layers;
  options.cheap_recompute = setting.norms && setting.swiglu;
  options.expert_recompute = options.cheap_recompute && setting.experts;
  options.cache_rows = config.policy.generation.kv_cache_tokens;
  options.cache_fraction = config.policy.generation.kv_cache_memory_fraction;
  const AsyncGrpoConfig& async = config.grpo.async_grpo;
  options.keeps_cache = carries_over(config) && !async.recompute_kv_cache_after_weight_updates;
  options.combine_blocks = config.policy.moe_combine_blocks;
  options.lanes = config.policy.generation.pipeline_lanes;
  options.generation_tp = generates_elsewhere(config) ? 0 : config.policy.generation.tensor_parallel_size;
  options.fold_pipeline = config.policy.generation.fold_pipeline;
  return options;
}

Workload planned_work(const Config& config, const PlannedLengths& asked) {
  Workload work;
  const bool sft = !has_rollouts(config);
  const int64_t batch = config.policy.train_global_batch_size;
  const int64_t prompts = sft ? batch : config.grpo.num_prompts_per_step;
  const int64_t responses = sft ? 1 : config.grpo.num_generations_per_prompt;
  const std::string& forced = config.policy.generation.forced_lengths;
  RolloutLengths lengths =
      forced.empty() || sft ? drawn_lengths(config, asked, prompts, responses) : load_lengths(forced);
  work.generates = !sft;
  work.reference = !sft && needs_reference(config);
  if (forced.empty() || sft) {
    work.prompts = std::move(lengths.prompts);
    work.outputs = std::move(lengths.outputs);
  } else {
    for (int64_t p = 0; p < prompts; ++p) {
      const auto of_file = static_cast<size_t>(p) % lengths.prompts.size();
      work.prompts.push_back(lengths.prompts[of_file]);
      for (int64_t i = 0; i < responses; ++i)
        work.outputs.push_back(lengths.output_of(p, i % lengths.samples_per_prompt()));
    }
  }
  work.longest = config.policy.max_total_sequence_length;
  work.optimizer_steps =
      sft ? 1 : std::max<int64_t>(1, optimizer_steps_per_rollout(config) * passes_per_rollout(config));
  const MicroBatchOptions train = sft ? sft_micro_batches(config, true) : training_micro_batches(config);
  const MicroBatchOptions logprobs = logprob_micro_batches(config);
  work.share_prompts = train.share_prompts;
  if (train.rule == MicroBatchOptions::Rule::kFixed) {
    work.train_samples = train.samples;
    work.logprob_samples = logprobs.samples;
  }
  work.train_tokens = std::max<int64_t>({train.tokens, work.longest, 1});
  work.logprob_tokens = std::max<int64_t>({logprobs.tokens, work.longest, 1});
  work.places = config.policy.generation.max_running_samples;
  work.prefill_tokens = config.policy.generation.prefill_chunk_tokens;
  if (sft) return work;
  add_way(config, work);
  // Under carry-over no places are left for anything beside the last responses, and engines have devices of their own.
  if (work.age > 0 || work.engines > 0) return work;
  work.early_gradients = config.grpo.early_gradients;
  if (work.reference || work.early_gradients || has_critic(config) || uses_reward_model(config))
    work.background_processors = background_sms(config);
  return work;
}

namespace {

// Scores of whole samples, or values of their states: one number a row.
PlannedModel value_model(const Config& config, ModelShape shape, const PlannedLengths& lengths) {
  shape.value_head = true;
  shape.tied = false;
  PlannedModel model{std::move(shape), planned_work(config, lengths), plan_options(config)};
  model.work.generates = model.work.reference = model.work.early_gradients = false;
  model.work.engines = model.work.age = 0;
  return model;
}

}  // namespace

PlannedModel planned_critic(const Config& config, ModelShape shape, const PlannedLengths& lengths) {
  const Config critic = critic_config(config);
  PlannedModel model = value_model(critic, std::move(shape), lengths);
  model.options.sharding = state_sharding(critic);
  model.options.stage_section = "value.megatron_cfg.";
  model.layout = layout_of(parallel_sizes(critic));
  const Workload of_policy = planned_work(config, lengths);
  model.work.prompts = of_policy.prompts;
  model.work.outputs = of_policy.outputs;
  return model;
}

PlannedModel planned_reward_model(const Config& config, ModelShape shape, const PlannedLengths& lengths) {
  return value_model(config, std::move(shape), lengths);
}

}  // namespace trireme
