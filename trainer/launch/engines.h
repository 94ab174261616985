// Engines: the generation processes beside the ranks of a launch on one machine. None of them is needed for the result:
// one that ends is started again, a few times.
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

  // Starts those again that have ended and whose time has come.
  void look();
  // None runs, and none will: each has ended by a mistake in its configuration.
  bool hopeless() const;
  // The last lines of one that has ended so.
  std::vector<std::string> last_lines() const { return last_lines_; }
  // The ranks have ended: engines leave by themselves, or `at_once` by SIGTERM, or are killed after the grace.
  void end(bool at_once);

 private:
  struct Engine {
    int number = 0;
    std::optional<Subprocess> process;  // that runs
    std::unique_ptr<OutputTail> tail;
    int failures = 0;
    bool over = false;  // it is not started again
    bool refused = false;
    Deadline again{SteadyClock::time_point::max()};
  };
  void start(Engine& engine);
  void ended(Engine& engine, const ExitStatus& status);
  std::vector<std::string> let_go(Engine& engine);

  const LaunchOptions& options_;
  const int port_;
  Orphans& orphans_;
  std::vector<Engine> engines_;
  std::vector<std::string> last_lines_;
};

}  // namespace trireme
