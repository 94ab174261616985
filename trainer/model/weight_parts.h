// WeightParts: what of a model goes to engines, or comes to one, in pieces of its flat buffer.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "topology/weight_plan.h"
#include "trainer/model/model.h"
#include "trainer/parallel/weight_pieces.h"

namespace trireme {

// Plans of thousands of experts take seconds: they are made when they are asked for, and what is asked for again and
// again, the sources, is kept. Any thread. All throw Error(kUser) for layouts without a plan (weight_plan).
class WeightParts final {
 public:
  WeightParts(const Model& model, const EngineLayouts& layouts);
  // Of a flat buffer that holds these parameters, in elements of so many bytes.
  WeightParts(const ModelConfig& config, std::vector<PlacedParameter> own, const EngineLayouts& layouts,
              int64_t element_bytes);

  // The actor ranks that rank `rank` of the engine has its weights from, in the order of receipt.
  std::vector<int64_t> sources(int64_t engine, int64_t rank = 0) const;
  // Of an actor rank: what it sends there; it is one of the sources.
  WeightPart sent(int64_t actor_rank, int64_t engine, int64_t rank = 0) const;
  // Of an engine's rank: what comes to it, in the order of receipt.
  std::vector<WeightPart> received(int64_t engine, int64_t rank = 0) const;

 private:
  WeightPlan plan(int64_t engine, int64_t rank) const;
  WeightPart part_of(const WeightSource& source) const;
  WeightPiece piece_of(const RefitCopy& copy) const;

  const ModelShape shape_;
  const EngineLayouts layouts_;
  const int64_t element_bytes_;
  const std::vector<PlacedParameter> own_;
  std::vector<ModelParameter> parameters_;      // of the whole model
  std::vector<int64_t> places_;                 // of their first elements, one behind the other
  std::vector<const PlacedParameter*> own_of_;  // by parameter; null: nothing of it is here
  mutable std::mutex mutex_;
  mutable std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> sources_;  // by the plan's number and the rank
};

}  // namespace trireme
