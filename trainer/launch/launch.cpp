#include "trainer/launch/launch.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/subprocess.h"
#include "base/text.h"
#include "trainer/launch/engines.h"
#include "trainer/launch/orphans.h"
#include "trainer/launch/output_tail.h"
#include "trainer/launch/reserved_port.h"
#include "trainer/parallel/lifeline.h"

namespace trireme {
namespace {

struct Rank {
  int rank = 0;  // of its role
  bool of_critic = false;
  int job_rank = 0;
  Subprocess process;
  std::unique_ptr<OutputTail> tail;
  std::optional<ExitStatus> status;
  bool killed = false;  // by us, after another's failure
  bool late = false;    // killed by us: it had not ended within the grace after a signal

  std::string name() const { return (of_critic ? "critic rank " : "rank ") + std::to_string(rank); }
};

int code_of(const ExitStatus& status) { return status.signal != 0 ? 128 + status.signal : status.code; }

constexpr size_t kMaxTerminationBytes = 4096;  // Kubernetes cuts a longer termination message
constexpr Milliseconds kLastWords{2000};       // for the last lines of a rank that has ended

void write_termination_log(const LaunchOptions& options, const LaunchResult& result) {
  if (options.termination_log.empty()) return;
  nlohmann::json account = {{"rank", result.failed_rank}, {"cause", result.cause}, {"exitCode", result.exit_code}};
  if (result.failed_critic) account["role"] = "critic";
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

// The ranks of this node, from their start to the end of the last one.
class Ranks final {
 public:
  // `listen_fd`: rank 0's socket of the port; -1: it makes its own.
  Ranks(const LaunchOptions& options, int port, int listen_fd)
      : options_(options), world_(options.processes * options.nodes) {
    for (int local = 0; local < options.processes + options.critic_ranks; ++local) start(local, port, listen_fd);
    if (options.engines > 0) engines_.emplace(options, port, orphans_);
  }

  // Passes `number` on, once, and lets the ranks end by it within the grace period.
  void forward(int number) {
    if (number == 0 || forwarded_) return;
    forwarded_ = true;
    log_info("launch",
             "got signal " + std::to_string(number) + ", forwarding it to " + std::to_string(ranks_.size()) + " ranks");
    for (Rank& rank : ranks_) rank.process.signal(number == SIGINT ? SIGTERM : number);
    kill_at_ = Deadline::after(options_.grace);
  }

  // Notes who has ended, and kills whom the deadlines say.
  void look() {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Rank& rank = ranks_[i];
      if (rank.status) continue;
      rank.status = rank.process.poll();
      if (!rank.status) continue;
      orphans_.forget(rank.process.pid());
      ended(i);
    }
    look_at_engines();
    kill_those_behind();
    if (kill_at_.passed()) {
      log_error("launch", "ranks did not end within the grace period: killing them");
      for (Rank& rank : ranks_) {
        rank.late = !rank.status;
        rank.process.signal(SIGKILL);
      }
      kill_at_ = Deadline(SteadyClock::time_point::max());
    }
    orphans_.reap();
  }

  bool all_ended() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.status.has_value(); });
  }

  // After all have ended: what the launcher ends with, said and written down.
  LaunchResult result() {
    // Whoever they left behind may hold their stderr: what they said themselves is in the pipe, the rest can wait.
    for (Rank& rank : ranks_) rank.tail->stop();
    // Behind a mistake in the configuration they wait for ranks that never were.
    const bool mistake = first_failed_ != nullptr && first_failed_->status->signal == 0 &&
                         first_failed_->status->code == options_.config_code;
    if (engines_) engines_->end(/*at_once=*/mistake);
    if (engines_refused_) {
      result_.exit_code = options_.config_code;
      result_.cause = "no engine could join";
      result_.tail = engines_->last_lines();
      write_termination_log(options_, result_);
      return result_;
    }
    // Nor is the peer of a rank that a signal ended before its start a failure.
    if (first_failed_ == nullptr || (ended_before_start_ && is_echo(*first_failed_))) {
      if (ended_before_start_) result_.exit_code = 128 + SIGTERM;
      if (stopped_) result_.exit_code = options_.stopped_code;
      return result_;
    }
    result_.exit_code = code_of(*first_failed_->status);
    result_.failed_rank = first_failed_->rank;
    result_.failed_critic = first_failed_->of_critic;
    result_.cause = cause_of(*first_failed_);
    const Deadline last_words = Deadline::after(kLastWords);
    result_.tail = first_failed_->tail->lines(last_words);
    write_termination_log(options_, result_);
    if (const int count = orphans_.end_all(Deadline::after(kLastWords)))
      log_warn("launch", "killed " + std::to_string(count) + " processes that the ranks had left behind");
    for (Rank& rank : ranks_) (void)rank.tail->lines(last_words);
    if (world_ + options_.critic_ranks == 1) return result_;
    log_error("launch", first_failed_->name() + " failed first (" + result_.cause + "); its last lines:");
    for (const std::string& line : result_.tail) log_error("launch", "  " + line);
    return result_;
  }

 private:
  // Without an engine the ranks would wait for groups till their deadline.
  void look_at_engines() {
    if (!engines_ || engines_refused_) return;
    engines_->look();
    if (!engines_->hopeless() || first_failed_ != nullptr) return;
    engines_refused_ = true;
    log_error("launch", "no engine could join the run, by mistakes in the configuration (above): ending it");
    for (Rank& rank : ranks_) {
      rank.killed = true;
      rank.process.signal(SIGKILL);
    }
  }

  void start(int local, int port, int listen_fd) {
    const bool behind = local >= options_.processes;  // the critic's, behind this launcher's own
    const bool of_critic = behind || options_.behind_actor_ranks > 0;
    const int rank = behind ? local - options_.processes : options_.node_rank * options_.processes + local;
    const int actors = behind ? world_ : options_.behind_actor_ranks;
    const int all = options_.processes + options_.critic_ranks;
    SpawnOptions spawn;
    spawn.argv = options_.command;
    spawn.set_env = options_.environment;
    spawn.set_env["RANK"] = std::to_string(rank);
    spawn.set_env["LOCAL_RANK"] = std::to_string(options_.first_gpu + local);
    spawn.set_env["WORLD_SIZE"] = std::to_string(behind ? options_.critic_ranks : world_);
    spawn.set_env["LOCAL_WORLD_SIZE"] = std::to_string(all);
    if (options_.critic_ranks > 0) spawn.set_env["TRIREME_CRITIC_RANKS"] = std::to_string(options_.critic_ranks);
    if (behind) {
      spawn.set_env["TRIREME_ROLE"] = "critic";
      spawn.set_env["TRIREME_ACTOR_RANKS"] = std::to_string(world_);
    }
    spawn.set_env["MASTER_ADDR"] = options_.master_address;
    spawn.set_env["MASTER_PORT"] = std::to_string(port);
    spawn.set_env["TRIREME_LISTEN_FD"] = "";  // nobody else's: it would hold the port of a rank 0 that has died
    if (rank == 0 && !of_critic && listen_fd >= 0) {
      spawn.set_env["TRIREME_LISTEN_FD"] = std::to_string(listen_fd);
      spawn.keep_fd = listen_fd;
    }
    spawn.pipe_stderr = true;
    if (all > 1) {
      spawn.pipe_stdin = true;
      spawn.set_env["TRIREME_LAUNCHER_FD"] = "0";
    }
    ranks_.push_back({rank, of_critic, of_critic ? actors + rank : rank, Subprocess::spawn(spawn), nullptr, {}});
    orphans_.keep(ranks_.back().process.pid());
    ranks_.back().tail =
        std::make_unique<OutputTail>(ranks_.back().process.stderr_fd(), static_cast<size_t>(options_.tail_lines));
  }

  // A rank that lost its peer is the echo of another's failure, also when it is noticed first.
  bool is_echo(const Rank& r) const { return r.status->signal == 0 && r.status->code == options_.peer_failed_code; }
  bool is_stopped(const Rank& r) const { return r.status->signal == 0 && r.status->code == options_.stopped_code; }

  // A signal 9 of this launcher's own is not the kernel's for want of memory.
  std::string cause_of(const Rank& rank) const {
    if (!rank.late || rank.status->signal != SIGKILL) return rank.status->describe();
    return "it did not end within the grace of " + std::to_string(options_.grace.count() / 1000) +
           " s after the signal to stop, and was killed";
  }

  // What the end of rank `i` means for the result, and for those that still run.
  void ended(size_t i) {
    Rank& rank = ranks_[i];
    if (rank.status->ok() || rank.killed) return;
    // Stopped as it was told to, after saving: its code is the result, but nothing has failed.
    if (forwarded_ && is_stopped(rank)) {
      stopped_ = true;
      return;
    }
    // Nor has one that had not begun yet.
    if (forwarded_ && (rank.status->signal == SIGTERM || rank.status->signal == SIGINT)) {
      ended_before_start_ = true;
      return;
    }
    // Who lost a peer, or stopped after saving, has nothing to tell: all ranks do that together.
    if (!is_echo(rank) && !is_stopped(rank)) {
      for (const Rank& other : ranks_) {
        if (!other.status) other.process.tell(died_message(rank.job_rank, rank.status->describe()));
      }
    }
    if (first_failed_ != nullptr && (!is_echo(*first_failed_) || is_echo(rank))) return;
    const bool again = first_failed_ != nullptr;
    first_failed_ = &rank;
    if (again) return;
    if (!forwarded_) log_error("launch", rank.name() + " ended with " + rank.status->describe());
    term_at_ = Deadline::after(options_.failure_grace);
  }

  void kill_those_behind() {
    if (!term_at_.passed()) return;
    for (Rank& rank : ranks_) {
      if (rank.status) continue;
      rank.killed = true;
      result_.killed_ranks.push_back(rank.job_rank);
      log_error("launch", rank.name() + " still runs " + std::to_string(options_.failure_grace.count() / 1000) +
                              " s after that: it is stuck, or far behind; killing it");
      rank.process.signal(SIGKILL);
    }
    term_at_ = Deadline(SteadyClock::time_point::max());
  }

  const LaunchOptions& options_;
  const int world_;
  Orphans orphans_;  // ends after the ranks
  std::vector<Rank> ranks_;
  std::optional<Engines> engines_;
  bool engines_refused_ = false;
  Rank* first_failed_ = nullptr;  // of ranks_: the failure that explains the others, as far as is known
  bool forwarded_ = false, stopped_ = false, ended_before_start_ = false;
  Deadline kill_at_{SteadyClock::time_point::max()}, term_at_{SteadyClock::time_point::max()};
  LaunchResult result_;
};

}  // namespace

LaunchResult launch(const LaunchOptions& options, const std::atomic<int>* signal) {
  const int world = options.processes * options.nodes + options.critic_ranks;
  int port = options.master_port;
  if (port == 0 && options.nodes > 1) fail_user("several nodes need a master port: set MASTER_PORT or --master-port");
  int listen_fd = options.listen_fd;
  if (listen_fd >= 0) ::fcntl(listen_fd, F_SETFD, FD_CLOEXEC);
  std::optional<ReservedPort> reserved;
  if (port == 0 && (world > 1 || options.engines > 0)) {
    reserved.emplace();
    port = reserved->port();
    listen_fd = reserved->fd();
  }
  Ranks ranks(options, port, listen_fd);
  // Rank 0 has it now: the port ends with it, and whoever comes then is refused.
  reserved.reset();
  if (options.listen_fd >= 0) ::close(options.listen_fd);
  while (!ranks.all_ended()) {
    // Before ranks are looked at: who sends it to all at once ends those that have not begun by it.
    ranks.forward(signal == nullptr ? 0 : signal->load());
    ranks.look();
    std::this_thread::sleep_for(Milliseconds(10));
  }
  return ranks.result();
}

}  // namespace trireme
