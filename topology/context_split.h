// Which context parallel rank computes which rows of a micro-batch. Short sequences go whole to one rank; one that is
// more than a rank's fair share is cut.
#pragma once

#include <cstdint>
#include <vector>

#include "topology/topology.h"

namespace trireme {

// What rows cost, in whole numbers so that every rank finds the same: n rows with nothing before them take
// row * n + square * n^2, and a row of a sequence as much more as it has keys before it.
struct ContextWork {
  int64_t row = 1;     // at least 1
  int64_t square = 0;  // 0 or 1: `row` is in proportion to it
};
// In proportion to a layer's operations.
ContextWork context_work(const ModelShape& shape);

// Rows [begin, end) of a sequence that lie on one rank.
struct KeyRange {
  int64_t rank = 0;
  int64_t sequence = 0;
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const KeyRange&) const = default;
};

struct ContextPiece {
  int64_t sequence = 0;
  int64_t begin = 0;  // rows of the sequence; a multiple of the alignment
  int64_t end = 0;    // also one, or the sequence's end
  int64_t past = 0;   // rows before it: its prefix's, and its own sequence's from 0 to begin
  // Where those are, in the order of the keys.
  std::vector<KeyRange> earlier;
  bool shared = false;  // another rank's pieces have it among their earlier rows
  bool operator==(const ContextPiece&) const = default;
};

struct ContextSplit {
  std::vector<std::vector<ContextPiece>> ranks;  // of each, in the order of the batch; may be none
  std::vector<int64_t> work;                     // of each
};

// Rows of a piece begin at multiples of it, counted from the sequence's first row, so that tiles of query rows lie as
// they do in the whole sequence.
inline constexpr int64_t kPieceAlignment = 128;

// lengths[s]: rows of sequence s of the batch. prefix[s]: an earlier sequence whose rows all come before those of s and
// that has no prefix itself; -1: none. prefix may be empty: nobody has one.
//   A sequence is cut only if it is more than the total divided by the ranks. Whole ones are dealt first, the largest
//   to
// the emptiest rank; blocks of one that has not two blocks for each rank as if they were sequences. The others level
// what is left: each has at most two pieces on a rank, one from its front and one from its back, of about as many rows,
// so that rows and work are even together (one sequence over r ranks: rank i has the parts i and 2r - 1 - i of 2r). A
// function of its arguments alone.
ContextSplit split_context(const std::vector<int64_t>& lengths, const std::vector<int64_t>& prefix, int64_t ranks,
                           const ContextWork& work, int64_t alignment = kPieceAlignment);

}  // namespace trireme
