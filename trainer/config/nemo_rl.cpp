// What NeMo-RL's files say beyond the table of fields: keys without a meaning here, keys of features that are not here,
// other algorithms, model families, and the defaults in which its versions differ. Checked against the recipes of its
// tag v0.3.0 and of its main branch by scripts/check_recipes.py (docs/recipes.md).
#include "base/text.h"
#include "trainer/config/fields.h"

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

}  // namespace

const std::vector<IgnoredKey>& ignored_keys() {
  static const std::vector<IgnoredKey> kKeys = [] {
    const std::string engine = "a setting of another generation engine";
    const std::string backend = "an internal of another training back-end";
    const std::string experts = "an internal of mixtures of experts, which are not here yet";
    const std::string shared = "trainer and engine share the weights";
    const std::string ports = "the system chooses ports";
    const std::string logs = "logs go to the step log, Prometheus and the report";
    const std::string columns = "columns decide how a row is read";
    const std::string template_decides = "the chat template decides";
    const std::string model = "policy.precision and the model's own config.json decide";
    const std::string once = "validation data are not split again";
    const std::string offload = "optimizer state stays on the device";
    std::vector<IgnoredKey> keys;

    ignore(keys, "policy.generation.",
           {"vllm_cfg", "vllm_kwargs", "sglang_cfg", "mcore_generation_config", "trtllm_cfg", "trtllm_kwargs",
            "dynamo_cfg", "use_async_rollouts"},
           engine);
    ignore(keys, "policy.generation.", {"refit_transport", "refit_cfg", "checkpoint_engine_config"}, shared);
    ignore(keys, "policy.generation.", {"port_range_low", "port_range_high"}, ports);
    ignore(keys, "policy.generation.", {"pad_token_id", "_pad_token_id"}, "rows are not padded");
    ignore(keys, "policy.generation.", {"model_name"}, "see policy.model_name");
    ignore(keys, "policy.", {"generation_batch_size"}, "the engine batches continuously");
    ignore(keys, "policy.", {"refit_buffer_size_gb"}, shared);
    ignore(keys, "policy.", {"fsdp_offload_enabled"},
           "v0.3 does not read it either, see policy.dtensor_cfg; it marks a file of v0.3 (compatibility)");
    ignore(keys, "policy.", {"activation_checkpointing_enabled"},
           "v0.3 does not read it either; see activation_checkpointing of policy.dtensor_cfg or megatron_cfg");
    ignore(keys, "policy.tokenizer.", {"use_fastokens"}, backend);
    ignore(keys, "policy.sequence_packing.", {"fuse_loss"}, "the loss always runs over packed rows");
    ignore(keys, "policy.optimizer.kwargs.", {"foreach", "fused", "store_param_remainders"}, backend);
    ignore(keys, "policy.optimizer.kwargs.", {"exp_avg_dtype", "exp_avg_sq_dtype", "master_weights"},
           "master weights and moments are always float32");

    ignore(keys, "policy.dtensor_cfg.",
           {"_v2", "custom_parallel_plan", "clear_cache_every_n_steps", "env_vars", "automodel_kwargs",
            "defer_fsdp_grad_sync", "moe_parallelizer"},
           backend);
    ignore(keys, "policy.dtensor_cfg.", {"dp_replicate_size"}, "every rank has the whole weights");

    ignore(keys, "policy.megatron_cfg.", {"converter_type", "force_reconvert_from_hf"}, "models need no conversion");
    ignore(keys, "policy.megatron_cfg.", {"pipeline_dtype"}, "stages hand over policy.precision");
    ignore(keys, "policy.megatron_cfg.",
           {"empty_unused_memory_level", "apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion",
            "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_warmup_steps", "env_vars", "attention_backend",
            "transformer_impl", "clear_memory_caches_before_refit", "use_gloo_process_groups",
            "use_fused_weighted_squared_relu"},
           backend);
    ignore(keys, "policy.megatron_cfg.",
           {"moe_permute_fusion", "moe_grouped_gemm", "moe_token_dispatcher_type", "moe_enable_deepep",
            "moe_shared_expert_overlap", "moe_flex_dispatcher_backend", "moe_per_layer_logging", "moe_hybridep_num_sms",
            "hybridep_num_ranks_per_nvlink_domain", "hybridep_use_mnnvl", "inference_moe_token_dispatcher_type",
            "inference_grouped_gemm_backend", "moe_router_num_groups", "moe_router_group_topk",
            "moe_pad_experts_for_cuda_graph_inference", "moe_router_enable_expert_bias", "moe_aux_loss_coeff",
            "track_moe_metrics"},
           experts);
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
    ignore(keys, "policy.megatron_cfg.optimizer.", {"sgd_momentum", "use_precision_aware_optimizer"}, backend);
    ignore(keys, "policy.megatron_cfg.optimizer.",
           {"optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"}, offload);
    ignore(keys, "policy.megatron_cfg.distributed_data_parallel_config.", {"average_in_collective"},
           "gradients are sums over global counts");
    ignore(keys, "policy.megatron_cfg.distributed_data_parallel_config.",
           {"use_custom_fsdp", "data_parallel_sharding_strategy"}, backend);

    ignore(keys, "grpo.", {"calculate_advantages_on_gpu"}, backend);
    ignore(keys, "grpo.", {"deduplicate_multimodal_data", "debug_payload_metrics"}, "rows hold text only");
    ignore(keys, "grpo.", {"num_val_generations_per_prompt"}, "see grpo.val_num_generations_per_prompt");
    ignore(keys, "grpo.async_grpo.",
           {"max_generation_failures", "in_flight_weight_updates", "recompute_kv_cache_after_weight_updates"},
           "async_grpo is not supported yet");
    ignore(keys, "", {"data_plane"}, "every rank keeps its own samples");

    ignore(keys, "data.", {"num_workers"}, "prompts are streamed and tokenised ahead by one thread");
    for (const char* section : {"data.", "data.default.", "data.train.", "data.validation."}) {
      ignore(keys, section, {"processor"}, columns);
      ignore(keys, section, {"subset"}, "known data sets have one");
      ignore(keys, section, {"download_dir"}, "nothing is downloaded; see data_path");
    }
    ignore(keys, "data.train.", {"repeat"}, "see grpo.max_num_epochs");
    ignore(keys, "data.validation.", {"repeat"}, "see grpo.val_num_generations_per_prompt");
    ignore(keys, "data.validation.", {"split_validation_size", "seed"}, once);
    ignore(keys, "data.", {"num_prompts_per_dataloader"}, "see data.use_multiple_dataloader");
    ignore(keys, "data.", {"add_bos", "add_generation_prompt", "add_system_prompt"}, template_decides);
    ignore(keys, "env.math.", {"verifier_type"}, "one verifier reads all final answers");
    ignore(keys, "env.math.", {"stop_strings"}, "see policy.generation.stop_strings");
    ignore(keys, "", {"sif_dir"}, "a folder of NeMo-Gym");

    ignore(keys, "logger.", {"swanlab_enabled", "swanlab", "monitor_gpus", "gpu_monitoring"}, logs);
    ignore(keys, "logger.mlflow.", {"run_id", "artifact_location"}, "a run of one's own is made on the server");
    ignore(keys, "checkpointing.", {"model_save_format"}, "always safetensors in Hugging Face layout");
    ignore(keys, "checkpointing.", {"save_consolidated"}, "checkpoints are readable by Hugging Face as they are");
    ignore(keys, "checkpointing.", {"ft_keep_latest_k", "ft_save_period"},
           "see checkpointing.save_period; the newest checkpoint is always kept");
    ignore(keys, "checkpointing.", {"is_async"}, "not a choice here");
    ignore(keys, "checkpointing.", {"model_cache_dir", "model_repo_id"}, model);
    ignore(keys, "cluster.", {"master_port_range_low", "master_port_range_high"}, ports);
    ignore(keys, "cluster.", {"segment_size"}, "the RLJob's topology places pods");
    return keys;
  }();
  return kKeys;
}

const std::vector<FeatureKey>& feature_keys() {
  using When = FeatureKey::When;
  static const std::vector<FeatureKey> kKeys = [] {
    const std::string lora = "low-rank adapters (LoRA)";
    const std::string fp8 = "training in FP8";
    const std::string quantized = "quantisation (ModelOpt)";
    const std::string pictures = "a model of pictures, sound or video";
    const std::string mtp = "multi-token prediction";
    const std::string gym = "NeMo-Gym";
    const std::string tools = "penalties for tool calls and thinking tags";
    const std::string teachers = "on-policy distillation";
    const std::string host = "activations on the host";
    const std::string best = "best-of-k training";
    std::vector<FeatureKey> keys;

    feature(keys, "", {"async_rl"}, When::kSet, "generation while training (the single controller)");
    feature(keys, "", {"on_policy_distillation"}, When::kEnabled, teachers);
    feature(keys, "reward_penalties.",
            {"penalize_duplicated_reasoning", "penalize_empty_final_answer", "penalize_unwanted_tokens",
             "penalize_malformed_think_tag"},
            When::kSet, tools);
    feature(keys, "reward_penalties.", {"token_ids"}, When::kNever, tools);
    feature(keys, "grpo.",
            {"invalid_tool_call_advantage", "malformed_thinking_advantage", "penalize_invalid_tool_call",
             "penalize_malformed_thinking", "invalid_tool_call_strategy"},
            When::kSet, tools);
    feature(keys, "grpo.adv_estimator.", {"reward_weights"}, When::kNever, "an advantage of each reward (GDPO)");
    feature(keys, "grpo.", {"zero_variance_prompt_filtering"}, When::kSet,
            "leaving out groups of equal rewards without replacing them");
    feature(keys, "grpo.", {"dynamic_sampling_oversample_ratio"}, When::kSet, "oversampling in dynamic sampling");
    feature(keys, "grpo.", {"use_best_at_k", "use_combined_training"}, When::kSet, best);
    feature(keys, "grpo.",
            {"best_at_k_k", "best_at_k_m", "combined_training_best_at_k_weight", "combined_training_pass_at_1_weight",
             "combined_training_weight_mode"},
            When::kNever, best);
    feature(keys, "sft.", {"only_unmask_final"}, When::kSet, "a loss on the last response of a conversation only");

    feature(keys, "policy.", {"is_vlm"}, When::kSet, pictures);
    feature(keys, "policy.tokenizer.", {"audio", "video", "use_processor"}, When::kSet, pictures);
    feature(keys, "policy.", {"draft"}, When::kEnabled, "a draft model for speculative decoding");
    feature(keys, "policy.", {"router_replay"}, When::kEnabled, "router replay");
    feature(keys, "policy.", {"reward_model_cfg"}, When::kEnabled, "training a reward model");
    feature(keys, "policy.", {"hf_config_overrides"}, When::kSet, "changing the model's config.json by the run's file");
    feature(keys, "policy.", {"quant_cfg", "dequantize_base_checkpoint"}, When::kSet, quantized);
    feature(keys, "policy.",
            {"quant_batch_size", "quant_calib_data", "quant_calib_size", "quant_sequence_length",
             "disable_modelopt_layer_spec"},
            When::kNever, quantized);
    for (const char* section : {"policy.", "checkpointing."})
      feature(keys, section, {"pretrained_checkpoint"}, When::kSet, "first weights from a Megatron checkpoint");
    feature(keys, "checkpointing.", {"is_peft", "peft_config"}, When::kSet, lora);

    feature(keys, "policy.generation.", {"quant_cfg", "real_quant"}, When::kSet, quantized);
    feature(keys, "policy.generation.", {"real_quant_export_cpu_offload", "real_quant_ignore"}, When::kNever,
            quantized);
    feature(keys, "policy.generation.", {"bad_words"}, When::kSet, "words that are never generated");
    keys.push_back({"policy.generation.vllm_cfg.precision", When::kIs, "generation in FP8", "fp8"});
    keys.push_back({"policy.generation.vllm_cfg.kv_cache_dtype", When::kIs, "a key-value cache in FP8", "fp8"});

    feature(keys, "policy.dtensor_cfg.", {"lora_cfg"}, When::kEnabled, lora);
    feature(keys, "policy.dtensor_cfg.", {"expert_parallel_size"}, When::kAboveOne, "expert parallelism");
    feature(keys, "policy.megatron_cfg.", {"peft"}, When::kEnabled, lora);
    feature(keys, "policy.megatron_cfg.", {"fp8_cfg"}, When::kEnabled, fp8);
    feature(keys, "policy.megatron_cfg.",
            {"first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"}, When::kNever, fp8);
    feature(keys, "policy.megatron_cfg.", {"mtp_num_layers"}, When::kSet, mtp);
    feature(keys, "policy.megatron_cfg.", {"mtp_loss_scaling_factor", "mtp_use_repeated_layer", "mtp_detach_heads"},
            When::kNever, mtp);
    feature(keys, "policy.megatron_cfg.", {"fine_grained_activation_offloading"}, When::kSet, host);
    feature(keys, "policy.megatron_cfg.", {"offload_modules"}, When::kNever, host);
    feature(keys, "policy.megatron_cfg.", {"model_overrides"}, When::kSet,
            "changing the model's config.json by the run's file");
    feature(keys, "policy.megatron_cfg.",
            {"freeze_config", "freeze_vision_model", "freeze_vision_projection", "freeze_sound_encoder",
             "freeze_sound_projection", "radio_force_cpe_eval_mode"},
            When::kSet, pictures);

    for (const char* section : {"data.train", "data.validation"})
      feature(keys, section, {""}, When::kList, "several data sets at once (data.train.mixture takes them)");
    for (const char* section : {"data.default.", "data.train.", "data.validation."}) {
      feature(keys, section,
              {"num_frames", "video_sampling_style", "video_target_num_patches", "video_temporal_patch_size",
               "video_maintain_aspect_ratio"},
              When::kSet, pictures);
      feature(keys, section, {"allowed_problem_types"}, When::kSet, "rows chosen by their type");
      feature(keys, section, {"max_samples"}, When::kSet, "the first rows of a data set only");
      feature(keys, section, {"min_generation_tokens"}, When::kSet, "prompts chosen by the room left for a response");
    }
    feature(keys, "data.", {"use_multiple_dataloader"}, When::kSet, "several data loaders at once");
    feature(keys, "data.", {"custom_dataloader"}, When::kSet, "a data loader of one's own in Python");
    feature(keys, "data.", {"add_eos"}, When::kFalse, "responses that end without the end token");

    feature(keys, "env.", {"should_use_nemo_gym"}, When::kSet, gym);
    feature(keys, "env.", {"nemo_gym"}, When::kGrades, gym);
    feature(keys, "env.", {"should_log_nemo_gym_responses", "should_mask_flagged_samples"}, When::kNever, gym);
    feature(keys, "logger.wandb.", {"log_nemo_gym_full_result_tables"}, When::kNever, gym);
    feature(keys, "env.", {"sliding_puzzle_game"}, When::kSet, "a game of several turns");
    feature(keys, "env.", {"reward_model"}, When::kGrades, "a reward model as reward");
    feature(keys, "env.", {"math_multi_reward"}, When::kGrades, "an advantage of each reward (GDPO)");
    feature(keys, "env.", {"code", "code_jaccard"}, When::kGrades,
            "the environment for code (env.command runs a grader of one's own)");
    feature(keys, "env.", {"dapo"}, When::kGrades, "the environment dapo (env.math grades the same responses)");
    feature(keys, "env.", {"vlm", "clevr-cogent", "geometry3k", "refcoco", "mmpr-tiny"}, When::kGrades, pictures);
    return keys;
  }();
  return kKeys;
}

const std::vector<AlgorithmSection>& algorithm_sections() {
  static const std::vector<AlgorithmSection> kSections = {
      {"dpo", "preference training (DPO)"},
      {"rm", "training a reward model"},
      {"ppo", "PPO with a critic"},
      {"distillation", "distillation from a teacher"},
      {"eval", "an evaluation without training"},
  };
  return kSections;
}

const std::vector<ModelFamily>& unsupported_families() {
  static const std::vector<ModelFamily> kFamilies = {
      {"google/gemma-", "Gemma"},
      {"google/gemma2", "Gemma"},
      {"Qwen/Qwen3-30B-A3B", "Qwen3 with a mixture of experts"},
      {"Qwen/Qwen3-235B-A22B", "Qwen3 with a mixture of experts"},
      {"Qwen/Qwen3-Coder", "Qwen3 with a mixture of experts"},
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
      {"mistralai/", "Mistral"},
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
      {"loss_fn.kl_input_clamp_value", "null", "20", "v0.3 does not clamp"},
      {"loss_fn.kl_output_clamp_value", "null", "10", "v0.3 does not clamp"},
      {"loss_fn.kl_score_function_gradient", "false", "true",
       "v0.3 detaches the weight of the KL, so that its gradient lacks the score-function part"},
      {"data.shuffle", "false", "true",
       "v0.3 takes GRPO's prompts in the order of the file; its SFT shuffles like later versions"},
  };
  return kDefaults;
}

}  // namespace trireme::config
