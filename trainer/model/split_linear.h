// Products of a layer that tensor ranks share, with the exchange of rows before or behind them, each beside the other:
// while rows travel, those that are there are multiplied. Packed passes; their rows are sharded over the ranks.
//
// Rows are cut by rank, so by their number only: who waits when changes no bit. A row of a forward product has its bits
// in any cut; gradients of inputs are products of one rank's rows at a time; a weight's gradient is one product of all
// rows. What a product reads is kept as each rank's own rows and gathered again in backward.
#pragma once

#include <ATen/core/Tensor.h>

#include "trainer/model/recomputation.h"
#include "trainer/parallel/communicator.h"

namespace trireme {

struct SplitRows {
  Communicator* tensor = nullptr;  // of several ranks, each with every size-th part of the rows, the last one padded
  int64_t rows = 0;                // of all ranks, without padding
  bool beside = true;              // false: every exchange is awaited where it begins
};

// gather_rows, then linear: `own` [n, in] of this rank -> [rows, out].
at::Tensor gathered_linear(const SplitRows& split, const Activation& own, const at::Tensor& weight,
                           const at::Tensor& bias);
// linear, then sum_to_rows: `x` [rows, in] -> [n, out], padding zero.
at::Tensor summed_linear(const SplitRows& split, const Activation& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace trireme
