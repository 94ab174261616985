#include "operator/kube/work_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "operator/kube/metrics.h"

namespace trireme::kube {
namespace {

const Milliseconds kLong{60000};

TEST(WorkQueue, OneEntryPerKeyAndNeverTwoWorkersOnOne) {
  RateLimitedQueue queue;
  queue.add("a");
  queue.add("a");
  queue.add("b");
  EXPECT_EQ(queue.size(), 2u);
  EXPECT_EQ(queue.get(), "a");
  queue.add("a");  // while it is worked on
  queue.add("a");
  EXPECT_EQ(queue.get(), "b");
  EXPECT_EQ(queue.get(Deadline::after(Milliseconds(1))), std::nullopt);
  queue.done("a");
  EXPECT_EQ(queue.get(), "a");
  queue.done("a");
  queue.done("b");
  queue.done("never taken");
  EXPECT_EQ(queue.size(), 0u);
}

TEST(WorkQueue, Priorities) {
  RateLimitedQueue queue;
  queue.add("low", Priority::kLow);
  queue.add("normal");
  queue.add("raised", Priority::kLow);
  queue.add("high", Priority::kHigh);
  queue.add("raised", Priority::kHigh);
  queue.add("high", Priority::kLow);  // never lowers
  std::vector<std::string> order;
  while (auto key = queue.get(Deadline::after(Milliseconds(0)))) order.push_back(*key);
  EXPECT_EQ(order, (std::vector<std::string>{"raised", "high", "normal", "low"}));
}

TEST(WorkQueue, DelaysAndTheEarlierOneWins) {
  RateLimitedQueue queue;
  queue.add_after("a", std::chrono::hours(1));
  queue.add_after("b", Milliseconds(20));
  EXPECT_EQ(queue.delayed(), 2u);
  const auto before = SteadyClock::now();
  EXPECT_EQ(queue.get(Deadline::after(kLong)), "b");
  EXPECT_GE(SteadyClock::now() - before, Milliseconds(15));
  queue.add_after("a", std::chrono::hours(2));
  queue.add_after("a", Milliseconds(5));
  EXPECT_EQ(queue.delayed(), 1u);
  EXPECT_EQ(queue.get(Deadline::after(kLong)), "a");
  EXPECT_EQ(queue.delayed(), 0u);
  queue.done("a");
  queue.add_after("a", Milliseconds(0));
  EXPECT_EQ(queue.size(), 1u);
}

TEST(WorkQueue, DelaysKeepTheHigherPriority) {
  RateLimitedQueue queue;
  queue.add_after("described", Milliseconds(1), Priority::kLow);
  queue.add_after("wanted", Milliseconds(1), Priority::kLow);
  queue.add_after("wanted", Milliseconds(2));  // later, but more urgent
  queue.add_after("wanted", Milliseconds(1), Priority::kLow);
  std::this_thread::sleep_for(Milliseconds(20));
  queue.add("new");
  EXPECT_EQ(queue.get(Deadline::after(kLong)), "new");  // the delayed ones are looked at with the next get
  EXPECT_EQ(queue.get(Deadline::after(kLong)), "wanted");
  EXPECT_EQ(queue.get(Deadline::after(kLong)), "described");
}

TEST(WorkQueue, WhatIsDescribedLeavesRoomForWhatIsMade) {
  WorkQueueOptions options;
  options.low_limit = 1;
  RateLimitedQueue queue(options);
  const auto now = [] { return Deadline::after(Milliseconds(0)); };
  for (const char* key : {"a", "b", "c"}) queue.add(key, Priority::kLow);
  queue.add("urgent");
  EXPECT_EQ(queue.get(now()), "urgent");
  EXPECT_EQ(queue.get(now()), "a");
  EXPECT_EQ(queue.get(now()), std::nullopt);  // one of them is enough beside "urgent"
  queue.add("next");
  EXPECT_EQ(queue.get(now()), "next");
  queue.done("urgent");
  EXPECT_EQ(queue.get(now()), std::nullopt);
  // Who waits for a key is woken by the end of what was more urgent.
  std::thread waiting([&] { EXPECT_EQ(queue.get(Deadline::after(kLong)), "b"); });
  std::this_thread::sleep_for(Milliseconds(20));
  queue.done("next");
  waiting.join();
  EXPECT_EQ(queue.get(now()), "c");
  queue.done("a");
  queue.add("urgent");
  EXPECT_EQ(queue.get(now()), "urgent");
  queue.add("d", Priority::kLow);
  queue.shut_down();
  EXPECT_EQ(queue.get(now()), "d");  // what is queued at the end goes out
}

TEST(WorkQueue, BackOffDoublesToTheMaximumAndForgets) {
  WorkQueueOptions options;
  options.backoff_min = Milliseconds(10);
  options.backoff_max = Milliseconds(1000);
  RateLimitedQueue queue(options);
  std::vector<int64_t> delays;
  for (int i = 0; i < 60; ++i) delays.push_back(queue.add_rate_limited("k").count());
  for (int i = 0; i < 60; ++i) {
    const int64_t base = i < 7 ? 10 << i : 1000;
    EXPECT_GE(delays[static_cast<size_t>(i)], base) << i;
    EXPECT_LE(delays[static_cast<size_t>(i)], base + base / 10 + 1) << i;
  }
  EXPECT_EQ(queue.requeues("k"), 60);
  queue.forget("k");
  EXPECT_EQ(queue.requeues("k"), 0);
  EXPECT_LE(queue.add_rate_limited("k").count(), 11);
}

TEST(WorkQueue, ShutDownDrainsAndWakesEverybody) {
  RateLimitedQueue queue;
  queue.add("a");
  queue.add_after("later", std::chrono::hours(1));
  std::atomic<int> got{0};
  std::vector<std::thread> workers;
  for (int i = 0; i < 4; ++i) {
    workers.emplace_back([&] {
      while (auto key = queue.get()) {
        ++got;
        queue.done(*key);
      }
    });
  }
  queue.shut_down();
  queue.add("b");
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(got, 1);
  EXPECT_TRUE(queue.shutting_down());
}

TEST(WorkQueue, ManyProducersAndWorkersLoseNothing) {
  RateLimitedQueue queue;
  constexpr int kKeys = 50;
  std::array<std::atomic<int>, kKeys> wanted{};  // the newest state each key must be seen with
  std::array<std::atomic<int>, kKeys> seen{};
  std::array<std::atomic<bool>, kKeys> busy{};
  std::atomic<bool> overlap{false};
  std::vector<std::thread> threads;
  std::vector<std::thread> workers;
  for (int i = 0; i < 4; ++i) {
    workers.emplace_back([&] {
      while (auto key = queue.get()) {
        const size_t k = static_cast<size_t>(std::stoi(*key));
        if (busy[k].exchange(true)) overlap = true;
        seen[k] = wanted[k].load();
        busy[k] = false;
        queue.done(*key);
      }
    });
  }
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 2000; ++i) {
        const size_t k = random() % kKeys;
        ++wanted[k];
        switch (random() % 3) {
          case 0:
            queue.add(std::to_string(k));
            break;
          case 1:
            queue.add(std::to_string(k), Priority::kHigh);
            break;
          default:
            queue.add_after(std::to_string(k), Milliseconds(random() % 3));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Deadline deadline = Deadline::after(kLong);
  const auto settled = [&] {
    for (size_t k = 0; k < kKeys; ++k) {
      if (seen[k] != wanted[k]) return false;
    }
    return true;
  };
  while (!settled() && !deadline.passed()) std::this_thread::sleep_for(Milliseconds(5));
  EXPECT_TRUE(settled());
  queue.shut_down();
  for (std::thread& worker : workers) worker.join();
  EXPECT_FALSE(overlap);
}

TEST(WorkQueue, MetricsHaveControllerRuntimesNames) {
  Metrics metrics;
  WorkQueueOptions options;
  options.name = "rljob";
  options.metrics = &metrics;
  {
    RateLimitedQueue queue(options);
    queue.add("a");
    queue.add("b");
    queue.add_rate_limited("c");
    queue.get();
    const std::string text = metrics.text();
    const std::string labels = "{controller=\"rljob\",name=\"rljob\"} ";
    EXPECT_NE(text.find("workqueue_depth" + labels + "1"), std::string::npos) << text;
    EXPECT_NE(text.find("workqueue_adds_total" + labels + "2"), std::string::npos);
    EXPECT_NE(text.find("workqueue_retries_total" + labels + "1"), std::string::npos);
    for (const char* name : {"workqueue_queue_duration_seconds_bucket", "workqueue_work_duration_seconds_count",
                             "workqueue_unfinished_work_seconds", "workqueue_longest_running_processor_seconds"}) {
      EXPECT_NE(text.find(name), std::string::npos) << name;
    }
  }
  EXPECT_NE(metrics.text().find("workqueue_depth"), std::string::npos);  // the hook went with the queue
}

TEST(Metrics, SeriesAreSharedAndRemoved) {
  Metrics metrics;
  metrics.gauge("g", "help", {{"job", "a"}, {"ns", "n"}}).Set(1);
  metrics.gauge("g", "help", {{"job", "b"}, {"ns", "n"}}).Set(2);
  metrics.counter("c_total", "help", {{"job", "a"}}).Increment();
  metrics.counter("c_total", "help", {{"job", "a"}}).Increment();
  EXPECT_NE(metrics.text().find("c_total{job=\"a\"} 2"), std::string::npos);
  metrics.remove("", {{"job", "a"}});
  EXPECT_EQ(metrics.text().find("\"a\""), std::string::npos);
  EXPECT_NE(metrics.text().find("g{job=\"b\",ns=\"n\"} 2"), std::string::npos);
  metrics.remove("g", {{"ns", "n"}});
  EXPECT_EQ(metrics.text().find("\"b\""), std::string::npos);
  metrics.gauge("g", "help", {{"job", "a"}, {"ns", "n"}}).Set(5);
  EXPECT_NE(metrics.text().find("g{job=\"a\",ns=\"n\"} 5"), std::string::npos);
  ControllerMetrics controller(metrics, "rljob");
  controller.success.Increment();
  controller.seconds.Observe(0.01);
  EXPECT_NE(metrics.text().find("controller_runtime_reconcile_total{controller=\"rljob\",result=\"success\"} 1"),
            std::string::npos);
}

TEST(WorkQueue, WhatAServerAskedForIsTheLeastDelay) {
  RateLimitedQueue queue({.name = "q", .backoff_min = Milliseconds(1), .backoff_max = Milliseconds(10)});
  EXPECT_EQ(queue.add_rate_limited("a", Milliseconds(250)), Milliseconds(250));
  const Stopwatch watch;
  EXPECT_EQ(queue.get(Deadline::after(Milliseconds(60000))), "a");
  EXPECT_GE(watch.seconds(), 0.2);
  EXPECT_LT(queue.add_rate_limited("b"), Milliseconds(250));
}

}  // namespace
}  // namespace trireme::kube
