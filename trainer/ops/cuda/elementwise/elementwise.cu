// SwiGLU and embedding: chunks of a row by themselves.
#include <algorithm>

#include "trainer/ops/cuda/elementwise/rows.cuh"
#include "trainer/ops/cuda/gemm/swiglu_step.cuh"

namespace trireme::cuda {
namespace {

using namespace rows;

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
    embed_forward_kernel(const Chunk* __restrict__ table, const int64_t* __restrict__ ids, EmbedRange range,
                         int64_t tokens, int row_chunks, int blocks_per_row, Chunk* __restrict__ out) {
  const FlatPlace at = flat_place(blocks_per_row);
  if (at.chunk >= row_chunks) return;
  if (at.row >= tokens) {
    out[at.row * row_chunks + at.chunk] = zeros();
    return;
  }
  const int64_t id = ids[at.row], row = id - range.first;
  const bool inside = id >= 0 && id < range.vocabulary;
  if (!inside && at.chunk == 0 && atomicCAS(&bad_token, 0ull, static_cast<unsigned long long>(at.row) + 1) == 0)
    bad_id = id;
  const uint32_t nan = 0x7fc07fc0u;
  Chunk value = inside ? zeros() : make_uint4(nan, nan, nan, nan);
  if (inside && row >= 0 && row < range.count) value = table[row * row_chunks + at.chunk];
  out[at.row * row_chunks + at.chunk] = value;
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

}  // namespace

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

void embed_forward(const Bf16* table, const int64_t* ids, const EmbedRange& range, int64_t tokens, int64_t rows,
                   int64_t width, Bf16* out, cudaStream_t stream) {
  if (rows == 0) return;
  const FlatShape shape = flat_shape(width / kChunk);
  embed_forward_kernel<<<static_cast<unsigned>(rows * shape.blocks_per_row), shape.threads, 0, stream>>>(
      chunks(table), ids, range, tokens, static_cast<int>(width / kChunk), shape.blocks_per_row, chunks(out));
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

}  // namespace trireme::cuda
