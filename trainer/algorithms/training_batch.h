// One micro-batch of this rank with everything its loss needs, on the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "trainer/batch/micro_batch.h"

namespace trireme {

// What the sums of an optimizer step are divided by, over all ranks.
struct ValidCounts {
  double tokens = 0, sequences = 0;
  double positive_tokens = 0;  // of correct responses; counted when the loss has a term for them
};

// Tensors of [T] response tokens, float32, but for sequence_mask [members].
struct TrainingBatch {
  MicroBatch micro_batch;
  at::Tensor generation, previous, reference;  // log-probs; reference is undefined without a KL
  at::Tensor advantages, mask;
  at::Tensor sequence_mask;
  at::Tensor values, returns;   // of the critic; undefined without one
  at::Tensor positive;          // 1 in correct responses; undefined when the loss has no term for them
  at::Tensor sampled_by_these;  // 1 in responses that the present weights drew; undefined when they drew all
  at::Tensor versions;          // int64: of the weights that drew the token; -1 where nobody said

  // Adds this batch's to `counts`.
  void count(ValidCounts& counts) const;
};

// `members` of `samples` without previous and reference log-probs. `positive`: the loss has a term for them.
TrainingBatch make_training_batch(const std::vector<Sample>& samples, const Members& members, bool share_prompts,
                                  bool positive);

// [T] float32: 1 in the responses of samples that weights of `version` drew (Sample::is_of).
at::Tensor tokens_of_version(const std::vector<Sample>& samples, const Members& members, int64_t version);

// Sequences whose mean exp(|generation - previous|) exceeds `threshold` leave the loss. Of a token that the filters
// dropped, whose previous log-prob is -infinity, 0 is taken in its place.
void mask_mismatched_sequences(TrainingBatch& batch, double threshold);

}  // namespace trireme
