#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "api/runtime.h"
#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/algorithms/critic_rank.h"
#include "trainer/algorithms/engine_layout.h"
#include "trainer/algorithms/engine_process.h"
#include "trainer/algorithms/grpo.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/sft.h"
#include "trainer/algorithms/threads.h"
#include "trainer/cli/commands.h"
#include "trainer/cli/environment.h"
#include "trainer/cli/role_layout.h"
#include "trainer/launch/launch.h"
#include "trainer/launch/once.h"
#include "trainer/launch/run_manifest.h"

namespace trireme {
namespace {

struct TrainArguments {
  std::string algorithm;
  std::string config;
  std::string layout;
  bool print_config = false;
  std::string log_format = "text";
  bool no_second_buffer = false;  // an engine's
  std::vector<std::string> overrides;
};

std::vector<std::string> overrides_of(const TrainArguments& arguments) {
  std::vector<std::string> overrides = arguments.overrides;
  if (!arguments.algorithm.empty()) overrides.insert(overrides.begin(), "algorithm=" + arguments.algorithm);
  return overrides;
}

// Of so many ranks.
Layout configured_layout(const ParallelSizes& sizes, int world) {
  Layout layout = layout_of(sizes);
  layout.dp = derive_dp(layout, world).value_or(world);
  return layout;
}

// A critic's ranks have the sizes of value.*; the actor's are named by theirs.
Layout layout_of_rank(const TrainArguments& arguments, const Config& config, RendezvousOptions& ranks) {
  if (ranks.of_critic) {
    ranks.layout = configured_layout(parallel_sizes(config), ranks.actor_ranks);
    if (arguments.layout.empty()) return critic_layout(config, ranks.world_size);
    const Layout layout = parse_layout(arguments.layout);
    check_layout_agrees(parallel_sizes(critic_config(config)), layout, "critic");
    return layout;
  }
  const ParallelSizes sizes = parallel_sizes(config);
  if (arguments.layout.empty()) return configured_layout(sizes, ranks.world_size);
  const Layout layout = parse_layout(arguments.layout);
  check_layout_agrees(sizes, layout, "actor");
  return layout;
}

// Whether the critic's data parallel ranks can share its batches: here its own are known. Where --layout sizes a
// critic on ranks of its own, only these know it.
void check_critics_batches(const TrainArguments& arguments, const Config& config, const TrainOptions& options) {
  const RendezvousOptions& ranks = options.rendezvous;
  if (!has_critic(config)) return;
  const bool elsewhere = !ranks.of_critic && ranks.critic_ranks > 0;
  if (elsewhere && !arguments.layout.empty()) return;
  const int64_t dp =
      ranks.of_critic ? options.layout.dp : critic_layout(config, elsewhere ? ranks.critic_ranks : ranks.world_size).dp;
  const std::vector<std::string> problems = critic_problems(config, dp);
  if (!problems.empty()) fail_user(join(problems, "\n"));
}

// Generation processes and a configuration that has no use for them, or the other way round.
void check_engines(const Config& config, const TrainOptions& options) {
  if (options.rendezvous.of_critic) return;  // whom they do not meet
  const bool in_pod = !options.job.empty();
  const bool elsewhere = generates_elsewhere(config);
  if (!elsewhere && environment_int("TRIREME_ENGINES", 0) > 0)
    fail_user(
        "launch --engines starts processes that generate, but policy.generation.colocated.enabled is true: set it to "
        "false, or leave --engines out");
  if (in_pod || options.work_port > 0) check_generation_role(config, options.work_port > 0);
}

// Nobody can know the port where launch has chosen it and starts no engines, nor where there is none.
void check_engines_can_come(const Config& config, const TrainOptions& options) {
  if (options.rendezvous.of_critic || !generates_elsewhere(config) || !options.job.empty()) return;
  if (environment("TRIREME_ENGINES", "") != "0" && options.rendezvous.master_port != 0) return;
  fail_user(
      "policy.generation.colocated.enabled is false, and engines could not reach this run: start it with trireme "
      "launch --engines N -- train ..., or choose its port (MASTER_PORT, launch --master-port) and start trireme "
      "engine beside it");
}

int train(const TrainArguments& arguments, const CommandContext& context) {
  std::vector<std::string> overrides = overrides_of(arguments);
  std::vector<std::string> warnings;
  const std::string metrics_port = environment("TRIREME_METRICS_PORT", "");
  if (!metrics_port.empty()) {  // in a pod: where the monitor looks
    overrides.push_back("logger.prometheus.enabled=true");
    overrides.push_back("logger.prometheus.port=" + metrics_port);
  }
  const Config config = load_config(arguments.config, overrides, &warnings, environment_variable);
  if (arguments.print_config) {
    std::cout << to_yaml(config) << std::flush;
    for (const std::string& warning : warnings) log_warn("config", warning);
    for (const std::string& key : keys_without_effect(config)) log_warn("config", key);
    validate_supported(config);
    return 0;
  }
  TrainOptions options;
  options.rendezvous = rendezvous_from_environment(config.cluster.collective_timeout_s);
  options.fault = fault_from_environment();
  options.hf_home = hf_home_from_environment();
  options.reporting = reporting_from_environment();
  options.rewards = reward_place_from_environment(config);
  options.stop_signal = context.signal;
  options.on_ready = context.read_signals;  // until then a signal ends the rank, also while it waits for peers
  options.job = environment("TRIREME_JOB_UID", "");
  options.checkpoint_on_stop = environment_int("TRIREME_CHECKPOINT_ON_TERMINATION", 1) != 0;
  options.work_port = static_cast<int>(environment_int("TRIREME_WORK_PORT", 0));
  options.transport = transport_from_environment(options.rendezvous.world_size, config.cluster.device,
                                                 /*sends_weights=*/options.work_port > 0);
  check_engines(config, options);
  options.layout = layout_of_rank(arguments, config, options.rendezvous);
  // Init containers share the variable but pass no --layout: they are no ranks of it. It is the actor's layout.
  const bool in_topology = !arguments.layout.empty() && !options.rendezvous.of_critic;
  const std::string file = in_topology ? environment("TRIREME_TOPOLOGY_FILE", "") : "";
  if (!file.empty()) {
    const Json document = Json::parse(read_file(file), nullptr, /*allow_exceptions=*/false);
    check_topology_document(document, file,
                            {.rank = options.rendezvous.rank,
                             .world = options.rendezvous.world_size,
                             .attempt = environment_int("TRIREME_ATTEMPT", -1),
                             .node_rank = environment_int("NODE_RANK", -1),
                             .layout = options.layout});
  }
  LogOptions log;
  log.format = arguments.log_format == "json" ? LogFormat::kJson : LogFormat::kText;
  const RendezvousOptions& ranks = options.rendezvous;
  if (ranks.world_size > 1 || ranks.critic_ranks > 0)
    log.tag = (ranks.of_critic ? "critic " : "rank ") + std::to_string(ranks.rank);
  log_setup(log);
  if (ranks.rank == 0 && !ranks.of_critic) {
    for (const std::string& warning : warnings) log_warn("config", warning);
    for (const std::string& key : keys_without_effect(config)) log_warn("config", key);
  }
  validate_supported(config);
  check_engines_can_come(config, options);
  check_critics_batches(arguments, config, options);
  use_threads(local_world_from_environment());
  const TrainSummary summary = ranks.of_critic         ? run_critic(config, options)
                               : !has_rollouts(config) ? run_sft(config, options)
                                                       : run_grpo(config, options);
  if (summary.end == LoopEnd::kStopped) {
    log_info("train", "stopped after step " + std::to_string(summary.steps) +
                          (config.checkpointing.enabled ? ", checkpoint saved" : ""));
    return kExitCheckpointed;
  }
  return 0;
}

// The processes of a launch are engines one behind the other, each of as many ranks as the configuration says.
void set_place_of_engine(const Config& config, EngineProcessOptions& options) {
  const int64_t all = environment_int("WORLD_SIZE", 1), own = environment_int("RANK", 0), ranks = engine_ranks(config);
  const int64_t here = environment_int("LOCAL_WORLD_SIZE", all);
  if (here % ranks != 0 || all % ranks != 0) {
    fail_user("an engine has " + std::to_string(ranks) + " ranks (policy.generation.tensor_parallel_size), and " +
              std::to_string(here) + " processes were started together: start a multiple of " + std::to_string(ranks) +
              " on each machine (launch --nproc-per-node)");
  }
  options.rank = static_cast<int>(own % ranks);
  if (all > ranks) options.name += "-" + std::to_string(own / ranks);
}

// Of the actor's arguments those count that say what is generated; the rest is accepted, so that one line starts both.
int engine(const TrainArguments& arguments, const CommandContext& context) {
  std::vector<std::string> warnings;
  const Config config = load_config(arguments.config, overrides_of(arguments), &warnings, environment_variable);
  EngineProcessOptions options;
  // Without a name: its own, or, of several, the launcher's.
  options.name = environment("TRIREME_ENGINE_NAME",
                             "engine-" + std::to_string(engine_ranks(config) > 1 ? ::getppid() : ::getpid()));
  options.start = environment("TRIREME_ENGINE_START", "0");
  set_place_of_engine(config, options);
  options.work_url = environment("TRIREME_WORK_URL", "");
  options.rendezvous = rendezvous_from_environment(config.cluster.collective_timeout_s);
  options.hf_home = hf_home_from_environment();
  options.rewards = reward_place_from_environment(config);
  // launch starts engines with the run's own command line.
  options.second_buffer = !arguments.no_second_buffer && environment_int("TRIREME_ENGINE_SECOND_BUFFER", 1) != 0;
  options.fault = engine_fault_from_environment();
  const int here = local_world_from_environment();
  const bool beside = options.rendezvous.master_address == "127.0.0.1";
  options.transport = transport_from_environment(beside ? here : here + 1, config.cluster.device);
  options.stop_signal = context.signal;
  options.on_ready = context.read_signals;
  LogOptions log;
  log.format = arguments.log_format == "json" ? LogFormat::kJson : LogFormat::kText;
  log.tag = options.name + (options.rank > 0 ? "." + std::to_string(options.rank) : "");
  log_setup(log);
  validate_supported(config);
  use_threads(local_world_from_environment());
  run_engine(config, options);
  return 0;
}

void add_train_options(CLI::App& verb, TrainArguments& arguments) {
  verb.add_option("--algorithm", arguments.algorithm, "grpo, ppo or sft (default: the configuration's)");
  verb.add_option("--config", arguments.config, "YAML file")->required();
  verb.add_option("--layout", arguments.layout, "parallel sizes: tp=1,cp=1,ep=1,dp=N,pp=1");
  verb.add_flag("--print-config", arguments.print_config,
                "print the resolved configuration, report keys without effect or support, and exit");
  verb.add_option("--log-format", arguments.log_format, "text or json")->check(CLI::IsMember({"text", "json"}));
  verb.add_option("overrides", arguments.overrides, "key.sub=value, applied over the file");
}

// Of a run with this command line, "train" first.
int ranks_of_its_engines(const std::vector<std::string>& command) {
  TrainArguments arguments;
  CLI::App verb;
  add_train_options(verb, arguments);
  try {
    verb.parse(std::vector<std::string>(command.rbegin(), command.rend() - 1));  // which CLI11 takes from its end
  } catch (const CLI::ParseError& error) {
    fail_user(std::string("launch: train: ") + error.what());
  }
  return static_cast<int>(
      engine_ranks(load_config(arguments.config, overrides_of(arguments), nullptr, environment_variable)));
}

struct LaunchArguments {
  int processes = 1;
  int critic_ranks = 0;
  int engines = 0;
  int nodes = 0;
  int node_rank = -1;
  std::string master_address;
  int master_port = -1;
  std::vector<std::string> command;
};

// Critic ranks beside the actor's are of one machine; elsewhere their launchers are told that they are the critic's.
void set_critic_ranks(const LaunchArguments& arguments, LaunchOptions& options) {
  options.critic_ranks = arguments.critic_ranks;
  if (arguments.critic_ranks < 0) fail_user("launch: --critic-ranks must be at least 0");
  if (is_critic_by_environment()) {
    options.behind_actor_ranks = static_cast<int>(environment_int("TRIREME_ACTOR_RANKS", 0));
    if (options.behind_actor_ranks < 1)
      fail_user("launch: TRIREME_ROLE is critic but TRIREME_ACTOR_RANKS, how many ranks the actor has, is not set");
    if (options.master_port == 0) fail_user("launch: TRIREME_ROLE is critic but MASTER_PORT, the actor's, is not set");
  }
  if (arguments.critic_ranks == 0) return;
  if (options.nodes > 1 || options.behind_actor_ranks > 0 || environment_int("TRIREME_CRITIC_RANKS", 0) > 0) {
    fail_user(
        "launch: --critic-ranks starts a critic beside the actor of one node; elsewhere leave it out, and start the "
        "critic's ranks by a launch of their own with TRIREME_ROLE=critic, TRIREME_ACTOR_RANKS and, for both, "
        "TRIREME_CRITIC_RANKS");
  }
}

int launch_verb(const LaunchArguments& arguments, const CommandContext& context) {
  if (arguments.command.empty())
    fail_user("launch: nothing to launch; write: trireme launch --nproc-per-node N -- train --config FILE");
  LaunchOptions options;
  options.processes = arguments.processes;
  options.first_gpu = static_cast<int>(environment_int("TRIREME_FIRST_GPU", 0));
  options.nodes = arguments.nodes > 0 ? arguments.nodes : static_cast<int>(environment_int("NNODES", 1));
  options.node_rank =
      arguments.node_rank >= 0 ? arguments.node_rank : static_cast<int>(environment_int("NODE_RANK", 0));
  options.master_address =
      !arguments.master_address.empty() ? arguments.master_address : environment("MASTER_ADDR", "127.0.0.1");
  options.master_port =
      arguments.master_port >= 0 ? arguments.master_port : static_cast<int>(environment_int("MASTER_PORT", 0));
  if (options.master_port > 0) options.listen_fd = static_cast<int>(environment_int("TRIREME_LISTEN_FD", -1));
  if (options.processes < 1) fail_user("launch: --nproc-per-node must be at least 1");
  set_critic_ranks(arguments, options);
  if (options.node_rank >= options.nodes) {
    fail_user("launch: node rank " + std::to_string(options.node_rank) + " is outside the " +
              std::to_string(options.nodes) + " nodes");
  }
  options.command = {program_path()};
  options.command.insert(options.command.end(), arguments.command.begin(), arguments.command.end());
  if (arguments.engines > 0) {
    if (arguments.command.front() != "train" || options.nodes > 1)
      fail_user("launch: --engines is for a run on one machine: trireme launch --engines N -- train --config FILE");
    options.engines = arguments.engines;
    options.engine_ranks = ranks_of_its_engines(arguments.command);
    options.engine_command = options.command;
    options.engine_command[1] = "engine";
  }
  // Of a port that is chosen here no other engines know: without these there are none.
  if (arguments.engines > 0 || (options.nodes == 1 && options.master_port == 0))
    options.environment["TRIREME_ENGINES"] = std::to_string(arguments.engines);
  options.grace = Milliseconds(1000 * environment_int("TRIREME_TERMINATION_SECONDS", 300));
  options.termination_log = environment("TRIREME_TERMINATION_LOG", "");
  context.read_signals();
  const LaunchResult result = launch(options, context.signal);
  return result.exit_code;
}

void add_engine_command(CLI::App& app, CommandContext& context) {
  auto arguments = std::make_shared<TrainArguments>();
  CLI::App* verb = app.add_subcommand(
      "engine",
      "generate for a run that trains in other processes (reads MASTER_ADDR, MASTER_PORT, TRIREME_ENGINE_NAME, "
      "TRIREME_WORK_URL)");
  verb->add_option("--algorithm", arguments->algorithm, "the same as the run's");
  verb->add_option("--config", arguments->config, "YAML file: the run's configuration")->required();
  verb->add_option("--layout", arguments->layout,
                   "the run's; accepted and not used: an engine's is policy.generation.tensor_parallel_size");
  verb->add_option("--log-format", arguments->log_format, "text or json")->check(CLI::IsMember({"text", "json"}));
  verb->add_flag(
      "--no-second-buffer", arguments->no_second_buffer,
      "receive weights where they are read, with decoding stopped: the cache gets the memory of a second copy "
      "(TRIREME_ENGINE_SECOND_BUFFER=0)");
  verb->add_option("overrides", arguments->overrides, "key.sub=value: the run's overrides");
  verb->callback(
      [arguments, &context] { context.run = [arguments, &context] { return engine(*arguments, context); }; });
}

}  // namespace

void add_train_commands(CLI::App& app, CommandContext& context) {
  {
    auto arguments = std::make_shared<TrainArguments>();
    CLI::App* verb =
        app.add_subcommand("train", "train: one rank of a run (reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)");
    add_train_options(*verb, *arguments);
    verb->callback(
        [arguments, &context] { context.run = [arguments, &context] { return train(*arguments, context); }; });
  }
  add_engine_command(app, context);
  {
    auto arguments = std::make_shared<LaunchArguments>();
    CLI::App* verb =
        app.add_subcommand("launch", "start the ranks of this machine: trireme launch --nproc-per-node 2 -- train ...");
    verb->add_option("--nproc-per-node", arguments->processes, "ranks on this machine (default: 1)");
    verb->add_option("--critic-ranks", arguments->critic_ranks,
                     "PPO: further ranks for the critic (default: the critic is on the actor's ranks)");
    verb->add_option(
        "--engines", arguments->engines,
        "engines on this machine, for policy.generation.colocated.enabled=false, each of as many processes as "
        "policy.generation.tensor_parallel_size says");
    verb->add_option("--nnodes", arguments->nodes, "number of machines (default: NNODES or 1)");
    verb->add_option("--node-rank", arguments->node_rank, "number of this machine (default: NODE_RANK or 0)");
    verb->add_option("--master-addr", arguments->master_address,
                     "host of machine 0 (default: MASTER_ADDR or 127.0.0.1)");
    verb->add_option("--master-port", arguments->master_port,
                     "port on machine 0 (default: MASTER_PORT or, with one machine, a free one)");
    verb->add_option("command", arguments->command, "after --: the command that each rank runs, and its arguments");
    verb->callback(
        [arguments, &context] { context.run = [arguments, &context] { return launch_verb(*arguments, context); }; });
  }
  {
    auto options = std::make_shared<OnceOptions>();
    auto rank = std::make_shared<int>(-1);
    auto seconds = std::make_shared<double>(3600);
    CLI::App* verb = app.add_subcommand(
        "once", "run a command on node 0 only, while the other nodes wait: trireme once FILE -- init-task ...");
    verb->add_option("marker", options->marker,
                     "file written once the command succeeded; on a volume that all nodes mount")
        ->required();
    verb->add_option("command", options->command, "after --: the command and its arguments")->required();
    verb->add_option("--node-rank", *rank,
                     "number of this node (default: the actor's NODE_RANK, or 0; pods of other roles wait)");
    verb->add_option("--timeout", *seconds,
                     "seconds that the command may take, and that others wait for it (default: 3600)")
        ->check(CLI::PositiveNumber);
    verb->callback([=, &context] {
      context.run = [=, &context] {
        // What is numbered are the actor's pods, and the critic's by themselves: node 0 is the actor's first.
        const bool of_actor = environment("TRIREME_ROLE", "actor") == "actor";
        const int number = of_actor ? static_cast<int>(environment_int("NODE_RANK", 0)) : 1;
        options->node_rank = *rank >= 0 ? *rank : number;
        options->timeout = Milliseconds(static_cast<int64_t>(*seconds * 1000));
        options->program = program_path();
        context.read_signals();
        return run_once(*options, context.signal);
      };
    });
  }
  {
    auto options = std::make_shared<RunOptions>();
    CLI::App* verb = app.add_subcommand("run", "run an RLJob manifest on this machine");
    verb->add_option("-f,--file", options->manifest, "the manifest")->required();
    verb->add_option("--volumes", options->volumes, "parent folder of volume claims");
    verb->add_option("overrides", options->overrides, "key.sub=value, applied after the manifest's own");
    verb->callback([options, &context] {
      context.run = [options, &context] {
        options->program = program_path();
        context.read_signals();
        return run_manifest(*options, context.signal);
      };
    });
  }
}

}  // namespace trireme
