// Pieces of flat buffers: how a stream of them is cut, moved and summed up.
#include "trainer/parallel/weight_pieces.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace trireme {
namespace {

WeightPart part_of(std::vector<WeightPiece> pieces) {
  WeightPart part{.whole = false, .pieces = std::move(pieces)};
  for (const WeightPiece& piece : part.pieces) part.elements += piece.elements();
  return part;
}

// Offset of each element of the stream, one by one.
std::vector<int64_t> stream_of(const WeightPart& part) {
  std::vector<int64_t> offsets;
  for (const WeightPiece& piece : part.pieces) {
    for (int64_t row = 0; row < piece.rows; ++row) {
      for (int64_t column = 0; column < piece.columns; ++column)
        offsets.push_back(piece.offset + row * piece.stride + column);
    }
  }
  return offsets;
}

// A row, columns of a matrix, three runs next to each other that are one, a matrix without gaps.
WeightPart some() {
  return part_of({{5, 1, 7, 7, 100, 7},
                  {20, 4, 3, 10, 200, 6},
                  {60, 1, 2, 2, 300, 2},
                  {62, 1, 1, 1, 500, 1},
                  {63, 1, 4, 4, 7, 4},
                  {70, 2, 5, 5, 400, 9}});
}

TEST(WeightPieces, AStreamIsCutAnywhereAndComesBackTogether) {
  const WeightPart part = some();
  const std::vector<int64_t> stream = stream_of(part);
  const at::Tensor flat = at::arange(80, at::kFloat);
  for (const int64_t elements : {1, 2, 3, 5, 8, 11, 19, 36, 100}) {
    at::Tensor there = at::full({80}, -1, at::kFloat);
    size_t taken = 0;
    const std::vector<WeightChunk> chunks = chunks_of(part, elements);
    for (size_t c = 0; c < chunks.size(); ++c) {
      const WeightChunk& chunk = chunks[c];
      EXPECT_EQ(chunk.elements, c + 1 < chunks.size() ? elements : part.elements - elements * static_cast<int64_t>(c));
      const at::Tensor packed = at::empty({chunk.elements}, at::kFloat);
      gather_chunk(flat, chunk, packed);
      for (int64_t i = 0; i < chunk.elements; ++i)
        ASSERT_EQ(packed[i].item<float>(), static_cast<float>(stream.at(taken++))) << "cut every " << elements;
      if (chunk.contiguous()) {
        EXPECT_TRUE(at::equal(packed, flat.narrow(0, chunk.stretches.front().offset, chunk.elements)));
      }
      scatter_chunk(packed, chunk, there);
    }
    EXPECT_EQ(taken, stream.size());
    for (int64_t i = 0; i < 80; ++i) {
      const bool moved = std::find(stream.begin(), stream.end(), i) != stream.end();
      EXPECT_EQ(there[i].item<float>(), moved ? static_cast<float>(i) : -1.0F);
    }
  }
}

TEST(WeightPieces, WhatLiesNextToEachOtherIsOneStretch) {
  const std::vector<WeightChunk> chunks = chunks_of(some(), 100);
  ASSERT_EQ(chunks.size(), 1U);
  EXPECT_EQ(chunks.front().stretches.size(), 4U);  // the row, the columns, the three runs, the matrix
  EXPECT_FALSE(chunks.front().contiguous());
  const std::vector<WeightChunk> runs = chunks_of(part_of({{60, 1, 2, 2, 300, 2}, {62, 3, 2, 2, 500, 4}}), 100);
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_TRUE(runs.front().contiguous());
  EXPECT_EQ(runs.front().stretches.front().columns, 8);
}

TEST(WeightPieces, ChecksumsGoByPlacesOfTheWholeModelAndTheBits) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
    const at::Tensor flat = at::arange(-30, 50, at::kLong).to(dtype).mul_(0.37);
    const WeightPart part = some();
    const uint64_t sum = part_checksum(flat, part);
    EXPECT_EQ(part_checksum_by_reduction(flat, part), sum);
    // The same elements of another flat buffer, in which they lie otherwise.
    WeightPart moved = part;
    at::Tensor other = at::zeros({200}, dtype);
    int64_t at = 3;
    for (WeightPiece& piece : moved.pieces) {
      for (int64_t row = 0; row < piece.rows; ++row) {
        other.narrow(0, at + row * (piece.columns + 2), piece.columns)
            .copy_(flat.narrow(0, piece.offset + row * piece.stride, piece.columns));
      }
      piece.offset = at;
      piece.stride = piece.columns + 2;
      at += piece.rows * piece.stride;
    }
    EXPECT_EQ(part_checksum(other, moved), sum);
    for (const int64_t offset : stream_of(part)) {
      at::Tensor changed = flat.clone();
      changed.narrow(0, offset, 1).add_(1);
      EXPECT_NE(part_checksum(changed, part), sum) << offset;
    }
    WeightPart wrong = part;
    ++wrong.pieces[1].offset;  // a column beside
    EXPECT_NE(part_checksum(flat, wrong), sum);
  }
}

TEST(WeightPieces, ChecksumsOfManyElementsAreTheSameByReductions) {
  const at::Tensor flat = at::arange(9000000, at::kLong).remainder(30011).to(at::kBFloat16);
  const WeightPart part =
      part_of({{3, 1, 5000001, 5000001, 1, 5000001}, {5000100, 1500, 2001, 2100, int64_t{1} << 33, 4002}});
  EXPECT_EQ(part_checksum_by_reduction(flat, part), part_checksum(flat, part));
}

}  // namespace
}  // namespace trireme
