#include "trainer/model/shard_layout.h"

#include <algorithm>

namespace trireme {

std::vector<WeightUnit> weight_units(const ParameterLayout& layout) {
  std::vector<WeightUnit> units;
  const auto add = [&](int64_t begin, int64_t end, int64_t place, bool experts) {
    if (begin < end) units.push_back({begin, end, place, experts});
  };
  const std::vector<int64_t>& begins = layout.layer_begins;
  const auto layers = static_cast<int64_t>(begins.size()) - 1;
  add(layout.alike_elements, begins.front(), 0, false);
  for (int64_t i = 0; i < layers; ++i)
    add(begins[static_cast<size_t>(i)], begins[static_cast<size_t>(i + 1)], i + 1, false);
  add(begins.back(), layout.split_experts, layers + 1, false);
  for (int64_t i = 0; i < static_cast<int64_t>(layout.expert_layers.size()); ++i) {
    const Range& own = layout.expert_layers[static_cast<size_t>(i)];
    add(own.begin, own.end, i + 1, true);
  }
  return units;
}

void ShardLayout::add(int64_t begin, int64_t end, int64_t ranks, int64_t bucket_elements, bool experts) {
  while (begin < end) {
    const int64_t width = (std::min(bucket_elements, end - begin) + ranks - 1) / ranks * ranks;
    buckets.push_back({begin, std::min(width, end - begin), width, owned, ranks, experts});
    owned += width / ranks;
    begin += width;
  }
}

ShardLayout shard_layout(const ParameterLayout& layout, int64_t ranks, int64_t expert_ranks, int64_t bucket_elements) {
  ShardLayout result;
  result.add(0, layout.alike_elements, ranks, bucket_elements, false);
  for (const WeightUnit& unit : weight_units(layout))
    result.add(unit.begin, unit.end, unit.experts ? expert_ranks : ranks, bucket_elements, unit.experts);
  return result;
}

}  // namespace trireme
