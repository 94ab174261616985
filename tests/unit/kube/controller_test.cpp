// The loop of workers, without any kind: what becomes of a key after each way in which a reconcile can end.
#include "operator/kube/controller.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <stdexcept>

#include "tests/unit/kube/fake_types.h"

namespace trireme::kube {
namespace {

using testing::eventually;

class Loop {
 public:
  explicit Loop(Controller::Reconcile reconcile, int workers = 2)
      : controller({.queue = {.name = "things",
                              .backoff_min = Milliseconds(1),
                              .backoff_max = Milliseconds(20),
                              .metrics = &metrics},
                    .workers = workers},
                   [this, reconcile = std::move(reconcile)](const std::string& key, const Deadline& deadline) {
                     {
                       std::lock_guard lock(mutex_);
                       ++calls_[key];
                     }
                     return reconcile(key, deadline);
                   }) {}
  int calls(const std::string& key) const {
    std::lock_guard lock(mutex_);
    const auto found = calls_.find(key);
    return found == calls_.end() ? 0 : found->second;
  }
  bool counted(const std::string& series) { return metrics.text().find(series) != std::string::npos; }
  bool ended(const std::string& result, int times) {
    return eventually([&] {
      return counted("controller_runtime_reconcile_total{controller=\"things\",result=\"" + result + "\"} " +
                     std::to_string(times) + "\n");
    });
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, int> calls_;

 public:
  Metrics metrics;
  Controller controller;  // last: its workers use all of the above
};

TEST(Controller, AKeyThatIsDoneComesBackOnlyWithNews) {
  Loop loop([](const std::string&, const Deadline&) { return Result{}; });
  loop.controller.add("early");
  EXPECT_EQ(loop.controller.queue().size(), 0u) << "nobody would take it";
  loop.controller.start([&] { loop.controller.add("seed"); });
  ASSERT_TRUE(loop.ended("success", 1));
  loop.controller.add("seed");
  ASSERT_TRUE(loop.ended("success", 2));
  EXPECT_EQ(loop.calls("early"), 0);
  EXPECT_EQ(loop.controller.queue().size() + loop.controller.queue().delayed(), 0u);
  EXPECT_TRUE(loop.counted("controller_runtime_max_concurrent_reconciles{controller=\"things\"} 2"));
}

TEST(Controller, AKeyComesBackWhenItsResultSaysSo) {
  std::atomic<bool> first{true};
  Loop loop([&](const std::string&, const Deadline&) {
    return first.exchange(false) ? Result{Milliseconds(30), Priority::kLow} : Result{};
  });
  const Stopwatch watch;
  loop.controller.start([&] { loop.controller.add("a"); });
  ASSERT_TRUE(loop.ended("success", 1));
  EXPECT_GE(watch.seconds(), 0.03);
  EXPECT_EQ(loop.calls("a"), 2);
  EXPECT_TRUE(loop.ended("requeue_after", 1));
}

TEST(Controller, ExceptionsBackOffAndAreCountedAsWhatTheyAre) {
  std::mutex mutex;
  std::set<std::string> seen;
  Loop loop([&](const std::string& key, const Deadline&) -> Result {
    {
      std::lock_guard lock(mutex);
      if (!seen.insert(key).second) return {};
    }
    if (key == "requeue") throw Requeue{"not yet"};
    if (key == "conflict") throw ApiError(ApiErrorKind::kConflict, 409, "Conflict", "changed");
    if (key == "timeout") throw ApiError(ApiErrorKind::kTimeout, 0, "", "no answer");
    throw std::runtime_error("a mistake");
  });
  loop.controller.start();
  for (const char* key : {"requeue", "conflict", "timeout", "panic"}) loop.controller.add(key);
  ASSERT_TRUE(loop.ended("success", 4));
  EXPECT_TRUE(loop.ended("requeue", 2));
  EXPECT_TRUE(loop.ended("error", 2));
  EXPECT_TRUE(loop.counted("trireme_reconcile_conflicts_total 1"));
  EXPECT_TRUE(loop.counted("controller_runtime_reconcile_timeouts_total{controller=\"things\"} 1"));
  EXPECT_TRUE(loop.counted("controller_runtime_reconcile_panics_total{controller=\"things\"} 1"));
  EXPECT_TRUE(loop.counted("controller_runtime_active_workers{controller=\"things\"} 0"));
  EXPECT_EQ(loop.controller.queue().requeues("panic"), 0) << "the back-off begins anew after a success";
}

TEST(Controller, WhoDoesNotLeadPutsTheKeyDown) {
  Loop loop([](const std::string&, const Deadline&) -> Result { throw NotLeading{}; });
  loop.controller.start([&] { loop.controller.add("a"); });
  ASSERT_TRUE(loop.ended("requeue", 1));
  EXPECT_EQ(loop.controller.queue().size() + loop.controller.queue().delayed(), 0u);
}

TEST(Controller, NewsDoNotShortenWhatTheServerAskedFor) {
  std::atomic<bool> first{true};
  Loop loop([&](const std::string& key, const Deadline&) -> Result {
    if (key == "a" && first.exchange(false))
      throw ApiError(ApiErrorKind::kUnavailable, 429, "TooManyRequests", "slowly", Milliseconds(200));
    return {};
  });
  const Stopwatch watch;
  loop.controller.start([&] { loop.controller.add("a"); });
  while (loop.calls("a") < 2) {
    loop.controller.add("a", Milliseconds(0), Priority::kHigh);
    loop.controller.add("b");
    std::this_thread::sleep_for(Milliseconds(5));
  }
  EXPECT_GE(watch.seconds(), 0.2);
  EXPECT_GT(loop.calls("b"), 1) << "others are not held";
}

TEST(Controller, ALookAtAHeldKeyDoesNotEndItsBackOff) {
  std::atomic<bool> busy{true};
  Loop loop([&](const std::string&, const Deadline&) -> Result {
    if (busy) throw ApiError(ApiErrorKind::kUnavailable, 429, "TooManyRequests", "slowly", Milliseconds(20));
    return {};
  });
  loop.controller.start();
  ASSERT_TRUE(eventually([&] {
    loop.controller.add("a");
    return loop.calls("a") >= 4;
  }));
  EXPECT_GE(loop.controller.queue().requeues("a"), 3) << "as often as it has failed, whatever news came";
  busy = false;
  EXPECT_TRUE(eventually([&] { return loop.controller.queue().requeues("a") == 0; }));
}

TEST(Controller, StuckIsWhoHasWorkAndTakesNone) {
  std::atomic<bool> free{false};
  Loop loop(
      [&](const std::string&, const Deadline&) {
        while (!free) std::this_thread::sleep_for(Milliseconds(1));
        return Result{};
      },
      1);
  EXPECT_EQ(loop.controller.stuck_for(), Milliseconds(0));
  loop.controller.start([&] { loop.controller.add("a"); });
  ASSERT_TRUE(eventually([&] { return loop.calls("a") == 1; }));
  EXPECT_EQ(loop.controller.stuck_for(), Milliseconds(0)) << "nothing waits";
  loop.controller.add("b");
  EXPECT_TRUE(eventually([&] { return loop.controller.stuck_for() > Milliseconds(20); }));
  free = true;
  EXPECT_TRUE(eventually([&] { return loop.controller.stuck_for() == Milliseconds(0); }));
  loop.controller.stop();
  EXPECT_EQ(loop.calls("b"), 1);
}

TEST(Controller, WhatWaitsAtTheEndIsDropped) {
  std::atomic<bool> free{false};
  Loop loop(
      [&](const std::string&, const Deadline& deadline) {
        while (!free && !deadline.passed()) std::this_thread::sleep_for(Milliseconds(1));
        return Result{Milliseconds(1)};
      },
      1);
  loop.controller.start([&] {
    for (const char* key : {"a", "b", "c"}) loop.controller.add(key);
  });
  ASSERT_TRUE(eventually([&] { return loop.calls("a") == 1; }));
  std::thread stopper([&] { loop.controller.stop(); });
  ASSERT_TRUE(eventually([&] { return loop.controller.queue().shutting_down(); }));
  free = true;
  stopper.join();
  EXPECT_EQ(loop.calls("a") + loop.calls("b") + loop.calls("c"), 1);
}

}  // namespace
}  // namespace trireme::kube
