// Rules of a whole configuration. Internal to trainer/config (and its tests).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trainer/config/config.h"

namespace trireme::config {

struct FeatureKey;

struct Problem {
  std::string key, message;
};
std::vector<Problem> cross_check(const Config& config);
// What a configuration asks for and this version lacks, but for splits of the model; a sentence each. Rules across keys
// do not judge such a configuration: they are those of a run that is possible.
std::vector<std::string> unsupported_features(const Config& config);

// The largest number there is where the product is above it.
int64_t saturating_product(int64_t a, int64_t b);
// An environment of NeMo-RL that is not here: refused by validate_supported, by its feature. nullptr: none of that
// name.
const FeatureKey* missing_environment(const std::string& name);

}  // namespace trireme::config
