// The verbs of `trireme`. Each adds its options to a CLI11 app and sets what runs.
#pragma once

#include <CLI/CLI.hpp>
#include <atomic>
#include <functional>
#include <string>

namespace trireme {

struct CommandContext {
  std::string command;                       // the whole command line
  std::function<int()> run;                  // set by the chosen verb's callback
  const std::atomic<int>* signal = nullptr;  // last SIGTERM or SIGINT
  // Until it is called those end the process at once. Called by who reads `signal` from then on.
  std::function<void()> read_signals;
};

void add_train_commands(CLI::App& app, CommandContext& context);  // run launch once train
void add_plan_commands(CLI::App& app, CommandContext& context);   // plan validate
void add_model_commands(CLI::App& app, CommandContext& context);  // init-model export generate score
void add_tool_commands(CLI::App& app, CommandContext& context);   // init-task grade replay report
void add_bench_commands(CLI::App& app, CommandContext& context);  // bench rollout|decode|train|step|checkpoint|ops

// Parses and runs; exceptions become one sentence on stderr and an exit code.
int cli_main(int argc, char** argv);

}  // namespace trireme
