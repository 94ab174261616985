// What the kernels of the skinny GEMMs, and some of attention's, have in common on the device.
#pragma once

#include <cuda_bf16.h>

#include "trainer/ops/cuda/device/hopper.cuh"
#include "trainer/ops/cuda/device/mma.cuh"
#include "trainer/ops/cuda/gemm/skinny_gemm.h"
#include "trainer/ops/cuda/gemm/swiglu_step.cuh"

namespace trireme::cuda::skinny_gemm {

// Stages of a pipeline, round and round; `phase` is the parity of the barriers' phases of this round.
struct Ring {
  int stages;
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ explicit Ring(int count) : stages(count) {}
  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// word[b] of the four lanes of a quad: columns 8 b + 2 lane, + 1 of one row. Writes the row's columns below `limit`,
// eight at a time where four blocks stand together.
template <int kBlocks>
__device__ __forceinline__ void write_row(const uint32_t (&word)[kBlocks], __nv_bfloat16* to, int limit, bool inside,
                                          int lane) {
  static_assert(kBlocks == 2 || kBlocks == 4);
  const int quad = lane % 4;
  if constexpr (kBlocks == 4) {
    // Transposes 4 x 4 words over the quad: lane i gets the words of block i, in the order of the lanes.
    const bool odd = quad % 2 != 0, high = quad / 2 != 0;
    uint32_t v0 = word[0], v1 = word[1], v2 = word[2], v3 = word[3];
    const uint32_t s0 = __shfl_xor_sync(0xffffffffu, odd ? v0 : v1, 1);
    const uint32_t s1 = __shfl_xor_sync(0xffffffffu, odd ? v2 : v3, 1);
    v0 = odd ? s0 : v0;
    v1 = odd ? v1 : s0;
    v2 = odd ? s1 : v2;
    v3 = odd ? v3 : s1;
    const uint32_t t0 = __shfl_xor_sync(0xffffffffu, high ? v0 : v2, 2);
    const uint32_t t1 = __shfl_xor_sync(0xffffffffu, high ? v1 : v3, 2);
    v0 = high ? t0 : v0;
    v1 = high ? t1 : v1;
    v2 = high ? v2 : t0;
    v3 = high ? v3 : t1;
    const int column = 8 * quad;
    if (inside && column < limit) *reinterpret_cast<uint4*>(to + column) = make_uint4(v0, v1, v2, v3);
  } else {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int column = 8 * b + 2 * quad;
      if (inside && column < limit) *reinterpret_cast<uint32_t*>(to + column) = word[b];
    }
  }
}

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

}  // namespace trireme::cuda::skinny_gemm
