#include "trainer/algorithms/dynamic_sampling.h"

#include <utility>

#include "base/error.h"
#include "trainer/algorithms/rollout_metrics.h"

namespace trireme {

DynamicSampling::DynamicSampling(int64_t wanted_groups, int64_t group_size, int64_t max_batches)
    : wanted_groups_(wanted_groups), group_size_(group_size), max_batches_(max_batches) {}

void DynamicSampling::add(std::vector<Sample> batch) {
  TRIREME_CHECK(batch.size() % static_cast<size_t>(group_size_) == 0, "dynamic sampling got part of a group");
  ++batches_;
  for (auto begin = batch.begin(); begin != batch.end(); begin += group_size_) {
    const auto end = begin + group_size_;
    if (is_flat(begin, end)) continue;
    if (complete()) {
      discarded_ += group_size_;
      continue;
    }
    for (auto sample = begin; sample != end; ++sample) {
      sample->group = groups_;
      kept_.push_back(std::move(*sample));
    }
    ++groups_;
  }
}

void DynamicSampling::check_may_go_on() const {
  if (batches_ == 0 || batches_ < max_batches_) return;
  fail_data("dynamic sampling: after " + std::to_string(batches_) + " generation batches only " +
            std::to_string(groups_) + " of " + std::to_string(wanted_groups_) +
            " groups have rewards that differ; raise grpo.dynamic_sampling_max_gen_batches or choose other data");
}

}  // namespace trireme
