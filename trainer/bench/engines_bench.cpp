#include "trainer/bench/engines_bench.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"
#include "trainer/algorithms/engine_layout.h"
#include "trainer/algorithms/engine_process.h"
#include "trainer/algorithms/grpo.h"
#include "trainer/bench/shapes.h"
#include "trainer/parallel/device.h"
#include "trainer/telemetry/phases.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme::bench {
namespace {

constexpr int64_t kLeadIn = 2;  // a step is what the ones before left to it
constexpr int kDataRows = 64;   // of the data set: prompts are cut and repeated to their lengths
constexpr int64_t kNoEnd = 1'000'000'000;

// What every process of the run reads. Rank 0 writes it, and takes it away.
class SharedFolder final {
 public:
  // Of one launcher: its process and the port of its store, which no other run has at the same time.
  explicit SharedFolder(const RendezvousOptions& rendezvous)
      : owner_(rendezvous.rank == 0),
        path_(std::filesystem::temp_directory_path() /
              ("trireme-bench-" + std::to_string(::getppid()) + "-" + std::to_string(rendezvous.master_port))) {}
  ~SharedFolder() {
    std::error_code ignored;
    if (owner_) std::filesystem::remove_all(path_, ignored);
  }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  void write(const Target& target, const RolloutLengths& lengths) const {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
    ModelConfig model = target.config;
    model.vocab_size = std::max<int64_t>(model.vocab_size, kByteVocabSize);
    model.eos_token_ids = {kByteImEnd};
    make_byte_tokenizer(path_ / "model");
    write_file_atomic(path_ / "model" / "config.json", model.to_json().dump(2) + "\n");
    write_file_atomic(path_ / "lengths.json",
                      nlohmann::json{{"prompt_lengths", lengths.prompts}, {"output_lengths", lengths.outputs}}.dump());
    std::string rows;
    for (int i = 0; i < kDataRows; ++i)
      rows += nlohmann::json{{"input", std::to_string(i) + "+1="}, {"output", std::to_string(i + 1)}}.dump() + "\n";
    write_file_atomic(path_ / "train.jsonl", rows);
    write_file_atomic(path_ / "ready", "");
  }

  void wait(Milliseconds patience) const {
    for (const Deadline deadline = Deadline::after(patience); !std::filesystem::exists(path_ / "ready");) {
      if (deadline.passed()) fail_timeout("rank 0 has not written " + path_.string() + ", which all processes read");
      std::this_thread::sleep_for(Milliseconds(20));
    }
  }

 private:
  const bool owner_;
  const std::filesystem::path path_;
};

int64_t processes_of_engines(const StepBenchOptions& options) { return options.engines * options.engine_tp; }

void check_options(const StepBenchOptions& options, int world) {
  if (processes_of_engines(options) >= world) {
    fail_user("--engines " + std::to_string(options.engines) + " of --engine-tp " + std::to_string(options.engine_tp) +
              " needs as many processes and one that trains: trireme launch --nproc-per-node N -- bench step "
              "--engines M --engine-tp T, of which the last M x T generate");
  }
  if (options.gradient_dtype != "float32") fail_user("--gradient-dtype is float32 with --engines");
  if (options.early_gradients) fail_user("--early-gradients is for generation on the same device, without --engines");
}

// Whether engines can split the model so, before any process of the run begins.
void check_engine(const StepBenchOptions& options, const Layout& training) {
  const ModelShape shape = find_shape(options.common.shape, options.common.layers).shape();
  Config config;
  config.policy.generation.tensor_parallel_size = options.engine_tp;
  if (const auto problem = engine_problem(config, shape, options.common.shape, training))
    fail_user(replace_all(*problem, "policy.generation.tensor_parallel_size", "--engine-tp"));
}

// The configuration of the run.
Config engines_config(const StepBenchOptions& options, const Target& target, const RolloutLengths& lengths,
                      int64_t actors, const std::filesystem::path& dir) {
  Config config = step_config(options, target, lengths, actors);
  PolicyConfig& policy = config.policy;
  policy.model_name = policy.tokenizer.name = config.value.model_name = (dir / "model").string();
  policy.random_weights = true;
  policy.generation.forced_lengths = (dir / "lengths.json").string();
  policy.generation.colocated.enabled = false;
  policy.generation.tensor_parallel_size = options.engine_tp;
  for (MegatronConfig* megatron : {&policy.megatron_cfg, &config.value.megatron_cfg})
    megatron->distributed_data_parallel_config.grad_reduce_in_fp32 = true;  // as without it
  policy.generation.kv_cache_tokens =
      options.generation.cache_rows > 0
          ? options.generation.cache_rows
          : std::max(lengths.longest(), wanted_cache_rows(lengths, options.generation.max_sequences, 1));
  RolloutConfig& rollouts = config.grpo;
  rollouts.max_num_steps = kLeadIn + options.common.repeats;
  rollouts.max_num_epochs = kNoEnd;
  rollouts.val_period = 0;
  rollouts.val_at_start = rollouts.val_at_end = false;
  static_cast<RolloutConfig&>(config.ppo) = rollouts;
  config.data.apply_chat_template = false;
  config.data.train.data_path = (dir / "train.jsonl").string();
  config.checkpointing.enabled = false;
  config.logger.log_dir = (dir / "logs").string();
  config.logger.tensorboard.log_dir.clear();
  config.logger.report = false;
  config.cluster.device = options.common.device;
  config.cluster.gpus_per_node = actors;
  derive_defaults(config);
  const std::vector<std::string> problems = find_problems(config);
  if (!problems.empty()) fail_user("bench step --engines: " + join(problems, "; "));
  return config;
}

// The measured steps of the log, as its names and numbers.
std::vector<nlohmann::json> measured_steps(const std::filesystem::path& dir) {
  std::vector<nlohmann::json> steps;
  std::ifstream log(dir / "logs" / "train.jsonl");
  for (std::string line; std::getline(log, line);) {
    nlohmann::json step = nlohmann::json::parse(line);
    if (step.contains("train/loss")) steps.push_back(std::move(step));
  }
  TRIREME_CHECK(static_cast<int64_t>(steps.size()) > kLeadIn, "the step log lacks steps");
  steps.erase(steps.begin(), steps.begin() + kLeadIn);
  return steps;
}

double total_of(const nlohmann::json& step) { return step.at("timing/train/total_step_time").get<double>(); }

// Of a step what its log has below `prefix`.
nlohmann::json below(const nlohmann::json& step, const std::string& prefix) {
  nlohmann::json found = nlohmann::json::object();
  for (const auto& [name, value] : step.items()) {
    if (starts_with(name, prefix)) found[name] = value;
  }
  return found;
}

nlohmann::json report_of(const StepBenchOptions& options, const Target& target, const RolloutLengths& lengths,
                         const Config& config, int64_t actors, const std::vector<nlohmann::json>& steps) {
  std::vector<double> seconds;
  int64_t mismatched = 0, compared = 0;
  for (const nlohmann::json& step : steps) {
    seconds.push_back(total_of(step));
    mismatched += step.at("train/logprob_mismatch_tokens").get<int64_t>();
    compared += step.at("train/logprob_compared_tokens").get<int64_t>();
  }
  const double middle = median(seconds);
  const nlohmann::json& typical = *std::min_element(steps.begin(), steps.end(), [&](const auto& a, const auto& b) {
    return std::abs(total_of(a) - middle) < std::abs(total_of(b) - middle);
  });
  nlohmann::json phases = nlohmann::json::object(), ages = nlohmann::json::object();
  for (const Phase phase : all_phases()) phases[to_string(phase)] = typical.at(timing_name(phase));
  for (const char* name : {"train/avg_trajectory_age", "train/max_trajectory_age", "train/stale_tokens",
                           "train/spanning_samples", "train/mixed_context_tokens", "train/recomputed_rows"}) {
    if (typical.contains(name)) ages[name] = typical.at(name);
  }
  nlohmann::json critic = below(typical, "critic/");
  critic.update(below(typical, "timing/train/value_"));
  const auto samples = static_cast<double>(lengths.samples());
  const Layout engine = engine_layout(config, target.config.shape(), options.common.layout(actors));
  nlohmann::json json = report_header("step", options.common, target);
  json.update({{"ranks", actors},
               {"engines", options.engines},
               {"engine_tp", engine.tp},
               {"engine_ep", engine.ep},
               {"lengths", lengths.name},
               {"samples", lengths.samples()},
               {"answer_tokens", lengths.output_tokens()},
               {"global_batch_size", config.policy.train_global_batch_size},
               {"optimizer_steps", optimizer_steps_per_rollout(config)},
               {"reference", options.reference},
               {"critic", options.critic},
               {"of_critic", critic},
               {"carry_over", options.carry_over},
               {"keep_cache", options.keep_cache},
               {"ratio_from", options.ratio_from},
               {"ages", ages},
               {"share_prompts", options.share_prompts},
               {"seconds", middle},
               {"seconds_of_repeats", seconds},
               {"phases", phases},
               {"exposed_generation_seconds", typical.at("timing/train/exposed_generation")},
               {"weight_sync_seconds", typical.at("timing/train/weight_sync")},
               {"weight_transfer_seconds", typical.at("performance/weight_transfer_seconds")},
               {"weight_stall_seconds", typical.at("performance/weight_stall_seconds")},
               {"samples_per_second", samples / middle},
               {"samples_per_second_per_device",
                samples / middle / static_cast<double>(actors + processes_of_engines(options))},
               {"mismatched_tokens", mismatched},
               {"compared_tokens", compared}});
  return json;
}

void print(const nlohmann::json& json, std::ostream& out) {
  const auto number = [&json](const char* key) { return json.at(key).get<double>(); };
  const auto seconds = [](const nlohmann::json& value) { return format_fixed(value.get<double>(), 3); };
  const auto engine_tp = json.at("engine_tp").get<int64_t>();
  Table table({"step " + json.at("shape").get<std::string>() + ", " + std::to_string(json.at("ranks").get<int64_t>()) +
                   " ranks, " + std::to_string(json.at("engines").get<int64_t>()) + " engines" +
                   (engine_tp > 1 ? " of " + std::to_string(engine_tp) : ""),
               "seconds"});
  const std::string repeats = std::to_string(json.at("seconds_of_repeats").size());
  for (const Phase phase : all_phases())
    table.add({std::string("  ") + to_string(phase), seconds(json.at("phases").at(to_string(phase)))});
  table.add({"step (median of " + repeats + ")", seconds(json.at("seconds"))});
  table.print(out);
  out << "waited for groups " << seconds(json.at("exposed_generation_seconds")) << " s (in idle), for engines to have "
      << "the weights " << seconds(json.at("weight_sync_seconds")) << " s (in refit)\n"
      << "a transfer of weights " << seconds(json.at("weight_transfer_seconds")) << " s, decoding stood still for it "
      << seconds(json.at("weight_stall_seconds")) << " s\n";
  if (json.at("carry_over").get<int64_t>() > 0)
    out << "older tokens: " << format_fixed(json.at("ages").at("train/stale_tokens").get<double>(), 0)
        << ", samples over an update: " << format_fixed(json.at("ages").at("train/spanning_samples").get<double>(), 0)
        << "\n";
  if (json.at("critic").get<bool>())
    out << "of the critic: values " << seconds(json.at("of_critic").at("timing/train/value_inference"))
        << " s (in logprobs), training " << seconds(json.at("of_critic").at("timing/train/value_training"))
        << " s (in training)\n";
  out << "samples/s: " << format_fixed(number("samples_per_second"), 2) << ", of a device "
      << format_fixed(number("samples_per_second_per_device"), 2) << "\n"
      << "tokens whose log-prob bits differ between sampler and loss: " << json.at("mismatched_tokens") << " of "
      << json.at("compared_tokens") << "\n";
}

}  // namespace

nlohmann::json bench_step_with_engines(const StepBenchOptions& options, const RendezvousOptions& rendezvous,
                                       std::ostream& out) {
  check_options(options, rendezvous.world_size);
  const int actors = rendezvous.world_size - static_cast<int>(processes_of_engines(options));
  const Layout training = options.common.layout(actors);
  check_engine(options, training);
  prepare_devices({rendezvous.rank < actors ? training : Layout{.tp = options.engine_tp}});
  const Target target = resolve(options.common);
  const RolloutLengths lengths = step_lengths(options);
  const SharedFolder folder(rendezvous);
  const Config config = engines_config(options, target, lengths, actors, folder.path());
  if (rendezvous.rank == 0) folder.write(target, lengths);
  folder.wait(rendezvous.timeout);
  if (rendezvous.rank >= actors) {
    const int64_t number = rendezvous.rank - actors;
    EngineProcessOptions engine;
    engine.name = "engine-" + std::to_string(number / options.engine_tp);
    engine.rank = static_cast<int>(number % options.engine_tp);
    engine.rendezvous = rendezvous;
    run_engine(config, engine);
    return {};
  }
  TrainOptions train;
  train.rendezvous = rendezvous;
  train.rendezvous.world_size = actors;
  train.layout = training;
  train.reporting.terminal = false;
  run_grpo(config, train);
  if (rendezvous.rank != 0) return {};
  const nlohmann::json json = report_of(options, target, lengths, config, actors, measured_steps(folder.path()));
  print(json, out);
  write_report(options.common, json);
  return json;
}

}  // namespace trireme::bench
