#include "trainer/optimizer/cuda/adamw.h"

#include <cuda_bf16.h>

#include <type_traits>

#include "base/error.h"

namespace trireme::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSumThreads = 1024;

void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) fail_internal(std::string(kernel) + ": " + cudaGetErrorString(error));
}
bool aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return __float2bfloat16_rn(x);
  }
}

// kCount consecutive elements. kWhole: all of them exist and lie on kCount * sizeof(T) bytes (at most 16).
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T v[kCount];
};
template <bool kWhole, int kCount, class T>
__device__ void load(const T* from, int64_t left, float (&out)[kCount]) {
  if constexpr (kWhole) {
    const Pack<T, kCount> pack = *reinterpret_cast<const Pack<T, kCount>*>(from);
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = to_float(pack.v[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = i < left ? to_float(from[i]) : 0.0f;
  }
}
template <bool kWhole, int kCount, class T>
__device__ void store(T* to, int64_t left, const float (&in)[kCount]) {
  if constexpr (kWhole) {
    Pack<T, kCount> pack;
#pragma unroll
    for (int i = 0; i < kCount; ++i) pack.v[i] = from_float<T>(in[i]);
    *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < left) to[i] = from_float<T>(in[i]);
    }
  }
}

// ---- norm ---------------------------------------------------------------------------------------------------------

template <int kWarps>
__device__ double block_sum(double x) {
  __shared__ double of_warp[kWarps];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  double total = 0.0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += of_warp[w];
  return total;
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    squares_kernel(const T* __restrict__ values, int64_t n, double* __restrict__ blocks) {
  constexpr int kCount = 4;
  constexpr int kSteps = static_cast<int>(kSquaresBlock) / (kThreads * kCount);
  double sum = 0.0;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kSquaresBlock + threadIdx.x * kCount;
#pragma unroll 8
  for (int step = 0; step < kSteps; ++step) {
    const int64_t at = begin + static_cast<int64_t>(step) * kThreads * kCount;
    float x[kCount] = {};
    if (kAligned && at + kCount <= n) {
      load<true>(values + at, kCount, x);
    } else {
      load<false>(values + at, n - at, x);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum = fma(static_cast<double>(x[i]), static_cast<double>(x[i]), sum);
  }
  sum = block_sum<kThreads / 32>(sum);
  if (threadIdx.x == 0) blocks[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kSumThreads)
    sum_kernel(const double* __restrict__ values, int64_t n, double* __restrict__ result) {
  double sum = 0.0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < n; i += kSumThreads) sum += values[i];
  sum = block_sum<kSumThreads / 32>(sum);
  if (threadIdx.x == 0) *result = sum;
}

template <class T>
void launch_squares(const void* values, int64_t n, double* scratch, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(squares_blocks(n));
  const T* typed = static_cast<const T*>(values);
  if (aligned(values, 4 * sizeof(T))) {
    squares_kernel<T, true><<<blocks, kThreads, 0, stream>>>(typed, n, scratch);
  } else {
    squares_kernel<T, false><<<blocks, kThreads, 0, stream>>>(typed, n, scratch);
  }
  check_launch("sum_of_squares");
}

// ---- update -------------------------------------------------------------------------------------------------------

template <class G, class W, bool kAligned>
__global__ void __launch_bounds__(kThreads) update_kernel(AdamWRun run, AdamWStep step) {
  constexpr int kCount = 4;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  if (at >= run.n) return;
  const int64_t left = run.n - at;
  // The elements lie in one group, or in two.
  const int64_t flat = run.begin + at;
  const int in_group = static_cast<int>(flat % kDecayGroup);
  const auto decays = [&](int64_t element) {
    const int64_t group = element / kDecayGroup;
    return run.decay_bits != nullptr && ((run.decay_bits[group / 32] >> (group % 32)) & 1u) != 0;
  };
  const bool first_decays = decays(flat);
  const bool last_decays = in_group + kCount > kDecayGroup ? decays(flat + kCount - 1) : first_decays;
  const auto update = [&](auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    float g[kCount], w[kCount], m[kCount], v[kCount];
    load<kWhole>(static_cast<const G*>(run.gradients) + at, left, g);
    load<kWhole>(run.master + at, left, w);
    load<kWhole>(run.exp_avg + at, left, m);
    load<kWhole>(run.exp_avg_sq + at, left, v);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float gradient = g[i] * step.clip;
      const float keep = (in_group + i < kDecayGroup ? first_decays : last_decays) ? step.keep : 1.0f;
      m[i] = __fmaf_rn(step.rest1, gradient, __fmul_rn(step.beta1, m[i]));
      v[i] = __fmaf_rn(__fmul_rn(step.rest2, gradient), gradient, __fmul_rn(step.beta2, v[i]));
      const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v[i]), step.root_correction2), step.eps);
      w[i] = __fmaf_rn(-step.step_size, __fdiv_rn(m[i], denominator), __fmul_rn(w[i], keep));
    }
    store<kWhole>(run.master + at, left, w);
    store<kWhole>(run.exp_avg + at, left, m);
    store<kWhole>(run.exp_avg_sq + at, left, v);
    if (run.weights != nullptr) store<kWhole>(static_cast<W*>(run.weights) + at, left, w);
  };
  if (kAligned && left >= kCount) {
    update(std::true_type());
  } else {
    update(std::false_type());
  }
}

template <class G, class W>
void launch_update(const AdamWRun& run, const AdamWStep& step, cudaStream_t stream) {
  constexpr int64_t kElements = kThreads * 4;
  const auto blocks = static_cast<unsigned>((run.n + kElements - 1) / kElements);
  const bool whole = aligned(run.gradients, 4 * sizeof(G)) && aligned(run.weights, 4 * sizeof(W)) &&
                     aligned(run.master, 16) && aligned(run.exp_avg, 16) && aligned(run.exp_avg_sq, 16);
  if (whole) {
    update_kernel<G, W, true><<<blocks, kThreads, 0, stream>>>(run, step);
  } else {
    update_kernel<G, W, false><<<blocks, kThreads, 0, stream>>>(run, step);
  }
  check_launch("adamw_update");
}

}  // namespace

void sum_of_squares(const void* values, Element type, int64_t n, double* scratch, double* result, cudaStream_t stream) {
  if (type == Element::kFloat) {
    launch_squares<float>(values, n, scratch, stream);
  } else {
    launch_squares<__nv_bfloat16>(values, n, scratch, stream);
  }
  sum_kernel<<<1, kSumThreads, 0, stream>>>(scratch, squares_blocks(n), result);
  check_launch("sum_of_squares");
}

void adamw_update(const AdamWRun& run, const AdamWStep& step, cudaStream_t stream) {
  if (run.n <= 0) return;
  const bool low_weights = run.weight_type == Element::kBFloat16;
  if (run.gradient_type == Element::kFloat) {
    low_weights ? launch_update<float, __nv_bfloat16>(run, step, stream)
                : launch_update<float, float>(run, step, stream);
  } else {
    low_weights ? launch_update<__nv_bfloat16, __nv_bfloat16>(run, step, stream)
                : launch_update<__nv_bfloat16, float>(run, step, stream);
  }
}

}  // namespace trireme::cuda
