// Exchanges of rows between the ranks of a group that splits a model, with and without autograd.
//
// A sum over ranks is: the partial results, rounded to their dtype, added in float32 (float64 for float64) from +0 in
// the order of ranks, rounded once. So a row's bits depend neither on the other rows, nor on how many there are, nor on
// who asks: sum_rows, sum_to_rows and any cut of either by rows give the same bits. A library's own sums do not keep
// that (their order follows the place in the message), so none is used: parts travel as bytes and are added here.
//
// Two carriers, the same bits: the group's communicator, anywhere; between devices that see each other's memory kernels
// that store into it and add what has come (peer_exchange.h), for bfloat16 in rows of a multiple of 8 elements. Only
// the latter may be captured into a graph. Copies over memory may lose the sign of a negative zero on the way, which no
// sum keeps either.
//
// Rows are dimension 0. With a group of one each call returns what it was given. Collective: all ranks of the group
// make the same calls in the same order, also with no rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trainer/ops/ops.h"
#include "trainer/parallel/communicator.h"

namespace trireme {

// [n, ...] of each rank -> [size * n, ...]: the ranks' rows in their order. Backward: sum_to_rows.
at::Tensor gather_rows(Communicator& group, const at::Tensor& own);

// The same, where what follows is computed alike on all ranks. Backward: the own rows of the gradient, as they are.
at::Tensor share_rows(Communicator& group, const at::Tensor& own);

// The same two where ranks have different numbers of rows: counts[r] of rank r, known to all. Ranks that have none take
// part; where nobody has any nothing is exchanged. The sum that gather_rows' backward takes is ordered_sum's.
at::Tensor gather_rows(Communicator& group, const at::Tensor& own, const std::vector<int64_t>& counts);
at::Tensor share_rows(Communicator& group, const at::Tensor& own, const std::vector<int64_t>& counts);

// [size * n, ...] partial sums of each rank -> [n, ...]: rank r gets the sums of rows [r * n, (r + 1) * n).
// Backward: gather_rows.
at::Tensor sum_to_rows(Communicator& group, const at::Tensor& partial);

// [n, ...] partial sums of each rank -> [n, ...] sums, on all. Backward: the gradient as it is, since what follows is
// computed alike on all ranks.
at::Tensor sum_rows(Communicator& group, const at::Tensor& partial);

// sum_rows and add_rms_norm with the result as delta; one launch over peer memory, with the same bits. No autograd.
NormResult sum_add_rms_norm(Communicator& group, const at::Tensor& x, const at::Tensor& partial,
                            const at::Tensor& weight, double eps, int64_t counted = 0);

// Of a matrix whose columns are split: [size * n, width], each rank's own columns of all rows -> [n, size * width], the
// own rows whole; and back. No autograd.
at::Tensor whole_rows(Communicator& group, const at::Tensor& columns);
at::Tensor own_columns(Communicator& group, const at::Tensor& rows);

// Tokens that the ranks have drawn, [n] each, on all [size * n].
DeviceSamples gather_samples(Communicator& group, const DeviceSamples& own);

// Rows to whom they are for: `to[r]` rows of `rows` go to rank r, `from[r]` rows come from it, in the order of ranks.
// Backward: the way back.
at::Tensor all_to_all_rows(Communicator& group, const at::Tensor& rows, const std::vector<int64_t>& to,
                           const std::vector<int64_t>& from);

// The definition itself, for carriers and tests: parts [ranks, ...] -> their sum [...].
at::Tensor ordered_sum(const at::Tensor& parts);

// Whether rows of `width` keep their bits here under every way to exchange them: alone and among others, summed for all
// and for their owner, awaited and beside products (rows_beside.h), by rows and by columns. One sentence that says
// where not; nothing when they do. Collective; all ranks get the same answer.
std::optional<std::string> exchange_problem(Communicator& group, int64_t width, const at::TensorOptions& options);

}  // namespace trireme
