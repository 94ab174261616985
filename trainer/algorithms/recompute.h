// How much of a micro-batch's activations backward computes again: what the configuration says, or as little as fits.
#pragma once

#include <cstdint>
#include <functional>

#include "topology/activations.h"
#include "trainer/config/config.h"
#include "trainer/model/model.h"
#include "trainer/parallel/communicator.h"

namespace trireme {

// The least of it that fits: first norms and SwiGLU of more and more layers, then whole layers. The most there is where
// nothing fits. `needed` is what the choice is expected to take; null: not asked.
Recompute fit_recompute(const LocalShape& shape, int64_t element_bytes, int64_t tokens, int64_t free_bytes,
                        int64_t* needed = nullptr);

// Collective. Sets it for micro-batches of at most `tokens` rows (of this rank) as the configuration says. Where that
// leaves it to the memory (on CUDA; on CPU nothing is computed again), all ranks take what the one with the least room
// needs. Says so in rank 0's log when it changes. `make_room` is called where something would have to be computed again
// and may free memory of the device first; null: nothing can be freed.
void set_recompute(Model& model, const Config& config, int64_t tokens, Communicator& ranks,
                   const std::function<void()>& make_room = nullptr);
// The same for this rank alone and what is free now: gradients do not depend on it.
void set_own_recompute(Model& model, const Config& config, int64_t tokens);

}  // namespace trireme
