// The queue of a rollout: every sample goes to exactly one rank, whatever the threads do.
#include "trainer/rollout/queue.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "base/error.h"

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

using Spans = std::vector<SampleSpan>;

TEST(SampleQueue, OneRankTakesWholeGroupsInOrder) {
  LocalCounter counter;
  SampleQueue queue({.groups = 4, .samples = 5, .places = 7}, counter, "q");
  EXPECT_EQ(queue.places(), 7);
  EXPECT_EQ(queue.take(7), (Spans{{0, 0, 5}, {1, 0, 5}}));
  EXPECT_EQ(queue.take(1), (Spans{{2, 0, 5}}));
  EXPECT_EQ(queue.take(2), (Spans{{3, 0, 5}}));
  EXPECT_EQ(queue.take(2), Spans{});
}

TEST(SampleQueue, EmptyAndWrongShapes) {
  LocalCounter counter;
  SampleQueue empty({.groups = 0, .samples = 4}, counter, "q");
  EXPECT_EQ(empty.places(), 0);
  EXPECT_EQ(empty.take(4), Spans{});
  const auto make = [&](const QueueShape& shape) { SampleQueue(shape, counter, "q"); };
  EXPECT_THROW(make({.groups = 1, .samples = 0}), Error);
  EXPECT_THROW(make({.groups = -1, .samples = 1}), Error);
  EXPECT_THROW(make({.groups = 1, .samples = 1, .places = 0}), Error);
  EXPECT_THROW(make({.groups = 1, .samples = 1, .ranks = 2, .rank = 2}), Error);
}

TEST(SampleQueue, ALocalCounterCountsOneRollout) {
  LocalCounter counter;
  counter.add("a", 1);
  EXPECT_THROW(counter.add("b", 1), Error);
}

TEST(SampleQueue, FewSamplesAreSharedEvenlyByWhoeverComesFirst) {
  for (const int64_t ranks : {1, 2, 3, 4, 8}) {
    for (const int64_t groups : {1, 2, 5, 16}) {
      for (const int64_t samples : {1, 3, 8, 13, 16, 32}) {
        MapStore store;
        std::set<std::pair<int64_t, int64_t>> seen;
        int64_t fewest = groups * samples, most = 0, spans = 0;
        for (int64_t rank = 0; rank < ranks; ++rank) {  // each takes all it can before the next has begun
          SampleQueue queue({groups, samples, false, ranks, rank, 1024}, store, "q");
          int64_t own = 0;
          while (queue.places() > own) {
            const Spans taken = queue.take(queue.places() - own);
            if (taken.empty()) break;
            for (const SampleSpan& span : taken) {
              for (int64_t i = 0; i < span.count; ++i) {
                EXPECT_LT(span.first_sample + i, samples);
                EXPECT_TRUE(seen.emplace(span.group, span.first_sample + i).second);
              }
              own += span.count;
              ++spans;
            }
          }
          fewest = std::min(fewest, own);
          most = std::max(most, own);
        }
        EXPECT_EQ(static_cast<int64_t>(seen.size()), groups * samples);
        EXPECT_LE(most - fewest, 1) << ranks << " ranks, " << groups << " x " << samples;
        EXPECT_LE(store.calls(), ranks * (1 + groups * samples / ranks / 64));
        EXPECT_TRUE(ranks > 1 || spans == groups) << "a group was divided for nobody";
      }
    }
  }
}

TEST(SampleQueue, AShareComesFromManyPrompts) {
  MapStore store;
  for (int64_t rank = 0; rank < 4; ++rank) {
    SampleQueue queue({.groups = 8, .samples = 32, .ranks = 4, .rank = rank, .places = 256}, store, "q");
    std::map<int64_t, int64_t> of_group;
    for (const SampleSpan& span : queue.take(64)) of_group[span.group] += span.count;
    EXPECT_EQ(of_group.size(), 8u);
    for (const auto& [group, count] : of_group) EXPECT_EQ(count, 8) << "siblings that share a prefill";
  }
}

TEST(SampleQueue, WholeGroupsAreNeverDivided) {
  for (const int64_t ranks : {2, 3, 8}) {
    MapStore store;
    std::set<int64_t> seen;
    std::vector<std::unique_ptr<SampleQueue>> queues;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      queues.push_back(std::make_unique<SampleQueue>(QueueShape{20, 6, true, ranks, rank, 16}, store, "q"));
      EXPECT_EQ(queues.back()->places(), 12);
    }
    for (bool any = true; any;) {
      any = false;
      for (auto& queue : queues) {
        for (const SampleSpan& span : queue->take(1)) {
          any = true;
          EXPECT_EQ(span.first_sample, 0);
          EXPECT_EQ(span.count, 6);
          EXPECT_TRUE(seen.insert(span.group).second);
        }
      }
    }
    EXPECT_EQ(seen.size(), 20u);
  }
}

// Pullers on many threads, whose room is never the same.
TEST(SampleQueue, ThreadsShareAStoreAndAnExhaustedQueueLeavesItAlone) {
  MapStore store;
  for (const std::string key : {"rollout/1", "rollout/2"}) {
    std::vector<std::unique_ptr<SampleQueue>> queues;
    std::vector<Spans> taken(6);
    std::vector<std::thread> threads;
    for (int64_t t = 0; t < 6; ++t)
      queues.push_back(std::make_unique<SampleQueue>(QueueShape{300, 7, false, 6, t, 32}, store, key));
    for (size_t t = 0; t < 6; ++t) {
      threads.emplace_back([&, t] {
        for (int64_t room = 1;; room = room % 9 + 1) {
          const Spans spans = queues[t]->take(room);
          if (spans.empty()) break;
          taken[t].insert(taken[t].end(), spans.begin(), spans.end());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<int> count(300 * 7, 0);
    for (const Spans& spans : taken) {
      for (const SampleSpan& span : spans) {
        ASSERT_LE(span.first_sample + span.count, 7);
        for (int64_t i = 0; i < span.count; ++i) ++count[static_cast<size_t>(span.group * 7 + span.first_sample + i)];
      }
    }
    for (size_t i = 0; i < count.size(); ++i) EXPECT_EQ(count[i], 1) << "sample " << i;
    const int64_t calls = store.calls();
    for (auto& queue : queues) EXPECT_TRUE(queue->take(5).empty());
    EXPECT_EQ(store.calls(), calls);
  }
}

}  // namespace
}  // namespace trireme
