// From the configuration to what a plan is made of.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "topology/plan.h"
#include "trainer/config/config.h"

namespace trireme {

PlanOptions plan_options(const Config& config);

// How long prompts and responses are, which a configuration does not say. 0: derived. Where
// policy.generation.forced_lengths is set it counts instead.
struct PlannedLengths {
  int64_t prompt = 0;    // in the mean; 0: 200, or a quarter of the longest sample
  int64_t response = 0;  // in the mean; 0: a quarter of the longest response
};
// How many engines generate, by the devices of policy.generation.colocated.resources; 0: it does not say, or none do.
// An engine's devices are on one node.
int64_t planned_engines(const Config& config);
// Why these devices are not even one engine's: a sentence that names the key; nothing where they are, or none are said.
std::optional<std::string> too_few_engine_devices(const Config& config);

// Of one step; where no number of engines is said, as many as the ranks' number of devices makes; engines' experts are
// not split (Workload::engine); responses vary as those of bench's synthetic lengths, the longest is as long as it may
// be.
Workload planned_work(const Config& config, const PlannedLengths& lengths);

// Of the models that a run has beside its policy, by their shapes, whose head is a value head whatever they say. Both
// read the samples of planned_work(config, lengths), the critic in micro-batches of its own.
PlannedModel planned_critic(const Config& config, ModelShape shape, const PlannedLengths& lengths);
PlannedModel planned_reward_model(const Config& config, ModelShape shape, const PlannedLengths& lengths);

}  // namespace trireme
