// What the row-local kernels share: eight elements at once, places of chunks in rows, launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "trainer/ops/cuda/device/mma.cuh"
#include "trainer/ops/cuda/elementwise/row_kernels.h"

namespace trireme::cuda::rows {

inline constexpr int kWarp = 32;
inline constexpr int kFlatThreads = 256;  // of kernels without sums over a row
// Parts that sums over rows are cut into, as many as an H200 has SMs. A constant: the bits of a gradient do not
// depend on the device, which may have more or fewer.
inline constexpr int kSumParts = 132;

__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int whole_warps(int64_t threads) { return static_cast<int>(divide_up(threads, kWarp)) * kWarp; }

// Eight elements, as they lie in memory.
using Chunk = uint4;
inline constexpr int kChunk = 8;

inline const Chunk* chunks(const Bf16* p) { return reinterpret_cast<const Chunk*>(p); }
inline Chunk* chunks(Bf16* p) { return reinterpret_cast<Chunk*>(p); }

__device__ __forceinline__ void unpack(const Chunk& chunk, float (&out)[kChunk]) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
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

// 1 / rms from a sum of squares.
__device__ __forceinline__ float inverse_rms(float squares, float one_over_width, float eps) {
  return rsqrtf(__fmaf_rn(squares, one_over_width, eps));
}

// A row is shared by blocks_per_row blocks; one chunk a thread.
struct FlatShape {
  int threads;
  int blocks_per_row;
};
inline FlatShape flat_shape(int64_t row_chunks) {
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

}  // namespace trireme::cuda::rows
