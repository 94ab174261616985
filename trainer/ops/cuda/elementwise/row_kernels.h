// Row-local kernels on raw device pointers; no LibTorch here, so that the kernels compile fast.
//
// Determinism class: row-exact. What is written for a row depends on that row's inputs only: every sum over a row has a
// shape fixed by its width, whatever the number of rows. Sums over rows (gradients of weights) go through partial sums
// of a fixed set of rows, added in a fixed order: the same bits in every run, but they depend on the number of rows.
// Nothing here allocates, waits or reads results back except take_bad_id: all else is legal in stream capture.
//
// Kernels with `early` may then begin before the one ahead of them in the stream has ended, if that one allows it; they
// wait for its end before they touch anything but weights. In any case they allow it to the next one.
//
// Speed: docs/lab/019-where-a-layer-spends-its-time.md; bench/gpu/rows_bench measures it.
//
// All matrices are row-major and contiguous unless a stride (in elements) is given. Every pointer is a multiple of 16
// bytes, every width and stride a multiple of 8 elements. Launch errors stay in cudaGetLastError().
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace trireme::cuda {

using Bf16 = uint16_t;  // the bits of a bfloat16

// Widths the norm kernels take: multiples of 8 in this range.
inline constexpr int64_t kMinNormWidth = 64;
inline constexpr int64_t kMaxNormWidth = 16'384;

// Rows of a norm: the mean is over `counted` of their `width` elements, the others are zeros.
struct NormRows {
  int64_t rows = 0, width = 0, counted = 0;
};
// sum = x + delta (rounded; delta null: x itself is normed and sum is not written), normed = sum / rms(sum) * weight.
// One block a row.
void add_rms_norm_forward(const Bf16* x, const Bf16* delta, const Bf16* weight, float eps, const NormRows& rows,
                          Bf16* sum, Bf16* normed, cudaStream_t stream, bool early = false);

// Rows of partial sums that the backward below writes.
int64_t norm_partials(int64_t rows, int64_t width);
// x is the normed input. dx = gradient through the norm + dsum (null: 0), rounded once. partial [norm_partials, width]
// (null: the weight's gradient is not wanted) goes to reduce_partials.
void rms_norm_backward(const Bf16* x, const Bf16* dnormed, const Bf16* dsum, const Bf16* weight, float eps,
                       const NormRows& rows, Bf16* dx, float* partial, cudaStream_t stream);

// out [width] = sum of the rows of partial [rows, width], rounded once.
void reduce_partials(const float* partial, int64_t rows, int64_t width, Bf16* out, cudaStream_t stream);

// silu(gate) * up: out [rows, width]; rows of gate and up begin `stride` elements after each other.
void swiglu_forward(const Bf16* gate, const Bf16* up, int64_t stride, int64_t rows, int64_t width, Bf16* out,
                    cudaStream_t stream);
// dgate and dup have the stride of gate and up; dy is contiguous.
void swiglu_backward(const Bf16* gate, const Bf16* up, const Bf16* dy, int64_t stride, int64_t rows, int64_t width,
                     Bf16* dgate, Bf16* dup, cudaStream_t stream);

// Which ids a table has: [first, first + count) of `vocabulary`.
struct EmbedRange {
  int64_t first = 0, count = 0, vocabulary = 0;
};
// out[t] = table[ids[t] - first], or zeros where another table has the id, and for t from `tokens` to `rows`. An id
// outside the vocabulary gives a row of NaN and is noted for take_bad_id.
void embed_forward(const Bf16* table, const int64_t* ids, const EmbedRange& range, int64_t tokens, int64_t rows,
                   int64_t width, Bf16* out, cudaStream_t stream);
struct BadId {
  int64_t token = -1;  // -1: none
  int64_t id = 0;
};
// The bad id of this device noted first since the last call, after waiting for `stream`. Forgets it.
cudaError_t take_bad_id(BadId* found, cudaStream_t stream);

// accumulator [vocab, width] (Bf16, or float when `wide`) += rows of dy [tokens, width], by id. sorted_ids ascend and
// order holds the token each came from, tokens of one id ascending. The rows of an id are summed in float32 in that
// order and added at once. Ids outside the vocabulary are passed over.
void embed_backward(const Bf16* dy, const int64_t* sorted_ids, const int64_t* order, int64_t tokens, int64_t vocab,
                    int64_t width, void* accumulator, bool wide, cudaStream_t stream);

// Heads of one pass over fused query, key and value rows: qkv [tokens, (q_heads + 2 kv_heads) * head_dim], head_dim 64,
// 128 or 256. A position outside the table gives NaN.
struct QkvRows {
  int64_t tokens = 0;
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  const Bf16* qkv = nullptr;
  const Bf16* q_norm = nullptr;  // [head_dim]; both null: no norm
  const Bf16* k_norm = nullptr;
  float eps = 0;
  const float* table = nullptr;  // [table_rows, 2, head_dim / 2]: cosines, then sines
  int64_t table_rows = 0;
  const int64_t* positions = nullptr;  // [tokens]
};
// q [tokens, q_heads, head_dim]. Row t of k and v goes to row rows[t] (rows null: t) of k and v [.., kv_heads,
// head_dim]; a negative row is not written. v null: v is not copied.
void split_qkv_forward(const QkvRows& in, Bf16* q, Bf16* k, Bf16* v, const int64_t* rows, cudaStream_t stream,
                       bool early = false);

// Rows of partial sums of the backward below; 0 where there is no norm.
int64_t split_qkv_partials(const QkvRows& in);
// dqkv like qkv. partial [split_qkv_partials, 2 * head_dim] holds sums for q_norm, then k_norm; for reduce_partials.
// in.qkv is read only where there is a norm.
void split_qkv_backward(const QkvRows& in, const Bf16* dq, const Bf16* dk, const Bf16* dv, Bf16* dqkv, float* partial,
                        cudaStream_t stream);

// moves: device array [count, 3] of {from, to, rows}. Copies those rows in each of the buffers whose addresses are in
// `buffers` (device array). Row bytes: a multiple of 16. No target may meet another range of the call. most_rows: of
// one move, for the shape of the launch.
void copy_arena_rows(void* const* buffers, int64_t buffer_count, int64_t row_bytes, const int64_t* moves, int64_t count,
                     int64_t most_rows, cudaStream_t stream);
// The same one after another, each with the meaning of memmove, whatever they meet. Less parallel: a thread for every
// 16 bytes of a row in all buffers.
void move_arena_rows(void* const* buffers, int64_t buffer_count, int64_t row_bytes, const int64_t* moves, int64_t count,
                     cudaStream_t stream);

}  // namespace trireme::cuda
