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

// What a thread is, the run and key head of its block, and where things lie in shared memory.
template <int kHeadDim, int kStages>
struct Block {
  const DecodeParams& params;
  float scale;
  int thread, warp, lane;
  int head;
  int64_t q_row, first_key;
  int keys, tiles;
  uint32_t weights;
  float* maxima;
  uint32_t key_tiles, value_tiles;

  __device__ __forceinline__ Block(const DecodeParams& of, uint8_t* shared) : params(of) {
    scale = params.scale_log2;
    weights = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    maxima = reinterpret_cast<float*>(shared + kRows * kKeyTile * 2);
    key_tiles = weights + kRows * kKeyTile * 2 + kSharedWarps * kRows * 4;
    value_tiles = static_cast<uint32_t>(key_tiles + kStages * tile_bytes<kHeadDim>());
    thread = static_cast<int>(threadIdx.x);
    warp = thread / 32;
    lane = thread % 32;
    const int run = static_cast<int>(blockIdx.x);
    head = static_cast<int>(blockIdx.y);
    q_row = params.runs[run];
    first_key = params.runs[2 * params.run_count + run];
    keys = params.runs[3 * params.run_count + run];
    tiles = (keys + kKeyTile - 1) / kKeyTile;
  }

  __device__ __forceinline__ uint32_t key_tile(int tile) const {
    return static_cast<uint32_t>(key_tiles + tile % kStages * tile_bytes<kHeadDim>());
  }
  __device__ __forceinline__ uint32_t value_tile(int tile) const {
    return static_cast<uint32_t>(value_tiles + tile % kStages * tile_bytes<kHeadDim>());
  }
};

// What a thread copies of the tiles. Group 0 of copies: key tile 0. Group i + 1: value tile i and key tile i + 1.
template <int kHeadDim, int kStages>
struct Producer {
  const Block<kHeadDim, kStages>& block;
  const bf16* k;
  const bf16* v;

  __device__ __forceinline__ explicit Producer(const Block<kHeadDim, kStages>& of) : block(of) {
    k = block.params.k + block.first_key * block.params.k_stride + block.head * kHeadDim;
    v = block.params.v + block.first_key * block.params.v_stride + block.head * kHeadDim;
  }

  // The groups that are under way before the first turn.
  __device__ __forceinline__ void begin() const {
    load_keys(0);
    commit();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load_group(i);
  }
  __device__ __forceinline__ void load_group(int tile) const {
    if (tile < block.tiles) load_values(tile);
    if (tile + 1 < block.tiles) load_keys(tile + 1);
    commit();
  }

  __device__ __forceinline__ void load_keys(int tile) const {
    load_tile<kHeadDim>(block.key_tile(tile), k, block.params.k_stride, tile * kKeyTile, block.keys, block.thread);
  }
  __device__ __forceinline__ void load_values(int tile) const {
    load_tile<kHeadDim>(block.value_tile(tile), v, block.params.v_stride, tile * kKeyTile, block.keys, block.thread);
  }
};

// What a thread computes: of every key tile its warp's 16 scores a row, and of the output its warp's columns; two rows
// a thread, lane / 4 and 8 further. All of it lives in registers: arrays are indexed by constants only, and what is not
// changed stays in Block, which the compiler takes apart before it has unrolled the loops over these arrays.
template <int kHeadDim, int kStages>
struct Consumer {
  static constexpr int kSteps = kHeadDim / 16;              // of a score's chain
  static constexpr int kColumns = kHeadDim / kSharedWarps;  // of the output, of one warp
  static constexpr int kBlocks = kColumns / 8;

  uint32_t q[kSteps][4];  // fragments; rows beyond the group are zero
  // Of this warp's 16 keys: [block of 8 keys][row lane / 4: 2 keys, row lane / 4 + 8: 2 keys].
  float scores[2][4];
  float out[kBlocks][4] = {};
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {1.0F, 1.0F};  // of the rows' weights; its first factor is 0
  float factor[2];

  __device__ __forceinline__ void load_queries(const Block<kHeadDim, kStages>& block) {
    const auto& params = block.params;
    const bf16* from = params.q + block.q_row * params.q_stride + int64_t{block.head} * params.group * kHeadDim;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = block.lane / 4 + i % 2 * 8;
        q[step][i] =
            row < params.group
                ? *reinterpret_cast<const uint32_t*>(from + row * kHeadDim + step * 16 + i / 2 * 8 + block.lane % 4 * 2)
                : 0;
      }
    }
  }

  __device__ __forceinline__ void score(const Block<kHeadDim, kStages>& block, int tile) {
    const uint32_t base = block.key_tile(tile);
    const int row = block.warp * 16 + block.lane / 16 * 8 + block.lane % 8;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[b][i] = 0.0F;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t b[4];
      load_matrices(b, base + tile_offset<kHeadDim>(row, 2 * step + block.lane / 8 % 2));
      multiply(scores[0], q[step], b[0], b[1]);
      multiply(scores[1], q[step], b[2], b[3]);
    }
    const int key = tile * kKeyTile + block.warp * 16 + block.lane % 4 * 2;
    if (tile == block.tiles - 1) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (key + b * 8 + i % 2 >= block.keys) scores[b][i] = -INFINITY;
        }
      }
    }
  }

  // The maxima of this warp's scores, for all warps.
  __device__ __forceinline__ void write_maxima(const Block<kHeadDim, kStages>& block) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float top = fmaxf(fmaxf(scores[0][2 * j], scores[0][2 * j + 1]), fmaxf(scores[1][2 * j], scores[1][2 * j + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffU, top, 2));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffU, top, 1));
      if (block.lane % 4 == 0) block.maxima[block.warp * kRows + block.lane / 4 + 8 * j] = top;
    }
  }

  // Where all maxima are there: this warp's weights, for all warps, and the factor of what is summed so far.
  __device__ __forceinline__ void weigh(const Block<kHeadDim, kStages>& block) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = block.lane / 4 + 8 * j;
      float now = max[j];
#pragma unroll
      for (int other = 0; other < kSharedWarps; ++other) now = fmaxf(now, block.maxima[other * kRows + row]);
      factor[j] = steps::rescale(max[j], now, block.scale);
      max[j] = now;
      const float top = steps::scaled_max(now, block.scale);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const uint32_t pair = pack_pair(steps::weight(scores[b][2 * j], top, block.scale),
                                        steps::weight(scores[b][2 * j + 1], top, block.scale));
        const uint32_t target = block.weights + tile_offset<kKeyTile>(row, block.warp * 2 + b) + block.lane % 4 * 4;
        asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(target), "r"(pair) : "memory");
      }
    }
  }

  __device__ __forceinline__ void rescale_sums() {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      sum[j] = __fmul_rn(sum[j], factor[j]);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        out[b][2 * j] = __fmul_rn(out[b][2 * j], factor[j]);
        out[b][2 * j + 1] = __fmul_rn(out[b][2 * j + 1], factor[j]);
      }
    }
  }

  // Where all weights are there: adds them, and their products with values.
  __device__ __forceinline__ void add_values(const Block<kHeadDim, kStages>& block, int tile) {
    uint32_t p[kKeyTile / 16][4];
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step) {
      load_matrices(p[step], block.weights + tile_offset<kKeyTile>(block.lane % 16, 2 * step + block.lane / 16));
      flashinfer::mma::m16k16_rowsum_f16f16f32(sum, reinterpret_cast<bf16*>(p[step]));
    }
    const uint32_t base = block.value_tile(tile);
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < kBlocks / 2; ++pair) {
        uint32_t b[4];
        load_matrices_transposed(b, base + tile_offset<kHeadDim>(step * 16 + block.lane % 16,
                                                                 block.warp * kBlocks + pair * 2 + block.lane / 16));
        multiply(out[2 * pair], p[step], b[0], b[1]);
        multiply(out[2 * pair + 1], p[step], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void write(const Block<kHeadDim, kStages>& block) const {
    const auto& params = block.params;
    const int q_heads = params.group * params.kv_heads;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = block.lane / 4 + 8 * j;
      if (row >= params.group) continue;
      const float inverse = flashinfer::math::ptx_rcp(sum[j]);
      bf16* target = params.out + (block.q_row * q_heads + int64_t{block.head} * params.group + row) * kHeadDim +
                     block.warp * kColumns;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        *reinterpret_cast<uint32_t*>(target + b * 8 + block.lane % 4 * 2) =
            pack_pair(__fmul_rn(out[b][2 * j], inverse), __fmul_rn(out[b][2 * j + 1], inverse));
      }
    }
  }
};

template <int kHeadDim, int kStages>
__global__ void __launch_bounds__(kSharedThreads) attend_shared(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  hopper::let_successors_begin();  // the next product's weights flow meanwhile
  const Block<kHeadDim, kStages> block(params, shared);
  const Producer<kHeadDim, kStages> producer(block);
  Consumer<kHeadDim, kStages> consumer;

  // Only the last key's row is written by the kernel ahead, and q.
  const bool last_is_later = block.tiles > kStages;
  if (!last_is_later) hopper::wait_for_predecessors();
  producer.begin();
  if (last_is_later) hopper::wait_for_predecessors();
  consumer.load_queries(block);
  wait<kStages - 1>();
  __syncthreads();

  consumer.score(block, 0);
#pragma unroll 1
  for (int tile = 0; tile < block.tiles; ++tile) {
    consumer.write_maxima(block);
    wait<kStages - 2>();  // value tile `tile` and key tile `tile + 1` are there
    __syncthreads();      // for everyone; and all warps are done with value tile `tile - 1` and key tile `tile`
    producer.load_group(tile + kStages - 1);
    consumer.weigh(block);
    if (tile + 1 < block.tiles) consumer.score(block, tile + 1);
    __syncthreads();  // all weights of the tile are there
    consumer.rescale_sums();
    consumer.add_values(block, tile);
  }
  consumer.write(block);
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
