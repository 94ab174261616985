#include "trainer/parallel/dispatch.h"

#include <ATen/ATen.h>

#include <numeric>

#include "base/error.h"
#include "trainer/parallel/exposed_waits.h"

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

Rows unpack_rows(const at::Tensor& packed, const Rows& like) {
  Rows tensors;
  int64_t first = 0;
  for (const at::Tensor& each : like) {
    const int64_t bytes = row_elements(each) * each.element_size();
    std::vector<int64_t> sizes = each.sizes().vec();
    sizes[0] = packed.size(0);
    const at::Tensor own = packed.narrow(1, first, bytes).clone(at::MemoryFormat::Contiguous);
    tensors.push_back(own.view(each.scalar_type()).view(sizes));
    first += bytes;
  }
  return tensors;
}

// By one exchange on the host, where each costs a wait; on a device bytes are not copied once more for it.
Rows exchange_all(Communicator& group, const Rows& rows, const std::vector<int64_t>& to,
                  const std::vector<int64_t>& from) {
  if (rows.size() > 1 && rows.front().is_cpu())
    return unpack_rows(exchange_rows(group, pack_rows(rows), to, from), rows);
  Rows out;
  for (const at::Tensor& each : rows) out.push_back(exchange_rows(group, each, to, from));
  return out;
}

}  // namespace

Dispatch plan_dispatch(Communicator& group, const at::Tensor& wanted, const at::Tensor& numbers,
                       std::vector<std::vector<int64_t>>* told) {
  const int64_t ranks = group.size();
  TRIREME_CHECK(wanted.dim() == 2 && wanted.size(1) == ranks && wanted.scalar_type() == at::kBool,
                "plan_dispatch: whether each rank of the group gets a row");
  Rows columns{wanted.sum(0).unsqueeze_(1)};
  if (numbers.defined()) columns.push_back(numbers);
  const at::Tensor ours = at::cat(columns, 1).cpu();
  at::Tensor theirs = at::empty_like(ours);
  {
    const ExposedWaits::ForExperts counted;
    group.all_to_all(theirs, ours);
  }
  Dispatch plan;
  const int64_t n = ours.size(1);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto* sent = ours.const_data_ptr<int64_t>() + rank * n;
    const auto* got = theirs.const_data_ptr<int64_t>() + rank * n;
    plan.to.push_back(sent[0]);
    plan.from.push_back(got[0]);
    if (told == nullptr) continue;
    std::vector<int64_t>& both = told->emplace_back(got + 1, got + n);
    both.insert(both.end(), sent + 1, sent + n);
  }
  plan.rows = wanted.t().nonzero().select(1, 1).contiguous();  // by rank, then ascending
  return plan;
}

at::Tensor exchange_rows(Communicator& group, const at::Tensor& rows, const std::vector<int64_t>& to,
                         const std::vector<int64_t>& from) {
  const at::Tensor in = rows.contiguous();
  std::vector<int64_t> sizes = in.sizes().vec();
  sizes[0] = std::accumulate(from.begin(), from.end(), int64_t{0});
  at::Tensor out = at::empty(sizes, in.options());
  const ExposedWaits::ForExperts counted;
  group.all_to_all(out, in, from, to);
  return out;
}

std::vector<at::Tensor> dispatch_rows(Communicator& group, const Dispatch& plan, const std::vector<at::Tensor>& own) {
  Rows sent;
  for (const at::Tensor& rows : own) sent.push_back(rows.index_select(0, plan.rows));
  return exchange_all(group, sent, plan.to, plan.from);
}

std::vector<at::Tensor> return_rows(Communicator& group, const Dispatch& plan, const std::vector<at::Tensor>& given) {
  return exchange_all(group, given, plan.from, plan.to);
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
