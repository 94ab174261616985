// The GRPO loop (and what is a configuration of it: DAPO, GSPO, CISPO, REINFORCE, Reinforce++).
#pragma once

#include "trainer/algorithms/session.h"

namespace trireme {

// Collective over all ranks. Throws Error for the first cause of a failure.
TrainSummary run_grpo(const Config& config, const TrainOptions& options);

}  // namespace trireme
