// Child processes: pipes, environment, own process group, deadlines. No shell is involved unless the caller names one.
#pragma once

#include <sys/types.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"

namespace trireme {

struct ExitStatus {
  int code = -1;   // valid when signal == 0
  int signal = 0;  // the signal that ended it, or 0
  bool ok() const { return signal == 0 && code == 0; }
  std::string describe() const;  // "exit code 3" | "signal 9 (Killed)"
};

struct SpawnOptions {
  std::vector<std::string> argv;               // argv[0] is looked up in PATH
  std::map<std::string, std::string> set_env;  // added to (or over) the parent's environment
  std::string working_directory;               // empty: the parent's
  bool pipe_stdin = false;                     // else /dev/null
  bool pipe_stdout = false;                    // else inherited
  bool pipe_stderr = false;                    // else inherited
  bool merge_stderr = false;                   // stderr into the stdout pipe
  int keep_fd = -1;                            // the one descriptor above 2 that it has too, under the same number
  bool own_group = true;                       // a process group of its own, which ends when the child has ended
  bool die_with_parent = true;                 // PR_SET_PDEATHSIG, SIGKILL
};

// One child. Not thread-safe except where said; destruction kills the group and reaps it. With own_group whatever of
// the group outlives the child is killed when its end is seen.
class Subprocess final {
 public:
  static Subprocess spawn(const SpawnOptions& options);  // throws Error(kUser) when the program cannot be executed
  Subprocess(Subprocess&& other) noexcept;
  Subprocess& operator=(Subprocess&& other) noexcept;
  ~Subprocess();

  pid_t pid() const { return pid_; }
  int stdin_fd() const { return stdin_fd_; }
  int stdout_fd() const { return stdout_fd_; }
  int stderr_fd() const { return stderr_fd_; }
  void close_stdin();
  // Writes to its stdin (pipe_stdin) what the pipe takes at once; a child that has ended or does not read loses it.
  void tell(const std::string& text) const;

  // Exit status if it has ended (reaps it), else nothing.
  std::optional<ExitStatus> poll();
  // Waits until the deadline; nothing when it passed.
  std::optional<ExitStatus> wait(const Deadline& deadline);
  void signal(int number) const;        // to the child; nothing after it was reaped
  void signal_group(int number) const;  // to its whole group (own_group); nothing after it was reaped
  // SIGTERM to the group, SIGKILL after the grace period; returns the status.
  ExitStatus terminate(Milliseconds grace);

 private:
  Subprocess() = default;
  void close_all();
  pid_t pid_ = -1;
  bool own_group_ = false;
  int stdin_fd_ = -1;
  int stdout_fd_ = -1;
  int stderr_fd_ = -1;
  std::optional<ExitStatus> status_;
};

struct RunResult {
  ExitStatus status;
  std::string output;  // stdout (and stderr when merged)
  bool timed_out = false;
};

// Runs to the end: writes `input` to stdin, collects the output, kills the group at the deadline.
RunResult run_process(SpawnOptions options, const std::string& input, const Deadline& deadline);

}  // namespace trireme
