#include "trainer/model/weight_parts.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace trireme {
namespace {

int64_t product(const std::vector<int64_t>& extents, size_t from, size_t to) {
  int64_t elements = 1;
  for (size_t d = from; d < to; ++d) elements *= extents[d];
  return elements;
}

}  // namespace

WeightParts::WeightParts(const Model& model, const EngineLayouts& layouts)
    : WeightParts(model.config(), {model.parameters().begin(), model.parameters().end()}, layouts,
                  static_cast<int64_t>(c10::elementSize(model.options().dtype))) {}

WeightParts::WeightParts(const ModelConfig& config, std::vector<PlacedParameter> own, const EngineLayouts& layouts,
                         int64_t element_bytes)
    : shape_(config.shape()),
      layouts_(layouts),
      element_bytes_(element_bytes),
      own_(std::move(own)),
      parameters_(model_parameters(shape_)) {
  std::unordered_map<std::string_view, const PlacedParameter*> by_name;
  for (const PlacedParameter& parameter : own_) by_name.emplace(parameter.name, &parameter);
  int64_t place = 0;
  for (const ModelParameter& parameter : parameters_) {
    places_.push_back(place);
    place += product(parameter.shape, 0, parameter.shape.size());
    const auto found = by_name.find(parameter.name);
    own_of_.push_back(found == by_name.end() ? nullptr : found->second);
  }
}

WeightPlan WeightParts::plan(int64_t engine, int64_t rank) const {
  return weight_plan(shape_, parameters_, layouts_, weight_plan_number(layouts_, engine, rank), rank, element_bytes_);
}

std::vector<int64_t> WeightParts::sources(int64_t engine, int64_t rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::pair key{weight_plan_number(layouts_, engine, rank), rank};
  if (const auto known = sources_.find(key); known != sources_.end()) return known->second;
  std::vector<int64_t> ranks;
  for (const WeightSource& source : plan(engine, rank).sources) ranks.push_back(source.actor_rank);
  return sources_.emplace(key, std::move(ranks)).first->second;
}

WeightPart WeightParts::sent(int64_t actor_rank, int64_t engine, int64_t rank) const {
  const WeightPlan whole = plan(engine, rank);
  const auto own = std::find_if(whole.sources.begin(), whole.sources.end(),
                                [&](const WeightSource& source) { return source.actor_rank == actor_rank; });
  TRIREME_CHECK(own != whole.sources.end(),
                "rank " + std::to_string(actor_rank) + " sends nothing to engine " + std::to_string(engine));
  return part_of(*own);
}

std::vector<WeightPart> WeightParts::received(int64_t engine, int64_t rank) const {
  std::vector<WeightPart> parts;
  for (const WeightSource& source : plan(engine, rank).sources) parts.push_back(part_of(source));
  return parts;
}

WeightPart WeightParts::part_of(const WeightSource& source) const {
  WeightPart part{.actor_rank = source.actor_rank, .whole = source.whole};
  if (source.whole) return part;
  part.digest = hash64("");
  for (const RefitCopy& copy : source.copies) {
    const ModelParameter& parameter = parameters_[static_cast<size_t>(copy.parameter)];
    part.digest =
        hash64(parameter.name + "@" + std::to_string(copy.dimension) + ":" + std::to_string(copy.range.begin) + "-" +
                   std::to_string(copy.range.end) + "x" + std::to_string(copy.unit_bytes) + ";",
               part.digest);
    part.pieces.push_back(piece_of(copy));
    part.elements += part.pieces.back().elements();
  }
  return part;
}

// Of the dimensions one is cut, on each side for itself: rows are what lies before it, and in a row the indices of it
// with all that lies behind them.
WeightPiece WeightParts::piece_of(const RefitCopy& copy) const {
  const auto index = static_cast<size_t>(copy.parameter);
  const std::vector<int64_t>& shape = parameters_[index].shape;
  const PlacedParameter* own = own_of_[index];
  TRIREME_CHECK(own != nullptr, "a plan of weights names " + parameters_[index].name + ", which is not here");
  const auto dimension = static_cast<size_t>(copy.dimension);
  const ParameterSlice& slice = own->slice;
  Range here{0, shape[dimension]};
  if (slice.dimension == copy.dimension) {
    here = slice.range;
  } else {
    TRIREME_CHECK(slice.range.size() == shape[static_cast<size_t>(slice.dimension)],
                  parameters_[index].name + " is cut in another dimension than a plan of weights says");
  }
  TRIREME_CHECK(here.begin <= copy.range.begin && copy.range.end <= here.end,
                "a plan of weights names a range of " + parameters_[index].name + " that is not here");
  const bool padded = shape.size() == 2 && own->held[1] != own->shape()[1];
  if (padded && dimension == 0) {  // row by row: behind each is padding
    return {.offset = own->offset + (copy.range.begin - here.begin) * own->held[1],
            .rows = copy.range.size(),
            .columns = shape[1],
            .stride = own->held[1],
            .place = places_[index] + copy.range.begin * shape[1],
            .place_stride = shape[1]};
  }
  const int64_t inner = product(shape, dimension + 1, shape.size());
  WeightPiece piece;
  piece.rows = product(shape, 0, dimension);
  piece.columns = copy.range.size() * inner;
  piece.stride = padded ? own->held[1] : here.size() * inner;
  piece.place_stride = shape[dimension] * inner;
  piece.offset = own->offset + (copy.range.begin - here.begin) * inner;
  piece.place = places_[index] + copy.range.begin * inner;
  if (piece.columns == piece.stride && piece.columns == piece.place_stride) {
    piece.columns *= piece.rows;
    piece.rows = 1;
    piece.stride = piece.place_stride = piece.columns;
  }
  return piece;
}

}  // namespace trireme
