#include "topology/context_split.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace trireme {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 31;  // of a batch, prefixes counted with each sequence

// The sequences of a batch as their rows cost.
class Costs {
 public:
  Costs(const std::vector<int64_t>& lengths, const std::vector<int64_t>& prefix, const ContextWork& work)
      : lengths_(lengths), work_(work), past_(lengths.size(), 0) {
    TRIREME_CHECK(prefix.empty() || prefix.size() == lengths.size(), "one prefix for each sequence expected");
    int64_t rows = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      TRIREME_CHECK(lengths[s] >= 0, "a sequence of " + std::to_string(lengths[s]) + " rows");
      if (!prefix.empty() && prefix[s] >= 0) {
        const auto p = static_cast<size_t>(prefix[s]);
        TRIREME_CHECK(p < s && prefix[p] < 0, "the prefix of sequence " + std::to_string(s) +
                                                  " must be an earlier one that has no prefix itself");
        past_[s] = lengths[p];
      }
      rows += lengths[s] + past_[s];
      TRIREME_CHECK(rows < kMostRows, "a batch of " + std::to_string(rows) + " rows and more");
    }
    // The square of all rows must fit.
    TRIREME_CHECK(work.row > 0 && work.square >= 0 && work.row <= kMostRows && work.square <= 1,
                  "rows cost " + std::to_string(work.row) + " and " + std::to_string(work.square));
  }

  int64_t past(size_t s) const { return past_[s]; }
  int64_t of(size_t s, int64_t begin, int64_t end) const {
    const int64_t from = past_[s] + begin, to = past_[s] + end;
    return work_.row * (end - begin) + work_.square * (to - from) * (to + from);
  }
  int64_t of(size_t s) const { return of(s, 0, lengths_[s]); }

 private:
  const std::vector<int64_t>& lengths_;
  ContextWork work_;
  std::vector<int64_t> past_;
};

// What each rank should get of `amount`, so that the least loaded come up to one level.
std::vector<int64_t> level(const std::vector<int64_t>& loads, int64_t amount) {
  std::vector<int64_t> sorted = loads;
  std::sort(sorted.begin(), sorted.end());
  int64_t height = 0, below = 0;
  for (size_t count = 1; count <= sorted.size(); ++count) {
    below += sorted[count - 1];
    height = (amount + below - 1) / static_cast<int64_t>(count) + 1;  // up, so that somebody wants something
    if (count == sorted.size() || height <= sorted[count]) break;
  }
  std::vector<int64_t> wanted;
  for (const int64_t load : loads) wanted.push_back(std::max<int64_t>(0, height - load));
  return wanted;
}

// A long sequence as stretches of blocks of `alignment` rows: `owners[i]` has blocks [cuts[i], cuts[i + 1]).
struct Stretches {
  std::vector<size_t> owners;
  std::vector<int64_t> cuts;
};

// Each rank gets a stretch from the front and one as long from the back, nested, in proportion to what it wants. A row
// and its mirror image cost the same together wherever they are, so rows and work are proportional.
Stretches fold(const std::vector<int64_t>& wanted, int64_t blocks) {
  Stretches stretches{.owners = {}, .cuts = {0}};
  const double all = 2 * static_cast<double>(std::accumulate(wanted.begin(), wanted.end(), int64_t{0}));
  double so_far = 0;
  const auto add = [&](size_t rank) {
    if (wanted[rank] == 0) return;
    so_far += static_cast<double>(wanted[rank]);
    stretches.owners.push_back(rank);
    stretches.cuts.push_back(static_cast<int64_t>(static_cast<double>(blocks) * (so_far / all) + 0.5));
  };
  for (size_t rank = 0; rank < wanted.size(); ++rank) add(rank);
  for (size_t rank = wanted.size(); rank-- > 0;) add(rank);
  stretches.cuts.back() = blocks;
  return stretches;
}

// Adds the stretches to the loads; then single blocks move between neighbours while the fuller of their two ranks gets
// less. `cost` of a block.
template <typename Cost>
Stretches improved(Stretches stretches, std::vector<int64_t>& loads, const Cost& cost) {
  std::vector<int64_t>& cuts = stretches.cuts;
  for (size_t i = 0; i < stretches.owners.size(); ++i) {
    for (int64_t block = cuts[i]; block < cuts[i + 1]; ++block) loads[stretches.owners[i]] += cost(block);
  }
  // Each move makes the loads, sorted from the largest, smaller: there is an end.
  for (bool any = true; any;) {
    any = false;
    for (size_t i = 1; i < stretches.owners.size(); ++i) {
      int64_t& left = loads[stretches.owners[i - 1]];
      int64_t& right = loads[stretches.owners[i]];
      const bool down = left > right;
      if (cuts[i] == (down ? cuts[i - 1] : cuts[i + 1])) continue;
      const int64_t moved = cost(down ? cuts[i] - 1 : cuts[i]);
      if (std::min(left, right) + moved >= std::max(left, right)) continue;  // also where both are one rank
      (down ? left : right) -= moved;
      (down ? right : left) += moved;
      cuts[i] += down ? -1 : 1;
      any = true;
    }
  }
  return stretches;
}

// Sorts the pieces of a rank into the batch's order and joins neighbours.
void in_order(std::vector<ContextPiece>& pieces) {
  std::sort(pieces.begin(), pieces.end(), [](const ContextPiece& a, const ContextPiece& b) {
    return a.sequence != b.sequence ? a.sequence < b.sequence : a.begin < b.begin;
  });
  std::vector<ContextPiece> joined;
  for (const ContextPiece& piece : pieces) {
    if (!joined.empty() && joined.back().sequence == piece.sequence && joined.back().end == piece.begin) {
      joined.back().end = piece.end;
    } else {
      joined.push_back(piece);
    }
  }
  pieces = std::move(joined);
}

// Fills past, earlier and shared of all pieces, which are there with their sequences' pieces in order.
void link(ContextSplit& split, const Costs& costs, const std::vector<int64_t>& lengths,
          const std::vector<int64_t>& prefix) {
  struct Place {
    KeyRange rows;
    ContextPiece* piece;
  };
  std::vector<std::vector<Place>> places(lengths.size());
  for (size_t rank = 0; rank < split.ranks.size(); ++rank) {
    for (ContextPiece& piece : split.ranks[rank]) {
      places[static_cast<size_t>(piece.sequence)].push_back(
          {{static_cast<int64_t>(rank), piece.sequence, piece.begin, piece.end}, &piece});
    }
  }
  for (auto& of_sequence : places)
    std::sort(of_sequence.begin(), of_sequence.end(),
              [](const Place& a, const Place& b) { return a.rows.begin < b.rows.begin; });
  for (size_t s = 0; s < places.size(); ++s) {
    for (const Place& place : places[s]) {
      ContextPiece& piece = *place.piece;
      piece.past = costs.past(s) + piece.begin;
      const auto needs = [&](const Place& other) {
        piece.earlier.push_back(other.rows);
        if (other.rows.rank != place.rows.rank) other.piece->shared = true;
      };
      if (!prefix.empty() && prefix[s] >= 0) {
        for (const Place& other : places[static_cast<size_t>(prefix[s])]) needs(other);
      }
      for (const Place& other : places[s]) {
        if (other.rows.begin >= piece.begin) break;
        needs(other);
      }
    }
  }
}

}  // namespace

ContextWork context_work(const ModelShape& shape) {
  const int64_t q = shape.heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim;
  const int64_t mlp = shape.experts > 0 ? shape.experts_per_token * shape.moe_intermediate : shape.intermediate;
  // A row takes two operations for each weight, and 4 q for each key that it sees: 2 q n^2 for n rows.
  const int64_t row = 2 * shape.hidden * (2 * q + 2 * kv + 3 * mlp);
  return {.row = std::max<int64_t>(1, row / std::max<int64_t>(1, 2 * q)), .square = 1};
}

ContextSplit split_context(const std::vector<int64_t>& lengths, const std::vector<int64_t>& prefix, int64_t ranks,
                           const ContextWork& work, int64_t alignment) {
  TRIREME_CHECK(ranks > 0 && alignment > 0, "context parallel over " + std::to_string(ranks) + " ranks");
  const Costs costs(lengths, prefix, work);
  int64_t total = 0;
  for (size_t s = 0; s < lengths.size(); ++s) total += costs.of(s);
  // What goes to a rank as it is: whole sequences, and blocks of those that have not two for each rank.
  struct Item {
    size_t sequence;
    int64_t begin, end, cost;
  };
  std::vector<Item> items;
  std::vector<size_t> folded;
  for (size_t s = 0; s < lengths.size(); ++s) {
    const bool whole = costs.of(s) <= total / ranks;
    if (!whole && lengths[s] > (2 * ranks - 1) * alignment) {
      folded.push_back(s);
      continue;
    }
    for (int64_t begin = 0, end = 0; begin < lengths[s]; begin = end) {
      end = whole ? lengths[s] : std::min(begin + alignment, lengths[s]);
      items.push_back({s, begin, end, costs.of(s, begin, end)});
    }
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  std::stable_sort(folded.begin(), folded.end(), [&](size_t a, size_t b) { return costs.of(a) > costs.of(b); });

  ContextSplit split;
  split.ranks.resize(static_cast<size_t>(ranks));
  split.work.assign(static_cast<size_t>(ranks), 0);
  const auto give = [&](size_t rank, size_t s, int64_t begin, int64_t end) {
    if (begin < end) split.ranks[rank].push_back({.sequence = static_cast<int64_t>(s), .begin = begin, .end = end});
  };
  for (const Item& item : items) {
    const auto emptiest = std::min_element(split.work.begin(), split.work.end());
    *emptiest += item.cost;
    give(static_cast<size_t>(emptiest - split.work.begin()), item.sequence, item.begin, item.end);
  }
  for (const size_t s : folded) {
    const auto row_of = [&](int64_t block) { return std::min(block * alignment, lengths[s]); };
    const Stretches stretches =
        improved(fold(level(split.work, costs.of(s)), (lengths[s] + alignment - 1) / alignment), split.work,
                 [&](int64_t block) { return costs.of(s, row_of(block), row_of(block + 1)); });
    for (size_t i = 0; i < stretches.owners.size(); ++i)
      give(stretches.owners[i], s, row_of(stretches.cuts[i]), row_of(stretches.cuts[i + 1]));
  }
  for (std::vector<ContextPiece>& pieces : split.ranks) in_order(pieces);
  link(split, costs, lengths, prefix);
  return split;
}

}  // namespace trireme
