#include "trainer/ops/decode_choice.h"

#include <algorithm>

namespace trireme {
namespace {

constexpr int64_t kTile = 64;  // keys

// Microseconds from one tile of a run to the next where nothing else holds it up, and the pairs that are at work at
// once. Measured on H200 with key heads of 128 (docs/lab/006); other devices and head sizes change all of them
// alike, near enough for a choice.
struct Pace {
  double tile_us;
  int64_t pairs;
};
Pace pace_of(DecodeKernel kernel, const DecodeRoom& room) {
  switch (kernel) {
    case DecodeKernel::kCluster8:
      return {0.18, room.clusters8};
    case DecodeKernel::kCluster4:
      return {0.21, room.clusters4};
    case DecodeKernel::kCluster2:
      return {0.40, room.clusters2};
    case DecodeKernel::kSharedDeep:
      return {0.72, room.sms};
    case DecodeKernel::kShared:
      break;
  }
  return {0.80, 2 * room.sms};
}
// Only where the fixed times of a kernel no longer count, and where one run is several times as long as the mean.
constexpr int64_t kLong = 16'384, kUneven = 3;
constexpr double kTilesOfMemory = 131;  // key heads' tiles a microsecond that its memory gives an H200

DecodeKernel by_number(int64_t pairs, const DecodeRoom& room) {
  if (pairs <= room.clusters8) return DecodeKernel::kCluster8;
  if (pairs <= room.clusters4) return DecodeKernel::kCluster4;
  if (pairs <= room.clusters2) return DecodeKernel::kCluster2;
  return pairs <= room.sms ? DecodeKernel::kSharedDeep : DecodeKernel::kShared;
}

}  // namespace

DecodeRoom DecodeRoom::of(int64_t part) const {
  if (sms <= 0) return *this;
  return {part, clusters2 * part / sms, clusters4 * part / sms, clusters8 * part / sms};
}

DecodeKernel choose_decode_kernel(const DecodeWork& work, const DecodeRoom& room) {
  const DecodeKernel usual = by_number(work.runs * work.kv_heads, room);
  if (work.longest_keys < kLong || work.longest_keys * work.runs < kUneven * work.total_keys) return usual;
  const auto tiles = [](int64_t keys) { return static_cast<double>((keys + kTile - 1) / kTile); };
  const double longest = tiles(work.longest_keys);
  // Every run has a tile at least, and half a one that is not full.
  const double all = static_cast<double>(work.kv_heads) *
                     (static_cast<double>(work.total_keys) / kTile + static_cast<double>(work.runs) / 2);
  const auto tiles_a_us = [&](const Pace& pace) {
    return std::min(static_cast<double>(pace.pairs) / pace.tile_us, kTilesOfMemory);
  };
  // At best the usual one is bound by its longest run or by all of them, at worst another does one after the other.
  const Pace pace = pace_of(usual, room);
  double least = std::max(longest * pace.tile_us, all / tiles_a_us(pace));
  DecodeKernel best = usual;
  constexpr double kClearly = 0.8;
  least *= kClearly;
  for (const DecodeKernel kernel : {DecodeKernel::kCluster8, DecodeKernel::kCluster4, DecodeKernel::kCluster2}) {
    const Pace other = pace_of(kernel, room);
    if (kernel == usual || other.pairs <= 0) continue;
    const double us = longest * other.tile_us + all / tiles_a_us(other);
    if (us < least) least = us, best = kernel;
  }
  return best;
}

}  // namespace trireme
