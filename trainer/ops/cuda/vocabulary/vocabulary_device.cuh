// Device functions shared by the vocabulary kernels. Sums use the intrinsics that the compiler may not contract, so
// that a function has the same bits in every kernel that contains it.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/error.h"
#include "trainer/ops/cuda/vocabulary/vocabulary_kernels.h"

namespace trireme::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kInfinity = INFINITY;
constexpr uint32_t kTwoPads = 0xff80ff80u;  // -infinity twice

inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) fail_internal(std::string(kernel) + ": " + cudaGetErrorString(error));
}

inline bool aligned_rows(const void* data, int64_t stride) {
  return stride % 8 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// Eight consecutive bf16 logits.
struct Eight {
  uint32_t pair[4];
  __device__ uint32_t bits(int i) const { return i % 2 != 0 ? pair[i / 2] >> 16 : pair[i / 2] & 0xffffu; }
  __device__ float value(int i) const {
    return __uint_as_float(i % 2 != 0 ? pair[i / 2] & 0xffff0000u : pair[i / 2] << 16);
  }
};

// Elements first .. first + 7 of a row, -infinity from vocab on. kAligned: see aligned_rows; first is a multiple of 8.
template <bool kAligned>
__device__ Eight load_eight(const uint16_t* row, int first, int vocab) {
  Eight out = {{kTwoPads, kTwoPads, kTwoPads, kTwoPads}};
  if constexpr (kAligned) {
    if (first < vocab) {
      const uint4 v = *reinterpret_cast<const uint4*>(row + first);
      out = {{v.x, v.y, v.z, v.w}};
      // The last of a vocabulary that is no multiple of 8.
      if (first + 8 > vocab) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (first + 2 * i >= vocab) {
            out.pair[i] = kTwoPads;
          } else if (first + 2 * i + 1 >= vocab) {
            out.pair[i] = (out.pair[i] & 0xffffu) | (kTwoPads & 0xffff0000u);
          }
        }
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first + i >= vocab) continue;
      const uint32_t bits = row[first + i];
      out.pair[i / 2] = i % 2 != 0 ? (out.pair[i / 2] & 0xffffu) | bits << 16 : (out.pair[i / 2] & 0xffff0000u) | bits;
    }
  }
  return out;
}

__device__ inline float inverse_temperature(const RowOptions& options, int64_t row) {
  return __frcp_rn(options.parameters != nullptr ? options.parameters[4 * row] : options.temperature);
}
__device__ inline float scaled(float logit, float inverse) { return __fmul_rn(logit, inverse); }
__device__ inline float weight(float z, float shift) { return expf(__fsub_rn(z, shift)); }

// NaN is never dropped: it must show in the sum.
__device__ inline bool dropped(const RowFilter& filter, float z, int id) {
  return z < filter.threshold || (z == filter.threshold && id >= filter.limit);
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

template <class T>
__device__ T add(T a, T b) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return __dadd_rn(a, b);
  } else {
    return a + b;
  }
}

// Sums of `own` over the threads before this one, up to it, and over all; double or int. scratch: one element a warp.
// All threads of the block call it; it ends with a barrier. In double `after` may differ from `before` by rounding
// where own is 0.
template <class T>
struct Scan {
  T own;
  T before;
  T after;
  T total;
};
template <int kWarps, class T>
__device__ Scan<T> block_scan(T own, T* scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  T inclusive = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T lower = __shfl_up_sync(kAllLanes, inclusive, step);
    if (lane >= step) inclusive = add(lower, inclusive);
  }
  const T previous = __shfl_up_sync(kAllLanes, inclusive, 1);
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  T base = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) base = total;
    total = add(total, scratch[w]);
  }
  __syncthreads();
  return {own, lane > 0 ? add(base, previous) : base, add(base, inclusive), total};
}

}  // namespace trireme::cuda
