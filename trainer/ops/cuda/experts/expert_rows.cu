#include "trainer/ops/cuda/device/hopper.cuh"
#include "trainer/ops/cuda/elementwise/rows.cuh"
#include "trainer/ops/cuda/experts/expert_kernels.h"
#include "trainer/ops/cuda/gemm/swiglu_step.cuh"

namespace trireme::cuda {
namespace {

using namespace rows;
using hopper::let_successors_begin, hopper::wait_for_predecessors;

__global__ void __launch_bounds__(kFlatThreads)
    gather_kernel(const Chunk* __restrict__ x, const int32_t* __restrict__ rows, int blocks_per_row, int row_chunks,
                  Chunk* __restrict__ out) {
  let_successors_begin();
  wait_for_predecessors();
  const FlatPlace at = flat_place(blocks_per_row);
  if (at.chunk >= row_chunks) return;
  out[at.row * row_chunks + at.chunk] = x[static_cast<int64_t>(rows[at.row]) * row_chunks + at.chunk];
}

__global__ void __launch_bounds__(kFlatThreads)
    gather_part_kernel(const Chunk* __restrict__ x, const int32_t* __restrict__ rows, const int32_t* __restrict__ begin,
                       const int32_t* __restrict__ end, int blocks_per_row, int row_chunks, Chunk* __restrict__ out) {
  let_successors_begin();
  wait_for_predecessors();
  const FlatPlace at = flat_place(blocks_per_row);
  if (at.chunk >= row_chunks || at.row < *begin || at.row >= *end) return;
  out[at.row * row_chunks + at.chunk] = x[static_cast<int64_t>(rows[at.row]) * row_chunks + at.chunk];
}

__device__ __forceinline__ void add_rounded(float (&total)[kChunk], const float (&block)[kChunk]) {
  const Chunk packed = pack(block);
  float value[kChunk];
  unpack(packed, value);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) total[i] = __fadd_rn(total[i], value[i]);
}

// kAhead: choices whose rows are under way at once; shows in no bit.
template <int kAhead>
__global__ void __launch_bounds__(kFlatThreads)
    combine_kernel(const Chunk* __restrict__ y, const int32_t* __restrict__ experts, const float* __restrict__ weights,
                   const int32_t* __restrict__ places, int per_token, int of_block, int blocks_per_row, int row_chunks,
                   Chunk* __restrict__ out) {
  let_successors_begin();
  wait_for_predecessors();
  const FlatPlace at = flat_place(blocks_per_row);
  if (at.chunk >= row_chunks) return;
  const int64_t first = at.row * per_token;
  float total[kChunk] = {}, block[kChunk] = {};
  int current = -1;
  for (int base = 0; base < per_token; base += kAhead) {
    Chunk ahead[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t place = places[first + min(base + j, per_token - 1)];
      ahead[j] = y[place * row_chunks + at.chunk];
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (base + j >= per_token) break;
      const int of = experts[first + base + j] / of_block;
      const float weight = weights[first + base + j];
      if (of != current) {
        if (current >= 0) add_rounded(total, block);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) block[i] = 0;
        current = of;
      }
      float value[kChunk];
      unpack(ahead[j], value);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) block[i] = __fmaf_rn(weight, value[i], block[i]);
    }
  }
  add_rounded(total, block);
  out[at.row * row_chunks + at.chunk] = pack(total);
}

// combine_kernel's sums, of any number of rows each.
template <bool kWeighted>
__global__ void __launch_bounds__(kFlatThreads)
    sums_kernel(const Chunk* __restrict__ y, const int32_t* __restrict__ places, const float* __restrict__ weights,
                const int32_t* __restrict__ begins, int blocks_per_row, int row_chunks, Chunk* __restrict__ out) {
  const FlatPlace at = flat_place(blocks_per_row);
  if (at.chunk >= row_chunks) return;
  float total[kChunk] = {};
  const int end = begins[at.row + 1];
#pragma unroll 4
  for (int j = begins[at.row]; j < end; ++j) {
    float value[kChunk];
    unpack(y[static_cast<int64_t>(places[j]) * row_chunks + at.chunk], value);
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      total[i] = kWeighted ? __fmaf_rn(weights[j], value[i], total[i]) : __fadd_rn(total[i], value[i]);
  }
  out[at.row * row_chunks + at.chunk] = pack(total);
}

// combine_kernel's sum of one block; a row of `out` is a row and a block.
__global__ void __launch_bounds__(kFlatThreads)
    part_sums_kernel(const Chunk* __restrict__ y, const int32_t* __restrict__ experts,
                     const float* __restrict__ weights, const int32_t* __restrict__ places, int per_token, int of_block,
                     int first_block, int blocks, int blocks_per_row, int row_chunks, Chunk* __restrict__ out) {
  let_successors_begin();
  wait_for_predecessors();
  const FlatPlace at = flat_place(blocks_per_row);
  if (at.chunk >= row_chunks) return;
  const int64_t row = at.row / blocks;
  const int begin = (first_block + static_cast<int>(at.row - row * blocks)) * of_block, end = begin + of_block;
  float total[kChunk] = {};
  for (int j = 0; j < per_token; ++j) {
    const int64_t choice = row * per_token + j;
    if (experts[choice] < begin || experts[choice] >= end) continue;
    const float weight = weights[choice];
    float value[kChunk];
    unpack(y[static_cast<int64_t>(places[choice]) * row_chunks + at.chunk], value);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) total[i] = __fmaf_rn(weight, value[i], total[i]);
  }
  out[at.row * row_chunks + at.chunk] = pack(total);
}

__global__ void __launch_bounds__(kFlatThreads)
    sums_in_order_kernel(const Chunk* __restrict__ in, int blocks, int blocks_per_row, int row_chunks,
                         Chunk* __restrict__ out) {
  let_successors_begin();
  wait_for_predecessors();
  const FlatPlace at = flat_place(blocks_per_row);
  if (at.chunk >= row_chunks) return;
  float total[kChunk] = {};
#pragma unroll 8
  for (int b = 0; b < blocks; ++b) {
    float value[kChunk];
    unpack(in[(at.row * blocks + b) * row_chunks + at.chunk], value);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) total[i] = __fadd_rn(total[i], value[i]);
  }
  out[at.row * row_chunks + at.chunk] = pack(total);
}

__global__ void __launch_bounds__(kFlatThreads)
    sum_places_kernel(const Chunk* __restrict__ y, const int32_t* __restrict__ places, int per_token,
                      int blocks_per_row, int row_chunks, Chunk* __restrict__ out) {
  const FlatPlace at = flat_place(blocks_per_row);
  if (at.chunk >= row_chunks) return;
  float total[kChunk] = {};
#pragma unroll 4
  for (int j = 0; j < per_token; ++j) {
    float value[kChunk];
    unpack(y[static_cast<int64_t>(places[at.row * per_token + j]) * row_chunks + at.chunk], value);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) total[i] = __fadd_rn(total[i], value[i]);
  }
  out[at.row * row_chunks + at.chunk] = pack(total);
}

// A warp a row.
__global__ void __launch_bounds__(kFlatThreads)
    gradient_kernel(const Chunk* __restrict__ gate_up, const Chunk* __restrict__ upstream,
                    const float* __restrict__ row_weights, int64_t rows, int row_chunks, Chunk* __restrict__ weighted,
                    Chunk* __restrict__ dgate_up, float* __restrict__ dots) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kFlatThreads / kWarp) + threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (row >= rows) return;
  const float weight = row_weights[row];
  float dot = 0;
  for (int c = lane; c < row_chunks; c += kWarp) {
    float g[kChunk], u[kChunk], dy[kChunk], act[kChunk];
    unpack(gate_up[2 * row * row_chunks + c], g);
    unpack(gate_up[(2 * row + 1) * row_chunks + c], u);
    unpack(upstream[row * row_chunks + c], dy);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) act[i] = steps::swiglu(g[i], u[i]);
    const Chunk rounded = pack(act);
    unpack(rounded, act);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      dot = fmaf(dy[i], act[i], dot);
      const float s = steps::sigmoid(g[i]), d = dy[i] * weight;
      act[i] *= weight;
      const float gate = g[i];
      g[i] = d * u[i] * s * (1.0f + gate * (1.0f - s));
      u[i] = d * gate * s;
    }
    weighted[row * row_chunks + c] = pack(act);
    dgate_up[2 * row * row_chunks + c] = pack(g);
    dgate_up[(2 * row + 1) * row_chunks + c] = pack(u);
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
  if (lane == 0) dots[row] = dot;
}

}  // namespace

void gather_rows(const Bf16* x, const int32_t* rows, int64_t count, int64_t width, Bf16* out, cudaStream_t stream,
                 bool early) {
  if (count == 0) return;
  const FlatShape shape = flat_shape(width / kChunk);
  launch(gather_kernel, static_cast<unsigned>(count * shape.blocks_per_row), shape.threads, stream, early, chunks(x),
         rows, shape.blocks_per_row, static_cast<int>(width / kChunk), chunks(out));
}

void gather_part(const Bf16* x, const int32_t* rows, const int32_t* begin, const int32_t* end, int64_t count,
                 int64_t width, Bf16* out, cudaStream_t stream, bool early) {
  if (count == 0) return;
  const FlatShape shape = flat_shape(width / kChunk);
  launch(gather_part_kernel, static_cast<unsigned>(count * shape.blocks_per_row), shape.threads, stream, early,
         chunks(x), rows, begin, end, shape.blocks_per_row, static_cast<int>(width / kChunk), chunks(out));
}

void combine_rows(const Bf16* y, const int32_t* experts, const float* weights, const int32_t* places, int64_t rows,
                  int64_t per_token, int64_t of_block, int64_t width, Bf16* out, cudaStream_t stream, bool early) {
  if (rows == 0) return;
  const FlatShape shape = flat_shape(width / kChunk);
  const auto combine = [&](auto* kernel) {
    launch(kernel, static_cast<unsigned>(rows * shape.blocks_per_row), shape.threads, stream, early, chunks(y), experts,
           weights, places, static_cast<int>(per_token), static_cast<int>(of_block), shape.blocks_per_row,
           static_cast<int>(width / kChunk), chunks(out));
  };
  if (per_token <= 2) return combine(combine_kernel<2>);
  if (per_token <= 4) return combine(combine_kernel<4>);
  combine(combine_kernel<8>);
}

void weighted_sums(const Bf16* y, const int32_t* places, const float* weights, const int32_t* begins, int64_t sums,
                   int64_t width, Bf16* out, cudaStream_t stream) {
  if (sums == 0) return;
  const FlatShape shape = flat_shape(width / kChunk);
  sums_kernel<true><<<static_cast<unsigned>(sums * shape.blocks_per_row), shape.threads, 0, stream>>>(
      chunks(y), places, weights, begins, shape.blocks_per_row, static_cast<int>(width / kChunk), chunks(out));
}

void plain_sums(const Bf16* y, const int32_t* places, const int32_t* begins, int64_t sums, int64_t width, Bf16* out,
                cudaStream_t stream) {
  if (sums == 0) return;
  const FlatShape shape = flat_shape(width / kChunk);
  sums_kernel<false><<<static_cast<unsigned>(sums * shape.blocks_per_row), shape.threads, 0, stream>>>(
      chunks(y), places, nullptr, begins, shape.blocks_per_row, static_cast<int>(width / kChunk), chunks(out));
}

void part_sums(const Bf16* y, const int32_t* experts, const float* weights, const int32_t* places,
               const PartShape& shape, Bf16* out, cudaStream_t stream, bool early) {
  if (shape.rows == 0) return;
  const FlatShape flat = flat_shape(shape.width / kChunk);
  launch(part_sums_kernel, static_cast<unsigned>(shape.rows * shape.blocks * flat.blocks_per_row), flat.threads, stream,
         early, chunks(y), experts, weights, places, static_cast<int>(shape.per_token),
         static_cast<int>(shape.of_block), static_cast<int>(shape.first_block), static_cast<int>(shape.blocks),
         flat.blocks_per_row, static_cast<int>(shape.width / kChunk), chunks(out));
}

void sums_in_order(const Bf16* in, int64_t rows, int64_t blocks, int64_t width, Bf16* out, cudaStream_t stream,
                   bool early) {
  if (rows == 0) return;
  const FlatShape shape = flat_shape(width / kChunk);
  launch(sums_in_order_kernel, static_cast<unsigned>(rows * shape.blocks_per_row), shape.threads, stream, early,
         chunks(in), static_cast<int>(blocks), shape.blocks_per_row, static_cast<int>(width / kChunk), chunks(out));
}

void sum_rows_of_places(const Bf16* y, const int32_t* places, int64_t rows, int64_t per_token, int64_t width, Bf16* out,
                        cudaStream_t stream) {
  if (rows == 0) return;
  const FlatShape shape = flat_shape(width / kChunk);
  sum_places_kernel<<<static_cast<unsigned>(rows * shape.blocks_per_row), shape.threads, 0, stream>>>(
      chunks(y), places, static_cast<int>(per_token), shape.blocks_per_row, static_cast<int>(width / kChunk),
      chunks(out));
}

void expert_gradient_rows(const Bf16* gate_up, const Bf16* upstream, const float* row_weights, int64_t rows,
                          int64_t width, Bf16* weighted, Bf16* dgate_up, float* dots, cudaStream_t stream) {
  if (rows == 0) return;
  gradient_kernel<<<static_cast<unsigned>(divide_up(rows, kFlatThreads / kWarp)), kFlatThreads, 0, stream>>>(
      chunks(gate_up), chunks(upstream), row_weights, rows, static_cast<int>(width / kChunk), chunks(weighted),
      chunks(dgate_up), dots);
}

}  // namespace trireme::cuda
