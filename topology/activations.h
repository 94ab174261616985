// What the activations of a micro-batch take on a rank: one formula, for what backward computes again and for planning.
#pragma once

#include <cstdint>

#include "topology/split.h"

namespace trireme {

// Bytes of one token of the micro-batch. What a layer keeps between forward and backward, and what backward needs
// besides: counted from the tensors that the layer's operations save (trainer/model/model.cpp, trainer/ops). Under
// tensor parallelism what is not of heads or of the MLP is kept for every tp-th row only, and the inputs of products,
// which are gathered, are gathered again.
struct ActivationBytes {
  int64_t whole = 0;  // of a layer that keeps everything
  int64_t cheap = 0;  // of one that computes norms and SwiGLU again
  // Of one that computes experts' gate and up again besides; without experts, as much as `cheap`.
  int64_t experts = 0;
  int64_t input = 0;    // of one that keeps its input only
  int64_t passing = 0;  // once: gradients and temporaries of the layer that is being differentiated, the final norm
  int64_t ending = 0;   // once, before that: the final norm's, the head's input and its gradient
  // Beside the latter, whatever the number of tokens: chunks of logits, the head's gradient where it is not added up in
  // float32 in its buffer; where the head is.
  int64_t fixed = 0;
};
// `gathered_keys`: rows whose keys and values a context parallel rank has from all of them, for each row that it
// computes; its layers keep these beside their own.
ActivationBytes activation_bytes(const LocalShape& shape, int64_t element_bytes, int64_t gradient_bytes = 2,
                                 double gathered_keys = 0);

// Layers of the rank (of one piece of it, where it has several) by what they keep; those that keep less come first.
struct KeptLayers {
  int64_t input = 0, experts = 0, cheap = 0, whole = 0;
};
// Of micro-batches of `tokens` tokens, `in_flight` of them at once (PipelineTable::most_in_flight; at least 1), of
// which one is being differentiated.
int64_t activation_total(const ActivationBytes& bytes, const KeptLayers& layers, int64_t tokens, int64_t in_flight = 1);

// Of room for activations, what may be used: the rest is for the allocator's rounding and fragments.
inline constexpr double kUsableForActivations = 0.95;

struct FittedLayers {
  KeptLayers kept;
  int64_t bytes = 0;  // activation_total
};
// The least recomputation of `layers` layers that fits `room` bytes: first norms and SwiGLU of more and more layers,
// then, where that gives memory back, experts' gate and up, then whole layers. The most there is where nothing fits.
FittedLayers fit_layers(const ActivationBytes& bytes, int64_t layers, int64_t tokens, int64_t in_flight, int64_t room);

}  // namespace trireme
