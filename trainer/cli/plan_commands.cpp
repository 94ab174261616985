#include <algorithm>
#include <iostream>
#include <numeric>
#include <optional>
#include <utility>

#include "api/rljob.h"
#include "api/runtime.h"
#include "api/validate.h"
#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"
#include "topology/combine_blocks.h"
#include "topology/plan.h"
#include "trainer/algorithms/engine_layout.h"
#include "trainer/algorithms/model_problem.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/plan_inputs.h"
#include "trainer/cli/commands.h"
#include "trainer/cli/environment.h"
#include "trainer/cli/plan_report.h"
#include "trainer/cli/role_layout.h"
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

// Of a model beside the policy, which a plan can do without: a warning says so.
std::optional<ModelShape> shape_beside(const std::string& model_name, const std::string& what,
                                       std::vector<std::string>& warnings) {
  try {
    return find_shape(model_name);
  } catch (const Error& error) {
    warnings.push_back(what + " is not counted: " + error.what());
    return std::nullopt;
  }
}

constexpr int64_t kUsualNode = 8;  // GPUs of a node, where the configuration is one of a single rank

struct PlanArguments {
  std::string path;      // of the configuration, or
  std::string manifest;  // of an RLJob, whose roles say how many ranks and engines there are
  std::vector<std::string> overrides;
  int64_t gpus = 0;           // 0: the configuration's ranks
  double gpu_memory_gib = 0;  // 0: that of `gpu`
  int64_t gpus_per_node = 0;  // 0: the configuration's
  int64_t critic_ranks = 0;   // of a critic's own; 0: it is on the policy's
  int64_t engines = 0;        // that generate elsewhere; 0: the configuration's
  std::string gpu = "h200";
  std::string sharding;  // empty: the configuration's
  PlannedLengths lengths;
  // Of a manifest's roles.
  std::optional<Layout> layout;  // of the actor, unless sizes that are auto are looked for
  std::optional<Layout> critic;  // of a critic's own ranks
  int64_t engine_node = 0;       // processes of a generation pod; 0: no such role
};

// What all layouts of a call have in common.
struct PlanContext {
  Config config;
  ModelShape shape;
  Workload work;
  PlanOptions options;
  PlannedBeside beside;
  PlanDevices devices;
  LayoutCheck check;
  std::optional<Layout> of_actor;  // as a manifest says
  // A critic on ranks of its own, in this layout of theirs.
  std::optional<PlannedModel> critic_apart;
  Layout of_critic;
  int64_t critics_of_node = 0;
  bool engines_assumed = false;  // nothing says how many there are
  bool shares_engines = false;   // all ways to deal --gpus to ranks and engines are planned
  int64_t devices_of_node = 0;   // for ranks and engines
  const PlannedModel* critic() const {
    return critic_apart ? &*critic_apart : beside.critic ? &*beside.critic : nullptr;
  }
};

// Whose ranks a critic has, and whether they can share its batches.
void place_critic(const PlanArguments& arguments, PlanContext& context) {
  const Config& config = context.config;
  if (!has_critic(config)) {
    if (arguments.critic_ranks > 0)
      fail_user("--critic-ranks is for a critic: algorithm=ppo, with ppo.adv_estimator.name gae");
    return;
  }
  std::optional<int64_t> dp = derive_dp(layout_of(parallel_sizes(critic_config(config))), context.check.world);
  if (arguments.critic_ranks > 0) {
    context.of_critic = arguments.critic ? critic_layout(*arguments.critic, arguments.critic_ranks)
                                         : critic_layout(config, arguments.critic_ranks);
    dp = context.of_critic.dp;
    context.critic_apart = std::exchange(context.beside.critic, std::nullopt);
    int64_t of_node = arguments.gpus_per_node > 0 ? arguments.gpus_per_node : config.cluster.processes;
    if (arguments.gpus_per_node == 0 && of_node == 1) of_node = kUsualNode;
    context.critics_of_node = std::min(of_node, arguments.critic_ranks);
  }
  // The plan says that it cannot be split so, or how many ranks there are is what is looked for.
  if (!dp || (context.shares_engines && !context.critic_apart)) return;
  const std::vector<std::string> problems = critic_problems(config, *dp);
  if (!problems.empty()) fail_user(join(problems, "\n"));
}

// Engines of the pods that generate, none of which has devices in two of them.
int64_t engines_of_role(const RoleSpec& generation, const Config& config) {
  const int64_t devices = generates_elsewhere(config) ? engine_ranks(config) : 1;
  if (processes_per_pod(generation) % devices != 0) {
    fail_user("policy.generation.tensor_parallel_size " + std::to_string(devices) + " does not divide the " +
              std::to_string(processes_per_pod(generation)) + " processes of a pod of spec.roles.generation");
  }
  return world_size(generation) / devices;
}

// The RLJob decides the actor's sizes, as it does by --layout for a run.
void take_layout(const RoleSpec& actor, PlanArguments& arguments, Config& config) {
  if (!auto_sizes(config).empty()) return;
  const Layout& layout = arguments.layout.emplace(layout_of(actor));
  check_layout_agrees(parallel_sizes(config), layout, "actor");
  set_parallel_sizes(config, {.tensor = layout.tp,
                              .pipeline = layout.pp,
                              .context = layout.cp,
                              .expert = layout.ep,
                              .expert_tensor = layout.etp});
}

// Of the ranks that a critic has to itself; and what the trainer would refuse of the roles.
void take_other_roles(const Roles& roles, PlanArguments& arguments, const Config& config) {
  check_generation_role(config, roles.generation.has_value());
  if (roles.critic) {
    check_layout_agrees(parallel_sizes(critic_config(config)), layout_of(*roles.critic), "critic");
    arguments.critic = layout_of(*roles.critic);
    if (arguments.critic_ranks == 0) arguments.critic_ranks = world_size(*roles.critic);
  }
  if (!roles.generation) return;
  check_engine_agrees(config, roles.generation->parallelism);
  arguments.engine_node = processes_per_pod(*roles.generation);
  if (arguments.engines == 0) arguments.engines = engines_of_role(*roles.generation, config);
}

// The configuration of a manifest's actor. What its roles say of ranks and engines becomes the arguments'.
Config config_of_manifest(PlanArguments& arguments, std::vector<std::string>& warnings) {
  const Manifest manifest = parse_manifest(read_file(arguments.manifest), arguments.manifest);
  if (manifest.jobs.size() != 1)
    fail_user(arguments.manifest + " holds " + std::to_string(manifest.jobs.size()) + " RLJobs; plan is of one");
  const RLJob& job = manifest.jobs.front();
  const Validation found = validate(job);
  if (!found.ok()) fail_user(to_string(found.errors, arguments.manifest));
  const ConfigSource& source = job.spec.config;
  if (source.config_map_ref)
    fail_user(arguments.manifest + ": the configuration of spec.config.configMapRef is in the cluster; plan it with " +
              "--config FILE");
  std::vector<std::string> overrides = {"algorithm=" + to_lower(to_string(job.spec.algorithm))};
  for (std::string& item : trainer_overrides(job)) overrides.push_back(std::move(item));
  overrides.insert(overrides.end(), arguments.overrides.begin(), arguments.overrides.end());
  const Roles& roles = job.spec.roles;
  Config config = source.path.empty() ? load_config_text(source.inline_config.dump(), overrides, &warnings,
                                                         arguments.manifest, environment_variable)
                                      : load_config(source.path, overrides, &warnings, environment_variable);
  take_layout(*roles.actor, arguments, config);
  take_other_roles(roles, arguments, config);
  return config;
}

// GPUs of a node that engines are on.
int64_t engine_node(const PlanArguments& arguments, const Config& config) {
  if (arguments.gpus_per_node > 0) return arguments.gpus_per_node;
  if (arguments.engine_node > 0) return arguments.engine_node;
  return config.cluster.gpus_per_node > 1 ? config.cluster.gpus_per_node : kUsualNode;
}

// How many ranks train, how many engines generate, and whether these are on the ranks' node.
void place_engines(const PlanArguments& arguments, PlanContext& context) {
  const Config& config = context.config;
  Workload& work = context.work;
  context.check.world = arguments.gpus > 0 ? arguments.gpus : world_size(config);
  context.devices_of_node = arguments.gpus_per_node > 0 ? arguments.gpus_per_node : config.cluster.gpus_per_node;
  if (arguments.gpus > 0 && arguments.gpus_per_node == 0 && context.devices_of_node == 1)
    context.devices_of_node = kUsualNode;
  if (!generates_elsewhere(config)) {
    if (arguments.engines > 0)
      fail_user("--engines is for generation in other processes: policy.generation.colocated.enabled=false");
    return;
  }
  context.devices.engine_node = engine_node(arguments, config);
  context.shares_engines = arguments.gpus > 0;
  if (arguments.gpus > 0) {
    const int64_t engines = std::max<int64_t>(1, arguments.engines);
    context.check.world = arguments.gpus - engines * work.engine.world();
    if (context.check.world < 1) {
      fail_user("--gpus " + std::to_string(arguments.gpus) + " leaves no device to train on beside " +
                engines_text(engines, work.engine));
    }
    work.engines = arguments.engines;
    return;
  }
  if (arguments.engines > 0) {
    work.engines = arguments.engines;
  } else if (const auto problem = too_few_engine_devices(config)) {
    fail_user(*problem);
  }
  context.engines_assumed = arguments.engines == 0 && planned_engines(config) == 0;
  work.engines_near = config.cluster.num_nodes == 1 &&
                      context.check.world + work.engines * work.engine.world() <= context.devices_of_node;
}

PlanContext plan_context(PlanArguments arguments, std::vector<std::string>& warnings) {
  PlanContext context;
  context.config = arguments.manifest.empty()
                       ? load_config(arguments.path, arguments.overrides, &warnings, environment_variable)
                       : config_of_manifest(arguments, warnings);
  context.of_actor = arguments.layout;
  const Config& config = context.config;
  context.shape = find_shape(config.policy.model_name);
  context.work = planned_work(config, arguments.lengths);
  context.options = plan_options(config);
  const auto sharding =
      arguments.sharding.empty() ? std::optional(state_sharding(config)) : parse_sharding(arguments.sharding);
  if (!sharding) fail_user("--sharding " + arguments.sharding + ": it is one of " + join(sharding_names(), ", "));
  context.options.sharding = *sharding;
  if (has_critic(config)) {
    if (const auto shape = shape_beside(config.value.model_name, "the critic", warnings))
      context.beside.critic = planned_critic(config, *shape, arguments.lengths);
    if (context.beside.critic && !arguments.sharding.empty()) context.beside.critic->options.sharding = *sharding;
  }
  if (uses_reward_model(config)) {
    if (const auto shape = shape_beside(config.env.reward_model.model_name, "the reward model", warnings))
      context.beside.reward_model = planned_reward_model(config, *shape, arguments.lengths);
  }
  const auto rates = device_rates(arguments.gpu);
  if (!rates) fail_user("--gpu " + arguments.gpu + ": rates are known of " + join(known_device_rates(), ", "));
  context.devices.rates = *rates;
  context.devices.memory_bytes = static_cast<int64_t>(arguments.gpu_memory_gib * 1024 * 1024 * 1024);
  place_engines(arguments, context);
  int64_t of_node = arguments.gpus_per_node > 0 ? arguments.gpus_per_node : config.cluster.processes;
  if (arguments.gpus > 0 && arguments.gpus_per_node == 0 && of_node == 1) of_node = kUsualNode;
  context.devices.of_node = context.check.gpus_per_node = std::min(of_node, context.check.world);
  context.check.shape = &context.shape;
  context.check.stages = context.options.stages;
  context.check.stage_section = context.options.stage_section;
  place_critic(arguments, context);
  return context;
}

// Whether the samples of an optimizer step can be dealt to the data parallel ranks.
bool deals_batches(const Config& config, const Workload& work, const Layout& layout) {
  const int64_t of_batch = work.train_samples > 0 ? work.train_samples : 1;
  return config.policy.train_global_batch_size % (layout.dp * of_batch) == 0;
}

// The ranks that share each expert: as configured, in all layouts of a call. Other sizes give other bits.
int64_t expert_tensor_size(const PlanContext& context) {
  return context.of_actor ? context.of_actor->etp : parallel_sizes(context.config).expert_tensor;
}

// All legal layouts of that size. Only those with the sizes that the configuration names where `named`, which is where
// others of it are auto.
std::vector<Layout> layouts_of(const PlanContext& context, bool named) {
  const Config& config = context.config;
  const std::vector<std::string> open = auto_sizes(config);
  const Layout fixed = layout_of(parallel_sizes(config));
  const auto is_open = [&](const char* part) {
    return std::any_of(open.begin(), open.end(), [part](const std::string& key) { return ends_with(key, part); });
  };
  const auto agrees = [&](const Layout& l) {
    return (l.tp == fixed.tp || is_open("tensor_model_parallel_size") || is_open(".tensor_parallel_size")) &&
           (l.pp == fixed.pp || is_open("pipeline_model_parallel_size")) &&
           (l.cp == fixed.cp || is_open("context_parallel_size")) &&
           (l.ep == fixed.ep || is_open("expert_model_parallel_size") || is_open("expert_parallel_size"));
  };
  std::vector<Layout> layouts;
  for (const Layout& layout : legal_layouts(context.check, expert_tensor_size(context))) {
    const bool blocks =
        context.shape.experts == 0 ||
        combine_block_problems(context.shape.experts, config.policy.moe_combine_blocks, layout.ep).empty();
    if (blocks && deals_batches(config, context.work, layout) && (!named || agrees(layout))) layouts.push_back(layout);
  }
  return layouts;
}

// What all of them have, where it is not usual.
std::string with_expert_tensor(const PlanContext& context) {
  const int64_t size = expert_tensor_size(context);
  return size == 1 ? "" : " with etp " + std::to_string(size) + " (" + parallel_size_key(context.config, "etp") + ")";
}

LayoutPlan plan_of(const PlanContext& context, const Layout& layout) {
  Workload work = context.work;
  if (work.engines > 0) work.engine = engine_layout(context.config, context.shape, layout);
  return plan_layout(context.shape, layout, work, context.options, context.devices, context.beside);
}

// All ways to deal the devices to ranks and engines, of so many engines where they are named.
std::vector<LayoutPlan> plans_with_engines(const PlanContext& context, bool named) {
  std::vector<LayoutPlan> plans;
  const int64_t asked = context.work.engines, least = std::max<int64_t>(1, asked);
  const int64_t devices = context.work.engine.world(), gpus = context.check.world + least * devices;
  const int64_t most = asked > 0 ? asked : (gpus - 1) / devices;
  for (int64_t engines = least; engines <= most; ++engines) {
    PlanContext dealt = context;
    dealt.check.world = gpus - engines * devices;
    dealt.check.gpus_per_node = dealt.devices.of_node = std::min(context.devices_of_node, dealt.check.world);
    dealt.work.engines = engines;
    dealt.work.engines_near = gpus <= context.devices_of_node;
    for (const Layout& layout : layouts_of(dealt, named)) {
      if (context.beside.critic) {
        const auto dp = derive_dp(context.beside.critic->layout, dealt.check.world);
        if (dp && !critic_problems(context.config, *dp).empty()) continue;
      }
      plans.push_back(plan_of(dealt, layout));
    }
  }
  rank_plans(plans);
  return plans;
}

std::vector<LayoutPlan> legal_plans(const PlanContext& context, bool named) {
  if (context.shares_engines) return plans_with_engines(context, named);
  std::vector<LayoutPlan> plans;
  for (const Layout& layout : layouts_of(context, named)) plans.push_back(plan_of(context, layout));
  rank_plans(plans);
  return plans;
}

std::string gibibytes(int64_t bytes) { return format_bytes(static_cast<uint64_t>(bytes)); }

void print_setting(const PlanContext& context, const PlanArguments& arguments) {
  const Config& config = context.config;
  const Workload& work = context.work;
  print_line(std::cout, "model",
             config.policy.model_name + ", " +
                 format_fixed(static_cast<double>(parameter_count(context.shape)) / 1e9, 3) + " G parameters");
  const auto beside = [](const std::string& what, const PlannedModel* model, const std::string& name) {
    if (model == nullptr) return;
    print_line(
        std::cout, what,
        name + ", " + format_fixed(static_cast<double>(parameter_count(model->shape)) / 1e9, 3) + " G parameters");
  };
  beside("critic", context.critic(), config.value.model_name);
  beside("reward model", context.beside.reward_model ? &*context.beside.reward_model : nullptr,
         config.env.reward_model.model_name);
  const std::string device =
      to_lower(config.cluster.device) == "cpu"
          ? "planned as if each had a GPU"
          : context.devices.rates.name + (context.devices.rates.measured ? "" : ", not measured");
  if (arguments.gpus > 0) {
    const int64_t of_node =
        context.shares_engines ? std::min(context.devices_of_node, arguments.gpus) : context.check.gpus_per_node;
    print_line(std::cout, "devices",
               std::to_string(arguments.gpus) + " GPUs, " + std::to_string(of_node) + " of a node, " +
                   gibibytes(context.devices.memory()) + " each (" + device + ")" +
                   (context.shares_engines ? ", for ranks and engines" : ""));
  } else {
    const std::string ranks = context.work.engines == 0
                                  ? std::to_string(config.cluster.processes) + " ranks on each"
                                  : std::to_string(context.check.world) + " ranks that train, " +
                                        engines_text(context.work.engines, context.work.engine) +
                                        (context.work.engines == 1 ? " that generates" : " that generate") +
                                        (context.engines_assumed ? " (assumed: --engines)" : "");
    print_line(std::cout, "devices",
               std::to_string(config.cluster.num_nodes) + " nodes of " + std::to_string(config.cluster.gpus_per_node) +
                   " (cluster.gpus_per_node), " + ranks + ", " + gibibytes(context.devices.memory()) + " a device (" +
                   device + ")");
  }
  const auto mean = [](const std::vector<int64_t>& lengths) {
    return std::to_string(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) /
                          static_cast<int64_t>(lengths.size()));
  };
  const bool forced = !config.policy.generation.forced_lengths.empty();
  print_line(std::cout, work.generates ? "samples of a rollout" : "samples of an optimizer step",
             std::to_string(work.outputs.size()) + ", of " + mean(work.prompts) + " and " + mean(work.outputs) +
                 " tokens in the mean" + (forced ? "" : " (assumed: --prompt-tokens, --response-tokens)") +
                 ", at most " + std::to_string(work.longest));
  if (work.generates) print_line(std::cout, "optimizer steps of a rollout", std::to_string(work.optimizer_steps));
}

// Why the trainer of this version would refuse the layout before it loads weights.
std::vector<std::string> missing(const PlanContext& context, const Layout& layout) {
  std::vector<std::string> reasons;
  const Config& config = context.config;
  ModelRanks ranks{layout, context.check.gpus_per_node, to_lower(config.cluster.device) != "cpu",
                   context.options.sharding};
  if (const auto problem = policy_problem(config, context.shape, config.policy.model_name, ranks))
    reasons.push_back(*problem);
  const PlannedModel* critic = context.critic();
  if (critic == nullptr) return reasons;
  if (context.critic_apart) {
    ranks.layout = context.of_critic;
    ranks.of_node = context.critics_of_node;
  } else {
    ranks.layout = critic->layout;
    ranks.layout.dp = derive_dp(critic->layout, layout.world()).value_or(0);
    if (ranks.layout.dp == 0) return reasons;  // the plan says that they cannot be divided so
  }
  ranks.sharding = critic->options.sharding;
  const std::string& name = config.value.model_name;
  if (const auto problem = model_problem(critic_config(config), "value", critic->shape, name, ranks))
    reasons.push_back(*problem);
  return reasons;
}

int print_ranking(const PlanContext& context) {
  std::vector<RankedPlan> ranked;
  bool fits = false;
  for (LayoutPlan& plan : legal_plans(context, !auto_sizes(context.config).empty())) {
    fits = fits || plan.fits();
    const bool runs = missing(context, plan.layout).empty();
    ranked.push_back({std::move(plan), runs});
  }
  if (ranked.empty()) {
    fail_user("there is no legal layout of " + std::to_string(context.check.world) + " ranks" +
              with_expert_tensor(context) + (context.shares_engines ? ", nor of fewer beside more engines" : ""));
  }
  print_plans(std::cout, ranked, context.devices);
  if (fits) return 0;
  print_line(std::cout, "fits", "nothing; " + nearest_text(ranked.front().plan, context.devices));
  return 1;
}

// The sizes that are auto become those of the fastest layout that fits.
void settle_sizes(PlanContext& context) {
  const std::vector<std::string> open = auto_sizes(context.config);
  if (open.empty()) return;
  const std::vector<LayoutPlan> plans = legal_plans(context, true);
  const auto chosen = std::find_if(plans.begin(), plans.end(), [&](const LayoutPlan& plan) {
    return plan.fits() && missing(context, plan.layout).empty();
  });
  if (chosen == plans.end() && !plans.empty() && plans.front().fits()) {
    fail_user(join(open, ", ") + ": auto, but this version can run no layout of " +
              std::to_string(context.check.world) + " ranks" + with_expert_tensor(context) + " that fits; " +
              join(missing(context, plans.front().layout), "; "));
  }
  if (chosen == plans.end()) {
    fail_user(join(open, ", ") + ": auto, but no layout of " + std::to_string(context.check.world) + " ranks" +
              with_expert_tensor(context) + " fits" +
              (plans.empty() ? "" : "; " + nearest_text(plans.front(), context.devices)));
  }
  const Layout& best = chosen->layout;
  ParallelSizes sizes = parallel_sizes(context.config);
  sizes.tensor = best.tp;
  sizes.pipeline = best.pp;
  sizes.context = best.cp;
  sizes.expert = best.ep;
  set_parallel_sizes(context.config, sizes);
  const auto fitting = std::count_if(plans.begin(), plans.end(), [&](const LayoutPlan& plan) {
    return plan.fits() && missing(context, plan.layout).empty();
  });
  print_line(std::cout, "auto",
             to_string(best) + " is the fastest of " + std::to_string(fitting) +
                 " layouts that fit and can run; a run takes these sizes from the configuration");
}

void print_whether_it_runs(const PlanContext& context, const Layout& layout) {
  try {
    validate_supported(context.config);
    const std::vector<std::string> reasons = missing(context, layout);
    if (!reasons.empty()) fail_user(join(reasons, "; "));
    print_line(std::cout, "this version", "can run it");
  } catch (const Error& error) {
    print_line(std::cout, "this version", std::string("cannot run it: ") + error.what());
  }
}

// Of a critic on ranks of its own. Whether it fits.
bool print_critic(const PlanContext& context) {
  if (!context.critic_apart) return true;
  const PlannedModel& critic = *context.critic_apart;
  const Layout& layout = context.of_critic;
  print_line(std::cout, "critic on ranks of its own",
             to_string(layout) + " (" + std::to_string(layout.world()) + " ranks)");
  PlanDevices devices = context.devices;
  devices.of_node = context.critics_of_node;
  const LayoutReport report = check_layout(layout, {.world = layout.world(),
                                                    .gpus_per_node = devices.of_node,
                                                    .shape = &critic.shape,
                                                    .stages = critic.options.stages,
                                                    .stage_section = critic.options.stage_section});
  for (const std::string& error : report.errors) print_line(std::cout, "  impossible", error);
  for (const std::string& warning : report.warnings) print_line(std::cout, "  slow", warning);
  if (!report.ok()) return false;
  const LayoutPlan plan = plan_critic(critic, layout, devices);
  print_plan(std::cout, plan, critic.shape, critic.work, critic.options, devices);
  return plan.fits();
}

int plan_verb(const PlanArguments& arguments) {
  if (arguments.path.empty() == arguments.manifest.empty())
    fail_user("plan is of a configuration (--config FILE) or of an RLJob (-f FILE)");
  std::vector<std::string> warnings;
  PlanContext context = plan_context(arguments, warnings);
  print_setting(context, arguments);
  if (arguments.gpus > 0) {
    for (const std::string& warning : warnings) print_line(std::cout, "warning", warning);
    const int ranking = print_ranking(context);
    return print_critic(context) ? ranking : 1;
  }
  settle_sizes(context);
  Layout layout = context.of_actor.value_or(layout_of(parallel_sizes(context.config)));
  const auto dp = derive_dp(layout, context.check.world);
  if (!dp) {
    fail_user("a world of " + std::to_string(context.check.world) +
              " ranks is not divisible by tp * cp * pp = " + std::to_string(layout.tp * layout.cp * layout.pp));
  }
  layout.dp = *dp;
  const LayoutReport report = check_layout(layout, context.check);
  print_line(std::cout, "layout", to_string(layout) + " (" + std::to_string(context.check.world) + " ranks)");
  for (const std::string& error : report.errors) print_line(std::cout, "  impossible", error);
  for (const std::string& warning : report.warnings) print_line(std::cout, "  slow", warning);
  if (!report.ok()) return 1;
  const LayoutPlan plan = plan_of(context, layout);
  print_plan(std::cout, plan, context.shape, context.work, context.options, context.devices);
  const bool critic_fits = print_critic(context);
  for (const std::string& warning : warnings) print_line(std::cout, "warning", warning);
  print_whether_it_runs(context, layout);
  return plan.fits() && critic_fits ? 0 : 1;
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
    auto arguments = std::make_shared<PlanArguments>();
    CLI::App* verb = app.add_subcommand(
        "plan", "predict memory and time of a configuration's layout, or of all layouts, without running it");
    CLI::Option* config = verb->add_option("--config", arguments->path, "YAML file");
    verb->add_option("-f,--file", arguments->manifest,
                     "an RLJob manifest instead: its configuration, with the sizes of its roles")
        ->excludes(config);
    verb->add_option("overrides", arguments->overrides, "key.sub=value");
    verb->add_option("--gpus", arguments->gpus,
                     "rank all legal layouts of this many GPUs, with the configured expert tensor size; with "
                     "generation in other processes, also every split between "
                     "training and engines")
        ->check(CLI::PositiveNumber);
    verb->add_option("--gpu-memory", arguments->gpu_memory_gib, "GiB per GPU (default: that of --gpu)")
        ->check(CLI::PositiveNumber);
    verb->add_option("--gpus-per-node", arguments->gpus_per_node,
                     "GPUs of a machine (default: the configuration's, or 8 if that is 1)")
        ->check(CLI::PositiveNumber);
    verb->add_option("--critic-ranks", arguments->critic_ranks,
                     "PPO: put the critic on this many ranks of its own (default: on the policy's ranks)")
        ->check(CLI::PositiveNumber);
    verb->add_option("--engines", arguments->engines,
                     "generation processes, with policy.generation.colocated.enabled=false (default: from "
                     "colocated.resources or the RLJob)")
        ->check(CLI::PositiveNumber);
    verb->add_option("--gpu", arguments->gpu, "GPU whose speed is assumed: " + join(known_device_rates(), ", "));
    verb->add_option("--sharding", arguments->sharding,
                     "sharding of training state, instead of the configuration's: " + join(sharding_names(), ", "));
    verb->add_option("--prompt-tokens", arguments->lengths.prompt, "mean tokens of a prompt")
        ->check(CLI::PositiveNumber);
    verb->add_option("--response-tokens", arguments->lengths.response, "mean tokens of a response")
        ->check(CLI::PositiveNumber);
    verb->callback([=, &context] { context.run = [=] { return plan_verb(*arguments); }; });
  }
  {
    auto path = std::make_shared<std::string>();
    CLI::App* verb = app.add_subcommand("validate", "check a manifest as a cluster's admission would");
    verb->add_option("-f,--file", *path, "the manifest")->required();
    verb->callback([=, &context] { context.run = [=] { return validate_verb(*path); }; });
  }
}

}  // namespace trireme
