#include "trainer/parallel/row_checks.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "trainer/parallel/flat_bytes.h"

namespace trireme {
namespace {

// A row by who has made it and its number there: what it holds follows from them.
struct RowName {
  int64_t from = 0, number = 0;
};
using RowNames = std::vector<RowName>;

// [rows, width] numbers of seven binary digits and either sign, exact in every dtype, a half of them so much larger
// than the others that the order of a sum in float32 shows. No zero is negative, a sign that copies over memory may
// lose.
at::Tensor contents(const RowNames& rows, int64_t width, const at::TensorOptions& options) {
  constexpr int64_t kLarge = int64_t{1} << 22;
  std::vector<int64_t> first;
  for (const RowName& row : rows) first.push_back(10007 * (row.from + 1) + row.number * width);
  const auto integers = at::TensorOptions(options.device()).dtype(at::kLong);
  const at::Tensor place = at::tensor(first, at::kLong).to(options.device()).unsqueeze(1) + at::arange(width, integers);
  const at::Tensor mixed = place * int64_t{2654435761};
  const at::Tensor large = at::bitwise_right_shift(mixed, 24).remainder(2);
  const at::Tensor digits = at::bitwise_right_shift(mixed, 16).remainder(251) - 125;
  return (digits * (large * (kLarge - 1) + 1)).to(options.dtype());
}

// [ranks, ...] -> [...]: from +0 in the order of ranks, each sum rounded, to `dtype` in the end. An addition in float64
// that is rounded to float32 is the one in float32.
at::Tensor rounded_sums(const at::Tensor& parts, at::ScalarType dtype) {
  const at::ScalarType rounded = dtype == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor sum = at::zeros(parts.sizes().slice(1), parts.options().dtype(at::kDouble));
  for (const at::Tensor& part : parts.unbind(0)) sum = (sum + part.to(at::kDouble)).to(rounded).to(at::kDouble);
  return sum.to(dtype);
}

RowNames rows_from(int64_t from, int64_t count) {
  RowNames rows;
  for (int64_t i = 0; i < count; ++i) rows.push_back({from, i});
  return rows;
}

RowNames rows_of_all(const std::vector<int64_t>& counts) {
  RowNames rows;
  for (size_t from = 0; from < counts.size(); ++from)
    for (const RowName& row : rows_from(static_cast<int64_t>(from), counts[from])) rows.push_back(row);
  return rows;
}

int64_t most_rows(int64_t ranks, int64_t width, const at::TensorOptions& options) {
  constexpr int64_t kBytes = int64_t{256} << 10;
  const int64_t row = std::max<int64_t>(1, width * static_cast<int64_t>(options.dtype().itemsize()));
  return kBytes / row / ranks + 1;
}

// Of each rank how many rows: one or none, few, many.
std::vector<std::vector<int64_t>> uneven_counts(int64_t ranks, int64_t most) {
  std::vector<std::vector<int64_t>> all(3);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    all[0].push_back(rank % 2 == 0 ? 0 : 1);
    all[1].push_back(rank % 3 + 1);
    all[2].push_back(most + rank % 3);
  }
  return all;
}

// The first of some comparisons that has failed on this rank, and then of all ranks'.
class RowsCompared final {
 public:
  explicit RowsCompared(Communicator& group) : group_(group) {}

  void operator()(const char* exchange, const at::Tensor& got, const at::Tensor& expected) {
    if (!found_.empty() || same_bytes(got, expected)) return;
    const int64_t width = c10::multiply_integers(expected.sizes().slice(1));
    found_ = "rank " + std::to_string(group_.rank()) + " of group '" + group_.name() +
             "' gets other bits than it should by " + exchange + ", in " + std::to_string(expected.size(0)) +
             " rows of " + std::to_string(width) + " elements";
  }

  std::optional<std::string> of_all() {
    for (std::string& found : group_.all_gather_bytes(found_))
      if (!found.empty()) return std::move(found);
    return std::nullopt;
  }

 private:
  static bool same_bytes(const at::Tensor& one, const at::Tensor& other) {
    if (one.scalar_type() != other.scalar_type() || one.sizes() != other.sizes()) return false;
    return one.numel() == 0 || at::equal(flat_bytes(one.contiguous()), flat_bytes(other.contiguous()));
  }

  Communicator& group_;
  std::string found_;
};

// Whether rank `to` gets row `number` of rank `from`: of four ranks three do, also of those from its own.
bool wants(int64_t from, int64_t number, int64_t to) { return (from + 2 * number + to) % 4 != 0; }

// What a self-test of experts is about: rows [count, width] of each rank, to those that want them.
struct ExpertRows {
  Communicator& group;
  int64_t width;
  at::TensorOptions options;

  int64_t ranks() const { return group.size(); }
  int64_t rank() const { return group.rank(); }
  at::Tensor values(const RowNames& rows) const { return contents(rows, width, options); }
  // What rank `holder` gives back for rows of rank `owner`.
  int64_t given_by(int64_t holder, int64_t owner) const { return holder + ranks() * (owner + 1); }
};

at::Tensor wanted_rows(const ExpertRows& rows, int64_t own) {
  at::Tensor wanted = at::empty({own, rows.ranks()}, at::kBool);
  auto* const flags = wanted.mutable_data_ptr<bool>();
  for (int64_t i = 0; i < own; ++i)
    for (int64_t to = 0; to < rows.ranks(); ++to) flags[i * rows.ranks() + to] = wants(rows.rank(), i, to);
  return wanted.to(rows.options.device());
}

// There and back, and what came back added.
void compare_dispatch(const ExpertRows& rows, const std::vector<int64_t>& counts, const ExpertExchanges& exchanges,
                      RowsCompared& compare) {
  constexpr int64_t kFewElements = 4;  // of the routes' weights that go with a row
  const int64_t rank = rows.rank(), ranks = rows.ranks(), own = counts[static_cast<size_t>(rank)];
  RowNames received, given, returned, each;
  for (const RowName& row : rows_of_all(counts)) {
    if (!wants(row.from, row.number, rank)) continue;
    received.push_back(row);
    given.push_back({rows.given_by(rank, row.from), row.number});
  }
  for (int64_t holder = 0; holder < ranks; ++holder) {
    for (const RowName& row : rows_from(rows.given_by(holder, rank), own)) {
      each.push_back(row);
      if (wants(rank, row.number, holder)) returned.push_back(row);
    }
  }
  const auto floats = rows.options.dtype(at::kFloat);
  const at::Tensor wanted = wanted_rows(rows, own);
  const Dispatch plan = plan_dispatch(rows.group, wanted);
  const RowNames mine = rows_from(rank, own);
  const std::vector<at::Tensor> got =
      exchanges.dispatch(rows.group, plan, {rows.values(mine), contents(mine, kFewElements, floats)});
  compare("dispatch_rows", got[0], rows.values(received));
  compare("dispatch_rows", got[1], contents(received, kFewElements, floats));
  const at::Tensor back = exchanges.give_back(rows.group, plan, {rows.values(given)})[0];
  compare("return_rows", back, rows.values(returned));
  const at::ScalarType sums = back.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor parts = rows.values(each).view({ranks, own, rows.width}).to(at::kDouble);
  compare("add_returned", exchanges.add(plan, back.to(sums), own),
          rounded_sums(parts * wanted.t().unsqueeze(2).to(at::kDouble), sums));
}

// Of decode steps, where each rank has as many rows: all rows to everybody, and everybody's columns of them back.
void compare_even(const ExpertRows& rows, int64_t count, const ExpertExchanges& exchanges, RowsCompared& compare) {
  const int64_t rank = rows.rank(), ranks = rows.ranks();
  const RowNames all = rows_of_all(std::vector<int64_t>(static_cast<size_t>(ranks), count));
  RowNames whole;
  for (int64_t i = rank * count; i < (rank + 1) * count; ++i)
    for (int64_t from = 0; from < ranks; ++from) whole.push_back({from, i});
  compare("gather_rows", exchanges.gather(rows.group, rows.values(rows_from(rank, count))), rows.values(all));
  compare("whole_rows", exchanges.whole(rows.group, rows.values(rows_from(rank, ranks * count))),
          rows.values(whole).view({count, ranks * rows.width}));
}

// Keys and values of a layer and their gradients.
void compare_gather(Communicator& group, const std::vector<int64_t>& counts, int64_t width,
                    const at::TensorOptions& options, const ContextExchanges& exchanges, RowsCompared& compare) {
  const int64_t rank = group.rank(), ranks = group.size(), count = counts[static_cast<size_t>(rank)];
  const RowNames all = rows_of_all(counts);
  const auto first = std::find_if(all.begin(), all.end(), [rank](const RowName& row) { return row.from >= rank; });
  const int64_t begin = first - all.begin(), whole = static_cast<int64_t>(all.size());
  RowNames gradients;
  for (int64_t from = 0; from < ranks; ++from)
    for (int64_t i = 0; i < count; ++i) gradients.push_back({ranks + from, begin + i});
  const at::AutoGradMode recorded(true);
  const at::Tensor own = contents(rows_from(rank, count), width, options).requires_grad_(true);
  const at::Tensor gathered = exchanges.gather(group, own, counts);
  compare("gather_rows", gathered.detach(), contents(all, width, options));
  const at::Tensor upstream = contents(rows_from(ranks + rank, whole), width, options);
  const at::Tensor gradient = torch::autograd::grad({gathered}, {own}, {upstream})[0];
  compare("the backward pass of gather_rows", gradient,
          rounded_sums(contents(gradients, width, options).view({ranks, count, width}), own.scalar_type()));
}

// Log-probs, a number a row.
void compare_share(Communicator& group, const std::vector<int64_t>& counts, const at::Device& device,
                   const ContextExchanges& exchanges, RowsCompared& compare) {
  const auto floats = at::TensorOptions(device).dtype(at::kFloat);
  const RowNames mine = rows_from(group.rank(), counts[static_cast<size_t>(group.rank())]);
  compare("share_rows", exchanges.share(group, contents(mine, 1, floats).view({-1}), counts),
          contents(rows_of_all(counts), 1, floats).view({-1}));
}

}  // namespace

std::optional<std::string> expert_exchange_problem(Communicator& group, int64_t width, const at::TensorOptions& options,
                                                   bool decodes, const ExpertExchanges& exchanges) {
  if (group.size() == 1) return std::nullopt;
  const at::NoGradGuard no_grad;
  const ExpertRows rows{group, width, options};
  const int64_t most = most_rows(group.size(), width, options);
  RowsCompared compare(group);
  for (const std::vector<int64_t>& counts : uneven_counts(group.size(), most))
    compare_dispatch(rows, counts, exchanges, compare);
  if (decodes)
    for (const int64_t count : {int64_t{1}, int64_t{3}, most}) compare_even(rows, count, exchanges, compare);
  return compare.of_all();
}

std::optional<std::string> context_exchange_problem(Communicator& group, int64_t width,
                                                    const at::TensorOptions& options,
                                                    const ContextExchanges& exchanges) {
  if (group.size() == 1) return std::nullopt;
  const at::NoGradGuard no_grad;
  RowsCompared compare(group);
  for (const std::vector<int64_t>& counts : uneven_counts(group.size(), most_rows(group.size(), width, options))) {
    compare_gather(group, counts, width, options, exchanges, compare);
    compare_share(group, counts, options.device(), exchanges, compare);
  }
  return compare.of_all();
}

}  // namespace trireme
