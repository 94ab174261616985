// Why a run is refused before anything of its models is loaded, as far as that needs no device. Asked by whoever starts
// one, and by `trireme plan` of one that is not started. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "topology/sharding.h"
#include "topology/topology.h"
#include "trainer/config/config.h"

namespace trireme {

// Those that a model is split over.
struct ModelRanks {
  Layout layout;
  int64_t of_node = 0;                         // so many share a node; 0: all
  bool gpus = false;                           // each has one
  std::optional<StateSharding> sharding = {};  // in place of the configuration's
};

// Of a model that is trained. `section`, policy or value, has the keys that sentences name; `config` has them as the
// policy's (critic_config). `model`: what sentences call it. One sentence; nothing where it may run.
std::optional<std::string> model_problem(const Config& config, const std::string& section, const ModelShape& shape,
                                         const std::string& model, const ModelRanks& ranks);
// Likewise of the policy, which generates too.
std::optional<std::string> policy_problem(const Config& config, const ModelShape& shape, const std::string& model,
                                          const ModelRanks& ranks);

// Of a balancing loss of experts that is asked for, by the keys of `section`, and does nothing; nothing where it does
// what it says, or none is.
std::optional<std::string> balance_warning(const Config& config, const std::string& section, const ModelShape& shape,
                                           const std::string& model);

}  // namespace trireme
