#include "trainer/launch/launch.h"

#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/subprocess.h"
#include "base/text.h"
#include "trainer/parallel/lifeline.h"

namespace trireme {
namespace {

// Copies a child's stderr to ours line by line and keeps the last lines.
class OutputTail final {
 public:
  OutputTail(int fd, size_t keep) : keep_(keep), reader_([this, fd] { read_all(fd); }) {}
  ~OutputTail() {
    if (reader_.joinable()) reader_.join();
  }
  // After the child and its group are gone: waits for the rest of the pipe.
  std::vector<std::string> finish() {
    if (reader_.joinable()) reader_.join();
    const std::lock_guard<std::mutex> lock(mutex_);
    return {lines_.begin(), lines_.end()};
  }

 private:
  void take(const std::string& line) {
    const std::string out = line + "\n";
    (void)!::write(STDERR_FILENO, out.data(), out.size());
    const std::lock_guard<std::mutex> lock(mutex_);
    lines_.push_back(line.substr(0, 2000));
    if (lines_.size() > keep_) lines_.pop_front();
  }
  void read_all(int fd) {
    std::string rest;
    char buffer[8192];
    while (true) {
      const ssize_t got = ::read(fd, buffer, sizeof buffer);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) break;
      rest.append(buffer, static_cast<size_t>(got));
      size_t end;
      while ((end = rest.find('\n')) != std::string::npos) {
        take(rest.substr(0, end));
        rest.erase(0, end + 1);
      }
    }
    if (!rest.empty()) take(rest);
  }

  const size_t keep_;
  std::mutex mutex_;
  std::deque<std::string> lines_;
  std::thread reader_;
};

struct Rank {
  int rank = 0;
  Subprocess process;
  std::unique_ptr<OutputTail> tail;
  std::optional<ExitStatus> status;
  bool killed = false;  // by us, after another's failure
};

int code_of(const ExitStatus& status) { return status.signal != 0 ? 128 + status.signal : status.code; }

constexpr size_t kMaxTerminationBytes = 4096;  // Kubernetes cuts a longer termination message

void write_termination_log(const LaunchOptions& options, const LaunchResult& result) {
  if (options.termination_log.empty()) return;
  nlohmann::json account = {{"rank", result.failed_rank}, {"cause", result.cause}, {"exitCode", result.exit_code}};
  std::string tail = join(result.tail, "\n");
  std::string text;
  for (size_t limit = 4000; limit > 0; limit /= 2) {
    if (tail.size() > limit) tail.erase(0, tail.size() - limit);
    account["logTail"] = tail;
    text = account.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    if (text.size() <= kMaxTerminationBytes) break;
  }
  // The kubelet mounts this file: it is written in place.
  std::FILE* file = std::fopen(options.termination_log.c_str(), "w");
  if (file == nullptr) return;
  std::fwrite(text.data(), 1, text.size(), file);
  std::fclose(file);
}

}  // namespace

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const bool ok = fd >= 0 && ::bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  const int code = errno;
  if (fd >= 0) ::close(fd);
  if (!ok) fail_io(std::string("cannot find a free port: ") + std::strerror(code));
  return ntohs(address.sin_port);
}

LaunchResult launch(const LaunchOptions& options, const std::atomic<int>* signal) {
  const int world = options.processes * options.nodes;
  int port = options.master_port;
  if (port == 0 && options.nodes > 1) fail_user("several nodes need a master port: set MASTER_PORT or --master-port");
  if (port == 0 && world > 1) port = free_port();

  std::vector<Rank> ranks;
  for (int local = 0; local < options.processes; ++local) {
    const int rank = options.node_rank * options.processes + local;
    SpawnOptions spawn;
    spawn.argv = options.command;
    spawn.set_env = options.environment;
    spawn.set_env["RANK"] = std::to_string(rank);
    spawn.set_env["LOCAL_RANK"] = std::to_string(local);
    spawn.set_env["WORLD_SIZE"] = std::to_string(world);
    spawn.set_env["LOCAL_WORLD_SIZE"] = std::to_string(options.processes);
    spawn.set_env["MASTER_ADDR"] = options.master_address;
    spawn.set_env["MASTER_PORT"] = std::to_string(port);
    spawn.pipe_stderr = true;
    if (options.processes > 1) {
      spawn.pipe_stdin = true;
      spawn.set_env["TRIREME_LAUNCHER_FD"] = "0";
    }
    ranks.push_back({rank, Subprocess::spawn(spawn), nullptr, std::nullopt});
    ranks.back().tail =
        std::make_unique<OutputTail>(ranks.back().process.stderr_fd(), static_cast<size_t>(options.tail_lines));
  }

  LaunchResult result;
  int first_failed = -1;  // index into ranks
  bool forwarded = false, stopped = false, ended_before_start = false;
  const Deadline never(SteadyClock::time_point::max());
  Deadline kill_at = never, term_at = never;
  const auto all_ended = [&] {
    for (const Rank& rank : ranks) {
      if (!rank.status) return false;
    }
    return true;
  };
  // A rank that lost its peer is the echo of another's failure, also when it is noticed first.
  const auto is_echo = [&](const Rank& r) {
    return r.status->signal == 0 && r.status->code == options.peer_failed_code;
  };
  while (!all_ended()) {
    // Before ranks are looked at: who sends it to all at once ends those that have not begun by it.
    const int number = signal == nullptr ? 0 : signal->load();
    if (number != 0 && !forwarded) {
      forwarded = true;
      log_info("launch", "got signal " + std::to_string(number) + ", forwarding it to " + std::to_string(ranks.size()) +
                             " ranks");
      for (Rank& rank : ranks) rank.process.signal(number == SIGINT ? SIGTERM : number);
      kill_at = Deadline::after(options.grace);
    }
    for (size_t i = 0; i < ranks.size(); ++i) {
      Rank& rank = ranks[i];
      if (rank.status) continue;
      rank.status = rank.process.poll();
      if (!rank.status || rank.status->ok() || rank.killed) continue;
      // Stopped as it was told to, after saving: its code is the result, but nothing has failed.
      if (forwarded && rank.status->signal == 0 && rank.status->code == options.stopped_code) {
        stopped = true;
        continue;
      }
      // Nor has one that had not begun yet.
      if (forwarded && (rank.status->signal == SIGTERM || rank.status->signal == SIGINT)) {
        ended_before_start = true;
        continue;
      }
      // Who lost a peer, or stopped after saving, has nothing to tell: all ranks do that together.
      if (!is_echo(rank) && !(rank.status->signal == 0 && rank.status->code == options.stopped_code)) {
        for (const Rank& other : ranks) {
          if (!other.status) other.process.tell(died_message(rank.rank, rank.status->describe()));
        }
      }
      if (first_failed >= 0 && (!is_echo(ranks[static_cast<size_t>(first_failed)]) || is_echo(rank))) continue;
      const bool again = first_failed >= 0;
      first_failed = static_cast<int>(i);
      if (again) continue;
      if (!forwarded)
        log_error("launch", "rank " + std::to_string(rank.rank) + " ended with " + rank.status->describe());
      term_at = Deadline::after(options.failure_grace);
    }
    if (term_at.passed()) {
      for (Rank& rank : ranks) {
        if (rank.status) continue;
        rank.killed = true;
        result.killed_ranks.push_back(rank.rank);
        log_error("launch", "rank " + std::to_string(rank.rank) + " still runs " +
                                std::to_string(options.failure_grace.count() / 1000) +
                                " s after that: it is stuck, or far behind; killing it");
        rank.process.signal(SIGKILL);
      }
      term_at = never;
    }
    if (kill_at.passed()) {
      log_error("launch", "ranks did not end within the grace period: killing them");
      for (Rank& rank : ranks) rank.process.signal(SIGKILL);
      kill_at = never;
    }
    std::this_thread::sleep_for(Milliseconds(10));
  }
  for (Rank& rank : ranks) rank.process.signal_group(SIGKILL);  // what they may have left behind
  // Nor is the peer of a rank that a signal ended before its start a failure.
  if (first_failed < 0 || (ended_before_start && is_echo(ranks[static_cast<size_t>(first_failed)]))) {
    for (Rank& rank : ranks) rank.tail->finish();
    if (ended_before_start) result.exit_code = 128 + SIGTERM;
    if (stopped) result.exit_code = options.stopped_code;
    return result;
  }
  Rank& failed = ranks[static_cast<size_t>(first_failed)];
  result.exit_code = code_of(*failed.status);
  result.failed_rank = failed.rank;
  result.cause = failed.status->describe();
  for (Rank& rank : ranks) {
    const std::vector<std::string> lines = rank.tail->finish();
    if (&rank == &failed) result.tail = lines;
  }
  if (world > 1) {
    log_error("launch",
              "rank " + std::to_string(result.failed_rank) + " failed first (" + result.cause + "); its last lines:");
    for (const std::string& line : result.tail) log_error("launch", "  " + line);
  }
  write_termination_log(options, result);
  return result;
}

}  // namespace trireme
