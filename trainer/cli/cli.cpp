#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "api/runtime.h"
#include "base/log.h"
#include "base/sigpipe.h"
#include "base/text.h"
#include "trainer/cli/commands.h"
#include "trainer/cli/environment.h"
#include "trainer/parallel/communicator.h"

namespace trireme {
namespace {

std::atomic<int> g_signal{0};
std::atomic<bool> g_signals_are_read{false};

void on_signal(int number) {
  g_signal.store(number);
  if (g_signals_are_read.load()) return;
  if (::getpid() == 1) ::_exit(128 + number);  // the kernel spares a container's first process the default
  ::signal(number, SIG_DFL);
  ::raise(number);  // ends the process when this handler returns
}

}  // namespace

int cli_main(int argc, char** argv) {
  struct sigaction action {};
  action.sa_handler = on_signal;
  ::sigaction(SIGTERM, &action, nullptr);
  ::sigaction(SIGINT, &action, nullptr);
  // Whoever started this may ignore it, which is inherited: then the kernel keeps no child's status to wait for.
  ::signal(SIGCHLD, SIG_DFL);
  ignore_sigpipe();
  disable_flight_recorder();

  CLI::App app{"Trireme: reinforcement learning of language models", "trireme"};
  app.footer("Options of a command: trireme COMMAND --help. Manual: docs/running.md");
  app.require_subcommand(1);
  app.set_version_flag("--version", "trireme 0.1.0");
  CommandContext context;
  std::vector<std::string> words(argv, argv + argc);
  words[0] = std::filesystem::path(words[0]).filename().string();  // kept in result files
  context.command = join(words, " ");
  context.signal = &g_signal;
  context.read_signals = [] { g_signals_are_read.store(true); };
  add_train_commands(app, context);
  add_plan_commands(app, context);
  add_model_commands(app, context);
  add_tool_commands(app, context);
  add_bench_commands(app, context);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : kExitConfig;
  }
  try {
    return context.run();
  } catch (const std::exception& error) {
    return say_error(error);
  }
}

}  // namespace trireme
