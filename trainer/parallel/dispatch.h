// Rows that several ranks of a group want each, sent once to each of them, and what these give back. What comes back is
// added in the order of ranks, so that no result depends on who was first. Collective: all ranks of the group make the
// same calls in the same order, also with no rows. No autograd: backward passes make these calls themselves.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "trainer/parallel/communicator.h"

namespace trireme {

struct Dispatch {
  std::vector<int64_t> to, from;  // rows for each rank, and of each rank
  at::Tensor rows;                // [sum of `to`] int64: which own row each sent one is; by rank, then ascending
};

// `wanted` [rows, ranks] bool: whether a rank gets a row. The ranks tell each other their numbers of rows, and what
// `numbers` [ranks, n] int64 has for them: (*told)[r] is what rank r told, then what it was told, 2 n numbers. The host
// waits for the device.
Dispatch plan_dispatch(Communicator& group, const at::Tensor& wanted, const at::Tensor& numbers = {},
                       std::vector<std::vector<int64_t>>* told = nullptr);

// Of each tensor own rows [rows, ...] -> [sum of `from`, ...], in the order of ranks, then of their rows. On the host
// by one exchange.
std::vector<at::Tensor> dispatch_rows(Communicator& group, const Dispatch& plan, const std::vector<at::Tensor>& own);

// The way back: a row for each that was received -> [sum of `to`, ...], in the order of plan.rows.
std::vector<at::Tensor> return_rows(Communicator& group, const Dispatch& plan, const std::vector<at::Tensor>& given);

// What came back, for each of `rows` own rows: from +0 in the order of ranks in `returned`'s dtype. [rows, ...]
at::Tensor add_returned(const Dispatch& plan, const at::Tensor& returned, int64_t rows);

// Rows of any number from each rank to each: `to` and `from` as above.
at::Tensor exchange_rows(Communicator& group, const at::Tensor& rows, const std::vector<int64_t>& to,
                         const std::vector<int64_t>& from);

}  // namespace trireme
