// What the decode kernels share: their arguments, copies, and where a tile lies in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "trainer/ops/cuda/attention/attention_kernels.h"
#include "trainer/ops/cuda/device/mma.cuh"

namespace trireme::cuda::decode {

using bf16 = __nv_bfloat16;

// Shared memory with which a block has an SM to itself.
inline constexpr size_t kAlone = 117 * 1024;

struct DecodeParams {
  const bf16* q;
  const bf16* k;
  const bf16* v;
  bf16* out;
  const int32_t* runs;
  int run_count;
  int64_t q_stride, k_stride, v_stride;
  int group, kv_heads;
  float scale_log2;
};

inline DecodeParams make_params(const AttentionArgs& args) {
  return {static_cast<const bf16*>(args.q),
          static_cast<const bf16*>(args.k),
          static_cast<const bf16*>(args.v),
          static_cast<bf16*>(args.out),
          args.runs,
          args.run_count,
          args.q_stride,
          args.k_stride,
          args.v_stride,
          args.q_heads / args.kv_heads,
          args.kv_heads,
          args.scale_log2};
}

__device__ __forceinline__ void copy16(uint32_t target, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;  // 0: the target is filled with zeros
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(target), "l"(source), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

template <int kHeadDim>
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {  // bytes; chunks of 16 bytes, swizzled
  return static_cast<uint32_t>(row * kHeadDim * 2 + ((chunk ^ (row & 7)) << 4));
}

}  // namespace trireme::cuda::decode
