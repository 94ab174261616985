// The flat tensors of a micro-batch, and the log-probs of its responses.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "trainer/batch/sample.h"
#include "trainer/model/model.h"

namespace trireme {

// Tensors over the T response tokens of some samples, in the members' order.
struct MicroBatch {
  PackedBatch input;    // prompt + response without its last token, per sample, named; shared: see make_micro_batch
  at::Tensor rows;      // [T] int64: row of `input` whose hidden state predicts response token t
  at::Tensor targets;   // [T] int64: the response tokens
  at::Tensor sequence;  // [T] int64, position of the sample in `members`
  Members members;

  int64_t response_tokens() const { return targets.size(0); }
};

// Samples with an empty response contribute nothing. share_prompts: the prompt of samples of one group is there once,
// as a sequence of its own before the first response to it, and each response's sequence names it as its prefix; so a
// row of it predicts the first token of several responses.
MicroBatch make_micro_batch(const std::vector<Sample>& samples, const Members& members, bool share_prompts = false);

// [T] float32: the sampler's log-probs, or one number per member spread over its response tokens.
at::Tensor generation_logprobs(const std::vector<Sample>& samples, const Members& members);
at::Tensor spread(const std::vector<Sample>& samples, const Members& members, const std::vector<double>& per_member);
// [T] float32: numbers that every token has (Sample::advantages, ...), which all members must have; 1 where the token
// is in the loss, else 0.
at::Tensor of_tokens(const std::vector<Sample>& samples, const Members& members, std::vector<double> Sample::*numbers);
at::Tensor of_tokens(const std::vector<Sample>& samples, const Members& members, std::vector<float> Sample::*numbers);
at::Tensor loss_mask(const std::vector<Sample>& samples, const Members& members);

// Values [T] of a value model before each response token: of the row that predicts it. From hidden states as the last
// function below, over context parallel ranks on all of them too; with grad mode on they carry the gradient.
at::Tensor response_values(const Model& model, const at::Tensor& hidden, const MicroBatch& batch);
// Log-probs [T] of the response tokens under `model`; with grad mode on they carry the gradient.
at::Tensor response_logprobs(const Model& model, const MicroBatch& batch, const LogprobOptions& options);
// The same of hidden states that Model::forward gave for batch.input. Over context parallel ranks these are of the
// rank's own rows; the log-probs of all rows go to all ranks, and so must what is computed from them.
at::Tensor response_logprobs(const Model& model, const at::Tensor& hidden, const MicroBatch& batch,
                             const LogprobOptions& options);

}  // namespace trireme
