#include "trainer/optimizer/state_pieces.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"

namespace trireme {
namespace {

// A slice as rows of the whole parameter: of a cut along dimension 0 the one row of all elements.
struct Rows {
  int64_t rows = 1;
  int64_t begin = 0, end = 0;  // columns
  int64_t width() const { return end - begin; }
};

Rows rows_of(const std::vector<int64_t>& shape, const StatePiece& piece) {
  int64_t inner = 1;
  for (size_t d = static_cast<size_t>(piece.dimension) + 1; d < shape.size(); ++d) inner *= shape[d];
  Rows rows{.rows = 1, .begin = piece.range.begin * inner, .end = piece.range.end * inner};
  for (int64_t d = 0; d < piece.dimension; ++d) rows.rows *= shape[static_cast<size_t>(d)];
  return rows;
}

// Of a parameter that is not cut. Its elements are in the same order along whichever dimension.
bool is_whole(const std::vector<int64_t>& shape, const StatePiece& piece) {
  return piece.range == Range{0, shape[static_cast<size_t>(piece.dimension)]};
}

// Elements behind `element` of its row that lie one after another, itself counted.
int64_t left_in_row(const StatePiece& piece, int64_t element) {
  return piece.pitch == 0 ? std::numeric_limits<int64_t>::max() : piece.row - element % piece.row;
}

// Of the slice's elements as they lie in the flat buffer, padding among them.
int64_t position_of(const StatePiece& piece, int64_t element) {
  return piece.pitch == 0 ? element : element / piece.row * piece.pitch + element % piece.row;
}

// Of a parameter, those of the elements [begin, end) of its part of the flat buffer that are no padding.
StatePiece piece_of(const PlacedParameter& parameter, int64_t begin, int64_t end) {
  const std::vector<int64_t> shape = parameter.shape();
  const bool matrix = shape.size() > 1;
  const int64_t rows = matrix ? shape[0] : 1, row = shape.back(), pitch = parameter.held.back();
  const auto before = [&](int64_t position) {  // elements
    const int64_t full = position / pitch;
    return full >= rows ? rows * row : full * row + std::min(position % pitch, row);
  };
  StatePiece piece{.parameter = parameter.name,
                   .dimension = parameter.slice.dimension,
                   .range = parameter.slice.range,
                   .first = before(begin),
                   .count = before(end) - before(begin)};
  if (matrix && row != pitch) piece.row = row, piece.pitch = pitch;
  piece.at = position_of(piece, piece.first) - begin;
  return piece;
}

// As one with the copy before it where that ends in both places.
void add_copy(std::vector<StateCopy>& copies, const StateCopy& copy) {
  StateCopy* before = copies.empty() ? nullptr : &copies.back();
  if (before != nullptr && before->from + before->count == copy.from && before->to + before->count == copy.to) {
    before->count += copy.count;
  } else {
    copies.push_back(copy);
  }
}

StatePiece whole_along(const std::vector<int64_t>& shape, StatePiece piece, int64_t dimension) {
  piece.dimension = dimension;
  piece.range = {0, shape[static_cast<size_t>(dimension)]};
  return piece;
}

}  // namespace

int64_t place_of(const StatePiece& piece, int64_t element) {
  return piece.at + position_of(piece, element) - position_of(piece, piece.first);
}

int64_t element_at(const StatePiece& piece, int64_t place) {
  const int64_t position = place - piece.at + position_of(piece, piece.first);
  return piece.pitch == 0 ? position : position / piece.pitch * piece.row + position % piece.pitch;
}

std::vector<StatePiece> state_pieces(const ParameterLayout& layout, const std::vector<OwnedRun>& runs) {
  std::vector<StatePiece> pieces;
  for (const OwnedRun& run : runs) {
    for (const PlacedParameter& parameter : layout.parameters) {
      const int64_t begin = std::max(run.begin, parameter.offset);
      const int64_t end = std::min(run.begin + run.size, parameter.offset + parameter.size);
      if (begin >= end) continue;
      StatePiece piece = piece_of(parameter, begin - parameter.offset, end - parameter.offset);
      piece.at += run.at + begin - run.begin;
      if (piece.count > 0) pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

std::vector<StateCopy> common_state(const std::vector<int64_t>& shape, const StatePiece& saved,
                                    const StatePiece& wanted) {
  if (saved.dimension != wanted.dimension) {
    TRIREME_CHECK(is_whole(shape, saved) || is_whole(shape, wanted), "a parameter is cut along one dimension");
    return is_whole(shape, saved) ? common_state(shape, whole_along(shape, saved, wanted.dimension), wanted)
                                  : common_state(shape, saved, whole_along(shape, wanted, saved.dimension));
  }
  std::vector<StateCopy> copies;
  const Rows from = rows_of(shape, saved), to = rows_of(shape, wanted);
  if (from.width() <= 0 || to.width() <= 0 || saved.count <= 0 || wanted.count <= 0) return copies;
  const int64_t first = std::max(saved.first / from.width(), wanted.first / to.width());
  const int64_t last =
      std::min((saved.first + saved.count - 1) / from.width(), (wanted.first + wanted.count - 1) / to.width());
  for (int64_t row = first; row <= last; ++row) {
    // Columns that a piece has of this row.
    const auto columns = [row](const Rows& rows, const StatePiece& piece) {
      const int64_t begin = std::max<int64_t>(0, piece.first - row * rows.width());
      const int64_t end = std::min(rows.width(), piece.first + piece.count - row * rows.width());
      return Range{rows.begin + begin, rows.begin + end};
    };
    const Range there = columns(from, saved), here = columns(to, wanted);
    const int64_t begin = std::max(there.begin, here.begin), end = std::min(there.end, here.end);
    if (begin >= end) continue;
    for (int64_t column = begin; column < end;) {
      const int64_t of_saved = row * from.width() + column - from.begin,
                    of_wanted = row * to.width() + column - to.begin;
      const int64_t count = std::min({end - column, left_in_row(saved, of_saved), left_in_row(wanted, of_wanted)});
      add_copy(copies, {place_of(saved, of_saved), place_of(wanted, of_wanted), count});
      column += count;
    }
  }
  return copies;
}

nlohmann::json to_json(const std::vector<StatePiece>& pieces) {
  nlohmann::json list = nlohmann::json::array();
  for (const StatePiece& piece : pieces) {
    list.push_back(
        {piece.parameter, piece.dimension, piece.range.begin, piece.range.end, piece.first, piece.count, piece.at});
    if (piece.pitch > 0) list.back().insert(list.back().end(), {piece.row, piece.pitch});
  }
  return list;
}

std::vector<StatePiece> state_pieces_from_json(const nlohmann::json& json) {
  std::vector<StatePiece> pieces;
  try {
    for (const nlohmann::json& one : json) {
      pieces.push_back({.parameter = one.at(0).get<std::string>(),
                        .dimension = one.at(1).get<int64_t>(),
                        .range = {one.at(2).get<int64_t>(), one.at(3).get<int64_t>()},
                        .first = one.at(4).get<int64_t>(),
                        .count = one.at(5).get<int64_t>(),
                        .at = one.at(6).get<int64_t>(),
                        .row = one.size() > 7 ? one.at(7).get<int64_t>() : 0,
                        .pitch = one.size() > 7 ? one.at(8).get<int64_t>() : 0});
      const StatePiece& piece = pieces.back();
      if (piece.pitch != 0 && (piece.row < 1 || piece.pitch < piece.row)) fail_data("padded rows that overlap");
    }
  } catch (const nlohmann::json::exception& error) {
    fail_data(std::string("no list of pieces of optimizer state: ") + error.what());
  }
  return pieces;
}

}  // namespace trireme
