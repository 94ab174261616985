// Dealing sequences to context ranks against what is written down row by row, and against the best of all ways to deal.
#include "topology/context_split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>
#include <set>

#include "base/error.h"

namespace trireme {
namespace {

struct Batch {
  std::vector<int64_t> lengths, prefix;
  int64_t ranks = 1;
  ContextWork work;
  int64_t alignment = kPieceAlignment;
};

ContextSplit deal(const Batch& batch) {
  return split_context(batch.lengths, batch.prefix, batch.ranks, batch.work, batch.alignment);
}

std::ostream& operator<<(std::ostream& out, const Batch& batch) {
  out << batch.ranks << " ranks, aligned to " << batch.alignment << ", work " << batch.work.row << " and "
      << batch.work.square << ":";
  for (size_t s = 0; s < batch.lengths.size(); ++s) {
    out << " " << batch.lengths[s];
    if (!batch.prefix.empty() && batch.prefix[s] >= 0) out << "<" << batch.prefix[s];
  }
  return out;
}

int64_t prefix_of(const Batch& batch, size_t s) { return batch.prefix.empty() ? -1 : batch.prefix[s]; }

// Row after row: itself and the keys that it sees, twice and once more, which sums to n^2.
int64_t cost_of_rows(const Batch& batch, size_t s, int64_t begin, int64_t end) {
  const int64_t p = prefix_of(batch, s);
  const int64_t past = p < 0 ? 0 : batch.lengths[static_cast<size_t>(p)];
  int64_t cost = 0;
  for (int64_t row = begin; row < end; ++row) cost += batch.work.row + batch.work.square * (2 * (past + row) + 1);
  return cost;
}

using Row = std::pair<int64_t, int64_t>;  // sequence and row in it

// The keys that a piece's first row sees besides its own.
std::vector<Row> keys_before(const Batch& batch, const ContextPiece& piece) {
  std::vector<Row> keys;
  const int64_t p = prefix_of(batch, static_cast<size_t>(piece.sequence));
  if (p >= 0) {
    for (int64_t row = 0; row < batch.lengths[static_cast<size_t>(p)]; ++row) keys.emplace_back(p, row);
  }
  for (int64_t row = 0; row < piece.begin; ++row) keys.emplace_back(piece.sequence, row);
  return keys;
}

void expect_invariants(const Batch& batch, const ContextSplit& split) {
  ASSERT_EQ(static_cast<int64_t>(split.ranks.size()), batch.ranks);
  std::map<Row, int64_t> owner;
  std::vector<int64_t> pieces_of(batch.lengths.size(), 0), total(batch.lengths.size(), 0);
  for (size_t rank = 0; rank < split.ranks.size(); ++rank) {
    int64_t work = 0;
    std::map<int64_t, int64_t> own_pieces;
    std::pair<int64_t, int64_t> before{-1, -1};
    for (const ContextPiece& piece : split.ranks[rank]) {
      const auto s = static_cast<size_t>(piece.sequence);
      ASSERT_LT(before, (std::pair{piece.sequence, piece.begin})) << "not in the order of the batch";
      before = {piece.sequence, piece.end};  // adjacent ones would be one
      ASSERT_LT(piece.begin, piece.end);
      ASSERT_EQ(piece.begin % batch.alignment, 0);
      ASSERT_TRUE(piece.end % batch.alignment == 0 || piece.end == batch.lengths[s]);
      for (int64_t row = piece.begin; row < piece.end; ++row) {
        const bool fresh = owner.emplace(Row(piece.sequence, row), rank).second;
        ASSERT_TRUE(fresh) << "row " << row << " of sequence " << s << " twice";
      }
      if (batch.lengths[s] > (2 * batch.ranks - 1) * batch.alignment) {
        ASSERT_LE(++own_pieces[piece.sequence], 2);
      }
      ++pieces_of[s];
      work += cost_of_rows(batch, s, piece.begin, piece.end);
    }
    ASSERT_EQ(split.work[rank], work);
  }
  size_t rows = 0;
  int64_t all = 0;
  for (size_t s = 0; s < batch.lengths.size(); ++s) {
    rows += static_cast<size_t>(batch.lengths[s]);
    all += total[s] = cost_of_rows(batch, s, 0, batch.lengths[s]);
  }
  ASSERT_EQ(owner.size(), rows);
  for (size_t s = 0; s < batch.lengths.size(); ++s) {
    if (total[s] * batch.ranks <= all) {
      ASSERT_LE(pieces_of[s], 1) << "sequence " << s << " is cut";
    }
  }
  // Earlier keys, and who is asked for his.
  std::set<Row> asked;
  for (size_t rank = 0; rank < split.ranks.size(); ++rank) {
    for (const ContextPiece& piece : split.ranks[rank]) {
      std::vector<Row> listed;
      for (const KeyRange& range : piece.earlier) {
        for (int64_t row = range.begin; row < range.end; ++row) {
          listed.emplace_back(range.sequence, row);
          ASSERT_EQ(owner.at(listed.back()), range.rank);
          if (range.rank != static_cast<int64_t>(rank)) asked.insert(listed.back());
        }
      }
      ASSERT_EQ(listed, keys_before(batch, piece));
      ASSERT_EQ(piece.past, static_cast<int64_t>(listed.size()));
    }
  }
  for (const auto& pieces : split.ranks) {
    for (const ContextPiece& piece : pieces) {
      for (int64_t row = piece.begin; row < piece.end; ++row)
        ASSERT_EQ(asked.count({piece.sequence, row}) > 0, piece.shared);
    }
  }
}

Batch random_batch(std::mt19937& random, int64_t most_sequences, int64_t most_rows, int64_t most_ranks) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  Batch batch;
  batch.ranks = 1 + below(most_ranks);
  batch.alignment = std::vector<int64_t>{1, 2, 4, 128}[static_cast<size_t>(below(4))];
  batch.work = {.row = std::vector<int64_t>{1, 20, 1000, 53'000}[static_cast<size_t>(below(4))], .square = below(2)};
  const int64_t sequences = below(most_sequences + 1);
  const bool prefixes = below(2) == 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const bool giant = below(4) == 0;
    batch.lengths.push_back(below(giant ? most_rows : most_rows / 8 + 1));
    if (!prefixes) continue;
    std::vector<int64_t> prompts{-1};
    for (int64_t p = 0; p < s; ++p) {
      if (batch.prefix[static_cast<size_t>(p)] < 0) prompts.push_back(p);
    }
    batch.prefix.push_back(prompts[static_cast<size_t>(below(static_cast<int64_t>(prompts.size())))]);
  }
  return batch;
}

TEST(ContextSplit, EveryRowOnceWithItsKeys) {
  std::mt19937 random(1);
  int64_t cut = 0;
  for (int i = 0; i < 400; ++i) {
    const Batch batch = random_batch(random, 12, i % 8 == 0 ? 3000 : 300, 8);
    const ContextSplit split = deal(batch);
    ASSERT_NO_FATAL_FAILURE(expect_invariants(batch, split)) << batch;
    for (const auto& pieces : split.ranks)
      for (const ContextPiece& piece : pieces) cut += piece.begin > 0 ? 1 : 0;
    const ContextSplit again = deal(batch);
    ASSERT_EQ(again.ranks, split.ranks);
    ASSERT_EQ(again.work, split.work);
  }
  EXPECT_GT(cut, 100);
}

// The least that the fullest rank can have when short sequences stay whole and long ones go in any of their blocks to
// anybody.
int64_t best_of_all(const Batch& batch) {
  std::vector<int64_t> costs;
  int64_t total = 0;
  for (size_t s = 0; s < batch.lengths.size(); ++s) total += cost_of_rows(batch, s, 0, batch.lengths[s]);
  for (size_t s = 0; s < batch.lengths.size(); ++s) {
    const int64_t length = batch.lengths[s];
    const bool whole = cost_of_rows(batch, s, 0, length) * batch.ranks <= total;
    for (int64_t row = 0; row < length; row += whole ? length : batch.alignment)
      costs.push_back(cost_of_rows(batch, s, row, whole ? length : std::min(length, row + batch.alignment)));
  }
  std::sort(costs.rbegin(), costs.rend());
  std::vector<int64_t> loads(static_cast<size_t>(batch.ranks), 0);
  int64_t best = total;
  const auto place = [&](const auto& self, size_t item, int64_t most) -> void {
    if (most >= best) return;
    if (item == costs.size()) {
      best = most;
      return;
    }
    std::set<int64_t> tried;
    for (int64_t& load : loads) {
      if (!tried.insert(load).second) continue;
      load += costs[item];
      self(self, item + 1, std::max(most, load));
      load -= costs[item];
    }
  };
  place(place, 0, 0);
  return costs.empty() ? 0 : best;
}

TEST(ContextSplit, TheFullestRankIsNearTheBestOfAllWays) {
  std::mt19937 random(2);
  double sum = 0;
  int64_t checked = 0;
  for (int i = 0; i < 3000; ++i) {
    Batch batch = random_batch(random, 6, 24, 4);
    batch.alignment = std::max<int64_t>(2, batch.alignment % 5);
    batch.work.row = std::min<int64_t>(batch.work.row, 20);
    int64_t rows = 0;
    for (const int64_t length : batch.lengths) rows += length;
    if (rows == 0 || rows > 14 * batch.alignment || batch.ranks == 1) continue;
    const ContextSplit split = deal(batch);
    const int64_t most = *std::max_element(split.work.begin(), split.work.end());
    const int64_t best = best_of_all(batch);
    const double ratio = static_cast<double>(most) / static_cast<double>(best);
    ASSERT_LE(ratio, 4.0 / 3) << batch;
    sum += ratio;
    ++checked;
  }
  EXPECT_GT(checked, 1000);
  EXPECT_LE(sum / static_cast<double>(checked), 1.02);
}

// [begin, end) of each piece of each rank, of one sequence.
std::vector<std::vector<Range>> ranges(const ContextSplit& split) {
  std::vector<std::vector<Range>> all;
  for (const auto& pieces : split.ranks) {
    all.emplace_back();
    for (const ContextPiece& piece : pieces) all.back().push_back({piece.begin, piece.end});
  }
  return all;
}

TEST(ContextSplit, OneLongSequenceIsFoldedAsInMegatron) {
  // Rank i has the parts i and 2r - 1 - i of 2r: the same work and the same rows.
  const ContextWork work = context_work(*known_model_shape("Llama-3.1-70B"));
  for (const int64_t ranks : {2, 4, 8}) {
    const int64_t rows = 16'384, part = rows / (2 * ranks);
    const ContextSplit split = split_context({rows}, {}, ranks, work);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const std::vector<Range> own = ranges(split)[static_cast<size_t>(rank)];
      if (rank + 1 == ranks) {
        EXPECT_EQ(own, (std::vector<Range>{{rank * part, rows - rank * part}}));
      } else {
        EXPECT_EQ(own, (std::vector<Range>{{rank * part, (rank + 1) * part},
                                           {rows - (rank + 1) * part, rows - rank * part}}));
      }
      EXPECT_EQ(split.work[static_cast<size_t>(rank)], split.work[0]);
    }
  }
  EXPECT_EQ(ranges(split_context({1000}, {}, 1, work)), (std::vector<std::vector<Range>>{{{0, 1000}}}));
  // No lengths need to divide, and nothing to cut is no error.
  EXPECT_EQ(ranges(split_context({100}, {}, 2, work)), (std::vector<std::vector<Range>>{{{0, 100}}, {}}));
  EXPECT_EQ(ranges(split_context({}, {}, 2, work)), (std::vector<std::vector<Range>>(2)));
  EXPECT_EQ(ranges(split_context({0}, {}, 2, work)), (std::vector<std::vector<Range>>(2)));
}

TEST(ContextSplit, ByHand) {
  // A prompt of 200 rows and three answers over two ranks, rows alone: 850 are a share, so the answer of 1,000 is cut.
  // Whole ones are dealt 300 | 200 + 200; of the cut one's 8 blocks, the last of 104 rows, rank 0 gets two from each
  // end.
  const ContextSplit split = split_context({200, 300, 200, 1000}, {-1, 0, 0, 0}, 2, {});
  EXPECT_EQ(split.work, (std::vector<int64_t>{788, 912}));
  ASSERT_EQ(split.ranks[1].size(), 3u);
  const ContextPiece& prompt = split.ranks[1][0];
  EXPECT_EQ(prompt.sequence, 0);
  EXPECT_EQ(prompt.past, 0);
  EXPECT_TRUE(prompt.earlier.empty());
  EXPECT_TRUE(prompt.shared);  // rank 0 has answers to it
  EXPECT_FALSE(split.ranks[0][0].shared);
  const ContextPiece& middle = split.ranks[1][2];
  EXPECT_EQ(middle, (ContextPiece{.sequence = 3,
                                  .begin = 256,
                                  .end = 768,
                                  .past = 456,
                                  .earlier = {{1, 0, 0, 200}, {0, 3, 0, 256}},
                                  .shared = true}));
}

// Batches as rollouts give them: only what is longer than a share is cut, and ranks are even.
TEST(ContextSplit, RolloutsAreEvenWithHardlyAnyCuts) {
  const ContextWork work = context_work(*known_model_shape("Llama-3.1-8B"));
  EXPECT_NEAR(static_cast<double>(work.row), 53'248, 1);  // 218 M weights, heads of 4,096
  std::mt19937 random(3);
  for (int i = 0; i < 100; ++i) {
    std::vector<int64_t> lengths, prefix;
    const bool shared = i % 2 == 0;
    const bool giant = i % 4 >= 2;
    if (giant) {
      lengths.push_back(10'000 + static_cast<int64_t>(random() % 6000));
      prefix.push_back(-1);
    }
    for (int group = 0; group < 4; ++group) {
      const auto prompt = static_cast<int64_t>(lengths.size());
      lengths.push_back(100 + static_cast<int64_t>(random() % 400));
      prefix.push_back(-1);
      for (int answer = 0; answer < 6; ++answer) {
        lengths.push_back(50 + static_cast<int64_t>(random() % 1500));
        prefix.push_back(shared ? prompt : -1);
      }
    }
    const Batch batch{lengths, prefix, 2 << (i % 2), work};
    const ContextSplit split = deal(batch);
    ASSERT_NO_FATAL_FAILURE(expect_invariants(batch, split)) << batch;
    const int64_t total = std::accumulate(split.work.begin(), split.work.end(), int64_t{0});
    const int64_t most = *std::max_element(split.work.begin(), split.work.end());
    EXPECT_LE(static_cast<double>(most) * static_cast<double>(batch.ranks), 1.05 * static_cast<double>(total)) << batch;
    for (const auto& pieces : split.ranks)
      for (const ContextPiece& piece : pieces) EXPECT_TRUE(piece.begin == 0 || (giant && piece.sequence == 0));
  }
}

TEST(ContextSplit, RefusesWhatIsNoBatch) {
  EXPECT_THROW(split_context({10}, {}, 0, {}), Error);
  EXPECT_THROW(split_context({10}, {}, 2, {}, 0), Error);
  EXPECT_THROW(split_context({-1}, {}, 2, {}), Error);
  EXPECT_THROW(split_context({10, 10}, {-1}, 2, {}), Error);
  EXPECT_THROW(split_context({10, 10}, {1, -1}, 2, {}), Error);         // a prefix that comes later
  EXPECT_THROW(split_context({10, 10, 10}, {-1, 0, 1}, 2, {}), Error);  // one that has a prefix itself
  EXPECT_THROW(split_context({int64_t{1} << 40}, {}, 2, {}), Error);
  EXPECT_THROW(split_context({10}, {}, 2, {.row = 0}), Error);
}

}  // namespace
}  // namespace trireme
