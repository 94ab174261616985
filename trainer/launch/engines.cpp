#include "trainer/launch/engines.h"

#include <signal.h>

#include <algorithm>
#include <thread>

#include "base/log.h"

namespace trireme {
namespace {

constexpr int kRestarts = 5;  // of one engine
constexpr Milliseconds kFirstPause{1000};
constexpr Milliseconds kEngineWords{2000};  // for the last lines of one that has ended
constexpr Milliseconds kEnginePoll{10};

}  // namespace

Engines::Engines(const LaunchOptions& options, int port, Orphans& orphans)
    : options_(options), port_(port), orphans_(orphans) {
  engines_.resize(static_cast<size_t>(options.engines));
  for (size_t i = 0; i < engines_.size(); ++i) {
    engines_[i].number = static_cast<int>(i);
    start(engines_[i]);
  }
}

void Engines::start(Engine& engine) {
  SpawnOptions spawn;
  spawn.argv = options_.engine_command;
  spawn.set_env = options_.environment;
  spawn.set_env["TRIREME_ROLE"] = "generation";
  spawn.set_env["TRIREME_ENGINE_NAME"] = "engine-" + std::to_string(engine.number);
  spawn.set_env["MASTER_ADDR"] = options_.master_address;
  spawn.set_env["MASTER_PORT"] = std::to_string(port_);
  // Devices behind those of the ranks, a critic's among them.
  spawn.set_env["LOCAL_RANK"] =
      std::to_string(options_.first_gpu + options_.processes + options_.critic_ranks + engine.number);
  spawn.set_env["LOCAL_WORLD_SIZE"] = std::to_string(options_.engines);
  for (const char* name : {"RANK", "WORLD_SIZE", "TRIREME_LISTEN_FD", "TRIREME_LAUNCHER_FD", "TRIREME_FAULT"})
    spawn.set_env[name] = "";
  // A failure on purpose is of the first one's first start: those behind it shall go on.
  if (engine.number > 0 || engine.failures > 0) spawn.set_env["TRIREME_ENGINE_FAULT"] = "";
  spawn.pipe_stderr = true;
  engine.process = Subprocess::spawn(spawn);
  engine.again = Deadline(SteadyClock::time_point::max());
  orphans_.keep(engine.process->pid());
  engine.tail = std::make_unique<OutputTail>(engine.process->stderr_fd(), static_cast<size_t>(options_.tail_lines));
}

// Of one that has ended: its last lines.
std::vector<std::string> Engines::let_go(Engine& engine) {
  orphans_.forget(engine.process->pid());
  engine.tail->stop();
  std::vector<std::string> words = engine.tail->lines(Deadline::after(kEngineWords));
  engine.tail.reset();  // before the descriptor that it reads
  engine.process.reset();
  return words;
}

void Engines::ended(Engine& engine, const ExitStatus& status) {
  const std::vector<std::string> words = let_go(engine);
  engine.over = status.ok();
  if (engine.over) return;
  engine.refused = status.signal == 0 && status.code == options_.config_code;
  const std::string who = "engine-" + std::to_string(engine.number) + " ended with " + status.describe();
  if (engine.refused || engine.failures == kRestarts) {
    engine.over = true;
    last_lines_ = words;
    log_error("launch", who + "; it is not started again");
    return;
  }
  const Milliseconds pause = kFirstPause * (1 << engine.failures);
  ++engine.failures;
  engine.again = Deadline::after(pause);
  log_warn("launch", who + "; it is started again in " + std::to_string(pause.count() / 1000) + " s");
}

void Engines::look() {
  for (Engine& engine : engines_) {
    if (engine.process) {
      if (const auto status = engine.process->poll()) ended(engine, *status);
    } else if (!engine.over && engine.again.passed()) {
      start(engine);
    }
  }
}

bool Engines::hopeless() const {
  return !engines_.empty() &&
         std::all_of(engines_.begin(), engines_.end(), [](const Engine& engine) { return engine.refused; });
}

void Engines::end(bool at_once) {
  const Deadline deadline = Deadline::after(options_.engine_grace);
  for (Engine& engine : engines_) {
    const std::string who = "engine-" + std::to_string(engine.number);
    if (engine.process && at_once) engine.process->signal(SIGTERM);
    while (engine.process) {
      if (const auto status = engine.process->poll()) {
        if (!status->ok()) log_info("launch", who + " ended with " + status->describe());
        let_go(engine);
      } else if (deadline.passed()) {
        log_warn("launch", who + " still runs " + std::to_string(options_.engine_grace.count() / 1000) +
                               " s after the last rank: killing it");
        engine.process->terminate(Milliseconds(2000));
        let_go(engine);
      } else {
        std::this_thread::sleep_for(kEnginePoll);
      }
    }
  }
}

}  // namespace trireme
