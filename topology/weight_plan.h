// weight_plan: which weights an engine, a process of its own, gets from which ranks of training, in any two layouts.
// Pure: actor ranks and engines find the same, each by itself.
#pragma once

#include <cstdint>
#include <vector>

#include "topology/refit.h"

namespace trireme {

// The engine's has tensor ranks, and expert parallel ones that divide them; all of its other sizes are 1.
struct EngineLayouts {
  Layout training;
  StageOptions stages;  // of training
  Layout engine;
};

// What one actor rank sends to one rank of an engine.
struct WeightSource {
  int64_t actor_rank = 0;
  std::vector<RefitCopy> copies;  // by parameter, then range; `from` is the actor rank, `to` the engine's
  int64_t bytes = 0;
  bool whole = false;  // it is the only one, and both have the same of the model: equal flat buffers
};

struct WeightPlan {
  std::vector<WeightSource> sources;  // in the order of receipt
  int64_t bytes = 0;
};

// Which plan rank `rank` of engine `engine` goes by: one of training.world() numbers, round and round, so that few
// plans serve many engines.
int64_t weight_plan_number(const EngineLayouts& layouts, int64_t engine, int64_t rank);

// Every element of `parameters` (model_parameters(shape)) that the engine's rank has comes to it once. All comes from
// one copy of the weights (Axis::kCopyPp), by the number, so that engines spread over them; of a copy from a rank that
// has the same of the model where there is one, else each range from the owner that sends the fewest bytes so far,
// equal ones by the number. Sources ascend, turned by the number, so that engines do not all begin with the same one.
// From whole models in an engine of one rank that is rank `engine` mod ranks. Elements have `element_bytes`. Both
// layouts must be legal for the shape; Error(kUser) names what of them has no plan: experts whose width ranks of
// training share, an engine with stages, context or data parallel ranks.
WeightPlan weight_plan(const ModelShape& shape, const std::vector<ModelParameter>& parameters,
                       const EngineLayouts& layouts, int64_t number, int64_t rank, int64_t element_bytes);

}  // namespace trireme
