// Which kernel computes attention of a decode step. The choice changes no bit.
#pragma once

#include <cstdint>

namespace trireme {

// One query row a run; a block, or a cluster of blocks, has one (run, key head).
enum class DecodeKernel {
  kShared,      // four warps share each key tile, three tiles in flight
  kSharedDeep,  // the same with six tiles in flight: for fewer blocks than SMs
  kCluster2,    // a cluster of two blocks shares the key tiles and the columns of the output; no split of the sums
  kCluster4,    // of four: for a quarter as many (run, key head) pairs as SMs
  kCluster8,    // of eight
};

// What the device has room for at once: SMs, and clusters of so many blocks (0: such clusters cannot run).
struct DecodeRoom {
  int64_t sms = 0;
  int64_t clusters2 = 0, clusters4 = 0, clusters8 = 0;
  // As much of it as `part` of the SMs hold.
  DecodeRoom of(int64_t part) const;
};

struct DecodeWork {
  int64_t runs = 0, kv_heads = 0;
  int64_t longest_keys = 0, total_keys = 0;  // of the longest run and of all of them; 0: not known, taken for alike
};

// A cluster pays while all of them are on the chip at once; beyond, one block a pair, the deep ones where each has a
// SM to itself. Where one run is so much longer than the others that its own sums, tile after tile, decide when
// the step ends, the kernel with the fastest chain for it, although its clusters come one after another.
DecodeKernel choose_decode_kernel(const DecodeWork& work, const DecodeRoom& room);

}  // namespace trireme
