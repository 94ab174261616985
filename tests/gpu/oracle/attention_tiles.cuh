// The oracle of attention's bits: FlashInfer's FA2 kernel for ragged batches with tile traits pinned by us, over runs
// in flat arenas. Pinned are: the key tile (64), that no two warps share the keys of a row, and the softmax update
// (ours, attention_steps.cuh).
#pragma once

#include <flashinfer/attention/prefill.cuh>

#include "trainer/ops/cuda/attention/attention_kernels.h"
#include "trainer/ops/cuda/attention/attention_steps.cuh"

namespace trireme::cuda {

using bf16 = __nv_bfloat16;

// What the kernel reads, by the names it uses. A request is a run.
struct RunParams {
  using DTypeQ = bf16;
  using DTypeKV = bf16;
  using DTypeO = bf16;
  using IdType = int32_t;

  bf16* q;
  bf16* k;
  bf16* v;
  bf16* o;
  float* lse;
  int32_t* q_indptr;   // first query row of a run
  int32_t* o_indptr;   // the same
  int32_t* kv_indptr;  // first key row
  const int32_t* query_rows;
  const int32_t* keys;
  int32_t* request_indices;    // run of an item
  int32_t* qo_tile_indices;    // tile of an item
  int32_t* kv_tile_indices;    // read, but without meaning where keys are not split
  int32_t* kv_chunk_size_ptr;  // likewise
  flashinfer::uint_fastdiv group_size;
  uint32_t q_stride_n, q_stride_h, k_stride_n, k_stride_h, v_stride_n, v_stride_h;
  float sm_scale_log2;
  static constexpr bool* block_valid_mask = nullptr;
  static constexpr bool partition_kv = false;

  __device__ __forceinline__ uint32_t get_qo_len(uint32_t run) const { return query_rows[run]; }
  __device__ __forceinline__ uint32_t get_kv_len(uint32_t run) const { return keys[run]; }
};

struct Causal : flashinfer::AttentionVariantBase {
  static constexpr bool use_softmax = true;
  static constexpr uint32_t window_left = 1U << 30;  // none
  uint32_t qo_len, kv_len;
  float sm_scale_log2;

  __device__ __forceinline__ Causal(const RunParams& params, uint32_t run, uint8_t*)
      : qo_len(params.get_qo_len(run)), kv_len(params.get_kv_len(run)), sm_scale_log2(params.sm_scale_log2) {}
};

// kWarps x kRowBlocks * 16 query rows a block.
template <int kHeadDim, int kWarps, int kRowBlocks>
using Traits = flashinfer::KernelTraits<flashinfer::MaskMode::kCausal, kWarps * kRowBlocks * 16, kRowBlocks,
                                        kKeyTile / 16, kHeadDim / 16, kHeadDim / 16, kWarps, /*NUM_WARPS_KV=*/1,
                                        flashinfer::PosEncodingMode::kNone, bf16, bf16, bf16, float, int32_t, Causal>;

// Register layout of a fragment of 16 x 16: [2j], [2j + 1], [4 + 2j], [4 + 2j + 1] belong to row lane / 4 + 8 j.
template <class T>
__device__ __forceinline__ void update_softmax(float scale, float (*scores)[T::NUM_MMA_KV][8],
                                               float (*out)[T::NUM_MMA_D_VO_TILE][8], float (*max)[2],
                                               float (*sum)[2]) {
  float factor[T::NUM_MMA_Q][2];
  bool moved = false;
#pragma unroll
  for (uint32_t q = 0; q < T::NUM_MMA_Q; ++q) {
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      const float before = max[q][j];
      float now = before;
#pragma unroll
      for (uint32_t kv = 0; kv < T::NUM_MMA_KV; ++kv) {
        const float* s = scores[q][kv];
        now = fmaxf(now, fmaxf(fmaxf(s[2 * j], s[2 * j + 1]), fmaxf(s[2 * j + 4], s[2 * j + 5])));
      }
      now = fmaxf(now, __shfl_xor_sync(0xffffffffU, now, 2));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffU, now, 1));
      max[q][j] = now;
      moved |= now != before;
      factor[q][j] = steps::rescale(before, now, scale);
      const float top = steps::scaled_max(now, scale);
#pragma unroll
      for (uint32_t kv = 0; kv < T::NUM_MMA_KV; ++kv) {
        float* s = scores[q][kv];
        s[2 * j] = steps::weight(s[2 * j], top, scale);
        s[2 * j + 1] = steps::weight(s[2 * j + 1], top, scale);
        s[2 * j + 4] = steps::weight(s[2 * j + 4], top, scale);
        s[2 * j + 5] = steps::weight(s[2 * j + 5], top, scale);
      }
    }
  }
  // Where no row's maximum moved every factor is exactly 1.
  if (!__any_sync(0xffffffffU, moved)) return;
#pragma unroll
  for (uint32_t q = 0; q < T::NUM_MMA_Q; ++q) {
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      sum[q][j] = __fmul_rn(sum[q][j], factor[q][j]);
#pragma unroll
      for (uint32_t d = 0; d < T::NUM_MMA_D_VO_TILE; ++d) {
        float* o = out[q][d];
        o[2 * j] = __fmul_rn(o[2 * j], factor[q][j]);
        o[2 * j + 1] = __fmul_rn(o[2 * j + 1], factor[q][j]);
        o[2 * j + 4] = __fmul_rn(o[2 * j + 4], factor[q][j]);
        o[2 * j + 5] = __fmul_rn(o[2 * j + 5], factor[q][j]);
      }
    }
  }
}

using Packed128 = Traits<128, 4, 2>;
using Packed64 = Traits<64, 4, 2>;
using Tiled128 = Traits<128, 2, 1>;
using Tiled64 = Traits<64, 2, 1>;

}  // namespace trireme::cuda

// The library's own update computes its factor by a contracted product and difference of two roundings of the same
// maximum, which is not exactly 1 where the maximum stays: a row's bits would then depend on how many tiles the block
// visits beyond the row's last key. Specialised for each of our traits, before their first use.
namespace flashinfer {
namespace {

#define TRIREME_UPDATE_SOFTMAX(T)                                                                  \
  template <>                                                                                      \
  __device__ __forceinline__ void update_mdo_states<trireme::cuda::T>(                             \
      trireme::cuda::Causal variant, float(*scores)[trireme::cuda::T::NUM_MMA_KV][8],              \
      float(*out)[trireme::cuda::T::NUM_MMA_D_VO_TILE][8], float(*max)[2], float(*sum)[2]) {       \
    trireme::cuda::update_softmax<trireme::cuda::T>(variant.sm_scale_log2, scores, out, max, sum); \
  }
TRIREME_UPDATE_SOFTMAX(Packed128)
TRIREME_UPDATE_SOFTMAX(Packed64)
TRIREME_UPDATE_SOFTMAX(Tiled128)
TRIREME_UPDATE_SOFTMAX(Tiled64)
#undef TRIREME_UPDATE_SOFTMAX

}  // namespace
}  // namespace flashinfer

namespace trireme::cuda {

template <class T>
cudaError_t launch_tiles(const AttentionArgs& args, int items, int32_t* item_runs, int32_t* item_tiles,
                         cudaStream_t stream) {
  auto* runs = const_cast<int32_t*>(args.runs);
  const int64_t count = args.run_count;
  RunParams params;
  params.q = static_cast<bf16*>(const_cast<void*>(args.q));
  params.k = static_cast<bf16*>(const_cast<void*>(args.k));
  params.v = static_cast<bf16*>(const_cast<void*>(args.v));
  params.o = static_cast<bf16*>(args.out);
  params.lse = args.lse;
  params.q_indptr = params.o_indptr = runs;
  params.query_rows = runs + count;
  params.kv_indptr = runs + 2 * count;
  params.keys = runs + 3 * count;
  params.request_indices = item_runs;
  params.qo_tile_indices = params.kv_tile_indices = item_tiles;
  params.kv_chunk_size_ptr = runs + 3 * count;
  params.group_size = flashinfer::uint_fastdiv(static_cast<uint32_t>(args.q_heads / args.kv_heads));
  params.q_stride_n = static_cast<uint32_t>(args.q_stride);
  params.k_stride_n = static_cast<uint32_t>(args.k_stride);
  params.v_stride_n = static_cast<uint32_t>(args.v_stride);
  params.q_stride_h = params.k_stride_h = params.v_stride_h = static_cast<uint32_t>(args.head_dim);
  params.sm_scale_log2 = args.scale_log2;

  auto* kernel = flashinfer::BatchPrefillWithRaggedKVCacheKernel<T, RunParams>;
  constexpr size_t kShared = sizeof(typename T::SharedStorage);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (error != cudaSuccess) return error;
  kernel<<<dim3(items, 1, args.kv_heads), dim3(32, T::NUM_WARPS_Q, 1), kShared, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace trireme::cuda
