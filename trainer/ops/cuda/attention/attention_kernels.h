// Attention kernels behind raw pointers, so that the .cu files need no LibTorch header.
//
// bf16, head_dim 64 or 128, causal, grouped query heads, run-time group size. Determinism class of the
// forward: row-exact. A row's
// scores are taken in key tiles of 64 counted from its sequence's first key, each tile by one fixed chain of operations
// (attention_steps.cuh), and a tile in which the row sees no key changes nothing. So the bits of a row do not depend on
// the kernel, the tile of query rows, the other rows, or where a prefill was cut.
//
// Measured on H200 with head_dim 128 and 32/8 heads (docs/lab/019): packed forward by warp groups 420 / 585 /
// 556 TFLOP/s at 16x1k / 4x4k / 1x16k; backward 366 / 441 / 474. Decode at 1,000 keys 2.9
// / 3.8 / 4.2 TB/s with 8 / 32 / 256 sequences: cluster kernels 7.3 to 11.2 us at 1..8 sequences of 1,000 keys, 10.6
// to 19.4 us of 2,048, the time of their key tiles.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "trainer/ops/decode_choice.h"

namespace trireme::cuda {

inline constexpr int kKeyTile = 64;
inline constexpr int kPackedTileRows = 128;  // (token, query head of the group) pairs of one block of work
inline constexpr int kMaxDecodeGroup = 16;

// All pointers are device pointers aligned to 16 bytes; strides are in elements, multiples of 8, the last two
// dimensions contiguous. rows * stride must stay below 2^32.
struct AttentionArgs {
  const void* q = nullptr;  // [tokens, q_heads, head_dim]
  const void* k = nullptr;  // [rows, kv_heads, head_dim]
  const void* v = nullptr;
  void* out = nullptr;   // [tokens, q_heads, head_dim], contiguous
  float* lse = nullptr;  // [tokens, q_heads], base-2 log of the sum of 2^score, or null; of the packed kernels
  int64_t q_stride = 0, k_stride = 0, v_stride = 0;
  int64_t key_rows = 0;  // of k and v
  int q_heads = 0, kv_heads = 0, head_dim = 0;
  float scale_log2 = 0.0F;        // softmax scale * log2(e)
  const int32_t* runs = nullptr;  // [4, run_count]: first query row, query rows, first key row, keys
  int run_count = 0;
  const int32_t* items = nullptr;  // [2, item_count]: run, tile of kPackedTileRows
  int item_count = 0;
  // Of decode kernels: they may begin while the kernel ahead in the stream, which then writes
  // no more than q and the last key and value row of each run, is still running. `runs` and all other rows must have
  // been there before the last launch that was not early.
  bool early = false;
};

// Any runs, by wgmma (attention_wgmma.cu); cudaErrorInvalidValue where the device or the driver cannot.
cudaError_t launch_attention_packed(const AttentionArgs& args, cudaStream_t stream);

// The gradients of a packed pass by wgmma, from attention_backward.cu: compute capability 9.0. Determinism class:
// deterministic. dK and dV are sums over the query heads of a key head in float32, rounded once.
inline constexpr int kBackwardTileRows = 128;
struct AttentionBackwardArgs {
  AttentionArgs forward;       // lse as the forward wrote it; items are not read
  int64_t tokens = 0;          // rows of q
  const void* dout = nullptr;  // [tokens, q_heads, head_dim], contiguous, as are out and the gradients
  void* dq = nullptr;
  void* dk = nullptr;  // [key_rows, kv_heads, head_dim]
  void* dv = nullptr;
  float* minus_lse = nullptr;  // scratch, [q_heads, tokens] each
  float* sums = nullptr;
  float scale = 0.0F;  // softmax scale
  // [2, count] each: run, tile of kBackwardTileRows of its queries (of its keys).
  const int32_t* query_items = nullptr;
  const int32_t* key_items = nullptr;
  int query_item_count = 0, key_item_count = 0;
};
cudaError_t launch_attention_backward(const AttentionBackwardArgs& args, cudaStream_t stream);

// Runs of one query row each; items are not read. Group at most kMaxDecodeGroup.
cudaError_t launch_attention_decode(const AttentionArgs& args, DecodeKernel kernel, cudaStream_t stream);

// Those by clusters of 2, 4 or 8 blocks (attention_cluster.cu).
cudaError_t launch_attention_cluster(const AttentionArgs& args, int blocks, cudaStream_t stream);
// How many clusters of so many blocks the device runs at once.
cudaError_t count_attention_clusters(const AttentionArgs& args, int blocks, int* count);

// Copies rows: arena[token_rows[i]] = source[i] for k and v. heads_dim elements a row (multiple of 8).
cudaError_t launch_append(const void* k, const void* v, int64_t k_stride, int64_t v_stride, void* arena_k,
                          void* arena_v, const int64_t* token_rows, int64_t tokens, int64_t heads_dim,
                          cudaStream_t stream);

}  // namespace trireme::cuda
