// The kernel of few_rows.h.
//
// Shared memory: stages of `slabs` slabs of tokens (padded_rows x 64), then stages of `slabs` slabs of weights
// (columns * parts x 64), all in the 128-byte swizzle; then three barriers a stage:
//   full     the stage's weights and tokens have come. One arrival (the weights' warp, which also names the bytes).
//   w_free   this block has multiplied the stage. One arrival a warp of its groups. The weights' warp waits for it.
//   x_free   all blocks of the cluster have. Waited for by the block that loads tokens into this stage of all of them,
//            and arrived at in that block only.
// Slab j of stage s is loaded by block (s * slabs + j) % cluster; stages * slabs is a multiple of the cluster, so that
// a stage has the same loaders every time round.
//
// Products read 64 rows of tokens a group, though only padded_rows are there: the rest is what happens to lie behind
// (always inside the block's memory) and ends in sums that are never written.
#pragma once

#include <cuda_bf16.h>

#include "trainer/ops/cuda/hopper.cuh"
#include "trainer/ops/cuda/swiglu_step.cuh"

namespace trireme::cuda {

inline constexpr int kSlab = 64;  // elements of `in`: a row of 128 bytes
inline constexpr int kSlabRowBytes = kSlab * 2;
inline constexpr int kStep = 16;
inline constexpr int kGroupRows = 64;  // tokens of a warpgroup
inline constexpr int kGroupThreads = 128;
inline constexpr int kGroupWarps = 4;
inline constexpr int kBarriers = 3;  // a stage
inline constexpr int kSharedAlignment = 1024;

struct FewRowsParams {
  CUtensorMap x_map;  // box 64 x padded_rows
  CUtensorMap w_map;  // box 64 x columns
  __nv_bfloat16* y;
  const __nv_bfloat16* bias;
  int rows, padded_rows;
  int out;          // columns of y
  int weight_rows;  // out, or 2 * out
  int part_rows;    // weight rows between the parts of a tile
  int tiles, cluster;
  int stages_of_in;  // stages that cover `in`
  int slabs, stages;
  int prefetch;
};

namespace few_rows_detail {

using namespace hopper;

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

__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// word[b] of the four lanes of a quad: columns 8 b + 2 lane, + 1 of one row. Writes the row's columns below `limit`,
// eight at a time where four blocks stand together.
template <int kBlocks>
__device__ __forceinline__ void write_row(const uint32_t (&word)[kBlocks], __nv_bfloat16* to, int limit, bool inside,
                                          int lane) {
  const int quad = lane % 4;
  constexpr int kWhole = kBlocks / 4 * 4;
#pragma unroll
  for (int b = 0; b < kWhole; b += 4) {
    // Transposes 4 x 4 words over the quad: lane i gets the words of block b + i, in the order of the lanes.
    const bool odd = quad % 2 != 0, high = quad / 2 != 0;
    uint32_t v0 = word[b], v1 = word[b + 1], v2 = word[b + 2], v3 = word[b + 3];
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
    const int column = 8 * (b + quad);
    if (inside && column < limit) *reinterpret_cast<uint4*>(to + column) = make_uint4(v0, v1, v2, v3);
  }
#pragma unroll
  for (int b = kWhole; b < kBlocks; ++b) {
    const int column = 8 * b + 2 * quad;
    if (inside && column < limit) *reinterpret_cast<uint32_t*>(to + column) = word[b];
  }
}

template <int kColumns>
__device__ __forceinline__ void add_bias(float (&sum)[kColumns / 2], const __nv_bfloat16* bias, int limit, int lane) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int column = 8 * j + 2 * (lane % 4);
    if (column >= limit) break;
    const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(bias + column));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[4 * j + 2 * h] = __fadd_rn(sum[4 * j + 2 * h], pair.x);
      sum[4 * j + 2 * h + 1] = __fadd_rn(sum[4 * j + 2 * h + 1], pair.y);
    }
  }
}

template <int kColumns>
__device__ __forceinline__ void write_product(float (&sum)[kColumns / 2], const FewRowsParams& p, int first_row,
                                              int first_column, int lane) {
  const int limit = p.out - first_column;
  if (p.bias != nullptr) add_bias<kColumns>(sum, p.bias + first_column, limit, lane);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t word[kColumns / 8];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) word[j] = pack_pair(sum[4 * j + 2 * h], sum[4 * j + 2 * h + 1]);
    const int row = first_row + lane / 4 + 8 * h;
    write_row(word, p.y + static_cast<int64_t>(row) * p.out + first_column, limit, row < p.rows, lane);
  }
}

template <int kColumns>
__device__ __forceinline__ void write_swiglu(const float (&gate)[kColumns / 2], const float (&up)[kColumns / 2],
                                             const FewRowsParams& p, int first_row, int first_column, int lane) {
  const auto rounded = [](float value) { return __bfloat162float(__float2bfloat16_rn(value)); };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t word[kColumns / 8];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int i = 4 * j + 2 * h;
      word[j] = pack_pair(steps::swiglu(rounded(gate[i]), rounded(up[i])),
                          steps::swiglu(rounded(gate[i + 1]), rounded(up[i + 1])));
    }
    const int row = first_row + lane / 4 + 8 * h;
    write_row(word, p.y + static_cast<int64_t>(row) * p.out + first_column, p.out - first_column, row < p.rows, lane);
  }
}

}  // namespace few_rows_detail

// kGroups: warpgroups of 64 tokens. One block of kGroups * 128 + 64 threads.
template <int kColumns, int kParts, int kGroups, bool kSwiglu>
__global__ void __launch_bounds__(kGroups* kGroupThreads + 64, kGroups == 1 ? 2 : 1)
    few_rows_kernel(const __grid_constant__ FewRowsParams p) {
  static_assert(!kSwiglu || kParts == 2);
  using namespace few_rows_detail;
  constexpr int kTileRows = kColumns * kParts;                  // of the weight
  constexpr int kTileOutputs = kSwiglu ? kColumns : kTileRows;  // columns of y
  constexpr uint32_t kWeightBytes = kTileRows * kSlabRowBytes;  // of a slab
  constexpr uint32_t kPartBytes = kColumns * kSlabRowBytes;
  constexpr int kWeightWarp = kGroups * kGroupWarps;  // after the groups; the next one loads tokens

  extern __shared__ uint8_t shared[];
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto rank = static_cast<int>(blockIdx.x) & (p.cluster - 1);
  const int first_tile = static_cast<int>(blockIdx.x) - rank, tile_step = static_cast<int>(gridDim.x);

  const uint32_t x_bytes = static_cast<uint32_t>(p.padded_rows) * kSlabRowBytes;  // of a slab
  const uint32_t x_base = (shared_address(shared) + kSharedAlignment - 1) & ~(kSharedAlignment - 1u);
  const uint32_t w_base = x_base + static_cast<uint32_t>(p.stages * p.slabs) * x_bytes;
  const uint32_t full = w_base + static_cast<uint32_t>(p.stages * p.slabs) * kWeightBytes;
  const uint32_t w_free = full + static_cast<uint32_t>(p.stages) * 8;
  const uint32_t x_free = w_free + static_cast<uint32_t>(p.stages) * 8;

  if (warp == kWeightWarp && lane == 0) {
    let_successors_begin();
    prefetch_map(&p.w_map);
    prefetch_map(&p.x_map);
    for (int s = 0; s < p.stages; ++s) {
      init_barrier(full + 8 * s, 1);
      init_barrier(w_free + 8 * s, kGroups * kGroupWarps);
      init_barrier(x_free + 8 * s, kGroups * kGroupWarps * p.cluster);
    }
    publish_barriers();
  }
  __syncwarp();
  cluster_arrive();  // the barriers of this block are ready

  // The weights' warp touches nothing of other blocks: it begins without waiting for them.
  if (warp != kWeightWarp) cluster_wait();

  if (warp == kWeightWarp) {
    if (lane == 0) {
      const uint64_t policy = evict_first_policy();
      const uint32_t bytes = static_cast<uint32_t>(p.slabs) * (kWeightBytes + x_bytes);
      Ring ring(p.stages);
      int filled = 0;
      // A tile past the last one (the cluster's other blocks have work) lies outside the weight and comes as zeros.
      const auto row_of = [&](int tile, int part) {
        return tile < p.tiles ? tile * kTileOutputs + part * p.part_rows : p.weight_rows;
      };
      for (int base = first_tile; base < p.tiles; base += tile_step) {
        const int tile = base + rank;
        for (int i = 0; i < p.stages_of_in; ++i) {
          if (filled == p.stages) {  // all stages are under way; from here on it waits for products
            for (int slab = i * p.slabs; slab < i * p.slabs + p.prefetch && slab < p.stages_of_in * p.slabs; ++slab) {
#pragma unroll
              for (int part = 0; part < kParts; ++part) prefetch_box(&p.w_map, slab * kSlab, row_of(tile, part));
            }
            wait_for_predecessors();
          }
          if (filled <= p.stages) ++filled;
          wait(w_free + 8 * ring.stage, ring.phase ^ 1);
          const uint32_t barrier = full + 8 * ring.stage;
          arrive_expecting(barrier, bytes);
          for (int j = 0; j < p.slabs; ++j) {
            const uint32_t target = w_base + static_cast<uint32_t>(ring.stage * p.slabs + j) * kWeightBytes;
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
              load_box(target + part * kPartBytes, &p.w_map, (i * p.slabs + j) * kSlab, row_of(tile, part), barrier,
                       policy);
            }
          }
          ring.advance();
        }
      }
    }
    __syncwarp();
    cluster_wait();  // of the arrival above
  } else if (warp == kWeightWarp + 1) {
    if (lane == 0) {
      const uint64_t policy = evict_last_policy();
      const auto everybody = static_cast<uint16_t>((1 << p.cluster) - 1);
      Ring ring(p.stages);
      wait_for_predecessors();
      for (int base = first_tile; base < p.tiles; base += tile_step) {
        for (int i = 0; i < p.stages_of_in; ++i, ring.advance()) {
          const int first_slab = ring.stage * p.slabs;
          if (((rank - first_slab) & (p.cluster - 1)) >= p.slabs) continue;  // loads nothing of this stage
          wait(x_free + 8 * ring.stage, ring.phase ^ 1);
          const uint32_t barrier = full + 8 * ring.stage;
          for (int j = 0; j < p.slabs; ++j) {
            if (((first_slab + j) & (p.cluster - 1)) != rank) continue;
            const uint32_t target = x_base + static_cast<uint32_t>(first_slab + j) * x_bytes;
            const int column = (i * p.slabs + j) * kSlab;
            if (p.cluster == 1) {
              load_box(target, &p.x_map, column, 0, barrier, policy);
            } else {
              load_box_to(target, &p.x_map, column, 0, barrier, everybody, policy);
            }
          }
        }
      }
    }
    __syncwarp();
  } else {
    const int group = warp / kGroupWarps;
    const int first_row = group * kGroupRows + warp % kGroupWarps * 16;
    const auto release = [&](int stage) {
      if (lane == 0) arrive(w_free + 8 * stage);
      if (lane < p.cluster && ((lane - stage * p.slabs) & (p.cluster - 1)) < p.slabs) {
        arrive_at(x_free + 8 * stage, static_cast<uint32_t>(lane));
      }
    };
    float sum[kParts][kColumns / 2] = {};
    Ring ring(p.stages);
    wait_for_predecessors();
    for (int base = first_tile; base < p.tiles; base += tile_step) {
      int accumulate = 0, before = -1;
      const auto multiply_slab = [&](uint32_t a_address, uint32_t b_address) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) pin(sum[part]);
        __syncwarp();
        product_fence();
        const uint64_t a = swizzled_operand(a_address), b = swizzled_operand(b_address);
#pragma unroll
        for (int step = 0; step < kSlab / kStep; ++step) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            multiply<kColumns>(sum[part], operand_after(a, step * kStep * 2),
                               operand_after(b, part * static_cast<int>(kPartBytes) + step * kStep * 2), accumulate);
          }
          accumulate = 1;
        }
        product_commit();
      };
      for (int i = 0; i < p.stages_of_in; ++i) {
        wait(full + 8 * ring.stage, ring.phase);
        uint32_t a_address = x_base + static_cast<uint32_t>(ring.stage * p.slabs) * x_bytes +
                             static_cast<uint32_t>(group) * (kGroupRows * kSlabRowBytes);
        uint32_t b_address = w_base + static_cast<uint32_t>(ring.stage * p.slabs) * kWeightBytes;
        multiply_slab(a_address, b_address);
        product_wait<1>();  // all but this slab: the stage before this one has been read
        if (before >= 0) release(before);
        before = ring.stage;
#pragma unroll 1
        for (int j = 1; j < p.slabs; ++j) {
          a_address += x_bytes;
          b_address += kWeightBytes;
          multiply_slab(a_address, b_address);
        }
        ring.advance();
      }
      product_wait<0>();
#pragma unroll
      for (int part = 0; part < kParts; ++part) pin(sum[part]);
      release(before);
      const int tile = base + rank;
      if (tile >= p.tiles || first_row >= p.rows) continue;
      const int first_column = tile * kTileOutputs;
      if constexpr (kSwiglu) {
        write_swiglu<kColumns>(sum[0], sum[1], p, first_row, first_column, lane);
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          write_product<kColumns>(sum[part], p, first_row, first_column + part * kColumns, lane);
        }
      }
    }
  }
  // No block leaves while another may still copy into its memory or arrive at its barriers.
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

}  // namespace trireme::cuda
