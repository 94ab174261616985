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

#include "trainer/ops/cuda/device/hopper.cuh"
#include "trainer/ops/cuda/device/mma.cuh"
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

// What a thread is, the tiles of its block, and where things lie in shared memory.
template <bool kSwiglu, int kSlabs>
struct Block {
  static constexpr int kParts = kSwiglu ? 2 : 1;

  const SkinnyGemmMmaParams& p;
  int warp, lane, rank;
  int first_tile, tile_step;              // of the cluster's first block
  uint32_t x_bytes, part_bytes, w_bytes;  // of a slab
  uint32_t x_base, w_base;
  uint32_t full, w_free, x_free;  // a barrier each stage

  __device__ __forceinline__ Block(const SkinnyGemmMmaParams& of, const uint8_t* shared) : p(of) {
    warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    lane = static_cast<int>(threadIdx.x) % 32;
    rank = static_cast<int>(blockIdx.x) & (p.cluster - 1);
    first_tile = static_cast<int>(blockIdx.x) - rank;
    tile_step = static_cast<int>(gridDim.x);
    x_bytes = static_cast<uint32_t>(p.x_rows) * kSlabRowBytes;
    part_bytes = static_cast<uint32_t>(p.columns) * kSlabRowBytes;
    w_bytes = part_bytes * kParts;
    x_base = (shared_address(shared) + kSharedAlignment - 1) & ~(kSharedAlignment - 1u);
    w_base = x_base + static_cast<uint32_t>(p.stages * kSlabs) * x_bytes;
    full = w_base + static_cast<uint32_t>(p.stages * kSlabs) * w_bytes;
    w_free = full + static_cast<uint32_t>(p.stages) * 8;
    x_free = w_free + static_cast<uint32_t>(p.stages) * 8;
  }

  // By one thread, before any other uses a barrier.
  __device__ __forceinline__ void init_barriers() const {
    prefetch_map(&p.w_map);
    prefetch_map(&p.x_map);
    for (int s = 0; s < p.stages; ++s) {
      init_barrier(full + 8 * s, 1);
      init_barrier(w_free + 8 * s, static_cast<uint32_t>(p.warps));
      init_barrier(x_free + 8 * s, static_cast<uint32_t>(p.warps * p.cluster));
    }
    publish_barriers();
  }

  // The barriers are ready, of this block and for the tokens of the others too. The weights' warp touches nothing of
  // other blocks: it begins without waiting for them, and waits at its end for the cluster that it has arrived at here.
  __device__ __forceinline__ void meet() const {
    if (p.cluster > 1) {
      cluster_arrive();
      if (warp != p.warps) cluster_wait();
    } else if (warp == p.warps) {
      asm volatile("barrier.cta.arrive.aligned 1, %0;" ::"r"(blockDim.x) : "memory");
    } else {
      asm volatile("barrier.cta.sync.aligned 1, %0;" ::"r"(blockDim.x) : "memory");
    }
  }

  // No block leaves while another may still copy into its memory or arrive at its barriers.
  __device__ __forceinline__ void leave() const {
    if (p.cluster > 1) {
      __syncwarp();
      cluster_arrive_release();
      cluster_wait();
    }
  }
};

// One thread of the weights' warp, and one of the tokens'.
template <bool kSwiglu, int kSlabs>
struct Producer {
  const Block<kSwiglu, kSlabs>& block;

  __device__ __forceinline__ void load_weights() const {
    const auto& p = block.p;
    const uint64_t policy = evict_first_policy();
    const uint32_t bytes = static_cast<uint32_t>(kSlabs) * (block.w_bytes + block.x_bytes);
    Ring ring(p.stages);
    for (int base = block.first_tile; base < p.tiles; base += block.tile_step) {
      const int tile = base + block.rank;
      // A tile past the last one (the cluster's other blocks have work) lies outside the weight and comes as zeros.
      const int row = tile < p.tiles ? tile * p.columns : p.weight_rows;
      for (int i = 0; i < p.stages_of_in; ++i, ring.advance()) {
        wait(block.w_free + 8 * ring.stage, ring.phase ^ 1);
        const uint32_t barrier = block.full + 8 * ring.stage;
        arrive_expecting(barrier, bytes);
#pragma unroll
        for (int j = 0; j < kSlabs; ++j) {
          const uint32_t target = block.w_base + static_cast<uint32_t>(ring.stage * kSlabs + j) * block.w_bytes;
#pragma unroll
          for (int part = 0; part < block.kParts; ++part) {
            load_box(target + part * block.part_bytes, &p.w_map, (i * kSlabs + j) * kSlab, row + part * p.out, barrier,
                     policy);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void load_tokens() const {
    const auto& p = block.p;
    const uint64_t policy = evict_last_policy();
    const auto everybody = static_cast<uint16_t>((1 << p.cluster) - 1);
    const uint32_t free = p.cluster == 1 ? block.w_free : block.x_free;
    Ring ring(p.stages);
    wait_for_predecessors();
    for (int base = block.first_tile; base < p.tiles; base += block.tile_step) {
      for (int i = 0; i < p.stages_of_in; ++i, ring.advance()) {
        const int first_slab = ring.stage * kSlabs;
        if (((block.rank - first_slab) & (p.cluster - 1)) >= kSlabs) continue;  // loads nothing of this stage
        wait(free + 8 * ring.stage, ring.phase ^ 1);
        const uint32_t barrier = block.full + 8 * ring.stage;
#pragma unroll
        for (int j = 0; j < kSlabs; ++j) {
          if (((first_slab + j) & (p.cluster - 1)) != block.rank) continue;
          const uint32_t target = block.x_base + static_cast<uint32_t>(first_slab + j) * block.x_bytes;
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
};

// A warp that multiplies. What it computes with, Fragments and Sums, lives in registers: arrays are indexed by
// constants only. They stand apart from the rest, which the compiler takes apart before it has unrolled the loops over
// these arrays.
template <int kTokens, int kWeights, bool kSwiglu, int kSlabs>
struct Consumer {
  static constexpr uint32_t kFragmentBytes = kFragmentRows * kSlabRowBytes;
  static constexpr int kSteps = kSlabs * kSlab / kStep;  // of a stage
  static constexpr int kAhead = 2, kBuffers = 4;
  static_assert(kSteps % kBuffers == 0 && kSteps >= kAhead + 2);
  struct Fragments {
    uint32_t x[kBuffers][kTokens][4], w[kBuffers][kWeights][4];
  };
  using Sums = float[kTokens][2 * kWeights][4];
  struct Place {  // of a stage, in shared memory: a lane's tokens and weights
    uint32_t x, w;
  };

  const Block<kSwiglu, kSlabs>& block;
  const SkinnyGemmMmaParams& p;
  int lane;
  uint32_t between;  // two fragments of weights
  int first_token, first_row;
  Place first;  // stage 0
  int loads;    // stages of this block's tiles that tokens are still to be loaded into
  Ring ring;

  __device__ __forceinline__ explicit Consumer(const Block<kSwiglu, kSlabs>& of)
      : block(of), p(of.p), lane(of.lane), ring(of.p.stages) {
    between = kSwiglu ? block.part_bytes : kFragmentBytes;
    const int side = block.warp % p.side_by_side;
    first_token = block.warp / p.side_by_side * (kTokens * kFragmentRows);
    first_row = side * kFragmentRows * (kSwiglu ? 1 : kWeights);
    first.x = block.x_base + static_cast<uint32_t>(first_token) * kSlabRowBytes + place(lane % 16, lane / 16);
    first.w =
        block.w_base + static_cast<uint32_t>(first_row) * kSlabRowBytes + place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    loads = ((p.tiles - block.first_tile + block.tile_step - 1) / block.tile_step) * p.stages_of_in - p.stages;
  }

  __device__ __forceinline__ void run() {
    Fragments fragments;
    wait_for_predecessors();
    for (int base = block.first_tile; base < p.tiles; base += block.tile_step) {
      Sums sum = {};
      sum_tile(sum, fragments);
      const int tile = base + block.rank;
      if (tile >= p.tiles) continue;
      const int first_column = tile * p.columns + first_row, limit = p.out - first_column;
      if (!kSwiglu && p.bias != nullptr) add_bias(sum, first_column, limit);
      write(sum, first_column, limit);
    }
  }

  __device__ __forceinline__ void sum_tile(Sums& sum, Fragments& fragments) {
    wait(block.full + 8 * ring.stage, ring.phase);
    __syncwarp();
    Place here;
    here.x = first.x + static_cast<uint32_t>(ring.stage * kSlabs) * block.x_bytes;
    here.w = first.w + static_cast<uint32_t>(ring.stage * kSlabs) * block.w_bytes;
#pragma unroll
    for (int step = 0; step < kAhead; ++step) load(fragments, step, here, step);
    int before = -1;  // the stage to be given back
#pragma unroll 1
    for (int left = p.stages_of_in; left > 0; --left) {
      Ring next = ring;
      next.advance();
      Place next_place;
      next_place.x = next.stage == 0 ? first.x : here.x + kSlabs * block.x_bytes;
      next_place.w = next.stage == 0 ? first.w : here.w + kSlabs * block.w_bytes;
      sum_stage(sum, fragments, here, next_place, next, left, before);
      before = ring.stage;
      ring = next;
      here = next_place;
    }
    release(before);
  }

  // The products of a stage, with `left` - 1 more to come of the tile. Fragments are read ahead, at its end those of
  // the next one; the stage before is given back.
  __device__ __forceinline__ void sum_stage(Sums& sum, Fragments& fragments, const Place& here, const Place& next_place,
                                            const Ring& next, int left, int before) {
    bool there = true;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step == kSteps - kAhead - 2 && left > 1) there = has_ended(block.full + 8 * next.stage, next.phase);
      if (step + kAhead < kSteps) {
        load(fragments, (step + kAhead) % kBuffers, here, step + kAhead);
      } else {
        // After the last stage this reads what is there, and nobody uses it.
        if (step + kAhead == kSteps) {
          if (!there) wait(block.full + 8 * next.stage, next.phase);
          __syncwarp();
        }
        load(fragments, (step + kAhead) % kBuffers, next_place, step + kAhead - kSteps);
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
#pragma unroll
        for (int g = 0; g < kWeights; ++g) {
          const int b = step % kBuffers;
          multiply(sum[t][2 * g], fragments.x[b][t], fragments.w[b][g][0], fragments.w[b][g][1]);
          multiply(sum[t][2 * g + 1], fragments.x[b][t], fragments.w[b][g][2], fragments.w[b][g][3]);
        }
      }
      if (step == 0 && before >= 0) release(before);
    }
  }

  // Where a lane's row of 16 bytes lies in a fragment of step 0; step s: 32 s in exclusive or.
  static __device__ __forceinline__ uint32_t place(int row, int chunk) {
    return static_cast<uint32_t>(row * kSlabRowBytes + ((chunk ^ (row & 7)) << 4));
  }

  __device__ __forceinline__ void load(Fragments& to, int buffer, const Place& stage, int step) const {
    const int slab = step / (kSlab / kStep);
    const uint32_t turn = 32u * static_cast<uint32_t>(step % (kSlab / kStep));
    const uint32_t x_from = (stage.x + static_cast<uint32_t>(slab) * block.x_bytes) ^ turn;
    const uint32_t w_from = (stage.w + static_cast<uint32_t>(slab) * block.w_bytes) ^ turn;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) load_matrices_in_order(to.x[buffer][t], x_from + t * kFragmentBytes);
#pragma unroll
    for (int g = 0; g < kWeights; ++g) load_matrices_in_order(to.w[buffer][g], w_from + g * between);
  }

  // Nobody waits for a last arrival at x_free, and one under way to a block that has ended would be an error.
  __device__ __forceinline__ void release(int stage) {
    __syncwarp();
    if (lane == 0) arrive(block.w_free + 8 * stage);
    if (p.cluster > 1 && loads > 0 && lane < p.cluster && ((lane - stage * kSlabs) & (p.cluster - 1)) < kSlabs) {
      arrive_at(block.x_free + 8 * stage, static_cast<uint32_t>(lane));
    }
    --loads;
  }

  __device__ __forceinline__ void add_bias(Sums& sum, int first_column, int limit) const {
#pragma unroll
    for (int b = 0; b < 2 * kWeights; ++b) {
      const int column = 8 * b + 2 * (lane % 4);
      if (column >= limit) break;
      const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p.bias + first_column + column));
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

  __device__ __forceinline__ void write(const Sums& sum, int first_column, int limit) const {
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
};

}  // namespace skinny_gemm_mma_detail

// kTokens, kWeights: fragments of tokens and of weights of a warp (with the activation one of the gate and one of up).
// A block has p.warps + 2 warps.
template <int kTokens, int kWeights, bool kSwiglu, int kSlabs>
__global__ void __launch_bounds__((kMostMultiplyingWarps + kLoadingWarps) * 32)
    skinny_gemm_mma_kernel(const __grid_constant__ SkinnyGemmMmaParams p) {
  static_assert(!kSwiglu || kWeights == 2);
  using namespace skinny_gemm_mma_detail;
  extern __shared__ uint8_t shared[];
  const Block<kSwiglu, kSlabs> block(p, shared);
  if (block.warp == p.warps && block.lane == 0) {
    let_successors_begin();
    block.init_barriers();
  }
  __syncwarp();
  block.meet();
  if (block.warp == p.warps) {
    if (block.lane == 0) Producer<kSwiglu, kSlabs>{block}.load_weights();
    __syncwarp();
    if (p.cluster > 1) cluster_wait();  // of the arrival in meet()
  } else if (block.warp == p.warps + 1) {
    if (block.lane == 0) Producer<kSwiglu, kSlabs>{block}.load_tokens();
    __syncwarp();
  } else {
    Consumer<kTokens, kWeights, kSwiglu, kSlabs>(block).run();
  }
  block.leave();
}

}  // namespace trireme::cuda
