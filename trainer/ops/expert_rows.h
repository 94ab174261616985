// The steps of mixture_of_experts, of its backward and of split_mixture_of_experts between the products. On CUDA they
// are cuda_ops.h's.
#pragma once

#include <functional>

#include "trainer/ops/experts.h"

namespace trireme {

// offsets, rows and places of routes whose choices are `experts` of these many. On the host.
void sort_by_expert(Routes& routes, int64_t experts);

// combine in two steps, with its bits. `begins` [sums + 1] int32: sum i is of choices begins[i] .. begins[i+1],
// which are y's rows places[...] int32 with weights[...]: weight times row from +0 in float32, rounded to y's dtype ->
// [sums, hidden].
at::Tensor block_sums(const at::Tensor& y, const at::Tensor& places, const at::Tensor& weights,
                      const at::Tensor& begins);
// Row i: blocks' rows places[begins[i]], ..., added in order from +0 in float32 and rounded -> [rows, hidden].
at::Tensor sum_blocks(const at::Tensor& blocks, const at::Tensor& places, const at::Tensor& begins);

// Where a rank routes everybody's rows and computes its own experts', `blocks` blocks from `first_block` on: their
// sums, of every row [rows, blocks, hidden], +0 where it chose none of a block. y's other rows are not read.
at::Tensor part_block_sums(const at::Tensor& y, const Routes& routes, const ExpertShape& shape, int64_t first_block,
                           int64_t blocks);
// combine's second step where a row has all of its blocks: [rows, blocks, hidden] -> [rows, hidden]. A sum of zeros
// adds nothing.
at::Tensor sum_in_order(const at::Tensor& blocks);

// grouped_linear of a part of the experts: `offsets` [experts + 1] are those of their rows among all sorted rows; other
// rows of the result are not written; theirs of x, which need not be written either, show in none. `swiglu`: of gate
// and up, behind the activation. CUDA: by our kernel alone, for as many rows as grouped_part_supported takes.
at::Tensor grouped_part(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets, bool swiglu);

// Rows of x by index [n] int32 -> [n, width].
at::Tensor gather_rows_by(const at::Tensor& x, const at::Tensor& rows);
// The same for grouped_part: rows of the result that `offsets` are not of are not written.
at::Tensor gather_part(const at::Tensor& x, const at::Tensor& rows, const at::Tensor& offsets);

// For each row the sum over its places of y, by ascending expert, in float32, rounded once: [rows, width].
at::Tensor sum_places(const at::Tensor& y, const at::Tensor& places);

// Of sorted rows: gate_up [n, 2 width] before the activation, `upstream` [n, width] the gradient of the activation's
// result without the routes' weights.
struct ExpertGradients {
  at::Tensor weighted;  // [n, width]: the activation's result times the row's weight
  at::Tensor gate_up;   // [n, 2 width]: gradient
  at::Tensor weights;   // [rows, per_token]: gradient of the routes' weights, in their dtype
};
ExpertGradients expert_gradients(const at::Tensor& gate_up, const at::Tensor& upstream, const Routes& routes);

// Gradient of the router's logits [rows, experts] in the weights' dtype from that of the weights.
at::Tensor router_gradient(const at::Tensor& weights_gradient, const Routes& routes, const ExpertShape& shape);

// dy [n, out] of sorted rows times the experts' matrices [experts * out, in] -> [n, in]. Deterministic.
at::Tensor grouped_backward_input(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& offsets);
// A copy of offsets for grouped_backward_weight, begun now and waited for when it is asked for: then nothing of what
// the device was given later.
std::function<at::Tensor()> offsets_on_host(const at::Tensor& offsets);
// Of each expert dy^T . x -> [experts * out, in], added to `accumulator` where that is defined (CUDA), else a new one.
// `offsets` lie on the host. Deterministic.
at::Tensor grouped_backward_weight(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& offsets,
                                   const at::Tensor& weight, const at::Tensor& accumulator);

}  // namespace trireme
