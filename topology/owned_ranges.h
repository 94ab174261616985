// What of each parameter the ranks of a layout have, and how another layout's slices are put together from it: what
// refit and weight_plan have in common.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "topology/refit.h"
#include "topology/split.h"

namespace trireme {

// The slices of some ranks. Those at one place of the model have the same, so each place is asked once: there are few
// places and many ranks.
class RankSlices final {
 public:
  // Of `ranks` (ascending) of a layout that is legal for the shape, which outlives this.
  RankSlices(const ModelShape& shape, const Layout& layout, const StageOptions& stages, std::vector<int64_t> ranks);

  void look_at(const ModelParameter& parameter);
  const std::vector<int64_t>& ranks() const { return ranks_; }
  // Of the parameter looked at last, by the index in ranks(); null: nothing of it, or padding only.
  const ParameterSlice* slice(size_t index) const {
    const std::optional<ParameterSlice>& found = slices_[place_of_[index]];
    return found ? &*found : nullptr;
  }

 private:
  const ModelShape& shape_;
  const std::vector<int64_t> ranks_;
  std::vector<ModelSplit> splits_;
  std::vector<size_t> place_of_;  // of each rank
  std::vector<std::optional<ParameterSlice>> slices_;
};

// Indices of a parameter's dimension, and the ranks that have all of them, ascending.
struct OwnedRange {
  Range range;
  std::vector<int64_t> owners;
};

// The parameter looked at last, cut where any rank's slice begins or ends.
std::vector<OwnedRange> owned_ranges(const RankSlices& slices);

// Who sends so many bytes, of the ranks that have them.
using ChooseOwner = std::function<int64_t(const std::vector<int64_t>& owners, int64_t bytes)>;

// Adds what is `wanted` of a parameter, from whom `choose` says; ranges next to each other of one rank are one copy.
// `like`: whose and of which parameter. Whether that is all.
bool add_copies(const ParameterSlice& wanted, const std::vector<OwnedRange>& owned, RefitCopy like,
                int64_t element_bytes, const ChooseOwner& choose, std::vector<RefitCopy>& copies);

}  // namespace trireme
