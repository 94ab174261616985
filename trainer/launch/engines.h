// Engines: the generation processes beside the ranks of a launch on one machine. None of them is needed for the result:
// one that ends is started again, a few times. The ranks of an engine are started, and end, together.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/subprocess.h"
#include "trainer/launch/launch.h"
#include "trainer/launch/orphans.h"
#include "trainer/launch/output_tail.h"

namespace trireme {

// Called from the launcher's thread.
class Engines final {
 public:
  // Starts them: `port` is that of the ranks' store. `options` and `orphans` outlive it.
  Engines(const LaunchOptions& options, int port, Orphans& orphans);

  // Starts those again that have ended and whose time has come; one that cannot be started has failed once more.
  void look();
  // None runs, and none will: each has ended by a mistake in its configuration.
  bool hopeless() const;
  // The last lines of one that has ended so.
  std::vector<std::string> last_lines() const { return last_lines_; }
  // The ranks have ended: engines leave by themselves, or `at_once` by SIGTERM, or are killed after the grace.
  void end(bool at_once);

 private:
  struct Rank {
    std::optional<Subprocess> process;  // that runs
    std::unique_ptr<OutputTail> tail;
    bool killed = false;             // by this launcher, behind another one's failure
    ExitStatus status;               // when it has ended, and
    std::vector<std::string> words;  // its last lines
  };
  struct Engine {
    int number = 0;
    std::vector<Rank> ranks;  // none: it does not run
    int failures = 0;
    bool over = false;  // it is not started again
    bool refused = false;
    Deadline again{SteadyClock::time_point::max()};
    Deadline kill{SteadyClock::time_point::max()};  // ranks that stay behind one that has failed
    std::string name() const { return "engine-" + std::to_string(number); }
  };
  void start(Engine& engine);
  void restart(Engine& engine);
  void start_rank(const Engine& engine, int number, Rank& rank);
  void look(Engine& engine);
  bool running(const Engine& engine) const;
  const Rank& cause(const Engine& engine) const;
  void ended(Engine& engine);
  // Starts it again later, or never; `words`: its last lines.
  void failed(Engine& engine, const std::string& what, const std::vector<std::string>& words);
  void let_go(Rank& rank, const ExitStatus& status);

  const LaunchOptions& options_;
  const int port_;
  Orphans& orphans_;
  std::vector<Engine> engines_;
  std::vector<std::string> last_lines_;
};

}  // namespace trireme
