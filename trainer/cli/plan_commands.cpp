#include <cstdio>
#include <iostream>

#include "api/rljob.h"
#include "api/validate.h"
#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"
#include "topology/topology.h"
#include "trainer/algorithms/options.h"
#include "trainer/cli/commands.h"
#include "trainer/cli/environment.h"
#include "trainer/config/config.h"
#include "trainer/model/config.h"

namespace trireme {
namespace {

ModelShape find_shape(const std::string& model_name) {
  if (std::filesystem::exists(std::filesystem::path(model_name) / "config.json"))
    return ModelConfig::load(model_name).shape();
  if (const auto known = known_model_shape(model_name)) return *known;
  return ModelConfig::load(resolve_model(model_name, hf_home_from_environment())).shape();
}

void line(const std::string& what, const std::string& value) { std::printf("%-34s %s\n", what.c_str(), value.c_str()); }

int plan(const std::string& path, const std::vector<std::string>& overrides) {
  std::vector<std::string> warnings;
  const Config config = load_config(path, overrides, &warnings, environment_variable);
  const ModelShape shape = find_shape(config.policy.model_name);
  const ParallelSizes sizes = parallel_sizes(config);
  Layout layout;
  layout.tp = sizes.tensor;
  layout.pp = sizes.pipeline;
  layout.cp = sizes.context;
  layout.ep = sizes.expert;
  layout.etp = sizes.expert_tensor;
  const int64_t world = world_size(config);
  const auto dp = derive_dp(layout, world);
  if (!dp) {
    fail_user("a world of " + std::to_string(world) +
              " ranks is not divisible by tp * cp * pp = " + std::to_string(layout.tp * layout.cp * layout.pp));
  }
  layout.dp = *dp;
  LayoutCheck check;
  check.world = world;
  check.gpus_per_node = config.cluster.processes;
  check.shape = &shape;
  check.stages = stage_options(config);
  const LayoutReport report = check_layout(layout, check);
  line("model", config.policy.model_name + ", " + format_fixed(static_cast<double>(parameter_count(shape)) / 1e9, 3) +
                    " G parameters");
  line("devices", std::to_string(config.cluster.num_nodes) + " nodes of " +
                      std::to_string(config.cluster.gpus_per_node) + " (cluster.gpus_per_node), " +
                      std::to_string(config.cluster.processes) + " ranks on each");
  line("layout", to_string(layout) + " (" + std::to_string(world) + " ranks)");
  for (const std::string& error : report.errors) line("  impossible", error);
  for (const std::string& warning : report.warnings) line("  slow", warning);
  if (!report.ok()) return 1;
  const bool whole = config.policy.precision == "float32";
  MemoryOptions memory;
  memory.stages = check.stages;
  memory.weight_bytes = whole ? 4 : 2;
  memory.grad_bytes = gradients_in_fp32(config) ? 4 : 2;
  memory.optimizer_bytes = whole ? 8 : 12;  // in float32 the weights are their own master copy
  memory.reference_weights = config.algorithm == "grpo" && config.loss_fn.reference_policy_kl_penalty != 0;
  const RankMemory peak = peak_memory(shape, layout, memory);
  line("weights of a rank", format_bytes(static_cast<uint64_t>(peak.weights_bytes)) + ", " + config.policy.precision +
                                (memory.reference_weights ? ", with the reference model's" : ""));
  line("gradients of a rank", format_bytes(static_cast<uint64_t>(peak.grads_bytes)) +
                                  (memory.grad_bytes == 4 ? ", float32" : ", " + config.policy.precision));
  line("optimizer of a rank (ZeRO-1)", format_bytes(static_cast<uint64_t>(peak.optimizer_bytes)));
  line("in all, without activations and KV", format_bytes(static_cast<uint64_t>(peak.total_bytes())));
  if (config.algorithm == "grpo") {
    line("samples of a rollout", std::to_string(samples_per_step(config)));
    line("optimizer steps of a rollout", std::to_string(optimizer_steps_per_rollout(config)));
  }
  line("samples of an optimizer step", std::to_string(config.policy.train_global_batch_size));
  for (const std::string& warning : warnings) line("warning", warning);
  try {
    validate_supported(config);
    line("this version", "can run it");
  } catch (const Error& error) {
    line("this version", std::string("cannot run it: ") + error.what());
  }
  return 0;
}

int validate_verb(const std::string& path) {
  const Manifest manifest = parse_manifest(read_file(path), path);
  if (manifest.jobs.empty()) fail_user(path + " holds no RLJob");
  bool ok = true;
  for (size_t j = 0; j < manifest.jobs.size(); ++j) {
    Validation result = validate(manifest.jobs[j]);
    for (auto* issues : {&result.errors, &result.warnings}) {
      for (Issue& issue : *issues) issue.line = manifest.line_of(j, issue.path);
    }
    const std::string& name = manifest.jobs[j].metadata.name;
    if (!result.warnings.empty()) std::cerr << "warning: " << to_string(result.warnings, path) << "\n";
    if (result.ok()) {
      std::cout << path << ": RLJob " << name << " is valid\n";
    } else {
      ok = false;
      std::cerr << to_string(result.errors, path) << "\n";
    }
  }
  return ok ? 0 : 1;
}

}  // namespace

void add_plan_commands(CLI::App& app, CommandContext& context) {
  {
    auto path = std::make_shared<std::string>();
    auto overrides = std::make_shared<std::vector<std::string>>();
    CLI::App* verb =
        app.add_subcommand("plan", "layout, memory and batch arithmetic of a configuration, without running it");
    verb->add_option("--config", *path, "YAML file")->required();
    verb->add_option("overrides", *overrides, "key.sub=value");
    verb->callback([=, &context] { context.run = [=] { return plan(*path, *overrides); }; });
  }
  {
    auto path = std::make_shared<std::string>();
    CLI::App* verb = app.add_subcommand("validate", "what admission would say about a manifest");
    verb->add_option("-f,--file", *path, "manifest")->required();
    verb->callback([=, &context] { context.run = [=] { return validate_verb(*path); }; });
  }
}

}  // namespace trireme
