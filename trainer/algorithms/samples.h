// A rollout as data: samples, their wire form between ranks, and the flat tensors of a micro-batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "trainer/algorithms/packing.h"
#include "trainer/model/model.h"

namespace trireme {

struct RolloutSample {
  int64_t group = 0;  // position of its prompt in the rollout
  int64_t index = 0;  // in the group
  std::vector<int32_t> prompt;
  std::vector<int32_t> tokens;             // the answer, its stop token included
  std::vector<float> generation_logprobs;  // one per answer token, from the sampler
  std::vector<float> reference_logprobs;   // the same under the reference model; empty: not computed yet
  bool truncated = false;                  // ended at a length limit
  bool dropped = false;                    // its reward failed under the policy "drop"
  double raw_reward = 0;                   // as the rewards gave it
  double reward = 0;                       // after scaling and shaping
  double advantage = 0;
  double loss_multiplier = 1;  // 0: stays in the baseline, not in the loss
  bool trained_early = false;  // its gradient is in the sums of the first optimizer step already

  int64_t length() const { return static_cast<int64_t>(prompt.size() + tokens.size()); }
};

// Binary, little-endian. unpack throws Error(kData) on a malformed buffer.
std::string pack_samples(const std::vector<RolloutSample>& samples);
std::vector<RolloutSample> unpack_samples(std::string_view bytes);

// Flat tensors over the answer tokens of some samples, in the bin's order.
struct MicroBatch {
  PackedBatch input;             // prompt + answer without its last token, per sample; shared: see make_micro_batch
  at::Tensor rows;               // [T] int64: row of `input` whose hidden state predicts answer token t
  at::Tensor targets;            // [T] int64
  at::Tensor sequence;           // [T] int64, position of the sample in the bin
  std::vector<int64_t> samples;  // the bin

  int64_t answer_tokens() const { return targets.size(0); }
};

// Samples with no answer tokens contribute nothing. share_prompts: the prompt of samples of one group is there once, as
// a sequence of its own before the first answer to it, and each answer's sequence names it as its prefix; so a row of
// it predicts the first token of several answers.
MicroBatch make_micro_batch(const std::vector<RolloutSample>& samples, const Bin& bin, bool share_prompts = false);

// [T] float32: the sampler's log-probs, or one number per sample spread over its answer tokens.
at::Tensor generation_logprobs(const std::vector<RolloutSample>& samples, const Bin& bin);
at::Tensor spread(const std::vector<RolloutSample>& samples, const Bin& bin,
                  const std::vector<double>& per_sample_of_bin);

// Log-probs [T] of the answer tokens under `model`; with grad mode on they carry the gradient.
at::Tensor answer_logprobs(const Model& model, const MicroBatch& batch, const LogprobOptions& options);

}  // namespace trireme
