// Whether generation and training give a token the same log-prob, bit for bit: what of a layout decides bits.
#pragma once

#include <cstdint>
#include <string>

namespace trireme {

// What the bits of a row depend on besides weights and inputs: how numbers are rounded and in which order sums over
// ranks and over experts are taken. Pipeline, context, data and expert parallel sizes and sharded state are not among
// them.
struct Arithmetic {
  std::string dtype = "bfloat16";  // of weights and activations
  int64_t tp = 1;
  int64_t etp = 1;
  int64_t combine_blocks = 0;  // of experts whose outputs are summed before the blocks are; 0: no experts
};

struct Exactness {
  bool equal = true;
  std::string difference;  // one clause when not: "generation has tp 2, training tp 4"
};
Exactness exactness(const Arithmetic& generation, const Arithmetic& training);

}  // namespace trireme
