// A mixture of experts whose experts lie on several ranks: rows go to the ranks that hold experts they chose, and a row
// for each block of experts comes back. The bits are those of mixture_of_experts, whatever the number of ranks, where
// each expert is on one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include "topology/stages.h"
#include "trainer/ops/experts.h"
#include "trainer/ops/router_watch.h"
#include "trainer/parallel/communicator.h"

namespace trireme {

// An expert group, whose ranks hold as many experts each, by id in the order of ranks, `tensor` ranks in a row the same
// ones: each of these has an equal part of their width, and gets the rows of all. It outlives every backward pass.
struct ExpertRanks {
  Communicator* group = nullptr;
  int64_t experts = 0;             // of this rank; a multiple of a block's
  int64_t tensor = 1;              // ranks that share each expert
  int64_t rows_at_once = 1 << 15;  // received rows that are worked off together: bounds memory, changes no forward bit
};

// Of experts that several ranks share, a block's sum is: each rank's, from its part of the width and rounded, added in
// the order of these ranks as ordered_sum does. So a row's bits depend on how many share an expert, and on nothing
// else: not on the number of ranks, the other rows, or who asks.
//
// mixture_of_experts for own rows x [rows, hidden], of which there may be none; `weights` has the whole router and the
// rank's own experts. Backward: gradients of own experts from the rows of all ranks; of the router from own rows. Rows
// and their gradients are added in the order of ranks and rows. Kept for the one backward pass: received rows, routes
// and the order of choices, x where the router is trained and, without `gate_up_again`, gate and up before their
// activation, which changes no bit. `watch`: mixture_of_experts'. On CUDA the host waits for the device, for counts.
// Collective over the group, in forward and in backward.
at::Tensor split_mixture_of_experts(const at::Tensor& x, const ExpertWeights& weights, const ExpertShape& shape,
                                    const ExpertRanks& ranks, std::shared_ptr<const RouterCall> watch = nullptr,
                                    bool gate_up_again = false);

// The same for few rows, as many on every rank, with the same bits: everybody gets all rows and routes them, computes
// its own experts, or its part of them, and block sums go to the rows' owners. Nothing waits for the host: over peer
// memory it may be captured into a graph. No autograd. On CUDA for as many rows of all ranks as grouped_part_supported
// takes.
at::Tensor gathered_mixture_of_experts(const at::Tensor& x, const ExpertWeights& weights, const ExpertShape& shape,
                                       const ExpertRanks& ranks);

}  // namespace trireme
