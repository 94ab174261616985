// Rows that several ranks of a group want each, sent once to each of them, and what these give back. What comes back is
// added in the order of ranks, so that no result depends on who was first. Exchanges are begun and taken later: they
// travel while their caller computes. Collective: all ranks of the group make the same calls in the same order, also
// with no rows, and take what they have begun. No autograd: backward passes make these calls themselves.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "trainer/parallel/communicator.h"

namespace trireme {

// Of a part of the own rows.
struct Dispatch {
  std::vector<int64_t> to, from;  // rows for each rank, and of each rank
  at::Tensor rows;                // [sum of `to`] int64: which own row each sent one is; by rank, then ascending
  // Sums of its numbers, by rank: what this one told it, and was told by it.
  std::vector<std::vector<int64_t>> told, heard;
};

// `wanted` [rows, ranks] bool: whether a rank gets a row. The rows are planned in parts, the first of which has `first`
// of them and the second the rest; where no rank has a rest there is one part, on all ranks. The ranks tell each other
// in one exchange their numbers of rows and, for each part, the sums over its rows of `numbers` [rows, ranks, n] int32,
// which may be undefined. The host waits for the device once.
std::vector<Dispatch> plan_dispatch(Communicator& group, const at::Tensor& wanted, int64_t first,
                                    const at::Tensor& numbers = {});

// Rows of one or more tensors under way. They hold what is sent and what comes until it is there.
class RowsUnderWay final {
 public:
  // Of each tensor of `rows` to[r] rows go to rank r and from[r] come from it, in the order of ranks. On the host by
  // one exchange.
  RowsUnderWay(Communicator& group, const std::vector<at::Tensor>& rows, const std::vector<int64_t>& to,
               const std::vector<int64_t>& from);
  // Returns when they are there; on CUDA, for all that is launched on the current stream from now on.
  void wait();
  // Waits. What came, for each tensor; once.
  std::vector<at::Tensor> take();

 private:
  struct Kind {  // of a tensor of rows that travels among others
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    int64_t bytes;  // of a row
  };
  std::vector<Kind> packed_;
  std::vector<at::Tensor> sent_, coming_;
  std::vector<PendingCollective> pending_;
};

// Of each tensor own rows [rows, ...], of which the part is some -> [sum of `from`, ...], in the order of ranks, then
// of their rows.
RowsUnderWay dispatch_rows(Communicator& group, const Dispatch& plan, const std::vector<at::Tensor>& own);

// The way back: a row for each that was received -> [sum of `to`, ...], in the order of plan.rows.
RowsUnderWay return_rows(Communicator& group, const Dispatch& plan, const std::vector<at::Tensor>& given);

// Adds what came back for the part's rows to `sums` [rows, ...] of all own ones, in the order of ranks in its dtype,
// which is `returned`'s.
void add_returned(const Dispatch& plan, const at::Tensor& returned, const at::Tensor& sums);

}  // namespace trireme
