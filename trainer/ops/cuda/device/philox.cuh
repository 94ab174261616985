// philox_uniform of trainer/ops/philox.h on the device: the same bits.
#pragma once

#include <cstdint>

namespace trireme::cuda {

struct PhiloxBlock {
  uint32_t x, y, z, w;
};

__device__ inline PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t a_low = 0xD2511F53u * counter.x, a_high = __umulhi(0xD2511F53u, counter.x);
    const uint32_t b_low = 0xCD9E8D57u * counter.z, b_high = __umulhi(0xCD9E8D57u, counter.z);
    counter = {b_high ^ counter.y ^ key0, b_low, a_high ^ counter.w ^ key1, a_low};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

__device__ inline double philox_uniform(uint64_t seed, uint64_t id, uint64_t position) {
  constexpr uint32_t kStream = 0;
  const PhiloxBlock key = philox4x32({static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32), kStream, 0x74726972u},
                                     static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  const PhiloxBlock bits =
      philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), key.z, key.w}, key.x, key.y);
  return static_cast<double>((static_cast<uint64_t>(bits.x) << 32 | bits.y) >> 11) * 0x1.0p-53;
}

}  // namespace trireme::cuda
