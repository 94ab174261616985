// A model's weights for a link to another process.
#pragma once

#include "trainer/model/model.h"
#include "trainer/parallel/weight_link.h"

namespace trireme {

// All parameters that this rank has of a model. Those of an actor and of an engine with the same configuration and the
// same split have the same layout; of others WeightParts says what goes where. Of weights that ranks share the view may
// be read while they are whole (ShardedUnits::whole).
WeightView weight_view(const Model& model);

}  // namespace trireme
