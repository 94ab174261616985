#include "trainer/algorithms/session.h"

#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"
#include "topology/context_split.h"
#include "trainer/algorithms/fit.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/refit.h"
#include "trainer/algorithms/session_parts.h"
#include "trainer/ops/experts.h"
#include "trainer/parallel/device.h"
#include "trainer/parallel/exchange.h"
#include "trainer/parallel/row_checks.h"
#include "trainer/parallel/stage_links.h"

namespace trireme {
namespace {

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

// A rank of another build, or with other settings, would compute something else than the others wait for.
// The same error on all ranks. Collective.
void check_agreement(const Config& config, ParallelContext& context) {
  if (context.world_size() == 1) return;
  const std::string first = context.world().all_gather_bytes(context.is_main() ? own_settings(config) : "").front();
  const std::vector<std::string> problems =
      context.world().all_gather_bytes(settings_problem(first, config).value_or(""));
  for (size_t rank = 0; rank < problems.size(); ++rank)
    if (!problems[rank].empty()) fail_user("rank " + std::to_string(rank) + " " + problems[rank]);
}

// Before the weights are read: rotary embeddings end at the model's last position.
void check_length(const Config& config, const ModelConfig& model, const std::filesystem::path& dir) {
  if (config.policy.max_total_sequence_length <= model.positions()) return;
  fail_user("policy.max_total_sequence_length is " + std::to_string(config.policy.max_total_sequence_length) +
            " but the model of " + dir.string() + " has " + std::to_string(model.positions()) +
            " positions (max_position_embeddings and rope scaling in its config.json); set a smaller length, or "
            "another model");
}

// What may be split so and is slow: context and expert groups whose ranks are not of one node of `of_node` ranks.
void warn_of_spanned_nodes(const Config& config, const ModelConfig& model, const Layout& layout, int64_t of_node) {
  const ModelShape shape = model.shape();
  const LayoutReport report =
      check_layout(layout, {.gpus_per_node = of_node, .shape = &shape, .stages = stage_options(config)});
  for (const std::string& warning : report.warnings) log_warn("parallel", warning);
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

// Of the groups whose rows meet in a pass. Collective over each.
std::optional<std::string> exchange_problem_of(const Model& model, bool generates) {
  const ModelOptions& options = model.options();
  const LocalShape& local = model.local();
  const auto rows = at::TensorOptions().dtype(options.dtype).device(options.device);
  std::vector<std::optional<std::string>> problems;  // all are looked for: who is in several groups is awaited in each
  if (options.tensor != nullptr) problems.push_back(exchange_problem(*options.tensor, local.hidden, rows));
  if (options.experts != nullptr)
    problems.push_back(expert_exchange_problem(*options.experts, local.hidden, rows, generates));
  if (options.context != nullptr)
    problems.push_back(context_exchange_problem(*options.context, 2 * local.kv_heads * local.head_dim, rows));
  if (options.links != nullptr) problems.push_back(options.links->problem(local.hidden, rows));
  for (std::optional<std::string>& problem : problems)
    if (problem) return std::move(problem);
  return std::nullopt;
}

}  // namespace

bool rows_are_exact(const Model& model, const Config& config, ParallelContext& context, bool generates) {
  const ModelOptions& options = model.options();
  const bool products =
      products_are_exact(model.config(), model.local(), options.dtype, options.device, most_rows_of_a_pass(config));
  const std::optional<std::string> exchanges = exchange_problem_of(model, generates);
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
  ParallelContext alone;  // whole, whatever the policy is
  const ModelOptions options = untrained_model_options(config, local_rank, folder.model, alone);
  std::unique_ptr<Model> model;
  if (config.policy.random_weights) {
    model = std::make_unique<Model>(folder.model, options);
    draw_parameters(*model, static_cast<uint64_t>(config.grpo.seed) + 2);
    if (options.device.is_cpu()) choose_linear_mode(model->linear_shapes(), options.dtype);
  } else {
    model = load_value_model(folder.dir, options);
  }
  const bool exact = rows_are_exact(*model, config, context, /*generates=*/false);
  if (!context.is_main()) return model;
  log_info("train", "reward model " + config.env.reward_model.model_name + ": " +
                        std::to_string(folder.model.parameter_count()) + " parameters, whole on every rank");
  if (!exact)
    log_warn("train",
             "linear layers of the reward model do not keep row bits on this machine: the last bits of a "
             "score depend on what is scored beside it");
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
      context(options.layout, options.rendezvous),
      model_dir(resolve_model(config.policy.model_name, options.hf_home)),
      tokenizer(load_tokenizer(config, options.hf_home, model_dir)),
      reporting(config, options.reporting, context.rank(), context.world_size(), steps),
      absences_(context, reporting),
      fault_(options.fault),
      stop_signal_(options.stop_signal),
      on_ready_(options.on_ready),
      checkpoint_on_stop_(options.checkpoint_on_stop),
      save_by_(parse_save_by(config.checkpointing.checkpoint_must_save_by)) {
  watch_phases();
  reporting.phase("start", 0);
  check_agreement(config, context);
  if (context.critic_ranks() > 0) critic_link = std::make_unique<CriticLink>(context, config);
  const ModelConfig model = ModelConfig::load(model_dir);
  if (model.value_head)
    fail_user("policy.model_name: " + model_dir.string() +
              " is a value or reward model (...ForSequenceClassification), which generates no text");
  const int64_t of_node = ranks_of_node(config, options.rendezvous);
  const bool gpus = choose_device(config.cluster.device, options.rendezvous.local_rank).is_cuda();
  if (const auto problem = policy_problem(config, model.shape(), model_dir.string(), {context.layout(), of_node, gpus}))
    fail_user(*problem);
  if (const auto layout = generation_layout(config, context.layout())) context.set_generation(*layout);
  if (context.is_main()) {
    warn_of_spanned_nodes(config, model, context.layout(), of_node);
    warn_of_idle_context(config, context.layout());
    if (const auto warning = balance_warning(config, "policy", model.shape(), model_dir.string()))
      log_warn("train", *warning);
  }
  const ModelOptions model_options = policy_options(config, options.rendezvous.local_rank, model, context);
  check_transport(options.transport, context, model_options.device);
  check_length(config, model, model_dir);
  std::optional<CriticModel> critic_model;
  if (has_critic(config)) {
    const int ranks = critic_link != nullptr ? context.critic_ranks() : context.world_size();
    const Layout layout = critic_layout(config, ranks);
    const int64_t critics_of_node =
        critic_link != nullptr ? 0 : of_node;  // on ranks of its own it knows its node itself
    critic_model =
        find_critic(config, model, *tokenizer, options.hf_home, {layout, critics_of_node, gpus}, context.is_main());
  }
  const std::optional<RewardModelFolder> scorer = find_reward_model(config, model, *tokenizer, options.hf_home);
  check_fits(config, model, model_dir, context.layout(), memory_of_a_rank(config, model_options.device),
             context.is_main(), {critic_model && !critic_link ? &*critic_model : nullptr, scorer ? &*scorer : nullptr});
  if (config.policy.random_weights && context.is_main())
    log_warn("train", "policy.random_weights: the model is drawn, not loaded; this run is a measurement");
  policy = load_or_draw_model(config, model_dir, model_options);
  if (tokenizer->vocab_size() > policy->config().vocab_size) {
    fail_user("the tokenizer of " + model_dir.string() + " has " + std::to_string(tokenizer->vocab_size()) +
              " tokens but the model's vocabulary only " + std::to_string(policy->config().vocab_size));
  }
  const bool generates =
      has_rollouts(config) && !generates_elsewhere(config) && !generation_layout(config, context.layout());
  linear_is_row_exact = rows_are_exact(*policy, config, context, generates);
  optimizer = make_optimizer(config, *policy, context);
  if (critic_model && !critic_link) critic = make_critic(*critic_model, options.rendezvous.local_rank, context);
  if (scorer) reward_model = load_reward_model(*scorer, config, options.rendezvous.local_rank, context);

  make_checkpoints(options, critic_model ? &critic_model->model : nullptr);
  if (config.checkpointing.enabled) resumed = checkpoints->load_latest(*policy, *optimizer);
  if (critic != nullptr && !resumed) warm_start_critic(*critic, config, context.is_main());
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
  if (critic_link != nullptr) {
    critic_link->on_wait = [this] { reporting.heartbeat(); };
    critic_link->begin(resumed ? resumed->step : 0, resumed.has_value());
  }
}

void Session::heartbeat() {
  reporting.heartbeat();
  if (critic_link != nullptr) critic_link->beat();
}

// Updates wait for what a save still copies.
void Session::make_checkpoints(const TrainOptions& options, const ModelConfig* critic_model) {
  CheckpointOptions checkpoint = checkpoint_options(config, options, model_dir);
  checkpoint.metric_name = checkpoint_metric(config);
  checkpoint.higher_is_better = config.checkpointing.higher_is_better;
  checkpoint.keep_top_k = config.checkpointing.keep_top_k;
  nlohmann::json fingerprint = {{"algorithm", config.algorithm}, {"model", policy->config().to_json()}};
  if (critic_model != nullptr) fingerprint["value"] = critic_model->to_json();
  checkpoints = std::make_unique<CheckpointManager>(checkpoint, fingerprint, context);
  checkpoints->on_wait = [this] { heartbeat(); };
  if (critic_link != nullptr) {  // no checkpoint of the actor without its critic's
    checkpoints->before_commit = [this](int64_t step, const std::atomic<bool>& cancelled,
                                        const std::function<void()>& moves) {
      critic_link->wait_saved(step, cancelled, moves);
    };
  }
  optimizer->before_update = [this] {
    const PhaseTimer::Scope scope = timer.enter(Phase::kCheckpoint);
    checkpoints->wait_copied();
  };
  if (ShardedUnits* units = policy->units()) units->before_release = optimizer->before_update;
  if (critic != nullptr) {
    critic->optimizer->before_update = optimizer->before_update;
    if (ShardedUnits* units = critic->model->units()) units->before_release = optimizer->before_update;
    checkpoints->add("value", *critic->model, *critic->optimizer, critic->model_dir, critic->ranks);
  }
}

void Session::ready(int64_t step) {
  context.world().barrier();  // a signal finds all ranks before it, or all in the loop
  if (on_ready_) on_ready_();
  reporting.ready(step);
}

bool Session::should_stop() {
  const bool asked = stop_signal_ != nullptr && stop_signal_->load() != 0;
  const bool due = save_by_ && SteadyClock::now() >= *save_by_;
  const bool of_critic = critic_link != nullptr && critic_link->asked_to_stop();
  const double own = checkpoints->failed() ? 2.0 : asked || due || of_critic ? 1.0 : 0.0;
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
  if (context.is_main()) log_saved(*saved);
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
  if (critic_link != nullptr) {
    checkpoints->finish();  // what the critic's keeps is what the actor's has, the one before included
    critic_link->save(step, metrics);
  }
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
