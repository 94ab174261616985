// top_k, top_p and min_p of a row of bf16 logits. Equal logits have equal weights, so a histogram over the 2^16 bf16
// values holds all that the filters ask: integer counts, whose sums have no order, and masses count * exp(z - max),
// added in the order of the values. One half of the values at a time (logits from 0 up, then the negative ones) fits
// shared memory. The cut inside a run of equal logits, which top_p makes by id, is found by a last pass over the row.
#include <climits>

#include "trainer/ops/cuda/vocabulary/vocabulary_device.cuh"
#include "trainer/ops/cuda/vocabulary/vocabulary_kernels.h"

namespace trireme::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 1 << 15;
constexpr int kBinsOfThread = kBins / kThreads;
// Thread t reads bins t * 32 .. t * 32 + 31 from the top: one unused word after every 32 keeps them in distinct banks.
constexpr int kWords = kBins + kBins / 32;
constexpr size_t kSharedBytes = kWords * sizeof(int32_t);

__device__ int word_of(int bin) { return bin + bin / 32; }

// Halves of the values in ascending order: bin b of the upper half holds bf16 bits b (and -0), of the lower half the
// bits 0xffff - b.
enum Half { kLower, kUpper };
__device__ uint32_t without_minus_zero(uint32_t bits) { return bits == 0x8000u ? 0u : bits; }
__device__ uint32_t bits_of(Half half, int bin) {
  return half == kUpper ? static_cast<uint32_t>(bin) : 0xffffu - static_cast<uint32_t>(bin);
}
__device__ float value_of(Half half, int bin, float inverse) {
  return scaled(__uint_as_float(bits_of(half, bin) << 16), inverse);
}

struct Shared {
  double masses[kWarps];
  int counts[kWarps];
  float maxima[kWarps];
  int thread;
  int bin;
  int take;
  int available;
};

struct Row {
  const uint16_t* logits;
  int vocab;
  float inverse;
  float max;
  int* words;
  Shared* shared;
};

// f(bits) for the elements of this thread.
template <bool kAligned, class F>
__device__ void for_each_logit(const Row& row, F&& f) {
  for (int first = static_cast<int>(threadIdx.x) * 8; first < row.vocab; first += kThreads * 8) {
    const Eight eight = load_eight<kAligned>(row.logits, first, row.vocab);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first + i < row.vocab) f(without_minus_zero(eight.bits(i)));
    }
  }
}

template <bool kAligned>
__device__ void make_histogram(const Row& row, Half half) {
  for (int i = static_cast<int>(threadIdx.x); i < kWords; i += kThreads) row.words[i] = 0;
  __syncthreads();
  for_each_logit<kAligned>(row, [&](uint32_t bits) {
    if ((bits < 0x8000u) != (half == kUpper)) return;
    atomicAdd(&row.words[word_of(static_cast<int>(half == kUpper ? bits : 0xffffu - bits))], 1);
  });
  __syncthreads();
}

// f(bin, count) for this thread's bins that are not empty, from the top down; f returns false to stop.
template <class F>
__device__ void for_bins_of_thread(const Row& row, F&& f) {
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kBinsOfThread;
  for (int i = 0; i < kBinsOfThread; ++i) {
    const int count = row.words[word_of(top - i)];
    if (count > 0 && !f(top - i, count)) return;
  }
}

// The bin in which the running count from the top reaches k; 1 <= k <= elements of this half.
__device__ int bin_of_kth(const Row& row, int k) {
  int own = 0;
  for_bins_of_thread(row, [&](int, int count) {
    own += count;
    return true;
  });
  const Scan<int> scan = block_scan<kWarps>(own, row.shared->counts);
  if (scan.before < k && k <= scan.after) {
    int running = scan.before;
    for_bins_of_thread(row, [&](int bin, int count) {
      running += count;
      row.shared->bin = bin;
      return running < k;
    });
  }
  __syncthreads();
  const int bin = row.shared->bin;
  __syncthreads();
  return bin;
}

__device__ double mass_of_bin(const Row& row, Half half, int bin, int count) {
  return __dmul_rn(count, weight(value_of(half, bin, row.inverse), row.max));
}

// Masses of this half's bins from `lowest` up, running from the top.
__device__ Scan<double> scan_masses(const Row& row, Half half, int lowest) {
  double own = 0.0;
  for_bins_of_thread(row, [&](int bin, int count) {
    if (bin < lowest) return false;
    own = __dadd_rn(own, mass_of_bin(row, half, bin, count));
    return true;
  });
  return block_scan<kWarps>(own, row.shared->masses);
}

// Where the mass from the top, `above` of it before this half, reaches `wanted`: `take` of the `available` elements of
// `bin` are needed. take 0: not in this half.
struct Crossing {
  Half half;
  int bin;
  int take;
  int available;
};
__device__ Crossing find_crossing(const Row& row, Half half, int lowest, const Scan<double>& scan, double above,
                                  double wanted) {
  Shared& shared = *row.shared;
  if (threadIdx.x == 0) {
    shared.thread = INT_MAX;
    shared.take = 0;
  }
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (scan.own > 0.0 && __dadd_rn(above, scan.after) >= wanted) atomicMin(&shared.thread, thread);
  __syncthreads();
  if (thread == shared.thread) {
    double running = __dadd_rn(above, scan.before);
    for_bins_of_thread(row, [&](int bin, int count) {
      if (bin < lowest) return false;
      const double mass = mass_of_bin(row, half, bin, count);
      if (!(mass > 0.0)) return false;
      shared.bin = bin;
      shared.available = shared.take = count;  // stays where rounding hides the crossing in the thread's last bin
      if (__dadd_rn(running, mass) >= wanted) {
        const double each = mass / count;
        shared.take = min(count, max(1, static_cast<int>(ceil((wanted - running) / each))));
        return false;
      }
      running = __dadd_rn(running, mass);
      return true;
    });
  }
  __syncthreads();
  const Crossing crossing = {half, shared.bin, shared.take, shared.available};
  __syncthreads();
  return crossing;
}

// The id of the n-th element, counted from 1, with these bits. Each warp looks at one run of ids.
template <bool kAligned>
__device__ int id_of_nth(const Row& row, uint32_t bits, int n) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int span = ((row.vocab + kWarps - 1) / kWarps + 255) / 256 * 256;
  const int begin = warp * span;
  const int end = min(row.vocab, begin + span);
  const auto matches = [&](int first) {  // of this lane's eight elements
    const Eight eight = load_eight<kAligned>(row.logits, first, end);
    int found = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first + i < end && without_minus_zero(eight.bits(i)) == bits) found |= 1 << i;
    }
    return found;
  };
  int own = 0;
  for (int base = begin; base < end; base += 256) own += __popc(matches(base + lane * 8));
  const Scan<int> lanes = block_scan<kWarps>(own, row.shared->counts);
  const int before = __shfl_sync(kAllLanes, lanes.before, 0), after = __shfl_sync(kAllLanes, lanes.after, 31);
  if (before < n && n <= after) {
    int running = before;
    for (int base = begin; base < end; base += 256) {
      int found = matches(base + lane * 8);
      int inclusive = __popc(found);
      const int count = inclusive;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int lower = __shfl_up_sync(kAllLanes, inclusive, step);
        if (lane >= step) inclusive += lower;
      }
      const int upto = running + inclusive;
      if (upto - count < n && n <= upto) {
        for (int skip = n - (upto - count) - 1; skip > 0; --skip) found &= found - 1;
        row.shared->bin = base + lane * 8 + __ffs(found) - 1;
      }
      running += __shfl_sync(kAllLanes, inclusive, 31);
    }
  }
  __syncthreads();
  return row.shared->bin;
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    find_filters_kernel(const uint16_t* __restrict__ logits, int64_t stride, int vocab, RowOptions options,
                        RowFilter* __restrict__ filters) {
  extern __shared__ int words[];
  __shared__ Shared shared;
  const int64_t index = blockIdx.x;
  const bool each = options.parameters != nullptr;
  const float top_p = each ? options.parameters[4 * index + 1] : options.top_p;
  const float min_p = each ? options.parameters[4 * index + 2] : options.min_p;
  int k = each ? options.top_ks[index] : options.top_k;
  if (k < 0 || k >= vocab) k = 0;
  const bool with_top_p = top_p < 1.0f;
  RowFilter filter = {-kInfinity, INT_MAX};
  if (k == 0 && !with_top_p && !(min_p > 0.0f)) {
    if (threadIdx.x == 0) filters[index] = filter;
    return;
  }
  Row row = {logits + index * stride, vocab, inverse_temperature(options, index), 0.0f, words, &shared};

  float max = -kInfinity;
  int own_upper = 0;
  for_each_logit<kAligned>(row, [&](uint32_t bits) {
    max = fmaxf(max, __uint_as_float(bits << 16));
    own_upper += bits < 0x8000u ? 1 : 0;
  });
  max = warp_max(max);
  if (threadIdx.x % 32 == 0) shared.maxima[threadIdx.x / 32] = max;
  const int upper = block_scan<kWarps>(own_upper, shared.counts).total;  // its barriers publish the maxima too
  for (int w = 0; w < kWarps; ++w) max = fmaxf(max, shared.maxima[w]);
  row.max = scaled(max, row.inverse);
  const int lower = vocab - upper;

  // Bins below these are dropped by top_k.
  const bool kth_is_upper = k > 0 && k <= upper;
  int lowest_upper = 0, lowest_lower = 0;
  double mass_lower = 0.0;
  if (!kth_is_upper && lower > 0 && (k > 0 || with_top_p)) {
    make_histogram<kAligned>(row, kLower);
    if (k > 0) {
      lowest_lower = bin_of_kth(row, k - upper);
      filter.threshold = value_of(kLower, lowest_lower, row.inverse);
    }
    if (with_top_p) mass_lower = scan_masses(row, kLower, lowest_lower).total;
  }
  Scan<double> masses = {};
  if (kth_is_upper || (with_top_p && upper > 0)) {
    make_histogram<kAligned>(row, kUpper);
    if (kth_is_upper) {
      lowest_upper = bin_of_kth(row, k);
      filter.threshold = value_of(kUpper, lowest_upper, row.inverse);
    }
    if (with_top_p) masses = scan_masses(row, kUpper, lowest_upper);
  }
  if (with_top_p) {
    const double wanted = __dmul_rn(top_p, __dadd_rn(masses.total, mass_lower));
    Crossing crossing = {kUpper, 0, 0, 0};
    if (upper > 0) crossing = find_crossing(row, kUpper, lowest_upper, masses, 0.0, wanted);
    if (crossing.take == 0 && mass_lower > 0.0) {
      if (upper > 0) make_histogram<kAligned>(row, kLower);
      const double above = masses.total;
      const Scan<double> of_lower = scan_masses(row, kLower, lowest_lower);
      crossing = find_crossing(row, kLower, lowest_lower, of_lower, above, wanted);
    }
    if (crossing.take > 0) {
      filter.threshold = value_of(crossing.half, crossing.bin, row.inverse);
      if (crossing.take < crossing.available) {
        filter.limit = id_of_nth<kAligned>(row, bits_of(crossing.half, crossing.bin), crossing.take) + 1;
      }
    }
  }
  if (min_p > 0.0f) {
    const float least = __fadd_rn(row.max, static_cast<float>(log(static_cast<double>(min_p))));
    if (least > filter.threshold) filter = {least, INT_MAX};
  }
  if (threadIdx.x == 0) filters[index] = filter;
}

}  // namespace

void find_filters(const Logits& logits, const RowOptions& options, RowFilter* filters, cudaStream_t stream) {
  if (logits.rows == 0) return;
  const auto kernel =
      aligned_rows(logits.data, logits.row_stride()) ? find_filters_kernel<true> : find_filters_kernel<false>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) fail_internal(std::string("find_filters: ") + cudaGetErrorString(error));
  kernel<<<static_cast<unsigned>(logits.rows), kThreads, kSharedBytes, stream>>>(
      logits.data, logits.row_stride(), static_cast<int>(logits.vocab), options, filters);
  check_launch("find_filters");
}

}  // namespace trireme::cuda
