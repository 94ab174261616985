#include "trainer/parallel/weight_pieces.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "base/error.h"

namespace trireme {
namespace {

constexpr int64_t kElementsAtOnce = int64_t{4} << 20;  // of a reduction, which needs 16 bytes more for each

// Elements [from, to) of the piece's, row by row: what of the first row, rows that are whole, what of the last row.
void append_range(const WeightPiece& piece, int64_t from, int64_t to, std::vector<WeightPiece>& pieces) {
  while (from < to) {
    const int64_t row = from / piece.columns, column = from % piece.columns;
    const bool whole_rows = column == 0 && to - from >= piece.columns;
    WeightPiece part = piece;
    part.offset += row * piece.stride + column;
    part.place += row * piece.place_stride + column;
    part.rows = whole_rows ? (to - from) / piece.columns : 1;
    part.columns = whole_rows ? piece.columns : std::min(piece.columns - column, to - from);
    pieces.push_back(part);
    from += part.elements();
  }
}

// Rows without gaps between them are one.
void append_stretch(const WeightPiece& piece, std::vector<WeightChunk::Stretch>& stretches) {
  WeightChunk::Stretch next{piece.offset, piece.rows, piece.columns, piece.stride};
  if (next.rows == 1 || next.stride == next.columns) next = {next.offset, 1, next.elements(), next.elements()};
  if (!stretches.empty() && next.rows == 1) {
    WeightChunk::Stretch& last = stretches.back();
    if (last.rows == 1 && last.offset + last.columns == next.offset) {
      last.columns += next.columns;
      last.stride = last.columns;
      return;
    }
  }
  stretches.push_back(next);
}

// Signed integers of the elements' size.
at::Tensor bits_of(const at::Tensor& flat) {
  switch (flat.element_size()) {
    case 1:
      return flat.view(at::kChar);
    case 2:
      return flat.view(at::kShort);
    case 4:
      return flat.view(at::kInt);
    case 8:
      return flat.view(at::kLong);
    default:
      fail_internal("weights of a dtype whose elements have " + std::to_string(flat.element_size()) + " bytes");
  }
}

at::Tensor view_of(const at::Tensor& flat, const WeightChunk::Stretch& stretch) {
  return flat.as_strided({stretch.rows, stretch.columns}, {stretch.stride, 1}, flat.storage_offset() + stretch.offset);
}

template <typename Bits>
uint64_t sum_of(const Bits* flat, const WeightPiece& piece) {
  uint64_t sum = 0;
  for (int64_t row = 0; row < piece.rows; ++row) {
    const Bits* bits = flat + piece.offset + row * piece.stride;
    const auto place = static_cast<uint64_t>(piece.place + row * piece.place_stride);
    for (int64_t column = 0; column < piece.columns; ++column) {
      sum +=
          static_cast<uint64_t>(static_cast<int64_t>(bits[column])) * (2 * (place + static_cast<uint64_t>(column)) + 1);
    }
  }
  return sum;
}

template <typename Bits>
uint64_t sum_of(const at::Tensor& bits, const WeightPart& part) {
  uint64_t sum = 0;
  for (const WeightPiece& piece : part.pieces) sum += sum_of(bits.const_data_ptr<Bits>(), piece);
  return sum;
}

void check(const at::Tensor& flat, const WeightPart& part) {
  TRIREME_CHECK(flat.dim() == 1 && flat.is_contiguous() && !part.whole, "pieces are of a flat buffer");
  for (const WeightPiece& piece : part.pieces) {
    const int64_t end = piece.offset + (piece.rows - 1) * piece.stride + piece.columns;
    TRIREME_CHECK(piece.rows > 0 && piece.columns > 0 && piece.offset >= 0 && end <= flat.numel(),
                  "a piece of weights that the flat buffer does not have");
  }
}

}  // namespace

std::vector<WeightChunk> chunks_of(const WeightPart& part, int64_t elements) {
  TRIREME_CHECK(elements > 0 && !part.whole, "a stream is cut behind some elements");
  std::vector<WeightChunk> chunks;
  std::vector<WeightPiece> cut;
  for (const WeightPiece& piece : part.pieces) {
    for (int64_t from = 0; from < piece.elements();) {
      if (chunks.empty() || chunks.back().elements == elements) chunks.emplace_back();
      WeightChunk& chunk = chunks.back();
      const int64_t to = std::min(piece.elements(), from + elements - chunk.elements);
      cut.clear();
      append_range(piece, from, to, cut);
      for (const WeightPiece& one : cut) append_stretch(one, chunk.stretches);
      chunk.elements += to - from;
      from = to;
    }
  }
  return chunks;
}

void gather_chunk(const at::Tensor& flat, const WeightChunk& chunk, at::Tensor packed) {
  const at::NoGradGuard no_grad;
  int64_t at = 0;
  for (const WeightChunk::Stretch& stretch : chunk.stretches) {
    packed.narrow(0, at, stretch.elements()).view({stretch.rows, stretch.columns}).copy_(view_of(flat, stretch));
    at += stretch.elements();
  }
}

void scatter_chunk(const at::Tensor& packed, const WeightChunk& chunk, at::Tensor flat) {
  const at::NoGradGuard no_grad;
  int64_t at = 0;
  for (const WeightChunk::Stretch& stretch : chunk.stretches) {
    view_of(flat, stretch).copy_(packed.narrow(0, at, stretch.elements()).view({stretch.rows, stretch.columns}));
    at += stretch.elements();
  }
}

uint64_t part_checksum_by_reduction(const at::Tensor& flat, const WeightPart& part) {
  const at::NoGradGuard no_grad;
  check(flat, part);
  const at::Tensor bits = bits_of(flat.detach());
  const auto counted = [&](int64_t count) { return at::arange(count, bits.options().dtype(at::kLong)); };
  at::Tensor sum = at::zeros({}, bits.options().dtype(at::kLong));
  std::vector<WeightPiece> cut;
  for (const WeightPiece& piece : part.pieces) {
    // As many whole rows at a time as may be, or what of a longer one may be.
    const int64_t step =
        piece.columns >= kElementsAtOnce ? kElementsAtOnce : kElementsAtOnce / piece.columns * piece.columns;
    cut.clear();
    for (int64_t from = 0; from < piece.elements(); from += step)
      append_range(piece, from, std::min(piece.elements(), from + step), cut);
    for (const WeightPiece& one : cut) {
      const at::Tensor places =
          counted(one.rows).mul_(one.place_stride).add_(one.place).unsqueeze(1) + counted(one.columns).unsqueeze(0);
      const at::Tensor own = view_of(bits, {one.offset, one.rows, one.columns, one.stride}).to(at::kLong);
      sum += (own * (2 * places + 1)).sum();
    }
  }
  return static_cast<uint64_t>(sum.item<int64_t>());
}

uint64_t part_checksum(const at::Tensor& flat, const WeightPart& part) {
  if (!flat.is_cpu()) return part_checksum_by_reduction(flat, part);
  check(flat, part);
  const at::Tensor bits = bits_of(flat.detach());
  switch (bits.element_size()) {
    case 1:
      return sum_of<int8_t>(bits, part);
    case 2:
      return sum_of<int16_t>(bits, part);
    case 4:
      return sum_of<int32_t>(bits, part);
    default:
      return sum_of<int64_t>(bits, part);
  }
}

}  // namespace trireme
