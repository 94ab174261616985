#include "trainer/algorithms/model_problem.h"

#include "base/text.h"
#include "topology/combine_blocks.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/refit.h"

namespace trireme {
namespace {

// What tensor ranks share must divide among them, and they share a node; layers must divide among stages.
std::optional<std::string> split_problem(const Config& config, const std::string& section, const ModelShape& shape,
                                         const std::string& model, const ModelRanks& ranks) {
  const LayoutReport report = check_layout(ranks.layout, {.gpus_per_node = ranks.of_node,
                                                          .shape = &shape,
                                                          .stages = stage_options(config),
                                                          .stage_section = section + ".megatron_cfg."});
  if (report.ok()) return std::nullopt;
  const std::string& error = report.errors.front();
  const std::string axis = error.substr(0, error.find(' '));
  const bool named = axis == "tp" || axis == "pp" || axis == "cp" || axis == "ep" || axis == "etp";
  return (named ? replace_all(parallel_size_key(config, axis), "policy.", section + ".") + ": " : "") +
         "the model of " + model + " cannot be split so: " + error;
}

// Stages have several micro-batches under way, each at a place of its own: they would free nothing.
std::optional<std::string> sharding_problem(const Config& config, const std::string& section, const ModelRanks& ranks) {
  const StateSharding sharding = ranks.sharding.value_or(state_sharding(config));
  if (ranks.layout.pp == 1 || sharding < StateSharding::kGradients) return std::nullopt;
  return "optim_grads and optim_grads_params (" + section +
         ".dtensor_cfg.enabled means the latter) share no state over " + std::to_string(ranks.layout.pp) +
         " pipeline stages; set " + section +
         ".megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy to no_shard or optim";
}

// Whether the GPUs of one host see each other's memory is found when they are connected (Model).
std::optional<std::string> virtual_stage_problem(const Config& config, const std::string& section,
                                                 const ModelRanks& ranks) {
  const int64_t pieces = stage_options(config).virtual_stages;
  if (!ranks.gpus || pieces == 1 || ranks.layout.pp == 1) return std::nullopt;
  if (ranks.of_node == 0 || inside_node(ranks.layout, Axis::kPp, ranks.of_node)) return std::nullopt;
  return section + ".megatron_cfg.virtual_pipeline_model_parallel_size is " + std::to_string(pieces) +
         ", but the stages of " + to_string(ranks.layout) + " are on several nodes of " +
         std::to_string(ranks.of_node) + (ranks.of_node == 1 ? " GPU" : " GPUs") +
         ": virtual stages need GPUs that see each other's memory, as those of one host over NVLink; set it to 1";
}

// Of a mixture: what is asked for and cannot be.
std::optional<std::string> experts_problem(const Config& config, const std::string& section, const ModelShape& shape,
                                           const std::string& model, const Layout& layout) {
  if (shape.experts == 0) return std::nullopt;
  const MegatronConfig& m = router_settings(config);
  const std::vector<std::string> blocks =
      combine_block_problems(shape.experts, config.policy.moe_combine_blocks, layout.ep);
  if (!blocks.empty()) {
    return "the model of " + model + " cannot be split so: " + replace_all(blocks.front(), "policy.", section + ".");
  }
  const std::string keys = section + ".megatron_cfg.";
  if (m.moe_router_load_balancing_type != "none") {
    const std::string key = keys + "moe_router_load_balancing_type is " + m.moe_router_load_balancing_type;
    if (m.freeze_moe_router)
      return key + ", but " + keys + "freeze_moe_router keeps routers from being trained: set one of them";
    if (config.grpo.early_gradients)
      return key + ", whose means are over whole optimizer steps: switch grpo.early_gradients off";
  }
  if (m.moe_router_bias_update_rate > 0)
    return keys + "moe_router_bias_update_rate above 0 is not supported: experts are chosen without a bias";
  return std::nullopt;
}

}  // namespace

std::optional<std::string> model_problem(const Config& config, const std::string& section, const ModelShape& shape,
                                         const std::string& model, const ModelRanks& ranks) {
  if (auto problem = split_problem(config, section, shape, model, ranks)) return problem;
  if (auto problem = sharding_problem(config, section, ranks)) return problem;
  if (auto problem = virtual_stage_problem(config, section, ranks)) return problem;
  return experts_problem(config, section, shape, model, ranks.layout);
}

std::optional<std::string> policy_problem(const Config& config, const ModelShape& shape, const std::string& model,
                                          const ModelRanks& ranks) {
  if (auto problem = model_problem(config, "policy", shape, model, ranks)) return problem;
  return generation_problem(config, shape, model, ranks.layout, ranks.of_node);
}

std::optional<std::string> balance_warning(const Config& config, const std::string& section, const ModelShape& shape,
                                           const std::string& model) {
  const MegatronConfig& m = router_settings(config);
  const bool kind = m.moe_router_load_balancing_type != "none", weight = m.moe_aux_loss_coeff != 0;
  const std::string keys = section + ".megatron_cfg.moe_router_load_balancing_type is " +
                           m.moe_router_load_balancing_type + ", moe_aux_loss_coeff " +
                           format_double(m.moe_aux_loss_coeff);
  if (shape.experts == 0) {
    if (!kind && !weight) return std::nullopt;
    return keys + ", which have no effect: the model of " + model + " has no experts to balance";
  }
  if (kind == weight) return std::nullopt;
  return "experts are not balanced: " + keys + "; a loss takes both";
}

}  // namespace trireme
