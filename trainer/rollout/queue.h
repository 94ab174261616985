// SampleQueue: which rank generates which samples of a rollout, and when an engine takes how many more. No LibTorch, no
// clock: README.md has the rules, tests/unit/scheduler runs them with simulated engines.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace trireme {

// Samples [first_sample, first_sample + count) of group `group`. A span never crosses groups; its samples share the
// prompt's prefill.
struct SampleSpan {
  int64_t group = 0;
  int64_t first_sample = 0;
  int64_t count = 0;
  bool operator==(const SampleSpan&) const = default;
};

// Where an engine's work comes from.
class SampleSource {
 public:
  virtual ~SampleSource() = default;
  // Samples that the engine should have unfinished, while there are as many.
  virtual int64_t places() const = 0;
  // For an engine with room for `room` >= 1 more. None: nothing is left, or nothing may begin before something ends.
  virtual std::vector<SampleSpan> take(int64_t room) = 0;
};

// What a queue's engine must be able to say and do.
class QueueEngine {
 public:
  virtual ~QueueEngine() = default;
  virtual int64_t unfinished() const = 0;
  // What it has could not all begin in its last step: more would only wait.
  virtual bool crowded() const = 0;
  // Whether it, or an engine that it steps together with, has unfinished samples. Asked once a turn; of engines that
  // step together all then know the same.
  virtual bool somebody_unfinished() { return unfinished() > 0; }
  virtual void submit(const SampleSpan& span) = 0;
  virtual void step() = 0;
};

// One turn of a rollout: what there is room for is taken, then the engine steps. False: nothing is left, for it and for
// those it steps together with.
bool take_and_step(QueueEngine& engine, SampleSource& source);

// What a queue needs of a key-value store. add() is atomic over all ranks, starts at 0 and returns the new value.
class CounterStore {
 public:
  virtual ~CounterStore() = default;
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
};

struct QueueShape {
  int64_t groups = 0;
  int64_t samples = 1;        // of a group
  bool whole_groups = false;  // a group's samples all go to one rank
  int64_t ranks = 1, rank = 0;
  int64_t places = 256;  // samples that a rank decodes at once; the same on every rank
};

// The samples of one rollout, shared by the ranks through one counter. A rank first takes its even share, or what its
// places hold if that is less; then whoever has room takes of what is left, whole groups at first and single samples
// towards the end. A call of take() is at most one addition in the store, and none after all are taken.
class SampleQueue final : public SampleSource {
 public:
  // All ranks give the same shape, but for `rank`, and the same key, which is never used again. Throws Error(kUser).
  SampleQueue(const QueueShape& shape, CounterStore& store, std::string key);

  int64_t places() const override { return places_; }
  std::vector<SampleSpan> take(int64_t room) override;

 private:
  int64_t amount(int64_t room) const;
  int64_t sample_at(int64_t ticket) const;

  const QueueShape shape_;
  CounterStore& store_;
  const std::string key_;
  // In units of a ticket: a sample, or a whole group.
  int64_t unit_ = 1;   // samples of a ticket
  int64_t total_ = 0;  // tickets
  int64_t share_ = 0;  // that this rank takes first
  int64_t places_ = 0;
  bool one_wave_ = true;  // the shares are all there is
  int64_t block_ = 1;     // siblings that stay together where shares are dealt
  int64_t rounds_ = 0;    // blocks of a rank's share
  int64_t taken_ = 0;     // by this rank
  int64_t seen_ = 0;      // by all, when this rank last took some
};

// A counter in this process, for one rank or for ranks that are threads.
class LocalCounter final : public CounterStore {
 public:
  int64_t add(const std::string& key, int64_t amount) override;

 private:
  std::mutex mutex_;
  std::string key_;
  int64_t value_ = 0;
};

}  // namespace trireme
