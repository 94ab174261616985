// GEMMs on CUDA through cublasLt, and through our own kernels where there are few rows (gemm_choice.h).
//
// Determinism class of the forward: row-exact. With a workspace of 1 KiB and algorithms that split no sum over `in`,
// every output element is one chain of additions in ascending order whatever the number of rows or the tile. Measured
// on H200 (cuBLAS 13.1): one set of row bits for 9 weight shapes and every row count from 16 to 16,384, at the default
// setting's speed. linear_rows_are_exact() checks it for the shapes of a model at start-up.
#pragma once

#include <ATen/core/Tensor.h>

namespace trireme::cuda {

// x [tokens, in] bf16, weight [out, in] bf16, bias [out] bf16 or undefined -> [tokens, out] bf16. x may be a view with
// a row stride. Up to own_rows_limit() rows our kernels compute it where they take the shape (`in` a multiple of 64,
// `out` of 8); else cublasLt, fewer than 16 rows padded. Does not synchronise (but for the trials of a DecodeScope);
// legal in stream capture.
at::Tensor linear_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// silu(gate) * up: weight [2 * width, in], the gate's rows first -> [tokens, width]. The bits of swiglu_halves over
// linear_forward, in one kernel where our kernel computes it. No autograd.
at::Tensor gate_up_swiglu(const at::Tensor& x, const at::Tensor& weight);

// Up to how many rows our kernels compute; 0: cublasLt computes everything; kWherePaid: where they are faster. That is
// found by trial in a DecodeScope; outside of one it is up to 64 rows of weights with at least 65,536 outputs, the
// heads of vocabularies. The bits are the same. Process-wide; not while ops run. At most kMostOwnRows
// (gemm_choice.h).
int64_t own_rows_limit();
void set_own_rows_limit(int64_t rows);
inline constexpr int64_t kWherePaid = -1;

// While one lives, this thread launches decode steps: the same GEMMs again and again, each waiting for the one
// before. Then
// - the first time a GEMM comes, outside of a capture, our plans and cublasLt are tried with a cold cache and the
//   fastest stays, for this process (gemm_choice.h);
// - GEMMs of our kernels, and the short kernels after them, may begin before the kernel ahead of them in the stream
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
// Whether the next kernel of this thread may: in a DecodeScope whose last GEMM was of our kernels. Behind others an
// early launch costs more than it saves.
bool may_begin_early();

// dy [tokens, out] . weight [out, in] -> [tokens, in] bf16. Deterministic, not row-exact.
at::Tensor linear_backward_input(const at::Tensor& dy, const at::Tensor& weight);

// accumulator [out, in] (bf16 or fp32) += dy^T . x: one GEMM whose sum is added in fp32 and rounded once.
void linear_backward_weight(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& accumulator);

// Workspace of the forward in bytes. More than the 1 KiB it has lets the library split sums again: for the test that
// shows that its default is not exact.
size_t forward_workspace_bytes();
void set_forward_workspace_bytes(size_t bytes);  // not while ops run; forgets the chosen algorithms

}  // namespace trireme::cuda
