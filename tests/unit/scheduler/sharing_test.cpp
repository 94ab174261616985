// How ranks share a rollout: the trainer's queue and scheduler, simulated devices, a virtual clock.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <set>
#include <string>

#include "tests/unit/scheduler/simulated_ranks.h"

namespace trireme {
namespace {

constexpr int64_t kMean = 80, kLongest = 380;  // a tenth of those of docs/performance.md

// Log-normal answers. `of_prompt`: the part of their spread that all answers to a prompt have in common.
SimulatedWork drawn(int64_t groups, int64_t samples, uint64_t seed, double of_prompt = 0, int64_t mean = kMean,
                    int64_t longest = kLongest) {
  SimulatedWork work;
  work.longest = longest;
  work.prompt = mean / 4;
  work.groups = groups;
  work.samples = samples;
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  constexpr double kSigma = 0.8;
  for (int64_t g = 0; g < groups; ++g) {
    const double common = std::sqrt(of_prompt) * normal(random);
    for (int64_t i = 0; i < samples; ++i) {
      const double draw = common + std::sqrt(1 - of_prompt) * normal(random);
      work.lengths.push_back(std::clamp<int64_t>(
          std::llround(static_cast<double>(mean) * std::exp(kSigma * draw - kSigma * kSigma / 2)), 1, work.longest));
    }
  }
  return work;
}

SchedulerOptions engine_of(int64_t places, int64_t rows = 1 << 30) {
  SchedulerOptions options;
  options.max_sequences = places;
  options.cache_rows = rows;
  return options;
}

MakeSource queue_of(const SimulatedWork& work, int64_t ranks, int64_t places, bool whole = false) {
  return [&work, ranks, places, whole](int64_t rank, CounterStore& store) {
    return std::make_unique<SampleQueue>(QueueShape{work.groups, work.samples, whole, ranks, rank, places}, store, "q");
  };
}

// The rule before: each rank fills its engine and a group more, in spans of eight.
class FillFirst final : public SampleSource {
 public:
  FillFirst(const SimulatedWork& work, int64_t places, CounterStore& store)
      : work_(work), places_(places + work.samples), store_(store) {}
  int64_t places() const override { return places_; }
  std::vector<SampleSpan> take(int64_t room) override {
    std::vector<SampleSpan> spans;
    const int64_t size = std::min<int64_t>(8, work_.samples), pieces = (work_.samples + size - 1) / size;
    while (room > 0 && !exhausted_) {
      const int64_t ticket = store_.add("q", 1) - 1;
      exhausted_ = ticket >= work_.groups * pieces;
      if (exhausted_) break;
      const int64_t first = ticket % pieces * size;
      spans.push_back({ticket / pieces, first, std::min(size, work_.samples - first)});
      room -= spans.back().count;
    }
    return spans;
  }

 private:
  const SimulatedWork& work_;
  const int64_t places_;
  CounterStore& store_;
  bool exhausted_ = false;
};

// Milliseconds between the ranks' first turns.
std::vector<double> staggered(int64_t ranks) {
  std::vector<double> late;
  for (int64_t r = 0; r < ranks; ++r) late.push_back(1e-3 * static_cast<double>(r));
  return late;
}

void expect_each_sample_once(const SimulatedRollout& rollout, const SimulatedWork& work) {
  std::set<std::pair<int64_t, int64_t>> seen;
  for (const auto& engine : rollout.engines) {
    for (const SampleSpan& span : engine->spans) {
      for (int64_t i = 0; i < span.count; ++i) EXPECT_TRUE(seen.emplace(span.group, span.first_sample + i).second);
    }
  }
  EXPECT_EQ(static_cast<int64_t>(seen.size()), work.total());
}

SimulatedRollout now(const SimulatedWork& work, int64_t ranks, int64_t places) {
  return simulate(work, ranks, engine_of(places), queue_of(work, ranks, places), staggered(ranks));
}
SimulatedRollout before(const SimulatedWork& work, int64_t ranks, int64_t places) {
  return simulate(
      work, ranks, engine_of(places),
      [&](int64_t, CounterStore& store) { return std::make_unique<FillFirst>(work, places, store); }, staggered(ranks));
}

// From 8 samples a rank to 8 times the places: nobody stands idle beside a rank that has all, and nothing is slower
// than it was by more than chance.
TEST(Sharing, NoRankTakesAllWhateverThereIsToDo) {
  constexpr int64_t kPlaces = 32;
  for (const int64_t ranks : {2, 4, 8}) {
    for (const int64_t a_rank : {8, 16, 32, 48, 128, 256}) {
      const std::string what = std::to_string(ranks) + " ranks, " + std::to_string(a_rank) + " samples a rank";
      double seconds = 0, seconds_before = 0;
      for (uint64_t seed = 1; seed <= 4; ++seed) {
        const SimulatedWork work = drawn(ranks * a_rank / 8, 8, seed, 0.5);
        const SimulatedRollout rollout = now(work, ranks, kPlaces), old = before(work, ranks, kPlaces);
        expect_each_sample_once(rollout, work);
        expect_each_sample_once(old, work);
        seconds += rollout.slowest();
        seconds_before += old.slowest();
        if (a_rank <= kPlaces) {
          EXPECT_EQ(rollout.fewest(), a_rank) << what;
          EXPECT_EQ(rollout.most(), a_rank) << what;
          EXPECT_LE(rollout.store_calls, 2 * ranks) << what;
        } else {
          EXPECT_GE(2 * rollout.fewest(), a_rank) << what;
          EXPECT_LE(rollout.store_calls, old.store_calls + 8 * ranks) << what;
        }
        EXPECT_TRUE(a_rank * ranks > kPlaces || old.fewest() == 0) << "the rule before was not that bad";
        // The last ones are taken singly.
        EXPECT_LE(rollout.prefill_tokens(), old.prefill_tokens() + 10 * ranks * work.prompt) << what;
      }
      EXPECT_LE(seconds, 1.03 * seconds_before) << what;
    }
  }
}

TEST(Sharing, FewerSamplesThanRanks) {
  const SimulatedWork work = drawn(1, 3, 5);
  const SimulatedRollout rollout = now(work, 8, 16);
  expect_each_sample_once(rollout, work);
  EXPECT_EQ(rollout.most(), 1);
}

TEST(Sharing, WhatARankHasNotBegunMovesToWhoeverIsFree) {
  const SimulatedWork work = drawn(8, 16, 3);  // 32 a rank: all places
  const double alone = now(work, 4, 32).slowest();
  const std::vector<double> late = {0, 0, 0, alone};
  const SimulatedRollout rollout = simulate(work, 4, engine_of(32), queue_of(work, 4, 32), late);
  expect_each_sample_once(rollout, work);
  EXPECT_EQ(rollout.engines[3]->ended, 0) << "a rank that comes when all is over";
  EXPECT_LT(rollout.slowest(), 2 * alone);
}

TEST(Sharing, WhatTheCacheHasNoRoomForStaysWithTheOthers) {
  const SimulatedWork work = drawn(32, 8, 11);  // 64 a rank: all places
  const auto run = [&](const MakeSource& make, double late) {
    return simulate(work, 4, engine_of(64, /*rows=*/2000), make, {0, 0, 0, late});
  };
  const SimulatedRollout even = run(queue_of(work, 4, 64), 0);
  const double seconds = even.slowest();
  expect_each_sample_once(even, work);
  // A slow rank: what it could not begin is done elsewhere.
  const SimulatedRollout uneven = run(queue_of(work, 4, 64), seconds / 2);
  expect_each_sample_once(uneven, work);
  EXPECT_LT(uneven.engines[3]->ended, 56);
  EXPECT_LT(uneven.slowest(), 1.45 * seconds);
  const SimulatedRollout old =
      run([&](int64_t, CounterStore& store) { return std::make_unique<FillFirst>(work, 64, store); }, seconds / 2);
  EXPECT_LT(uneven.slowest(), old.slowest());
}

TEST(Sharing, WholeGroupsStayWhole) {
  for (const int64_t ranks : {2, 3}) {
    const SimulatedWork work = drawn(10, 6, 2);
    const SimulatedRollout rollout =
        simulate(work, ranks, engine_of(16), queue_of(work, ranks, 16, /*whole=*/true), staggered(ranks));
    expect_each_sample_once(rollout, work);
    for (const auto& engine : rollout.engines) {
      EXPECT_GE(engine->ended, 6 * (10 / ranks - 2));
      for (const SampleSpan& span : engine->spans) EXPECT_EQ(span.count, 6);
    }
  }
}

// The tables of docs/lab/024-idle-time-of-ranks.md: lengths and step times of the 8B rollout. Run with
// --gtest_also_run_disabled_tests.
TEST(Sharing, DISABLED_TableOfIdleRanks) {
  constexpr int64_t kPlaces = 256;
  for (const double common : {0.0, 0.5}) {
    std::printf("\nPart of the spread that siblings have in common: %.1f\n\n| samples a rank |", common);
    for (const int64_t ranks : {2, 4, 8}) std::printf(" %ld ranks | fewest, most | the rule before |", ranks);
    std::printf("\n|---|---|---|---|---|---|---|---|---|---|\n");
    for (const int64_t a_rank : {8, 32, 128, 256, 384, 1024, 2048}) {
      std::printf("| %ld |", a_rank);
      for (const int64_t ranks : {2, 4, 8}) {
        const int64_t samples = a_rank >= 32 ? 32 : 16;
        const SimulatedWork work = drawn(ranks * a_rank / samples, samples, 7, common, 794, 3800);
        const SimulatedRollout r = now(work, ranks, kPlaces), old = before(work, ranks, kPlaces);
        std::printf(" %.1f of %.1f | %ld, %ld | %.1f of %.1f |", r.idle_of_fastest(), r.slowest(), r.fewest(), r.most(),
                    old.idle_of_fastest(), old.slowest());
      }
      std::printf("\n");
    }
  }
}

}  // namespace
}  // namespace trireme
