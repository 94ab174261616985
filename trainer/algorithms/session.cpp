#include "trainer/algorithms/session.h"

#include <ATen/Parallel.h>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/parallel/device.h"

namespace trireme {
namespace {

bool reduce_in_fp32(const Config& config) {
  const MegatronConfig& m = config.policy.megatron_cfg;
  return !m.enabled || m.distributed_data_parallel_config.grad_reduce_in_fp32;
}

ModelOptions policy_options(const Config& config, int local_rank) {
  ModelOptions options;
  options.dtype = parse_dtype(config.policy.precision);
  options.device = choose_device(config.cluster.device, local_rank);
  if (options.dtype == at::kBFloat16 && reduce_in_fp32(config)) options.gradient_dtype = at::kFloat;
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

}  // namespace

Session::Session(const Config& given, const TrainOptions& options, int64_t steps)
    : config(given),
      context(options.layout, options.rendezvous),
      model_dir(resolve_model(config.policy.model_name, options.hf_home)),
      tokenizer(load_tokenizer(config, options, model_dir)),
      reporting(config, options.reporting, context.rank(), context.world_size(), steps),
      fault_(options.fault),
      stop_signal_(options.stop_signal),
      on_ready_(options.on_ready),
      checkpoint_on_stop_(options.checkpoint_on_stop),
      save_by_(parse_save_by(config.checkpointing.checkpoint_must_save_by)) {
  context.data_parallel().on_absent = [this](const std::vector<int>& ranks) { reporting.stuck(ranks.front()); };
  reporting.phase("start", 0);
  const ModelOptions model_options = policy_options(config, options.rendezvous.local_rank);
  policy = load_model(model_dir, model_options);
  if (tokenizer->vocab_size() > policy->config().vocab_size) {
    fail_user("the tokenizer of " + model_dir.string() + " has " + std::to_string(tokenizer->vocab_size()) +
              " tokens but the model's vocabulary only " + std::to_string(policy->config().vocab_size));
  }
  // Of all ranks, since how they share the samples depends on it.
  exact_linear =
      context.data_parallel().all_reduce_max(
          linear_rows_are_exact(policy->config().linear_shapes(), model_options.dtype, model_options.device) ? 0 : 1) ==
      0;
  const AdamSettings adam = adam_settings(config);
  AdamWOptions adam_options;
  adam_options.beta1 = adam.beta1;
  adam_options.beta2 = adam.beta2;
  adam_options.eps = adam.eps;
  adam_options.decay_all = !config.policy.megatron_cfg.enabled;
  adam_options.reduce_in_fp32 = reduce_in_fp32(config);
  optimizer = std::make_unique<DistributedAdamW>(*policy, context.data_parallel(), adam_options);

  nlohmann::json model_fingerprint = policy->config().to_json();
  CheckpointOptions checkpoint;
  checkpoint.directory = config.checkpointing.checkpoint_dir;
  checkpoint.source_dir = model_dir;
  checkpoint.metric_name =
      config.checkpointing.metric_name == "val_reward" ? "val:accuracy" : config.checkpointing.metric_name;
  checkpoint.higher_is_better = config.checkpointing.higher_is_better;
  checkpoint.keep_top_k = config.checkpointing.keep_top_k;
  checkpoint.save_optimizer = config.checkpointing.save_optimizer;
  checkpoints = std::make_unique<CheckpointManager>(
      checkpoint, nlohmann::json{{"algorithm", config.algorithm}, {"model", model_fingerprint}}, context);
  if (config.checkpointing.enabled) resumed = checkpoints->load_latest(*policy, *optimizer);
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

void Session::ready(int64_t step) {
  context.data_parallel().barrier();  // a signal finds all ranks before it, or all in the loop
  if (on_ready_) on_ready_();
  reporting.ready(step);
}

bool Session::should_stop() {
  const bool asked = stop_signal_ != nullptr && stop_signal_->load() != 0;
  const bool due = save_by_ && SteadyClock::now() >= *save_by_;
  return context.data_parallel().all_reduce_max(asked || due ? 1.0 : 0.0) > 0;
}

double Session::save(int64_t step, const nlohmann::json& state, const std::map<std::string, double>& metrics) {
  if (!config.checkpointing.enabled || checkpoints->last_saved_step() == step) return 0;
  Stopwatch watch;
  optimizer->finish_gather();
  context.set_phase("checkpoint");
  reporting.phase("checkpoint", step);
  checkpoints->save(step, *policy, *optimizer, state, metrics, to_yaml(config));
  reporting.checkpointed(step);
  return watch.seconds();
}

}  // namespace trireme
