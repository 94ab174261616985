#include "trainer/algorithms/session.h"

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"
#include "topology/combine_blocks.h"
#include "topology/context_split.h"
#include "trainer/algorithms/fit.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/refit.h"
#include "trainer/ops/experts.h"
#include "trainer/parallel/device.h"
#include "trainer/parallel/exchange.h"

namespace trireme {
namespace {

ModelOptions policy_options(const Config& config, int local_rank, const ModelConfig& model, ParallelContext& context) {
  ModelOptions options;
  options.dtype = parse_dtype(config.policy.precision);
  options.device = choose_device(config.cluster.device, local_rank);
  if (options.dtype == at::kBFloat16 && gradients_in_fp32(config)) options.gradient_dtype = at::kFloat;
  options.lends_gradients = generation_layout(config, context.layout()).has_value();
  options.freeze_router = router_settings(config).freeze_moe_router;
  options.wide_router = router_settings(config).moe_router_dtype == "fp64";
  options.combine_blocks = config.policy.moe_combine_blocks;
  set_split(options, model.shape(), context, stage_options(config));
  options.overlap_exchanges = overlap_exchanges(config);
  const StateSharding shared = state_sharding(config);
  if (shared < StateSharding::kGradients || context.data_parallel().size() == 1) return options;
  options.sharding = {.gradients = true,
                      .weights = shared == StateSharding::kWeights,
                      .ranks = &context.data_parallel(),
                      .experts = context.expert_data_parallel(options.split)};
  return options;
}

std::shared_ptr<const Tokenizer> load_tokenizer(const Config& config, const TrainOptions& options,
                                                const std::filesystem::path& model_dir) {
  const TokenizerConfig& t = config.policy.tokenizer;
  const std::filesystem::path dir =
      t.name.empty() || t.name == config.policy.model_name ? model_dir : resolve_model(t.name, options.hf_home);
  if (t.chat_template.empty()) return Tokenizer::load(dir);
  if (t.chat_template == "none") return Tokenizer::load(dir, "");
  std::error_code ignored;
  if (std::filesystem::is_regular_file(t.chat_template, ignored))
    return Tokenizer::load(dir, read_file(t.chat_template));
  return Tokenizer::load(dir, t.chat_template);
}

// "days:hours:minutes:seconds"
std::optional<SteadyClock::time_point> parse_save_by(const std::string& text) {
  if (text.empty()) return std::nullopt;
  const std::vector<std::string> parts = split(text, ':');
  const int64_t units[] = {86400, 3600, 60, 1};
  int64_t seconds = 0;
  for (size_t i = 0; i < parts.size() && parts.size() == 4; ++i) {
    const auto value = parse_int(parts[i]);
    if (!value) fail_user("checkpointing.checkpoint_must_save_by: '" + text + "' is not days:hours:minutes:seconds");
    seconds += *value * units[i];
  }
  if (parts.size() != 4)
    fail_user("checkpointing.checkpoint_must_save_by: '" + text + "' is not days:hours:minutes:seconds");
  return SteadyClock::now() + std::chrono::seconds(seconds);
}

// Before the weights are read: rotary embeddings end at the model's last position.
void check_length(const Config& config, const ModelConfig& model, const std::filesystem::path& dir) {
  if (config.policy.max_total_sequence_length <= model.positions()) return;
  fail_user("policy.max_total_sequence_length is " + std::to_string(config.policy.max_total_sequence_length) +
            " but the model of " + dir.string() + " has " + std::to_string(model.positions()) +
            " positions (max_position_embeddings and rope scaling in its config.json); set a smaller length, or "
            "another model");
}

// A rank of another build, or with other settings, would compute something else than the others wait for.
// The same error on all ranks. Collective.
void check_agreement(const Config& config, ParallelContext& context) {
  if (context.world_size() == 1) return;
  const std::string program = std::to_string(hash64(read_file("/proc/self/exe")));
  const std::string own = context.is_main() ? program + "\n" + to_yaml(config) : "";
  const std::string first = context.world().all_gather_bytes(own).front();
  const size_t line = first.find('\n');
  std::string problem;
  if (first.substr(0, line) != program) {
    problem = "runs another program than rank 0, of another version or build";
  } else {
    std::vector<std::string> ignored;
    const Config of_first = load_config_text(first.substr(line + 1), {}, &ignored, "the configuration of rank 0");
    if (const auto difference = first_difference(of_first, config))
      problem = "has other settings than rank 0: " + *difference;
  }
  const std::vector<std::string> problems = context.world().all_gather_bytes(problem);
  for (size_t rank = 0; rank < problems.size(); ++rank)
    if (!problems[rank].empty()) fail_user("rank " + std::to_string(rank) + " " + problems[rank]);
}

// Before the weights are read, too: what tensor ranks share must divide among them, and layers among stages.
void check_split(const ModelConfig& model, const std::filesystem::path& dir, const Layout& layout,
                 const StageOptions& stages) {
  const ModelShape shape = model.shape();
  const LayoutReport report = check_layout(layout, {.shape = &shape, .stages = stages});
  if (!report.ok()) fail_user("the model of " + dir.string() + " cannot be split so: " + report.errors.front());
}

// A sequence is cut at multiples of kPieceAlignment rows: over more ranks than pieces some wait while one is trained.
void warn_of_idle_context(const Config& config, const Layout& layout) {
  const int64_t longest = config.policy.max_total_sequence_length;
  const int64_t pieces = (longest + kPieceAlignment - 1) / kPieceAlignment;
  if (layout.cp <= pieces) return;
  log_warn("parallel", "policy.max_total_sequence_length is " + std::to_string(longest) +
                           " and a sequence is cut every " + std::to_string(kPieceAlignment) + " tokens: at most " +
                           std::to_string(pieces) + " of the " + std::to_string(layout.cp) +
                           " context parallel ranks compute one");
}

// Stages have several micro-batches under way, each at a place of its own: they would free nothing.
void check_sharding(const Config& config, const Layout& layout) {
  if (layout.pp == 1 || state_sharding(config) < StateSharding::kGradients) return;
  fail_user("optim_grads and optim_grads_params (policy.dtensor_cfg.enabled means the latter) share no state over " +
            std::to_string(layout.pp) +
            " pipeline stages; set policy.megatron_cfg.distributed_data_parallel_config."
            "data_parallel_sharding_strategy to no_shard or optim");
}

// Likewise, of a mixture of experts: what is asked for and cannot be.
void check_experts(const Config& config, const ModelConfig& model, const std::filesystem::path& dir,
                   const Layout& layout, bool main) {
  if (model.num_experts == 0) return;
  const MegatronConfig& m = router_settings(config);
  for (const std::string& problem :
       combine_block_problems(model.num_experts, config.policy.moe_combine_blocks, layout.ep))
    fail_user("the model of " + dir.string() + " cannot be split so: " + problem);
  if (m.moe_router_load_balancing_type != "none") {
    const std::string key = "policy.megatron_cfg.moe_router_load_balancing_type is " + m.moe_router_load_balancing_type;
    if (m.freeze_moe_router)
      fail_user(key + ", but policy.megatron_cfg.freeze_moe_router keeps routers from being trained: set one of them");
    if (config.grpo.early_gradients)
      fail_user(key + ", whose means are over whole optimizer steps: switch grpo.early_gradients off");
  }
  if (main && (m.moe_router_load_balancing_type == "none") != (m.moe_aux_loss_coeff == 0)) {
    log_warn("train", "experts are not balanced: policy.megatron_cfg.moe_router_load_balancing_type is " +
                          m.moe_router_load_balancing_type + ", moe_aux_loss_coeff " +
                          std::to_string(m.moe_aux_loss_coeff) + "; a loss takes both");
  }
  if (m.moe_router_bias_update_rate > 0) {
    fail_user(
        "policy.megatron_cfg.moe_router_bias_update_rate above 0 is not supported: experts are chosen without a "
        "bias");
  }
}

// Of a model that reads what the policy writes.
void check_vocabulary(const std::string& key, const std::string& dir, const ModelConfig& model,
                      const ModelConfig& policy, const Tokenizer& tokenizer, const std::string& who) {
  // One vocabulary may be padded to several sizes.
  constexpr int64_t kPadding = 1024;
  const int64_t difference = std::abs(model.vocab_size - policy.vocab_size);
  if (model.vocab_size >= tokenizer.vocab_size() && difference < kPadding) return;
  fail_user(key + ": the model of " + dir + " has a vocabulary of " + std::to_string(model.vocab_size) +
            ", the policy one of " + std::to_string(policy.vocab_size) + " and its tokenizer " +
            std::to_string(tokenizer.vocab_size()) + " tokens; " + who + " must read the policy's tokens");
}

// The configuration of the reward model, before anything is loaded; nothing where none is used.
std::optional<RewardModelFolder> find_reward_model(const Config& config, const ModelConfig& policy,
                                                   const Tokenizer& tokenizer, const std::filesystem::path& hf_home) {
  if (!uses_reward_model(config)) return std::nullopt;
  const std::string key = "env.reward_model.model_name";
  const std::filesystem::path dir = resolve_model(config.env.reward_model.model_name, hf_home);
  const ModelConfig model = ModelConfig::load(dir);
  if (!model.value_head) {
    fail_user(key + ": " + dir.string() +
              " is a causal model, which scores nothing; name the folder of a ...ForSequenceClassification");
  }
  if (config.policy.max_total_sequence_length > model.positions()) {
    fail_user(key + ": policy.max_total_sequence_length is " + std::to_string(config.policy.max_total_sequence_length) +
              " but the model of " + dir.string() + " has " + std::to_string(model.positions()) + " positions");
  }
  check_vocabulary(key, dir.string(), model, policy, tokenizer, "the reward model");
  return RewardModelFolder{model, dir};
}

// Before its weights are read: the critic's positions, experts and vocabulary.
void check_critic_model(const CriticModel& critic, const ModelConfig& policy, const Tokenizer& tokenizer,
                        const Layout& layout, bool main) {
  const std::string dir = critic.dir.string();
  if (critic.config.policy.max_total_sequence_length > critic.model.positions()) {
    fail_user("value.max_total_sequence_length is " + std::to_string(critic.config.policy.max_total_sequence_length) +
              " but the model of " + dir + " has " + std::to_string(critic.model.positions()) + " positions");
  }
  check_vocabulary("value.model_name", dir, critic.model, policy, tokenizer, "the critic");
  check_experts(critic.config, critic.model, critic.dir, layout, main);
}

std::unique_ptr<DistributedAdamW> make_optimizer(const Config& config, Model& model, ParallelContext& context) {
  const AdamSettings adam = adam_settings(config);
  AdamWOptions options;
  options.beta1 = adam.beta1;
  options.beta2 = adam.beta2;
  options.eps = adam.eps;
  options.decay_all = !config.policy.megatron_cfg.enabled;
  options.reduce_in_fp32 = gradients_in_fp32(config);
  options.shard_state = state_sharding(config) != StateSharding::kNothing;
  return std::make_unique<DistributedAdamW>(model, context.data_parallel(), options,
                                            context.expert_data_parallel(model.options().split));
}

// Another model, algorithm or data set was refused before; the rest goes on, but not as the run that was interrupted.
void warn_of_changes(const CheckpointInfo& checkpoint, const Config& config) {
  const std::filesystem::path path = checkpoint.path / "config.yaml";
  try {
    std::vector<std::string> ignored;
    for (const std::string& change : changes_since(load_config_text(read_file(path), {}, &ignored, path), config))
      log_warn("train", "changed since the checkpoint: " + change);
  } catch (const Error& error) {
    log_warn("train", std::string("whether settings changed since the checkpoint is not known: ") + error.what());
  }
}

// A device that cannot run this is refused before tokenizer, rendezvous and weights.
const Config& with_its_device(const Config& config, const TrainOptions& options) {
  prepare_devices(options.layout);
  const at::Device device = choose_device(config.cluster.device, options.rendezvous.local_rank);
  if (options.transport.required && !device.is_cuda()) {
    fail_user(
        "the manifest requires RDMA (spec.network.rdma.require) but this run is on the CPU, where collectives go over "
        "TCP (Gloo); set spec.network.rdma.require to false, or run on GPUs");
  }
  return config;
}

// What carries NCCL's traffic between nodes: the first collective on the device makes it choose. Throws on every rank
// when it must be RDMA and is none on one of them. Collective; whether a rank has a log to read is its environment's
// matter, so that all agree first whether anybody does.
void check_transport(const TransportCheck& check, ParallelContext& context, at::Device device) {
  if (!device.is_cuda()) return;
  const bool somebody_reads = context.world().all_reduce_max(check.log ? 1.0 : 0.0) > 0;
  if (check.required && !check.spans_nodes && context.is_main())
    log_info("parallel", "RDMA is required: all ranks are on one node, no network is used");
  if (!somebody_reads) return;
  at::Tensor one = at::ones({1}, at::TensorOptions(device).dtype(at::kFloat));
  context.data_parallel().all_reduce_sum(one);
  (void)one.item<float>();
  std::optional<std::string> problem;
  if (check.log) {
    const std::string text = read_nccl_log(check.log->file, Milliseconds(5000));
    if (check.log->echo) {
      std::fwrite(text.data(), 1, text.size(), stdout);
      std::fflush(stdout);
      log_info("parallel",
               "NCCL's further lines go to " + check.log->file + "; name a file by NCCL_DEBUG_FILE to keep them");
    }
    const NcclTransport transport = parse_nccl_log(text);
    if (check.required) problem = rdma_problem(transport, check.spans_nodes);
    if (!problem && context.is_main()) log_info("parallel", "NCCL goes between the nodes over " + describe(transport));
  }
  const std::vector<std::string> problems = context.world().all_gather_bytes(problem.value_or(""));
  for (size_t rank = 0; rank < problems.size(); ++rank)
    if (!problems[rank].empty()) fail_user("rank " + std::to_string(rank) + ": " + problems[rank]);
}

// Tokens of the largest micro-batch, or of the largest step of a prefill.
int64_t most_rows_of_a_pass(const Config& config) {
  const PolicyConfig& p = config.policy;
  const auto of = [&](int64_t dynamic, int64_t packed, int64_t samples) {
    return p.sequence_packing.enabled   ? packed
           : p.dynamic_batching.enabled ? dynamic
                                        : samples * p.max_total_sequence_length;
  };
  return std::max({of(p.dynamic_batching.train_mb_tokens, p.sequence_packing.train_mb_tokens, p.train_micro_batch_size),
                   of(p.dynamic_batching.logprob_mb_tokens, p.sequence_packing.logprob_mb_tokens, p.logprob_batch_size),
                   p.generation.prefill_chunk_tokens + p.generation.max_running_samples});
}

MemoryLimit memory_of_a_rank(const Config& config, at::Device device) {
  return {memory_bytes_of(device) / (device.is_cuda() ? 1 : config.cluster.processes), device.is_cuda()};
}

}  // namespace

bool rows_are_exact(const Model& model, const Config& config, ParallelContext& context) {
  const ModelOptions& options = model.options();
  const bool products =
      products_are_exact(model.config(), model.local(), options.dtype, options.device, most_rows_of_a_pass(config));
  std::optional<std::string> exchanges;
  if (options.tensor != nullptr) {
    exchanges = exchange_problem(*options.tensor, model.config().hidden_size,
                                 at::TensorOptions().dtype(options.dtype).device(options.device));
  }
  if (exchanges) log_warn("parallel", *exchanges);
  return context.world().all_reduce_max(products && !exchanges ? 0 : 1) == 0;
}

std::map<std::string, double> metrics_of_step(const Config& config, const std::map<std::string, double>& measured) {
  std::map<std::string, double> metrics;
  for (const std::string& name : checkpoint_metric_names(config)) {
    const bool validation = starts_with(name, "val:");
    const auto found = measured.find((validation ? "validation/" : "train/") + name.substr(name.find(':') + 1));
    if (found != measured.end()) metrics[name] = found->second;
  }
  return metrics;
}

namespace {

std::unique_ptr<Model> load_reward_model(const RewardModelFolder& folder, const Config& config, int local_rank,
                                         ParallelContext& context) {
  ModelOptions options = policy_options(config, local_rank, folder.model, context);
  options.trainable = options.lends_gradients = false;
  options.gradient_dtype.reset();
  options.sharding = {};
  std::unique_ptr<Model> model;
  if (config.policy.random_weights) {
    model = std::make_unique<Model>(folder.model, options);
    draw_parameters(*model, static_cast<uint64_t>(config.grpo.seed) + 2);
    if (options.device.is_cpu()) choose_linear_mode(model->linear_shapes(), options.dtype);
  } else {
    model = load_value_model(folder.dir, options);
  }
  const bool exact = rows_are_exact(*model, config, context);
  if (!context.is_main()) return model;
  log_info("train", "reward model " + config.env.reward_model.model_name + ": " +
                        std::to_string(folder.model.parameter_count()) + " parameters, whole on every rank");
  if (!exact)
    log_warn("train",
             "linear layers of the reward model do not keep row bits on this machine: the last bits of a "
             "score depend on what is scored beside it");
  return model;
}

std::unique_ptr<Model> load_or_draw_critic(const Config& config, const std::filesystem::path& dir,
                                           const ModelOptions& options) {
  std::unique_ptr<Model> model;
  if (config.policy.random_weights) {
    model = std::make_unique<Model>(ModelConfig::load(dir).with_value_head(), options);
    draw_parameters(*model, static_cast<uint64_t>(config.grpo.seed) + 1);
  } else {
    model = load_value_model(dir, options);
  }
  if (options.sharding.weights) model->units()->cut();
  return model;
}

}  // namespace

std::unique_ptr<Model> load_or_draw_model(const Config& config, const std::filesystem::path& dir,
                                          const ModelOptions& options) {
  std::unique_ptr<Model> model;
  if (config.policy.random_weights) {
    model = std::make_unique<Model>(ModelConfig::load(dir), options);
    draw_parameters(*model, static_cast<uint64_t>(config.grpo.seed));
    if (options.device.is_cpu()) choose_linear_mode(model->linear_shapes(), options.dtype);
  } else {
    model = load_model(dir, options);
  }
  if (options.sharding.weights) model->units()->cut();
  return model;
}

Session::Session(const Config& given, const TrainOptions& options, int64_t steps)
    : config(with_its_device(given, options)),
      context(runnable(options.layout, choose_device(config.cluster.device, options.rendezvous.local_rank).is_cuda()),
              options.rendezvous),
      model_dir(resolve_model(config.policy.model_name, options.hf_home)),
      tokenizer(load_tokenizer(config, options, model_dir)),
      reporting(config, options.reporting, context.rank(), context.world_size(), steps),
      fault_(options.fault),
      stop_signal_(options.stop_signal),
      on_ready_(options.on_ready),
      checkpoint_on_stop_(options.checkpoint_on_stop),
      save_by_(parse_save_by(config.checkpointing.checkpoint_must_save_by)) {
  watch_phases();
  context.set_on_absent([this](const std::vector<int>& ranks) { reporting.stuck(ranks.front()); });
  reporting.phase("start", 0);
  check_agreement(config, context);
  const ModelConfig model = ModelConfig::load(model_dir);
  if (model.value_head)
    fail_user("policy.model_name: " + model_dir.string() +
              " is a value or reward model (...ForSequenceClassification), which generates no text");
  check_split(model, model_dir, context.layout(), stage_options(config));
  check_sharding(config, context.layout());
  if (const auto problem = generation_problem(config, model.shape(), model_dir.string(), context.layout()))
    fail_user(*problem);
  if (const auto layout = generation_layout(config, context.layout())) context.set_generation(*layout);
  if (context.is_main()) warn_of_idle_context(config, context.layout());
  check_experts(config, model, model_dir, context.layout(), context.is_main());
  const ModelOptions model_options = policy_options(config, options.rendezvous.local_rank, model, context);
  check_transport(options.transport, context, model_options.device);
  check_length(config, model, model_dir);
  std::optional<CriticModel> critic_model;
  if (has_critic(config)) {
    const std::filesystem::path dir = resolve_model(config.value.model_name, options.hf_home);
    critic_model = CriticModel{critic_config(config), ModelConfig::load(dir).with_value_head(), dir};
    check_critic_model(*critic_model, model, *tokenizer, context.layout(), context.is_main());
  }
  const std::optional<RewardModelFolder> scorer = find_reward_model(config, model, *tokenizer, options.hf_home);
  check_fits(config, model, model_dir, context.layout(), memory_of_a_rank(config, model_options.device),
             context.is_main(), {critic_model ? &*critic_model : nullptr, scorer ? &*scorer : nullptr});
  if (config.policy.random_weights && context.is_main())
    log_warn("train", "policy.random_weights: the model is drawn, not loaded; this run is a measurement");
  policy = load_or_draw_model(config, model_dir, model_options);
  if (tokenizer->vocab_size() > policy->config().vocab_size) {
    fail_user("the tokenizer of " + model_dir.string() + " has " + std::to_string(tokenizer->vocab_size()) +
              " tokens but the model's vocabulary only " + std::to_string(policy->config().vocab_size));
  }
  linear_is_row_exact = rows_are_exact(*policy, config, context);
  optimizer = make_optimizer(config, *policy, context);
  if (has_critic(config)) make_critic(options);
  if (scorer) reward_model = load_reward_model(*scorer, config, options.rendezvous.local_rank, context);

  make_checkpoints(options);
  if (config.checkpointing.enabled) resumed = checkpoints->load_latest(*policy, *optimizer);
  if (critic != nullptr && !resumed) warm_start_critic();
  if (context.is_main()) {
    log_info("train", "model " + config.policy.model_name + ": " + std::to_string(policy->config().parameter_count()) +
                          " parameters, " + config.policy.precision + " on " + device_name(model_options.device) +
                          ", " + std::to_string(context.world_size()) + " ranks, " +
                          std::to_string(at::get_num_threads()) + " threads a rank");
    if (resumed) {
      log_info("train", "resuming after step " + std::to_string(resumed->step) + " from " + resumed->path.string());
      warn_of_changes(*resumed, config);
    }
  }
}

// Updates wait for what a save still copies.
void Session::make_checkpoints(const TrainOptions& options) {
  CheckpointOptions checkpoint;
  checkpoint.directory = config.checkpointing.checkpoint_dir;
  checkpoint.source_dir = model_dir;
  checkpoint.metric_name = checkpoint_metric(config);
  checkpoint.higher_is_better = config.checkpointing.higher_is_better;
  checkpoint.keep_top_k = config.checkpointing.keep_top_k;
  checkpoint.save_optimizer = config.checkpointing.save_optimizer;
  checkpoint.job = options.job;
  checkpoint.attempt = parse_int(options.rendezvous.attempt).value_or(0);
  checkpoint.staging_bytes = static_cast<int64_t>(config.checkpointing.staging_gib * static_cast<double>(1 << 30));
  checkpoint.patience = options.rendezvous.timeout;
  nlohmann::json fingerprint = {{"algorithm", config.algorithm}, {"model", policy->config().to_json()}};
  if (critic != nullptr) fingerprint["value"] = critic->model->config().to_json();
  checkpoints = std::make_unique<CheckpointManager>(checkpoint, fingerprint, context);
  checkpoints->on_wait = [this] { reporting.heartbeat(); };
  optimizer->before_update = [this] {
    const PhaseTimer::Scope scope = timer.enter(Phase::kCheckpoint);
    checkpoints->wait_copied();
  };
  if (ShardedUnits* units = policy->units()) units->before_release = optimizer->before_update;
  if (critic != nullptr) {
    critic->optimizer->before_update = optimizer->before_update;
    if (ShardedUnits* units = critic->model->units()) units->before_release = optimizer->before_update;
    checkpoints->add("value", *critic->model, *critic->optimizer, critic->model_dir);
  }
}

void Session::make_critic(const TrainOptions& options) {
  critic = std::make_unique<Critic>();
  critic->config = critic_config(config);
  critic->model_dir = resolve_model(config.value.model_name, options.hf_home);
  const ModelConfig model = ModelConfig::load(critic->model_dir).with_value_head();
  const ModelOptions model_options = policy_options(critic->config, options.rendezvous.local_rank, model, context);
  critic->model = load_or_draw_critic(critic->config, critic->model_dir, model_options);
  critic->optimizer = make_optimizer(critic->config, *critic->model, context);
  if (!context.is_main()) return;
  log_info("train", "critic " + config.value.model_name + ": " + std::to_string(model.parameter_count()) +
                        " parameters, " + config.value.precision + " on the actor's ranks");
}

// A new run's only: a resumed one has its own critic.
void Session::warm_start_critic() {
  const std::string& from = config.ppo.warm_start_value_checkpoint;
  if (from.empty()) return;
  const std::string key = "ppo.warm_start_value_checkpoint: ";
  const std::filesystem::path weights = std::filesystem::path(from) / "value" / "weights";
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(weights / "config.json", ignored))
    fail_user(key + from + " holds no critic (value/weights); name the folder step_N of a PPO run's checkpoint");
  ModelConfig there = ModelConfig::load(weights);
  if (!there.value_head) fail_user(key + weights.string() + " is no value model");
  there.dtype = critic->model->config().dtype;
  if (!(there == critic->model->config()))
    fail_user(key + weights.string() + " is another model than value.model_name's, " + critic->model_dir.string());
  load_parameters(*critic->model, weights);
  critic->optimizer->reset_master_from_weights();
  if (context.is_main()) log_info("train", "the critic begins with " + weights.string());
}

void Session::ready(int64_t step) {
  context.world().barrier();  // a signal finds all ranks before it, or all in the loop
  if (on_ready_) on_ready_();
  reporting.ready(step);
}

bool Session::should_stop() {
  const bool asked = stop_signal_ != nullptr && stop_signal_->load() != 0;
  const bool due = save_by_ && SteadyClock::now() >= *save_by_;
  const double own = checkpoints->failed() ? 2.0 : asked || due ? 1.0 : 0.0;
  const double any = context.world().all_reduce_max(own);
  if (any > 1) {
    context.set_phase("checkpoint");
    checkpoints->abandon();
  }
  tell_saved();
  return any > 0;
}

void Session::tell_saved() {
  const std::optional<SavedCheckpoint> saved = checkpoints->take_saved();
  if (!saved) return;
  reporting.checkpointed(saved->step);
  if (!context.is_main()) return;
  const double rate = static_cast<double>(saved->bytes) / std::max(saved->seconds, 1e-6) / 1e9;
  log_info("checkpoint",
           "step_" + std::to_string(saved->step) + ": " + format_bytes(static_cast<uint64_t>(saved->bytes)) +
               " of this rank in " + format_fixed(saved->seconds, 2) + " s (" + format_fixed(rate, 2) +
               " GB/s) beside the run, which waited " + format_fixed(saved->wait_seconds, 2) + " s for it");
}

void Session::save(int64_t step, const nlohmann::json& state, const std::map<std::string, double>& metrics,
                   const std::map<std::string, std::string>& files) {
  if (!config.checkpointing.enabled || checkpoints->last_saved_step() == step) return;
  const PhaseTimer::Scope scope = timer.enter(Phase::kCheckpoint);
  optimizer->finish_gather();
  context.set_phase("checkpoint");
  if (ShardedUnits* units = policy->units()) units->gather();
  if (critic != nullptr) {
    critic->optimizer->finish_gather();
    if (ShardedUnits* units = critic->model->units()) units->gather();
  }
  reporting.phase("checkpoint", step);
  checkpoints->begin_save(step, *policy, *optimizer, state, metrics, to_yaml(config), files);
  tell_saved();  // the one before, if it had to be waited for
}

void Session::describe_waits(std::map<std::string, double>& values) {
  if (context.world_size() == 1) return;
  const ExposedWaits::Seconds own = context.take_waits();
  at::Tensor all = at::tensor({own.exchange, own.stage, own.experts}, at::kDouble);
  context.world().all_reduce_sum(all);
  all /= context.world_size();
  values["performance/exposed_exchange_s"] = all[0].item<double>();
  values["performance/pipeline_bubble_s"] = all[1].item<double>();
  const Layout& layout = context.layout();
  if (layout.ep * layout.etp > 1) values["performance/expert_exchange_s"] = all[2].item<double>();
}

void Session::finish_saves() {
  context.set_phase("checkpoint");
  checkpoints->finish();
  tell_saved();
}

}  // namespace trireme
