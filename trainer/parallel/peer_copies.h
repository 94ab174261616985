// PeerCopies: rows between the devices of a group that see each other's memory, beside what these compute. Builds with
// CUDA link cuda/peer_copies.cpp, the others no_cuda/, where no devices do.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "trainer/parallel/peer_group.h"
#include "trainer/parallel/peer_lines.h"

namespace trireme {

// Copy engines carry the rows, and streams wait for words in memory: nothing here takes a processor from a product, as
// kernels that exchange would, which get their turn between products only. A rank has a mailbox for each other one;
// what does not fit waits, on streams that are none of the caller's, until the receiver has taken something out. They
// are seven at most, however many ranks there are: a device has 32 queues for all. One thread owns it at a time.
// Whoever waits in vain waits for ever: deadlines are the caller's.
class PeerCopies final {
 public:
  // Null, with `problem` saying why on all ranks, where devices cannot map each other's memory (cuda/peer_memory.h).
  // Collective.
  static std::unique_ptr<PeerCopies> make(const PeerGroup& group, at::Device device, std::string& problem);
  ~PeerCopies();
  PeerCopies(const PeerCopies&) = delete;
  PeerCopies& operator=(const PeerCopies&) = delete;

  // to[r] goes to rank r, from[r] comes from it, both by rank and each undefined where nothing goes; what rank r says
  // of this one must agree. The own rank's are a copy here. Contiguous. Behind what the current stream holds; the parts
  // are neither written nor read before the result's wait(), which holds them. All ranks make the same calls in one
  // order.
  PeerLines::Copy exchange(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from);

 private:
  PeerCopies();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
