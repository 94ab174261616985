#include <cuda_bf16.h>

#include <climits>

#include "trainer/ops/cuda/device/mma.cuh"
#include "trainer/ops/cuda/device/philox.cuh"
#include "trainer/ops/cuda/vocabulary/vocabulary_device.cuh"
#include "trainer/ops/cuda/vocabulary/vocabulary_kernels.h"

namespace trireme::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kVectors = kSliceElements / (kThreads * 8);  // of eight elements, for each thread
static_assert(kVectors * kThreads * 8 == kSliceElements);
// In place of -infinity where it would be multiplied by a weight of 0.
constexpr float kFarBelow = -1e30f;

// ---- slices -------------------------------------------------------------------------------------------------------

template <bool kAligned, bool kFilter, bool kEntropy>
__global__ void __launch_bounds__(kThreads)
    slice_kernel(const uint16_t* __restrict__ logits, int64_t stride, int vocab, int slices, RowOptions options,
                 const RowFilter* __restrict__ filters, SlicePartial* __restrict__ partials, float* __restrict__ dots) {
  __shared__ float scratch[3][kWarps];
  const int64_t row = blockIdx.x / static_cast<unsigned>(slices);
  const int slice = static_cast<int>(blockIdx.x % static_cast<unsigned>(slices));
  const int first = slice * kSliceElements + static_cast<int>(threadIdx.x) * 8;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint16_t* x = logits + row * stride;

  Eight eights[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) eights[k] = load_eight<kAligned>(x, first + k * kThreads * 8, vocab);
  const float inverse = inverse_temperature(options, row);
  RowFilter filter;
  if constexpr (kFilter) filter = filters[row];
  const auto logit = [&](int k, int i) {
    const float z = scaled(eights[k].value(i), inverse);
    if constexpr (kFilter) return dropped(filter, z, first + k * kThreads * 8 + i) ? -kInfinity : z;
    return z;
  };

  float max = -kInfinity;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (int i = 0; i < 8; ++i) max = fmaxf(max, logit(k, i));
  }
  max = warp_max(max);
  if (lane == 0) scratch[0][warp] = max;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) max = fmaxf(max, scratch[0][w]);

  const float shift = max == -kInfinity ? 0.0f : max;  // nothing kept: weights of 0, not NaN
  float sums[kVectors], dot = 0.0f;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    sums[k] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float z = logit(k, i);
      const float e = weight(z, shift);
      sums[k] = __fadd_rn(sums[k], e);
      if constexpr (kEntropy) dot = __fmaf_rn(e, fmaxf(__fsub_rn(z, shift), kFarBelow), dot);
    }
  }
  static_assert(kVectors == 4);
  const float sum = warp_sum(__fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3])));
  if constexpr (kEntropy) dot = warp_sum(dot);
  if (lane == 0) {
    scratch[1][warp] = sum;
    scratch[2][warp] = dot;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = scratch[1][0], total_dot = scratch[2][0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    total = __fadd_rn(total, scratch[1][w]);
    total_dot = __fadd_rn(total_dot, scratch[2][w]);
  }
  partials[blockIdx.x] = {max, total};
  if constexpr (kEntropy) dots[blockIdx.x] = total_dot;
}

// ---- a row from its slices ----------------------------------------------------------------------------------------

// The slice's mass in units of the row: its sum times exp(slice's maximum - row's maximum).
__device__ double mass_of(const SlicePartial& slice, float max) {
  return slice.sum == 0.0f ? 0.0 : __dmul_rn(slice.sum, weight(slice.max, max));
}

struct RowTotal {
  float max;
  double mass;
};
// By a whole warp; slices are added in ascending order.
__device__ RowTotal combine(const SlicePartial* partials, int slices) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RowTotal row = {-kInfinity, 0.0};
  for (int s = lane; s < slices; s += 32) row.max = fmaxf(row.max, partials[s].max);
  row.max = warp_max(row.max);
  for (int base = 0; base < slices; base += 32) {
    const double own = base + lane < slices ? mass_of(partials[base + lane], row.max) : 0.0;
    const int count = min(32, slices - base);
    for (int i = 0; i < count; ++i) row.mass = __dadd_rn(row.mass, __shfl_sync(kAllLanes, own, i));
  }
  return row;
}

// The one place where a log-prob is made.
struct RowLogprob {
  float max;
  float sum;
  float log_sum;
  __device__ static RowLogprob from(const RowTotal& row) {
    const float sum = __double2float_rn(row.mass);
    return {row.max, sum, logf(sum)};
  }
  __device__ bool is_finite() const { return sum > 0.0f && sum < kInfinity; }
  __device__ float of(float z) const { return __fsub_rn(__fsub_rn(z, max), log_sum); }
};

// Sum of exp(z - max) (z - max) over the row; by a whole warp.
__device__ double combine_dots(const SlicePartial* partials, const float* dots, int slices, float max) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double total = 0.0;
  for (int base = 0; base < slices; base += 32) {
    double own = 0.0;
    const int s = base + lane;
    if (s < slices && partials[s].sum != 0.0f) {
      const double shift = static_cast<double>(partials[s].max) - max;
      own = (dots[s] + shift * partials[s].sum) * weight(partials[s].max, max);
    }
    const int count = min(32, slices - base);
    for (int i = 0; i < count; ++i) total = __dadd_rn(total, __shfl_sync(kAllLanes, own, i));
  }
  return total;
}

// One warp a row.
__global__ void __launch_bounds__(kThreads)
    finish_logprobs_kernel(const uint16_t* __restrict__ logits, int64_t rows, int64_t stride, int vocab, int slices,
                           RowOptions options, const RowFilter* __restrict__ filters,
                           const int64_t* __restrict__ targets, bool allow_filtered,
                           const SlicePartial* __restrict__ partials, const float* __restrict__ dots,
                           LogprobOutputs outputs) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (row >= rows) return;
  const RowTotal total = combine(partials + row * slices, slices);
  const RowLogprob distribution = RowLogprob::from(total);
  float entropy = 0.0f;
  if (dots != nullptr) {
    const double dot = combine_dots(partials + row * slices, dots + row * slices, slices, total.max);
    entropy = __double2float_rn(distribution.log_sum - dot / total.mass);
  }
  if (threadIdx.x % 32 != 0) return;
  const int64_t target = targets[row];
  float logprob = NAN;
  if (target >= 0 && target < vocab && distribution.is_finite()) {
    const uint32_t bits = logits[row * stride + target];
    const float z = scaled(__uint_as_float(bits << 16), inverse_temperature(options, row));
    if (filters == nullptr || !dropped(filters[row], z, static_cast<int>(target))) {
      logprob = distribution.of(z);
    } else if (allow_filtered) {
      logprob = -kInfinity;
    }
  }
  outputs.logprobs[row] = logprob;
  outputs.statistics[row] = {distribution.max, distribution.sum, entropy, logprob};
  if (outputs.entropies != nullptr) outputs.entropies[row] = entropy;
}

// ---- gradient -----------------------------------------------------------------------------------------------------

// With p = softmax, l the log-prob of target t and H the entropy: dl/dz_j = [j = t] - p_j and
// dH/dz_j = -p_j (log p_j + H).
template <bool kAligned, bool kFilter, bool kEntropy>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(uint16_t* __restrict__ logits, int64_t stride, int vocab, int slices, RowOptions options,
                    const RowFilter* __restrict__ filters, const int64_t* __restrict__ targets,
                    const RowStatistics* __restrict__ statistics, const float* __restrict__ dlogprobs,
                    const float* __restrict__ dentropies) {
  const int64_t row = blockIdx.x / static_cast<unsigned>(slices);
  const int slice = static_cast<int>(blockIdx.x % static_cast<unsigned>(slices));
  const int first = slice * kSliceElements + static_cast<int>(threadIdx.x) * 8;
  uint16_t* x = logits + row * stride;

  Eight eights[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) eights[k] = load_eight<kAligned>(x, first + k * kThreads * 8, vocab);
  const float inverse = inverse_temperature(options, row);
  const RowStatistics of_row = statistics[row];
  RowFilter filter;
  if constexpr (kFilter) filter = filters[row];
  const int64_t target = targets[row];
  float dlogprob = dlogprobs[row];
  if (of_row.logprob == -kInfinity) {
    dlogprob = 0.0f;  // the target was dropped
  } else if (isnan(of_row.logprob) && dlogprob != 0.0f) {
    dlogprob = NAN;
  }
  float dentropy = 0.0f, entropy_less_log_sum = 0.0f;
  if constexpr (kEntropy) {
    dentropy = dentropies[row];
    entropy_less_log_sum = of_row.entropy - logf(of_row.sum);
  }
  const float inverse_sum = __frcp_rn(of_row.sum);

#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int at = first + k * kThreads * 8;
    if (at >= vocab) continue;
    float gradient[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float z = scaled(eights[k].value(i), inverse);
      float p = weight(z, of_row.max) * inverse_sum;
      float slope = -dlogprob;
      if constexpr (kEntropy) slope -= dentropy * (fmaxf(z - of_row.max, kFarBelow) + entropy_less_log_sum);
      if constexpr (kFilter) p = dropped(filter, z, at + i) ? 0.0f : p;
      gradient[i] = (p * slope + (at + i == target ? dlogprob : 0.0f)) * inverse;
    }
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = pack_pair(gradient[2 * i], gradient[2 * i + 1]);
    if constexpr (kAligned) {
      *reinterpret_cast<uint4*>(x + at) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (at + i < vocab) x[at + i] = static_cast<uint16_t>(packed[i / 2] >> (16 * (i % 2)));
      }
    }
  }
}

// ---- sampling -----------------------------------------------------------------------------------------------------

// Where the draw falls: a slice, and the part of its mass that lies below the draw.
struct Choice {
  int slice;
  double fraction;
};
// By a whole warp: the first slice at which the running mass passes u times the whole.
__device__ Choice choose_slice(const SlicePartial* partials, int slices, const RowTotal& row, double u) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const double wanted = __dmul_rn(u, row.mass);
  Choice choice = {-1, 1.0};
  int last = 0;
  double below = 0.0;
  for (int base = 0; base < slices; base += 32) {
    const double own = base + lane < slices ? mass_of(partials[base + lane], row.max) : 0.0;
    const int count = min(32, slices - base);
    for (int i = 0; i < count; ++i) {
      const double mass = __shfl_sync(kAllLanes, own, i);
      const double above = __dadd_rn(below, mass);
      if (choice.slice < 0 && mass > 0.0 && above > wanted) choice = {base + i, (wanted - below) / mass};
      if (mass > 0.0) last = base + i;
      below = above;
    }
  }
  if (choice.slice < 0) choice.slice = last;  // rounding at the very end of the range: its last token
  return choice;
}
// By a whole warp: the first slice that holds the row's largest logit.
__device__ int slice_of_largest(const SlicePartial* partials, int slices, float max) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int base = 0; base < slices; base += 32) {
    const unsigned hits = __ballot_sync(kAllLanes, base + lane < slices && partials[base + lane].max == max);
    if (hits != 0) return base + __ffs(static_cast<int>(hits)) - 1;
  }
  return 0;
}

// By a whole warp: the slice of the row's draw, or of its largest logit.
__device__ Choice choose_row(const SlicePartial* partials, int slices, const RowTotal& total, bool greedy,
                             const int64_t* key) {
  if (greedy) return {slice_of_largest(partials, slices, total.max), 0.0};
  const double u =
      philox_uniform(static_cast<uint64_t>(key[0]), static_cast<uint64_t>(key[1]), static_cast<uint64_t>(key[2]));
  return choose_slice(partials, slices, total, u);
}

// The scaled logits that a thread looks at, kOwn of them from `first` on; what a filter drops is -infinity.
template <bool kAligned, bool kFilter, int kOwn>
struct OwnLogits {
  Eight eights[kOwn / 8];
  RowFilter filter;
  float inverse;
  int first;

  __device__ __forceinline__ void load(const uint16_t* logits, int vocab) {
#pragma unroll
    for (int k = 0; k < kOwn / 8; ++k) eights[k] = load_eight<kAligned>(logits, first + 8 * k, vocab);
  }
  __device__ __forceinline__ float operator()(int j) const {
    const float z = scaled(eights[j / 8].value(j % 8), inverse);
    if constexpr (kFilter) return dropped(filter, z, first + j) ? -kInfinity : z;
    return z;
  }
};

// The first element at which the running mass passes `target`; the last that has any where none does.
template <int kOwn, class Logits>
__device__ __forceinline__ int passes_target(const Logits& logit, float shift, double before, double target) {
  int hit = -1;
  double running = before;
  bool passed = false;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const float e = weight(logit(j), shift);
    running = __dadd_rn(running, e);
    if (e > 0.0f && !passed) {
      hit = j;
      passed = running > target;
    }
  }
  return hit;
}

// One block a row. Thread t looks at the elements 32 t .. 32 t + 31 of the chosen slice.
template <bool kAligned, bool kFilter>
__global__ void __launch_bounds__(kThreads, 1)
    sample_kernel(const uint16_t* __restrict__ logits, int64_t stride, int vocab, int slices, RowOptions options,
                  const RowFilter* __restrict__ filters, const int64_t* __restrict__ keys,
                  const SlicePartial* __restrict__ partials, int64_t* __restrict__ ids, float* __restrict__ logprobs) {
  constexpr int kOwn = kSliceElements / kThreads;
  __shared__ struct {
    Choice choice;
    RowTotal total;
    int first_hit, last_positive;
    double scratch[kWarps];
  } shared;
  const int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const SlicePartial* of_row = partials + row * slices;
  const bool greedy = options.parameters[4 * row + 3] != 0.0f;
  if (thread < 32) {
    const RowTotal total = combine(of_row, slices);
    const Choice choice = choose_row(of_row, slices, total, greedy, keys + 3 * row);
    if (thread == 0) {
      shared.choice = choice;
      shared.total = total;
      shared.first_hit = INT_MAX;
      shared.last_positive = -1;
    }
  }
  __syncthreads();
  const Choice choice = shared.choice;
  const RowLogprob distribution = RowLogprob::from(shared.total);
  if (!distribution.is_finite()) {
    if (thread == 0) {
      ids[row] = 0;
      logprobs[row] = NAN;
    }
    return;
  }

  const float shift = of_row[choice.slice].max;
  OwnLogits<kAligned, kFilter, kOwn> logit;
  logit.inverse = inverse_temperature(options, row);
  logit.first = choice.slice * kSliceElements + thread * kOwn;
  if constexpr (kFilter) logit.filter = filters[row];
  logit.load(logits + row * stride, vocab);

  int hit = -1;  // among this thread's elements
  double before = 0.0, target = 0.0;
  if (greedy) {
#pragma unroll
    for (int j = kOwn - 1; j >= 0; --j) {
      if (logit(j) == distribution.max) hit = j;
    }
    if (hit >= 0) atomicMin(&shared.first_hit, thread);
  } else {
    double own = 0.0;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) own = __dadd_rn(own, weight(logit(j), shift));
    const Scan<double> scan = block_scan<kWarps>(own, shared.scratch);
    before = scan.before;
    target = __dmul_rn(choice.fraction, scan.total);
    if (own > 0.0) {
      if (scan.after > target) atomicMin(&shared.first_hit, thread);
      atomicMax(&shared.last_positive, thread);
    }
  }
  __syncthreads();
  const int winner = shared.first_hit != INT_MAX ? shared.first_hit : shared.last_positive;
  if (thread != winner) return;
  if (!greedy) hit = passes_target<kOwn>(logit, shift, before, target);
  float z = 0.0f;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    if (j == hit) z = logit(j);
  }
  ids[row] = logit.first + hit;
  logprobs[row] = distribution.of(z);
}

// Calls f with kAligned, kFilter, kThird as types std::bool_constant.
template <class F>
void dispatch(bool aligned, bool filter, bool third, F&& f) {
  const auto with_third = [&](auto a, auto b) { third ? f(a, b, std::true_type()) : f(a, b, std::false_type()); };
  const auto with_filter = [&](auto a) { filter ? with_third(a, std::true_type()) : with_third(a, std::false_type()); };
  aligned ? with_filter(std::true_type()) : with_filter(std::false_type());
}

}  // namespace

void slice_partials(const Logits& logits, const RowOptions& options, const RowFilter* filters, SlicePartial* partials,
                    float* dots, cudaStream_t stream) {
  const int slices = slices_of(logits.vocab), vocab = static_cast<int>(logits.vocab);
  const auto blocks = static_cast<unsigned>(logits.rows * slices);
  if (blocks == 0) return;
  dispatch(aligned_rows(logits.data, logits.row_stride()), filters != nullptr, dots != nullptr,
           [&](auto aligned, auto filter, auto entropy) {
             slice_kernel<decltype(aligned)::value, decltype(filter)::value, decltype(entropy)::value>
                 <<<blocks, kThreads, 0, stream>>>(logits.data, logits.row_stride(), vocab, slices, options, filters,
                                                   partials, dots);
           });
  check_launch("slice_partials");
}

void finish_logprobs(const Logits& logits, const RowOptions& options, const RowFilter* filters, const int64_t* targets,
                     bool allow_filtered, const SlicePartial* partials, const float* dots,
                     const LogprobOutputs& outputs, cudaStream_t stream) {
  if (logits.rows == 0) return;
  const auto blocks = static_cast<unsigned>((logits.rows + kWarps - 1) / kWarps);
  finish_logprobs_kernel<<<blocks, kThreads, 0, stream>>>(
      logits.data, logits.rows, logits.row_stride(), static_cast<int>(logits.vocab), slices_of(logits.vocab), options,
      filters, targets, allow_filtered, partials, dots, outputs);
  check_launch("finish_logprobs");
}

void logits_gradient(uint16_t* logits, int64_t rows, int64_t vocab, int64_t stride, const RowOptions& options,
                     const RowFilter* filters, const int64_t* targets, const RowStatistics* statistics,
                     const float* dlogprobs, const float* dentropies, cudaStream_t stream) {
  const int slices = slices_of(vocab);
  const auto blocks = static_cast<unsigned>(rows * slices);
  if (blocks == 0) return;
  dispatch(aligned_rows(logits, stride), filters != nullptr, dentropies != nullptr,
           [&](auto aligned, auto filter, auto entropy) {
             gradient_kernel<decltype(aligned)::value, decltype(filter)::value, decltype(entropy)::value>
                 <<<blocks, kThreads, 0, stream>>>(logits, stride, static_cast<int>(vocab), slices, options, filters,
                                                   targets, statistics, dlogprobs, dentropies);
           });
  check_launch("logits_gradient");
}

void finish_samples(const Logits& logits, const RowOptions& options, const RowFilter* filters, const int64_t* keys,
                    const SlicePartial* partials, int64_t* ids, float* logprobs, cudaStream_t stream) {
  if (logits.rows == 0) return;
  dispatch(aligned_rows(logits.data, logits.row_stride()), filters != nullptr, false,
           [&](auto aligned, auto filter, auto) {
             sample_kernel<decltype(aligned)::value, decltype(filter)::value>
                 <<<static_cast<unsigned>(logits.rows), kThreads, 0, stream>>>(
                     logits.data, logits.row_stride(), static_cast<int>(logits.vocab), slices_of(logits.vocab), options,
                     filters, keys, partials, ids, logprobs);
           });
  check_launch("finish_samples");
}

}  // namespace trireme::cuda
