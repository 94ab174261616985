// ops: the model's operations with explicit forward and backward. Every forward is row-exact: the bits of a row depend
// on that row (and, for attention, on the keys before it) only, never on how many rows or sequences share the call.
//
// Devices: CPU float32, bfloat16 and float64 (float64 is for tests). Anything else throws Error(kUser) that names the
// op, the device and the dtype. Autograd records when grad mode is on and an input requires grad.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"

namespace trireme {

// ---- linear -------------------------------------------------------------------------------------------------------

// x [tokens, in] . weight [out, in]^T + bias [out] (undefined: none) -> [tokens, out].
// Write trireme::linear: without it, argument-dependent lookup may take at::linear, which is not row-exact.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
// The same, but x is not kept for backward: `again` is called there, with grad mode off, and gives the bits of x. What
// it captures is kept instead.
at::Tensor linear_again(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                        std::function<at::Tensor()> again);

// How linear computes its forward on CPU. On CUDA other rules hold (cuda_ops.h).
enum class LinearMode {
  kRows,     // our kernel, one fixed order of additions per output element: exact on every machine. The default.
  kLibrary,  // LibTorch's product with rows padded to at least 16: exact only where linear_rows_are_exact() says so
};
LinearMode linear_mode();
void set_linear_mode(LinearMode mode);  // process-wide; not while ops run

struct LinearShape {
  int64_t in = 0;
  int64_t out = 0;
  bool gate_up = false;  // decoding computes it with the activation (gate_up_swiglu)
  bool bias = false;
  bool head = false;  // of the vocabulary: its rows are computed in chunks
};
// Start-up self-test: compares the bits of rows computed in batches of many sizes and places with those of one big
// batch, in the current mode, for these weight shapes. About 10 ms a small shape; on CUDA decoding's choice of kernels
// for each number of rows is made here, which takes seconds. Where only our kernels for decoding have other bits than
// the library there, they are switched off, the log says so, and the answer is yes. `most_rows`: of a micro-batch or a
// prefill; on CUDA, where the library takes other kernels for more rows, calls of up to so many are compared as well.
bool linear_rows_are_exact(const std::vector<LinearShape>& shapes, at::ScalarType dtype, at::Device device = at::kCPU,
                           int64_t most_rows = 0);
// Runs the self-test; where the library fails it, switches to kRows and says so in the log. Returns the mode in force.
LinearMode choose_linear_mode(const std::vector<LinearShape>& shapes, at::ScalarType dtype);

// ---- row-local ops ------------------------------------------------------------------------------------------------

// x [..., width] * rsqrt(mean(x^2) + eps) * weight [width], statistics in float32 (float64 for float64). Of padded rows
// the mean is over the first `counted` elements (0: all); the others, and the weight's, are zeros, and so are their
// results and gradients.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, int64_t counted = 0);

// silu(gate) * up, all [tokens, width].
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

// weight [vocab, hidden], ids [tokens] int64 -> [tokens, hidden]. An id outside the vocabulary throws and names it.
// Rows of any matrix may be taken so; gradients of equal ids are added in the order of the tokens, in float32 at least.
at::Tensor embed(const at::Tensor& weight, const at::Tensor& ids);
// Of an embedding that is split over ranks, the part with ids [first, first + weight rows): rows of other ids are
// zeros, and so are those behind the ids, up to `rows`. An id outside the whole vocabulary is an error as in embed.
struct EmbeddingPart {
  int64_t first = 0;
  int64_t vocabulary = 0;  // of the whole
  int64_t rows = 0;        // of the result, at least as many as ids
};
at::Tensor embed_part(const at::Tensor& weight, const at::Tensor& ids, const EmbeddingPart& part);

struct RopeOptions {
  int64_t head_dim = 0;
  double theta = 10000.0;
  // Linear: positions divided by factor. Llama 3: "The Llama 3 Herd of Models" (rope_type llama3). YaRN: Peng et al.
  // 2023. Dynamic: rotations change with the length of the sequence beyond original_max_position, which no row-exact
  // forward can follow: there is none beyond it, and up to it nothing is scaled.
  enum class Scaling { kNone, kLinear, kLlama3, kYarn, kDynamic } scaling = Scaling::kNone;
  double factor = 1.0;
  double low_freq_factor = 1.0;  // Llama 3
  double high_freq_factor = 4.0;
  int64_t original_max_position = 8192;
  double beta_fast = 32.0;  // YaRN: rotations over the original length from which nothing is interpolated, and up to
  double beta_slow = 1.0;   // which everything is
  bool truncate = true;     // YaRN: the pairs of elements these stand for are rounded outwards
  double attention_factor = 1.0;  // YaRN: cos and sin are multiplied by it
};
// cos in [..., 0, :] and sin in [..., 1, :]: [positions.size(0), 2, head_dim / 2] float32 (float64 when asked),
// computed element by element so that a position always has the same bits. With dynamic scaling a position from
// original_max_position on is an error.
at::Tensor rope_table(const at::Tensor& positions, const RopeOptions& options, at::ScalarType dtype = at::kFloat);
// x [tokens, heads, head_dim], halves rotated (Hugging Face's layout), table from rope_table.
at::Tensor rope(const at::Tensor& x, const at::Tensor& table);

// ---- a layer's fused steps: one kernel each on CUDA, compositions of the ops above on CPU ------------------------

// sum = x + delta rounded to the dtype (delta undefined: sum is x), normed = rms_norm(sum, weight, eps, counted). x,
// delta [tokens, width].
struct NormResult {
  at::Tensor sum;
  at::Tensor normed;
};
NormResult add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps,
                        int64_t counted = 0);

// gate_up [tokens, 2 * width], gate in the first half of a row -> silu(gate) * up [tokens, width].
at::Tensor swiglu_halves(const at::Tensor& gate_up);

struct QkvLayout {
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  double eps = 1e-6;  // of the head norms
};
struct Qkv {
  at::Tensor q;  // [tokens, q_heads, head_dim], normed and rotated
  at::Tensor k;  // [tokens, kv_heads, head_dim], normed and rotated
  at::Tensor v;  // [tokens, kv_heads, head_dim]; may be a view of qkv with its row stride
};
// qkv [tokens, (q_heads + 2 kv_heads) * head_dim]: the rows of q, k and v one after another. q_norm, k_norm [head_dim],
// undefined where the model has none. table [positions, 2, head_dim / 2] of rope_table over 0, 1, ...; positions
// [tokens] int64 index it. On CUDA norm and rotation round once, at the end.
Qkv split_qkv(const at::Tensor& qkv, const at::Tensor& q_norm, const at::Tensor& k_norm, const at::Tensor& table,
              const at::Tensor& positions, const QkvLayout& layout);

// ---- attention ----------------------------------------------------------------------------------------------------

// Causal attention with grouped query heads (query head h reads key head h * kv_heads / q_heads), softmax scale
// 1/sqrt(head_dim) unless given. Sequence s owns rows starts[s] .. starts[s+1]).
// q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, q_heads, head_dim].
at::Tensor attention_packed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& starts, double scale = 0.0);

// attention_packed where sequences share their first keys: the rows of sequence s see all rows of sequence prefix[s],
// then their own (-1: only their own, as there). A sequence that is a prefix has none itself and comes earlier; it has
// rows. Row bits are those of attention_packed over the prefix's rows and its own one after another; the gradient of a
// prefix's keys and values is the sum over those that see them, in their order, in float32 (float64 for float64).
at::Tensor attention_shared(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& starts, const std::vector<int64_t>& prefix, double scale = 0.0);

// One run of consecutive new tokens of one sequence, its keys contiguous in the arena.
struct CacheRun {
  int64_t extent_start = 0;  // arena row of the sequence's first token
  int64_t past = 0;          // rows of it already in the arena
  int64_t count = 0;         // new rows: token i goes to arena row extent_start + past + i
};
// The runs of one cached pass, and on CUDA the same as device arrays, so that a captured graph can be replayed over new
// contents of them.
struct CachePlan {
  // CPU kernels read these only; may be empty where the device arrays are filled otherwise.
  std::vector<CacheRun> host_runs;
  at::Tensor token_rows;  // CUDA: [tokens] int64, arena row of each new token
  at::Tensor runs;        // CUDA: [4, R] int32: first query row, query rows, first arena row, keys (new ones included)
  at::Tensor items;       // CUDA: [2, I] int32: run and tile of query rows of each block of work
  // CUDA: every run has one new token; item i is run i, tile 0. There may be fewer runs than tokens: the others are
  // padding, whose rows of the result are undefined.
  bool decode = false;
  // CUDA decode: keys of the longest run and of all of them, by which the kernel is chosen; 0: not known. No bit
  // depends on them.
  int64_t longest_keys = 0, total_keys = 0;
};
// Fills the device arrays for `device` (nothing to do on CPU). `group`: query heads per key head.
CachePlan make_cache_plan(std::vector<CacheRun> runs, int64_t group, at::Device device);

// q [tokens, q_heads, head_dim] of the new tokens (rows of all segments one after another); arena_k and arena_v
// [capacity, kv_heads, head_dim] already hold the new keys. No autograd. Row bits equal attention_packed's. On CUDA a
// run with `past` > 0 and more than one new token must begin at a multiple of kChunkAlignment.
at::Tensor attention_cached(const at::Tensor& q, const at::Tensor& arena_k, const at::Tensor& arena_v,
                            const CachePlan& plan, double scale = 0.0);
inline constexpr int64_t kChunkAlignment = 128;
// Writes the new k/v [tokens, kv_heads, head_dim] into the arena.
void append_cached(const at::Tensor& k, const at::Tensor& v, const at::Tensor& arena_k, const at::Tensor& arena_v,
                   const CachePlan& plan);
// split_qkv and append_cached in one: k and v go straight into the arena. Returns q. No autograd.
at::Tensor split_qkv_cached(const at::Tensor& qkv, const at::Tensor& q_norm, const at::Tensor& k_norm,
                            const at::Tensor& table, const at::Tensor& positions, const QkvLayout& layout,
                            const at::Tensor& arena_k, const at::Tensor& arena_v, const CachePlan& plan);

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

// The same of logits [rows, vocab] that are there whole, as a head that is split over ranks gathers them; the gradient
// comes back in their dtype. CPU only. `with_entropy` false: entropy is empty.
LogprobResult logprobs_of_logits(const at::Tensor& logits, const at::Tensor& targets, const LogprobOptions& options,
                                 bool with_entropy);

// hidden [rows, hidden] . score [1, hidden] -> [rows] float32 (float64 for float64): products, then halves of the row
// added to each other, so that every row has one order of additions on every device. The gradient of score is summed in
// float32.
at::Tensor token_values(const at::Tensor& hidden, const at::Tensor& score);

// A row of samples whose logits are not finite (kData): whoever made the rows knows whose it is.
class LogitsError final : public Error {
 public:
  explicit LogitsError(int64_t row)
      : Error(ErrorKind::kData, "row " + std::to_string(row) + ": the model's logits are not finite"), row_(row) {}
  int64_t row() const { return row_; }

 private:
  int64_t row_;
};

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
// The same of logits [rows, vocab] that are there whole; the log-probs have the bits of logprobs_of_logits. CPU only.
SampleResult sample_logits(const at::Tensor& logits, const std::vector<SampleRow>& rows);

// Sampling that never waits for the host: the arguments of each row as device arrays, the results as device tensors.
// CUDA only; a captured graph may be replayed over new contents.
struct DeviceSampling {
  at::Tensor keys;          // [rows, 3] int64: seed, sample id, position
  at::Tensor parameters;    // [rows, 4] float32: temperature, top_p, min_p, greedy (0 or 1)
  at::Tensor top_k;         // [rows] int32
  bool any_filter = false;  // some row has top_k > 0, top_p < 1 or min_p > 0: the slower kernel runs
};
struct DeviceSamples {
  at::Tensor ids;       // [rows] int64
  at::Tensor logprobs;  // [rows] float32; NaN where the row's logits are not finite
};
DeviceSamples sample_tokens_on_device(const at::Tensor& hidden, const at::Tensor& head, const DeviceSampling& rows);

// A head that ranks share, each some columns of the logits, and how these become whole rows: every rank gets every
// ranks-th part of a chunk's rows, and the same functions read them as on one rank, filters included. All of it is
// collective over the ranks, also without rows.
struct SplitLogits {
  int64_t vocabulary = 0;  // of the whole
  int64_t width = 0;       // columns of a rank, padding included: a multiple of 8
  int64_t rank = 0, ranks = 1;
  // [ranks * n, width], own columns of all rows -> [n, ranks * width], own rows whole; and back.
  std::function<at::Tensor(const at::Tensor& columns)> whole_rows;
  std::function<at::Tensor(const at::Tensor& rows)> own_columns;
  std::function<at::Tensor(const at::Tensor& own)> gather;  // [n] -> [ranks * n]
  std::function<DeviceSamples(const DeviceSamples& own)> gather_samples;
};
// token_logprobs and sample_tokens_on_device of a part of a head, on CUDA. `hidden`, targets and results are alike on
// all ranks; of hidden's gradient each rank gives a part, whose sum it is. `split` outlives the backward pass.
at::Tensor split_token_logprobs(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                                const LogprobOptions& options, const SplitLogits& split);
DeviceSamples sample_split_tokens_on_device(const at::Tensor& hidden, const at::Tensor& head,
                                            const DeviceSampling& rows, const SplitLogits& split);

// Logits [rows, vocab] float32, for tests and tools; materialises them.
at::Tensor head_logits(const at::Tensor& hidden, const at::Tensor& head);

}  // namespace trireme
