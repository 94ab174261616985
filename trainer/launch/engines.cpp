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
  engine.again = engine.kill = Deadline(SteadyClock::time_point::max());
  engine.ranks.resize(static_cast<size_t>(options_.engine_ranks));
  for (int number = 0; number < options_.engine_ranks; ++number)
    start_rank(engine, number, engine.ranks[static_cast<size_t>(number)]);
}

void Engines::start_rank(const Engine& engine, int number, Rank& rank) {
  SpawnOptions spawn;
  spawn.argv = options_.engine_command;
  spawn.set_env = options_.environment;
  spawn.set_env["TRIREME_ROLE"] = "generation";
  spawn.set_env["TRIREME_ENGINE_NAME"] = engine.name();
  spawn.set_env["TRIREME_ENGINE_START"] = std::to_string(engine.failures);
  spawn.set_env["MASTER_ADDR"] = options_.master_address;
  spawn.set_env["MASTER_PORT"] = std::to_string(port_);
  // Devices behind those of the ranks, a critic's among them.
  const int device = options_.first_gpu + options_.processes + options_.critic_ranks;
  spawn.set_env["LOCAL_RANK"] = std::to_string(device + engine.number * options_.engine_ranks + number);
  spawn.set_env["LOCAL_WORLD_SIZE"] = std::to_string(options_.engines * options_.engine_ranks);
  const bool several = options_.engine_ranks > 1;
  spawn.set_env["RANK"] = several ? std::to_string(number) : "";
  spawn.set_env["WORLD_SIZE"] = several ? std::to_string(options_.engine_ranks) : "";
  for (const char* name : {"TRIREME_LISTEN_FD", "TRIREME_LAUNCHER_FD", "TRIREME_FAULT"}) spawn.set_env[name] = "";
  // A failure on purpose is of the first one's first start: those behind it shall go on.
  if (engine.number > 0 || engine.failures > 0) spawn.set_env["TRIREME_ENGINE_FAULT"] = "";
  spawn.pipe_stderr = true;
  rank.process = Subprocess::spawn(spawn);
  orphans_.keep(rank.process->pid());
  rank.tail = std::make_unique<OutputTail>(rank.process->stderr_fd(), static_cast<size_t>(options_.tail_lines));
}

// One that has ended.
void Engines::let_go(Rank& rank, const ExitStatus& status) {
  rank.status = status;
  orphans_.forget(rank.process->pid());
  rank.tail->stop();
  rank.words = rank.tail->lines(Deadline::after(kEngineWords));
  rank.tail.reset();  // before the descriptor that it reads
  rank.process.reset();
}

bool Engines::running(const Engine& engine) const {
  return std::any_of(engine.ranks.begin(), engine.ranks.end(),
                     [](const Rank& rank) { return rank.process.has_value(); });
}

// Of ranks that have ended the one that explains the others: who lost a peer is an echo.
const Engines::Rank& Engines::cause(const Engine& engine) const {
  const auto find = [&](auto&& is) { return std::find_if(engine.ranks.begin(), engine.ranks.end(), is); };
  auto found = find([&](const Rank& rank) {
    return !rank.status.ok() && !rank.killed &&
           (rank.status.signal != 0 || rank.status.code != options_.peer_failed_code);
  });
  if (found == engine.ranks.end()) found = find([](const Rank& rank) { return !rank.status.ok() && !rank.killed; });
  return found == engine.ranks.end() ? engine.ranks.front() : *found;
}

// All of its ranks have.
void Engines::ended(Engine& engine) {
  const Rank& rank = cause(engine);
  const ExitStatus status = rank.status;
  const std::vector<std::string> words = rank.words;
  const std::string what =
      (engine.ranks.size() == 1 ? "" : "rank " + std::to_string(&rank - engine.ranks.data()) + " of ") + engine.name() +
      " ended with " + status.describe();
  engine.ranks.clear();
  engine.over = status.ok();
  if (engine.over) return;
  engine.refused = status.signal == 0 && status.code == options_.config_code;
  failed(engine, what, words);
}

void Engines::failed(Engine& engine, const std::string& what, const std::vector<std::string>& words) {
  if (engine.refused || engine.failures == kRestarts) {
    engine.over = true;
    last_lines_ = words;
    log_error("launch", what + "; it is not started again");
    return;
  }
  const Milliseconds pause = kFirstPause * (1 << engine.failures);
  ++engine.failures;
  engine.again = Deadline::after(pause);
  log_warn("launch", what + "; it is started again in " + std::to_string(pause.count() / 1000) + " s");
}

// The machine may have no process or file left for the moment: that is no reason to end the ranks.
void Engines::restart(Engine& engine) {
  try {
    start(engine);
  } catch (const std::exception& error) {
    for (Rank& rank : engine.ranks) {
      if (!rank.process) continue;
      rank.process->terminate(Milliseconds(0));
      orphans_.forget(rank.process->pid());
    }
    engine.ranks.clear();
    failed(engine, engine.name() + " could not be started: " + error.what(), {});
  }
}

void Engines::look(Engine& engine) {
  for (Rank& rank : engine.ranks) {
    if (!rank.process) continue;
    const auto status = rank.process->poll();
    if (!status) continue;
    let_go(rank, *status);
    if (!status->ok() && engine.kill.at() == SteadyClock::time_point::max())
      engine.kill = Deadline::after(options_.failure_grace);
  }
  if (engine.kill.passed()) {
    for (Rank& rank : engine.ranks) {
      if (!rank.process) continue;
      rank.killed = true;
      rank.process->signal(SIGKILL);
    }
  }
  if (!running(engine)) ended(engine);
}

void Engines::look() {
  for (Engine& engine : engines_) {
    if (!engine.ranks.empty()) {
      look(engine);
    } else if (!engine.over && engine.again.passed()) {
      restart(engine);
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
    for (Rank& rank : engine.ranks)
      if (rank.process && at_once) rank.process->signal(SIGTERM);
    while (running(engine)) {
      for (Rank& rank : engine.ranks) {
        if (!rank.process) continue;
        if (const auto status = rank.process->poll()) {
          if (!status->ok()) log_info("launch", engine.name() + " ended with " + status->describe());
          let_go(rank, *status);
        } else if (deadline.passed()) {
          log_warn("launch", engine.name() + " still runs " + std::to_string(options_.engine_grace.count() / 1000) +
                                 " s after the last rank: killing it");
          let_go(rank, rank.process->terminate(Milliseconds(2000)));
        }
      }
      std::this_thread::sleep_for(kEnginePoll);
    }
  }
}

}  // namespace trireme
