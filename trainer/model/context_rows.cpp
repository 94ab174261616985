#include "trainer/model/context_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "trainer/model/model.h"
#include "trainer/parallel/communicator.h"

namespace trireme {
namespace {

// Where the first row of a piece is: among its rank's rows, and among what all ranks share.
struct PiecePlace {
  int64_t own = 0, gathered = 0;
};
using PiecePlaces = std::map<std::tuple<int64_t, int64_t, int64_t>, PiecePlace>;  // by rank, sequence, first row

void append(std::vector<int64_t>& rows, int64_t first, int64_t count) {
  for (int64_t i = 0; i < count; ++i) rows.push_back(first + i);
}

std::shared_ptr<const AttentionRuns> runs_of(const std::vector<ContextPiece>& pieces, int64_t rank, int64_t own_rows,
                                             const PiecePlaces& places) {
  auto result = std::make_shared<AttentionRuns>();
  int64_t row = 0;
  for (const ContextPiece& piece : pieces) {
    const int64_t count = piece.end - piece.begin;
    const auto keys = static_cast<int64_t>(result->key_rows.size());
    for (const KeyRange& range : piece.earlier) {
      const PiecePlace& place = places.at({range.rank, range.sequence, range.begin});
      append(result->key_rows, range.rank == rank ? place.own : own_rows + place.gathered, range.end - range.begin);
    }
    TRIREME_CHECK(static_cast<int64_t>(result->key_rows.size()) - keys == piece.past,
                  "a piece of a sequence has other rows before it than its split says");
    append(result->key_rows, row, count);
    result->runs.push_back({row, piece.past, count, keys});
    row += count;
  }
  return result;
}

ContextSplit split_of(const PackedBatch& whole, const ContextWork& work, int64_t ranks) {
  std::vector<int64_t> lengths;
  for (size_t s = 0; s + 1 < whole.starts.size(); ++s) lengths.push_back(whole.starts[s + 1] - whole.starts[s]);
  return split_context(lengths, whole.prefix, ranks, work);
}

}  // namespace

bool ContextRows::exchanges() const {
  return std::any_of(shared_counts.begin(), shared_counts.end(), [](int64_t count) { return count > 0; });
}

OwnRows at_most(const OwnRows& a, const OwnRows& b) { return {std::max(a.rows, b.rows), std::max(a.shared, b.shared)}; }

OwnRows own_rows(const PackedBatch& whole, const ContextWork& work, int64_t ranks, int64_t rank) {
  const ContextSplit split = split_of(whole, work, ranks);
  OwnRows own;
  for (size_t r = 0; r < split.ranks.size(); ++r) {
    for (const ContextPiece& piece : split.ranks[r]) {
      if (static_cast<int64_t>(r) == rank) own.rows += piece.end - piece.begin;
      if (piece.shared) own.shared += piece.end - piece.begin;
    }
  }
  return own;
}

OwnRows own_rows(const Model& model, const PackedBatch& whole) {
  const Communicator* group = model.options().context;
  if (group == nullptr) return {.rows = whole.tokens()};
  return own_rows(whole, context_work(model.config().shape()), group->size(), group->rank());
}

PackedBatch context_part(const PackedBatch& whole, const ContextWork& work, int64_t ranks, int64_t rank,
                         at::Device device) {
  const ContextSplit split = split_of(whole, work, ranks);
  auto context = std::make_shared<ContextRows>();
  context->starts = whole.starts;
  context->prefix = whole.prefix;
  context->places.resize(static_cast<size_t>(whole.tokens()));
  PackedBatch part;
  part.starts = {0};
  PiecePlaces places;
  std::vector<int64_t> shared;
  int64_t place = 0, gathered = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    int64_t rows = 0;
    const int64_t shared_before = gathered;
    for (const ContextPiece& piece : split.ranks[static_cast<size_t>(r)]) {
      const int64_t count = piece.end - piece.begin;
      const int64_t first = whole.starts[static_cast<size_t>(piece.sequence)] + piece.begin;
      places[{r, piece.sequence, piece.begin}] = {rows, gathered};
      for (int64_t i = 0; i < count; ++i) context->places[static_cast<size_t>(first + i)] = place++;
      if (r == rank) {
        append(context->rows, first, count);
        part.starts.push_back(rows + count);
        if (piece.shared) append(shared, rows, count);
      }
      if (piece.shared) gathered += count;
      rows += count;
    }
    context->counts.push_back(rows);
    context->shared_counts.push_back(gathered - shared_before);
  }
  const auto own = static_cast<size_t>(rank);
  context->shared = at::tensor(shared, at::kLong).to(device);
  context->attention = runs_of(split.ranks[own], rank, context->counts[own], places);
  const at::Tensor rows = at::tensor(context->rows, at::kLong).to(whole.ids.device());
  part.ids = whole.ids.index_select(0, rows);
  part.positions = whole.positions.index_select(0, rows);
  part.context = std::move(context);
  part.names = whole.names;
  return part;
}

PackedBatch context_part(const Model& model, const PackedBatch& whole) {
  const Communicator* group = model.options().context;
  if (group == nullptr) return whole;
  return context_part(whole, context_work(model.config().shape()), group->size(), group->rank(),
                      model.options().device);
}

}  // namespace trireme
