// What an RLJob says of its roles against what the configuration says: a job in which they differ is refused, by the
// trainer before it loads weights and by `trireme plan -f`, in the same words. All throw Error(kUser).
#pragma once

#include <string>

#include "api/rljob.h"
#include "topology/topology.h"
#include "trainer/config/config.h"

namespace trireme {

// On a cluster the RLJob decides the sizes. A configuration in the image or in a config map is first seen by the
// trainer. `sizes`: the configuration's, of which 1 says nothing; `layout`: the role's, by --layout. `role`: actor or
// critic.
void check_layout_agrees(const ParallelSizes& sizes, const Layout& layout, const std::string& role);

// The same of engines: sizes of spec.roles.generation, of which 1 leaves the configuration's.
void check_engine_agrees(const Config& config, const Parallelism& engine);

// Pods that generate and a configuration that has no use for them, or the other way round.
void check_generation_role(const Config& config, bool has_role);

}  // namespace trireme
