// Lanes: shares of cache and places, whose samples go where, and stages that take their turns without a tick of idle
// time between them.
#include "trainer/rollout/lanes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "trainer/rollout/scheduler.h"

namespace trireme {
namespace {

TEST(Lanes, SharesDivideCacheAndPlaces) {
  EXPECT_EQ(lane_shares(1, 100, 7, 100), (std::vector<LaneShare>{{0, 100, 7}}));
  EXPECT_EQ(lane_shares(3, 100, 7, 30), (std::vector<LaneShare>{{0, 34, 3}, {34, 33, 2}, {67, 33, 2}}));
  EXPECT_EQ(lane_shares(4, 100, 7, 40).size(), 2u);  // the third one would not hold the longest sequence
  EXPECT_EQ(lane_shares(4, 100, 3, 10).size(), 3u);  // a place each
  EXPECT_EQ(lane_shares(4, 10, 7, 40), (std::vector<LaneShare>{{0, 10, 7}}));
  for (int64_t wanted = 1; wanted < 9; ++wanted) {
    for (int64_t rows = 1; rows < 60; ++rows) {
      const std::vector<LaneShare> shares = lane_shares(wanted, rows, 5, 9);
      int64_t next = 0, places = 0;
      for (const LaneShare& share : shares) {
        EXPECT_EQ(share.first_row, next);
        EXPECT_TRUE(shares.size() == 1 || share.rows >= 9);
        EXPECT_GE(share.max_sequences, 1);
        next += share.rows;
        places += share.max_sequences;
      }
      EXPECT_EQ(next, rows);
      EXPECT_EQ(places, 5);
    }
  }
}

using Parts = std::vector<LanePart>;

TEST(Lanes, ManyGroupsStayWholeAndFewAreSplit) {
  const auto deal = [](const std::vector<int64_t>& unfinished, const std::vector<int64_t>& groups,
                       const std::vector<size_t>& crowded = {}, int64_t places = 64) {
    std::vector<LaneLoad> lanes;
    for (const int64_t samples : unfinished) lanes.push_back({samples, places, false});
    for (const size_t lane : crowded) lanes[lane].crowded = true;
    return deal_to_lanes(std::move(lanes), groups);
  };
  EXPECT_EQ(deal({0, 0}, {8, 8, 8, 8}), (Parts{{0, 0, 8, 0}, {1, 0, 8, 1}, {2, 0, 8, 0}, {3, 0, 8, 1}}));
  EXPECT_EQ(deal({0, 0, 0, 0}, {64}), (Parts{{0, 0, 16, 0}, {0, 16, 16, 1}, {0, 32, 16, 2}, {0, 48, 16, 3}}));
  EXPECT_EQ(deal({0, 0}, {8, 8, 8}), (Parts{{0, 0, 8, 0}, {1, 0, 8, 1}, {2, 0, 4, 0}, {2, 4, 4, 1}}));
  EXPECT_EQ(deal({0, 0}, {7}), (Parts{{0, 0, 7, 0}}));                       // few: one lane is enough
  EXPECT_EQ(deal({0, 0}, {4}, {}, 2), (Parts{{0, 0, 2, 0}, {0, 2, 2, 1}}));  // but not if it has no place for them
  EXPECT_EQ(deal({30, 31}, {8}), (Parts{{0, 0, 8, 0}}));
  EXPECT_EQ(deal({3, 9}, {2, 2}, {0}), (Parts{{0, 0, 2, 1}, {1, 0, 2, 1}}));
  EXPECT_EQ(deal({3, 9}, {2}, {0, 1}), (Parts{{0, 0, 2, 0}}));
  EXPECT_EQ(deal({5}, {100, 1}), (Parts{{0, 0, 100, 0}, {1, 0, 1, 0}}));
}

TEST(Lanes, EverySampleGoesToOneLaneAndLanesStayAlike) {
  std::mt19937_64 random(5);
  const auto draw = [&random](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  for (int round = 0; round < 3000; ++round) {
    std::vector<LaneLoad> loads(static_cast<size_t>(draw(1, 6)));
    const bool level = draw(0, 1) == 0;
    for (LaneLoad& load : loads) load = {level ? 0 : draw(0, 40), 64, !level && draw(0, 4) == 0};
    std::vector<int64_t> groups(static_cast<size_t>(draw(1, 12)));
    for (int64_t& group : groups) group = draw(1, 24);
    std::vector<int64_t> next(groups.size(), 0);
    std::vector<LaneLoad> after = loads;
    for (const LanePart& part : deal_to_lanes(loads, groups)) {
      EXPECT_EQ(part.first, next[static_cast<size_t>(part.group)]);  // in order, none twice
      EXPECT_GE(part.count, 1);
      next[static_cast<size_t>(part.group)] += part.count;
      after[static_cast<size_t>(part.lane)].unfinished += part.count;
    }
    EXPECT_EQ(next, groups);
    if (!level) continue;
    const auto [fewest, most] = std::minmax_element(
        after.begin(), after.end(), [](const auto& a, const auto& b) { return a.unfinished < b.unfinished; });
    const int64_t mean = std::accumulate(groups.begin(), groups.end(), int64_t{0}) / static_cast<int64_t>(loads.size());
    EXPECT_LE(most->unfinished, std::max<int64_t>(mean + mean / 4 + 4, 8));
  }
}

// Stages on a virtual clock: a turn of a lane that has a step is a tick. It begins when the stage has had its turns
// before, and its rows and what the lane sampled last are there.
class Pipeline {
 public:
  Pipeline(int64_t stages, const LaneOrder& order, std::vector<std::vector<bool>> has_step)
      : order_(order), has_step_(std::move(has_step)), stages_(static_cast<size_t>(stages)) {
    for (Stage& stage : stages_) stage.looked.assign(static_cast<size_t>(order_.lanes), -1);
  }

  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t s = 0; s < stages_.size(); ++s) {
        while (turn(s)) moved = true;
      }
    }
    for (const Stage& stage : stages_) ASSERT_EQ(stage.next, turns()) << "stages wait for each other";
  }

  // Ticks between a stage's first turn and its last in which it computes nothing.
  int64_t idle(int64_t stage) const {
    const Stage& s = stages_.at(static_cast<size_t>(stage));
    return s.ended - s.begun - s.busy;
  }
  int64_t last_tick() const { return stages_.back().ended; }

 private:
  using Turn = std::tuple<int64_t, int64_t, int64_t>;  // round, piece, lane
  struct Stage {
    int64_t next = 0, clock = 0, busy = 0, begun = -1, ended = 0;
    bool computed = false;  // the turn's part ahead of looking
    std::map<Turn, int64_t> ends;
    std::vector<int64_t> looked;  // by lane: round of the last step whose tokens are known here
  };
  int64_t turns() const { return static_cast<int64_t>(has_step_.size()) * order_.pieces * order_.lanes; }
  bool has(int64_t round, int64_t lane) const {
    return round >= 0 && has_step_[static_cast<size_t>(round)][static_cast<size_t>(lane)];
  }
  std::optional<int64_t> end(size_t stage, const Turn& turn) const {
    const auto found = stages_[stage].ends.find(turn);
    return found == stages_[stage].ends.end() ? std::nullopt : std::optional(found->second);
  }

  bool turn(size_t s) {
    Stage& stage = stages_[s];
    if (stage.next == turns()) return false;
    const int64_t of_round = order_.pieces * order_.lanes;
    const int64_t round = stage.next / of_round, piece = stage.next % of_round / order_.lanes;
    const int64_t lane = stage.next % order_.lanes;
    const size_t last = stages_.size() - 1;
    if (!stage.computed && has(round, lane)) {
      std::vector<std::pair<size_t, Turn>> needs;
      if (s > 0) needs.push_back({s - 1, {round, piece, lane}});
      if (s == 0 && piece > 0) needs.push_back({last, {round, piece - 1, lane}});
      if (s == 0 && piece == 0 && has(round - 1, lane)) needs.push_back({last, {round - 1, order_.pieces - 1, lane}});
      int64_t begin = stage.clock;
      for (const auto& [of, what] : needs) {
        const auto there = end(of, what);
        if (!there) return false;
        begin = std::max(begin, *there);
      }
      // The plan is made from the tokens of the lane's last step, with late stops of the one before.
      if (piece == 0) {
        const int64_t known = round - (order_.late ? 2 : 1);
        EXPECT_TRUE(!has(known, lane) || stage.looked[static_cast<size_t>(lane)] >= known);
      }
      if (stage.begun < 0) stage.begun = begin;
      stage.clock = stage.ended = begin + 1;
      ++stage.busy;
      stage.ends[{round, piece, lane}] = stage.clock;
    }
    stage.computed = true;
    if (const auto seen = order_.looks_at(piece, lane)) {
      const bool of_this_round = !order_.late && *seen == 0;
      const int64_t of = of_this_round ? round : round - 1;
      if (has(of, *seen)) {
        const auto sampled = end(last, {of, order_.pieces - 1, *seen});
        if (!sampled) return false;
        // Only the host waits for them; the stage's next turn begins later anyhow, or has another lane's rows.
        if (!order_.late) stage.clock = std::max(stage.clock, *sampled);
      }
      stage.looked[static_cast<size_t>(*seen)] = of;
    }
    stage.computed = false;
    ++stage.next;
    return true;
  }

  const LaneOrder order_;
  const std::vector<std::vector<bool>> has_step_;  // by round and lane
  std::vector<Stage> stages_;
};

constexpr int64_t kRounds = 20;

TEST(Lanes, AFullPipelineHasNoIdleTick) {
  for (const int64_t stages : {2, 3, 4, 8}) {
    for (const int64_t pieces : {1, 2, 3}) {
      for (const bool late : {false, true}) {
        SCOPED_TRACE(std::to_string(stages) + " stages, " + std::to_string(pieces) + " pieces");
        const auto run = [&](int64_t lanes, int64_t with_steps) {
          std::vector<bool> has(static_cast<size_t>(lanes), false);
          std::fill(has.begin(), has.begin() + with_steps, true);
          Pipeline pipeline(stages, {lanes, pieces, late}, std::vector<std::vector<bool>>(kRounds, has));
          pipeline.run();
          return pipeline;
        };
        const Pipeline full = run(stages, stages), one = run(1, 1), half = run(stages, stages / 2);
        for (int64_t stage = 0; stage < stages; ++stage) {
          EXPECT_EQ(full.idle(stage), 0);
          EXPECT_EQ(one.idle(stage), (stages - 1) * (kRounds * pieces - 1));
          EXPECT_EQ(half.idle(stage), (stages - stages / 2) * (kRounds * pieces - 1));
        }
        EXPECT_EQ(full.last_tick(), stages * kRounds * pieces + stages - 1);  // until the last stage has begun
        EXPECT_EQ(one.last_tick(), stages * kRounds * pieces);
      }
    }
  }
}

// Lanes over one arena, their samples ending at random: every sample gets its tokens, no lane touches another's rows,
// and a stage is idle only where lanes have run out of samples.
TEST(Lanes, RandomWorkloadsAreIdleOnlyWhereALaneHasNothing) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto draw = [&random](int64_t low, int64_t high) {
      return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
    };
    const int64_t stages = draw(2, 4), longest = 40;
    std::vector<Scheduler> lanes;
    for (const LaneShare& share : lane_shares(stages, draw(2, 12) * longest, draw(2, 16), longest)) {
      lanes.emplace_back(SchedulerOptions{.cache_rows = share.rows,
                                          .first_row = share.first_row,
                                          .max_sequences = share.max_sequences,
                                          .prefill_chunk_tokens = draw(1, 30),
                                          .headroom_rows = draw(0, 8)});
    }
    std::vector<int64_t> groups(static_cast<size_t>(draw(1, 9)));
    for (int64_t& group : groups) group = draw(1, 12);
    std::vector<std::map<int64_t, int64_t>> wanted(lanes.size());  // tokens by sequence
    std::vector<LaneLoad> loads(lanes.size());
    for (const LanePart& part : deal_to_lanes(loads, groups)) {
      const auto lane = static_cast<size_t>(part.lane);
      const int64_t prompt = 1 + part.group * 2, most = longest - prompt;
      const int64_t first = lanes[lane].add_group(prompt, std::vector<int64_t>(static_cast<size_t>(part.count), most));
      for (int64_t i = 0; i < part.count; ++i) wanted[lane][first + i] = draw(1, most);
    }
    std::vector<std::vector<bool>> has_step;
    std::vector<std::map<int64_t, int64_t>> made(lanes.size());
    int64_t empty_turns = 0;
    while (std::any_of(lanes.begin(), lanes.end(), [](const Scheduler& lane) { return !lane.idle(); })) {
      has_step.emplace_back();
      for (size_t lane = 0; lane < lanes.size(); ++lane) {
        StepPlan plan;
        lanes[lane].plan(plan);
        has_step.back().push_back(!plan.empty());
        empty_turns += plan.empty() ? 1 : 0;
        if (plan.empty()) continue;
        lanes[lane].commit(plan);
        lanes[lane].check();
        for (const Output& output : plan.outputs) {
          if (++made[lane][output.sequence] == wanted[lane].at(output.sequence)) lanes[lane].stop(output.sequence);
        }
        lanes[lane].check();
      }
    }
    EXPECT_EQ(made, wanted);
    Pipeline pipeline(stages, {static_cast<int64_t>(lanes.size()), 1, false}, has_step);
    pipeline.run();
    const int64_t missing = (stages - static_cast<int64_t>(lanes.size())) * static_cast<int64_t>(has_step.size());
    for (int64_t stage = 0; stage < stages; ++stage) EXPECT_LE(pipeline.idle(stage), empty_turns + missing);
  }
}

}  // namespace
}  // namespace trireme
