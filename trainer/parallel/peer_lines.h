// PeerLines: rows from the device of one pipeline stage to that of the next, over their own memory. Builds with CUDA
// link cuda/peer_lines.cpp, the others no_cuda/, where no devices are.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "trainer/parallel/peer_group.h"

namespace trireme {

// Each stage has a mailbox for what comes from the stage before, and one for what comes back from the next. A sender's
// copy engine fills it, a word in memory says how far; the receiver copies out of it, and says so in the sender's
// memory. Streams wait for those words without a kernel: nothing of a device is taken while its stage waits.
//
// A mailbox holds kMailboxBytes; what does not fit waits on a stream of the sender's until the receiver has queued that
// it takes something out. One thread owns it. Whoever waits in vain waits for ever: deadlines are the caller's.
class PeerLines final {
 public:
  // Ranks of the group are stages. Null, with `problem` saying why on all of them, where devices cannot map each
  // other's memory (cuda/peer_memory.h). Collective.
  static std::unique_ptr<PeerLines> make(const PeerGroup& group, at::Device device, std::string& problem);
  ~PeerLines();
  PeerLines(const PeerLines&) = delete;
  PeerLines& operator=(const PeerLines&) = delete;

  // A copy that runs beside the current stream.
  struct Copy {
    std::function<void()> wait;  // makes the current stream wait for it
    std::function<bool()> done;  // from any thread
  };
  // To the next stage, or with `backward` to the one before, behind what the current stream holds; the last one's next
  // is the first. Contiguous, at least a byte; neither written nor freed before `done`, which the result sees to.
  Copy send(const at::Tensor& tensor, bool backward);
  // From the stage before, or with `backward` from the next, into `tensor` on the current stream. What was sent first
  // is received first, whatever streams the calls are on.
  void receive(at::Tensor tensor, bool backward);

 private:
  PeerLines();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
