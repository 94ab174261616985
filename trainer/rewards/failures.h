// Failures of rewards over all ranks, and when there are too many of them. Pure.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "trainer/rewards/pool.h"

namespace trireme {

// What was counted between two looks at the same pool; last_error is empty for a reward without a failure since.
std::vector<RewardCounters> counted_since(const std::vector<RewardCounters>& now,
                                          const std::vector<RewardCounters>& before);

// For the way between ranks. sum_counters takes one of each rank (index: the rank), with the same rewards; last_error
// is then that of the first rank that has one, with its number before it. Throws Error(kData) for a malformed text.
std::string pack_counters(const std::vector<RewardCounters>& counters);
std::vector<RewardCounters> sum_counters(const std::vector<std::string>& of_ranks);

// Into `sum`, which is empty or of the same rewards.
void add_counters(std::vector<RewardCounters>& sum, const std::vector<RewardCounters>& more);

// A sentence when a reward failed for more than `share` of what it scored: training would go on with what is left.
std::optional<std::string> too_many_failed(const std::vector<RewardCounters>& counted, double share);

}  // namespace trireme
