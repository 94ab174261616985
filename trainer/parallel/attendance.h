// Attendance: which collective each rank has come to, so that a rank that does not come is named, and leaves.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "trainer/parallel/communicator.h"

namespace trireme {

// One per communicator and rank. A thread writes this rank's place into the store about once a second while it moves,
// and looks there for a verdict of the others on this rank. Nothing here waits for a peer or throws.
class Attendance final {
 public:
  // `store` must outlive it. rendezvous.on_stuck is called, at most once and from the thread, when the others have
  // given up waiting for this rank and it has not come within rendezvous.stuck_grace either.
  Attendance(JobStore& store, const RendezvousOptions& rendezvous, const std::string& name);
  ~Attendance();
  Attendance(const Attendance&) = delete;
  Attendance& operator=(const Attendance&) = delete;

  // The training thread begins collective `sequence`.
  void note(int64_t sequence, const std::string& phase);
  // After collective `sequence` has failed here. When its deadline had passed: the ranks that have not come to it, once
  // those that have had the time to say so (seconds); tells them. When it failed earlier, since a peer left: what a
  // peer whose deadline had passed says of the same collective.
  std::vector<int> absent(int64_t sequence);
  // "; rank 3 has not come (last seen at number 40, phase generation)", for what absent() returned.
  std::string describe(const std::vector<int>& ranks);

 private:
  struct Place {
    int64_t sequence = 0;
    std::string phase;
    SteadyClock::time_point since{};
  };
  struct Verdict {
    int64_t sequence = 0;  // of the collective that failed; 0: there is none
    std::vector<int> absent;
  };
  std::string key(int rank) const { return "attendance-" + name_ + "-" + std::to_string(rank); }
  std::string verdict_key() const { return "attendance-" + name_ + "-absent"; }
  void run();
  void publish();
  Place place_of(int rank);
  Verdict verdict();
  // The verdict names this rank and it has not come since.
  bool accused();
  void sleep(Milliseconds time);

  JobStore& store_;
  const int rank_, size_;
  const std::string name_;
  const Milliseconds timeout_, period_, grace_;
  const std::function<void(const std::string&)> on_stuck_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Place place_;             // under mutex_, as the next two
  int64_t published_ = -1;  // its sequence
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace trireme
