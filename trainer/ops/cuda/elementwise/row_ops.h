// The row-local ops and fused steps of ops.h on CUDA in bfloat16, with autograd, and what else the row kernels serve.
//
// Determinism class: forwards are row-exact, backwards give the same bits in every run of the same shapes. Forwards do
// not synchronise and take memory from LibTorch's allocator only: legal in stream capture. Widths: rms_norm and
// add_rms_norm multiples of 8 from 64 to 16,384, the others multiples of 8; head_dim 64, 128 or 256. Anything else
// throws Error(kUser).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

#include "trainer/ops/ops.h"

namespace trireme::cuda {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
NormResult add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps);
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
at::Tensor swiglu_halves(const at::Tensor& gate_up);

// An id outside the vocabulary cannot throw here, for the host does not wait: its row becomes NaN and the id is noted
// on the device (throw_on_bad_ids). The gradient goes straight into weight.grad() (bfloat16 or float32) where that is
// defined and contiguous, so that no [vocab, hidden] temporary exists.
at::Tensor embed(const at::Tensor& weight, const at::Tensor& ids);
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

}  // namespace trireme::cuda
