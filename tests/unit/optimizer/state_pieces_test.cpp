// Pieces of optimizer state against brute force: each element of a parameter knows where every split keeps it.
#include "trainer/optimizer/state_pieces.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "base/error.h"
#include "tests/unit/model/testing.h"

namespace trireme {
namespace {

using Element = int64_t;  // its number in the whole parameter, row by row

// Element by element, from what slices and pieces mean.
std::map<Element, int64_t> places(const std::vector<int64_t>& shape, const StatePiece& piece) {
  std::vector<Element> of_slice;
  int64_t rows = shape[0], columns = shape.size() > 1 ? shape[1] : 1;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t along = piece.dimension == 0 ? r : c;
      if (along >= piece.range.begin && along < piece.range.end) of_slice.push_back(r * columns + c);
    }
  }
  std::map<Element, int64_t> found;
  int64_t place = piece.at, column = piece.pitch > 0 ? piece.first % piece.row : 0;
  for (int64_t i = 0; i < piece.count; ++i) {
    found[of_slice.at(static_cast<size_t>(piece.first + i))] = place++;
    if (piece.pitch == 0 || ++column < piece.row) continue;
    column = 0;
    place += piece.pitch - piece.row;  // over the padding
  }
  return found;
}

TEST(StatePieces, CommonElementsAreThoseOfBruteForce) {
  std::mt19937_64 random(3);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % static_cast<uint64_t>(limit)); };
  int64_t met = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::vector<int64_t> shape = {1 + below(7)};
    if (below(3) > 0) shape.push_back(1 + below(6));
    const int64_t dimension = shape.size() > 1 ? below(2) : 0;
    const int64_t inner = shape.size() > 1 ? shape[static_cast<size_t>(1 - dimension)] : 1;
    const auto piece = [&] {
      StatePiece one{.parameter = "w", .dimension = dimension};
      const int64_t extent = shape[static_cast<size_t>(dimension)];
      one.range.begin = below(extent);
      one.range.end = one.range.begin + 1 + below(extent - one.range.begin);
      const int64_t elements = one.range.size() * inner;
      one.first = below(elements);
      one.count = 1 + below(elements - one.first);
      one.at = below(50);
      if (shape.size() > 1 && below(2) > 0) {
        one.row = dimension == 1 ? one.range.size() : shape[1];
        one.pitch = one.row + below(4);
      }
      return one;
    };
    const StatePiece saved = piece(), wanted = piece();
    std::map<int64_t, int64_t> expected, copied;  // place in wanted -> place in saved
    const std::map<Element, int64_t> there = places(shape, saved);
    for (const auto& [element, place] : places(shape, wanted)) {
      if (const auto found = there.find(element); found != there.end()) expected[place] = found->second;
    }
    for (const StateCopy& copy : common_state(shape, saved, wanted)) {
      for (int64_t i = 0; i < copy.count; ++i)
        EXPECT_TRUE(copied.emplace(copy.to + i, copy.from + i).second) << "copied twice";
    }
    EXPECT_EQ(copied, expected);
    met += static_cast<int64_t>(expected.size());
  }
  EXPECT_GT(met, 1000);
}

// What was saved whole names another dimension than a slice that is wanted, and the other way round.
TEST(StatePieces, WholePiecesMeetAnyCut) {
  const std::vector<int64_t> shape = {5, 6};
  for (const int64_t cut : {0, 1}) {
    const int64_t extent = shape[static_cast<size_t>(cut)], inner = 30 / extent;
    for (int64_t begin = 0; begin < extent; ++begin) {
      for (int64_t end = begin + 1; end <= extent; ++end) {
        const int64_t elements = (end - begin) * inner;
        const StatePiece part{"w", cut, {begin, end}, elements / 3, elements - elements / 3, 11};
        const StatePiece whole{"w", 1 - cut, {0, shape[static_cast<size_t>(1 - cut)]}, 4, 23, 7};
        for (const bool saves_whole : {false, true}) {
          const StatePiece &saved = saves_whole ? whole : part, &wanted = saves_whole ? part : whole;
          std::map<int64_t, int64_t> expected, copied;
          const std::map<Element, int64_t> there = places(shape, saved);
          for (const auto& [element, place] : places(shape, wanted)) {
            if (const auto found = there.find(element); found != there.end()) expected[place] = found->second;
          }
          for (const StateCopy& copy : common_state(shape, saved, wanted)) {
            for (int64_t i = 0; i < copy.count; ++i)
              EXPECT_TRUE(copied.emplace(copy.to + i, copy.from + i).second) << "copied twice";
          }
          EXPECT_EQ(copied, expected) << "cut " << cut << " from " << begin << " to " << end;
        }
      }
    }
  }
  EXPECT_THROW(common_state(shape, {"w", 0, {0, 2}, 0, 12, 0}, {"w", 1, {0, 3}, 0, 15, 0}), Error);
}

// Whatever the split and the cut of its flat buffer: each element is in one piece of one rank, and no gap is in any.
TEST(StatePieces, OfAllRanksAreTheWholeModelOnce) {
  for (const auto family : testing::kAllFamilies) {
    ModelConfig config = testing::small_config(family, false);
    config.num_heads = 8;
    config.num_kv_heads = 4;
    for (const int64_t tp : {1, 2, 4}) {
      std::map<std::string, std::map<Element, int>> seen;
      std::map<std::string, bool> alike;
      for (int64_t rank = 0; rank < tp; ++rank) {
        const ModelSplit split = model_split(config.shape(), Layout{.tp = tp}, rank);
        const ParameterLayout layout = parameter_layout(config, split, /*freeze_router=*/false);
        std::vector<OwnedRun> runs;
        for (int64_t at = 0; at < layout.elements; at += 1000)
          runs.push_back({at, std::min<int64_t>(1000, layout.elements - at), at});
        std::map<std::string, std::vector<int64_t>> shapes;
        for (const PlacedParameter& p : layout.parameters) {
          shapes[p.name] = p.slice.shape;
          alike[p.name] = p.slice.alike || p.name.find(".experts.") != std::string::npos;
        }
        for (const StatePiece& piece : state_pieces(layout, runs)) {
          for (const auto& [element, place] : places(shapes.at(piece.parameter), piece))
            ++seen[piece.parameter][element];
        }
      }
      for (const ModelParameter& parameter : model_parameters(config.shape())) {
        int64_t elements = 1;
        for (const int64_t size : parameter.shape) elements *= size;
        ASSERT_EQ(static_cast<int64_t>(seen[parameter.name].size()), elements) << parameter.name;
        for (const auto& [element, times] : seen[parameter.name])
          ASSERT_EQ(times, alike[parameter.name] ? tp : 1) << parameter.name;
      }
    }
  }
}

// Of padded widths no piece has any padding, and each element's place is that of the flat buffer.
TEST(StatePieces, OfPaddedWidthsLeaveThePaddingOut) {
  ModelConfig config = testing::small_config(ModelFamily::kQwen2, false);
  config.num_heads = 8;
  config.num_kv_heads = 4;
  config.hidden_size = 44;
  config.intermediate_size = 84;
  for (const int64_t tp : {1, 4}) {
    std::map<std::string, std::set<Element>> seen;
    for (int64_t rank = 0; rank < tp; ++rank) {
      const ModelSplit split = model_split(config.shape(), Layout{.tp = tp}, rank);
      const ParameterLayout layout = parameter_layout(config, split, /*freeze_router=*/true, /*padded=*/true);
      std::vector<OwnedRun> runs;  // cut anywhere, in padding too
      for (int64_t at = 0; at < layout.elements; at += 37)
        runs.push_back({at, std::min<int64_t>(37, layout.elements - at), at});
      std::map<std::string, PlacedParameter> placed;
      for (const PlacedParameter& p : layout.parameters) placed[p.name] = p;
      for (const StatePiece& piece : state_pieces(layout, runs)) {
        const PlacedParameter& p = placed.at(piece.parameter);
        const int64_t columns = p.slice.shape.size() > 1 ? p.slice.shape[1] : 1;
        for (const auto& [element, place] : places(p.slice.shape, piece)) {
          seen[p.name].insert(element);
          int64_t row = element / columns, column = element % columns;
          (p.slice.dimension == 0 ? row : column) -= p.slice.range.begin;
          EXPECT_EQ(place, p.offset + row * (p.held.size() > 1 ? p.held[1] : 1) + column) << p.name;
          EXPECT_EQ(element_at(piece, place), row * (p.held.size() > 1 ? p.shape()[1] : 1) + column) << p.name;
        }
      }
    }
    for (const ModelParameter& parameter : model_parameters(config.shape())) {
      int64_t elements = 1;
      for (const int64_t size : parameter.shape) elements *= size;
      EXPECT_EQ(static_cast<int64_t>(seen[parameter.name].size()), elements) << parameter.name;
    }
  }
}

TEST(StatePieces, AreReadBackFromJson) {
  const std::vector<StatePiece> pieces = {
      {.parameter = "a.weight", .dimension = 1, .range = {2, 7}, .first = 3, .count = 9, .at = 4},
      {.parameter = "b.weight", .range = {0, 3}, .count = 9, .row = 3, .pitch = 8}};
  const auto back = state_pieces_from_json(nlohmann::json::parse(to_json(pieces).dump()));
  ASSERT_EQ(back.size(), 2u);
  EXPECT_EQ(back[0].pitch, 0);
  EXPECT_EQ(back[1].row, 3);
  EXPECT_EQ(back[1].pitch, 8);
  EXPECT_EQ(to_json(back), to_json(pieces));
  EXPECT_THROW(state_pieces_from_json(nlohmann::json::parse("[[1, 2]]")), Error);
  EXPECT_THROW(state_pieces_from_json(nlohmann::json::parse("[[\"a\", 0, 0, 3, 0, 9, 0, 8, 3]]")), Error);
}

}  // namespace
}  // namespace trireme
