// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): counter-based random numbers.
#pragma once

#include <array>
#include <cstdint>

namespace trireme {

// Ten rounds over the counter with the key; the known answers of the paper's library are in the tests.
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// A number in [0, 1) with 53 random bits, a pure function of its arguments. Streams are independent.
double philox_uniform(uint64_t seed, uint64_t id, uint64_t position, uint32_t stream = 0);

// Standard normal number i of the named sequence (Box-Muller), for weight initialisation.
double philox_normal(uint64_t seed, uint64_t id, uint64_t index);

}  // namespace trireme
