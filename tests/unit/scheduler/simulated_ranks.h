// Ranks with simulated engines on a virtual clock: the trainer's queue, intake and scheduler, and a formula instead of
// a device.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "trainer/rollout/queue.h"
#include "trainer/rollout/scheduler.h"

namespace trireme {

struct SimulatedWork {
  int64_t groups = 0, samples = 0;  // of a group
  std::vector<int64_t> lengths;     // of every response, in data order
  int64_t prompt = 200, longest = 3800;
  int64_t total() const { return groups * samples; }
};

// Seconds of a step as measured with the 8B shape on an H200 (docs/performance.md): 4.3 ms with 16 samples, 10.4 with
// 256, and 200 prompt tokens in 5.4 ms.
inline double step_seconds(int64_t decoding, int64_t prefill) {
  return 3.9e-3 + 25.5e-6 * static_cast<double>(decoding) + 27e-6 * static_cast<double>(prefill);
}

class SimulatedEngine final : public QueueEngine {
 public:
  SimulatedEngine(const SimulatedWork& work, const SchedulerOptions& options) : work_(work), scheduler_(options) {}

  int64_t unfinished() const override { return scheduler_.unfinished(); }
  bool crowded() const override { return plan_.crowded; }
  void submit(const SampleSpan& span) override {
    spans.push_back(span);
    const int64_t first =
        scheduler_.add_group(work_.prompt, std::vector<int64_t>(static_cast<size_t>(span.count), work_.longest));
    made_.resize(static_cast<size_t>(first + span.count), 0);
    for (int64_t i = 0; i < span.count; ++i)
      wanted_.push_back(work_.lengths[static_cast<size_t>(span.group * work_.samples + span.first_sample + i)]);
  }
  // The scheduler does not know where a response ends: it is stopped there.
  void step() override {
    scheduler_.plan(plan_);
    scheduler_.commit(plan_);
    clock += step_seconds(plan_.decode_tokens, plan_.prefill_tokens);
    prefill_tokens += plan_.prefill_tokens;
    busy_places += step_seconds(plan_.decode_tokens, plan_.prefill_tokens) * static_cast<double>(plan_.segments.size());
    for (const Output& output : plan_.outputs) {
      const auto sequence = static_cast<size_t>(output.sequence);
      if (++made_[sequence] == wanted_[sequence]) {
        scheduler_.stop(output.sequence);
        ++ended;
      }
    }
  }

  double clock = 0, busy_places = 0;
  int64_t ended = 0, prefill_tokens = 0;
  std::vector<SampleSpan> spans;

 private:
  const SimulatedWork& work_;
  Scheduler scheduler_;
  StepPlan plan_;
  std::vector<int64_t> wanted_, made_;  // by sequence
};

class CountingStore final : public CounterStore {
 public:
  int64_t add(const std::string&, int64_t amount) override {
    ++calls;
    return value += amount;
  }
  int64_t value = 0, calls = 0;
};

struct SimulatedRollout {
  std::vector<std::unique_ptr<SimulatedEngine>> engines;
  int64_t store_calls = 0;
  double slowest() const;  // seconds until the last rank is done
  double fastest() const;
  double idle_of_fastest() const { return slowest() - fastest(); }
  int64_t most() const;  // samples of a rank
  int64_t fewest() const;
  int64_t prefill_tokens() const;
};

inline double SimulatedRollout::slowest() const {
  double result = 0;
  for (const auto& engine : engines) result = std::max(result, engine->clock);
  return result;
}
inline double SimulatedRollout::fastest() const {
  double result = slowest();
  for (const auto& engine : engines) result = std::min(result, engine->clock);
  return result;
}
inline int64_t SimulatedRollout::most() const {
  int64_t result = 0;
  for (const auto& engine : engines) result = std::max(result, engine->ended);
  return result;
}
inline int64_t SimulatedRollout::fewest() const {
  int64_t result = most();
  for (const auto& engine : engines) result = std::min(result, engine->ended);
  return result;
}
inline int64_t SimulatedRollout::prefill_tokens() const {
  int64_t result = 0;
  for (const auto& engine : engines) result += engine->prefill_tokens;
  return result;
}

using MakeSource = std::function<std::unique_ptr<SampleSource>(int64_t rank, CounterStore& store)>;

// The rank whose clock is behind takes the next turn. Ranks begin `late[rank]` seconds late (empty: all at once).
inline SimulatedRollout simulate(const SimulatedWork& work, int64_t ranks, const SchedulerOptions& options,
                                 const MakeSource& make, const std::vector<double>& late = {}) {
  SimulatedRollout result;
  CountingStore store;
  std::vector<std::unique_ptr<SampleSource>> sources;
  std::vector<bool> running(static_cast<size_t>(ranks), true);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    result.engines.push_back(std::make_unique<SimulatedEngine>(work, options));
    if (!late.empty()) result.engines.back()->clock = late[static_cast<size_t>(rank)];
    sources.push_back(make(rank, store));
  }
  while (true) {
    int64_t next = -1;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto r = static_cast<size_t>(rank);
      if (running[r] && (next < 0 || result.engines[r]->clock < result.engines[static_cast<size_t>(next)]->clock))
        next = rank;
    }
    if (next < 0) break;
    const auto n = static_cast<size_t>(next);
    running[n] = take_and_step(*result.engines[n], *sources[n]);
  }
  result.store_calls = store.calls;
  return result;
}

}  // namespace trireme
