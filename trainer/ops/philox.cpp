#include "trainer/ops/philox.h"

#include <cmath>
#include <numbers>

namespace trireme {

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

namespace {

// 64 + 64 + 64 + 32 bits do not fit the 128-bit counter and 64-bit key: (seed, id) are first hashed by Philox itself
// into a key, under which the position is counted.
std::array<uint32_t, 4> draw(uint64_t seed, uint64_t id, uint64_t position, uint32_t stream) {
  const std::array<uint32_t, 4> key =
      philox4x32({static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32), stream, 0x74726972},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), key[2], key[3]},
                    {key[0], key[1]});
}

double to_uniform(uint32_t high, uint32_t low) {
  return static_cast<double>((uint64_t{high} << 32 | low) >> 11) * 0x1.0p-53;
}

}  // namespace

double philox_uniform(uint64_t seed, uint64_t id, uint64_t position, uint32_t stream) {
  const auto bits = draw(seed, id, position, stream);
  return to_uniform(bits[0], bits[1]);
}

double philox_normal(uint64_t seed, uint64_t id, uint64_t index) {
  const auto bits = draw(seed, id, index, 1);
  const double radius = std::sqrt(-2.0 * std::log1p(-to_uniform(bits[0], bits[1])));
  return radius * std::cos(2.0 * std::numbers::pi * to_uniform(bits[2], bits[3]));
}

}  // namespace trireme
