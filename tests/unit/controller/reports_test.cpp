// What the store of reports says of silences: one job's, everybody's, and those that are not the job's own.
#include "operator/controller/reports.h"

#include <gtest/gtest.h>

#include <thread>

namespace trireme::controller {
namespace {

TEST(Reports, StoreTellsASilenceOfAllFromOneJobs) {
  const kube::ObjectKey a{"team", "a"}, b{"team", "b"};
  ReportStore store(Milliseconds(30));
  const Milliseconds window(60);
  const auto pause = [](int ms) { std::this_thread::sleep_for(Milliseconds(ms)); };
  EXPECT_FALSE(store.path(window, 5).out);
  pause(80);
  EXPECT_FALSE(store.path(window, 1).out) << "one job's silence is its own";
  EXPECT_TRUE(store.path(window, 2).out) << "nobody was heard since we began";
  store.put(a, "a", {});
  EXPECT_FALSE(store.path(window, 2).out);
  EXPECT_LT(store.path(window).back_for.count(), 60'000);
  pause(5);
  EXPECT_EQ(store.path(window).quiet_for.count(), 0) << "one job's silence is its own";
  store.put(b, "b", {});
  pause(80);
  EXPECT_TRUE(store.path(window).out);
  EXPECT_GE(store.path(window).quiet_for.count(), 80);
  store.put(a, "a", {});
  const ReportStore::Path path = store.path(window);
  EXPECT_FALSE(path.out);
  EXPECT_LT(path.back_for.count(), 60'000);
  ReportStore alone(Milliseconds(30));
  alone.put(a, "a", {});
  const OwnPath broken{.broken = true};
  EXPECT_FALSE(alone.path(window, 0, broken).out) << "reports come, whatever else does not";
  pause(80);
  EXPECT_FALSE(alone.path(window).out);
  EXPECT_TRUE(alone.path(window, 0, broken).out) << "nothing answers where it would report";
  alone.put(a, "a", {});
  EXPECT_LT(alone.path(window).back_for.count(), 60'000);
}

TEST(Reports, StoreTellsForHowLongItWouldHaveTakenThem) {
  const Milliseconds window(60);
  ReportStore store(Milliseconds(30));
  std::this_thread::sleep_for(Milliseconds(50));
  EXPECT_EQ(store.path(window).served_for.count(), 0) << "whether anything answers is not known";
  EXPECT_EQ(store.path(window, 0, {.answers_for = Milliseconds(7)}).served_for.count(), 7);
  const OwnPath long_since{.answers_for = Milliseconds(3'600'000)};
  EXPECT_GE(store.path(window, 0, long_since).served_for.count(), 50) << "since it began";
  EXPECT_LT(store.path(window, 0, long_since).served_for.count(), 600'000);
  const auto before = SteadyClock::now();
  store.turned_away();
  const auto served = store.path(window, 0, long_since).served_for;
  EXPECT_LE(served, std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - before));
}

// Its own address is one that the operator itself cannot reach.
TEST(Reports, WhatReportsContradictIsLeftOut) {
  const kube::ObjectKey a{"team", "a"};
  const OwnPath broken{.broken = true}, whole{.answers_for = Milliseconds(10)};
  const Milliseconds window(60);
  ReportStore store(Milliseconds(20));
  const auto hear = [&](const OwnPath& own) {
    store.path(window, 0, own);
    store.put(a, "a", {});
  };
  const auto out = [&] {
    std::this_thread::sleep_for(Milliseconds(100));
    return store.path(window, 0, broken).out;
  };
  hear(broken);
  EXPECT_TRUE(out()) << "the path may have been whole again for less than a question's time";
  hear(broken);
  EXPECT_FALSE(out()) << "reports come for long although nothing answers: one job's silence is its own";
  EXPECT_GE(store.path(window, 0, broken).served_for.count(), 100) << "and it is no word against ending a doubt";
  hear(whole);
  hear(broken);
  EXPECT_TRUE(out()) << "it answered, so that it does not is news";
}

// Who floods the server in the name of a job's rank 0 must not get the job restarted as hung.
TEST(Reports, SilenceOfAJobThatIsCrowdedOutIsNotItsOwn) {
  const kube::ObjectKey a{"team", "a"};
  ReportStore store(Milliseconds(20));
  store.crowded_out(a, "a");
  EXPECT_EQ(store.size(), 0u) << "a job that was never heard is not made";
  store.put(a, "a", {});
  std::this_thread::sleep_for(Milliseconds(50));
  EXPECT_GE(store.get(a, "a")->age.count(), 50);
  store.crowded_out(a, "of another incarnation");
  EXPECT_GE(store.get(a, "a")->age.count(), 50);
  const auto before = SteadyClock::now();
  store.crowded_out(a, "a");
  const auto age = store.get(a, "a")->age;
  EXPECT_LE(age, std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - before));
}

}  // namespace
}  // namespace trireme::controller
