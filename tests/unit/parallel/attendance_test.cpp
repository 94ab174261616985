// Attendance where a device carries collectives out: who is named, and who leaves, when one does not end.
#include "trainer/parallel/attendance.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>

#include "base/host.h"
#include "tests/unit/parallel/listening.h"

namespace trireme {
namespace {

// Two ranks, each with what its device says of the one collective it has queued.
struct Device {
  std::atomic<bool> come{false}, done{false};
};

struct Rank {
  std::unique_ptr<JobStore> store;
  std::unique_ptr<Attendance> attendance;
  int group = 0;
  Device device;
  std::atomic<int> stuck{0}, deadline{0}, unwinding{0};
  std::string said;  // by the one callback that was called
  std::vector<int> absent;
};

class TwoRanks {
 public:
  explicit TwoRanks(Milliseconds timeout) {
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([this, r, timeout] {
        RendezvousOptions rendezvous = port_.place(r, 2, Milliseconds(250000));
        Rank& rank = ranks[r];
        rank.store = std::make_unique<JobStore>(rendezvous);
        rendezvous.timeout = timeout;
        rendezvous.stuck_grace = Milliseconds(100);
        rendezvous.failure_patience = Milliseconds(500);
        rendezvous.on_stuck = [&rank](const std::string& what) {
          rank.said = what;
          ++rank.stuck;
        };
        rendezvous.on_deadline = [&rank](const std::string& what) {
          rank.said = what;
          ++rank.deadline;
        };
        rendezvous.unwinding_grace = Milliseconds(200);
        rendezvous.on_unwinding = [&rank](const std::exception& error) {
          rank.said = error.what();
          ++rank.unwinding;
        };
        rank.attendance = std::make_unique<Attendance>(*rank.store, rendezvous);
        rank.attendance->set_on_absent([&rank](const std::vector<int>& ranks) { rank.absent = ranks; });
        rank.group = rank.attendance->open({"dp", {0, 1}});
        rank.attendance->set_phase("training");
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  ~TwoRanks() {
    for (Rank& rank : ranks) rank.attendance.reset();
    ranks[1].store.reset();
  }
  void queue(int r, int64_t sequence) {
    Rank& rank = ranks[r];
    rank.attendance->note(rank.group, sequence);
    rank.attendance->note_queued(rank.group,
                                 {sequence, "all-reduce", "training", [&rank] { return rank.device.come.load(); },
                                  [&rank] { return rank.device.done.load(); }});
  }
  // As if its process had ended: by an exception that nobody was told of.
  void die(int r) {
    try {
      Rank& rank = ranks[r];
      const std::unique_ptr<JobStore> store = std::move(rank.store);
      const std::unique_ptr<Attendance> attendance = std::move(rank.attendance);
      throw 0;
    } catch (int) {
    }
  }
  static bool comes(const std::function<bool()>& what) {
    const Deadline limit = Deadline::after(Milliseconds(200000));
    while (!what() && !limit.passed()) std::this_thread::sleep_for(Milliseconds(10));
    return what();
  }

  Rank ranks[2];

 private:
  ListeningPort port_;
};

TEST(Attendance, ADeviceThatDoesNotComeToACollectiveIsNamedAndItsRankLeaves) {
  TwoRanks job(Milliseconds(2000));
  job.ranks[0].device.come = true;
  job.queue(0, 7);
  job.queue(1, 7);  // its host has come, its device never does
  ASSERT_TRUE(TwoRanks::comes([&] { return job.ranks[0].deadline == 1 && job.ranks[1].stuck == 1; }));
  EXPECT_NE(job.ranks[0].said.find("rank 0 leaves: all-reduce number 7 of group 'dp' (2 ranks) in phase training has "
                                   "not ended within 2 s; rank 1 on " +
                                   host_name() + " has not come (last seen at number 6"),
            std::string::npos)
      << job.ranks[0].said;
  EXPECT_EQ(job.ranks[0].absent, std::vector<int>{1});
  EXPECT_NE(job.ranks[1].said.find("rank 1 is stuck"), std::string::npos) << job.ranks[1].said;
  EXPECT_EQ(job.ranks[0].stuck, 0);
  EXPECT_EQ(job.ranks[1].deadline, 0);
}

// What it spoke to may go then.
TEST(Attendance, WhoIsToldOfAbsentRanksIsNotBeingToldWhenAnotherIs) {
  TwoRanks job(Milliseconds(2000));
  std::atomic<bool> begun{false}, ended{false};
  job.ranks[0].attendance->set_on_absent([&](const std::vector<int>&) {
    begun = true;
    std::this_thread::sleep_for(Milliseconds(1000));
    ended = true;
  });
  job.ranks[0].device.come = true;
  for (int r = 0; r < 2; ++r) job.queue(r, 7);  // the device of rank 1 never comes
  ASSERT_TRUE(TwoRanks::comes([&] { return begun.load(); }));
  job.ranks[0].attendance->set_on_absent({});
  EXPECT_TRUE(ended);
}

TEST(Attendance, NobodyLeavesWhileTheDeviceMovesOn) {
  TwoRanks job(Milliseconds(8000));  // less than all collectives take together, and five times one of them
  for (Rank& rank : job.ranks) rank.device.come = true;
  for (int64_t sequence = 1; sequence <= 7; ++sequence) {
    for (int r = 0; r < 2; ++r) job.queue(r, sequence);
    std::this_thread::sleep_for(Milliseconds(400));
    for (Rank& rank : job.ranks) rank.device.done = true;
    std::this_thread::sleep_for(Milliseconds(1200));  // longer than between two looks
    for (Rank& rank : job.ranks) rank.device.done = false;
  }
  for (Rank& rank : job.ranks) rank.device.done = true;
  std::this_thread::sleep_for(Milliseconds(1500));
  for (Rank& rank : job.ranks) EXPECT_EQ(rank.stuck + rank.deadline, 0) << rank.said;
}

TEST(Attendance, TheFailureOfARankEndsTheWaitOfTheOthersAndIsTold) {
  TwoRanks job(Milliseconds(200000));  // far away: it is not the deadline that ends the wait
  job.ranks[0].device.come = true;
  job.queue(0, 3);
  job.ranks[1].attendance->report_failure("the log-prob of a token is not finite");
  ASSERT_TRUE(TwoRanks::comes([&] { return job.ranks[0].deadline == 1; }));
  EXPECT_NE(job.ranks[0].said.find("all-reduce number 3 of group 'dp' (2 ranks) in phase training cannot end, since "
                                   "another rank has failed. rank 1: the log-prob of a token is not finite"),
            std::string::npos)
      << job.ranks[0].said;
  EXPECT_EQ(job.ranks[1].attendance->failure_of_another(), std::nullopt);
  // The first failure stays.
  job.ranks[0].attendance->report_failure("an echo");
  EXPECT_EQ(job.ranks[0].attendance->failure_of_another(), "rank 1: the log-prob of a token is not finite");
}

TEST(Attendance, TheFailureOfARankEndsAHostThatWaitsElsewhere) {
  TwoRanks job(Milliseconds(200000));
  job.ranks[1].attendance->report_failure("a weight is not finite");
  ASSERT_TRUE(TwoRanks::comes([&] { return job.ranks[0].deadline == 1; }));
  EXPECT_EQ(job.ranks[0].said,
            "rank 0 leaves in phase training, since another rank has failed. rank 1: a weight is not finite");
  EXPECT_EQ(job.ranks[1].deadline, 0);
}

TEST(Attendance, ARankThatLeavesAlreadyIsLeftAlone) {
  TwoRanks job(Milliseconds(200000));
  job.ranks[0].attendance->leaving();
  job.ranks[1].attendance->report_failure("a weight is not finite");
  std::this_thread::sleep_for(Milliseconds(3500));  // its thread looks each second
  EXPECT_EQ(job.ranks[0].deadline, 0);
}

TEST(Attendance, WhatRankZeroReportedIsKnownWhenItsStoreHasGone) {
  TwoRanks job(Milliseconds(200000));
  job.ranks[1].device.come = true;
  job.queue(1, 3);
  job.ranks[0].attendance->report_failure("a weight is not finite");
  ASSERT_TRUE(TwoRanks::comes([&] { return job.ranks[1].deadline == 1; }));  // its thread has read it
  job.ranks[0].attendance.reset();
  job.ranks[0].store.reset();
  EXPECT_EQ(job.ranks[1].attendance->failure_of_another(), "rank 0: a weight is not finite");
}

// A rank that has thrown and is still there, since a destructor waits for its device.
TEST(Attendance, ARankThatDoesNotEndByItsErrorIsEnded) {
  TwoRanks job(Milliseconds(200000));
  for (const char* error : {"no memory was left", "a second one"})
    job.ranks[1].attendance->leaves_by(std::make_exception_ptr(std::runtime_error(error)));
  ASSERT_TRUE(TwoRanks::comes([&] { return job.ranks[1].unwinding == 1; }));
  EXPECT_EQ(job.ranks[1].said, "no memory was left");
  EXPECT_EQ(job.ranks[0].unwinding, 0);
  // One that ends in time says its error itself.
  job.ranks[0].attendance->leaves_by(std::make_exception_ptr(std::runtime_error("a number is not finite")));
  job.ranks[0].attendance.reset();
  std::this_thread::sleep_for(Milliseconds(500));
  EXPECT_EQ(job.ranks[0].unwinding, 0);
  EXPECT_EQ(job.ranks[1].unwinding, 1);
}

TEST(Attendance, TheDeathOfARankEndsTheWaitOfTheDeviceAndIsTold) {
  for (const int victim : {1, 0}) {
    TwoRanks job(Milliseconds(200000));
    const int other = 1 - victim;
    job.ranks[other].device.come = true;
    job.queue(other, 3);
    job.ranks[victim].attendance->set_phase("generation");
    job.die(victim);
    ASSERT_TRUE(TwoRanks::comes([&] { return job.ranks[other].deadline == 1; }));
    const std::string& said = job.ranks[other].said;
    EXPECT_NE(said.find("all-reduce number 3 of group 'dp' (2 ranks) in phase training "), std::string::npos) << said;
    const std::string death = victim == 0 ? "rank 0 has died: " : "rank 1 has died in phase generation: ";
    EXPECT_NE(said.find(death + "its connection was closed without a word"), std::string::npos) << said;
    EXPECT_EQ(job.ranks[other].stuck, 0);
  }
}

}  // namespace
}  // namespace trireme
