#include "trainer/parallel/dispatch.h"

#include <ATen/ATen.h>

#include <numeric>

#include "base/error.h"

namespace trireme {

Dispatch plan_dispatch(Communicator& group, const at::Tensor& wanted) {
  const int64_t ranks = group.size();
  TRIREME_CHECK(wanted.dim() == 2 && wanted.size(1) == ranks && wanted.scalar_type() == at::kBool && wanted.is_cpu(),
                "plan_dispatch: whether each rank of the group gets a row");
  Dispatch plan;
  std::vector<at::Tensor> rows;
  at::Tensor counts = at::empty({ranks}, at::kLong), theirs = at::empty({ranks}, at::kLong);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    rows.push_back(wanted.select(1, rank).nonzero().view({-1}));  // ascending
    plan.to.push_back(rows.back().size(0));
    counts[rank] = plan.to.back();
  }
  plan.rows = at::cat(rows);
  group.all_to_all(theirs, counts);
  const auto* from = theirs.const_data_ptr<int64_t>();
  plan.from.assign(from, from + ranks);
  return plan;
}

at::Tensor exchange_rows(Communicator& group, const at::Tensor& rows, const std::vector<int64_t>& to,
                         const std::vector<int64_t>& from) {
  const at::Tensor in = rows.contiguous();
  std::vector<int64_t> sizes = in.sizes().vec();
  sizes[0] = std::accumulate(from.begin(), from.end(), int64_t{0});
  at::Tensor out = at::empty(sizes, in.options());
  group.all_to_all(out, in, from, to);
  return out;
}

at::Tensor dispatch_rows(Communicator& group, const Dispatch& plan, const at::Tensor& own) {
  return exchange_rows(group, own.index_select(0, plan.rows), plan.to, plan.from);
}

at::Tensor return_rows(Communicator& group, const Dispatch& plan, const at::Tensor& given) {
  return exchange_rows(group, given, plan.from, plan.to);
}

at::Tensor add_returned(const Dispatch& plan, const at::Tensor& returned, int64_t rows) {
  std::vector<int64_t> sizes = returned.sizes().vec();
  sizes[0] = rows;
  at::Tensor sum = at::zeros(sizes, returned.options());
  int64_t first = 0;
  for (const int64_t count : plan.to) {  // a row comes back once from each rank
    sum.index_add_(0, plan.rows.narrow(0, first, count), returned.narrow(0, first, count));
    first += count;
  }
  return sum;
}

}  // namespace trireme
