// A model's weights for a link to another process.
#pragma once

#include "trainer/model/model.h"
#include "trainer/parallel/weight_link.h"

namespace trireme {

// All parameters of a model that one rank holds whole; those of an actor and of an engine with the same configuration
// have the same layout. Of weights that ranks share the view may be read while they are whole (ShardedUnits::whole).
// Throws Error(kUser) that names what the model is split over.
WeightView weight_view(const Model& model);

}  // namespace trireme
