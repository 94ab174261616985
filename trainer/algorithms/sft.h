// Supervised fine-tuning: next-token loss on the responses, packed, divided by the global number of response tokens.
#pragma once

#include "trainer/algorithms/session.h"

namespace trireme {

// Collective over all ranks. Throws Error for the first cause of a failure.
TrainSummary run_sft(const Config& config, const TrainOptions& options);

}  // namespace trireme
