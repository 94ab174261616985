// Mixtures of experts, alone on a device: a router sends each row to a few of many small MLPs and adds up what these
// give. Row-exact like every op: a row's result depends neither on the other rows nor on how many an expert gets.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "base/error.h"

namespace trireme {

// A row whose router logits are not finite (kData). `row` is the call's, or, once a model has said in which of its
// layers that was, the pass's: whoever made the batch knows whose it is.
class RouterError final : public Error {
 public:
  explicit RouterError(int64_t row, int64_t layer = -1);
  int64_t row() const { return row_; }
  int64_t layer() const { return layer_; }

 private:
  int64_t row_, layer_;
};

struct RouterCall;

struct ExpertShape {
  int64_t experts = 0;
  int64_t per_token = 0;       // experts that a row is sent to
  bool normalize = true;       // their weights add up to 1; else they are the probabilities among all experts
  bool wide_router = false;    // logits are summed in float64, not float32
  int64_t combine_blocks = 0;  // runs of experts by id whose results are added up and rounded together; divides experts
};

struct ExpertWeights {
  at::Tensor router;   // [experts, hidden]
  at::Tensor gate_up;  // [experts * 2 * width, hidden]: of each expert the gate's rows, then up's
  at::Tensor down;     // [experts * hidden, width]
};

// Where rows go. A row's choices are in the order of the experts' ids; sorted rows are by expert, then by row.
struct Routes {
  at::Tensor experts;        // [rows, per_token] int32
  at::Tensor weights;        // [rows, per_token] float32 (float64 for float64)
  at::Tensor offsets;        // [experts + 1] int32: the first sorted row of each expert
  at::Tensor rows;           // [rows * per_token] int32: the row that each sorted row is
  at::Tensor places;         // [rows, per_token] int32: the sorted row of each choice
  at::Tensor probabilities;  // [rows, experts] float32 (float64 for float64); only where asked for
};

// x [rows, hidden] in the model's dtype. Logits are sums over `hidden` in one fixed order; softmax over all experts;
// the largest `per_token` of them, of equal ones those of lower id. Not finite logits: RouterError that names the first
// such row (CUDA: weights of NaN). `sorted` is given x's rows as they are sorted [rows * per_token, hidden]; null: they
// are not wanted. No autograd.
Routes route(const at::Tensor& x, const at::Tensor& router, const ExpertShape& shape, bool probabilities = false,
             at::Tensor* sorted = nullptr);

// x [offsets.back(), in] . weight [experts * out, in]: rows offsets[e] .. offsets[e + 1] times expert e's matrix ^T ->
// [offsets.back(), out]. A row has the bits of linear with that matrix. `most`: rows of an expert, at most; no bit
// depends on it. No autograd.
at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets, int64_t most);

// What backward of a mixture computes again instead of keeping it.
struct ExpertsAgain {
  std::function<at::Tensor()> x = nullptr;  // gives x, as in linear_again; empty: x is kept
  bool gate_up = false;                     // before the activation
};

// y [rows * per_token, hidden] of sorted rows -> [rows, hidden]: in each block of experts, weight times result is added
// from +0 by ascending id in float32 and rounded to y's dtype; these are added in order in float32 and rounded. A block
// without a choice adds nothing, so the sum is the same wherever blocks were made. No autograd.
at::Tensor combine(const at::Tensor& y, const Routes& routes, const ExpertShape& shape);

// The whole MLP: x [rows, hidden] -> [rows, hidden]. Backward reaches x through experts and router; the router's own
// gradient where it is a leaf that wants one. Kept for backward: the routes, and what `again` does not say otherwise
// of, which changes no bit. `watch` is told the routes of a call that records gradients; may be null.
at::Tensor mixture_of_experts(const at::Tensor& x, const ExpertWeights& weights, const ExpertShape& shape,
                              ExpertsAgain again = {}, std::shared_ptr<const RouterCall> watch = nullptr);

// Start-up self-test on CUDA: compares grouped products of many sizes of groups with linear, matrix by matrix. Of our
// kernel and the library's what has other bits is switched off, with a warning, and the other one computes all. False:
// both have, and rows are not exact.
bool grouped_rows_are_exact(int64_t experts, int64_t hidden, int64_t width, at::Device device);

}  // namespace trireme
