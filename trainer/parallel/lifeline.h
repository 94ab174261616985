// Lifeline: which ranks' processes are still there, seen by connections that the kernel closes with a process.
// Named after a diver's line to the boat: that it parts is the news. Elsewhere: a failure detector.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.h"

namespace trireme {

// A line between ranks, or from the launcher. Pure.
struct LifelineMessage {
  enum class Kind {
    kUnknown,
    kJoin,   // "join SECRET RANK": a rank to rank 0, first of all
    kAll,    // "all": rank 0, when every rank has joined
    kPhase,  // "phase NAME": a rank to rank 0
    kDied,   // "died RANK HOW": the launcher to its ranks, and they to rank 0
    kDead,   // "dead SENTENCE": rank 0 to all
    kBye,    // "bye": it leaves by itself
  };
  Kind kind = Kind::kUnknown;
  int rank = -1;
  std::string text;  // secret, phase, how, sentence
};
LifelineMessage parse_lifeline_message(std::string_view line);
std::string died_message(int rank, const std::string& how);  // a whole line

struct LifelineOptions {
  int rank = 0;
  int world_size = 1;
  int launcher_fd = -1;  // where the launcher writes which of this host's ranks died, and how; -1: nowhere
  std::function<std::string(int rank)> name_of;  // with its place in the layout; empty: "rank N"
  // From the first sign of a death until all are told of it: the launcher's word comes, and that of other deaths.
  Milliseconds settle{1000};
  // From when this rank has been told until it leaves: the training thread may have met the same and say more. The
  // second: after leaving() was called.
  Milliseconds patience{4000}, leaving_patience{15000};
  std::function<void(const std::string& what)> on_death;  // leaves; called from the thread, at most once. May be empty
};

// Every rank holds one connection to rank 0; nothing is sent over it but a rank's phase and what is said here. When a
// process ends, however it does, the kernel closes the connection: that is a death, unless the rank had said goodbye. A
// process that is stopped or busy keeps it, for as long as it likes: the kernel answers for it. A machine that does not
// answer for 60 s (kUnreachable) is taken for dead. Rank 0 tells the others; its own death they see themselves.
//
// All calls are safe from any thread and do not wait for a peer, except where a deadline is given.
class Lifeline final {
 public:
  static constexpr Milliseconds kUnreachable{60000}, kWord{2500};

  // Starts the thread; from now on the launcher's word counts.
  explicit Lifeline(const LifelineOptions& options);
  // Says goodbye, unless an exception that nobody was told of (leaving()) ends this rank: then it is a death to the
  // others.
  ~Lifeline();
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

  // Rank 0: listens. The ticket ("PORT SECRET") lets the others join.
  std::string open();
  // The others: connects to rank 0. Throws Error(kUnavailable) when it cannot be reached.
  void join(const std::string& host, const std::string& ticket, const Deadline& deadline);
  // Returns when all ranks have joined. Throws Error(kUnavailable) naming who has died, Error(kTimeout) at the deadline
  // (on rank 0 naming who has not come).
  void wait_for_all(const Deadline& deadline);

  // The training thread is in this phase from now on.
  void set_phase(const std::string& phase);
  std::string phase();  // "start" at first
  // "rank 1 has died in phase training: signal 9 (Killed)", several with "; " between them. The same on all ranks.
  std::optional<std::string> dead();
  // Waits for it, but not when rank 0 has left, who would tell. In kWord a death that has broken something is known.
  std::optional<std::string> wait_for_dead(Milliseconds time = kWord);
  bool rank0_is_gone();  // dead or left, and the store with it
  // A sentence that says more about the failure of which a death is the end.
  void explain(const std::string& what);
  // The training thread has an error that the others know or will see as well, and leaves.
  void leaving();
  // This rank is about to end, and its end is no death. Nothing is called any more.
  void goodbye();

 private:
  struct Connection {
    int fd = -1;
    int rank = -1;  // -1: has not joined yet
    std::string in, out, phase;
    bool left = false;   // said goodbye
    bool ended = false;  // to be closed
    SteadyClock::time_point since{};
  };
  struct Death {
    std::string how, phase;  // phase: empty when it is not known
  };
  void run();
  // The others under mutex_.
  bool accept_all();
  void read_from(Connection& connection);
  void read_launcher();
  void take(Connection& connection, const LifelineMessage& message);
  void send(Connection& connection, const std::string& line);
  void flush(Connection& connection);
  void ended(Connection& connection, const std::string& how);
  void note_death(int rank, const std::string& how, const std::string& phase);
  void declare(const std::string& sentence);
  std::string name_of(int rank) const;
  std::string describe_deaths() const;
  void say_goodbye();
  Connection* hub();  // of another rank: its connection to rank 0, while there is one
  std::vector<int> not_joined() const;
  SteadyClock::time_point next_turn() const;
  void wake();

  const LifelineOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int wake_fd_ = -1, listen_fd_ = -1, launcher_fd_ = -1;
  std::string secret_, launcher_in_, phase_ = "start";
  std::string accept_error_;
  std::vector<Connection> connections_;  // added to by join() and the thread, removed from by the thread
  std::vector<bool> joined_;             // rank 0: by rank
  bool all_ = false, hub_left_ = false;
  std::map<int, Death> deaths_;  // by rank
  SteadyClock::time_point settle_at_{};
  std::optional<std::string> declared_, explained_;
  SteadyClock::time_point declared_at_{};
  bool leaving_ = false, goodbye_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace trireme
