// Decode: one query row a run, the G query heads of a key head as the rows of a 16-row tile.
//
// attend_shared: four warps share every key tile, so that a tile takes a quarter of the time it takes one warp; that is
// what counts where there are fewer blocks than SMs. Why the bits are those of the packed kernel although the
// keys of a row are spread over warps: a score is one chain of products over head_dim, computed by one warp as there; a
// maximum has no rounding; every warp then holds the same maximum and factor of each row, its weights are rounded to
// bf16 and exchanged, and each warp sums weights times values over all keys of the tile, in the packed kernel's order,
// for its own columns of the output. Only who computes an element differs, never the operations.
#include <algorithm>
#include <flashinfer/math.cuh>
#include <flashinfer/mma.cuh>

#include "trainer/ops/cuda/attention/attention_decode.cuh"
#include "trainer/ops/cuda/attention/attention_steps.cuh"
#include "trainer/ops/cuda/device/hopper.cuh"

namespace trireme::cuda {
namespace {

using namespace decode;

constexpr int kSharedWarps = 4;
constexpr int kSharedThreads = 32 * kSharedWarps;
constexpr int kRows = 16;
constexpr int kDeepStages = 6;
static_assert(kKeyTile == 16 * kSharedWarps, "a warp scores 16 keys of a tile");

// Shared memory: weights [16, 64] bf16, maxima [4, 16] float, kStages x (key tile, value tile).
template <int kHeadDim>
constexpr size_t tile_bytes() {
  return size_t{kKeyTile} * kHeadDim * 2;
}
template <int kHeadDim, int kStages>
constexpr size_t shared_bytes() {
  return kRows * kKeyTile * 2 + kSharedWarps * kRows * 4 + 2 * kStages * tile_bytes<kHeadDim>();
}

template <int kHeadDim>
__device__ __forceinline__ void load_tile(uint32_t target, const bf16* base, int64_t stride, int first, int keys,
                                          int thread) {
  constexpr int kChunks = kHeadDim / 8;
  constexpr int kRowsAtOnce = kSharedThreads / kChunks;
  const int chunk = thread % kChunks;
#pragma unroll
  for (int i = 0; i < kKeyTile / kRowsAtOnce; ++i) {
    const int row = thread / kChunks + i * kRowsAtOnce;
    const int key = first + row;
    const bool valid = key < keys;
    copy16(target + tile_offset<kHeadDim>(row, chunk), base + (valid ? key : 0) * stride + chunk * 8, valid);
  }
}

template <int kHeadDim, int kStages>
__global__ void __launch_bounds__(kSharedThreads) attend_shared(const __grid_constant__ DecodeParams params) {
  constexpr int kSteps = kHeadDim / 16;              // of a score's chain
  constexpr int kColumns = kHeadDim / kSharedWarps;  // of the output, of one warp
  constexpr int kBlocks = kColumns / 8;
  extern __shared__ __align__(128) uint8_t shared[];
  const auto shared_base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t weights = shared_base;
  float* maxima = reinterpret_cast<float*>(shared + kRows * kKeyTile * 2);
  const uint32_t key_tiles = weights + kRows * kKeyTile * 2 + kSharedWarps * kRows * 4;
  const auto value_tiles = static_cast<uint32_t>(key_tiles + kStages * tile_bytes<kHeadDim>());

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int run = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  hopper::let_successors_begin();  // the next product's weights flow meanwhile
  const int64_t q_row = params.runs[run];
  const int64_t first_key = params.runs[2 * params.run_count + run];
  const int keys = params.runs[3 * params.run_count + run];
  const int tiles = (keys + kKeyTile - 1) / kKeyTile;
  const bf16* k = params.k + first_key * params.k_stride + head * kHeadDim;
  const bf16* v = params.v + first_key * params.v_stride + head * kHeadDim;
  const int q_heads = params.group * params.kv_heads;

  const auto load_keys = [&](int tile) {
    load_tile<kHeadDim>(key_tiles + static_cast<uint32_t>(tile % kStages * tile_bytes<kHeadDim>()), k, params.k_stride,
                        tile * kKeyTile, keys, thread);
  };
  const auto load_values = [&](int tile) {
    load_tile<kHeadDim>(value_tiles + static_cast<uint32_t>(tile % kStages * tile_bytes<kHeadDim>()), v,
                        params.v_stride, tile * kKeyTile, keys, thread);
  };
  // Only the last key's row is written by the kernel ahead, and q.
  const bool last_is_later = tiles > kStages;
  if (!last_is_later) hopper::wait_for_predecessors();
  // Group 0 of copies: key tile 0. Group i + 1: value tile i and key tile i + 1.
  load_keys(0);
  commit();
  const auto load_group = [&](int tile) {
    if (tile < tiles) load_values(tile);
    if (tile + 1 < tiles) load_keys(tile + 1);
    commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load_group(i);

  if (last_is_later) hopper::wait_for_predecessors();
  uint32_t q_fragments[kSteps][4];  // rows beyond the group are zero
  {
    const bf16* q = params.q + q_row * params.q_stride + int64_t{head} * params.group * kHeadDim;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i % 2 * 8;
        q_fragments[step][i] =
            row < params.group
                ? *reinterpret_cast<const uint32_t*>(q + row * kHeadDim + step * 16 + i / 2 * 8 + lane % 4 * 2)
                : 0;
      }
    }
  }
  wait<kStages - 1>();
  __syncthreads();

  // Scores of this warp's 16 keys: [block of 8 keys][row lane / 4: 2 keys, row lane / 4 + 8: 2 keys].
  float scores[2][4];
  const auto score_tile = [&](int tile) {
    const auto base = static_cast<uint32_t>(key_tiles + tile % kStages * tile_bytes<kHeadDim>());
    const int row = warp * 16 + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[block][i] = 0.0F;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t b[4];
      load_matrices(b, base + tile_offset<kHeadDim>(row, 2 * step + lane / 8 % 2));
      multiply(scores[0], q_fragments[step], b[0], b[1]);
      multiply(scores[1], q_fragments[step], b[2], b[3]);
    }
    const int key = tile * kKeyTile + warp * 16 + lane % 4 * 2;
    if (tile == tiles - 1) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (key + block * 8 + i % 2 >= keys) scores[block][i] = -INFINITY;
        }
      }
    }
  };
  score_tile(0);

  float out[kBlocks][4] = {};
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {1.0F, 1.0F};  // of the weights of row lane / 4 and of row lane / 4 + 8; its first factor is 0
  const float scale = params.scale_log2;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float top = fmaxf(fmaxf(scores[0][2 * j], scores[0][2 * j + 1]), fmaxf(scores[1][2 * j], scores[1][2 * j + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffU, top, 2));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffU, top, 1));
      if (lane % 4 == 0) maxima[warp * kRows + lane / 4 + 8 * j] = top;
    }
    wait<kStages - 2>();  // value tile `tile` and key tile `tile + 1` are there
    __syncthreads();      // for everyone; and all warps are done with value tile `tile - 1` and key tile `tile`
    load_group(tile + kStages - 1);

    float factor[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = lane / 4 + 8 * j;
      float now = max[j];
#pragma unroll
      for (int other = 0; other < kSharedWarps; ++other) now = fmaxf(now, maxima[other * kRows + row]);
      factor[j] = steps::rescale(max[j], now, scale);
      max[j] = now;
      const float top = steps::scaled_max(now, scale);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const uint32_t pair = pack_pair(steps::weight(scores[block][2 * j], top, scale),
                                        steps::weight(scores[block][2 * j + 1], top, scale));
        const uint32_t target = weights + tile_offset<kKeyTile>(row, warp * 2 + block) + lane % 4 * 4;
        asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(target), "r"(pair) : "memory");
      }
    }
    if (tile + 1 < tiles) score_tile(tile + 1);
    __syncthreads();  // all weights of the tile are there

#pragma unroll
    for (int j = 0; j < 2; ++j) {
      sum[j] = __fmul_rn(sum[j], factor[j]);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        out[block][2 * j] = __fmul_rn(out[block][2 * j], factor[j]);
        out[block][2 * j + 1] = __fmul_rn(out[block][2 * j + 1], factor[j]);
      }
    }
    uint32_t p[kKeyTile / 16][4];
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step) {
      load_matrices(p[step], weights + tile_offset<kKeyTile>(lane % 16, 2 * step + lane / 16));
      flashinfer::mma::m16k16_rowsum_f16f16f32(sum, reinterpret_cast<bf16*>(p[step]));
    }
    const auto base = static_cast<uint32_t>(value_tiles + tile % kStages * tile_bytes<kHeadDim>());
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < kBlocks / 2; ++pair) {
        uint32_t b[4];
        load_matrices_transposed(
            b, base + tile_offset<kHeadDim>(step * 16 + lane % 16, warp * kBlocks + pair * 2 + lane / 16));
        multiply(out[2 * pair], p[step], b[0], b[1]);
        multiply(out[2 * pair + 1], p[step], b[2], b[3]);
      }
    }
  }

#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = lane / 4 + 8 * j;
    if (row >= params.group) continue;
    const float inverse = flashinfer::math::ptx_rcp(sum[j]);
    bf16* target = params.out + (q_row * q_heads + int64_t{head} * params.group + row) * kHeadDim + warp * kColumns;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      *reinterpret_cast<uint32_t*>(target + block * 8 + lane % 4 * 2) =
          pack_pair(__fmul_rn(out[block][2 * j], inverse), __fmul_rn(out[block][2 * j + 1], inverse));
    }
  }
}

template <int kHeadDim, int kStages>
cudaError_t launch_shared(const AttentionArgs& args, cudaStream_t stream) {
  const DecodeParams params = make_params(args);
  auto* kernel = attend_shared<kHeadDim, kStages>;
  // Where there are no more deep blocks than SMs, those of an early launch would else be put two by two where
  // there is room first.
  constexpr size_t kShared = std::max(shared_bytes<kHeadDim, kStages>(), kStages == kDeepStages ? kAlone : 0);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(args.run_count), static_cast<unsigned>(args.kv_heads));
  config.blockDim = dim3(kSharedThreads);
  config.dynamicSmemBytes = kShared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = args.early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

// A warp copies a row, 16 bytes a lane.
__global__ void append_rows(const uint4* k, const uint4* v, int64_t k_stride, int64_t v_stride, uint4* arena_k,
                            uint4* arena_v, const int64_t* token_rows, int64_t tokens, int chunks) {
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (token >= tokens) return;
  const int64_t target = token_rows[token] * chunks;
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += 32) {
    arena_k[target + i] = k[token * k_stride + i];
    arena_v[target + i] = v[token * v_stride + i];
  }
}

}  // namespace

cudaError_t launch_attention_decode(const AttentionArgs& args, DecodeKernel kernel, cudaStream_t stream) {
  const bool wide = args.head_dim == 128;
  switch (kernel) {
    case DecodeKernel::kShared:
      return wide ? launch_shared<128, 3>(args, stream) : launch_shared<64, 3>(args, stream);
    case DecodeKernel::kSharedDeep:
      return wide ? launch_shared<128, kDeepStages>(args, stream) : launch_shared<64, kDeepStages>(args, stream);
    case DecodeKernel::kCluster2:
      return launch_attention_cluster(args, 2, stream);
    case DecodeKernel::kCluster4:
      return launch_attention_cluster(args, 4, stream);
    case DecodeKernel::kCluster8:
      return launch_attention_cluster(args, 8, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_append(const void* k, const void* v, int64_t k_stride, int64_t v_stride, void* arena_k,
                          void* arena_v, const int64_t* token_rows, int64_t tokens, int64_t heads_dim,
                          cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  constexpr int kRowsOfBlock = 4;
  append_rows<<<static_cast<unsigned>((tokens + kRowsOfBlock - 1) / kRowsOfBlock), dim3(32, kRowsOfBlock), 0, stream>>>(
      static_cast<const uint4*>(k), static_cast<const uint4*>(v), k_stride / 8, v_stride / 8,
      static_cast<uint4*>(arena_k), static_cast<uint4*>(arena_v), token_rows, tokens, static_cast<int>(heads_dim / 8));
  return cudaGetLastError();
}

}  // namespace trireme::cuda
