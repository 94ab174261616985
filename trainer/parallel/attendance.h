// Attendance: which collective each rank has come to, so that a rank that does not come is named, and leaves. A roll
// call; elsewhere a collective watchdog, which knows that somebody is missing and not who.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "trainer/parallel/communicator.h"
#include "trainer/parallel/exposed_waits.h"

namespace trireme {

// A collective that a device carries out. Both are asked from Attendance's thread and may not wait.
struct QueuedCollective {
  int64_t sequence = 0;
  std::string operation, phase;
  std::function<bool()> come;  // all that was queued before it is done
  std::function<bool()> done;  // it has ended
};

// Who of a group has not come to one of its collectives.
struct Absence {
  std::string group;
  int64_t sequence = 0;
  std::vector<int> ranks;  // of the job; empty: all have come, or nobody knows
};

// One per rank, for all of its groups. A thread writes this rank's place into the store about once a second while it
// moves, and looks there for a verdict of the others on this rank and for the failure of another. Nothing here waits
// for a peer or throws, except open().
//
// A host collective has the deadline of its transport. One that a device carries out returns to the host at once, so
// its deadline is kept here: rendezvous.timeout from the moment at which this rank's device came to it, or, where the
// device does not come, from when it was queued.
//
// Who is absent from one group may itself wait in another. The cause is whoever waits nowhere: each rank writes where
// it waits, and the chain is followed over the groups.
class Attendance final {
 public:
  // `store` must outlive it. rendezvous.on_stuck and on_deadline are called from the thread, one of them at most once:
  // on_stuck when the others have given up waiting for this rank and it has not come within rendezvous.stuck_grace
  // either, or when its device has not come to a collective in time; on_deadline when a collective of its device does
  // not end, since others do not come or have failed, or when it waits elsewhere rendezvous.failure_patience after the
  // failure of another.
  Attendance(JobStore& store, const RendezvousOptions& rendezvous);
  ~Attendance();
  Attendance(const Attendance&) = delete;
  Attendance& operator=(const Attendance&) = delete;

  // A group that this rank is in; the result names it below. Writes its ranks into the store.
  int open(const RankGroup& group);
  // Ranks of the job that have not come, before this one leaves because of it. From any thread. When it returns the one
  // before is not under way any more.
  void set_on_absent(std::function<void(const std::vector<int>& ranks)> on_absent);

  // The training thread begins collective `sequence` of the group.
  void note(int group, int64_t sequence);
  // The host waits in the last collective noted of the group, until it does no more.
  void note_waiting(int group);
  void note_waited();
  // The training thread is in this phase from now on.
  void set_phase(const std::string& phase);
  std::string phase();
  // After note() of the same sequence: a device has it to do.
  void note_queued(int group, QueuedCollective collective);
  // What this rank has waited for others, of all its groups but the world's.
  ExposedWaits waits;

  // After collective `sequence` has failed here. When its deadline had passed: the ranks that have not come, once those
  // that have had the time to say so (seconds); tells them. When it failed earlier, since a peer left: what a peer
  // whose deadline had passed says. Calls on_absent.
  Absence absent(int group, int64_t sequence);
  // "; rank 3 on node-b has not come (last seen at number 40, phase generation)", for what absent() of `group`
  // returned.
  std::string describe(const Absence& absence, int group);
  // "rank 3", with its place in the layout where that says more.
  std::string name_of(int rank) const;
  // Of a rank of the job, as it was written last; empty: not yet. Throws what the store does.
  std::string phase_of(int rank);

  // This rank leaves with an error of its own: the others are told, so that they need not wait for their deadline. Only
  // the first failure of a job is kept. Returns when the others have had the time to read it.
  void report_failure(const std::string& what);
  // This rank leaves, since another has failed: its end is no death to the others.
  void leaving();
  // This rank throws `error`, which ends it: where it is still there rendezvous.unwinding_grace later, on_unwinding is
  // called with it, from a thread. The first one counts.
  void leaves_by(std::exception_ptr error);
  // "rank 3: ...", what the first rank to report a failure said, or who has died; nothing when none did, or this one.
  // Waits so long for the word of a death. Never throws.
  std::optional<std::string> failure_of_another(Milliseconds wait = Milliseconds(0));

 private:
  struct Queued {
    QueuedCollective what;
    SteadyClock::time_point since{};  // queued, or behind the one before it, or come to
    bool come = false;
  };
  struct Group {
    RankGroup who;
    int64_t sequence = 0;  // the host's last
    SteadyClock::time_point since{};
    std::deque<Queued> queue;
    int64_t published = -1;
  };
  struct Front {  // the oldest collective of a device that has not ended
    int group = 0;
    Queued queued;
  };
  struct Waits {  // where a rank waits; no group: nowhere
    std::string group;
    int64_t sequence = 0;
  };
  std::string place_key(const std::string& group, int rank) const {
    return "attendance-" + group + "-" + std::to_string(rank);
  }
  void run();
  void publish();
  int64_t place_of(const std::string& group, int rank);
  Waits waits_of(int rank);
  std::vector<int> members_of(const std::string& group);
  Absence verdict();  // of the job; its group is empty while there is none
  // The verdict names this rank and it has not come since.
  std::optional<std::string> accused();
  // Those that have not come to `sequence` once all have had the time to say so; tells them.
  Absence missing(int group, int64_t sequence);
  Absence cause(Absence absence);         // follows who waits for whom
  int64_t place_now(const Group& group);  // under mutex_
  Waits waits_now();                      // under mutex_
  bool look();                            // the thread's turn; true when one of the callbacks was called
  bool look_at_device(const Front& front);
  bool leave_by_failure();  // as look()
  void look_for_failures();
  // Of another rank, seen by the thread so long ago.
  std::optional<std::string> failure_known_since(Milliseconds time = Milliseconds(0));
  std::optional<std::string> reported_failure();  // of another rank, in the store
  void update_queues();
  std::vector<Front> fronts();
  bool still_pending(int group, int64_t sequence);
  bool stopping();
  std::string named(const Front& front);
  void leave(const std::function<void(const std::string&)>& how, const std::string& what);
  void tell_absent(const std::vector<int>& ranks);
  void sleep(Milliseconds time);

  JobStore& store_;
  const int rank_;
  const Layout layout_;  // of the actor
  const int actor_ranks_;
  const Milliseconds timeout_, period_, grace_, failure_patience_;
  const std::function<void(const std::string&)> on_stuck_, on_deadline_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Group> groups_;  // under mutex_, as the next six; groups are only added
  std::string phase_ = "start";
  int waits_in_ = -1;
  std::string published_;  // phase and where it waits
  bool stopping_ = false;
  std::optional<std::string> failed_;  // what another rank reported, or who has died; written by the thread
  SteadyClock::time_point failed_since_{};
  std::atomic<bool> leaving_{false};
  std::mutex absent_mutex_;
  std::function<void(const std::vector<int>&)> on_absent_;  // called under absent_mutex_
  const std::function<void(const std::exception&)> on_unwinding_;
  const Milliseconds unwinding_grace_;
  std::thread thread_, unwinding_;
};

}  // namespace trireme
