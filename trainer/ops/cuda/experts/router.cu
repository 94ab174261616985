#include <math_constants.h>

#include <algorithm>
#include <type_traits>

#include "trainer/ops/cuda/device/hopper.cuh"
#include "trainer/ops/cuda/elementwise/rows.cuh"
#include "trainer/ops/cuda/experts/expert_kernels.h"

namespace trireme::cuda {
namespace {

using namespace rows;
using hopper::let_successors_begin, hopper::wait_for_predecessors;

constexpr unsigned kAllLanes = 0xffffffffu;

// ---- logits

constexpr int kParts = 8;  // of `hidden`, a warp each
constexpr int kRowLanes = 4, kExpertLanes = 8;

// The parts' sums, added in order.
template <class Sum, int kRows, int kExperts>
__device__ __forceinline__ void write_sums(const Sum (&parts)[kParts][kRows][kExperts], int64_t first_row, int64_t rows,
                                           int first_expert, int experts, float* __restrict__ logits) {
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kExperts; i += kParts * kWarp) {
    const int64_t row = first_row + i / kExperts;
    const int expert = first_expert + i % kExperts;
    if (row >= rows || expert >= experts) continue;
    Sum total = parts[0][i / kExperts][i % kExperts];
#pragma unroll
    for (int p = 1; p < kParts; ++p) total += parts[p][i / kExperts][i % kExperts];
    logits[row * experts + expert] = static_cast<float>(total);
  }
}

// A block has kRowLanes * kR rows and kExpertLanes * kE experts. Which block computes an element does not show in it.
template <int kR, int kE>
__global__ void __launch_bounds__(kParts* kWarp)
    logits_kernel(const Bf16* __restrict__ x, const Bf16* __restrict__ router, int64_t rows, int64_t hidden,
                  int experts, float* __restrict__ logits) {
  constexpr int kRows = kRowLanes * kR, kExperts = kExpertLanes * kE;
  __shared__ float parts[kParts][kRows][kExperts];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row_lane = lane / kExpertLanes, expert_lane = lane % kExpertLanes;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
  const int first_expert = static_cast<int>(blockIdx.y) * kExperts;
  const int64_t part = hidden / kParts, begin = warp * part;
  const Chunk *of_row[kR], *of_expert[kE];
#pragma unroll
  for (int r = 0; r < kR; ++r) {
    const int64_t row = min(first_row + row_lane + r * kRowLanes, rows - 1);
    of_row[r] = reinterpret_cast<const Chunk*>(x + row * hidden + begin);
  }
#pragma unroll
  for (int e = 0; e < kE; ++e) {
    const int expert = min(first_expert + expert_lane + e * kExpertLanes, experts - 1);
    of_expert[e] = reinterpret_cast<const Chunk*>(router + expert * hidden + begin);
  }
  let_successors_begin();
  wait_for_predecessors();
  float sum[kR][kE] = {};
#pragma unroll 2
  for (int64_t c = 0; c < part / kChunk; ++c) {
    float a[kR][kChunk], b[kE][kChunk];
#pragma unroll
    for (int r = 0; r < kR; ++r) unpack(of_row[r][c], a[r]);
#pragma unroll
    for (int e = 0; e < kE; ++e) unpack(of_expert[e][c], b[e]);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
#pragma unroll
      for (int r = 0; r < kR; ++r) {
#pragma unroll
        for (int e = 0; e < kE; ++e) sum[r][e] = __fmaf_rn(a[r][i], b[e][i], sum[r][e]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kR; ++r) {
#pragma unroll
    for (int e = 0; e < kE; ++e) parts[warp][row_lane + r * kRowLanes][expert_lane + e * kExpertLanes] = sum[r][e];
  }
  __syncthreads();
  write_sums<float, kRows, kExperts>(parts, first_row, rows, first_expert, experts, logits);
}

// ---- logits summed in float64, by tensor cores

// c [8, 8] += a [8, 4] . b [4, 8]
__device__ __forceinline__ void multiply(double (&c)[2], double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(c[0]), "+d"(c[1])
               : "d"(a), "d"(b));
}

// A bf16 in the upper half of `bits` as a double, by integer operations: conversions are four times slower. Zeros and
// subnormals become numbers below 2^-126, infinity and NaN powers from 2^128 on.
__device__ __forceinline__ double wide(uint32_t bits) {
  return __hiloint2double(((static_cast<int>(bits) >> 3) & 0x8fffffff) + 0x38000000, 0);
}
__device__ __forceinline__ bool is_finite(uint32_t bits) { return (bits & 0x7f800000u) != 0x7f800000u; }

// Eight elements of a lane, and whether all were finite.
__device__ __forceinline__ bool widen(const Chunk& chunk, double (&to)[kChunk]) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = words[i] << 16, high = words[i] & 0xffff0000u;
    finite = finite && is_finite(low) && is_finite(high);
    to[2 * i] = wide(low);
    to[2 * i + 1] = wide(high);
  }
  return finite;
}

// A block has 8 * kR rows and 8 * kE experts; again a warp for each eighth of `hidden`. Lane 4 r + q has elements 8 q
// .. 8 q + 7 of 32, of row r and of expert r: step j of eight multiplies element j of each.
template <int kR, int kE>
__global__ void __launch_bounds__(kParts* kWarp)
    wide_logits_kernel(const Bf16* __restrict__ x, const Bf16* __restrict__ router, int64_t rows, int64_t hidden,
                       int experts, float* __restrict__ logits) {
  constexpr int kRows = 8 * kR, kExperts = 8 * kE, kStep = 4;  // chunks of a step
  __shared__ double parts[kParts][kRows][kExperts];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
  const int first_expert = static_cast<int>(blockIdx.y) * kExperts;
  const int chunks_of_part = static_cast<int>(hidden / kParts / kChunk);
  const Chunk *of_row[kR], *of_expert[kE];
#pragma unroll
  for (int r = 0; r < kR; ++r) {
    const int64_t row = min(first_row + 8 * r + lane / 4, rows - 1);
    of_row[r] = reinterpret_cast<const Chunk*>(x + row * hidden) + warp * chunks_of_part;
  }
#pragma unroll
  for (int e = 0; e < kE; ++e) {
    const int expert = min(first_expert + 8 * e + lane / 4, experts - 1);
    of_expert[e] = reinterpret_cast<const Chunk*>(router + expert * hidden) + warp * chunks_of_part;
  }
  let_successors_begin();
  wait_for_predecessors();
  double sum[kR][kE][2] = {};
  bool finite[kR], router_finite = true;
#pragma unroll
  for (int r = 0; r < kR; ++r) finite[r] = true;
#pragma unroll 2
  for (int c = lane % kStep; c < chunks_of_part + lane % kStep; c += kStep) {
    const bool inside = c < chunks_of_part;  // of the last step some lanes have nothing
    double a[kR][kChunk], b[kE][kChunk];
#pragma unroll
    for (int r = 0; r < kR; ++r) finite[r] = widen(inside ? of_row[r][c] : zeros(), a[r]) && finite[r];
#pragma unroll
    for (int e = 0; e < kE; ++e) router_finite = widen(inside ? of_expert[e][c] : zeros(), b[e]) && router_finite;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
#pragma unroll
      for (int r = 0; r < kR; ++r) {
#pragma unroll
        for (int e = 0; e < kE; ++e) multiply(sum[r][e], a[r][i], b[e][i]);
      }
    }
  }
  router_finite = __all_sync(kAllLanes, router_finite);  // else every row's choice would be another one
#pragma unroll
  for (int r = 0; r < kR; ++r) {
    // The lanes of a quad have the same row, in the sums too.
    bool all = finite[r] && router_finite;
    all = __shfl_xor_sync(kAllLanes, static_cast<int>(all), 1) != 0 && all;
    all = __shfl_xor_sync(kAllLanes, static_cast<int>(all), 2) != 0 && all;
#pragma unroll
    for (int e = 0; e < kE; ++e) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        parts[warp][8 * r + lane / 4][8 * e + 2 * (lane % 4) + i] = all ? sum[r][e][i] : CUDART_NAN;
    }
  }
  __syncthreads();
  write_sums<double, kRows, kExperts>(parts, first_row, rows, first_expert, experts, logits);
}

template <class Sum, int kR, int kE>
void launch_logits(const Bf16* x, const Bf16* router, int64_t rows, int64_t hidden, int64_t experts, float* logits,
                   cudaStream_t stream, bool early) {
  constexpr bool kWide = std::is_same_v<Sum, double>;
  const dim3 grid(static_cast<unsigned>(divide_up(rows, (kWide ? 8 : kRowLanes) * kR)),
                  static_cast<unsigned>(divide_up(experts, (kWide ? 8 : kExpertLanes) * kE)));
  if constexpr (kWide) {
    launch(wide_logits_kernel<kR, kE>, grid, kParts * kWarp, stream, early, x, router, rows, hidden,
           static_cast<int>(experts), logits);
  } else {
    launch(logits_kernel<kR, kE>, grid, kParts * kWarp, stream, early, x, router, rows, hidden,
           static_cast<int>(experts), logits);
  }
}

template <class Sum>
void launch_logits(const Bf16* x, const Bf16* router, int64_t rows, int64_t hidden, int64_t experts, float* logits,
                   cudaStream_t stream, bool early) {
  constexpr bool kWide = std::is_same_v<Sum, double>;
  rows <= 256 ? launch_logits<Sum, kWide ? 1 : 2, 2>(x, router, rows, hidden, experts, logits, stream, early)
              : launch_logits<Sum, kWide ? 2 : 4, 4>(x, router, rows, hidden, experts, logits, stream, early);
}

// ---- choice

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value = __fadd_rn(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// Unsigned numbers in the order of the floats (that are no NaN), all above 0; and back.
__device__ __forceinline__ unsigned key_of(float value) {
  const unsigned bits = __float_as_uint(value);
  return bits ^ ((static_cast<int>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float value_of(unsigned key) {
  return __uint_as_float(key ^ ((static_cast<int>(~key) >> 31) | 0x80000000u));
}

struct Choosing {
  const float* logits;
  int experts, per_token;
  bool normalize;
  int32_t* chosen;       // [rows, per_token]
  float* weights;        // [rows, per_token]
  float* probabilities;  // [rows, experts] or null
};

// A row by a whole warp; lane i has the logits of experts i, i + 32, ... Logits that are not finite: weights of NaN.
template <int kOwn>
__device__ __forceinline__ void choose_row(const Choosing& c, int64_t row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float own[kOwn];
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int expert = lane + i * kWarp;
    own[i] = expert < c.experts ? c.logits[row * c.experts + expert] : -CUDART_INF_F;
    finite = finite && (expert >= c.experts || isfinite(own[i]));
  }
  finite = __all_sync(kAllLanes, finite);
  unsigned key[kOwn], best = 0;  // 0: no expert, or chosen
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    key[i] = lane + i * kWarp < c.experts ? key_of(own[i]) : 0;
    best = max(best, key[i]);
  }
  const float largest = value_of(__reduce_max_sync(kAllLanes, best));
  float mass = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) mass = __fadd_rn(mass, expf(__fsub_rn(own[i], largest)));
  mass = warp_sum(mass);
  if (c.probabilities != nullptr) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int expert = lane + i * kWarp;
      if (expert < c.experts)
        c.probabilities[row * c.experts + expert] = __fdiv_rn(expf(__fsub_rn(own[i], largest)), mass);
    }
  }
  int my_expert = c.experts;  // lane j has the choice number j, the likeliest first
  unsigned my_key = 0;
  for (int j = 0; j < c.per_token; ++j) {
    unsigned mine = 0, expert = kMostExperts;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (key[i] > mine) mine = key[i], expert = lane + i * kWarp;
    }
    const unsigned first = __reduce_max_sync(kAllLanes, mine);
    expert = __reduce_min_sync(kAllLanes, mine == first ? expert : kMostExperts);
    if (lane == j) my_expert = static_cast<int>(expert), my_key = first;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (lane + i * kWarp == expert) key[i] = 0;
    }
  }
  float my_weight = lane < c.per_token ? __fdiv_rn(expf(__fsub_rn(value_of(my_key), largest)), mass) : 0;
  float chosen_mass = 0;
  for (int j = 0; j < c.per_token; ++j) chosen_mass = __fadd_rn(chosen_mass, __shfl_sync(kAllLanes, my_weight, j));
  if (c.normalize) my_weight = __fdiv_rn(my_weight, chosen_mass);
  int rank = 0;  // by id
  for (int j = 0; j < c.per_token; ++j) rank += __shfl_sync(kAllLanes, my_expert, j) < my_expert ? 1 : 0;
  if (lane >= c.per_token) return;
  // Rows that are not finite have no order: any experts that are all different.
  c.chosen[row * c.per_token + (finite ? rank : lane)] = finite ? my_expert : lane;
  c.weights[row * c.per_token + (finite ? rank : lane)] = finite ? my_weight : CUDART_NAN_F;
}

constexpr int kChooseThreads = 128;

template <int kOwn>
__global__ void __launch_bounds__(kChooseThreads) choose_kernel(Choosing c, int64_t rows) {
  let_successors_begin();
  wait_for_predecessors();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kChooseThreads / kWarp) + threadIdx.x / kWarp;
  if (row < rows) choose_row<kOwn>(c, row);
}

// ---- sorting by expert

// Rows are looked at in runs of so many. Of each run a bit for each row and expert, in shared memory: how many rows of
// the run go to an expert, and which one of them a row is, are counts of bits.
constexpr int kRun = 256, kWords = kRun / 32;
constexpr int kSortThreads = 1024;
using Bits = uint32_t[kWords];

struct Sorting {
  const int32_t* chosen;
  int64_t rows;
  int experts, per_token;
  int32_t* counts;   // [runs, experts]; place: where the run's rows of an expert begin
  int32_t* offsets;  // [experts + 1]
  int32_t* sorted;
  int32_t* places;
};

__device__ __forceinline__ void mark_run(const Sorting& s, int64_t run, Bits* bits) {
  for (int i = static_cast<int>(threadIdx.x); i < s.experts * kWords; i += static_cast<int>(blockDim.x))
    bits[i / kWords][i % kWords] = 0;
  __syncthreads();
  const int64_t first = run * kRun, choices = min(s.rows - first, static_cast<int64_t>(kRun)) * s.per_token;
  for (int i = static_cast<int>(threadIdx.x); i < choices; i += static_cast<int>(blockDim.x)) {
    const int row = i / s.per_token;
    atomicOr(&bits[s.chosen[first * s.per_token + i]][row / 32], 1u << (row % 32));
  }
  __syncthreads();
}

__device__ __forceinline__ int count_bits(const Bits& bits) {
  int count = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) count += __popc(bits[w]);
  return count;
}

// The sorted row of a row of the run and an expert that it chose. begin[e]: that of the run's first row of expert e.
__device__ __forceinline__ int place_of(const Bits& of_expert, int begin, int row) {
  int place = begin + __popc(of_expert[row / 32] & ((1u << (row % 32)) - 1));
  for (int w = 0; w < row / 32; ++w) place += __popc(of_expert[w]);
  return place;
}

__device__ __forceinline__ void place_run(const Sorting& s, int64_t run, const Bits* bits, const int32_t* begin) {
  const int64_t first = run * kRun, choices = min(s.rows - first, static_cast<int64_t>(kRun)) * s.per_token;
  for (int i = static_cast<int>(threadIdx.x); i < choices; i += static_cast<int>(blockDim.x)) {
    const int row = i / s.per_token, expert = s.chosen[first * s.per_token + i];
    const int place = place_of(bits[expert], begin[expert], row);
    s.places[first * s.per_token + i] = place;
    s.sorted[place] = static_cast<int32_t>(first + row);
  }
}

// total[e] of every expert -> the sum of those before it, in place and in `offsets`, which may be null, by the first
// warp; returns to everybody.
__device__ __forceinline__ void scan_experts(int32_t* total, int experts, int32_t* offsets) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < kWarp) {
    int before = 0;
    for (int base = 0; base < experts; base += kWarp) {
      const int own = base + lane < experts ? total[base + lane] : 0;
      int sum = own;
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_up_sync(kAllLanes, sum, step);
        if (lane >= step) sum += other;
      }
      if (base + lane < experts) {
        total[base + lane] = before + sum - own;
        if (offsets != nullptr) offsets[base + lane] = before + sum - own;
      }
      before += __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
    if (lane == 0 && offsets != nullptr) offsets[experts] = before;
  }
  __syncthreads();
}

// All rows are one run: everything by one block.
__global__ void __launch_bounds__(kSortThreads) sort_kernel(Sorting s) {
  __shared__ Bits bits[kMostExperts];
  let_successors_begin();
  wait_for_predecessors();
  __shared__ int32_t begin[kMostExperts];
  mark_run(s, 0, bits);
  for (int e = static_cast<int>(threadIdx.x); e < s.experts; e += kSortThreads) begin[e] = count_bits(bits[e]);
  __syncthreads();
  scan_experts(begin, s.experts, s.offsets);
  place_run(s, 0, bits, begin);
}

// The same by several blocks, each of which also copies some of the rows to where they are sorted to: that all of them
// sort takes less than a further launch.
constexpr int kCopyThreads = 256, kCopiesAtOnce = kSortThreads / kCopyThreads;  // of a row; rows of a block
constexpr int64_t kCopyBlocks = 128;

__global__ void __launch_bounds__(kSortThreads)
    sort_and_gather_kernel(Sorting s, const Chunk* __restrict__ x, int row_chunks, Chunk* __restrict__ out) {
  __shared__ Bits bits[kMostExperts];
  __shared__ int32_t begin[kMostExperts];
  let_successors_begin();
  wait_for_predecessors();
  mark_run(s, 0, bits);
  for (int e = static_cast<int>(threadIdx.x); e < s.experts; e += kSortThreads) begin[e] = count_bits(bits[e]);
  __syncthreads();
  scan_experts(begin, s.experts, blockIdx.x == 0 ? s.offsets : nullptr);
  if (blockIdx.x == 0) place_run(s, 0, bits, begin);
  const int choices = static_cast<int>(s.rows) * s.per_token, thread = static_cast<int>(threadIdx.x) % kCopyThreads;
  for (int choice = static_cast<int>(blockIdx.x) * kCopiesAtOnce + static_cast<int>(threadIdx.x) / kCopyThreads;
       choice < choices; choice += static_cast<int>(gridDim.x) * kCopiesAtOnce) {
    const int row = choice / s.per_token, expert = s.chosen[choice];
    const int64_t place = place_of(bits[expert], begin[expert], row);
    for (int c = thread; c < row_chunks; c += kCopyThreads)
      out[place * row_chunks + c] = x[static_cast<int64_t>(row) * row_chunks + c];
  }
}

__global__ void __launch_bounds__(kSortThreads) count_kernel(Sorting s) {
  __shared__ Bits bits[kMostExperts];
  mark_run(s, blockIdx.x, bits);
  for (int e = static_cast<int>(threadIdx.x); e < s.experts; e += kSortThreads)
    s.counts[static_cast<int64_t>(blockIdx.x) * s.experts + e] = count_bits(bits[e]);
}

// counts [runs, experts] -> where each run's rows of each expert begin.
__global__ void __launch_bounds__(kMostExperts) begin_kernel(Sorting s, int64_t runs) {
  __shared__ int32_t total[kMostExperts];
  const int e = static_cast<int>(threadIdx.x);
  if (e < s.experts) {
    int32_t sum = 0;
    for (int64_t run = 0; run < runs; ++run) {
      const int32_t own = s.counts[run * s.experts + e];
      s.counts[run * s.experts + e] = sum;
      sum += own;
    }
    total[e] = sum;
  }
  __syncthreads();
  scan_experts(total, s.experts, s.offsets);
  for (int64_t run = 0; e < s.experts && run < runs; ++run) s.counts[run * s.experts + e] += total[e];
}

__global__ void __launch_bounds__(kSortThreads) place_kernel(Sorting s) {
  __shared__ Bits bits[kMostExperts];
  mark_run(s, blockIdx.x, bits);
  place_run(s, blockIdx.x, bits, s.counts + static_cast<int64_t>(blockIdx.x) * s.experts);
}

template <int kOwn>
void choose_and_sort(const Choosing& c, const Sorting& s, const SortedRows& sorted, cudaStream_t stream, bool early) {
  launch(choose_kernel<kOwn>, static_cast<unsigned>(divide_up(s.rows, kChooseThreads / kWarp)), kChooseThreads, stream,
         early, c, s.rows);
  const int64_t choices = s.rows * s.per_token;
  if (s.rows <= kRun && sorted.out != nullptr) {
    launch(sort_and_gather_kernel, static_cast<unsigned>(std::min(kCopyBlocks, divide_up(choices, kCopiesAtOnce))),
           kSortThreads, stream, early, s, chunks(sorted.x), static_cast<int>(sorted.width / kChunk),
           chunks(sorted.out));
    return;
  }
  if (s.rows <= kRun) {
    launch(sort_kernel, 1, kSortThreads, stream, early, s);
    return;
  }
  const int64_t runs = divide_up(s.rows, kRun);
  count_kernel<<<static_cast<unsigned>(runs), kSortThreads, 0, stream>>>(s);
  begin_kernel<<<1, kMostExperts, 0, stream>>>(s, runs);
  place_kernel<<<static_cast<unsigned>(runs), kSortThreads, 0, stream>>>(s);
  if (sorted.out != nullptr) gather_rows(sorted.x, s.sorted, choices, sorted.width, sorted.out, stream);
}

}  // namespace

void router_logits(const Bf16* x, const Bf16* router, int64_t rows, int64_t hidden, int64_t experts, bool wide,
                   float* logits, cudaStream_t stream, bool early) {
  if (rows == 0) return;
  wide ? launch_logits<double>(x, router, rows, hidden, experts, logits, stream, early)
       : launch_logits<float>(x, router, rows, hidden, experts, logits, stream, early);
}

int64_t sort_scratch_bytes(int64_t rows, int64_t experts) {
  return rows <= kRun ? 0 : divide_up(rows, kRun) * experts * static_cast<int64_t>(sizeof(int32_t));
}

void choose_and_sort(const float* logits, int64_t rows, int64_t experts, int64_t per_token, bool normalize,
                     const RoutePlace& to, const SortedRows& sorted, void* scratch, cudaStream_t stream, bool early) {
  const Choosing c = {logits,     static_cast<int>(experts), static_cast<int>(per_token), normalize, to.experts,
                      to.weights, to.probabilities};
  const Sorting s = {to.experts,
                     rows,
                     static_cast<int>(experts),
                     static_cast<int>(per_token),
                     static_cast<int32_t*>(scratch),
                     to.offsets,
                     to.rows,
                     to.places};
  if (experts <= 32) return choose_and_sort<1>(c, s, sorted, stream, early);
  if (experts <= 64) return choose_and_sort<2>(c, s, sorted, stream, early);
  if (experts <= 128) return choose_and_sort<4>(c, s, sorted, stream, early);
  if (experts <= 256) return choose_and_sort<8>(c, s, sorted, stream, early);
  choose_and_sort<16>(c, s, sorted, stream, early);
}

}  // namespace trireme::cuda
