// RMS norms and their gradients.
#include <algorithm>

#include "trainer/ops/cuda/device/hopper.cuh"
#include "trainer/ops/cuda/elementwise/norm.cuh"

namespace trireme::cuda {
namespace {

using namespace rows;

__device__ __forceinline__ float2 block_sums(float2 value, float2* shared) {
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
    const int c = threadIdx.x + v * blockDim.x;
    if constexpr (kAdd) {
      value[v] = added(value[v], other[v], squares);
      if (c < row_chunks) sum[base + c] = value[v];
    } else {
      add_squares(value[v], squares);
    }
  }
  const float inverse = inverse_rms(block_sum(squares, shared), one_over_width, eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int c = threadIdx.x + v * blockDim.x;
    if (c < row_chunks) normed[base + c] = scaled(value[v], scale[v], inverse);
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
    sums = block_sums(sums, shared[turn]);
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

}  // namespace

void add_rms_norm_forward(const Bf16* x, const Bf16* delta, const Bf16* weight, float eps, const NormRows& rows,
                          Bf16* sum, Bf16* normed, cudaStream_t stream, bool early) {
  if (rows.rows == 0) return;
  const NormShape shape = norm_shape(rows.width);
  const auto launch_one = [&](auto kernel) {
    launch(kernel, static_cast<unsigned>(rows.rows), shape.threads, stream, early, chunks(x), chunks(delta),
           chunks(weight), eps, 1.0f / static_cast<float>(rows.counted), static_cast<int>(rows.width / kChunk),
           chunks(sum), chunks(normed));
  };
  if (delta != nullptr) {
    shape.vectors == 2 ? launch_one(norm_forward_kernel<2, true>) : launch_one(norm_forward_kernel<4, true>);
  } else {
    shape.vectors == 2 ? launch_one(norm_forward_kernel<2, false>) : launch_one(norm_forward_kernel<4, false>);
  }
}

int64_t norm_partials(int64_t rows, int64_t width) {
  return std::min<int64_t>(rows, kSumParts * std::max(1, 768 / norm_shape(width).threads));
}

void rms_norm_backward(const Bf16* x, const Bf16* dnormed, const Bf16* dsum, const Bf16* weight, float eps,
                       const NormRows& rows, Bf16* dx, float* partial, cudaStream_t stream) {
  if (rows.rows == 0) return;
  const NormShape shape = norm_shape(rows.width);
  const auto launch = [&](auto kernel) {
    kernel<<<static_cast<unsigned>(norm_partials(rows.rows, rows.width)), shape.threads, 0, stream>>>(
        chunks(x), chunks(dnormed), chunks(dsum), chunks(weight), eps, 1.0f / static_cast<float>(rows.counted),
        rows.rows, static_cast<int>(rows.width / kChunk), chunks(dx), reinterpret_cast<float4*>(partial));
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

}  // namespace trireme::cuda
