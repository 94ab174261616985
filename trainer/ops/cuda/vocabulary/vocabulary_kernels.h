// Kernels over rows of bf16 logits: log-probs, entropy, their gradient, filters and sampling. Raw pointers, one stream,
// no allocation, no synchronisation: legal in stream capture. Every launcher throws Error(kInternal) when the launch
// fails.
//
// A row is cut into slices of kSliceElements; a slice has one block of 256 threads, thread t adding the same elements
// in the same order whatever the number of rows. Determinism class: row-exact. The bits of a row's maximum, sum and
// log-prob depend on its logits and options only; loss and sampler run the same slice kernel and the same combination.
// Arithmetic in float32 (slices are added in float64), exp and log of CUDA's library, at most 2 ulp.
//
// Order of calls: [find_filters], slice_partials, then finish_logprobs (and later logits_gradient) or finish_samples.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace trireme::cuda {

inline constexpr int kSliceElements = 8192;
constexpr int slices_of(int64_t vocab) { return static_cast<int>((vocab + kSliceElements - 1) / kSliceElements); }

// Options of all rows, or arrays with those of each.
struct RowOptions {
  float temperature = 1.0f;
  float top_p = 1.0f;
  float min_p = 0.0f;
  int32_t top_k = 0;
  const float* parameters = nullptr;  // [rows, 4] temperature, top_p, min_p, greedy; with top_ks, in place of the above
  const int32_t* top_ks = nullptr;    // [rows]
};

// What the filters leave of a row: token i with scaled logit z is dropped where z < threshold, or z == threshold and
// i >= limit.
struct RowFilter {
  float threshold = 0.0f;
  int32_t limit = 0;
};
// A slice's largest scaled logit m and the sum of exp(z - m), both over the kept tokens.
struct SlicePartial {
  float max = 0.0f;
  float sum = 0.0f;
};
// What the backward needs of the forward.
struct RowStatistics {
  float max = 0.0f;
  float sum = 0.0f;  // of exp(z - max) over the kept tokens; log-prob = (z - max) - log(sum)
  float entropy = 0.0f;
  float logprob = 0.0f;
};

struct Logits {
  const uint16_t* data = nullptr;  // [rows, vocab] bf16
  int64_t rows = 0;
  int64_t vocab = 0;
  int64_t stride = 0;  // of rows; 0: vocab. What lies between vocab and a larger stride is of no meaning
  int64_t row_stride() const { return stride > 0 ? stride : vocab; }
};

// filters [rows] written.
void find_filters(const Logits& logits, const RowOptions& options, RowFilter* filters, cudaStream_t stream);

// partials [rows, slices]; filters [rows] or null; dots [rows, slices] (sum of exp(z - m) (z - m)) or null.
void slice_partials(const Logits& logits, const RowOptions& options, const RowFilter* filters, SlicePartial* partials,
                    float* dots, cudaStream_t stream);

// logprobs [rows], statistics [rows], entropies [rows] (null without dots). A target outside the vocabulary and a row
// whose logits are not finite give NaN; a dropped target -infinity (allow_filtered) or NaN.
struct LogprobOutputs {
  float* logprobs = nullptr;
  float* entropies = nullptr;
  RowStatistics* statistics = nullptr;
};
void finish_logprobs(const Logits& logits, const RowOptions& options, const RowFilter* filters, const int64_t* targets,
                     bool allow_filtered, const SlicePartial* partials, const float* dots,
                     const LogprobOutputs& outputs, cudaStream_t stream);

// In place: logits become the gradient of the unscaled logits, rounded to bf16, and what lies between vocab and the
// stride (of rows; at least vocab) anything. dlogprobs [rows]; dentropies [rows] or
// null. A row whose log-prob is NaN has a gradient of NaN, unless its logits are finite and its dlogprob is 0.
void logits_gradient(uint16_t* logits, int64_t rows, int64_t vocab, int64_t stride, const RowOptions& options,
                     const RowFilter* filters, const int64_t* targets, const RowStatistics* statistics,
                     const float* dlogprobs, const float* dentropies, cudaStream_t stream);

// One token of each row: inverse CDF in id order of the number that philox_uniform gives for keys [rows, 3], or for a
// greedy row the first largest logit. ids [rows], logprobs [rows]; id 0 and NaN where the logits are not finite.
// options.parameters must be set.
void finish_samples(const Logits& logits, const RowOptions& options, const RowFilter* filters, const int64_t* keys,
                    const SlicePartial* partials, int64_t* ids, float* logprobs, cudaStream_t stream);

}  // namespace trireme::cuda
