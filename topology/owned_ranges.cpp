#include "topology/owned_ranges.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

namespace trireme {

RankSlices::RankSlices(const ModelShape& shape, const Layout& layout, const StageOptions& stages,
                       std::vector<int64_t> ranks)
    : shape_(shape), ranks_(std::move(ranks)) {
  std::map<std::array<int64_t, 4>, size_t> known;
  for (const int64_t rank : ranks_) {
    const Coordinates at = coordinates(layout, rank);
    const auto [place, is_new] = known.try_emplace({at.tp, at.pp, at.ep, at.etp}, splits_.size());
    if (is_new) splits_.push_back(model_split(shape, layout, rank, stages));
    place_of_.push_back(place->second);
  }
}

void RankSlices::look_at(const ModelParameter& parameter) {
  slices_.clear();
  for (const ModelSplit& split : splits_) {
    std::optional<ParameterSlice> slice = parameter_slice(shape_, split, parameter.name);
    if (slice && slice->range.size() <= 0) slice.reset();  // padding only
    slices_.push_back(std::move(slice));
  }
}

std::vector<OwnedRange> owned_ranges(const RankSlices& slices) {
  const std::vector<int64_t>& ranks = slices.ranks();
  std::vector<int64_t> borders;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (const ParameterSlice* slice = slices.slice(i))
      borders.insert(borders.end(), {slice->range.begin, slice->range.end});
  }
  std::sort(borders.begin(), borders.end());
  borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
  std::vector<OwnedRange> found;
  for (size_t i = 0; i + 1 < borders.size(); ++i) found.push_back({{borders[i], borders[i + 1]}, {}});
  for (size_t i = 0; i < ranks.size(); ++i) {
    const ParameterSlice* slice = slices.slice(i);
    for (OwnedRange& owned : found) {
      if (slice != nullptr && slice->range.begin <= owned.range.begin && owned.range.end <= slice->range.end)
        owned.owners.push_back(ranks[i]);
    }
  }
  return found;
}

bool add_copies(const ParameterSlice& wanted, const std::vector<OwnedRange>& owned, RefitCopy like,
                int64_t element_bytes, const ChooseOwner& choose, std::vector<RefitCopy>& copies) {
  like.dimension = wanted.dimension;
  like.unit_bytes = wanted.elements() / wanted.range.size() * element_bytes;
  const size_t first = copies.size();
  int64_t found = 0;
  for (const OwnedRange& one : owned) {
    like.range = {std::max(one.range.begin, wanted.range.begin), std::min(one.range.end, wanted.range.end)};
    if (like.range.size() <= 0) continue;
    found += like.range.size();
    like.from = choose(one.owners, like.bytes());
    if (copies.size() > first && copies.back().from == like.from) {
      copies.back().range.end = like.range.end;
    } else {
      copies.push_back(like);
    }
  }
  return found == wanted.range.size();
}

}  // namespace trireme
