// Exchanges of rows of exchange.h that go on while their caller computes, in two calls. The bits are the same: only
// who adds what comes when is not. No autograd.
//
// Carriers: copies between devices that see each other's memory (peer_copies.h); the group's communicator elsewhere.
// All ranks of a group of several make the same calls in the same order, and finish what they have begun.
#pragma once

#include <ATen/core/Tensor.h>

#include "trainer/parallel/communicator.h"

namespace trireme {

// Rows of all ranks, [size * n, ...] from [n, ...] of each.
class RowsComing final {
 public:
  // `beside` false: they are awaited at once, for comparisons.
  RowsComing(Communicator& group, const at::Tensor& own, bool beside);
  const at::Tensor& all();  // when they are there

 private:
  at::Tensor own_, all_;
  PendingCollective pending_;
};

// Partial sums of all rows for their owners: [n, ...] of each rank's own. A rank makes those of the others' rows first.
class SumsComing final {
 public:
  // `others` [(size - 1) * n, ...]: this rank's partial sums of the others' rows, in the order of ranks.
  SumsComing(Communicator& group, const at::Tensor& others, bool beside);
  // [n, ...]: where this rank's partial sums of its own rows belong; to be written before finish().
  const at::Tensor& own() const { return own_; }
  at::Tensor finish();

 private:
  Communicator& group_;
  at::Tensor others_, received_, parts_, own_;
  PendingCollective pending_;
};

}  // namespace trireme
