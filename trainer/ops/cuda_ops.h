// What ops.h and the model's cache have done on a CUDA device: everything that code outside of cuda/ calls there.
// Builds with CUDA link cuda/; the others link no_cuda/, where each of these says that there is no CUDA. No header of
// CUDA's is needed here, and callers come only with tensors on a device.
//
// Everything is in bfloat16. Determinism class: forwards are row-exact, backwards give the same bits in every run of
// the same shapes. Forwards do not synchronise and take memory from LibTorch's allocator only: legal in stream capture,
// where nothing else is said. What a kernel does not take throws Error(kUser).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "trainer/ops/attention_runs.h"
#include "trainer/ops/expert_rows.h"
#include "trainer/ops/experts.h"
#include "trainer/ops/ops.h"

namespace trireme::cuda {

bool built();  // whether this program has CUDA; not whether the machine has a GPU

// ---- row-local ops and fused steps (elementwise/) -----------------------------------------------------------------

// With autograd. Widths: rms_norm and add_rms_norm multiples of 8 from 64 to 16,384, the others multiples of 8;
// head_dim 64, 128 or 256.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, int64_t counted = 0);
NormResult add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps,
                        int64_t counted = 0);
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
at::Tensor swiglu_halves(const at::Tensor& gate_up);

// parts [ranks, ...] -> their sum in float32 from +0 in the order of ranks, rounded once [...]: the definition of
// trainer/parallel/exchange.h. A row has a multiple of 8 elements. No autograd.
at::Tensor ordered_sum(const at::Tensor& parts);

// An id outside the vocabulary cannot throw here, for the host does not wait: its row becomes NaN and the id is noted
// on the device (throw_on_bad_ids). The gradient goes straight into weight.grad() (bfloat16 or float32) where that is
// defined and contiguous, so that no [vocab, hidden] temporary exists.
at::Tensor embed(const at::Tensor& weight, const at::Tensor& ids);
at::Tensor embed_part(const at::Tensor& weight, const at::Tensor& ids, const EmbeddingPart& part);
// Waits for the current stream of `device`. Throws Error(kData) that names an id outside the vocabulary seen by embed
// since the last call, and its place in that call.
void throw_on_bad_ids(at::Device device);

// v is a view of qkv, except where autograd records and qkv is not needed again: then a copy, so that qkv can go.
// A position outside the table gives NaN.
Qkv split_qkv(const at::Tensor& qkv, const at::Tensor& q_norm, const at::Tensor& k_norm, const at::Tensor& table,
              const at::Tensor& positions, const QkvLayout& layout);
// Reads plan.token_rows only; a token whose row is negative is not stored.
at::Tensor split_qkv_cached(const at::Tensor& qkv, const at::Tensor& q_norm, const at::Tensor& k_norm,
                            const at::Tensor& table, const at::Tensor& positions, const QkvLayout& layout,
                            const at::Tensor& arena_k, const at::Tensor& arena_v, const CachePlan& plan);

// The addresses of `tensors` as a device array [n] int64, for copy_arena_rows. Waits for the device.
at::Tensor device_addresses(const std::vector<at::Tensor>& tensors);
// For each {from, to, rows}: copies rows of `row_bytes` (a multiple of 16) from `from` on to `to` on, in every buffer
// of `addresses`, in one launch. `ordered`: one after another, each with the meaning of memmove; else all at once,
// faster, and no target may meet another range of the call. Does not wait; not for stream capture.
void copy_arena_rows(const at::Tensor& addresses, int64_t row_bytes, const std::vector<std::array<int64_t, 3>>& moves,
                     bool ordered);

// ---- linear (gemm/) -----------------------------------------------------------------------------------------------

// x [tokens, in] bf16, weight [out, in] bf16, bias [out] bf16 or undefined -> [tokens, out] bf16. x may be a view with
// a row stride. Up to own_rows_limit() rows our kernels compute it where they take the shape (`in` a multiple of 64,
// `out` of 8); else cublasLt, fewer than 16 rows padded. Does not synchronise (but for the trials of a DecodeScope);
// legal in stream capture.
at::Tensor linear_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
// The same into rows of a contiguous [tokens, out].
void linear_forward_into(const at::Tensor& y, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// silu(gate) * up: weight [2 * width, in], the gate's rows first -> [tokens, width]. The bits of swiglu_halves over
// linear_forward, in one kernel where our kernel computes it. No autograd.
at::Tensor gate_up_swiglu(const at::Tensor& x, const at::Tensor& weight);

// dy [tokens, out] . weight [out, in] -> [tokens, in] bf16. Deterministic, not row-exact.
at::Tensor linear_backward_input(const at::Tensor& dy, const at::Tensor& weight);
// The same into rows of a contiguous [tokens, in].
void linear_backward_input_into(const at::Tensor& dx, const at::Tensor& dy, const at::Tensor& weight);

// accumulator [out, in] (bf16 or fp32) += dy^T . x: one product whose sum is added in fp32 and rounded once.
void linear_backward_weight(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& accumulator);

// Up to how many rows our kernels compute; 0: cublasLt computes everything; kWherePaid: where they are faster. That is
// found by trial in a DecodeScope; outside of one it is up to 64 rows of weights with at least 65,536 outputs, the
// heads of vocabularies. The bits are the same. Process-wide; not while ops run. At most kMostOwnRows
// (gemm/gemm_choice.h).
int64_t own_rows_limit();
void set_own_rows_limit(int64_t rows);
inline constexpr int64_t kWherePaid = -1;

// While one lives, this thread launches decode steps: the same products again and again, each waiting for the one
// before. Then
// - the first time a product comes, outside of a capture, our plans and cublasLt are tried with a cold cache and the
//   fastest stays, for this process (gemm/gemm_choice.h);
// - products of our kernels, and the short kernels after them, may begin before the kernel ahead of them in the stream
//   has ended (SkinnyGemmArgs::overlap): only where no kernel that may still run writes weights, so not straight after
//   an optimizer step in the same stream. So may decode attention (AttentionArgs::early).
class DecodeScope final {
 public:
  DecodeScope();
  ~DecodeScope();
  DecodeScope(const DecodeScope&) = delete;
  DecodeScope& operator=(const DecodeScope&) = delete;

 private:
  bool before_;
};

// ---- experts (experts/) -------------------------------------------------------------------------------------------

// Contracts of the same names in experts.h and expert_rows.h, in bf16. `hidden` is a multiple of 128, the experts'
// width of 64; up to 512 experts, 16 a row. Forwards are legal in stream capture.
Routes route(const at::Tensor& x, const at::Tensor& router, const ExpertShape& shape, bool probabilities,
             at::Tensor* sorted);
at::Tensor gather_rows_by(const at::Tensor& x, const at::Tensor& rows);
at::Tensor gather_part(const at::Tensor& x, const at::Tensor& rows, const at::Tensor& offsets);
at::Tensor combine(const at::Tensor& y, const Routes& routes, const ExpertShape& shape);
at::Tensor block_sums(const at::Tensor& y, const at::Tensor& places, const at::Tensor& weights,
                      const at::Tensor& begins);
at::Tensor sum_blocks(const at::Tensor& blocks, const at::Tensor& places, const at::Tensor& begins);
at::Tensor part_block_sums(const at::Tensor& y, const Routes& routes, const ExpertShape& shape, int64_t first_block,
                           int64_t blocks);
at::Tensor sum_in_order(const at::Tensor& blocks);
at::Tensor grouped_part(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets, bool swiglu);
// Whether it takes so many sorted rows; not where the start-up test has switched our kernel off.
bool grouped_part_supported(int64_t sorted_rows, int64_t experts, int64_t hidden, int64_t width);
at::Tensor sum_places(const at::Tensor& y, const at::Tensor& places);
ExpertGradients expert_gradients(const at::Tensor& gate_up, const at::Tensor& upstream, const Routes& routes);
// `most`: rows of an expert, at most. Few by our kernel, which reads only experts that have any; more by the library's
// grouped GEMM, where the start-up test found its bits equal, else by ours too.
at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets, int64_t most);
// silu(gate) * up of grouped_linear, its bits. weight [experts * 2 * width, in].
at::Tensor grouped_gate_up_swiglu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets,
                                  int64_t most);
at::Tensor grouped_backward_input(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& offsets);
std::function<at::Tensor()> offsets_on_host(const at::Tensor& offsets);  // not in stream capture
at::Tensor grouped_backward_weight(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& offsets,
                                   const at::Tensor& weight, const at::Tensor& accumulator);
bool grouped_rows_are_exact(int64_t experts, int64_t hidden, int64_t width, at::Device device);

// ---- attention (attention/) ---------------------------------------------------------------------------------------

// Elements of q, or of keys, that the kernels' 32-bit row offsets reach.
inline constexpr int64_t kAddressable = int64_t{1} << 32;

// Contracts of the same names in ops.h: head_dim 64 or 128, any number of query heads a key head (decode: up to 16).
// Inputs may have any row stride that is a multiple of 8 elements; other layouts are copied. attention_packed keeps the
// device arrays of the last few `starts`, so that the layers of a model share one copy to the device; it must not be
// captured into a graph. The others may be. With a prefix for each sequence it is attention_shared: keys and values are
// laid out once more, each sequence's behind its prefix's.
at::Tensor attention_packed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& starts, const std::vector<int64_t>& prefix, double scale);
at::Tensor attention_runs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::shared_ptr<const AttentionRuns>& runs, double scale);
CachePlan make_cache_plan(std::vector<CacheRun> runs, int64_t group, at::Device device);
at::Tensor attention_cached(const at::Tensor& q, const at::Tensor& arena_k, const at::Tensor& arena_v,
                            const CachePlan& plan, double scale);
void append_cached(const at::Tensor& k, const at::Tensor& v, const at::Tensor& arena_k, const at::Tensor& arena_v,
                   const CachePlan& plan);

// ---- vocabulary (vocabulary/) -------------------------------------------------------------------------------------

// The semantics are those of ops.h with these differences, all because the host is not waited for:
//  - a target outside the vocabulary, a target that the filters drop where allow_filtered is off, and a row whose
//    logits are not finite give a log-prob of NaN (the caller checks that its loss is finite);
//  - temperature, top_p and min_p are rounded to float32.

// Rows of bf16 logits held at a time: all of them where they fit, else whole multiples of 128.
int64_t vocabulary_chunk_rows(int64_t rows, int64_t vocab);

// options were checked. entropy is undefined where not asked for. `split`: the head is a part of one (SplitLogits).
LogprobResult token_logprobs(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                             const LogprobOptions& options, bool with_entropy, const SplitLogits* split = nullptr);

// Neither synchronises nor reads host memory: legal in stream capture.
DeviceSamples sample_tokens_on_device(const at::Tensor& hidden, const at::Tensor& head, const DeviceSampling& rows,
                                      const SplitLogits* split = nullptr);

// The same with arguments and results on the host; waits for the device.
SampleResult sample_tokens(const at::Tensor& hidden, const at::Tensor& head, const std::vector<SampleRow>& rows);

}  // namespace trireme::cuda
