#include "trainer/rollout/lanes.h"

#include <algorithm>

#include "base/error.h"

namespace trireme {
namespace {

constexpr int64_t kFewSiblings = 4;  // fewer would compute the prompt too often
constexpr int64_t kEvenWithin = 4;   // a lane may be longer than the mean by this part of it

}  // namespace

std::vector<LaneShare> lane_shares(int64_t wanted, int64_t cache_rows, int64_t max_sequences, int64_t longest_rows) {
  const int64_t most = std::min(max_sequences, cache_rows / std::max<int64_t>(1, longest_rows));
  const int64_t lanes = std::max<int64_t>(1, std::min(wanted, most));
  std::vector<LaneShare> shares;
  int64_t row = 0;
  for (int64_t i = 0; i < lanes; ++i) {
    const auto part = [&](int64_t whole) { return whole / lanes + (i < whole % lanes ? 1 : 0); };
    shares.push_back({row, part(cache_rows), part(max_sequences)});
    row += shares.back().rows;
  }
  return shares;
}

std::vector<LanePart> deal_to_lanes(std::vector<LaneLoad> lanes, const std::vector<int64_t>& groups) {
  TRIREME_CHECK(!lanes.empty(), "samples are dealt to no lane");
  const bool all_crowded = std::all_of(lanes.begin(), lanes.end(), [](const LaneLoad& lane) { return lane.crowded; });
  const auto open = [&](const LaneLoad& lane) { return all_crowded || !lane.crowded; };
  int64_t samples = 0, count_open = 0;
  for (const int64_t group : groups) samples += group;
  for (const LaneLoad& lane : lanes) {
    if (!open(lane)) continue;
    samples += lane.unfinished;
    ++count_open;
  }
  const int64_t mean = (samples + count_open - 1) / count_open;  // once all are dealt
  std::vector<LanePart> parts;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (int64_t first = 0; first < groups[g];) {
      size_t lane = lanes.size();
      for (size_t i = 0; i < lanes.size(); ++i) {
        if (open(lanes[i]) && (lane == lanes.size() || lanes[i].unfinished < lanes[lane].unfinished)) lane = i;
      }
      const int64_t left = groups[g] - first;
      int64_t count = left;
      const int64_t few = std::clamp<int64_t>(lanes[lane].places, 1, kFewSiblings);
      if (count_open > 1 && lanes[lane].unfinished + left > mean + mean / kEvenWithin && left >= 2 * few)
        count = std::clamp(mean - lanes[lane].unfinished, few, left - few);
      parts.push_back({static_cast<int64_t>(g), first, count, static_cast<int64_t>(lane)});
      lanes[lane].unfinished += count;
      first += count;
    }
  }
  return parts;
}

std::optional<int64_t> LaneOrder::looks_at(int64_t piece, int64_t lane) const {
  if (late) return piece == 0 ? std::optional(lane) : std::nullopt;
  // Before a lane's next step begins: behind the turn ahead of that, and of the first lane at the end of the round.
  if (lane + 1 == lanes && piece + 1 == pieces) return 0;
  if (piece == 0 && lane + 1 < lanes) return lane + 1;
  return std::nullopt;
}

}  // namespace trireme
