// ops: the model's operations with explicit forward and backward. Every forward is row-exact: the bits of a row depend
// on that row (and, for attention, on the keys before it) only, never on how many rows or sequences share the call.
//
// Devices: CPU float32, bfloat16 and float64 (float64 is for tests). Anything else throws Error(kUser) that names the
// op, the device and the dtype. Autograd records when grad mode is on and an input requires grad.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace trireme {

// ---- linear -------------------------------------------------------------------------------------------------------

// x [tokens, in] . weight [out, in]^T + bias [out] (undefined: none) -> [tokens, out].
// Write trireme::linear: without it, argument-dependent lookup may take at::linear, which is not row-exact.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// How linear computes its forward on CPU.
enum class LinearMode {
  kRows,     // our kernel, one fixed order of additions per output element: exact on every machine. The default.
  kLibrary,  // LibTorch's product with rows padded to at least 16: exact only where linear_rows_are_exact() says so
};
LinearMode linear_mode();
void set_linear_mode(LinearMode mode);  // process-wide; not while ops run

struct LinearShape {
  int64_t in = 0;
  int64_t out = 0;
};
// Start-up self-test: compares the bits of rows computed in batches of many sizes and places with those of one big
// batch, in the current mode, for these weight shapes. About 10 ms a small shape.
bool linear_rows_are_exact(const std::vector<LinearShape>& shapes, at::ScalarType dtype);
// Runs the self-test; where the library fails it, switches to kRows and says so in the log. Returns the mode in force.
LinearMode choose_linear_mode(const std::vector<LinearShape>& shapes, at::ScalarType dtype);

// ---- row-local ops ------------------------------------------------------------------------------------------------

// x [..., width] * rsqrt(mean(x^2) + eps) * weight [width], statistics in float32 (float64 for float64).
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

// silu(gate) * up, all [tokens, width].
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

// weight [vocab, hidden], ids [tokens] int64 -> [tokens, hidden]. An id outside the vocabulary throws and names it.
at::Tensor embed(const at::Tensor& weight, const at::Tensor& ids);

struct RopeOptions {
  int64_t head_dim = 0;
  double theta = 10000.0;
  // Linear scaling: positions divided by factor. Llama 3 scaling: see "The Llama 3 Herd of Models" (rope_type llama3).
  enum class Scaling { kNone, kLinear, kLlama3 } scaling = Scaling::kNone;
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_position = 8192;
};
// cos in [..., 0, :] and sin in [..., 1, :]: [positions.size(0), 2, head_dim / 2] float32 (float64 when asked),
// computed element by element so that a position always has the same bits.
at::Tensor rope_table(const at::Tensor& positions, const RopeOptions& options, at::ScalarType dtype = at::kFloat);
// x [tokens, heads, head_dim], halves rotated (Hugging Face's layout), table from rope_table.
at::Tensor rope(const at::Tensor& x, const at::Tensor& table);

// ---- attention ----------------------------------------------------------------------------------------------------

// Causal attention with grouped query heads (query head h reads key head h * kv_heads / q_heads), softmax scale
// 1/sqrt(head_dim) unless given. Sequence s owns rows starts[s] .. starts[s+1]).
// q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, q_heads, head_dim].
at::Tensor attention_packed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& starts, double scale = 0.0);

// One run of consecutive new tokens of one sequence, its keys contiguous in the arena.
struct CacheRow {
  int64_t extent_start = 0;  // arena row of the sequence's first token
  int64_t past = 0;          // rows of it already in the arena
  int64_t count = 0;         // new rows: token i goes to arena row extent_start + past + i
};
// q [tokens, q_heads, head_dim] of the new tokens (rows of all segments one after another); arena_k and arena_v
// [capacity, kv_heads, head_dim] already hold the new keys. No autograd. Row bits equal attention_packed's.
at::Tensor attention_cached(const at::Tensor& q, const at::Tensor& arena_k, const at::Tensor& arena_v,
                            const std::vector<CacheRow>& rows, double scale = 0.0);
// Writes the new k/v [tokens, kv_heads, head_dim] into the arena.
void append_cached(const at::Tensor& k, const at::Tensor& v, const at::Tensor& arena_k, const at::Tensor& arena_v,
                   const std::vector<CacheRow>& rows);

// ---- vocabulary ---------------------------------------------------------------------------------------------------

// The distribution: softmax(logits / temperature) restricted to the kept tokens and renormalised. Filters apply in the
// order temperature, top_k (ties of the k-th stay), top_p (smallest prefix of the descending order, ties by id, whose
// mass reaches top_p; at least one), min_p (probability >= min_p * the largest).
struct LogprobOptions {
  double temperature = 1.0;  // > 0
  int64_t top_k = 0;         // 0: off
  double top_p = 1.0;        // 1: off
  double min_p = 0.0;        // 0: off
  // A target outside the kept tokens: error that names the row (false), or log-prob -inf with zero gradient (true).
  bool allow_filtered = false;
  bool filters() const { return top_k > 0 || top_p < 1.0 || min_p > 0.0; }
};

// log p(targets[i] | hidden[i]): hidden [rows, hidden], head [vocab, hidden], targets [rows] int64 -> [rows] float32
// (float64 for float64). Works on chunks of rows, forward and backward (recomputed), so that [rows, vocab] never
// exists; gradients of hidden and head are summed in float32.
at::Tensor token_logprobs(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                          const LogprobOptions& options);

struct LogprobResult {
  at::Tensor logprobs;  // [rows]
  at::Tensor entropy;   // [rows], nats, of the same distribution; differentiable
};
LogprobResult token_logprobs_and_entropy(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                                         const LogprobOptions& options);

// Names one random draw: same key, same number, whatever the batch, rank or order.
struct SampleKey {
  uint64_t seed = 0;
  uint64_t sample_id = 0;
  uint64_t position = 0;
};
struct SampleRow {
  LogprobOptions options;
  SampleKey key;
  bool greedy =
      false;  // the largest logit (smallest id among ties); its log-prob is still that of `options`' distribution
};
struct SampleResult {
  std::vector<int64_t> ids;     // [rows]
  std::vector<float> logprobs;  // [rows], the bits of token_logprobs on the same hidden, head and options
};
// hidden [rows, hidden], head [vocab, hidden], one SampleRow per row. Inverse CDF in id order. A greedy token that the
// filters drop cannot happen (the largest logit is always kept).
SampleResult sample_tokens(const at::Tensor& hidden, const at::Tensor& head, const std::vector<SampleRow>& rows);

// Logits [rows, vocab] float32, for tests and tools; materialises them.
at::Tensor head_logits(const at::Tensor& hidden, const at::Tensor& head);

}  // namespace trireme
