#include "trainer/parallel/dispatch.h"

#include <ATen/ATen.h>

#include <numeric>
#include <utility>

#include "base/error.h"

namespace trireme {

namespace {

using Rows = std::vector<at::Tensor>;

int64_t row_elements(const at::Tensor& rows) { return c10::multiply_integers(rows.sizes().slice(1)); }

// Rows of several tensors [rows, ...] as rows of bytes, so that one exchange carries them.
at::Tensor pack_rows(const Rows& tensors) {
  Rows bytes;
  for (const at::Tensor& rows : tensors)
    bytes.push_back(rows.contiguous().view({rows.size(0), row_elements(rows)}).view(at::kByte));
  return at::cat(bytes, 1);
}

// `wanted` [rows, ranks], `count` of which are true -> the rows of these plus `first`, by rank, then ascending. As
// nonzero gives them, which lets the host wait for their number.
at::Tensor rows_by_rank(const at::Tensor& wanted, int64_t first, int64_t count) {
  const int64_t rows = wanted.size(0), ranks = wanted.size(1);
  const at::Tensor flat = wanted.t().reshape({-1});
  const at::Tensor row = at::arange(first, first + rows, wanted.options().dtype(at::kLong));
  // All that are not wanted go to the last place.
  const at::Tensor place = at::where(flat, flat.cumsum(0, at::kLong) - 1, count);
  at::Tensor places = at::empty({count + 1}, row.options());
  places.scatter_(0, place, row.expand({ranks, rows}).reshape({-1}));
  return places.narrow(0, 0, count);
}

}  // namespace

std::vector<Dispatch> plan_dispatch(Communicator& group, const at::Tensor& wanted, int64_t first,
                                    const at::Tensor& numbers) {
  const int64_t ranks = group.size(), rows = wanted.size(0);
  TRIREME_CHECK(
      wanted.dim() == 2 && wanted.size(1) == ranks && wanted.scalar_type() == at::kBool && first >= 0 && first <= rows,
      "plan_dispatch: whether each rank of the group gets a row");
  Rows columns{wanted.to(at::kInt).unsqueeze(2)};
  if (numbers.defined()) columns.push_back(numbers);
  const at::Tensor of_rows = at::cat(columns, 2);  // [rows, ranks, n]
  const std::vector<std::pair<int64_t, int64_t>> cuts{{0, first}, {first, rows - first}};
  Rows sums;
  for (const auto& [begin, count] : cuts) sums.push_back(of_rows.narrow(0, begin, count).sum(0, false, at::kLong));
  // Each rank learns of each whether it has a second part: all must agree on the number of exchanges.
  sums.push_back(at::full({ranks, 1}, rows - first, sums.front().options()));
  const at::Tensor ours = at::cat(sums, 1).cpu();
  at::Tensor theirs = at::empty_like(ours);
  group.all_to_all(theirs, ours);
  const int64_t n = of_rows.size(2);
  const auto row_of = [n](const at::Tensor& all, int64_t rank) {
    return all.const_data_ptr<int64_t>() + rank * (2 * n + 1);
  };
  bool two = false;
  for (int64_t rank = 0; rank < ranks; ++rank) two = two || row_of(theirs, rank)[2 * n] > 0;
  std::vector<Dispatch> plans(two ? 2 : 1);
  for (size_t part = 0; part < plans.size(); ++part) {
    Dispatch& plan = plans[part];
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t* sent = row_of(ours, rank) + static_cast<int64_t>(part) * n;
      const int64_t* got = row_of(theirs, rank) + static_cast<int64_t>(part) * n;
      plan.to.push_back(sent[0]);
      plan.from.push_back(got[0]);
      plan.told.emplace_back(sent + 1, sent + n);
      plan.heard.emplace_back(got + 1, got + n);
    }
    const auto [begin, count] = cuts[part];
    plan.rows = rows_by_rank(wanted.narrow(0, begin, count), begin,
                             std::accumulate(plan.to.begin(), plan.to.end(), int64_t{0}));
  }
  return plans;
}

// By one exchange on the host, where each costs a wait; on a device bytes are not copied once more for it.
RowsUnderWay::RowsUnderWay(Communicator& group, const std::vector<at::Tensor>& rows, const std::vector<int64_t>& to,
                           const std::vector<int64_t>& from) {
  if (rows.size() > 1 && rows.front().is_cpu()) {
    for (const at::Tensor& each : rows)
      packed_.push_back({each.sizes().vec(), each.scalar_type(), row_elements(each) * each.element_size()});
    sent_.push_back(pack_rows(rows));
  } else {
    for (const at::Tensor& each : rows) sent_.push_back(each.contiguous());
  }
  for (const at::Tensor& each : sent_) {
    std::vector<int64_t> sizes = each.sizes().vec();
    sizes[0] = std::accumulate(from.begin(), from.end(), int64_t{0});
    coming_.push_back(at::empty(sizes, each.options()));
    pending_.push_back(group.begin_all_to_all(coming_.back(), each, from, to));
  }
}

void RowsUnderWay::wait() {
  for (PendingCollective& one : pending_) one.wait();
  sent_.clear();
}

std::vector<at::Tensor> RowsUnderWay::take() {
  wait();
  if (packed_.empty()) return std::exchange(coming_, {});
  const at::Tensor all = std::exchange(coming_, {}).front();
  Rows tensors;
  int64_t first = 0;
  for (Kind& kind : packed_) {
    const at::Tensor own = all.narrow(1, first, kind.bytes).clone(at::MemoryFormat::Contiguous);
    kind.sizes[0] = all.size(0);
    tensors.push_back(own.view(kind.dtype).view(kind.sizes));
    first += kind.bytes;
  }
  return tensors;
}

RowsUnderWay dispatch_rows(Communicator& group, const Dispatch& plan, const std::vector<at::Tensor>& own) {
  Rows sent;
  for (const at::Tensor& rows : own) sent.push_back(rows.index_select(0, plan.rows));
  return {group, sent, plan.to, plan.from};
}

RowsUnderWay return_rows(Communicator& group, const Dispatch& plan, const std::vector<at::Tensor>& given) {
  return {group, given, plan.from, plan.to};
}

void add_returned(const Dispatch& plan, const at::Tensor& returned, const at::Tensor& sums) {
  int64_t first = 0;
  for (const int64_t count : plan.to) {  // a row comes back once from each rank
    sums.index_add_(0, plan.rows.narrow(0, first, count), returned.narrow(0, first, count));
    first += count;
  }
}

}  // namespace trireme
