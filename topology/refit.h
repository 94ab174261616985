// Refit: which weights go from which rank to which where generation has another layout than training. Pure: every rank
// finds the same.
#pragma once

#include <cstdint>
#include <vector>

#include "topology/split.h"

namespace trireme {

// The layout that the ranks of `training` generate in: `tp` tensor ranks (0: as many as training), and with `fold` one
// stage instead of training's. Ranks keep their numbers, so stages and tensor groups of training stay where they are;
// data and context parallel ranks are replicas. Legal only if check_layout says so, of a world of training.world().
Layout generation_layout(const Layout& training, int64_t tp, bool fold);

// Both are of the same ranks and legal for the shape.
struct RefitLayouts {
  Layout training, generation;
  StageOptions training_stages, generation_stages;
  int64_t of_node = 0;  // ranks of a host (slot_of); 0: all are on one
};

// Of one parameter: the indices `range` of `dimension` and everything of the other dimensions.
struct RefitCopy {
  int64_t from = 0, to = 0;  // ranks; one and the same: within it
  int64_t parameter = 0;     // in the list that was given
  int64_t dimension = 0;
  Range range;             // of the whole parameter's; never of padding
  int64_t unit_bytes = 0;  // of one index
  int64_t bytes() const { return range.size() * unit_bytes; }
  bool operator==(const RefitCopy&) const = default;
};

struct RefitPlan {
  int64_t ranks = 0;              // of the world
  std::vector<RefitCopy> copies;  // by parameter, then `to`, then range
};

// Every element of `parameters` (some of model_parameters(shape)) that a rank has in generation comes to it once, from
// a rank that has it in training: from itself; else from its own host; else from any. Of those the one that has sent
// least so far, which spreads what is sent evenly over replicas; between hosts and within them each counts by itself.
// Elements have `element_bytes`.
RefitPlan refit_plan(const ModelShape& shape, const std::vector<ModelParameter>& parameters,
                     const RefitLayouts& layouts, int64_t element_bytes);

// What a rank sends to the others of its group at once, and receives: by the other rank, ascending, and of each in the
// order of the plan, so that a message reads alike at both ends.
struct RefitBucket {
  std::vector<RefitCopy> sends, receives;
};

// One rank's part.
struct RankRefit {
  // Ranks that give each other something, directly or not, this one too; ascending. They have as many buckets and carry
  // them out together: each pair has about as much in every bucket, so that nobody's turn is another's wait.
  std::vector<int64_t> group;
  std::vector<RefitCopy> own;  // within the rank
  std::vector<RefitBucket> buckets;
};

// In a bucket no rank sends more than `bucket_bytes` (at least 1), nor receives more, but for less than one unit of a
// copy for each rank that it sends to, or receives from. Copies are cut between their indices where they do not fit.
RankRefit rank_refit(const RefitPlan& plan, int64_t rank, int64_t bucket_bytes);

}  // namespace trireme
