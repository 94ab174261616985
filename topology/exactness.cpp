#include "topology/exactness.h"

#include <vector>

#include "base/text.h"

namespace trireme {

Exactness exactness(const Arithmetic& generation, const Arithmetic& training) {
  std::vector<std::string> here, there;
  const auto compare = [&](const char* name, const std::string& a, const std::string& b) {
    if (a == b) return;
    here.push_back(name + (" " + a));
    there.push_back(name + (" " + b));
  };
  compare("dtype", generation.dtype, training.dtype);
  compare("tp", std::to_string(generation.tp), std::to_string(training.tp));
  compare("etp", std::to_string(generation.etp), std::to_string(training.etp));
  compare("combine blocks", std::to_string(generation.combine_blocks), std::to_string(training.combine_blocks));
  if (here.empty()) return {};
  return {false, "generation has " + join(here, ", ") + ", training " + join(there, ", ")};
}

}  // namespace trireme
