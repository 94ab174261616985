// PeerMemory: device memory of each rank of a group, mapped by all of them (NVLink, one host).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "trainer/parallel/peer_group.h"

namespace trireme {

class PeerMemory final {
 public:
  // `bytes` on each rank, filled by `fill` on the current stream before anybody else sees them. Null, with `problem`
  // saying why in the same words on all ranks, where some of the devices cannot map each other's memory: on several
  // hosts, without NVLink, in containers of their own, or with NCCL_P2P_DISABLE=1, which forbids it to NCCL too.
  // Collective.
  static std::unique_ptr<PeerMemory> make(const PeerGroup& group, at::Device device, int64_t bytes,
                                          const std::function<void(void*)>& fill, std::string& problem);
  // Waits for the device, and unmaps what is others'. The own memory goes with the process: others may still have it
  // mapped, and a group ends when its run does.
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  void* of(int rank) const { return views_.at(static_cast<size_t>(rank)); }

 private:
  PeerMemory(const PeerGroup& group, at::Device device) : rank_(group.rank), device_(device) {}
  std::string allocate(int64_t bytes, const std::function<void(void*)>& fill);
  void open(const std::vector<std::string>& handles);
  void close();
  void free();

  const int rank_;
  const at::Device device_;
  void* own_ = nullptr;
  std::vector<void*> views_;  // by rank; the own one's is own_
};

}  // namespace trireme
