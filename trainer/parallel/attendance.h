// Attendance: which collective each rank has come to, so that a rank that does not come is named, and leaves.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "trainer/parallel/communicator.h"

namespace trireme {

// A collective that a device carries out. Both are asked from Attendance's thread and may not wait.
struct QueuedCollective {
  int64_t sequence = 0;
  std::string operation, phase;
  std::function<bool()> come;  // all that was queued before it is done
  std::function<bool()> done;  // it has ended
};

// One per communicator and rank. A thread writes this rank's place into the store about once a second while it moves,
// and looks there for a verdict of the others on this rank and for the failure of another. Nothing here waits for a
// peer or throws.
//
// A host collective has the deadline of its transport. One that a device carries out returns to the host at once, so
// its deadline is kept here: rendezvous.timeout from the moment at which this rank's device came to it, or, where the
// device does not come, from when it was queued.
class Attendance final {
 public:
  // `store` must outlive it. rendezvous.on_stuck and on_deadline are called from the thread, one of them at most once:
  // on_stuck when the others have given up waiting for this rank and it has not come within rendezvous.stuck_grace
  // either, or when its device has not come to a collective in time; on_deadline when a collective of its device does
  // not end, since others do not come or have failed. `on_absent`: those that have not come, before on_deadline.
  Attendance(JobStore& store, const RendezvousOptions& rendezvous, const std::string& name,
             std::function<void(const std::vector<int>& ranks)> on_absent = {});
  ~Attendance();
  Attendance(const Attendance&) = delete;
  Attendance& operator=(const Attendance&) = delete;

  // The training thread begins collective `sequence`.
  void note(int64_t sequence, const std::string& phase);
  // The training thread is in this phase from now on.
  void note_phase(const std::string& phase);
  // After note() of the same sequence: a device has it to do.
  void note_queued(QueuedCollective collective);
  // After collective `sequence` has failed here. When its deadline had passed: the ranks that have not come to it, once
  // those that have had the time to say so (seconds); tells them. When it failed earlier, since a peer left: what a
  // peer whose deadline had passed says of the same collective.
  std::vector<int> absent(int64_t sequence);
  // "; rank 3 has not come (last seen at number 40, phase generation)", for what absent() returned.
  std::string describe(const std::vector<int>& ranks);

  // This rank leaves with an error of its own: the others are told, so that they need not wait for their deadline. Only
  // the first failure of a group is kept. Returns when the others have had the time to read it.
  void report_failure(const std::string& what);
  // This rank leaves, since another has failed: its end is no death to the others.
  void leaving();
  // "rank 3: ...", what the first rank to report a failure said, or who has died; nothing when none did, or this one.
  // Waits so long for the word of a death. Never throws.
  std::optional<std::string> failure_of_another(Milliseconds wait = Milliseconds(0));

 private:
  struct Place {
    int64_t sequence = 0;
    std::string phase;
    SteadyClock::time_point since{};
  };
  struct Queued {
    QueuedCollective what;
    SteadyClock::time_point since{};  // queued, or behind the one before it, or come to
    bool come = false;
  };
  struct Verdict {
    int64_t sequence = 0;  // of the collective that failed; 0: there is none
    std::vector<int> absent;
  };
  std::string key(int rank) const { return "attendance-" + name_ + "-" + std::to_string(rank); }
  std::string verdict_key() const { return "attendance-" + name_ + "-absent"; }
  std::string failure_key() const { return "attendance-" + name_ + "-failed"; }
  void run();
  void publish();
  Place place_of(int rank);
  Verdict verdict();
  // The verdict names this rank and it has not come since.
  bool accused();
  // Those that have not come to `sequence` once all have had the time to say so; tells them.
  std::vector<int> missing(int64_t sequence);
  Place place_now();  // under mutex_
  bool look();        // the thread's turn; true when one of the callbacks was called
  bool look_at_device();
  void look_for_failures();
  std::optional<std::string> reported_failure();  // of another rank, in the store
  void update_queue();
  std::optional<Queued> oldest();  // of the device's collectives that have not ended
  bool still_pending(int64_t sequence);
  bool stopping();
  std::string named(const QueuedCollective& collective) const;
  void leave(const std::function<void(const std::string&)>& how, const std::string& what);
  void sleep(Milliseconds time);

  JobStore& store_;
  const int rank_, size_;
  const std::string name_;
  const Milliseconds timeout_, period_, grace_;
  const std::function<void(const std::string&)> on_stuck_, on_deadline_;
  const std::function<void(const std::vector<int>&)> on_absent_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Place place_;  // under mutex_, as the next three
  std::deque<Queued> queue_;
  Place published_{-1, {}, {}};
  bool stopping_ = false;
  std::optional<std::string> failed_;  // what another rank reported; the thread's own, as the next
  SteadyClock::time_point failed_since_{};
  std::thread thread_;
};

}  // namespace trireme
