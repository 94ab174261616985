// The float operations of one key tile that every attention kernel must do alike, bit for bit. Written with explicit
// roundings, so that no compiler may contract one kernel's product and sum and not the other's.
#pragma once

#include <cuda_runtime.h>

namespace trireme::cuda::steps {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Factor of everything summed so far when the running maximum goes from `before` to `now`: exactly 1 where it stays, so
// a tile that a row does not see leaves the row's bits alone; 0 at the first tile (before = -inf).
__device__ __forceinline__ float rescale(float before, float now, float scale_log2) {
  return exp2_approx(__fmul_rn(__fsub_rn(before, now), scale_log2));
}

__device__ __forceinline__ float scaled_max(float now, float scale_log2) { return __fmul_rn(now, scale_log2); }

// Unnormalised weight of a key; 0 for a masked one (score = -inf).
__device__ __forceinline__ float weight(float score, float scaled_max, float scale_log2) {
  return exp2_approx(__fmaf_rn(score, scale_log2, -scaled_max));
}

}  // namespace trireme::cuda::steps
