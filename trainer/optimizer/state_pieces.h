// What of which parameter a piece of optimizer state belongs to, so that any split of a model over ranks reads what any
// other has written. Pure.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trainer/model/parameter_layout.h"

namespace trireme {

// Elements [first, first + count) of a parameter's slice, row by row. A parameter is cut along the same dimension in
// every split.
struct StatePiece {
  std::string parameter;
  int64_t dimension = 0;
  Range range;  // of the whole parameter's `dimension`
  int64_t first = 0, count = 0;
  int64_t at = 0;  // of the first one in the state's tensors
  // Where the rank's rows are padded: elements of one, and how far one begins behind the other in the state's tensors.
  // 0: elements follow each other.
  int64_t row = 0, pitch = 0;
};
// Where in the state's tensors element `element` of the slice lies, and back.
int64_t place_of(const StatePiece& piece, int64_t element);
int64_t element_at(const StatePiece& piece, int64_t place);

// A run of a rank's flat buffer that its state holds, and where.
struct OwnedRun {
  int64_t begin = 0, size = 0;
  int64_t at = 0;
};
// In the order of the runs; gaps between parameters, and padding, belong to no piece.
std::vector<StatePiece> state_pieces(const ParameterLayout& layout, const std::vector<OwnedRun>& runs);

struct StateCopy {
  int64_t from = 0, to = 0, count = 0;  // in the state's tensors of the one and of the other
};
// What `wanted` can take of `saved`; both are of one parameter, of this whole shape.
std::vector<StateCopy> common_state(const std::vector<int64_t>& shape, const StatePiece& saved,
                                    const StatePiece& wanted);

// As in a file's metadata. from_json throws Error(kData) for what is no list of pieces.
nlohmann::json to_json(const std::vector<StatePiece>& pieces);
std::vector<StatePiece> state_pieces_from_json(const nlohmann::json& json);

}  // namespace trireme
