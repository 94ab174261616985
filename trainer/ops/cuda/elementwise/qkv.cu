// Query, key and value heads of fused rows: norms, rotation, into the cache.
#include <algorithm>
#include <type_traits>

#include "trainer/ops/cuda/device/hopper.cuh"
#include "trainer/ops/cuda/elementwise/rows.cuh"

namespace trireme::cuda {
namespace {

using namespace rows;

constexpr int kSplitThreads = 512;  // most threads of a split's forward; its backward has half

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

// What a block's threads have of the head norms' gradients, summed over its heads in their order: query's, then key's.
template <int kGroup>
__device__ __forceinline__ void sum_norm_gradients(const QkvRows& in, const float (&da)[kChunk],
                                                   const float (&db)[kChunk], float* __restrict__ partial) {
  constexpr int kHeadDim = 2 * kGroup * kChunk;
  __shared__ float sums[2 * kChunk][kSplitThreads / 2];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    sums[i][threadIdx.x] = da[i];
    sums[kChunk + i][threadIdx.x] = db[i];
  }
  __syncthreads();
  const int heads = blockDim.x / kGroup, first_head = blockIdx.y * heads, rotated = in.q_heads + in.kv_heads;
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
  float da[kChunk] = {}, db[kChunk] = {};
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
  if constexpr (kNorm) sum_norm_gradients<kGroup>(in, da, db, partial);
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
// Blocks over the tokens of a backward with norms: about 768 threads an SM.
int64_t split_backward_tokens(const QkvRows& in) {
  const SplitShape shape = split_backward_shape(in);
  return std::min<int64_t>(in.tokens, kSumParts * std::max(1, 768 / (shape.threads * shape.blocks)));
}

// Calls f with head_dim / 16 as a compile-time constant.
template <class F>
void with_group(int head_dim, F&& f) {
  if (head_dim == 64) f(std::integral_constant<int, 4>{});
  if (head_dim == 128) f(std::integral_constant<int, 8>{});
  if (head_dim == 256) f(std::integral_constant<int, 16>{});
}

}  // namespace

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

}  // namespace trireme::cuda
