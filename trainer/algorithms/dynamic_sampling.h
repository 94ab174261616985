// Dynamic sampling (DAPO: Yu et al. 2025, section 3.2): generation goes on until there are enough groups to learn from.
#pragma once

#include <cstdint>
#include <vector>

#include "trainer/batch/sample.h"

namespace trireme {

// Of one training step. Groups whose rewards are all equal teach nothing and are left out.
class DynamicSampling final {
 public:
  // `max_batches`: generation batches that a step may take.
  DynamicSampling(int64_t wanted_groups, int64_t group_size, int64_t max_batches);

  // The next generation batch, whole groups in data order. What it has more than is wanted is counted and forgotten.
  void add(std::vector<Sample> batch);
  bool complete() const { return groups_ == wanted_groups_; }
  // Throws Error(kData) when another batch would be one too many.
  void check_may_go_on() const;

  int64_t batches() const { return batches_; }
  int64_t discarded_valid_samples() const { return discarded_; }  // of groups that would have taught something
  // The kept groups, numbered anew from 0.
  std::vector<Sample> take() { return std::move(kept_); }

 private:
  const int64_t wanted_groups_, group_size_, max_batches_;
  int64_t groups_ = 0, batches_ = 0, discarded_ = 0;
  std::vector<Sample> kept_;
};

}  // namespace trireme
