#include "trainer/parallel/rows_beside.h"

#include <ATen/ATen.h>

#include <vector>

#include "base/error.h"
#include "trainer/parallel/exchange.h"
#include "trainer/parallel/flat_bytes.h"
#include "trainer/parallel/peer_copies.h"

namespace trireme {
namespace {}  // namespace

RowsComing::RowsComing(Communicator& group, const at::Tensor& own, bool beside) : own_(own.contiguous()) {
  TRIREME_CHECK(group.size() > 1, "rows of one rank do not travel");
  const int64_t n = own_.size(0);
  std::vector<int64_t> sizes = own_.sizes().vec();
  sizes[0] = n * group.size();
  all_ = at::empty(sizes, own_.options().requires_grad(false));
  if (all_.numel() == 0) return;
  if (PeerCopies* copies = group.copies(own_.device())) {
    const std::vector<at::Tensor> to(static_cast<size_t>(group.size()), own_);
    std::vector<at::Tensor> from;
    for (int rank = 0; rank < group.size(); ++rank) from.push_back(all_.narrow(0, rank * n, n));
    pending_ = group.begin_copies("gather of rows", [&] { return copies->exchange(to, from); });
  } else {
    pending_ = group.begin_all_gather(flat_bytes(all_), flat_bytes(own_));
  }
  if (!beside) pending_.wait();
}

const at::Tensor& RowsComing::all() {
  pending_.wait();
  return all_;
}

SumsComing::SumsComing(Communicator& group, const at::Tensor& others, bool beside) : group_(group), others_(others) {
  const int ranks = group.size();
  TRIREME_CHECK(ranks > 1 && others.is_contiguous() && others.size(0) % (ranks - 1) == 0,
                "sums of rows: as many of each other rank, contiguous");
  const int64_t n = others.size(0) / (ranks - 1);
  std::vector<int64_t> sizes = others.sizes().vec();
  sizes[0] = n;
  sizes.insert(sizes.begin(), ranks);
  parts_ = at::empty(sizes, others.options().requires_grad(false));
  own_ = parts_[group.rank()];
  if (parts_.numel() == 0) return;
  if (PeerCopies* copies = group.copies(others.device())) {
    std::vector<at::Tensor> to(static_cast<size_t>(ranks)), from(to);
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == group.rank()) continue;
      to[static_cast<size_t>(rank)] = others_.narrow(0, (rank < group.rank() ? rank : rank - 1) * n, n);
      from[static_cast<size_t>(rank)] = parts_[rank];
    }
    pending_ = group.begin_copies("sum of rows", [&] { return copies->exchange(to, from); });
  } else {
    std::vector<int64_t> counts(static_cast<size_t>(ranks), n);
    counts[static_cast<size_t>(group.rank())] = 0;
    received_ = at::empty_like(others_);
    pending_ = group.begin_all_to_all(received_, others_, counts, counts);
  }
  if (!beside) pending_.wait();
}

at::Tensor SumsComing::finish() {
  pending_.wait();
  if (received_.defined()) {
    const int64_t before = group_.rank(), behind = group_.size() - 1 - before, n = parts_.size(1);
    const auto put = [&](int64_t part, int64_t from, int64_t count) {
      const at::Tensor to = parts_.narrow(0, part, count);
      if (count > 0) to.copy_(received_.narrow(0, from * n, count * n).view(to.sizes()));
    };
    put(0, 0, before);
    put(before + 1, before, behind);
  }
  return ordered_sum(parts_);
}

}  // namespace trireme
