// What NeMo-RL's files say beyond the table of fields: keys without a meaning here, keys of features that are not here,
// other algorithms, model families, and the defaults in which its versions differ. Checked against the recipes of its
// tag v0.3.0 and of its main branch by scripts/check_recipes.py (docs/recipes.md).
#include "base/text.h"
#include "trainer/config/fields.h"
#include "trainer/config/rules.h"

namespace trireme::config {
namespace {

// Several keys of one section that share a reason.
void ignore(std::vector<IgnoredKey>& table, const std::string& section, const std::vector<std::string>& names,
            const std::string& reason) {
  for (const std::string& name : names) table.push_back({section + name, reason});
}

void feature(std::vector<FeatureKey>& table, const std::string& section, const std::vector<std::string>& names,
             FeatureKey::When when, const std::string& what) {
  for (const std::string& name : names) table.push_back({section + name, when, what});
}

// What stands below `from` is known below `to` too, but for what begins with one of `without`.
template <typename Key>
void add_twins(std::vector<Key>& table, const std::string& from, const std::string& to,
               const std::vector<std::string>& without) {
  for (size_t i = 0, size = table.size(); i < size; ++i) {
    bool twin = starts_with(table[i].path, from);
    for (const std::string& prefix : without) twin = twin && !starts_with(table[i].path, prefix);
    if (!twin) continue;
    Key copy = table[i];
    copy.path = to + copy.path.substr(from.size());
    table.push_back(std::move(copy));
  }
}

// Reasons of several keys.
constexpr const char* kEngine =
    "a setting of another generation engine; for the layout of generation see policy.generation.tensor_parallel_size "
    "and fold_pipeline";
constexpr const char* kBackend = "an internal of another training back-end";
constexpr const char* kExperts = "an internal of another implementation of experts";
constexpr const char* kShared =
    "trainer and engine share the weights, or, where generation has a layout of its own, "
    "fill a second copy in buckets of one size";
constexpr const char* kPorts = "the system chooses ports";
constexpr const char* kLogs = "logs go to the step log, Prometheus and the report";
constexpr const char* kColumns = "columns decide how a row is read";
constexpr const char* kModel = "policy.precision and the model's own config.json decide";
constexpr const char* kOnce = "validation data are not split again";
constexpr const char* kOffload = "optimizer state stays on the device";

void ignore_generation_and_policy(std::vector<IgnoredKey>& keys) {
  ignore(keys, "policy.generation.",
         {"vllm_cfg", "vllm_kwargs", "sglang_cfg", "mcore_generation_config", "trtllm_cfg", "trtllm_kwargs",
          "dynamo_cfg", "use_async_rollouts"},
         kEngine);
  ignore(keys, "policy.generation.", {"refit_transport", "refit_cfg", "checkpoint_engine_config"}, kShared);
  ignore(keys, "policy.generation.", {"port_range_low", "port_range_high"}, kPorts);
  ignore(keys, "policy.generation.", {"pad_token_id", "_pad_token_id"}, "rows are not padded");
  ignore(keys, "policy.generation.", {"model_name"}, "see policy.model_name");
  ignore(keys, "policy.", {"generation_batch_size"}, "the engine batches continuously");
  ignore(keys, "policy.", {"refit_buffer_size_gb"}, kShared);
  ignore(keys, "policy.", {"fsdp_offload_enabled"},
         "v0.3 does not read it either, see policy.dtensor_cfg; it marks a file of v0.3 (compatibility)");
  ignore(keys, "policy.", {"activation_checkpointing_enabled"},
         "v0.3 does not read it either; see activation_checkpointing of policy.dtensor_cfg or megatron_cfg");
  ignore(keys, "policy.tokenizer.", {"use_fastokens"}, kBackend);
  ignore(keys, "policy.sequence_packing.", {"fuse_loss"}, "the loss always runs over packed rows");
  ignore(keys, "policy.optimizer.kwargs.", {"foreach", "fused", "store_param_remainders"}, kBackend);
  ignore(keys, "policy.optimizer.kwargs.", {"exp_avg_dtype", "exp_avg_sq_dtype", "master_weights"},
         "master weights and moments are always float32");
}

void ignore_back_ends(std::vector<IgnoredKey>& keys) {
  ignore(keys, "policy.dtensor_cfg.",
         {"_v2", "custom_parallel_plan", "clear_cache_every_n_steps", "env_vars", "automodel_kwargs",
          "defer_fsdp_grad_sync", "moe_parallelizer"},
         kBackend);
  ignore(keys, "policy.dtensor_cfg.", {"dp_replicate_size"}, "state is shared by all data parallel ranks");

  ignore(keys, "policy.megatron_cfg.", {"converter_type", "force_reconvert_from_hf"}, "models need no conversion");
  ignore(keys, "policy.megatron_cfg.", {"pipeline_dtype"}, "stages hand over policy.precision");
  ignore(keys, "policy.megatron_cfg.",
         {"empty_unused_memory_level", "apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion",
          "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_warmup_steps", "env_vars", "attention_backend",
          "transformer_impl", "clear_memory_caches_before_refit", "use_gloo_process_groups",
          "use_fused_weighted_squared_relu"},
         kBackend);
  ignore(keys, "policy.megatron_cfg.",
         {"moe_permute_fusion", "moe_grouped_gemm", "moe_token_dispatcher_type", "moe_enable_deepep",
          "moe_shared_expert_overlap", "moe_flex_dispatcher_backend", "moe_per_layer_logging", "moe_hybridep_num_sms",
          "hybridep_num_ranks_per_nvlink_domain", "hybridep_use_mnnvl", "inference_moe_token_dispatcher_type",
          "inference_grouped_gemm_backend", "moe_pad_experts_for_cuda_graph_inference"},
         kExperts);
  ignore(keys, "policy.megatron_cfg.", {"track_moe_metrics"}, "routers are always measured (train/moe/...)");
  ignore(keys, "policy.megatron_cfg.", {"use_fused_linear_logprobs"}, "log-probs are always chunked and fused");
  ignore(keys, "policy.megatron_cfg.", {"fused_linear_logprobs_chunk_size"}, "see policy.logprob_chunk_size");
  ignore(keys, "policy.megatron_cfg.", {"checkpoint"}, "see checkpointing");
  ignore(keys, "policy.megatron_cfg.", {"train_iters"}, "see max_num_steps of grpo or sft");
  ignore(keys, "policy.megatron_cfg.",
         {"calculate_per_token_loss", "do_not_average_loss", "cp_normalize", "scale_loss_by_dp_cp_size"},
         "gradients are sums over global counts");
  ignore(keys, "policy.megatron_cfg.scheduler.", {"override_opt_param_scheduler"},
         "after a resume the configuration's schedule counts");
  ignore(keys, "policy.megatron_cfg.optimizer.", {"bf16", "fp16"}, "see policy.precision");
  ignore(keys, "policy.megatron_cfg.optimizer.", {"sgd_momentum", "use_precision_aware_optimizer"}, kBackend);
  ignore(keys, "policy.megatron_cfg.optimizer.",
         {"optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"}, kOffload);
  ignore(keys, "policy.megatron_cfg.distributed_data_parallel_config.", {"average_in_collective"},
         "gradients are sums over global counts");
}

void ignore_runs(std::vector<IgnoredKey>& keys) {
  ignore(keys, "grpo.", {"calculate_advantages_on_gpu"}, kBackend);
  ignore(keys, "grpo.", {"deduplicate_multimodal_data", "debug_payload_metrics"}, "rows hold text only");
  ignore(keys, "grpo.", {"num_val_generations_per_prompt"}, "see grpo.val_num_generations_per_prompt");
  for (const char* section : {"grpo.async_grpo.", "ppo.async_ppo."}) {
    ignore(keys, section, {"drop_incomplete_targets_on_restore"},
           "complete groups are restored, and what was not finished is generated again");
  }
  ignore(keys, "", {"data_plane"}, "every rank keeps its own samples");

  ignore(keys, "data.", {"num_workers"}, "prompts are streamed and tokenised ahead by one thread");
  for (const char* section : {"data.", "data.default.", "data.train.", "data.validation."}) {
    ignore(keys, section, {"processor"}, kColumns);
    ignore(keys, section, {"subset"}, "known data sets have one");
    ignore(keys, section, {"download_dir"}, "nothing is downloaded; see data_path");
  }
  ignore(keys, "data.validation.", {"split_validation_size", "seed"}, kOnce);
  ignore(keys, "data.", {"num_prompts_per_dataloader"}, "see data.use_multiple_dataloader");
  ignore(keys, "data.", {"add_system_prompt"}, "the chat template decides");
  ignore(keys, "env.math.", {"verifier_type"}, "one verifier reads all final answers");
  ignore(keys, "env.math.", {"stop_strings"}, "see policy.generation.stop_strings");
  ignore(keys, "", {"sif_dir"}, "a folder of NeMo-Gym");
  ignore(keys, "env.reward_model.", {"processor"}, kColumns);
  ignore(keys, "env.reward_model.", {"tokenizer"}, "the reward model reads the policy's tokens");
  ignore(keys, "env.reward_model.", {"precision"}, "see policy.precision");
  ignore(keys, "env.reward_model.", {"max_model_len"}, "see policy.max_total_sequence_length");
  ignore(keys, "env.reward_model.", {"batch_size", "logprob_batch_size", "dynamic_batching", "sequence_packing"},
         "its batches are those of passes for log-probs, see policy.sequence_packing.logprob_mb_tokens");
  ignore(keys, "env.reward_model.", {"resources"}, "it is on the ranks that train");
  ignore(keys, "env.reward_model.", {"reward_model_cfg"}, "a reward model gives one number, that of the last token");
  ignore(keys, "env.reward_model.", {"checkpoint_path"}, "see env.reward_model.model_name");
  ignore(keys, "env.reward_model.",
         {"dtensor_cfg", "megatron_cfg", "max_grad_norm", "offload_optimizer_for_logprob", "generation"},
         "each rank holds all of a reward model, and trains none of it");

  ignore(keys, "logger.", {"swanlab_enabled", "swanlab", "monitor_gpus", "gpu_monitoring"}, kLogs);
  ignore(keys, "logger.mlflow.", {"run_id", "artifact_location"}, "a run of one's own is made on the server");
  ignore(keys, "checkpointing.", {"model_save_format"}, "always safetensors in Hugging Face layout");
  ignore(keys, "checkpointing.", {"save_consolidated"}, "checkpoints are readable by Hugging Face as they are");
  ignore(keys, "checkpointing.", {"ft_keep_latest_k", "ft_save_period"},
         "see checkpointing.save_period; the newest checkpoint is always kept");
  ignore(keys, "checkpointing.", {"is_async"}, "not a choice here");
  ignore(keys, "checkpointing.", {"model_cache_dir", "model_repo_id"}, kModel);
  ignore(keys, "cluster.", {"master_port_range_low", "master_port_range_high"}, kPorts);
  ignore(keys, "cluster.", {"segment_size"}, "the RLJob's topology places pods");
}

// Features of several keys.
constexpr const char* kLora = "low-rank adapters (LoRA)";
constexpr const char* kFp8 = "training in FP8";
constexpr const char* kQuantized = "quantisation (ModelOpt)";
constexpr const char* kPictures = "a model of pictures, sound or video";
constexpr const char* kMtp = "multi-token prediction";
constexpr const char* kGym = "NeMo-Gym";
constexpr const char* kTools = "penalties for tool calls and thinking tags";
constexpr const char* kTeachers = "on-policy distillation";
constexpr const char* kHost = "activations on the host";
constexpr const char* kBest = "best-of-k training";

using When = FeatureKey::When;

void features_of_algorithms(std::vector<FeatureKey>& keys) {
  feature(keys, "", {"async_rl"}, When::kSet, "generation while training (the single controller)");
  feature(keys, "", {"on_policy_distillation"}, When::kEnabled, kTeachers);
  feature(keys, "reward_penalties.",
          {"penalize_duplicated_reasoning", "penalize_empty_final_answer", "penalize_unwanted_tokens",
           "penalize_malformed_think_tag"},
          When::kSet, kTools);
  feature(keys, "reward_penalties.", {"token_ids"}, When::kNever, kTools);
  feature(keys, "grpo.",
          {"invalid_tool_call_advantage", "malformed_thinking_advantage", "penalize_invalid_tool_call",
           "penalize_malformed_thinking", "invalid_tool_call_strategy"},
          When::kSet, kTools);
  feature(keys, "grpo.adv_estimator.", {"reward_weights"}, When::kNever, "an advantage of each reward (GDPO)");
  feature(keys, "grpo.", {"zero_variance_prompt_filtering"}, When::kSet,
          "leaving out groups of equal rewards without replacing them");
  feature(keys, "grpo.", {"dynamic_sampling_oversample_ratio"}, When::kSet, "oversampling in dynamic sampling");
  feature(keys, "grpo.", {"use_best_at_k", "use_combined_training"}, When::kSet, kBest);
  feature(keys, "grpo.",
          {"best_at_k_k", "best_at_k_m", "combined_training_best_at_k_weight", "combined_training_pass_at_1_weight",
           "combined_training_weight_mode"},
          When::kNever, kBest);
  feature(keys, "sft.", {"only_unmask_final"}, When::kSet, "a loss on the last response of a conversation only");
}

void features_of_models(std::vector<FeatureKey>& keys) {
  feature(keys, "policy.", {"is_vlm"}, When::kSet, kPictures);
  feature(keys, "policy.tokenizer.", {"audio", "video", "use_processor"}, When::kSet, kPictures);
  feature(keys, "policy.", {"draft"}, When::kEnabled, "a draft model for speculative decoding");
  feature(keys, "policy.", {"router_replay"}, When::kEnabled, "router replay");
  feature(keys, "policy.", {"reward_model_cfg"}, When::kEnabled, "training a reward model");
  feature(keys, "policy.", {"hf_config_overrides"}, When::kSet, "changing the model's config.json by the run's file");
  feature(keys, "policy.", {"quant_cfg", "dequantize_base_checkpoint"}, When::kSet, kQuantized);
  feature(keys, "policy.",
          {"quant_batch_size", "quant_calib_data", "quant_calib_size", "quant_sequence_length",
           "disable_modelopt_layer_spec"},
          When::kNever, kQuantized);
  for (const char* section : {"policy.", "checkpointing."})
    feature(keys, section, {"pretrained_checkpoint"}, When::kSet, "first weights from a Megatron checkpoint");
  feature(keys, "checkpointing.", {"is_peft", "peft_config"}, When::kSet, kLora);

  feature(keys, "policy.generation.", {"quant_cfg", "real_quant"}, When::kSet, kQuantized);
  feature(keys, "policy.generation.", {"real_quant_export_cpu_offload", "real_quant_ignore"}, When::kNever, kQuantized);
  feature(keys, "policy.generation.", {"bad_words"}, When::kSet, "words that are never generated");
  keys.push_back({"policy.generation.vllm_cfg.precision", When::kIs, "generation in FP8", "fp8"});
  keys.push_back({"policy.generation.vllm_cfg.kv_cache_dtype", When::kIs, "a key-value cache in FP8", "fp8"});
}

void features_of_back_ends(std::vector<FeatureKey>& keys) {
  feature(keys, "policy.dtensor_cfg.", {"lora_cfg"}, When::kEnabled, kLora);
  feature(keys, "policy.megatron_cfg.", {"moe_router_enable_expert_bias"}, When::kSet,
          "choosing experts by a bias besides their logits");
  feature(keys, "policy.megatron_cfg.", {"moe_router_num_groups", "moe_router_group_topk"}, When::kAboveOne,
          "routing by groups of experts");
  feature(keys, "policy.megatron_cfg.", {"peft"}, When::kEnabled, kLora);
  feature(keys, "policy.megatron_cfg.", {"fp8_cfg"}, When::kEnabled, kFp8);
  feature(keys, "policy.megatron_cfg.",
          {"first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"}, When::kNever, kFp8);
  feature(keys, "policy.megatron_cfg.", {"mtp_num_layers"}, When::kSet, kMtp);
  feature(keys, "policy.megatron_cfg.", {"mtp_loss_scaling_factor", "mtp_use_repeated_layer", "mtp_detach_heads"},
          When::kNever, kMtp);
  feature(keys, "policy.megatron_cfg.", {"fine_grained_activation_offloading"}, When::kSet, kHost);
  feature(keys, "policy.megatron_cfg.", {"offload_modules"}, When::kNever, kHost);
  feature(keys, "policy.megatron_cfg.", {"model_overrides"}, When::kSet,
          "changing the model's config.json by the run's file");
  feature(keys, "policy.megatron_cfg.",
          {"freeze_config", "freeze_vision_model", "freeze_vision_projection", "freeze_sound_encoder",
           "freeze_sound_projection", "radio_force_cpe_eval_mode"},
          When::kSet, kPictures);
}

void features_of_data_and_rewards(std::vector<FeatureKey>& keys) {
  for (const char* section : {"data.train", "data.validation"})
    feature(keys, section, {""}, When::kList, "several data sets at once (data.train.mixture takes them)");
  for (const char* section : {"data.default.", "data.train.", "data.validation."}) {
    feature(keys, section,
            {"num_frames", "video_sampling_style", "video_target_num_patches", "video_temporal_patch_size",
             "video_maintain_aspect_ratio"},
            When::kSet, kPictures);
    feature(keys, section, {"allowed_problem_types"}, When::kSet, "rows chosen by their type");
    feature(keys, section, {"max_samples"}, When::kSet, "the first rows of a data set only");
    feature(keys, section, {"min_generation_tokens"}, When::kSet, "prompts chosen by the room left for a response");
  }
  feature(keys, "data.", {"use_multiple_dataloader"}, When::kSet, "several data loaders at once");
  feature(keys, "data.", {"custom_dataloader"}, When::kSet, "a data loader of one's own in Python");

  feature(keys, "env.", {"should_use_nemo_gym"}, When::kSet, kGym);
  feature(keys, "env.", {"nemo_gym"}, When::kGrades, kGym);
  feature(keys, "env.", {"should_log_nemo_gym_responses", "should_mask_flagged_samples"}, When::kNever, kGym);
  feature(keys, "logger.wandb.", {"log_nemo_gym_full_result_tables"}, When::kNever, kGym);
  feature(keys, "env.", {"sliding_puzzle_game"}, When::kSet, "a game of several turns");
  feature(keys, "env.", {"math_multi_reward"}, When::kGrades, "an advantage of each reward (GDPO)");
  feature(keys, "env.", {"code", "code_jaccard"}, When::kGrades,
          "the environment for code (env.command runs a grader of one's own)");
  feature(keys, "env.", {"dapo"}, When::kGrades, "the environment dapo (env.math grades the same responses)");
  feature(keys, "env.", {"vlm", "clevr-cogent", "geometry3k", "refcoco", "mmpr-tiny"}, When::kGrades, kPictures);
}

}  // namespace

const std::vector<IgnoredKey>& ignored_keys() {
  static const std::vector<IgnoredKey> kKeys = [] {
    std::vector<IgnoredKey> keys;
    for (const auto add : {ignore_generation_and_policy, ignore_back_ends, ignore_runs}) add(keys);
    ignore(keys, "value.", {"tokenizer"}, "the critic reads the policy's tokens");
    ignore(keys, "value.", {"reward_model_cfg"}, "a critic always gives one number a token");
    ignore(keys, "value.", {"logprob_chunk_size", "offload_optimizer_for_logprob"}, kBackend);
    add_twins(keys, "grpo.", "ppo.", {"grpo.async_grpo."});
    add_twins(keys, "policy.", "value.", {"policy.generation.", "policy.tokenizer."});
    return keys;
  }();
  return kKeys;
}

const std::vector<FeatureKey>& feature_keys() {
  static const std::vector<FeatureKey> kKeys = [] {
    std::vector<FeatureKey> keys;
    for (const auto add :
         {features_of_algorithms, features_of_models, features_of_back_ends, features_of_data_and_rewards})
      add(keys);
    add_twins(keys, "grpo.", "ppo.", {"grpo.adv_estimator."});
    add_twins(keys, "policy.", "value.", {"policy.generation.", "policy.tokenizer.", "policy.reward_model_cfg"});
    return keys;
  }();
  return kKeys;
}

const FeatureKey* missing_environment(const std::string& name) {
  for (const auto& key : feature_keys()) {
    if (key.when == FeatureKey::When::kGrades && key.path == "env." + name) return &key;
  }
  return nullptr;
}

const std::vector<AlgorithmSection>& algorithm_sections() {
  static const std::vector<AlgorithmSection> kSections = {
      {"dpo", "preference training (DPO)"},
      {"rm", "training a reward model"},
      {"distillation", "distillation from a teacher"},
      {"eval", "an evaluation without training"},
  };
  return kSections;
}

const std::vector<ModelFamily>& unsupported_families() {
  static const std::vector<ModelFamily> kFamilies = {
      {"google/gemma-", "Gemma"},
      {"google/gemma2", "Gemma"},
      {"Qwen/Qwen3-Next", "Qwen3-Next"},
      {"Qwen/Qwen3-Omni", "Qwen3-Omni"},
      {"Qwen/Qwen3-VL", "Qwen3-VL"},
      {"Qwen/Qwen3.5", "Qwen3.5"},
      {"Qwen/Qwen2.5-VL", "Qwen2.5-VL"},
      {"Qwen/Qwen2.5-Omni", "Qwen2.5-Omni"},
      {"deepseek-ai/DeepSeek-V", "DeepSeek"},
      {"moonshotai/Moonlight", "Moonlight"},
      {"openai/gpt-oss", "GPT-OSS"},
      {"nvidia/NVIDIA-Nemotron-", "Nemotron"},
      {"nvidia/Nemotron-", "Nemotron"},
      {"nvidia/Llama-3_3-Nemotron-Super", "Nemotron"},
      {"mistralai/Mistral", "Mistral"},
      {"mistralai/Ministral", "Mistral"},
      {"mistralai/Magistral", "Mistral"},
      {"mistralai/Devstral", "Mistral"},
      {"mistralai/Codestral", "Mistral"},
      {"mistralai/Pixtral", "Mistral"},
      {"zai-org/GLM", "GLM"},
      {"MiniMaxAI/", "MiniMax"},
      {"HuggingFaceTB/SmolVLM", "SmolVLM"},
      {"meta-llama/Llama-4", "Llama 4"},
  };
  return kFamilies;
}

const std::vector<VersionDefault>& version_defaults() {
  static const std::vector<VersionDefault> kDefaults = {
      {"grpo.biased_group_std", "true", "false",
       "v0.3 has the biased estimator of a group's standard deviation, later versions the unbiased one"},
      {"data.drop_line_feeds", "true", "false",
       "SFT of v0.3 leaves out the line feeds that a chat template puts at the end of a conversation, later versions "
       "learn them"},
      {"loss_fn.kl_input_clamp_value", "null", "20", "v0.3 does not clamp"},
      {"loss_fn.kl_output_clamp_value", "null", "10", "v0.3 does not clamp"},
      {"loss_fn.kl_score_function_gradient", "false", "true",
       "v0.3 detaches the weight of the KL, so that its gradient lacks the score-function part"},
      {"policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp", "false", "true",
       "v0.3 does not read it, so that its data_parallel_sharding_strategy never counts"},
  };
  return kDefaults;
}

}  // namespace trireme::config
