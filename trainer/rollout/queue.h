// PullQueue: the data-parallel ranks' shared list of work. Whoever is free takes the next run of a group's samples, so
// that uneven lengths balance themselves. LocalPullQueue counts in this process, StorePullQueue in the job's store.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"

namespace trireme {

// Samples [first_sample, first_sample + count) of group `group`. A run never crosses groups.
struct SampleRun {
  int64_t group = 0;
  int64_t first_sample = 0;
  int64_t count = 0;
  bool operator==(const SampleRun&) const = default;
};

// `groups` groups of `samples` samples, handed out in pieces of at most `run` samples (run == samples: whole groups).
struct QueueShape {
  int64_t groups = 0;
  int64_t samples = 1;
  int64_t run = 1;
};

// Each piece goes to exactly one caller, in the order of groups. Safe from any thread.
class PullQueue {
 public:
  explicit PullQueue(const QueueShape& shape) : shape_(shape) {
    if (shape.groups < 0 || shape.samples < 1 || shape.run < 1) {
      fail_user("rollout queue: groups must be >= 0, samples and run >= 1");
    }
    runs_per_group_ = (shape.samples + shape.run - 1) / shape.run;
  }
  virtual ~PullQueue() = default;
  PullQueue(const PullQueue&) = delete;
  PullQueue& operator=(const PullQueue&) = delete;

  // The next piece, or nothing when all are taken (and for ever after).
  std::optional<SampleRun> pull() {
    if (exhausted_.load(std::memory_order_relaxed)) return std::nullopt;
    const int64_t ticket = take_ticket();
    if (ticket >= shape_.groups * runs_per_group_) {
      exhausted_.store(true, std::memory_order_relaxed);  // so that an idle rank does not keep asking the store
      return std::nullopt;
    }
    const int64_t first = ticket % runs_per_group_ * shape_.run;
    return SampleRun{ticket / runs_per_group_, first, std::min(shape_.run, shape_.samples - first)};
  }
  const QueueShape& shape() const { return shape_; }

 protected:
  // 0, 1, 2, ...: each number once over all callers.
  virtual int64_t take_ticket() = 0;

 private:
  QueueShape shape_;
  int64_t runs_per_group_ = 1;
  std::atomic<bool> exhausted_{false};
};

class LocalPullQueue final : public PullQueue {
 public:
  using PullQueue::PullQueue;

 private:
  int64_t take_ticket() override { return next_.fetch_add(1, std::memory_order_relaxed); }
  std::atomic<int64_t> next_{0};
};

// What StorePullQueue needs of a key-value store. add() is atomic over all ranks, starts at 0 and returns the new
// value.
class CounterStore {
 public:
  virtual ~CounterStore() = default;
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
};

// All ranks construct it with the same shape and the same key; the key names one rollout and is never used again.
class StorePullQueue final : public PullQueue {
 public:
  StorePullQueue(CounterStore& store, std::string key, const QueueShape& shape)
      : PullQueue(shape), store_(store), key_(std::move(key)) {}

 private:
  int64_t take_ticket() override { return store_.add(key_, 1) - 1; }
  CounterStore& store_;
  std::string key_;
};

}  // namespace trireme
