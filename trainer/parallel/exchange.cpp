#include "trainer/parallel/exchange.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "base/error.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/parallel/flat_bytes.h"
#include "trainer/parallel/peer_exchange.h"
#include "trainer/parallel/rows_beside.h"

namespace trireme {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Up to here every rank gets all parts and adds them itself: one exchange instead of two. The bits are the same. Over
// peer memory two ranks always do: either way as many bytes travel.
constexpr int64_t kOneStepBytes = 256 << 10;
bool in_one_step(const Communicator& group, const at::Tensor& partial, bool over_memory) {
  return partial.numel() * partial.element_size() <= kOneStepBytes || (over_memory && group.size() == 2);
}

// The carrier: devices that see each other's memory, where the group has them, else what the communicator has.
PeerExchange* peers_for(Communicator& group, const at::Tensor& rows) {
  return PeerExchange::takes(rows) ? group.peers(rows.device()) : nullptr;
}

// `launch` of the carrier `peers`, counted as a collective.
template <typename Fn>
auto over_memory(Communicator& group, const char* operation, Fn&& launch) {
  decltype(launch()) result;
  group.queue(operation, [&] { result = launch(); });
  return result;
}

std::vector<int64_t> with_rows(const at::Tensor& like, int64_t rows) {
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes[0] = rows;
  return sizes;
}

at::Tensor gather(Communicator& group, const at::Tensor& own) {
  if (PeerExchange* peers = peers_for(group, own))
    return over_memory(group, "gather of rows", [&] { return peers->gather(own); });
  const at::Tensor in = own.contiguous();
  at::Tensor out = at::empty(with_rows(in, in.size(0) * group.size()), in.options());
  if (out.numel() > 0) group.all_gather(flat_bytes(out), flat_bytes(in));
  return out;
}

at::Tensor scatter_sum(Communicator& group, const at::Tensor& partial) {
  TRIREME_CHECK(partial.size(0) % group.size() == 0, "sum_to_rows: the rows must divide among the ranks");
  if (PeerExchange* peers = peers_for(group, partial))
    return over_memory(group, "sum of rows", [&] { return peers->scatter_sum(partial); });
  const at::Tensor in = partial.contiguous();
  at::Tensor parts = at::empty_like(in);
  if (in.numel() > 0) group.all_to_all(parts, in);
  std::vector<int64_t> sizes = with_rows(in, in.size(0) / group.size());
  sizes.insert(sizes.begin(), group.size());
  return ordered_sum(parts.view(sizes));
}

at::Tensor sum_for_all(Communicator& group, const at::Tensor& partial) {
  const int64_t rows = partial.size(0);
  PeerExchange* peers = peers_for(group, partial);
  if (in_one_step(group, partial, peers != nullptr)) {
    if (peers != nullptr) return over_memory(group, "sum of rows", [&] { return peers->sum(partial); });
    std::vector<int64_t> sizes = partial.sizes().vec();
    sizes.insert(sizes.begin(), group.size());
    return ordered_sum(gather(group, partial).view(sizes));
  }
  const int64_t odd = (group.size() - rows % group.size()) % group.size();
  at::Tensor padded = partial;
  if (odd > 0) padded = at::cat({partial, at::zeros(with_rows(partial, odd), partial.options())});
  return gather(group, scatter_sum(group, padded)).narrow(0, 0, rows).contiguous();
}

at::Tensor exchange(Communicator& group, const at::Tensor& rows, const std::vector<int64_t>& to,
                    const std::vector<int64_t>& from) {
  const at::Tensor in = rows.contiguous();
  at::Tensor out = at::empty(with_rows(in, std::accumulate(from.begin(), from.end(), int64_t{0})), in.options());
  group.all_to_all(out, in, from, to);
  return out;
}

// Each rank's rows to all of them.
at::Tensor gather(Communicator& group, const at::Tensor& own, const std::vector<int64_t>& counts) {
  TRIREME_CHECK(
      static_cast<int>(counts.size()) == group.size() && own.size(0) == counts[static_cast<size_t>(group.rank())],
      "gather_rows: a number of rows for each rank expected");
  const std::vector<at::Tensor> copies(counts.size(), own);
  return exchange(group, at::cat(copies), std::vector<int64_t>(counts.size(), own.size(0)), counts);
}

int64_t sum_of(const std::vector<int64_t>& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

Communicator& group_of(const AutogradContext& context) {
  return *reinterpret_cast<Communicator*>(context.saved_data.at("group").toInt());
}

void keep_group(AutogradContext& context, int64_t group) { context.saved_data["group"] = group; }

// A group outlives every backward pass over it: it is the rank's.
int64_t handle(Communicator& group) { return reinterpret_cast<int64_t>(&group); }
Communicator& group_at(int64_t handle) { return *reinterpret_cast<Communicator*>(handle); }

struct GatherRows final : public Function<GatherRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& own, int64_t group) {
    keep_group(*context, group);
    return gather(group_at(group), own);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {scatter_sum(group_of(*context), gradients[0]), {}};
  }
};

struct ShareRows final : public Function<ShareRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& own, int64_t group) {
    keep_group(*context, group);
    return gather(group_at(group), own);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Communicator& group = group_of(*context);
    const int64_t rows = gradients[0].size(0) / group.size();
    return {gradients[0].narrow(0, rows * group.rank(), rows).contiguous(), {}};
  }
};

struct GatherUnevenRows final : public Function<GatherUnevenRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& own, int64_t group,
                            const std::vector<int64_t>& counts) {
    keep_group(*context, group);
    context->saved_data["counts"] = counts;
    return gather(group_at(group), own, counts);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    Communicator& group = group_of(*context);
    const std::vector<int64_t> counts = context->saved_data.at("counts").toIntVector();
    const int64_t own = counts[static_cast<size_t>(group.rank())];
    std::vector<int64_t> sizes = with_rows(gradients[0], own);
    sizes.insert(sizes.begin(), group.size());
    const at::Tensor parts = exchange(group, gradients[0], counts, std::vector<int64_t>(counts.size(), own));
    return {ordered_sum(parts.view(sizes)), {}, {}};
  }
};

struct ShareUnevenRows final : public Function<ShareUnevenRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& own, int64_t group,
                            const std::vector<int64_t>& counts) {
    keep_group(*context, group);
    context->saved_data["counts"] = counts;
    return gather(group_at(group), own, counts);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto rank = static_cast<size_t>(group_of(*context).rank());
    const std::vector<int64_t> counts = context->saved_data.at("counts").toIntVector();
    const int64_t begin = sum_of({counts.begin(), counts.begin() + static_cast<int64_t>(rank)});
    return {gradients[0].narrow(0, begin, counts[rank]).contiguous(), {}, {}};
  }
};

struct SumToRows final : public Function<SumToRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& partial, int64_t group) {
    keep_group(*context, group);
    return scatter_sum(group_at(group), partial);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gather(group_of(*context), gradients[0]), {}};
  }
};

struct SumRows final : public Function<SumRows> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& partial, int64_t group) {
    return sum_for_all(group_at(group), partial);
  }
  static variable_list backward(AutogradContext*, variable_list gradients) { return {gradients[0], {}}; }
};

struct AllToAllRows final : public Function<AllToAllRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, int64_t group,
                            const std::vector<int64_t>& to, const std::vector<int64_t>& from) {
    keep_group(*context, group);
    context->saved_data["to"] = to;
    context->saved_data["from"] = from;
    return exchange(group_at(group), rows, to, from);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {exchange(group_of(*context), gradients[0], context->saved_data.at("from").toIntVector(),
                     context->saved_data.at("to").toIntVector()),
            {},
            {},
            {}};
  }
};

}  // namespace

at::Tensor ordered_sum(const at::Tensor& parts) {
  if (PeerExchange::takes(parts)) return cuda::ordered_sum(parts);
  const auto dtype = parts.scalar_type();
  at::Tensor sum = at::zeros(parts.sizes().slice(1), parts.options().dtype(dtype == at::kDouble ? dtype : at::kFloat));
  for (int64_t rank = 0; rank < parts.size(0); ++rank) sum.add_(parts[rank]);
  return sum.to(dtype);
}

at::Tensor gather_rows(Communicator& group, const at::Tensor& own) {
  return group.size() == 1 ? own : GatherRows::apply(own, handle(group));
}

at::Tensor share_rows(Communicator& group, const at::Tensor& own) {
  return group.size() == 1 ? own : ShareRows::apply(own, handle(group));
}

at::Tensor gather_rows(Communicator& group, const at::Tensor& own, const std::vector<int64_t>& counts) {
  return group.size() == 1 || sum_of(counts) == 0 ? own : GatherUnevenRows::apply(own, handle(group), counts);
}

at::Tensor share_rows(Communicator& group, const at::Tensor& own, const std::vector<int64_t>& counts) {
  return group.size() == 1 || sum_of(counts) == 0 ? own : ShareUnevenRows::apply(own, handle(group), counts);
}

at::Tensor sum_to_rows(Communicator& group, const at::Tensor& partial) {
  return group.size() == 1 ? partial : SumToRows::apply(partial, handle(group));
}

at::Tensor sum_rows(Communicator& group, const at::Tensor& partial) {
  return group.size() == 1 ? partial : SumRows::apply(partial, handle(group));
}

NormResult sum_add_rms_norm(Communicator& group, const at::Tensor& x, const at::Tensor& partial,
                            const at::Tensor& weight, double eps, int64_t counted) {
  PeerExchange* peers = group.size() > 1 ? peers_for(group, partial) : nullptr;
  if (peers == nullptr || !in_one_step(group, partial, true))
    return add_rms_norm(x, sum_rows(group, partial), weight, eps, counted);
  const at::NoGradGuard no_grad;
  return over_memory(group, "sum of rows", [&] { return peers->sum_add_rms_norm(x, partial, weight, eps, counted); });
}

at::Tensor whole_rows(Communicator& group, const at::Tensor& columns) {
  const at::NoGradGuard no_grad;
  if (PeerExchange* peers = peers_for(group, columns))
    return over_memory(group, "exchange of columns", [&] { return peers->whole_rows(columns); });
  const int64_t ranks = group.size(), rows = columns.size(0) / ranks, width = columns.size(1);
  const std::vector<int64_t> counts(static_cast<size_t>(ranks), rows);
  return exchange(group, columns, counts, counts)
      .view({ranks, rows, width})
      .permute({1, 0, 2})
      .reshape({rows, ranks * width});
}

at::Tensor own_columns(Communicator& group, const at::Tensor& rows) {
  const at::NoGradGuard no_grad;
  if (PeerExchange* peers = peers_for(group, rows))
    return over_memory(group, "exchange of columns", [&] { return peers->own_columns(rows); });
  const int64_t ranks = group.size(), own = rows.size(0), width = rows.size(1) / ranks;
  const std::vector<int64_t> counts(static_cast<size_t>(ranks), own);
  const at::Tensor parts = rows.view({own, ranks, width}).permute({1, 0, 2}).reshape({ranks * own, width});
  return exchange(group, parts, counts, counts);
}

DeviceSamples gather_samples(Communicator& group, const DeviceSamples& own) {
  const at::NoGradGuard no_grad;
  if (PeerExchange* peers = group.peers(own.ids.device()))
    return over_memory(group, "gather of samples", [&] { return peers->gather_samples(own); });
  return {gather(group, own.ids), gather(group, own.logprobs)};
}

at::Tensor all_to_all_rows(Communicator& group, const at::Tensor& rows, const std::vector<int64_t>& to,
                           const std::vector<int64_t>& from) {
  return group.size() == 1 ? rows : AllToAllRows::apply(rows, handle(group), to, from);
}

namespace {

// The first of some comparisons that has failed; empty: none.
class Comparisons {
 public:
  void operator()(const char* what, const at::Tensor& one, const at::Tensor& other) {
    if (failed_.empty() && !at::equal(one, other)) failed_ = what;
  }
  const std::string& failed() const { return failed_; }

 private:
  std::string failed_;
};

// Sums and rows by calls that are awaited, and what travels beside products, which copy engines carry on a device.
void compare_sums(Communicator& group, const at::Tensor& partial, const at::Tensor& whole, Comparisons& compare) {
  const int64_t ranks = group.size(), each = partial.size(0) / ranks, own = group.rank() * each;
  const at::Tensor mine = sum_to_rows(group, partial);
  compare("among fewer rows", sum_rows(group, partial.narrow(0, 1, 1)), whole.narrow(0, 1, 1));
  compare("among other rows", sum_rows(group, partial.narrow(0, ranks, ranks + 1)), whole.narrow(0, ranks, ranks + 1));
  compare("summed for their owners", gather_rows(group, mine), whole);
  SumsComing sums(
      group, at::cat({partial.narrow(0, 0, own), partial.narrow(0, own + each, partial.size(0) - own - each)}), true);
  sums.own().copy_(partial.narrow(0, own, each));
  compare("summed beside products", sums.finish(), mine);
  RowsComing rows(group, mine, true);
  compare("gathered beside products", rows.all(), whole);
}

// Rows whose columns are split, and what ranks have drawn, against all ranks' rows.
void compare_columns(Communicator& group, const at::Tensor& partial, Comparisons& compare) {
  const int64_t ranks = group.size(), each = 2, width = partial.size(1);
  const at::Tensor columns = partial.narrow(0, 0, ranks * each), rows = whole_rows(group, columns);
  const at::Tensor all = gather_rows(group, columns).view({ranks, ranks, each, width});
  compare("with whole columns", rows, all.select(1, group.rank()).permute({1, 0, 2}).reshape({each, ranks * width}));
  compare("with columns of their own", own_columns(group, rows), columns);
  constexpr int64_t kDrawn = 5;
  const at::Tensor number = at::arange(kDrawn, at::TensorOptions(partial.device()).dtype(at::kLong));
  const DeviceSamples drawn = gather_samples(group, {number + kDrawn * group.rank(), number.to(at::kFloat)});
  const at::Tensor numbers = at::arange(kDrawn * ranks, number.options());
  compare("among ids", drawn.ids, numbers);
  compare("among log-probs", drawn.logprobs, numbers.remainder(kDrawn).to(at::kFloat));
}

}  // namespace

std::optional<std::string> exchange_problem(Communicator& group, int64_t width, const at::TensorOptions& options) {
  if (group.size() == 1) return std::nullopt;
  const at::NoGradGuard no_grad;
  const int64_t ranks = group.size();
  // Above one step's size whatever the width, and at least a row of each rank behind its first two; values of both
  // signs over some magnitudes, other ones on each rank.
  const int64_t most = (kOneStepBytes / std::max<int64_t>(1, width * options.dtype().itemsize()) / ranks + 3) * ranks;
  const at::Tensor position = at::arange(most * width, at::TensorOptions(options.device()).dtype(at::kDouble));
  const at::Tensor values = (position * (0.7 + 0.1 * group.rank())).sin() * ((position * 0.01).cos() * 3).exp();
  const at::Tensor partial = values.view({most, width}).to(options.dtype());
  const at::Tensor whole = sum_rows(group, partial);
  Comparisons compare;
  compare_sums(group, partial, whole, compare);
  compare_columns(group, partial, compare);
  // In decode norm and sum are one launch, in the loss two.
  const at::Tensor scale = partial.narrow(0, 0, 1).view({width}), residual = partial.narrow(0, 0, ranks + 1);
  const NormResult fused = sum_add_rms_norm(group, residual, residual, scale, 1e-6);
  const NormResult plain = add_rms_norm(residual, whole.narrow(0, 0, ranks + 1), scale, 1e-6);
  compare("in their norm", fused.normed, plain.normed);
  compare("added to the residual", fused.sum, plain.sum);
  if (PeerExchange::takes(partial)) {
    // The other carrier.
    std::vector<int64_t> sizes{ranks, most, width};
    at::Tensor parts = at::empty(sizes, partial.options());
    group.all_gather(flat_bytes(parts), flat_bytes(partial));
    compare("over the other carrier", ordered_sum(parts), whole);
  }
  compare("as the others have them", gather_rows(group, whole).view({ranks, most, width})[0], whole);
  // All know what one has found.
  for (const std::string& found : group.all_gather_bytes(compare.failed())) {
    if (!found.empty())
      return "rows of " + std::to_string(width) + " elements have other bits " + found + " (group '" + group.name() +
             "')";
  }
  return std::nullopt;
}

}  // namespace trireme
