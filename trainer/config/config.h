// Config: every setting of a training run, typed. Keys are NeMo-RL's; ours are marked (ours).
//
// A Config comes from load_config (files, overrides; validated) or is filled in by code and then passed to
// derive_defaults. Fields whose comment says "derived" hold kDerived (numbers) or are empty (text) until then.
// One table (fields.h) drives parsing, printing and docs/configuration.md: a new field is added here and there. What
// a folder beside this one is told as it stands in a file is declared once, in trainer/options, and held here.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "topology/sharding.h"
#include "trainer/options/advantages.h"
#include "trainer/options/data.h"
#include "trainer/options/loss.h"
#include "trainer/options/rewards.h"

namespace trireme {

inline constexpr int64_t kDerived = -1;
inline constexpr const char* kRewardModel = "reward_model";  // as an env; its reward is computed by the trainer itself
inline constexpr int64_t kAutoSize = 0;  // of a parallel size: "auto", which trireme plan resolves and a run refuses

struct AsyncGrpoConfig {
  bool enabled = false;
  int64_t max_trajectory_age_steps = 1;
  bool in_flight_weight_updates = false;
  bool recompute_kv_cache_after_weight_updates = true;
  RatioFrom ratio_from = RatioFrom::kTraining;  // (ours)
  // Of generation on devices of its own:
  int64_t max_generation_failures = 0;  // engines lost in a row that end the run; 0: any number
  double lease_timeout_s = 120;         // (ours) for an engine step, with samples in hand
  int64_t verify_weights_period = 100;  // (ours) transfers between two comparisons of checksums; 0: the first only
};

// What grpo.* and ppo.* have in common: from prompts to rewarded samples, and when to validate and to end.
struct RolloutConfig {
  int64_t num_prompts_per_step = 32;
  int64_t num_generations_per_prompt = 16;
  int64_t max_rollout_turns = 1;
  int64_t max_num_epochs = 1;
  int64_t max_num_steps = 1000000;
  int64_t val_period = 10;  // 0: never
  int64_t val_start_at = -1;
  bool val_at_start = false;
  bool val_at_end = false;
  int64_t max_val_samples = 256;
  int64_t val_batch_size = 256;
  int64_t val_num_generations_per_prompt = 1;
  std::string stop_at_validation_metric;  // e.g. "accuracy"; empty: off
  std::optional<double> stop_at_validation_threshold;
  int64_t seed = 42;
  bool overlong_filtering = false;
  bool use_dynamic_sampling = false;
  int64_t dynamic_sampling_max_gen_batches = 10;
  double batch_multiplier = 1.0;
  RewardShaping reward_shaping{.max_response_length = kDerived};  // derived: policy.max_total_sequence_length
  RewardScaling reward_scaling;
  bool skip_reference_policy_logprobs_calculation = false;
  std::optional<double> seq_logprob_error_threshold;
  bool shuffle_rewards = false;  // (ours) the control experiment: rewards permuted over the batch
};

// Of a PPO run its rollout part is ppo's, and async_grpo is ppo.async_ppo (derive_defaults), so that whoever makes
// rollouts asks here.
struct GrpoConfig : AdvantageOptions, RolloutConfig {
  bool early_gradients = false;  // (ours) gradients of whole groups while the last responses are generated
  AsyncGrpoConfig async_grpo;
};

struct AsyncPpoConfig : AsyncGrpoConfig {
  int64_t warmup_generation_lead_steps = 0;  // while only the critic trains; 0: max_trajectory_age_steps
};

struct PpoConfig : RolloutConfig {
  PpoConfig() {
    max_num_epochs = 100000;
    max_num_steps = 100000;
    val_period = 20;
    val_at_start = true;
  }
  int64_t ppo_epochs = 4;                   // passes of critic and actor over each rollout
  int64_t policy_training_start_step = 0;   // steps in which only the critic is trained
  std::string warm_start_value_checkpoint;  // step folder of another run; empty: none
  GaeOptions adv_estimator;
  AsyncPpoConfig async_ppo;
};

struct SftConfig {
  int64_t max_num_epochs = 1;
  int64_t max_num_steps = 60;
  int64_t val_period = 10;  // 0: never
  int64_t val_batches = 8;
  int64_t val_global_batch_size = 32;
  int64_t val_micro_batch_size = 1;
  bool val_at_start = true;
  bool val_at_end = false;
  std::optional<double> stop_at_validation_loss;  // (ours) early stopping
  int64_t seed = 42;
};

struct TokenizerConfig {
  std::string name;           // derived: policy.model_name
  std::string chat_template;  // a template's text, or a file; empty: the model's own; "none": no template
  nlohmann::json chat_template_kwargs = nlohmann::json::object();
};

struct DynamicBatchingConfig {
  bool enabled = false;
  int64_t train_mb_tokens = kDerived;    // derived: max_total_sequence_length * train_micro_batch_size
  int64_t logprob_mb_tokens = kDerived;  // derived: max_total_sequence_length * logprob_batch_size
  int64_t sequence_length_round = 64;
};

struct SequencePackingConfig {
  bool enabled = true;
  int64_t train_mb_tokens = kDerived;    // derived: max_total_sequence_length * train_micro_batch_size
  int64_t logprob_mb_tokens = kDerived;  // derived: max_total_sequence_length * logprob_batch_size
  std::string algorithm =
      "modified_first_fit_decreasing";  // | concatenative | first_fit_decreasing | first_fit_shuffle
  int64_t sequence_length_round = 64;
  std::string microbatch_order = "packer";  // | largest_first
  bool share_prompts = false;               // (ours) a group's prompt once in a micro-batch
};

struct OptimizerKwargs {
  double lr = 5e-6;
  double weight_decay = 0.01;
  std::vector<double> betas = {0.9, 0.999};
  double eps = 1e-8;
};

struct OptimizerConfig {
  std::string name = "torch.optim.AdamW";
  OptimizerKwargs kwargs;
};

// policy.scheduler: a list of pieces, then optionally {milestones: [...]} with the step (rollout) at which each next
// piece starts. Without milestones every piece applies at once (their factors multiply).
struct SchedulerPiece {
  std::string name;  // LinearLR | ConstantLR | CosineAnnealingLR | ExponentialLR, without "torch.optim.lr_scheduler."
  std::map<std::string, double> kwargs;  // torch's names and defaults, all present
};
struct SchedulerConfig {
  std::vector<SchedulerPiece> pieces;  // empty: constant
  std::vector<int64_t> milestones;     // pieces.size() - 1 entries, or none
};

struct MegatronOptimizerConfig {
  std::string optimizer = "adam";
  double lr = 5e-6;
  double min_lr = 5e-7;
  double weight_decay = 0.01;
  double adam_beta1 = 0.9, adam_beta2 = 0.999, adam_eps = 1e-8;
  std::string params_dtype = "float32";  // dtype of the master weights
  bool use_distributed_optimizer = true;
  double clip_grad = kDerived;  // derived: policy.max_grad_norm
};

struct MegatronSchedulerConfig {
  double start_weight_decay = kDerived, end_weight_decay = kDerived;  // derived: optimizer.weight_decay
  std::string weight_decay_incr_style = "constant";                   // | linear | cosine
  std::string lr_decay_style = "constant";                            // | linear | cosine | inverse-square-root
  int64_t lr_decay_iters = 1000;
  int64_t lr_warmup_iters = 13;
  double lr_warmup_init = 5e-7;
};

struct DdpConfig {
  bool grad_reduce_in_fp32 = false;
  bool overlap_grad_reduce = true;
  bool overlap_param_gather = true;
  bool use_custom_fsdp = true;  // false: the next key counts as optim
  std::string data_parallel_sharding_strategy = "optim";
};

struct MegatronConfig {
  bool enabled = false;
  int64_t tensor_model_parallel_size = 1;
  int64_t pipeline_model_parallel_size = 1;
  int64_t context_parallel_size = 1;
  int64_t expert_model_parallel_size = 1;
  int64_t expert_tensor_parallel_size = 1;
  bool sequence_parallel = true;  // always so
  bool tp_comm_overlap = true;
  int64_t num_layers_in_first_pipeline_stage = kDerived;  // derived: null, layers divided evenly
  int64_t num_layers_in_last_pipeline_stage = kDerived;
  int64_t virtual_pipeline_model_parallel_size = 1;
  bool activation_checkpointing = false;
  std::string recompute_granularity = "auto";  // null | full | selective
  std::string recompute_method = "uniform";    // | block
  int64_t recompute_num_layers = 1;
  std::vector<std::string> recompute_modules = {"layernorm", "mlp_act"};
  bool freeze_moe_router = true;
  std::string moe_router_dtype = "fp64";
  std::string moe_router_load_balancing_type = "none";
  double moe_aux_loss_coeff = 0.0;
  double moe_router_bias_update_rate = 0.0;
  bool defer_fp32_logits = true;  // always so
  MegatronOptimizerConfig optimizer;
  MegatronSchedulerConfig scheduler;
  DdpConfig distributed_data_parallel_config;
};

struct DtensorConfig {
  bool enabled = false;
  int64_t tensor_parallel_size = 1;
  int64_t context_parallel_size = 1;
  int64_t expert_parallel_size = 1;
  bool sequence_parallel = true;  // always so
  bool cpu_offload = false;
  bool activation_checkpointing = false;
};

struct ColocatedResources {
  int64_t gpus_per_node = 0;  // 0: null
  int64_t num_nodes = 0;
};
struct ColocatedConfig {
  bool enabled = true;
  ColocatedResources resources;
};

struct GenerationConfig {
  std::string backend = "trireme";    // vllm, sglang, megatron are accepted with a warning: one engine serves all
  int64_t max_new_tokens = kDerived;  // derived: max_total_sequence_length
  double temperature = 1.0;
  double top_p = 1.0;
  int64_t top_k = 0;                    // 0 (or null): off
  double min_p = 0.0;                   // (ours) 0: off
  double val_temperature = kDerived;    // derived: temperature; 0: greedy
  double val_top_p = kDerived;          // derived: top_p
  int64_t val_top_k = kDerived;         // derived: top_k
  std::vector<int64_t> stop_token_ids;  // besides the model's own end tokens
  std::vector<std::string> stop_strings;
  int64_t max_running_samples = 256;      // (ours) samples decoded at once, per rank
  int64_t prefill_chunk_tokens = 2048;    // (ours) prompt tokens prefilled in one engine step
  int64_t kv_cache_tokens = 0;            // (ours) rows of the KV cache, per rank; 0: from free memory
  double kv_cache_memory_fraction = 0.6;  // (ours) of the device's memory, when kv_cache_tokens is 0
  int64_t pipeline_lanes = 0;             // (ours) of pipeline stages; 0: as many as stages
  int64_t tensor_parallel_size = 0;       // (ours) tensor ranks of generation; 0: as in training, of an engine 1
  int64_t expert_parallel_size = 0;       // (ours) of an engine's tensor ranks, which share experts; 0: derived
  bool fold_pipeline = false;             // (ours) generation has no stages: each rank has its part of all layers
  int64_t background_sms = -1;            // (ours) for passes beside the last responses; -1: see fields_model.cpp
  // (ours) for measurements: a file or "synthetic:..." (trainer/rollout/lengths.h); empty: responses end by themselves
  std::string forced_lengths;
  ColocatedConfig colocated;
};

// What policy.* and value.* have in common: a model and how it is trained.
struct ModelTrainingConfig {
  std::string model_name = "Qwen/Qwen2.5-1.5B";  // a folder in Hugging Face format, or a Hub id in the local cache
  int64_t train_global_batch_size = 512;         // samples in one optimizer step
  int64_t train_micro_batch_size = 4;
  int64_t logprob_batch_size = kDerived;  // derived: train_micro_batch_size
  int64_t max_total_sequence_length = 512;
  std::string precision = "bfloat16";  // bfloat16 | float32
  double max_grad_norm = 1.0;          // 0: no clipping
  int64_t make_sequence_length_divisible_by = 1;
  bool activation_checkpointing = false;  // (ours) for runs without dtensor_cfg or megatron_cfg
  int64_t recompute_layers = -1;          // (ours) for runs without megatron_cfg; -1: as many as must be
  int64_t moe_combine_blocks = 0;         // (ours) runs of experts summed and rounded together; 0: derived
  DynamicBatchingConfig dynamic_batching;
  SequencePackingConfig sequence_packing;
  OptimizerConfig optimizer;
  SchedulerConfig scheduler;
  MegatronConfig megatron_cfg;
  DtensorConfig dtensor_cfg;
};

struct PolicyConfig : ModelTrainingConfig {
  TokenizerConfig tokenizer;
  int64_t logprob_chunk_size = 1024;  // rows of [tokens, vocab] alive at once in the log-prob and loss
  bool offload_optimizer_for_logprob = false;
  bool random_weights = false;  // (ours) for measurements: drawn instead of loaded
  GenerationConfig generation;
};

struct ValueConfig : ModelTrainingConfig {  // of the critic; it reads the policy's tokens
  ValueConfig() {
    model_name.clear();  // derived, as the next ones: the policy's
    train_global_batch_size = kDerived;
    train_micro_batch_size = kDerived;
    max_total_sequence_length = kDerived;
    precision.clear();
  }
};

struct DatasetConfig : RowLayout {
  std::string dataset_name;                 // a name of known_datasets(), or anything with data_path
  std::string data_path;                    // a file, a folder or a pattern
  std::vector<std::string> mixture;         // (ours) "WEIGHT SOURCE" each, instead of the two
  std::string split;                        // derived: the set's own, else train; of a mixture's sources each its own
  int64_t repeat = 1;                       // times that each row counts
  std::string env_name;                     // empty: every enabled env, weighted; else only that one
  double split_validation_size = kDerived;  // of train, held out when validation names no data; rows when >= 1.
                                            // derived: the known set's own, else 0
  int64_t seed = 42;                        // of the hold-out split
};

struct DataConfig : PromptOptions {
  DataConfig() {
    max_input_seq_length = kDerived;  // derived: policy.max_total_sequence_length; longer prompts are skipped
    seed = kDerived;                  // derived: grpo.seed or sft.seed
  }
  DatasetConfig train;
  DatasetConfig validation;  // data_path empty: split from train
};

struct RewardModelConfig {
  bool enabled = false;    // (ours) derived: also where data.train.env_name is reward_model
  std::string model_name;  // a folder of ...ForSequenceClassification with one label, or a Hub id in the local cache
  double weight = 1.0;     // (ours) in the sum
};

struct EnvConfig : RewardSet {
  double max_failed_share = 0.5;             // (ours) of a step's responses, for each reward; more stops the run
  double startup_timeout_s = 300.0;          // (ours) until each reward has answered a probe; 0: none is made
  RewardModelConfig reward_model;            // on the trainer's own devices, behind generation
  std::vector<std::string> enabled() const;  // their names, in the order of all(); kRewardModel is the last
  const RewardOptions& by_name(const std::string& name) const;
};

struct PrometheusConfig {  // (ours)
  bool enabled = false;
  std::string address = "0.0.0.0";
  int64_t port = 9400;    // 0: chosen by the system. Rank r listens at port + r when per_rank is on
  bool per_rank = false;  // else rank 0 only
};

struct TensorboardConfig {
  std::string log_dir;  // derived: logger.log_dir/tensorboard
};

struct WandbConfig {
  std::string project, name, entity, group;
  std::vector<std::string> tags;
};

struct MlflowConfig {
  std::string experiment_name = "Default", run_name;
  std::string tracking_uri;  // empty: MLFLOW_TRACKING_URI
};

struct RolloutLogConfig {  // (ours) log_dir/train_data_step_N.jsonl
  bool enabled = true;
  int64_t period = 1;
  int64_t max_samples = 128;
  int64_t keep_steps = 20;
};

struct LoggerConfig {
  std::string log_dir = "logs";
  bool tensorboard_enabled = false, wandb_enabled = false, mlflow_enabled = false;
  TensorboardConfig tensorboard;
  WandbConfig wandb;
  MlflowConfig mlflow;
  int64_t num_val_samples_to_print = 0;
  PrometheusConfig prometheus;
  RolloutLogConfig rollouts;
  bool report = true;               // (ours) log_dir/report.html at the end and every report_period steps
  int64_t report_period = 10;       // (ours)
  std::vector<int64_t> dump_steps;  // (ours) steps whose tensors are written to log_dir/dump_step_N.safetensors
};

struct CheckpointingConfig {
  bool enabled = true;
  std::string checkpoint_dir = "results";
  std::string metric_name = "default";  // derived: val:accuracy for GRPO, empty for SFT. Empty: keep the newest
  bool higher_is_better = true;
  int64_t keep_top_k = 3;  // 0: keep all
  int64_t save_period = 10;
  bool save_optimizer = true;
  std::string checkpoint_must_save_by;  // "days:hours:minutes:seconds" after the start; empty: off
  double staging_gib = 0;               // (ours) host memory of a rank for what is not written yet; 0: fields_run.cpp
};

struct ClusterConfig {
  int64_t gpus_per_node = 1;
  int64_t num_nodes = 1;
  int64_t processes = kDerived;       // (ours) ranks on this node; derived: gpus_per_node
  std::string device = "auto";        // (ours) auto | cpu | cuda
  double collective_timeout_s = 600;  // (ours) deadline of every collective and rendezvous
};

struct Config {
  std::string algorithm = "grpo";  // (ours) grpo | ppo | sft
  std::string compatibility;       // (ours) v0.3 | main: whose defaults differing keys take; derived: main
  GrpoConfig grpo;
  PpoConfig ppo;
  SftConfig sft;
  LossOptions loss_fn;
  ValueLossOptions value_loss_fn;
  CheckpointingConfig checkpointing;
  PolicyConfig policy;
  ValueConfig value;
  DataConfig data;
  EnvConfig env;
  LoggerConfig logger;
  ClusterConfig cluster;

  // Not a key: what files switch on and this version does not have, "key: feature"; validate_supported refuses them.
  std::vector<std::string> missing_features;
};

// The value of an environment variable, for ${oc.env:NAME}; nullopt where there is none.
using EnvironmentLookup = std::function<std::optional<std::string>(const std::string&)>;

// Reads `path` with everything it inherits, applies overrides ("key.sub=value", "++key=value"), resolves
// interpolations, checks types, ranges and cross-field rules, fills in derived values. Throws Error(kUser) with one
// line a problem: "file:line: key: what is wrong". `warnings` receives one line per accepted key that has no meaning
// here. Relative paths inside the files stay as written (relative to the working directory). Without `environment`
// ${oc.env:...} is an error.
Config load_config(const std::filesystem::path& path, const std::vector<std::string>& overrides = {},
                   std::vector<std::string>* warnings = nullptr, const EnvironmentLookup& environment = {});
// The same from text; `origin` is named in messages, `defaults:` are looked up beside it.
Config load_config_text(const std::string& text, const std::vector<std::string>& overrides = {},
                        std::vector<std::string>* warnings = nullptr, const std::filesystem::path& origin = "config",
                        const EnvironmentLookup& environment = {});

// Fills every field that still holds kDerived (or is empty and derived). load_config has done it.
void derive_defaults(Config& config);
// Ranges and cross-field rules; one line a problem. load_config has done it.
std::vector<std::string> find_problems(const Config& config);
// What else is wrong where PPO's critic has so many data parallel ranks, on the actor's ranks or on its own, which only
// who starts them knows: neither of the above has asked. One line a problem, by the keys of value.*.
std::vector<std::string> critic_problems(const Config& config, int64_t data_parallel_ranks);
// Throws Error(kUser) naming the key when the configuration asks for something this version cannot do.
void validate_supported(const Config& config);

// Keys of the reference that are accepted, set, and change nothing in this version: one sentence each, to be shown
// once.
std::vector<std::string> keys_without_effect(const Config& config);

// The resolved configuration, or its keys that begin with `below`; reading all of it back gives the same Config.
std::string to_yaml(const Config& config, std::string_view below = {});
// The same as nested JSON, for programs that show it; schedules are texts.
nlohmann::json to_json(const Config& config);
// What differs between the configuration that a checkpoint was written with and the one that goes on from it, a
// sentence a key: "policy.optimizer.kwargs.lr was 1e-05, is 2e-05". Left out: what does not change the numbers of a run
// (logging, checkpoints, validation, machines, cache sizes, when to end), and the algorithm (another one is refused
// before).
std::vector<std::string> changes_since(const Config& saved, const Config& now);
// Where the settings of two ranks of one run differ, which must be alike but for logs and the reward service:
// "grpo.seed is 5 there and 6 here". Nothing: nowhere.
std::optional<std::string> first_difference(const Config& of_first, const Config& own);
// Text of docs/configuration.md.
std::string config_reference_markdown();

// What checkpointing.metric_name may name: the measured values of a step that a checkpoint keeps.
std::vector<std::string> checkpoint_metric_names(const Config& config);
// The same value under its own name: v0.3's "val_reward" is "val:accuracy". An unknown name is given back as it is.
std::string checkpoint_metric(const Config& config);

// Whether the run generates: GRPO and PPO, not SFT.
bool has_rollouts(const Config& config);
// Whether other processes generate (`trireme engine`), and training's ranks only for validation.
bool generates_elsewhere(const Config& config);
// Whether places of the engine beside training take groups of the next steps.
bool carries_over(const Config& config);
// The age that tokens may have: 0 where steps do not overlap.
int64_t most_age(const Config& config);
// How many steps ahead of the one that is trained groups may be begun while only PPO's critic trains, which makes no
// token older.
int64_t warmup_lead(const Config& config);
// Whether each group is generated by weights of one version that follows from its step, and from nothing else.
bool exact_versions(const Config& config);
// Whether a reward model scores the responses: it is enabled, and no other env is the only one.
bool uses_reward_model(const Config& config);
// Whether it trains a critic: PPO, unless its advantages are raw rewards.
bool has_critic(const Config& config);
// The same run with value.* in the place of policy.*: what is asked of it is the critic's (learning rates,
// micro-batches, recomputation, what ranks share).
Config critic_config(const Config& config);

// Which back-end's sizes apply: megatron_cfg when enabled, else dtensor_cfg when enabled, else all 1.
struct ParallelSizes {
  int64_t tensor = 1, pipeline = 1, context = 1, expert = 1, expert_tensor = 1;
};
// A size that is auto counts as 1.
ParallelSizes parallel_sizes(const Config& config);
// The key of an axis of a layout ("tp", "pp", "cp", "ep", "etp"); where the back-end has none, what else sets it.
std::string parallel_size_key(const Config& config, const std::string& axis);
// Keys of those that are auto. Rules of sizes do not judge such a configuration before set_parallel_sizes.
std::vector<std::string> auto_sizes(const Config& config);
// Sets the sizes of the back-end that is enabled; those that it does not have must be 1.
void set_parallel_sizes(Config& config, const ParallelSizes& sizes);
// What backward computes again instead of keeping it, by the keys of the back-end that is enabled.
struct RecomputeSetting {
  bool fit = false;      // as little as makes the activations fit into the device's memory; else what follows
  bool all = false;      // of every layer but its input, else
  int64_t layers = 0;    //   of the first so many layers, and
  bool norms = false;    // of the other layers the norms' results
  bool swiglu = false;   //   SwiGLU's
  bool experts = false;  //   and experts' gate and up
};
RecomputeSetting recompute_setting(const Config& config);
// The Megatron back-end's data_parallel_sharding_strategy; kWeights for the DTensor one, else kOptimizer.
StateSharding state_sharding(const Config& config);
// Whether gradients are reduced while backward runs, and weights gathered while the next forward does: the Megatron
// back-end's keys where it is enabled, else yes (neither changes a bit).
bool overlap_grad_reduce(const Config& config);
bool overlap_param_gather(const Config& config);
bool overlap_exchanges(const Config& config);  // of tensor ranks
double max_grad_norm(const Config& config);
// Whether gradients are held and summed over ranks in float32; else in policy.precision.
bool gradients_in_fp32(const Config& config);
// Ranks of the whole job: cluster.num_nodes * cluster.processes.
int64_t world_size(const Config& config);
int64_t data_parallel_size(const Config& config);
// Prompts of one rollout, or of one round under dynamic sampling.
int64_t prompts_per_round(const RolloutConfig& config);
// Samples of one rollout: prompts * generations (* batch_multiplier under dynamic sampling, before filtering).
int64_t samples_per_step(const Config& config);
// Passes over each rollout: ppo.ppo_epochs, 1 of GRPO. Schedules move once a pass, as NeMo-RL's.
int64_t passes_per_rollout(const Config& config);
// Optimizer steps per pass over a rollout.
int64_t optimizer_steps_per_rollout(const Config& config);

// AdamW's settings from whichever back-end is on.
struct AdamSettings {
  double lr = 0, min_lr = 0, weight_decay = 0, beta1 = 0, beta2 = 0, eps = 0;
};
AdamSettings adam_settings(const Config& config);

// A folder with config.json as it is, or a Hub id ("org/name") in the cache below `hf_home` (what HF_HOME holds; its
// folder "hub" holds models--org--name/{refs/main, snapshots/HASH}). Throws Error(kUser) with the download command.
std::filesystem::path resolve_model(const std::string& model_name, const std::filesystem::path& hf_home);

// Files of a data set that follow each other, in the order of their names.
struct DatasetFiles {
  std::vector<std::filesystem::path> files;
  std::string input_key, output_key;  // where they are not the DatasetConfig's
  std::string system_key;             // beside them
  double weight = 0;                  // of a mixture; 0: there is none
};
// Where the rows of a data set are: what its mixture names, else its data_path, else the split of a data set in the
// same cache. At least one source with one file, or Error(kUser).
std::vector<DatasetFiles> resolve_dataset(const DatasetConfig& dataset, const std::filesystem::path& hf_home);

}  // namespace trireme
