// The grouped GEMM of decoding, and of any number of rows where the library's may not be used. Work is cut into tiles:
// up to 64 rows of one expert times 128 rows of its matrix (with swiglu 64 of the gate and the same 64 of up). Each
// block finds out from the offsets which tiles there are, and goes round them; one warp streams tiles through shared
// memory, across the ends of tiles, eight multiply.
//
// Shared memory: stages of weights (128 x 64) and of tokens (kTokens fragments of 16 x 64), in the 128-byte swizzle;
// two barriers a stage: full (one arrival, which names the bytes) and free (an arrival a warp that multiplies).
#include <cuda_bf16.h>

#include "trainer/ops/cuda/device/hopper.cuh"
#include "trainer/ops/cuda/device/mma.cuh"
#include "trainer/ops/cuda/experts/expert_kernels.h"
#include "trainer/ops/cuda/gemm/skinny_gemm.cuh"
#include "trainer/ops/cuda/gemm/swiglu_step.cuh"

namespace trireme::cuda {
namespace {

using namespace hopper;
using skinny_gemm::kMostSharedBytes, skinny_gemm::kSharedAlignment, skinny_gemm::kSlab, skinny_gemm::kSlabRowBytes;
using skinny_gemm::Launch, skinny_gemm::Ring, skinny_gemm::rounded, skinny_gemm::taken;

constexpr int kWarpLanes = 32;
constexpr int kMultiplying = 8, kThreads = (kMultiplying + 1) * kWarpLanes;
constexpr int kBoxRows = 64, kTileRows = 2 * kBoxRows;  // of weights
constexpr int kFragment = 16;                           // rows of tokens
constexpr int kMostFragments = 4, kItemRows = kMostFragments * kFragment;
constexpr int kSteps = kSlab / 16;
constexpr uint32_t kWeightBytes = kTileRows * kSlabRowBytes, kFragmentBytes = kFragment * kSlabRowBytes;
constexpr int kMostItems = kMostExperts + static_cast<int>(kFewGroupedRows) / kItemRows;

struct Params {
  CUtensorMap x_map;  // box 64 x 16
  CUtensorMap w_map;  // box 64 x 64
  const int32_t* offsets;
  __nv_bfloat16* y;
  int experts, out, weight_rows;  // of an expert
  int slabs;                      // of `in`
  int tiles;                      // of an item
  int stages;
};

// Up to 64 rows of an expert.
struct Item {
  int expert, first, rows;
};

struct Tile {
  Item item;
  int column;  // of y, the first
  __device__ __forceinline__ int fragments() const { return (item.rows + kFragment - 1) / kFragment; }
};

// Of the whole warp: `own` of this lane and of those ahead of it.
__device__ __forceinline__ int sum_up_to(int own, int lane) {
  int sum = own;
#pragma unroll
  for (int step = 1; step < kWarpLanes; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  return sum;
}

// Of few rows: a list.
struct Items {
  static constexpr bool kReadOnce = true;  // nearly all of an expert's rows are one item: its matrix is read once
  short expert[kMostItems];
  short rows[kMostItems];
  int first[kMostItems];
  int count;

  // By the first warp: the items of all experts, in their order.
  __device__ void find(const int32_t* offsets, int experts, int lane) {
    int before = 0;
    for (int base = 0; base < experts; base += kWarpLanes) {
      const int e = base + lane;
      const int begin = e < experts ? offsets[e] : 0, rows_of = e < experts ? offsets[e + 1] - begin : 0;
      const int own = (rows_of + kItemRows - 1) / kItemRows;
      const int sum = sum_up_to(own, lane);
      for (int i = 0; i < own; ++i) {
        const int at = before + sum - own + i;
        expert[at] = static_cast<short>(e);
        first[at] = begin + i * kItemRows;
        rows[at] = static_cast<short>(min(rows_of - i * kItemRows, kItemRows));
      }
      before += __shfl_sync(0xffffffffu, sum, kWarpLanes - 1);
    }
    if (lane == 0) count = before;
  }
  __device__ __forceinline__ Item operator[](int i) const { return {expert[i], first[i], rows[i]}; }
};

// Of any number of rows, in the same order: an item's expert is looked for.
struct ManyItems {
  static constexpr bool kReadOnce = false;
  int before[kMostExperts + 1];  // items of the experts ahead of each
  int begin[kMostExperts + 1];   // of each, its first row
  int experts, count;

  // By the first warp.
  __device__ void find(const int32_t* offsets, int of, int lane) {
    int ahead = 0;
    for (int base = 0; base < of; base += kWarpLanes) {
      const int e = base + lane;
      const int first = e < of ? offsets[e] : 0, rows_of = e < of ? offsets[e + 1] - first : 0;
      const int own = (rows_of + kItemRows - 1) / kItemRows;
      const int sum = sum_up_to(own, lane);
      if (e < of) {
        before[e] = ahead + sum - own;
        begin[e] = first;
      }
      ahead += __shfl_sync(0xffffffffu, sum, kWarpLanes - 1);
    }
    if (lane == 0) {
      before[of] = count = ahead;
      begin[of] = offsets[of];
      experts = of;
    }
  }
  __device__ __forceinline__ Item operator[](int i) const {
    int low = 0, high = experts;  // before[low] <= i < before[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (before[middle] <= i)
        low = middle;
      else
        high = middle;
    }
    const int first = begin[low] + (i - before[low]) * kItemRows;
    return {low, first, min(begin[low + 1] - first, kItemRows)};
  }
};

template <bool kSwiglu, int kTokens, class List>
struct Block {
  static constexpr uint32_t kStageBytes = kWeightBytes + kTokens * kFragmentBytes;

  const Params& p;
  const List& items;
  uint32_t base, full, free;
  int warp, lane;

  __device__ __forceinline__ Block(const Params& of, const List& found, const uint8_t* shared) : p(of), items(found) {
    warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpLanes, 0);
    lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    base = (shared_address(shared) + kSharedAlignment - 1) & ~(kSharedAlignment - 1u);
    full = base + static_cast<uint32_t>(p.stages) * kStageBytes;
    free = full + static_cast<uint32_t>(p.stages) * 8;
  }
  __device__ __forceinline__ uint32_t weights(int stage) const {
    return base + static_cast<uint32_t>(stage) * kStageBytes;
  }
  __device__ __forceinline__ uint32_t tokens(int stage) const { return weights(stage) + kWeightBytes; }
  __device__ __forceinline__ int tiles() const { return items.count * p.tiles; }
  __device__ __forceinline__ Tile tile(int index) const {
    return {items[index / p.tiles], index % p.tiles * (kSwiglu ? kBoxRows : kTileRows)};
  }

  __device__ __forceinline__ void init_barriers() const {
    prefetch_map(&p.w_map);
    prefetch_map(&p.x_map);
    for (int s = 0; s < p.stages; ++s) {
      init_barrier(full + 8 * s, 1);
      init_barrier(free + 8 * s, kMultiplying);
    }
    publish_barriers();
  }

  // One thread of the last warp.
  __device__ __forceinline__ void produce() const {
    const uint64_t often = evict_last_policy(), of_weights = List::kReadOnce ? evict_first_policy() : often;
    Ring ring(p.stages);
    for (int index = static_cast<int>(blockIdx.x); index < tiles(); index += static_cast<int>(gridDim.x)) {
      const Tile at = tile(index);
      const int fragments = at.fragments();
      const int row = at.item.expert * p.weight_rows + at.column, second = row + (kSwiglu ? p.out : kBoxRows);
      const uint32_t bytes = kWeightBytes + static_cast<uint32_t>(fragments) * kFragmentBytes;
      for (int slab = 0; slab < p.slabs; ++slab, ring.advance()) {
        wait(free + 8 * ring.stage, ring.phase ^ 1);
        const uint32_t barrier = full + 8 * ring.stage;
        arrive_expecting(barrier, bytes);
        load_box(weights(ring.stage), &p.w_map, slab * kSlab, row, barrier, of_weights);
        load_box(weights(ring.stage) + kWeightBytes / 2, &p.w_map, slab * kSlab, second, barrier, of_weights);
        for (int t = 0; t < fragments; ++t) {
          load_box(tokens(ring.stage) + static_cast<uint32_t>(t) * kFragmentBytes, &p.x_map, slab * kSlab,
                   at.item.first + t * kFragment, barrier, often);
        }
      }
    }
  }
};

// A warp that multiplies: 16 rows of weights, with swiglu 8 of the gate and the same 8 of up.
template <bool kSwiglu, int kTokens, class List>
struct Consumer {
  using Sums = float[kTokens][2][4];
  using Owner = Block<kSwiglu, kTokens, List>;

  const Owner& block;
  const Params& p;
  int lane;
  uint32_t x_place, w_place;  // a lane's rows of 16 bytes, of step 0

  __device__ __forceinline__ explicit Consumer(const Owner& of) : block(of), p(of.p), lane(of.lane) {
    x_place = place(lane % 16, lane / 16);
    const int half = lane / 16, row = lane % 8, chunk = lane / 8 % 2;
    w_place = kSwiglu ? static_cast<uint32_t>(half) * (kWeightBytes / 2) + place(block.warp * 8 + row, chunk)
                      : place(block.warp * 16 + half * 8 + row, chunk);
  }
  static __device__ __forceinline__ uint32_t place(int row, int chunk) {
    return static_cast<uint32_t>(row * kSlabRowBytes + ((chunk ^ (row & 7)) << 4));
  }

  __device__ __forceinline__ void run() const {
    Ring ring(p.stages);
    for (int index = static_cast<int>(blockIdx.x); index < block.tiles(); index += static_cast<int>(gridDim.x)) {
      const Tile at = block.tile(index);
      Sums sum = {};
      const int fragments = at.fragments();
      for (int slab = 0; slab < p.slabs; ++slab, ring.advance()) {
        wait(block.full + 8 * ring.stage, ring.phase);
        __syncwarp();
        add_slab(sum, ring.stage, fragments);
        __syncwarp();
        if (lane == 0) arrive(block.free + 8 * ring.stage);
      }
      write(sum, at);
    }
  }

  __device__ __forceinline__ void add_slab(Sums& sum, int stage, int fragments) const {
    uint32_t w[kSteps][4];
    const uint32_t w_from = block.weights(stage) + w_place;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_matrices(w[step], w_from ^ (32u * step));
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= fragments) break;
      uint32_t x[kSteps][4];
      const uint32_t x_from = block.tokens(stage) + static_cast<uint32_t>(t) * kFragmentBytes + x_place;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_matrices(x[step], x_from ^ (32u * step));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        multiply(sum[t][0], x[step], w[step][0], w[step][1]);
        multiply(sum[t][1], x[step], w[step][2], w[step][3]);
      }
    }
  }

  __device__ __forceinline__ void write(const Sums& sum, const Tile& at) const {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = t * kFragment + lane / 4 + 8 * h;
        if (row >= at.item.rows) continue;
        __nv_bfloat16* to = p.y + static_cast<int64_t>(at.item.first + row) * p.out + at.column + 2 * (lane % 4);
        const float low = sum[t][0][2 * h], high = sum[t][0][2 * h + 1];
        const float low_up = sum[t][1][2 * h], high_up = sum[t][1][2 * h + 1];
        if constexpr (kSwiglu) {
          *reinterpret_cast<uint32_t*>(to + block.warp * 8) =
              pack_pair(steps::swiglu(rounded(low), rounded(low_up)), steps::swiglu(rounded(high), rounded(high_up)));
        } else {
          *reinterpret_cast<uint32_t*>(to + block.warp * 16) = pack_pair(low, high);
          *reinterpret_cast<uint32_t*>(to + block.warp * 16 + 8) = pack_pair(low_up, high_up);
        }
      }
    }
  }
};

template <bool kSwiglu, int kTokens, class List>
__global__ void __launch_bounds__(kThreads, 1) grouped_gemm_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint8_t shared[];
  __shared__ List items;
  const Block<kSwiglu, kTokens, List> block(p, items, shared);
  if (threadIdx.x == 0) {
    let_successors_begin();
    block.init_barriers();
  }
  wait_for_predecessors();
  if (block.warp == 0) items.find(p.offsets, p.experts, block.lane);
  __syncthreads();
  if (block.warp == kMultiplying) {
    if (block.lane == 0) block.produce();
  } else {
    Consumer<kSwiglu, kTokens, List>(block).run();
  }
}

template <bool kSwiglu, int kTokens, class List = Items>
cudaError_t launch(Params& params, bool early, cudaStream_t stream) {
  constexpr size_t kStage = Block<kSwiglu, kTokens, List>::kStageBytes;
  params.stages = static_cast<int>((kMostSharedBytes - sizeof(List) - 2 * kSharedAlignment) / (kStage + 16));
  const size_t bytes = kSharedAlignment + static_cast<size_t>(params.stages) * (kStage + 16);
  const void* kernel = reinterpret_cast<const void*>(&grouped_gemm_kernel<kSwiglu, kTokens, List>);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return taken(error);
  const Launch of(skinny_gemm::sm_count(), 1, kMultiplying + 1, bytes, early, stream);
  void* arguments[] = {&params};
  return taken(cudaLaunchKernelExC(&of.config, kernel, arguments));
}

}  // namespace

bool grouped_gemm_supported(const GroupedGemmArgs& a) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const int64_t of_tile = a.swiglu ? kBoxRows : kTileRows, items = a.rows / kItemRows + a.experts;
  return a.rows < kMost - kItemRows && a.experts >= 1 && a.experts <= kMostExperts && a.in >= kSlab &&
         a.in % kSlab == 0 && a.out > 0 && a.out % of_tile == 0 && items * (a.out / of_tile) < kMost &&
         a.experts * a.out * (a.swiglu ? 2 : 1) < kMost && skinny_gemm::device_supported();
}

cudaError_t grouped_gemm(const GroupedGemmArgs& a, cudaStream_t stream) {
  if (!grouped_gemm_supported(a)) return cudaErrorInvalidValue;
  if (a.rows == 0) return cudaSuccess;
  Params params;
  params.offsets = a.offsets;
  params.y = static_cast<__nv_bfloat16*>(a.y);
  params.experts = static_cast<int>(a.experts);
  params.out = static_cast<int>(a.out);
  params.weight_rows = static_cast<int>(a.swiglu ? 2 * a.out : a.out);
  params.slabs = static_cast<int>(a.in / kSlab);
  params.tiles = static_cast<int>(a.out / (a.swiglu ? kBoxRows : kTileRows));
  if (!skinny_gemm::encode(&params.x_map, a.x, a.rows, a.in, a.in, kFragment) ||
      !skinny_gemm::encode(&params.w_map, a.weight, a.experts * params.weight_rows, a.in, a.in, kBoxRows)) {
    return cudaErrorInvalidValue;
  }
  if (a.rows > kFewGroupedRows) {
    return a.swiglu ? launch<true, kMostFragments, ManyItems>(params, a.early, stream)
                    : launch<false, kMostFragments, ManyItems>(params, a.early, stream);
  }
  if (a.most <= kFragment)
    return a.swiglu ? launch<true, 1>(params, a.early, stream) : launch<false, 1>(params, a.early, stream);
  if (a.most <= 2 * kFragment)
    return a.swiglu ? launch<true, 2>(params, a.early, stream) : launch<false, 2>(params, a.early, stream);
  return a.swiglu ? launch<true, 4>(params, a.early, stream) : launch<false, 4>(params, a.early, stream);
}

}  // namespace trireme::cuda
