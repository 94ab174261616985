// How the flat buffers of a rank are dealt to the ranks that hold the same of the model. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "trainer/model/parameter_layout.h"

namespace trireme {

// What is gathered, and reduced, at once where weights or gradients are sharded: the embedding, a layer, its split
// experts, final norm and head. What tensor ranks hold alike (norms) and frozen parameters belong to none.
struct WeightUnit {
  int64_t begin = 0, end = 0;  // in the flat buffers
  int64_t place = 0;           // in a forward pass: 0 the embedding, then the rank's layers, then what follows them
  bool experts = false;        // shared by the ranks that hold the same experts only
};
// Those that are not empty, ascending.
std::vector<WeightUnit> weight_units(const ParameterLayout& layout);

// A stretch of the flat buffers of which each of `ranks` ranks has a part.
struct FlatBucket {
  int64_t begin = 0, size = 0;
  int64_t width = 0;  // size made a multiple of the ranks
  int64_t at = 0;     // of a rank's part among all that it owns
  int64_t ranks = 1;
  bool experts = false;
  int64_t part() const { return width / ranks; }
};

struct ShardLayout {
  std::vector<FlatBucket> buckets;  // ascending
  int64_t owned = 0;                // elements of a rank, padding included

  // Buckets of `bucket_elements` at most for [begin, end) of the flat buffers.
  void add(int64_t begin, int64_t end, int64_t ranks, int64_t bucket_elements, bool experts);
};

// Of everything that is trained, no bucket across the border of a unit. `ranks` share it, `expert_ranks` the experts.
ShardLayout shard_layout(const ParameterLayout& layout, int64_t ranks, int64_t expert_ranks, int64_t bucket_elements);

}  // namespace trireme
