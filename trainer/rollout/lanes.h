// Lanes: a pipeline's samples dealt to schedulers that take turns, so that a stage computes one lane's step while the
// others are at other stages. Lengths and numbers only, and functions of their arguments: all stages decide alike.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace trireme {

// What of the cache and of the places is one lane's.
struct LaneShare {
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t max_sequences = 0;
  bool operator==(const LaneShare&) const = default;
};

// Shares of at most `wanted` lanes, at least one: as many as there are places, and as have room for the longest
// sequence in their rows.
std::vector<LaneShare> lane_shares(int64_t wanted, int64_t cache_rows, int64_t max_sequences, int64_t longest_rows);

struct LaneLoad {
  int64_t unfinished = 0;  // samples
  int64_t places = 1;      // samples that it decodes at once
  bool crowded = false;    // what it has could not all begin in its last step
};

// Samples [first, first + count) of groups[group], which go to one lane.
struct LanePart {
  int64_t group = 0;
  int64_t first = 0;
  int64_t count = 0;
  int64_t lane = 0;
  bool operator==(const LanePart&) const = default;
};

// Deals groups of these many samples, in their order, each to the lane with the fewest; crowded ones get none while
// others are not. A group stays whole, since each lane computes its prompt once, unless that would make a lane much
// longer than the others: then siblings go to several lanes, a few at least to each, if it has places for a few.
std::vector<LanePart> deal_to_lanes(std::vector<LaneLoad> lanes, const std::vector<int64_t>& groups);

// One round: every lane's step passes through all of the stage's pieces. In the order of turns: piece 0 of every lane,
// then piece 1 of every lane, and so on, so that a lane comes round to a stage when the others have had their turns. A
// stage takes its turns in this order; nobody waits for a tick.
struct LaneOrder {
  int64_t lanes = 1;
  int64_t pieces = 1;  // of each stage
  bool late = false;   // a lane's next step is planned before what its last one sampled is looked at (late_stops)

  // Whose sampled tokens are looked at behind this turn: as late as the lane's next plan allows. Late: the tokens of
  // the step before the one that it has just begun. Else those of its last step.
  std::optional<int64_t> looks_at(int64_t piece, int64_t lane) const;
};

}  // namespace trireme
