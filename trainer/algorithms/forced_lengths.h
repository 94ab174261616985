// policy.generation.forced_lengths: rollouts of given lengths, for measurements.
#pragma once

#include <cstdint>
#include <optional>

#include "trainer/config/config.h"
#include "trainer/data/dataset.h"
#include "trainer/rollout/lengths.h"

namespace trireme {

// Nothing where they are off. Throws Error(kUser) where they are not those of the run's rollouts. `says`: warns that
// this run is a measurement.
std::optional<RolloutLengths> forced_lengths(const Config& config, bool says);

// The example's prompt cut, or again and again, to the length of a group.
void force_prompt(const RolloutLengths& lengths, int64_t group, PromptExample& example);

}  // namespace trireme
