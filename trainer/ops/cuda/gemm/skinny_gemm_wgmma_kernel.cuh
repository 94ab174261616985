// The kernel of skinny_gemm_wgmma.h.
//
// Shared memory: stages of tokens (64 a group x 64 of `in`), then stages of weights (columns x 64), all in the
// 128-byte swizzle; then three barriers a stage:
//   full     the stage's weights and tokens have come, this block's own share and the others'. One arrival, of the warp
//            of the weights, which also names the bytes.
//   w_free   the blocks that this block's share of the weights goes to have read the stage. One arrival a warp of each.
//   x_free   the same for its share of the tokens.
#pragma once

#include "trainer/ops/cuda/gemm/skinny_gemm.cuh"
#include "trainer/ops/cuda/device/wgmma.cuh"

namespace trireme::cuda {

struct SkinnyGemmWgmmaParams {
  CUtensorMap x_map;  // box 64 x x_box
  CUtensorMap w_map;  // box 64 x w_box
  __nv_bfloat16* y;
  const __nv_bfloat16* bias;
  int rows;
  int out;          // columns of y
  int weight_rows;  // out, or 2 * out
  int groups;       // of four warps, each with 64 tokens
  int block_rows;   // tokens of a block; of its groups' further rows nothing is loaded or written
  int x_box, w_box;
  int tiles;
  int across, along;
  int x_share, w_share;  // blocks that load the tokens of a block together, and its weights; 1 without clusters
  int stages_of_in;      // stages that cover `in`
  int stages;
};

namespace skinny_gemm_wgmma_detail {

inline constexpr int kGroupRows = 64;
inline constexpr int kGroupWarps = 4;
inline constexpr int kLoadingWarps = 4;  // a group of its own, which gives registers away; two of them work
inline constexpr int kBarriers = 3;      // a stage

// Groups of a block, so that the sums of a tile and some 40 registers more fit a thread.
constexpr int most_groups(int columns) { return columns <= 128 ? 4 : columns <= 192 || columns == 224 ? 3 : 2; }
constexpr int most_threads(int columns) { return (most_groups(columns) * kGroupWarps + kLoadingWarps) * 32; }
// Registers of a thread that loads and of one that multiplies: with most_groups() groups as many together as the block
// is launched with.
inline constexpr int kLoadingRegisters = 32;
template <int kColumns>
inline constexpr int kRegisters = kColumns <= 128                      ? 112
                                  : kColumns <= 192 || kColumns == 224 ? 160
                                                                       : 232;

// Columns of one instruction: all, unless its registers are more than a thread has when the block begins, which the
// compiler refuses.
template <int kColumns>
inline constexpr int kTogether = kColumns == 224 ? 112 : kColumns;

// A group of warps clears those of its 64 tokens, from `first` on, that nothing is loaded for, in all `slabs` of all
// stages. No bit of a result depends on them, but the device's power does: at its limit, where decoding is from some 32
// samples on, products of zeros let the clock rise. Before this group's first product; `barrier`: a free one of the
// block.
__device__ __forceinline__ void clear_rows(uint32_t x_base, int first, int block_rows, uint32_t slab_bytes, int slabs,
                                           int barrier) {
  const int rows = min(kGroupRows, first + kGroupRows - block_rows);  // the last ones of the group
  if (rows <= 0) return;
  const int thread = static_cast<int>(threadIdx.x) % (kGroupWarps * 32), words = rows * skinny_gemm::kSlabRowBytes / 16;
  uint32_t from = x_base + static_cast<uint32_t>((first + kGroupRows - rows) * skinny_gemm::kSlabRowBytes);
  for (int slab = 0; slab < slabs; ++slab, from += slab_bytes) {
    for (int word = thread; word < words; word += kGroupWarps * 32) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(from + 16 * static_cast<uint32_t>(word)), "r"(0)
                   : "memory");
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // products read through the other proxy
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "n"(kGroupWarps * 32) : "memory");
}

}  // namespace skinny_gemm_wgmma_detail

// kColumns: of weights in a tile; with kSwiglu half of them of the gate, half of up. kSlabs: of 64 elements of `in`, in
// a stage; where a product is short, several make the way round to the next stage worth it.
template <int kColumns, bool kSwiglu, int kSlabs>
__global__ void __launch_bounds__(skinny_gemm_wgmma_detail::most_threads(kColumns), 1)
    skinny_gemm_wgmma_kernel(const __grid_constant__ SkinnyGemmWgmmaParams p) {
  using namespace skinny_gemm_wgmma_detail;
  using namespace hopper;
  using namespace skinny_gemm;
  constexpr int kParts = kSwiglu ? 2 : 1;
  constexpr int kPartColumns = kColumns / kParts;
  constexpr uint32_t kColumnBytes = kColumns * kSlabRowBytes;  // of a slab
  constexpr uint32_t kWeightBytes = kColumnBytes * kSlabs;     // of a stage

  extern __shared__ uint8_t shared[];
  // The first group of warps loads, the others multiply.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / (kGroupWarps * 32), 0);
  const int warp = static_cast<int>(threadIdx.x) / 32 % kGroupWarps;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int cluster = p.x_share * p.w_share, warps = p.groups * kGroupWarps;
  const int team = p.across * p.along;
  const int rank = static_cast<int>(blockIdx.x) % team;
  const int place_across = rank % p.across, place_along = rank / p.across;
  const int x_place = cluster == 1 ? 0 : place_across, w_place = cluster == 1 ? 0 : place_along;
  const int first_tile = static_cast<int>(blockIdx.x) / team * p.across;
  const int tile_step = static_cast<int>(gridDim.x) / team * p.across;
  const int first_row = place_along * p.block_rows;  // of this block's tokens

  const uint32_t token_bytes = static_cast<uint32_t>(p.groups * kGroupRows * kSlabRowBytes);  // of a slab
  const uint32_t x_bytes = token_bytes * kSlabs;                                              // of a stage
  const uint32_t x_base = (shared_address(shared) + kSharedAlignment - 1) & ~(kSharedAlignment - 1u);
  const uint32_t w_base = x_base + static_cast<uint32_t>(p.stages) * x_bytes;
  const uint32_t full = w_base + static_cast<uint32_t>(p.stages) * kWeightBytes;
  const uint32_t w_free = full + static_cast<uint32_t>(p.stages) * 8;
  const uint32_t x_free = w_free + static_cast<uint32_t>(p.stages) * 8;

  if (threadIdx.x == 0) {
    let_successors_begin();
    prefetch_map(&p.w_map);
    prefetch_map(&p.x_map);
    for (int s = 0; s < p.stages; ++s) {
      init_barrier(full + 8 * s, 1);
      init_barrier(w_free + 8 * s, static_cast<uint32_t>(warps * p.w_share));
      init_barrier(x_free + 8 * s, static_cast<uint32_t>(warps * p.x_share));
    }
    publish_barriers();
  }
  __syncwarp();
  // The barriers are ready, of this block and of those that copies go to. Where the weights are this block's alone,
  // their warp begins without waiting for the others.
  bool waits_at_end = false;
  if (cluster > 1) {
    cluster_arrive();
    waits_at_end = group == 0 && warp == 0 && p.w_share == 1;
    if (!waits_at_end) cluster_wait();
  } else if (group == 0 && warp == 0) {
    asm volatile("barrier.cta.arrive.aligned 1, %0;" ::"r"(blockDim.x) : "memory");
  } else {
    asm volatile("barrier.cta.sync.aligned 1, %0;" ::"r"(blockDim.x) : "memory");
  }

  // No block leaves while another may still copy into its memory or arrive at its barriers.
  const auto leave = [&] {
    if (cluster == 1) return;
    __syncwarp();
    cluster_arrive_release();
    cluster_wait();
  };

  if (group == 0) {
    give_registers_away<kLoadingRegisters>();
    if (warp == 0 && lane == 0) {
      const uint64_t policy = evict_first_policy();
      const uint32_t bytes = static_cast<uint32_t>(p.block_rows * kSlabRowBytes * kSlabs) + kWeightBytes;
      // The blocks with the same tile: every `across`th.
      uint32_t same_tile = 0;
      for (int i = 0; i < p.w_share; ++i) same_tile |= 1u << (i * p.across + place_across);
      Ring ring(p.stages);
      for (int base = first_tile; base < p.tiles; base += tile_step) {
        const int tile = base + place_across;
        // A tile past the last one (the cluster's other blocks have work) lies outside the weight and comes as zeros.
        const int row = (tile < p.tiles ? tile * kPartColumns : p.weight_rows) + w_place * p.w_box;
        for (int i = 0; i < p.stages_of_in; ++i, ring.advance()) {
          wait(w_free + 8 * ring.stage, ring.phase ^ 1);
          const uint32_t barrier = full + 8 * ring.stage;
          arrive_expecting(barrier, bytes);
#pragma unroll
          for (int j = 0; j < kSlabs; ++j) {
            uint32_t target = w_base + static_cast<uint32_t>(ring.stage) * kWeightBytes + j * kColumnBytes +
                              static_cast<uint32_t>(w_place * p.w_box * kSlabRowBytes);
            const int column = (i * kSlabs + j) * kSlab;
#pragma unroll
            for (int part = 0; part < kParts; ++part, target += kPartColumns * kSlabRowBytes) {
              if (p.w_share == 1) {
                load_box(target, &p.w_map, column, row + part * p.out, barrier, policy);
              } else {
                load_box_to(target, &p.w_map, column, row + part * p.out, barrier, static_cast<uint16_t>(same_tile),
                            policy);
              }
            }
          }
        }
      }
    }
    __syncwarp();
    if (waits_at_end) cluster_wait();  // of the arrival above
    if (warp == 1 && lane == 0) {
      const uint64_t policy = evict_last_policy();
      const uint32_t same_tokens = ((1u << p.x_share) - 1) << (place_along * p.across);
      Ring ring(p.stages);
      wait_for_predecessors();
      for (int base = first_tile; base < p.tiles; base += tile_step) {
        for (int i = 0; i < p.stages_of_in; ++i, ring.advance()) {
          wait(x_free + 8 * ring.stage, ring.phase ^ 1);
          const uint32_t barrier = full + 8 * ring.stage;
          const int row = first_row + x_place * p.x_box;
#pragma unroll
          for (int j = 0; j < kSlabs; ++j) {
            const uint32_t target = x_base + static_cast<uint32_t>(ring.stage) * x_bytes +
                                    static_cast<uint32_t>(j) * token_bytes +
                                    static_cast<uint32_t>(x_place * p.x_box * kSlabRowBytes);
            const int column = (i * kSlabs + j) * kSlab;
            if (p.x_share == 1) {
              load_box(target, &p.x_map, column, row, barrier, policy);
            } else {
              load_box_to(target, &p.x_map, column, row, barrier, static_cast<uint16_t>(same_tokens), policy);
            }
          }
        }
      }
    }
    leave();
  } else {
    take_registers<kRegisters<kColumns>>();
    const uint32_t x_rows = swizzled_rows(x_base + static_cast<uint32_t>((group - 1) * kGroupRows * kSlabRowBytes));
    const uint32_t w_rows = swizzled_rows(w_base);
    // The barrier of stage 0 that this lane gives a stage back at, if any.
    const bool for_weights = lane < p.w_share, for_tokens = lane >= 8 && lane < 8 + p.x_share;
    const uint32_t given_back =
        for_weights  ? barrier_of(w_free, static_cast<uint32_t>(cluster == 1 ? 0 : lane * p.across + place_across))
        : for_tokens ? barrier_of(x_free, static_cast<uint32_t>(cluster == 1 ? 0 : place_along * p.across + lane - 8))
                     : 0;
    const bool gives_back = for_weights || for_tokens;
    // Stages that are still to be loaded after the present one. Nobody waits for a last arrival, and one under way to a
    // block that has ended would be an error.
    const int stages = p.stages, stages_of_in = p.stages_of_in;
    int loads = ((p.tiles - first_tile + tile_step - 1) / tile_step) * stages_of_in - stages;
    const auto release = [&](int stage) {
      __syncwarp();
      if (gives_back && loads > 0) arrive_at(given_back + 8 * static_cast<uint32_t>(stage));
      --loads;
    };
    clear_rows(x_base, (group - 1) * kGroupRows, p.block_rows, token_bytes, stages * kSlabs, group + 1);
    float sum[kColumns / 2];
    Ring ring(stages);
    wait_for_predecessors();
    for (int base = first_tile; base < p.tiles; base += tile_step) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) sum[i] = 0;
      int before = -1;  // the stage to be given back
#pragma unroll 1
      for (int left = stages_of_in; left > 0; --left, ring.advance()) {
        const uint32_t x = further(x_rows, static_cast<uint32_t>(ring.stage) * x_bytes);
        const uint32_t w = further(w_rows, static_cast<uint32_t>(ring.stage) * kWeightBytes);
        wait(full + 8 * ring.stage, ring.phase);
        __syncwarp();
        pin(sum);
        begin_products();
#pragma unroll
        for (uint32_t step = 0; step < kSlabs * kSlab / 16; ++step) {
          const uint32_t slab = step / (kSlab / 16), turn = 32 * (step % (kSlab / 16));
#pragma unroll
          for (uint32_t from = 0; from < kColumns; from += kTogether<kColumns>) {
            multiply_group<kTogether<kColumns>>(reinterpret_cast<float(&)[kTogether<kColumns> / 2]>(sum[from / 2]),
                                                further(x, slab * token_bytes + turn),
                                                further(w, slab * kColumnBytes + turn + from * kSlabRowBytes));
          }
        }
        end_of_group();
        pin(sum);
        wait_for_products<1>();
        if (before >= 0) release(before);
        before = ring.stage;
      }
      wait_for_products<0>();
      pin(sum);
      release(before);
      const int tile = base + place_across;
      if (tile >= p.tiles) continue;
      const int first_column = tile * kPartColumns, limit = p.out - first_column;
      if (!kSwiglu && p.bias != nullptr) {
#pragma unroll
        for (int b = 0; b < kColumns / 8; ++b) {
          const int column = 8 * b + 2 * (lane % 4);
          if (column < limit) {
            const float2 pair =
                __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p.bias + first_column + column));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              sum[4 * b + 2 * h] = __fadd_rn(sum[4 * b + 2 * h], pair.x);
              sum[4 * b + 2 * h + 1] = __fadd_rn(sum[4 * b + 2 * h + 1], pair.y);
            }
          }
        }
      }
      constexpr int kBlocks = kPartColumns / 8;  // of 8 columns of y
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int in_block = (group - 1) * kGroupRows + warp * 16 + lane / 4 + 8 * h, row = first_row + in_block;
        const bool inside = in_block < p.block_rows && row < p.rows;
        __nv_bfloat16* const to = p.y + static_cast<int64_t>(row) * p.out + first_column;
        const auto word_of = [&](int b) {
          float low = sum[4 * b + 2 * h], high = sum[4 * b + 2 * h + 1];
          if constexpr (kSwiglu) {
            low = steps::swiglu(rounded(low), rounded(sum[4 * (b + kBlocks) + 2 * h]));
            high = steps::swiglu(rounded(high), rounded(sum[4 * (b + kBlocks) + 2 * h + 1]));
          }
          return pack_pair(low, high);
        };
#pragma unroll
        for (int b = 0; b + 4 <= kBlocks; b += 4) {
          const uint32_t word[4] = {word_of(b), word_of(b + 1), word_of(b + 2), word_of(b + 3)};
          write_row(word, to + 8 * b, limit - 8 * b, inside, lane);
        }
#pragma unroll
        for (int b = kBlocks / 4 * 4; b < kBlocks; ++b) {
          const int column = 8 * b + 2 * (lane % 4);
          const uint32_t word = word_of(b);
          if (inside && column < limit) *reinterpret_cast<uint32_t*>(to + column) = word;
        }
      }
    }
    leave();
  }
}

}  // namespace trireme::cuda
