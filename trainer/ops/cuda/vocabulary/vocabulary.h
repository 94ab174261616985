// token_logprobs, token_logprobs_and_entropy and sampling on CUDA: bf16 hidden and head, everything after the logits in
// float32. The semantics are those of ops.h with these differences, all because the host is not waited for:
//  - a target outside the vocabulary, a target that the filters drop where allow_filtered is off, and a row whose
//    logits are not finite give a log-prob of NaN (the caller checks that its loss is finite);
//  - temperature, top_p and min_p are rounded to float32.
//
// Logits are made by linear_forward in chunks of rows of at most kChunkBytes. Where the whole batch is one chunk, its
// logits are kept for backward; else backward makes them again. Log-probs are row-exact, gradients deterministic.
#pragma once

#include <ATen/core/Tensor.h>

#include "trainer/ops/ops.h"

namespace trireme::cuda {

inline constexpr int64_t kChunkBytes = int64_t{512} << 20;

// Rows of bf16 logits held at a time: all of them where they fit, else whole multiples of 128.
int64_t vocabulary_chunk_rows(int64_t rows, int64_t vocab);

// options were checked. entropy is undefined where not asked for.
LogprobResult token_logprobs(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                             const LogprobOptions& options, bool with_entropy);

// Neither synchronises nor reads host memory: legal in stream capture.
DeviceSamples sample_tokens_on_device(const at::Tensor& hidden, const at::Tensor& head, const DeviceSampling& rows);

// The same with arguments and results on the host; waits for the device.
SampleResult sample_tokens(const at::Tensor& hidden, const at::Tensor& head, const std::vector<SampleRow>& rows);

}  // namespace trireme::cuda
