#include "trainer/data/permutation.h"

#include "base/error.h"

namespace trireme {
namespace {

uint64_t mix(uint64_t x) {  // the finaliser of splitmix64
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t Permutation::key(uint64_t a, uint64_t b) { return mix(mix(a) ^ (b * 0xD6E8FEB86659FD93ULL)); }

Permutation::Permutation(int64_t size, uint64_t key) : size_(static_cast<uint64_t>(size)), half_bits_(4) {
  TRIREME_CHECK(size >= 0 && size < (int64_t{1} << 60), "permutation of " + std::to_string(size));
  // At least 8 bits: with fewer the rounds would reach few orders of a tiny set.
  while ((uint64_t{1} << (2 * half_bits_)) < size_) ++half_bits_;
  for (int round = 0; round < kRounds; ++round)
    round_keys_[round] = mix(key + static_cast<uint64_t>(round) * 0x9E3779B97F4A7C15ULL);
}

int64_t Permutation::operator()(int64_t i) const {
  TRIREME_CHECK(i >= 0 && static_cast<uint64_t>(i) < size_,
                "index " + std::to_string(i) + " of " + std::to_string(size_));
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t x = static_cast<uint64_t>(i);
  do {  // a bijection of the larger set maps [0, size) onto itself when walked until inside
    uint64_t left = x >> half_bits_;
    uint64_t right = x & mask;
    for (const uint64_t round_key : round_keys_) {
      const uint64_t next = left ^ (mix(right ^ round_key) & mask);
      left = right;
      right = next;
    }
    x = (left << half_bits_) | right;
  } while (x >= size_);
  return static_cast<int64_t>(x);
}

}  // namespace trireme
