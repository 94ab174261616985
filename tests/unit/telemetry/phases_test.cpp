#include "trainer/telemetry/phases.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>

namespace trireme {
namespace {

double sum(const PhaseTimes& times) { return std::accumulate(times.seconds.begin(), times.seconds.end(), 0.0); }

TEST(PhaseTimer, ChargesTheInnermostPhaseAndTheRestToIdle) {
  double now = 100;
  PhaseTimer timer([&] { return now; });
  timer.start_step();
  now += 1;  // idle
  {
    auto generation = timer.enter(Phase::kGeneration);
    now += 4;
    {
      auto rewards = timer.enter(Phase::kRewards);
      EXPECT_EQ(timer.current(), Phase::kRewards);
      now += 2;
    }
    now += 8;
  }
  now += 16;
  {
    auto training = timer.enter(Phase::kTraining);
    now += 32;
    training.end();
    training.end();  // once is enough
    now += 64;
  }
  const PhaseTimes times = timer.finish_step();
  EXPECT_EQ(times.total_s, 127);
  EXPECT_EQ(times.of(Phase::kGeneration), 12);
  EXPECT_EQ(times.of(Phase::kRewards), 2);
  EXPECT_EQ(times.of(Phase::kTraining), 32);
  EXPECT_EQ(times.of(Phase::kIdle), 81);
  EXPECT_EQ(sum(times), times.total_s);
}

TEST(PhaseTimer, StepsFollowEachOtherWithoutAGap) {
  double now = 0;
  PhaseTimer timer([&] { return now; });
  auto generation = timer.enter(Phase::kGeneration);
  now = 3;
  EXPECT_EQ(timer.peek().of(Phase::kGeneration), 3);
  EXPECT_EQ(timer.finish_step().of(Phase::kGeneration), 3);
  now = 5;  // still in the phase
  const PhaseTimes second = timer.finish_step();
  EXPECT_EQ(second.total_s, 2);
  EXPECT_EQ(second.of(Phase::kGeneration), 2);
  timer.start_step();
  now = 6;
  generation.end();
  EXPECT_EQ(timer.finish_step().of(Phase::kGeneration), 1);
}

TEST(PhaseTimer, RealClockAddsUpWithinOnePercent) {
  PhaseTimer timer;
  timer.start_step();
  for (int i = 0; i < 200; ++i) {
    auto outer = timer.enter(i % 2 ? Phase::kGeneration : Phase::kTraining);
    auto inner = timer.enter(Phase::kLogprobs);
    std::this_thread::yield();
  }
  const PhaseTimes times = timer.finish_step();
  EXPECT_GT(times.total_s, 0);
  EXPECT_NEAR(sum(times), times.total_s, 0.01 * times.total_s);
}

TEST(Phases, NamesAreDistinct) {
  for (const Phase a : all_phases()) {
    for (const Phase b : all_phases()) {
      if (a == b) continue;
      EXPECT_STRNE(to_string(a), to_string(b));
      EXPECT_STRNE(timing_name(a), timing_name(b));
    }
  }
}

}  // namespace
}  // namespace trireme
