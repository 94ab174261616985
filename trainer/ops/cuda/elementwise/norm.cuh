// What kernels that end with an RMS norm share: the shape of a row's block and the order of its sum, which are a row's
// bits.
#pragma once

#include "trainer/ops/cuda/elementwise/rows.cuh"

namespace trireme::cuda::rows {

inline constexpr int kNormThreads = 512;  // most threads of a norm's block

// Sum over the block; every thread gets the same bits. `shared` has a place for each warp and must not be written again
// before all threads have passed another barrier.
__device__ __forceinline__ float block_sum(float value, float* shared) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (blockDim.x == kWarp) return value;
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = shared[0];
  for (int warp = 1; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) total = __fadd_rn(total, shared[warp]);
  return total;
}

// Threads of a row's block and chunks of each thread (2 or 4): functions of the width alone.
struct NormShape {
  int threads;
  int vectors;
};
inline NormShape norm_shape(int64_t width) {
  const int64_t count = width / kChunk;
  const int vectors = count > 2 * kNormThreads ? 4 : 2;
  return {whole_warps(divide_up(count, vectors)), vectors};
}

// The last step: a row's values, its scale and 1 / rms -> what is normed.
__device__ __forceinline__ Chunk scaled(const Chunk& value, const Chunk& scale, float inverse) {
  float a[kChunk], w[kChunk];
  unpack(value, a);
  unpack(scale, w);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) a[i] = __fmul_rn(w[i], __fmul_rn(a[i], inverse));
  return pack(a);
}

__device__ __forceinline__ void add_squares(const Chunk& value, float& squares) {
  float a[kChunk];
  unpack(value, a);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) squares = __fmaf_rn(a[i], a[i], squares);
}

// x + delta, rounded; its squares are added to `squares`.
__device__ __forceinline__ Chunk added(const Chunk& x, const Chunk& delta, float& squares) {
  float a[kChunk], b[kChunk];
  unpack(x, a);
  unpack(delta, b);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) a[i] = __fadd_rn(a[i], b[i]);
  const Chunk sum = pack(a);
  add_squares(sum, squares);
  return sum;
}

}  // namespace trireme::cuda::rows
