#include "trainer/algorithms/session_parts.h"

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>

#include <cstdio>

#include "base/error.h"
#include "base/fs.h"
#include "base/host.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/refit.h"
#include "trainer/ops/experts.h"
#include "trainer/parallel/device.h"

namespace trireme {
namespace {

void check_roles(const Config& config, const TrainOptions& options) {
  const RendezvousOptions& ranks = options.rendezvous;
  const int critics = ranks.of_critic ? ranks.world_size : ranks.critic_ranks;
  if (critics == 0) return;
  if (!has_critic(config)) {
    fail_user("algorithm is " + config.algorithm + (config.algorithm == "ppo" ? " with raw rewards" : "") +
              ", which has no critic: " + std::to_string(critics) +
              " critic ranks (launch --critic-ranks, TRIREME_CRITIC_RANKS) have nothing to do; start none, or set "
              "algorithm to ppo with ppo.adv_estimator.name gae");
  }
}

ModelOptions options_on(const Config& config, int local_rank, const ModelConfig& model, ParallelContext& context,
                        const StageOptions& stages) {
  ModelOptions options;
  options.dtype = parse_dtype(config.policy.precision);
  options.device = choose_device(config.cluster.device, local_rank);
  if (options.dtype == at::kBFloat16 && gradients_in_fp32(config)) options.gradient_dtype = at::kFloat;
  options.lends_gradients = generation_layout(config, context.layout()).has_value();
  options.freeze_router = router_settings(config).freeze_moe_router;
  options.wide_router = router_settings(config).moe_router_dtype == "fp64";
  options.combine_blocks = config.policy.moe_combine_blocks;
  set_split(options, model.shape(), context, stages);
  options.overlap_exchanges = overlap_exchanges(config);
  const StateSharding shared = state_sharding(config);
  if (shared < StateSharding::kGradients || context.data_parallel().size() == 1) return options;
  options.sharding = {.gradients = true,
                      .weights = shared == StateSharding::kWeights,
                      .ranks = &context.data_parallel(),
                      .experts = context.expert_data_parallel(options.split)};
  return options;
}

}  // namespace

ModelOptions policy_options(const Config& config, int local_rank, const ModelConfig& model, ParallelContext& context) {
  return options_on(config, local_rank, model, context, stage_options(config));
}

// Whatever stages the policy has, this has none.
ModelOptions untrained_model_options(const Config& config, int local_rank, const ModelConfig& model,
                                     ParallelContext& context) {
  ModelOptions options = options_on(config, local_rank, model, context, {});
  options.trainable = options.lends_gradients = false;
  options.gradient_dtype.reset();
  options.sharding = {};
  return options;
}

std::shared_ptr<const Tokenizer> load_tokenizer(const Config& config, const std::filesystem::path& hf_home,
                                                const std::filesystem::path& model_dir) {
  const TokenizerConfig& t = config.policy.tokenizer;
  const std::filesystem::path dir =
      t.name.empty() || t.name == config.policy.model_name ? model_dir : resolve_model(t.name, hf_home);
  if (t.chat_template.empty()) return Tokenizer::load(dir);
  if (t.chat_template == "none") return Tokenizer::load(dir, "");
  std::error_code ignored;
  if (std::filesystem::is_regular_file(t.chat_template, ignored))
    return Tokenizer::load(dir, read_file(t.chat_template));
  return Tokenizer::load(dir, t.chat_template);
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

MemoryLimit memory_of_a_rank(const Config& config, at::Device device) {
  return {memory_bytes_of(device) / (device.is_cuda() ? 1 : config.cluster.processes), device.is_cuda()};
}

std::string own_settings(const Config& config) {
  return std::to_string(hash64(read_file("/proc/self/exe"))) + "\n" + to_yaml(config);
}

std::optional<std::string> settings_problem(const std::string& of_rank0, const Config& own) {
  const size_t line = of_rank0.find('\n');
  if (of_rank0.substr(0, line) != std::to_string(hash64(read_file("/proc/self/exe"))))
    return "runs another program than rank 0, of another version or build";
  std::vector<std::string> ignored;
  const Config theirs = load_config_text(of_rank0.substr(line + 1), {}, &ignored, "the configuration of rank 0");
  const auto difference = first_difference(theirs, own);
  return difference ? std::optional<std::string>("has other settings than rank 0: " + *difference) : std::nullopt;
}

CheckpointOptions checkpoint_options(const Config& config, const TrainOptions& options,
                                     const std::filesystem::path& source_dir) {
  CheckpointOptions checkpoint;
  checkpoint.directory = config.checkpointing.checkpoint_dir;
  checkpoint.source_dir = source_dir;
  checkpoint.save_optimizer = config.checkpointing.save_optimizer;
  checkpoint.job = options.job;
  checkpoint.attempt = parse_int(options.rendezvous.attempt).value_or(0);
  checkpoint.staging_bytes = static_cast<int64_t>(config.checkpointing.staging_gib * static_cast<double>(1 << 30));
  checkpoint.patience = options.rendezvous.timeout;
  return checkpoint;
}

void log_saved(const SavedCheckpoint& saved) {
  const double rate = static_cast<double>(saved.bytes) / std::max(saved.seconds, 1e-6) / 1e9;
  log_info("checkpoint",
           "step_" + std::to_string(saved.step) + ": " + format_bytes(static_cast<uint64_t>(saved.bytes)) +
               " of this rank in " + format_fixed(saved.seconds, 2) + " s (" + format_fixed(rate, 2) +
               " GB/s) beside the run, which waited " + format_fixed(saved.wait_seconds, 2) + " s for it");
}

std::vector<Layout> layouts_of_models(const Config& config, const Layout& layout, const RendezvousOptions& ranks) {
  std::vector<Layout> layouts{layout};
  if (ranks.of_critic) return layouts;
  if (const auto generation = generation_layout(config, layout)) layouts.push_back(*generation);
  if (has_critic(config) && ranks.critic_ranks == 0) layouts.push_back(critic_layout(config, ranks.world_size));
  return layouts;
}

const Config& with_its_device(const Config& config, const TrainOptions& options) {
  check_roles(config, options);
  prepare_devices(layouts_of_models(config, options.layout, options.rendezvous));
  const at::Device device = choose_device(config.cluster.device, options.rendezvous.local_rank);
  if (options.transport.required && !device.is_cuda()) {
    fail_user(
        "the manifest requires RDMA (spec.network.rdma.require) but this run is on the CPU, where collectives go over "
        "TCP (Gloo); set spec.network.rdma.require to false, or run on GPUs");
  }
  return config;
}

void check_transport(const TransportCheck& check, ParallelContext& context, at::Device device) {
  if (!device.is_cuda()) return;
  const double wanted = check.log || (check.required && check.spans_nodes) ? 1 : 0;
  const bool anybody = context.world().all_reduce_max(wanted) > 0;
  if (check.required && !check.spans_nodes && context.is_main())
    log_info("parallel", "RDMA is required: all ranks are on one node, no network is used");
  if (!anybody) return;
  // One of these has several ranks, and NCCL finds its network in whichever group is its first.
  Communicator& first = context.data_parallel().size() > 1    ? context.data_parallel()
                        : context.group(Axis::kPp).size() > 1 ? context.group(Axis::kPp)
                                                              : context.tensor_parallel();
  try {
    at::Tensor one = at::ones({1}, at::TensorOptions(device).dtype(at::kFloat));
    first.all_reduce_sum(one);
    (void)one.item<float>();
  } catch (const Error& error) {
    if (!check.required || !check.spans_nodes) throw;
    const std::string what = rdma_failure(error.what(), check.environment, host_name());
    if (!is_nccls_own(error.what())) throw Error(error.kind(), what);
    context.report_failure(what);
    fail_user(what);
  }
  const bool judges = check.required && check.spans_nodes;
  if (!check.log || !(judges || context.is_main())) return;
  const NcclTransport transport = parse_nccl_log(read_nccl_log(check.log->file, Milliseconds(5000)));
  if (context.is_main()) log_info("parallel", "NCCL goes between the nodes over " + describe(transport));
  if (const auto problem = judges ? socket_choice(check, transport) : std::nullopt) {
    const std::string what = context.name() + " on " + host_name() + ": " + *problem;
    context.report_failure(what);
    throw Error(ErrorKind::kUnavailable, what);
  }
}

int64_t ranks_of_node(const Config& config, const RendezvousOptions& ranks) {
  return ranks.local_world > 0 ? ranks.local_world : config.cluster.processes;
}

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

CriticModel find_critic(const Config& config, const ModelConfig& policy, const Tokenizer& tokenizer,
                        const std::filesystem::path& hf_home, const ModelRanks& ranks, bool main) {
  const std::filesystem::path folder = resolve_model(config.value.model_name, hf_home);
  CriticModel critic{critic_config(config), ModelConfig::load(folder).with_value_head(), folder, ranks.layout};
  const std::string dir = folder.string();
  if (critic.config.policy.max_total_sequence_length > critic.model.positions()) {
    fail_user("value.max_total_sequence_length is " + std::to_string(critic.config.policy.max_total_sequence_length) +
              " but the model of " + dir + " has " + std::to_string(critic.model.positions()) + " positions");
  }
  check_vocabulary("value.model_name", dir, critic.model, policy, tokenizer, "the critic");
  const ModelShape shape = critic.model.shape();
  if (const auto problem = model_problem(critic.config, "value", shape, dir, ranks)) fail_user(*problem);
  if (const auto warning = balance_warning(critic.config, "value", shape, dir); warning && main)
    log_warn("train", *warning);
  return critic;
}

namespace {

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

std::unique_ptr<CriticState> make_critic(const CriticModel& of, int local_rank, ParallelContext& context) {
  auto critic = std::make_unique<CriticState>();
  critic->config = of.config;
  critic->model_dir = of.dir;
  critic->ranks = &context;
  if (of.layout != context.layout()) {
    critic->apart = std::make_unique<ParallelContext>(context, of.layout, "value");
    critic->ranks = critic->apart.get();
  }
  ModelOptions options = policy_options(critic->config, local_rank, of.model, *critic->ranks);
  options.lends_gradients = false;  // it is the policy that may generate in another layout
  critic->model = load_or_draw_critic(critic->config, of.dir, options);
  // Loading chooses it too, and beside a policy that one has.
  if (context.of_critic() && critic->config.policy.random_weights && critic->model->options().device.is_cpu())
    choose_linear_mode(critic->model->linear_shapes(), critic->model->options().dtype);
  const bool exact = rows_are_exact(*critic->model, critic->config, *critic->ranks, /*generates=*/false);
  critic->optimizer = make_optimizer(critic->config, *critic->model, *critic->ranks);
  if (!context.is_main()) return critic;
  const std::string split = of.layout.dp == of.layout.world() ? "" : ", in " + to_string(of.layout);
  log_info("train", "critic " + critic->config.value.model_name + ": " + std::to_string(of.model.parameter_count()) +
                        " parameters, " + critic->config.value.precision +
                        (context.of_critic() ? " on " + std::to_string(context.world_size()) + " ranks of its own"
                                             : " on the actor's ranks") +
                        split);
  if (!exact)
    log_warn(
        "train",
        "linear layers of the critic do not keep row bits on this machine: the last bits of a value depend on what "
        "is computed beside it");
  return critic;
}

void warm_start_critic(CriticState& critic, const Config& config, bool main) {
  const std::string& from = config.ppo.warm_start_value_checkpoint;
  if (from.empty()) return;
  const std::string key = "ppo.warm_start_value_checkpoint: ";
  const std::filesystem::path weights = std::filesystem::path(from) / "value" / "weights";
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(weights / "config.json", ignored))
    fail_user(key + from + " holds no critic (value/weights); name the folder step_N of a PPO run's checkpoint");
  ModelConfig there = ModelConfig::load(weights);
  if (!there.value_head) fail_user(key + weights.string() + " is no value model");
  there.dtype = critic.model->config().dtype;
  if (!(there == critic.model->config()))
    fail_user(key + weights.string() + " is another model than value.model_name's, " + critic.model_dir.string());
  load_parameters(*critic.model, weights);
  critic.optimizer->reset_master_from_weights();
  if (main) log_info("train", "the critic begins with " + weights.string());
}

}  // namespace trireme
