// The kernel of skinny_gemm_mma.h.
//
// Shared memory: stages of kSlabs slabs of tokens (x_rows x 64), then stages of kSlabs slabs of weights (columns *
// parts x 64), all in the 128-byte swizzle; then three barriers a stage:
//   full     the stage's weights and tokens have come. One arrival (the weights' warp, which also names the bytes).
//   w_free   this block has read the stage. One arrival a warp that multiplies. The weights' warp waits for it.
//   x_free   all blocks of the cluster have. Waited for by the block that loads tokens into this stage of all of them,
//            and arrived at in that block only. A block alone needs w_free only.
// Slab j of stage s is loaded by block (s * kSlabs + j) % cluster; stages * kSlabs is a multiple of the cluster, so
// that a stage has the same loaders every time round.
//
// What a warp waits for should be its own chain of products, about 33 cycles a step, and nothing else: fragments are
// read two steps ahead, over the ends of stages too; the next stage is asked for a slab early; a stage is given back
// only when products have already used the last of it.
#pragma once

#include <cuda_bf16.h>

#include "trainer/ops/cuda/device/mma.cuh"
#include "trainer/ops/cuda/device/hopper.cuh"
#include "trainer/ops/cuda/gemm/skinny_gemm.cuh"

namespace trireme::cuda {

using skinny_gemm::kSharedAlignment, skinny_gemm::kSlab, skinny_gemm::kSlabRowBytes;
inline constexpr int kStep = 16;
inline constexpr int kFragmentRows = 16;  // of tokens, and of weights
inline constexpr int kMostMultiplyingWarps = 16;
inline constexpr int kLoadingWarps = 2;
inline constexpr int kBarriers = 3;  // a stage

struct SkinnyGemmMmaParams {
  CUtensorMap x_map;  // box 64 x x_rows
  CUtensorMap w_map;  // box 64 x columns
  __nv_bfloat16* y;
  const __nv_bfloat16* bias;
  int rows;
  int x_rows;       // whole fragments of tokens
  int out;          // columns of y
  int weight_rows;  // out, or 2 * out
  int columns;      // rows of a box of weights
  int warps;        // that multiply: side_by_side weights' parts for each group of tokens
  int side_by_side;
  int tiles, cluster;
  int stages_of_in;  // stages that cover `in`
  int stages;
};

namespace skinny_gemm_mma_detail {

using namespace hopper;
using namespace skinny_gemm;

}  // namespace skinny_gemm_mma_detail

// kTokens, kWeights: fragments of tokens and of weights of a warp (with the activation one of the gate and one of up).
// A block has p.warps + 2 warps.
template <int kTokens, int kWeights, bool kSwiglu, int kSlabs>
__global__ void __launch_bounds__((kMostMultiplyingWarps + kLoadingWarps) * 32)
    skinny_gemm_mma_kernel(const __grid_constant__ SkinnyGemmMmaParams p) {
  static_assert(!kSwiglu || kWeights == 2);
  using namespace skinny_gemm_mma_detail;
  constexpr int kParts = kSwiglu ? 2 : 1;

  extern __shared__ uint8_t shared[];
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto rank = static_cast<int>(blockIdx.x) & (p.cluster - 1);
  const int first_tile = static_cast<int>(blockIdx.x) - rank, tile_step = static_cast<int>(gridDim.x);

  const uint32_t x_bytes = static_cast<uint32_t>(p.x_rows) * kSlabRowBytes;  // of a slab
  const uint32_t part_bytes = static_cast<uint32_t>(p.columns) * kSlabRowBytes;
  const uint32_t w_bytes = part_bytes * kParts;
  const uint32_t x_base = (shared_address(shared) + kSharedAlignment - 1) & ~(kSharedAlignment - 1u);
  const uint32_t w_base = x_base + static_cast<uint32_t>(p.stages * kSlabs) * x_bytes;
  const uint32_t full = w_base + static_cast<uint32_t>(p.stages * kSlabs) * w_bytes;
  const uint32_t w_free = full + static_cast<uint32_t>(p.stages) * 8;
  const uint32_t x_free = w_free + static_cast<uint32_t>(p.stages) * 8;

  if (warp == p.warps && lane == 0) {
    let_successors_begin();
    prefetch_map(&p.w_map);
    prefetch_map(&p.x_map);
    for (int s = 0; s < p.stages; ++s) {
      init_barrier(full + 8 * s, 1);
      init_barrier(w_free + 8 * s, static_cast<uint32_t>(p.warps));
      init_barrier(x_free + 8 * s, static_cast<uint32_t>(p.warps * p.cluster));
    }
    publish_barriers();
  }
  __syncwarp();
  // The barriers are ready, of this block and for the tokens of the others too. The weights' warp touches nothing of
  // other blocks: it begins without waiting for them.
  if (p.cluster > 1) {
    cluster_arrive();
    if (warp != p.warps) cluster_wait();
  } else if (warp == p.warps) {
    asm volatile("barrier.cta.arrive.aligned 1, %0;" ::"r"(blockDim.x) : "memory");
  } else {
    asm volatile("barrier.cta.sync.aligned 1, %0;" ::"r"(blockDim.x) : "memory");
  }

  if (warp == p.warps) {
    if (lane == 0) {
      const uint64_t policy = evict_first_policy();
      const uint32_t bytes = static_cast<uint32_t>(kSlabs) * (w_bytes + x_bytes);
      Ring ring(p.stages);
      for (int base = first_tile; base < p.tiles; base += tile_step) {
        const int tile = base + rank;
        // A tile past the last one (the cluster's other blocks have work) lies outside the weight and comes as zeros.
        const int row = tile < p.tiles ? tile * p.columns : p.weight_rows;
        for (int i = 0; i < p.stages_of_in; ++i, ring.advance()) {
          wait(w_free + 8 * ring.stage, ring.phase ^ 1);
          const uint32_t barrier = full + 8 * ring.stage;
          arrive_expecting(barrier, bytes);
#pragma unroll
          for (int j = 0; j < kSlabs; ++j) {
            const uint32_t target = w_base + static_cast<uint32_t>(ring.stage * kSlabs + j) * w_bytes;
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
              load_box(target + part * part_bytes, &p.w_map, (i * kSlabs + j) * kSlab, row + part * p.out, barrier,
                       policy);
            }
          }
        }
      }
    }
    __syncwarp();
    if (p.cluster > 1) cluster_wait();  // of the arrival above
  } else if (warp == p.warps + 1) {
    if (lane == 0) {
      const uint64_t policy = evict_last_policy();
      const auto everybody = static_cast<uint16_t>((1 << p.cluster) - 1);
      const uint32_t free = p.cluster == 1 ? w_free : x_free;
      Ring ring(p.stages);
      wait_for_predecessors();
      for (int base = first_tile; base < p.tiles; base += tile_step) {
        for (int i = 0; i < p.stages_of_in; ++i, ring.advance()) {
          const int first_slab = ring.stage * kSlabs;
          if (((rank - first_slab) & (p.cluster - 1)) >= kSlabs) continue;  // loads nothing of this stage
          wait(free + 8 * ring.stage, ring.phase ^ 1);
          const uint32_t barrier = full + 8 * ring.stage;
#pragma unroll
          for (int j = 0; j < kSlabs; ++j) {
            if (((first_slab + j) & (p.cluster - 1)) != rank) continue;
            const uint32_t target = x_base + static_cast<uint32_t>(first_slab + j) * x_bytes;
            const int column = (i * kSlabs + j) * kSlab;
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
    constexpr uint32_t kFragmentBytes = kFragmentRows * kSlabRowBytes;
    constexpr int kSteps = kSlabs * kSlab / kStep;  // of a stage
    constexpr int kAhead = 2, kBuffers = 4;
    static_assert(kSteps % kBuffers == 0 && kSteps >= kAhead + 2);
    const uint32_t between = kSwiglu ? part_bytes : kFragmentBytes;  // two fragments of weights
    const int side = warp % p.side_by_side;
    const int first_token = warp / p.side_by_side * (kTokens * kFragmentRows);
    const int first_row = side * kFragmentRows * (kSwiglu ? 1 : kWeights);
    // Where a lane's row of 16 bytes lies in a fragment of step 0; step s: 32 s in exclusive or.
    const auto place = [](int row, int chunk) {
      return static_cast<uint32_t>(row * kSlabRowBytes + ((chunk ^ (row & 7)) << 4));
    };
    const uint32_t x_place = x_base + static_cast<uint32_t>(first_token) * kSlabRowBytes + place(lane % 16, lane / 16);
    const uint32_t w_place =
        w_base + static_cast<uint32_t>(first_row) * kSlabRowBytes + place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    // Stages of this block's tiles that tokens are still to be loaded into. Nobody waits for a last arrival, and one
    // under way to a block that has ended would be an error.
    int loads = ((p.tiles - first_tile + tile_step - 1) / tile_step) * p.stages_of_in - p.stages;
    const auto release = [&](int stage) {
      __syncwarp();
      if (lane == 0) arrive(w_free + 8 * stage);
      if (p.cluster > 1 && loads > 0 && lane < p.cluster && ((lane - stage * kSlabs) & (p.cluster - 1)) < kSlabs) {
        arrive_at(x_free + 8 * stage, static_cast<uint32_t>(lane));
      }
      --loads;
    };
    uint32_t x[kBuffers][kTokens][4], w[kBuffers][kWeights][4];
    const auto load = [&](int buffer, uint32_t x_stage, uint32_t w_stage, int step) {
      const int slab = step / (kSlab / kStep);
      const uint32_t turn = 32u * static_cast<uint32_t>(step % (kSlab / kStep));
      const uint32_t x_from = (x_stage + static_cast<uint32_t>(slab) * x_bytes) ^ turn;
      const uint32_t w_from = (w_stage + static_cast<uint32_t>(slab) * w_bytes) ^ turn;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) load_matrices_in_order(x[buffer][t], x_from + t * kFragmentBytes);
#pragma unroll
      for (int g = 0; g < kWeights; ++g) load_matrices_in_order(w[buffer][g], w_from + g * between);
    };
    Ring ring(p.stages);
    wait_for_predecessors();
    for (int base = first_tile; base < p.tiles; base += tile_step) {
      float sum[kTokens][2 * kWeights][4] = {};
      wait(full + 8 * ring.stage, ring.phase);
      __syncwarp();
      uint32_t x_stage = x_place + static_cast<uint32_t>(ring.stage * kSlabs) * x_bytes;
      uint32_t w_stage = w_place + static_cast<uint32_t>(ring.stage * kSlabs) * w_bytes;
#pragma unroll
      for (int step = 0; step < kAhead; ++step) load(step, x_stage, w_stage, step);
      int before = -1;  // the stage to be given back
#pragma unroll 1
      for (int left = p.stages_of_in; left > 0; --left) {
        Ring next = ring;
        next.advance();
        const uint32_t next_x = next.stage == 0 ? x_place : x_stage + kSlabs * x_bytes;
        const uint32_t next_w = next.stage == 0 ? w_place : w_stage + kSlabs * w_bytes;
        bool there = true;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (step == kSteps - kAhead - 2 && left > 1) there = has_ended(full + 8 * next.stage, next.phase);
          if (step + kAhead < kSteps) {
            load((step + kAhead) % kBuffers, x_stage, w_stage, step + kAhead);
          } else {
            // After the last stage this reads what is there, and nobody uses it.
            if (step + kAhead == kSteps) {
              if (!there) wait(full + 8 * next.stage, next.phase);
              __syncwarp();
            }
            load((step + kAhead) % kBuffers, next_x, next_w, step + kAhead - kSteps);
          }
#pragma unroll
          for (int t = 0; t < kTokens; ++t) {
#pragma unroll
            for (int g = 0; g < kWeights; ++g) {
              const int b = step % kBuffers;
              multiply(sum[t][2 * g], x[b][t], w[b][g][0], w[b][g][1]);
              multiply(sum[t][2 * g + 1], x[b][t], w[b][g][2], w[b][g][3]);
            }
          }
          if (step == 0 && before >= 0) release(before);
        }
        before = ring.stage;
        ring = next;
        x_stage = next_x;
        w_stage = next_w;
      }
      release(before);
      const int tile = base + rank;
      if (tile >= p.tiles) continue;
      const int first_column = tile * p.columns + first_row, limit = p.out - first_column;
      if (!kSwiglu && p.bias != nullptr) {
#pragma unroll
        for (int b = 0; b < 2 * kWeights; ++b) {
          const int column = 8 * b + 2 * (lane % 4);
          if (column >= limit) break;
          const float2 pair =
              __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p.bias + first_column + column));
#pragma unroll
          for (int t = 0; t < kTokens; ++t) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              sum[t][b][2 * h] = __fadd_rn(sum[t][b][2 * h], pair.x);
              sum[t][b][2 * h + 1] = __fadd_rn(sum[t][b][2 * h + 1], pair.y);
            }
          }
        }
      }
      constexpr int kBlocks = kSwiglu ? 2 : 2 * kWeights;  // of 8 columns
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t word[kBlocks];
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            float low = sum[t][b][2 * h], high = sum[t][b][2 * h + 1];
            if constexpr (kSwiglu) {
              low = steps::swiglu(rounded(low), rounded(sum[t][b + 2][2 * h]));
              high = steps::swiglu(rounded(high), rounded(sum[t][b + 2][2 * h + 1]));
            }
            word[b] = pack_pair(low, high);
          }
          const int row = first_token + t * kFragmentRows + lane / 4 + 8 * h;
          write_row(word, p.y + static_cast<int64_t>(row) * p.out + first_column, limit, row < p.rows, lane);
        }
      }
    }
  }
  // No block leaves while another may still copy into its memory or arrive at its barriers.
  if (p.cluster > 1) {
    __syncwarp();
    cluster_arrive_release();
    cluster_wait();
  }
}

}  // namespace trireme::cuda
