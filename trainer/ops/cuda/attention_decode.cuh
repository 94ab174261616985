// What the decode kernels share: their arguments, and copies, fragments and products of 16-row tiles.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "trainer/ops/cuda/attention_kernels.h"

namespace trireme::cuda::decode {

using bf16 = __nv_bfloat16;

// Shared memory with which a block has a processor to itself.
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

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// c [16, 8] += a [16, 16] . b [16, 8]
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <int kHeadDim>
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {  // bytes; chunks of 16 bytes, swizzled
  return static_cast<uint32_t>(row * kHeadDim * 2 + ((chunk ^ (row & 7)) << 4));
}

}  // namespace trireme::cuda::decode
