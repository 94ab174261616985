// AdamW over flat arrays on CUDA. Raw pointers, one stream, no allocation, no synchronisation. Every launcher throws
// Error(kInternal) when the launch fails.
//
// update: elementwise, so an element's bits depend on its own values only. One pass reads gradient, master and moments
// and writes master, moments and the live weight: 28 bytes an element with bf16 gradients and weights.
// sum_of_squares: deterministic; every element is squared and added in float64, in blocks of kSquaresBlock elements
// with one order each and then over the blocks in one order. It depends on the length only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace trireme::cuda {

enum class Element { kFloat, kBFloat16 };

inline constexpr int64_t kSquaresBlock = 32768;
constexpr int64_t squares_blocks(int64_t n) { return (n + kSquaresBlock - 1) / kSquaresBlock; }
// scratch [squares_blocks(n)]; result [1]. n > 0.
void sum_of_squares(const void* values, Element type, int64_t n, double* scratch, double* result, cudaStream_t stream);

struct AdamWStep {
  float clip = 1.0f;  // multiplies the gradient
  float beta1 = 0.0f, beta2 = 0.0f;
  float rest1 = 1.0f, rest2 = 1.0f;  // 1 - beta, taken in float64: 1 - 0.999f is off by 1e-5
  float keep = 1.0f;                 // 1 - learning rate * weight decay, for elements with decay
  float step_size = 0.0f;            // learning rate / (1 - beta1^t)
  float root_correction2 = 1.0f;     // sqrt(1 - beta2^t)
  float eps = 0.0f;
};

// Elements 0 .. n - 1 of one run; element i is element `begin` + i of the model's flat buffer.
struct AdamWRun {
  const void* gradients = nullptr;
  Element gradient_type = Element::kFloat;
  float* master = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  void* weights = nullptr;  // the rounded master is written here; null: nowhere
  Element weight_type = Element::kBFloat16;
  int64_t n = 0;
  // Bit g says whether elements g * kDecayGroup .. of the flat buffer decay, one spare word at the end; null: none
  // does.
  const uint32_t* decay_bits = nullptr;
  int64_t begin = 0;
};
inline constexpr int64_t kDecayGroup = 64;

void adamw_update(const AdamWRun& run, const AdamWStep& step, cudaStream_t stream);

}  // namespace trireme::cuda
