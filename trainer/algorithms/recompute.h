// How much of a micro-batch's activations backward computes again: what the configuration says, or as little as fits.
#pragma once

#include <cstdint>
#include <functional>

#include "topology/activations.h"
#include "trainer/config/config.h"
#include "trainer/model/context_rows.h"
#include "trainer/model/model.h"
#include "trainer/parallel/context.h"

namespace trireme {

// What is kept between forward and backward on a rank.
struct KeptActivations {
  int64_t tokens = 0;     // of the largest micro-batch, those that the rank computes
  int64_t shared = 0;     // of context parallel ranks: OwnRows::shared
  int64_t pieces = 1;     // of the rank's stage, which share its layers
  int64_t in_flight = 1;  // pairs of piece and micro-batch that are kept at once
};
// Of an optimizer step (train_passes) whose micro-batches have at most so much for this rank.
KeptActivations kept_activations(const ModelSplit& split, const OwnRows& most, int64_t micro_batches);

// The least of it that fits: first norms and SwiGLU of more and more layers, then experts' gate and up, then whole
// layers. The most there is where nothing fits. `needed` is what the choice is expected to take; null: not asked.
// `gradient_bytes`: of an element of the model's gradients.
Recompute fit_recompute(const LocalShape& shape, int64_t element_bytes, const KeptActivations& kept, int64_t free_bytes,
                        int64_t* needed = nullptr, int64_t gradient_bytes = 2);

// Collective. Sets it for this rank's micro-batches as the configuration says. Where that leaves it to the memory (on
// CUDA; on CPU nothing is computed again), all ranks of a pipeline stage take what the one with the least room needs.
// Says so in rank 0's log when it changes. `make_room` is called where something would have to be computed again and
// may free memory of the device first; null: nothing can be freed.
void set_recompute(Model& model, const Config& config, const KeptActivations& kept, ParallelContext& ranks,
                   const std::function<void()>& make_room = nullptr);
// The same for this rank alone and what is free now: gradients do not depend on it.
void set_own_recompute(Model& model, const Config& config, int64_t tokens);

// What a pass without gradients over `tokens` tokens takes at most: counted as a training pass that keeps the least.
int64_t pass_bytes(const LocalShape& shape, int64_t element_bytes, const KeptActivations& at_once);
// Ahead of such passes over micro-batches of at most `tokens` tokens. Collective over the ranks that generate together:
// all of them call `make_room` where one may not have the memory. Nothing on CPU, or where `make_room` is empty.
void make_room_for_passes(const Model& model, int64_t tokens, ParallelContext& ranks,
                          const std::function<void()>& make_room);

}  // namespace trireme
