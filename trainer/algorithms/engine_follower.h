// The ranks of an engine behind its leader: each generates with its part of the model what the leader says, has no
// rewards, and is not known to the actor but by its part of the weights.
#pragma once

#include "trainer/algorithms/engine_rank.h"

namespace trireme {

// Returns when the leader's run is over. Throws Error(kUnavailable) when the leader has gone or has failed.
void follow_leader(EngineRank& rank);

}  // namespace trireme
