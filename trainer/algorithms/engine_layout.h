// The layout of an engine, a process group of its own that generates for ranks elsewhere.
#pragma once

#include <optional>
#include <string>

#include "topology/split.h"
#include "topology/topology.h"
#include "trainer/config/config.h"

namespace trireme {

// How many processes an engine is, one a device (policy.generation.tensor_parallel_size).
int64_t engine_ranks(const Config& config);

// Over which rank `rank` of an engine has weights that the engine asked for over `link`.
std::string link_of_rank(const std::string& link, int64_t rank);

// Tensor ranks, and of a mixture expert parallel ones among them. `training`: of the ranks that train, whose combine
// blocks an engine has too.
Layout engine_layout(const Config& config, const ModelShape& shape, const Layout& training);

// Why the model cannot be split so: one sentence that begins with the key; nothing where it can.
std::optional<std::string> engine_problem(const Config& config, const ModelShape& shape, const std::string& model,
                                          const Layout& training);

}  // namespace trireme
