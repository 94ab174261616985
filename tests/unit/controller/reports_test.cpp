// What the store of reports says of silences: one job's, everybody's, and those that are not the job's own. Time passes
// where a test says so.
#include "operator/controller/reports.h"

#include <gtest/gtest.h>

namespace trireme::controller {
namespace {

struct Time {
  void pause(int ms) { now += Milliseconds(ms); }
  ReportStore store(int least_gap_ms) {
    return ReportStore(Milliseconds(least_gap_ms), [this] { return now; });
  }
  SteadyClock::time_point now{std::chrono::hours(1000)};
};

TEST(Reports, StoreTellsASilenceOfAllFromOneJobs) {
  Time time;
  const kube::ObjectKey a{"team", "a"}, b{"team", "b"};
  ReportStore store = time.store(30);
  const Milliseconds window(60);
  EXPECT_FALSE(store.path(window, 5).out);
  time.pause(80);
  EXPECT_FALSE(store.path(window, 1).out) << "one job's silence is its own";
  EXPECT_TRUE(store.path(window, 2).out) << "nobody was heard since we began";
  store.put(a, "a", {});
  EXPECT_FALSE(store.path(window, 2).out);
  EXPECT_EQ(store.path(window).back_for.count(), 0);
  time.pause(5);
  EXPECT_EQ(store.path(window).quiet_for.count(), 0) << "one job's silence is its own";
  store.put(b, "b", {});
  time.pause(80);
  EXPECT_TRUE(store.path(window).out);
  EXPECT_EQ(store.path(window).quiet_for.count(), 80);
  store.put(a, "a", {});
  const ReportStore::Path path = store.path(window);
  EXPECT_FALSE(path.out);
  EXPECT_EQ(path.back_for.count(), 0);
  time.pause(7);
  EXPECT_EQ(store.path(window).back_for.count(), 7);
  ReportStore alone = time.store(30);
  alone.put(a, "a", {});
  const OwnPath broken{.broken = true};
  EXPECT_FALSE(alone.path(window, 0, broken).out) << "reports come, whatever else does not";
  time.pause(80);
  EXPECT_FALSE(alone.path(window).out);
  EXPECT_TRUE(alone.path(window, 0, broken).out) << "nothing answers where it would report";
  alone.put(a, "a", {});
  EXPECT_EQ(alone.path(window).back_for.count(), 0);
}

TEST(Reports, StoreTellsForHowLongItWouldHaveTakenThem) {
  Time time;
  const Milliseconds window(60);
  ReportStore store = time.store(30);
  time.pause(50);
  EXPECT_EQ(store.path(window).served_for.count(), 0) << "whether anything answers is not known";
  EXPECT_EQ(store.path(window, 0, {.answers_for = Milliseconds(7)}).served_for.count(), 7);
  const OwnPath long_since{.answers_for = Milliseconds(3'600'000)};
  EXPECT_EQ(store.path(window, 0, long_since).served_for.count(), 50) << "since it began";
  store.turned_away();
  EXPECT_EQ(store.path(window, 0, long_since).served_for.count(), 0);
  time.pause(9);
  EXPECT_EQ(store.path(window, 0, long_since).served_for.count(), 9);
}

// Its own address is one that the operator itself cannot reach.
TEST(Reports, WhatReportsContradictIsLeftOut) {
  Time time;
  const kube::ObjectKey a{"team", "a"};
  const OwnPath broken{.broken = true}, whole{.answers_for = Milliseconds(10)};
  const Milliseconds window(60);
  ReportStore store = time.store(20);
  const auto hear = [&](const OwnPath& own) {
    store.path(window, 0, own);
    store.put(a, "a", {});
  };
  const auto out = [&] {
    time.pause(100);
    return store.path(window, 0, broken).out;
  };
  hear(broken);
  EXPECT_TRUE(out()) << "the path may have been whole again for less than a question's time";
  hear(broken);
  EXPECT_FALSE(out()) << "reports come for long although nothing answers: one job's silence is its own";
  EXPECT_EQ(store.path(window, 0, broken).served_for.count(), 200) << "and it is no word against ending a doubt";
  hear(whole);
  hear(broken);
  EXPECT_TRUE(out()) << "it answered, so that it does not is news";
}

// Who floods the server in the name of a job's rank 0 must not get the job restarted as hung.
TEST(Reports, SilenceOfAJobThatIsCrowdedOutIsNotItsOwn) {
  Time time;
  const kube::ObjectKey a{"team", "a"};
  ReportStore store = time.store(20);
  store.crowded_out(a, "a");
  EXPECT_EQ(store.size(), 0u) << "a job that was never heard is not made";
  store.put(a, "a", {});
  time.pause(50);
  EXPECT_EQ(store.get(a, "a")->age.count(), 50);
  store.crowded_out(a, "of another incarnation");
  EXPECT_EQ(store.get(a, "a")->age.count(), 50);
  store.crowded_out(a, "a");
  EXPECT_EQ(store.get(a, "a")->age.count(), 0);
  time.pause(6);
  EXPECT_EQ(store.get(a, "a")->age.count(), 6) << "it counts from there";
}

}  // namespace
}  // namespace trireme::controller
