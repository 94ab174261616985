// What the kernels of packed attention by warp groups share: two groups of four warps multiply, 64 rows each; a third
// copies. Blocks stay and take pieces of work, the ones with most work first.
#pragma once

#include "trainer/ops/cuda/attention/attention_kernels.h"
#include "trainer/ops/cuda/device/wgmma.cuh"
#include "trainer/ops/cuda/gemm/skinny_gemm.cuh"

namespace trireme::cuda::groups {

inline constexpr int kGroups = 2, kGroupRows = 64, kGroupThreads = 128;
inline constexpr int kThreads = (kGroups + 1) * kGroupThreads;
inline constexpr int kLoadingRegisters = 40, kRegisters = 232;  // 40 + 2 x 232 of the 3 x 168 that a block begins with
inline constexpr int kTile = 64;                                // rows that stream by at once
inline constexpr uint32_t kBoxBytes = kTile * 128;              // 64 rows x 64 elements
static_assert(kGroups * kGroupRows == kPackedTileRows && kGroups * kGroupRows == kBackwardTileRows);
static_assert(kTile == kKeyTile);

// The piece that a block takes: one of every round, forth and back, so that all blocks get as much.
__device__ __forceinline__ int dealt(int index, int pieces, int blocks) {
  const int round = index / blocks, first = round * blocks;
  return round % 2 == 0 || first + blocks > pieces ? index : 2 * first + blocks - 1 - index;
}

// An arrival once all ordinary asynchronous copies of this thread have landed.
__device__ __forceinline__ void arrive_when_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// A warp is done with what a barrier frees.
__device__ __forceinline__ void release(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane == 0) hopper::arrive(barrier);
}

// Boxes in shared memory: rows from `first` on become 0, by a warp. Products may read them once a barrier after it was
// met.
template <int kBoxes>
__device__ __forceinline__ void zero_rows(uint32_t boxes, int first, int lane) {
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    for (uint32_t at = static_cast<uint32_t>(first) * 128 + static_cast<uint32_t>(lane) * 16; at < kBoxBytes;
         at += 512) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(boxes + box * kBoxBytes + at), "r"(0) : "memory");
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

// 64 x 64 sums as the rows of further products: the lane that holds a sum holds it as an operand.
__device__ __forceinline__ void round_sums(uint32_t (&to)[kTile / 16][4], const float (&from)[kTile / 2]) {
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      to[step][part] = pack_pair(from[8 * step + 2 * part], from[8 * step + 2 * part + 1]);
    }
  }
}

}  // namespace trireme::cuda::groups
