// Permutation: a reproducible shuffle of 0..n-1 that needs no memory.
#pragma once

#include <cstdint>

namespace trireme {

// A keyed bijection of [0, size): a Feistel network on the next even number of bits, walked until it lands inside.
// The same on every machine. Cheap to copy.
class Permutation final {
 public:
  Permutation(int64_t size, uint64_t key);
  int64_t operator()(int64_t i) const;

  // A well-mixed 64-bit key from two numbers, e.g. seed and epoch.
  static uint64_t key(uint64_t a, uint64_t b);

 private:
  static constexpr int kRounds = 8;
  uint64_t size_;
  int half_bits_;
  uint64_t round_keys_[kRounds];
};

}  // namespace trireme
