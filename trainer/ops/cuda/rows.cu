#include <cuda_bf16.h>

#include <algorithm>
#include <type_traits>

#include "trainer/ops/cuda/hopper.cuh"
#include "trainer/ops/cuda/rows.h"
#include "trainer/ops/cuda/swiglu_step.cuh"

namespace trireme::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kNormThreads = 512;   // most threads of a norm's block
constexpr int kFlatThreads = 256;   // of kernels without sums over a row
constexpr int kSplitThreads = 512;  // most threads of a split's forward; its backward has half
constexpr int kProcessors = 132;    // of an H200; a constant, so that sums over rows do not depend on the device

__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int whole_warps(int64_t threads) { return static_cast<int>(divide_up(threads, kWarp)) * kWarp; }

// Eight elements, as they lie in memory.
using Chunk = uint4;
constexpr int kChunk = 8;

const Chunk* chunks(const Bf16* p) { return reinterpret_cast<const Chunk*>(p); }
Chunk* chunks(Bf16* p) { return reinterpret_cast<Chunk*>(p); }

__device__ __forceinline__ void unpack(const Chunk& chunk, float (&out)[kChunk]) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ Chunk pack(const float (&in)[kChunk]) {
  return make_uint4(pack_pair(in[0], in[1]), pack_pair(in[2], in[3]), pack_pair(in[4], in[5]), pack_pair(in[6], in[7]));
}

// Makes the compiler forget what it unpacked from `chunk` before: unpacking again is cheaper than eight registers held
// across a sum.
__device__ __forceinline__ void forget_unpacked(Chunk& chunk) {
  asm volatile("" : "+r"(chunk.x), "+r"(chunk.y), "+r"(chunk.z), "+r"(chunk.w));
}

__device__ __forceinline__ Chunk zeros() { return make_uint4(0, 0, 0, 0); }

// Sum over the block; every thread gets the same bits. `shared` has a place for each warp and must not be written again
// before all threads have passed another barrier.
__device__ __forceinline__ float block_sum(float value, float* shared) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (blockDim.x == kWarp) return value;
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = shared[0];
  for (int warp = 1; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) total = __fadd_rn(total, shared[warp]);
  return total;
}

__device__ __forceinline__ float2 block_sum(float2 value, float2* shared) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value.x += __shfl_xor_sync(0xffffffffu, value.x, offset);
    value.y += __shfl_xor_sync(0xffffffffu, value.y, offset);
  }
  if (blockDim.x == kWarp) return value;
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  float2 total = shared[0];
  for (int warp = 1; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) {
    total.x += shared[warp].x;
    total.y += shared[warp].y;
  }
  return total;
}

// 1 / rms from a sum of squares.
__device__ __forceinline__ float inverse_rms(float squares, float one_over_width, float eps) {
  return rsqrtf(__fmaf_rn(squares, one_over_width, eps));
}

// ---- norms

// Threads of a row's block and chunks of each thread (2 or 4): functions of the width alone.
struct NormShape {
  int threads;
  int vectors;
};
NormShape norm_shape(int64_t width) {
  const int64_t count = width / kChunk;
  const int vectors = count > 2 * kNormThreads ? 4 : 2;
  return {whole_warps(divide_up(count, vectors)), vectors};
}

template <int kVectors, bool kAdd>
__global__ void __launch_bounds__(kNormThreads)
    norm_forward_kernel(const Chunk* x, const Chunk* delta, const Chunk* __restrict__ weight, float eps,
                        float one_over_width, int row_chunks, Chunk* __restrict__ sum, Chunk* __restrict__ normed) {
  __shared__ float shared[kNormThreads / kWarp];
  const int64_t base = static_cast<int64_t>(blockIdx.x) * row_chunks;
  // The weight is asked for while the kernel ahead may still run: in decode it is in no cache.
  Chunk value[kVectors], other[kVectors], scale[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int c = threadIdx.x + v * blockDim.x;
    scale[v] = c < row_chunks ? weight[c] : zeros();
  }
  hopper::let_successors_begin();
  hopper::wait_for_predecessors();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int c = threadIdx.x + v * blockDim.x;
    const bool inside = c < row_chunks;
    value[v] = inside ? x[base + c] : zeros();
    if (kAdd) other[v] = inside ? delta[base + c] : zeros();
  }
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float a[kChunk];
    unpack(value[v], a);
    if (kAdd) {
      const int c = threadIdx.x + v * blockDim.x;
      float b[kChunk];
      unpack(other[v], b);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) a[i] = __fadd_rn(a[i], b[i]);
      value[v] = pack(a);
      if (c < row_chunks) sum[base + c] = value[v];
      unpack(value[v], a);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) squares = __fmaf_rn(a[i], a[i], squares);
  }
  const float inverse = inverse_rms(block_sum(squares, shared), one_over_width, eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int c = threadIdx.x + v * blockDim.x;
    float a[kChunk], w[kChunk];
    unpack(value[v], a);
    unpack(scale[v], w);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) a[i] = __fmul_rn(w[i], __fmul_rn(a[i], inverse));
    if (c < row_chunks) normed[base + c] = pack(a);
  }
}

// With y = w x r, r = 1 / rms: dx = r w dy - x r^3 mean(w dy x) (+ dsum), dw = sum over rows of dy x r.
template <int kVectors, bool kWeight>
__global__ void __maxnreg__(kVectors == 2 ? 80 : 128)
    norm_backward_kernel(const Chunk* __restrict__ x, const Chunk* __restrict__ dnormed, const Chunk* __restrict__ dsum,
                         const Chunk* __restrict__ weight, float eps, float one_over_width, int64_t rows,
                         int row_chunks, Chunk* __restrict__ dx, float4* __restrict__ partial) {
  __shared__ float2 shared[2][kNormThreads / kWarp];
  Chunk scale[kVectors];
  float dweight[kVectors][kChunk];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int c = threadIdx.x + v * blockDim.x;
    scale[v] = c < row_chunks ? weight[c] : zeros();
#pragma unroll
    for (int i = 0; i < kChunk; ++i) dweight[v][i] = 0;
  }
  int turn = 0;  // two sets of places: one barrier a row is enough
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    const int64_t base = row * row_chunks;
    Chunk value[kVectors], gradient[kVectors], through[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int c = threadIdx.x + v * blockDim.x;
      const bool inside = c < row_chunks;
      value[v] = inside ? x[base + c] : zeros();
      gradient[v] = inside ? dnormed[base + c] : zeros();
      through[v] = inside && dsum != nullptr ? dsum[base + c] : zeros();
    }
    float2 sums = make_float2(0, 0);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float a[kChunk], g[kChunk], w[kChunk];
      unpack(value[v], a);
      unpack(gradient[v], g);
      unpack(scale[v], w);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        sums.x = fmaf(a[i], a[i], sums.x);
        sums.y = fmaf(w[i] * g[i], a[i], sums.y);
      }
    }
    sums = block_sum(sums, shared[turn]);
    const float inverse = inverse_rms(sums.x, one_over_width, eps);
    const float pull = sums.y * one_over_width * inverse * inverse * inverse;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int c = threadIdx.x + v * blockDim.x;
      forget_unpacked(value[v]);
      forget_unpacked(gradient[v]);
      forget_unpacked(scale[v]);
      float a[kChunk], g[kChunk], w[kChunk], out[kChunk];
      unpack(value[v], a);
      unpack(gradient[v], g);
      unpack(scale[v], w);
      unpack(through[v], out);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        out[i] += fmaf(inverse, w[i] * g[i], -(a[i] * pull));
        if (kWeight) dweight[v][i] = fmaf(g[i], a[i] * inverse, dweight[v][i]);
      }
      if (c < row_chunks) dx[base + c] = pack(out);
    }
  }
  if constexpr (kWeight) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int c = threadIdx.x + v * blockDim.x;
      if (c >= row_chunks) continue;
      float4* to = partial + (static_cast<int64_t>(blockIdx.x) * row_chunks + c) * 2;
      to[0] = make_float4(dweight[v][0], dweight[v][1], dweight[v][2], dweight[v][3]);
      to[1] = make_float4(dweight[v][4], dweight[v][5], dweight[v][6], dweight[v][7]);
    }
  }
}

// Block (32 columns, 32 rows at a time).
__global__ void __launch_bounds__(1024)
    reduce_partials_kernel(const float* __restrict__ partial, int rows, int width, __nv_bfloat16* __restrict__ out) {
  __shared__ float shared[kWarp][kWarp];
  const int column = blockIdx.x * kWarp + threadIdx.x;
  float total = 0;
  if (column < width) {
#pragma unroll 4
    for (int row = threadIdx.y; row < rows; row += kWarp) total += partial[static_cast<int64_t>(row) * width + column];
  }
  shared[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  for (int row = 1; row < kWarp; ++row) total += shared[row][threadIdx.x];
  out[column] = __float2bfloat16_rn(total);
}

// ---- chunks by themselves

// A row is shared by blocks_per_row blocks; one chunk a thread.
struct FlatShape {
  int threads;
  int blocks_per_row;
};
FlatShape flat_shape(int64_t row_chunks) {
  const int64_t blocks = divide_up(row_chunks, kFlatThreads);
  return {whole_warps(divide_up(row_chunks, blocks)), static_cast<int>(blocks)};
}
struct FlatPlace {
  int64_t row;
  int chunk;
};
__device__ __forceinline__ FlatPlace flat_place(int blocks_per_row) {
  const unsigned row = blockIdx.x / static_cast<unsigned>(blocks_per_row);
  const unsigned part = blockIdx.x - row * static_cast<unsigned>(blocks_per_row);
  return {static_cast<int64_t>(row), static_cast<int>(part * blockDim.x + threadIdx.x)};
}

__global__ void __launch_bounds__(kFlatThreads)
    swiglu_forward_kernel(const Chunk* __restrict__ gate, const Chunk* __restrict__ up, int64_t stride, int row_chunks,
                          int blocks_per_row, Chunk* __restrict__ out) {
  const FlatPlace at = flat_place(blocks_per_row);
  if (at.chunk >= row_chunks) return;
  const int64_t from = at.row * stride + at.chunk;
  const Chunk gates = gate[from], ups = up[from];
  float g[kChunk], u[kChunk];
  unpack(gates, g);
  unpack(ups, u);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) g[i] = steps::swiglu(g[i], u[i]);
  out[at.row * row_chunks + at.chunk] = pack(g);
}

__global__ void __launch_bounds__(kFlatThreads)
    swiglu_backward_kernel(const Chunk* __restrict__ gate, const Chunk* __restrict__ up, const Chunk* __restrict__ dy,
                           int64_t stride, int row_chunks, int blocks_per_row, Chunk* __restrict__ dgate,
                           Chunk* __restrict__ dup) {
  const FlatPlace at = flat_place(blocks_per_row);
  if (at.chunk >= row_chunks) return;
  const int64_t from = at.row * stride + at.chunk;
  const Chunk gates = gate[from], ups = up[from], gradients = dy[at.row * row_chunks + at.chunk];
  float g[kChunk], u[kChunk], d[kChunk];
  unpack(gates, g);
  unpack(ups, u);
  unpack(gradients, d);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float s = steps::sigmoid(g[i]);
    const float silu = g[i] * s;
    g[i] = d[i] * u[i] * fmaf(silu, 1.0f - s, s);
    u[i] = d[i] * silu;
  }
  dgate[from] = pack(g);
  dup[from] = pack(u);
}

__device__ unsigned long long bad_token;  // of the first bad id, plus one; 0: none
__device__ long long bad_id;

__global__ void __launch_bounds__(kFlatThreads)
    embed_forward_kernel(const Chunk* __restrict__ table, const int64_t* __restrict__ ids, int64_t vocab,
                         int row_chunks, int blocks_per_row, Chunk* __restrict__ out) {
  const FlatPlace at = flat_place(blocks_per_row);
  if (at.chunk >= row_chunks) return;
  const int64_t id = ids[at.row];
  const bool inside = id >= 0 && id < vocab;
  if (!inside && at.chunk == 0 && atomicCAS(&bad_token, 0ull, static_cast<unsigned long long>(at.row) + 1) == 0)
    bad_id = id;
  const uint32_t nan = 0x7fc07fc0u;
  out[at.row * row_chunks + at.chunk] = inside ? table[id * row_chunks + at.chunk] : make_uint4(nan, nan, nan, nan);
}

// Block x: a place in sorted_ids, at work only where an id begins; block y: 64 chunks of the row.
constexpr int kEmbedThreads = 64;
template <bool kWide>
__global__ void __launch_bounds__(kEmbedThreads)
    embed_backward_kernel(const Chunk* __restrict__ dy, const int64_t* __restrict__ sorted_ids,
                          const int64_t* __restrict__ order, int64_t tokens, int64_t vocab, int row_chunks,
                          void* __restrict__ accumulator) {
  __shared__ int64_t source[kEmbedThreads];
  const int64_t first = blockIdx.x, id = sorted_ids[first];
  if (id < 0 || id >= vocab || (first > 0 && sorted_ids[first - 1] == id)) return;
  const int c = blockIdx.y * kEmbedThreads + threadIdx.x;
  float total[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) total[i] = 0;
  for (int64_t begin = first;; begin += kEmbedThreads) {
    const int64_t mine = begin + threadIdx.x;
    const bool same = mine < tokens && sorted_ids[mine] == id;
    if (same) source[threadIdx.x] = order[mine];
    const int count = __syncthreads_count(same);  // the first `count` places
    if (c < row_chunks) {
      constexpr int kAtOnce = 8;
      for (int r = 0; r < count; r += kAtOnce) {
        Chunk rows[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) rows[j] = dy[source[min(r + j, count - 1)] * row_chunks + c];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          // No branch, so that the loads above stay together; past the end the last row counts zero times.
          const float once = r + j < count ? 1.0f : 0.0f;
          float a[kChunk];
          unpack(rows[j], a);
#pragma unroll
          for (int i = 0; i < kChunk; ++i) total[i] = fmaf(a[i], once, total[i]);
        }
      }
    }
    if (count < kEmbedThreads) break;
    __syncthreads();
  }
  if (c >= row_chunks) return;
  const int64_t to = id * row_chunks + c;
  if (kWide) {
    float4* out = static_cast<float4*>(accumulator) + to * 2;
    const float4 a = out[0], b = out[1];
    out[0] = make_float4(a.x + total[0], a.y + total[1], a.z + total[2], a.w + total[3]);
    out[1] = make_float4(b.x + total[4], b.y + total[5], b.z + total[6], b.w + total[7]);
  } else {
    Chunk* out = static_cast<Chunk*>(accumulator) + to;
    float a[kChunk];
    unpack(*out, a);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) a[i] += total[i];
    *out = pack(a);
  }
}

// ---- query, key and value heads

// A head belongs to kGroup = head_dim / 16 neighbouring threads; thread `lane` of them holds chunk `lane` of each half,
// so that the elements which a rotation mixes lie in one thread.
template <int kGroup>
struct HeadPlace {
  int slot = blockIdx.y * blockDim.x + threadIdx.x;
  int head = slot / kGroup;
  int lane = slot % kGroup;
  // Of the threads of this head, for shuffles.
  unsigned mask = ((1u << kGroup) - 1u) << (threadIdx.x % kWarp / kGroup * kGroup);
};

struct Angles {
  float cosine[kChunk];
  float sine[kChunk];
};
template <int kGroup>
__device__ __forceinline__ Angles load_angles(const QkvRows& in, int64_t position, int lane) {
  constexpr int kHalf = kGroup * kChunk;
  const bool inside = position >= 0 && position < in.table_rows;
  const float4* from = reinterpret_cast<const float4*>(in.table + (inside ? position : 0) * 2 * kHalf) + lane * 2;
  const float4 c0 = from[0], c1 = from[1], s0 = from[kHalf / 4], s1 = from[kHalf / 4 + 1];
  Angles angles{{c0.x, c0.y, c0.z, c0.w, c1.x, c1.y, c1.z, c1.w}, {s0.x, s0.y, s0.z, s0.w, s1.x, s1.y, s1.z, s1.w}};
  if (!inside) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) angles.cosine[i] = angles.sine[i] = __uint_as_float(0x7fc00000u);
  }
  return angles;
}

template <int kGroup>
__device__ __forceinline__ float head_sum(float value, unsigned mask) {
#pragma unroll
  for (int offset = kGroup / 2; offset > 0; offset /= 2) value = __fadd_rn(value, __shfl_xor_sync(mask, value, offset));
  return value;
}

template <int kGroup>
__global__ void __launch_bounds__(kSplitThreads)
    split_forward_kernel(const QkvRows in, Chunk* __restrict__ q, Chunk* __restrict__ k, Chunk* __restrict__ v,
                         const int64_t* __restrict__ rows) {
  hopper::let_successors_begin();
  hopper::wait_for_predecessors();
  constexpr int kHeadChunks = 2 * kGroup;
  const HeadPlace<kGroup> at;
  const int all_heads = in.q_heads + 2 * in.kv_heads, rotated = in.q_heads + in.kv_heads;
  if (at.head >= (v != nullptr ? all_heads : rotated)) return;
  const int64_t token = blockIdx.x;
  const Chunk* from = reinterpret_cast<const Chunk*>(in.qkv) + (token * all_heads + at.head) * kHeadChunks + at.lane;
  Chunk first = from[0], second = from[kGroup], norm_first = zeros(), norm_second = zeros();
  const bool norm = in.q_norm != nullptr && at.head < rotated;
  if (norm) {
    const Chunk* weight = reinterpret_cast<const Chunk*>(at.head < in.q_heads ? in.q_norm : in.k_norm) + at.lane;
    norm_first = weight[0];
    norm_second = weight[kGroup];
  }
  Chunk* to;
  if (at.head < in.q_heads) {
    to = q + (token * in.q_heads + at.head) * kHeadChunks;
  } else {
    const int64_t row = rows != nullptr ? rows[token] : token;
    const int head = at.head - (at.head < rotated ? in.q_heads : rotated);
    to = row < 0 ? nullptr : (at.head < rotated ? k : v) + (row * in.kv_heads + head) * kHeadChunks;
  }
  if (at.head < rotated) {
    const Angles angles = load_angles<kGroup>(in, in.positions[token], at.lane);
    float a[kChunk], b[kChunk];
    unpack(first, a);
    unpack(second, b);
    if (norm) {
      float wa[kChunk], wb[kChunk];
      unpack(norm_first, wa);
      unpack(norm_second, wb);
      float squares = 0;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) squares = __fmaf_rn(a[i], a[i], squares);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) squares = __fmaf_rn(b[i], b[i], squares);
      squares = head_sum<kGroup>(squares, at.mask);
      const float inverse = inverse_rms(squares, 1.0f / (kHeadChunks * kChunk), in.eps);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        a[i] = __fmul_rn(wa[i], __fmul_rn(a[i], inverse));
        b[i] = __fmul_rn(wb[i], __fmul_rn(b[i], inverse));
      }
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float x = a[i], y = b[i];
      a[i] = __fmaf_rn(x, angles.cosine[i], -__fmul_rn(y, angles.sine[i]));
      b[i] = __fmaf_rn(y, angles.cosine[i], __fmul_rn(x, angles.sine[i]));
    }
    first = pack(a);
    second = pack(b);
  }
  if (to == nullptr) return;
  to[at.lane] = first;
  to[at.lane + kGroup] = second;
}

// With a norm each thread keeps its head and walks over tokens, so that the weights' gradients stay in registers.
template <int kGroup, bool kNorm>
__global__ void __launch_bounds__(kSplitThreads / 2, 3)
    split_backward_kernel(const QkvRows in, const Chunk* __restrict__ dq, const Chunk* __restrict__ dk,
                          const Chunk* __restrict__ dv, Chunk* __restrict__ dqkv, float* __restrict__ partial) {
  constexpr int kHeadChunks = 2 * kGroup, kHeadDim = kHeadChunks * kChunk;
  const HeadPlace<kGroup> at;
  const int all_heads = in.q_heads + 2 * in.kv_heads, rotated = in.q_heads + in.kv_heads;
  const bool is_q = at.head < in.q_heads, is_k = !is_q && at.head < rotated;
  // Rows of the gradient that comes in: where this head begins, and chunks between tokens.
  const Chunk* source = is_q ? dq : is_k ? dk : dv;
  const int64_t source_head = at.head - (is_q ? 0 : is_k ? in.q_heads : rotated);
  const int64_t source_heads = is_q ? in.q_heads : in.kv_heads;
  float da[kChunk], db[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) da[i] = db[i] = 0;
  const Chunk* norm = reinterpret_cast<const Chunk*>(is_q ? in.q_norm : in.k_norm) + at.lane;
  int64_t position = in.positions[blockIdx.x];
  for (int64_t token = blockIdx.x; token < in.tokens && at.head < all_heads; token += gridDim.x) {
    const Chunk* from = source + (token * source_heads + source_head) * kHeadChunks + at.lane;
    const int64_t place = (token * all_heads + at.head) * kHeadChunks + at.lane;
    Chunk first = from[0], second = from[kGroup];
    if (is_q || is_k) {
      Chunk x_first = zeros(), x_second = zeros();
      if (kNorm) {
        const Chunk* x = reinterpret_cast<const Chunk*>(in.qkv) + place;
        x_first = x[0];
        x_second = x[kGroup];
      }
      const Angles angles = load_angles<kGroup>(in, position, at.lane);
      if (token + gridDim.x < in.tokens) position = in.positions[token + gridDim.x];  // its latency ends in this turn
      float a[kChunk], b[kChunk];
      unpack(first, a);
      unpack(second, b);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const float x = a[i], y = b[i];
        a[i] = fmaf(x, angles.cosine[i], y * angles.sine[i]);
        b[i] = fmaf(y, angles.cosine[i], -(x * angles.sine[i]));
      }
      if (kNorm) {
        // Read again for each token (it stays in L1): registers are what this kernel is short of.
        Chunk norm_first = norm[0], norm_second = norm[kGroup];
        float xa[kChunk], xb[kChunk], wa[kChunk], wb[kChunk];
        unpack(x_first, xa);
        unpack(x_second, xb);
        unpack(norm_first, wa);
        unpack(norm_second, wb);
        float squares = 0, dot = 0;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          squares = fmaf(xa[i], xa[i], fmaf(xb[i], xb[i], squares));
          dot = fmaf(wa[i] * a[i], xa[i], fmaf(wb[i] * b[i], xb[i], dot));
        }
        squares = head_sum<kGroup>(squares, at.mask);
        dot = head_sum<kGroup>(dot, at.mask);
        forget_unpacked(x_first);
        forget_unpacked(x_second);
        forget_unpacked(norm_first);
        forget_unpacked(norm_second);
        unpack(x_first, xa);
        unpack(x_second, xb);
        unpack(norm_first, wa);
        unpack(norm_second, wb);
        const float inverse = inverse_rms(squares, 1.0f / kHeadDim, in.eps);
        const float pull = dot * (1.0f / kHeadDim) * inverse * inverse * inverse;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          da[i] = fmaf(a[i], xa[i] * inverse, da[i]);
          db[i] = fmaf(b[i], xb[i] * inverse, db[i]);
          a[i] = fmaf(inverse, wa[i] * a[i], -(xa[i] * pull));
          b[i] = fmaf(inverse, wb[i] * b[i], -(xb[i] * pull));
        }
      }
      first = pack(a);
      second = pack(b);
    }
    dqkv[place] = first;
    dqkv[place + kGroup] = second;
  }
  if constexpr (kNorm) {
    __shared__ float sums[2 * kChunk][kSplitThreads / 2];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      sums[i][threadIdx.x] = da[i];
      sums[kChunk + i][threadIdx.x] = db[i];
    }
    __syncthreads();
    const int heads = blockDim.x / kGroup, first_head = blockIdx.y * heads;
    float* to = partial + (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * 2 * kHeadDim;
    for (int column = threadIdx.x; column < kHeadDim; column += blockDim.x) {
      const int half = column / (kHeadDim / 2), within = column % (kHeadDim / 2);
      const int lane = within / kChunk, element = half * kChunk + within % kChunk;
      float q_total = 0, k_total = 0;
      for (int head = 0; head < heads; ++head) {
        const float value = sums[element][head * kGroup + lane];
        if (first_head + head < in.q_heads) {
          q_total += value;
        } else if (first_head + head < rotated) {
          k_total += value;
        }
      }
      to[column] = q_total;
      to[kHeadDim + column] = k_total;
    }
  }
}

// Threads of a token's block and blocks of a token.
struct SplitShape {
  int threads;
  int blocks;
};
SplitShape split_shape(int64_t heads, int64_t head_dim, int most_threads) {
  const int64_t slots = heads * (head_dim / (2 * kChunk));
  const int64_t blocks = divide_up(slots, most_threads);
  return {whole_warps(divide_up(slots, blocks)), static_cast<int>(blocks)};
}
SplitShape split_backward_shape(const QkvRows& in) {
  return split_shape(in.q_heads + 2 * in.kv_heads, in.head_dim, kSplitThreads / 2);
}
// Blocks over the tokens of a backward with norms: about 768 threads a processor.
int64_t split_backward_tokens(const QkvRows& in) {
  const SplitShape shape = split_backward_shape(in);
  return std::min<int64_t>(in.tokens, kProcessors * std::max(1, 768 / (shape.threads * shape.blocks)));
}

// Calls f with head_dim / 16 as a compile-time constant.
template <class F>
void with_group(int head_dim, F&& f) {
  if (head_dim == 64) f(std::integral_constant<int, 4>{});
  if (head_dim == 128) f(std::integral_constant<int, 8>{});
  if (head_dim == 256) f(std::integral_constant<int, 16>{});
}

// ---- copies

// Block x: part of a move; y: move; z: buffer.
__global__ void __launch_bounds__(kFlatThreads)
    copy_rows_kernel(void* const* __restrict__ buffers, int row_chunks, const int64_t* __restrict__ moves) {
  const int64_t* move = moves + static_cast<int64_t>(blockIdx.y) * 3;
  Chunk* base = static_cast<Chunk*>(buffers[blockIdx.z]);
  const Chunk* from = base + move[0] * row_chunks;
  Chunk* to = base + move[1] * row_chunks;
  const int64_t count = move[2] * row_chunks, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  constexpr int kAtOnce = 4;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += kAtOnce * step) {
    Chunk held[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (at + j * step < count) held[j] = from[at + j * step];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (at + j * step < count) to[at + j * step] = held[j];
    }
  }
}

// Block x: columns of a row; y: buffer. A thread moves one column of 16 bytes through all moves in their order, so that
// nobody waits for anybody; a move down the buffer goes from its first row on, one up it from its last, and what is
// written before a read lies behind it.
constexpr int kColumnThreads = 32;  // small, so that few columns find all processors
__global__ void __launch_bounds__(kColumnThreads)
    move_rows_kernel(void* const* __restrict__ buffers, int row_chunks, const int64_t* __restrict__ moves,
                     int64_t count) {
  const int column = static_cast<int>(blockIdx.x) * kColumnThreads + static_cast<int>(threadIdx.x);
  if (column >= row_chunks) return;
  Chunk* const base = static_cast<Chunk*>(buffers[blockIdx.y]) + column;
  constexpr int kAtOnce = 32;
  for (int64_t m = 0; m < count; ++m) {
    const int64_t from = moves[3 * m], to = moves[3 * m + 1], rows = moves[3 * m + 2];
    const bool down = to < from;
    const int64_t step = down ? row_chunks : -static_cast<int64_t>(row_chunks), first = down ? 0 : rows - 1;
    const Chunk* read = base + (from + first) * row_chunks;
    Chunk* write = base + (to + first) * row_chunks;
    for (int64_t left = rows; left > 0; left -= kAtOnce, read += kAtOnce * step, write += kAtOnce * step) {
      Chunk held[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (j < left) held[j] = read[j * step];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (j < left) write[j * step] = held[j];
      }
    }
  }
}

// With `early` the kernel may begin before the one ahead of it in the stream has ended: it must call
// wait_for_predecessors() in every thread before it reads or writes what others write.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream, bool early,
            Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);  // errors: the caller's launch check
}

}  // namespace

void add_rms_norm_forward(const Bf16* x, const Bf16* delta, const Bf16* weight, float eps, int64_t rows, int64_t width,
                          Bf16* sum, Bf16* normed, cudaStream_t stream, bool early) {
  if (rows == 0) return;
  const NormShape shape = norm_shape(width);
  const auto launch_one = [&](auto kernel) {
    launch(kernel, static_cast<unsigned>(rows), shape.threads, stream, early, chunks(x), chunks(delta), chunks(weight),
           eps, 1.0f / static_cast<float>(width), static_cast<int>(width / kChunk), chunks(sum), chunks(normed));
  };
  if (delta != nullptr) {
    shape.vectors == 2 ? launch_one(norm_forward_kernel<2, true>) : launch_one(norm_forward_kernel<4, true>);
  } else {
    shape.vectors == 2 ? launch_one(norm_forward_kernel<2, false>) : launch_one(norm_forward_kernel<4, false>);
  }
}

int64_t norm_partials(int64_t rows, int64_t width) {
  return std::min<int64_t>(rows, kProcessors * std::max(1, 768 / norm_shape(width).threads));
}

void rms_norm_backward(const Bf16* x, const Bf16* dnormed, const Bf16* dsum, const Bf16* weight, float eps,
                       int64_t rows, int64_t width, Bf16* dx, float* partial, cudaStream_t stream) {
  if (rows == 0) return;
  const NormShape shape = norm_shape(width);
  const auto launch = [&](auto kernel) {
    kernel<<<static_cast<unsigned>(norm_partials(rows, width)), shape.threads, 0, stream>>>(
        chunks(x), chunks(dnormed), chunks(dsum), chunks(weight), eps, 1.0f / static_cast<float>(width), rows,
        static_cast<int>(width / kChunk), chunks(dx), reinterpret_cast<float4*>(partial));
  };
  if (partial != nullptr) {
    shape.vectors == 2 ? launch(norm_backward_kernel<2, true>) : launch(norm_backward_kernel<4, true>);
  } else {
    shape.vectors == 2 ? launch(norm_backward_kernel<2, false>) : launch(norm_backward_kernel<4, false>);
  }
}

void reduce_partials(const float* partial, int64_t rows, int64_t width, Bf16* out, cudaStream_t stream) {
  reduce_partials_kernel<<<static_cast<unsigned>(divide_up(width, kWarp)), dim3(kWarp, kWarp), 0, stream>>>(
      partial, static_cast<int>(rows), static_cast<int>(width), reinterpret_cast<__nv_bfloat16*>(out));
}

void swiglu_forward(const Bf16* gate, const Bf16* up, int64_t stride, int64_t rows, int64_t width, Bf16* out,
                    cudaStream_t stream) {
  if (rows == 0) return;
  const FlatShape shape = flat_shape(width / kChunk);
  swiglu_forward_kernel<<<static_cast<unsigned>(rows * shape.blocks_per_row), shape.threads, 0, stream>>>(
      chunks(gate), chunks(up), stride / kChunk, static_cast<int>(width / kChunk), shape.blocks_per_row, chunks(out));
}

void swiglu_backward(const Bf16* gate, const Bf16* up, const Bf16* dy, int64_t stride, int64_t rows, int64_t width,
                     Bf16* dgate, Bf16* dup, cudaStream_t stream) {
  if (rows == 0) return;
  const FlatShape shape = flat_shape(width / kChunk);
  swiglu_backward_kernel<<<static_cast<unsigned>(rows * shape.blocks_per_row), shape.threads, 0, stream>>>(
      chunks(gate), chunks(up), chunks(dy), stride / kChunk, static_cast<int>(width / kChunk), shape.blocks_per_row,
      chunks(dgate), chunks(dup));
}

void embed_forward(const Bf16* table, const int64_t* ids, int64_t vocab, int64_t tokens, int64_t width, Bf16* out,
                   cudaStream_t stream) {
  if (tokens == 0) return;
  const FlatShape shape = flat_shape(width / kChunk);
  embed_forward_kernel<<<static_cast<unsigned>(tokens * shape.blocks_per_row), shape.threads, 0, stream>>>(
      chunks(table), ids, vocab, static_cast<int>(width / kChunk), shape.blocks_per_row, chunks(out));
}

cudaError_t take_bad_id(BadId* found, cudaStream_t stream) {
  unsigned long long token = 0;
  long long id = 0;
  cudaError_t error = cudaMemcpyFromSymbolAsync(&token, bad_token, sizeof token, 0, cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess)
    error = cudaMemcpyFromSymbolAsync(&id, bad_id, sizeof id, 0, cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess || token == 0) return error;
  found->token = static_cast<int64_t>(token) - 1;
  found->id = id;
  const unsigned long long none = 0;
  error = cudaMemcpyToSymbolAsync(bad_token, &none, sizeof none, 0, cudaMemcpyHostToDevice, stream);
  return error == cudaSuccess ? cudaStreamSynchronize(stream) : error;
}

void embed_backward(const Bf16* dy, const int64_t* sorted_ids, const int64_t* order, int64_t tokens, int64_t vocab,
                    int64_t width, void* accumulator, bool wide, cudaStream_t stream) {
  if (tokens == 0) return;
  const int row_chunks = static_cast<int>(width / kChunk);
  const dim3 grid(static_cast<unsigned>(tokens), static_cast<unsigned>(divide_up(row_chunks, kEmbedThreads)));
  const auto launch = [&](auto kernel) {
    kernel<<<grid, kEmbedThreads, 0, stream>>>(chunks(dy), sorted_ids, order, tokens, vocab, row_chunks, accumulator);
  };
  wide ? launch(embed_backward_kernel<true>) : launch(embed_backward_kernel<false>);
}

void split_qkv_forward(const QkvRows& in, Bf16* q, Bf16* k, Bf16* v, const int64_t* rows, cudaStream_t stream,
                       bool early) {
  if (in.tokens == 0) return;
  const SplitShape shape = split_shape(in.q_heads + in.kv_heads * (v != nullptr ? 2 : 1), in.head_dim, kSplitThreads);
  const dim3 grid(static_cast<unsigned>(in.tokens), static_cast<unsigned>(shape.blocks));
  with_group(in.head_dim, [&](auto group) {
    launch(split_forward_kernel<group.value>, grid, shape.threads, stream, early, in, chunks(q), chunks(k), chunks(v),
           rows);
  });
}

int64_t split_qkv_partials(const QkvRows& in) {
  return in.q_norm == nullptr ? 0 : split_backward_tokens(in) * split_backward_shape(in).blocks;
}

void split_qkv_backward(const QkvRows& in, const Bf16* dq, const Bf16* dk, const Bf16* dv, Bf16* dqkv, float* partial,
                        cudaStream_t stream) {
  if (in.tokens == 0) return;
  const SplitShape shape = split_backward_shape(in);
  const bool norm = in.q_norm != nullptr;
  const dim3 grid(static_cast<unsigned>(norm ? split_backward_tokens(in) : in.tokens),
                  static_cast<unsigned>(shape.blocks));
  with_group(in.head_dim, [&](auto group) {
    const auto launch = [&](auto kernel) {
      kernel<<<grid, shape.threads, 0, stream>>>(in, chunks(dq), chunks(dk), chunks(dv), chunks(dqkv), partial);
    };
    norm ? launch(split_backward_kernel<group.value, true>) : launch(split_backward_kernel<group.value, false>);
  });
}

void copy_arena_rows(void* const* buffers, int64_t buffer_count, int64_t row_bytes, const int64_t* moves, int64_t count,
                     int64_t most_rows, cudaStream_t stream) {
  if (buffer_count == 0 || count == 0 || most_rows == 0) return;
  constexpr int64_t kMostMoves = 65'535;  // of a grid's second extent
  const int64_t row_chunks = row_bytes / static_cast<int64_t>(sizeof(Chunk));
  const int64_t parts = std::clamp<int64_t>(divide_up(most_rows * row_chunks, 4 * kFlatThreads), 1, 64);
  for (int64_t first = 0; first < count; first += kMostMoves) {
    const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(std::min(kMostMoves, count - first)),
                    static_cast<unsigned>(buffer_count));
    copy_rows_kernel<<<grid, kFlatThreads, 0, stream>>>(buffers, static_cast<int>(row_chunks), moves + first * 3);
  }
}

void move_arena_rows(void* const* buffers, int64_t buffer_count, int64_t row_bytes, const int64_t* moves, int64_t count,
                     cudaStream_t stream) {
  if (buffer_count == 0 || count == 0) return;
  const int64_t row_chunks = row_bytes / static_cast<int64_t>(sizeof(Chunk));
  const dim3 grid(static_cast<unsigned>(divide_up(row_chunks, kColumnThreads)), static_cast<unsigned>(buffer_count));
  move_rows_kernel<<<grid, kColumnThreads, 0, stream>>>(buffers, static_cast<int>(row_chunks), moves, count);
}

}  // namespace trireme::cuda
