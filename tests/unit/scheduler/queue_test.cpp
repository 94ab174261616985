// The pull queue: every run goes to exactly one puller, whatever the threads do.
#include "trainer/rollout/queue.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace trireme {
namespace {

class MapStore final : public CounterStore {
 public:
  int64_t add(const std::string& key, int64_t amount) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
    return values_[key] += amount;
  }
  int64_t calls() const { return calls_; }

 private:
  std::mutex mutex_;
  std::map<std::string, int64_t> values_;
  int64_t calls_ = 0;
};

TEST(PullQueue, RunsCoverEachGroupInOrder) {
  LocalPullQueue queue({.groups = 2, .samples = 5, .run = 2});
  const std::vector<SampleRun> expected = {{0, 0, 2}, {0, 2, 2}, {0, 4, 1}, {1, 0, 2}, {1, 2, 2}, {1, 4, 1}};
  for (const SampleRun& run : expected) EXPECT_EQ(queue.pull(), run);
  EXPECT_EQ(queue.pull(), std::nullopt);
  EXPECT_EQ(queue.pull(), std::nullopt);
}

TEST(PullQueue, EmptyAndWrongShapes) {
  EXPECT_EQ(LocalPullQueue({.groups = 0, .samples = 4, .run = 4}).pull(), std::nullopt);
  EXPECT_THROW(LocalPullQueue({.groups = 1, .samples = 0, .run = 1}), Error);
  EXPECT_THROW(LocalPullQueue({.groups = 1, .samples = 1, .run = 0}), Error);
  EXPECT_THROW(LocalPullQueue({.groups = -1, .samples = 1, .run = 1}), Error);
}

// Pullers on many threads; queues[t] is thread t's.
void expect_each_sample_once(const std::vector<PullQueue*>& queues, const QueueShape& shape) {
  std::vector<std::vector<SampleRun>> taken(queues.size());
  std::vector<std::thread> threads;
  for (size_t t = 0; t < queues.size(); ++t) {
    threads.emplace_back([&, t] {
      while (const auto run = queues[t]->pull()) taken[t].push_back(*run);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<int> count(shape.groups * shape.samples, 0);
  for (const auto& runs : taken) {
    int64_t last = -1;
    for (const SampleRun& run : runs) {
      const int64_t first = run.group * shape.samples + run.first_sample;
      EXPECT_GT(first, last) << "a puller's runs are not in order";
      last = first;
      for (int64_t i = 0; i < run.count; ++i) ++count[first + i];
    }
  }
  for (size_t i = 0; i < count.size(); ++i) EXPECT_EQ(count[i], 1) << "sample " << i;
}

TEST(PullQueue, ThreadsShareALocalQueue) {
  const QueueShape shape{.groups = 500, .samples = 7, .run = 3};
  LocalPullQueue queue(shape);
  expect_each_sample_once(std::vector<PullQueue*>(6, &queue), shape);
}

TEST(PullQueue, RanksShareAStore) {
  const QueueShape shape{.groups = 300, .samples = 4, .run = 4};
  MapStore store;
  for (const std::string key : {"rollout/1", "rollout/2"}) {
    std::vector<std::unique_ptr<PullQueue>> queues;
    std::vector<PullQueue*> pointers;
    for (int rank = 0; rank < 4; ++rank) {
      queues.push_back(std::make_unique<StorePullQueue>(store, key, shape));
      pointers.push_back(queues.back().get());
    }
    expect_each_sample_once(pointers, shape);
    const int64_t calls = store.calls();
    for (PullQueue* queue : pointers) EXPECT_EQ(queue->pull(), std::nullopt);
    EXPECT_EQ(store.calls(), calls);  // an exhausted queue leaves the store alone
  }
}

}  // namespace
}  // namespace trireme
