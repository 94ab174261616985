// What the stages of a pipeline send each other: the residual stream forward, its gradients backward, and what the last
// stage has found out, to all.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "trainer/parallel/communicator.h"

namespace trireme {

// Of one rank of a pipeline. A line of its own for each direction between neighbours, the last and the first stage
// among them: on a line what is sent first is received first, and no line waits for another. Deadlines and errors are
// those of collectives: who has not come is named with its place.
class StageLinks final {
 public:
  // `group`: a rank of each stage, in their order, at least two; it outlives the links. All of them make theirs.
  explicit StageLinks(Communicator& group);

  // Before tensors of this device are sent: they go by the devices' own memory, or, where that cannot be mapped (a
  // warning says why), by NCCL, which makes a line's group when it is used first, so all lines are used once, in one
  // order. Collective; the second call does nothing.
  void connect(at::Device device);

  // Whether tensors on the connected device go by its own memory.
  bool over_memory() const { return peers_ != nullptr; }

  Communicator& group() { return group_; }
  int stages() const { return group_.size(); }
  int stage() const { return group_.rank(); }

  // To the next stage, or with `backward` to the one before; the last one's next is the first. Contiguous; not written
  // before the result's wait(), which returns when the other stage has begun to receive it and it is on its way.
  [[nodiscard]] PendingCollective begin_send(const at::Tensor& tensor, bool backward);
  // From the stage before, or with `backward` from the next one, into `tensor`.
  [[nodiscard]] PendingCollective begin_receive(at::Tensor tensor, bool backward);

  // The last stage's values, of the same size on all, on all. Collective.
  void share_last(at::Tensor tensor);
  // The last stage's, of any size. Collective.
  std::string share_last(const std::string& bytes);
  // The first stage's bytes, of any size, on all, by the lines forward: each stage has them from the one before, and
  // waits for none behind it. All stages call it at the same place among what they send and receive on those lines.
  std::string pass_on(const std::string& bytes);
  // Whether rows of `width` come as they were sent, on all lines of this stage: one, and more than a chunk of the
  // devices' mailboxes. One sentence that says where not; nothing when they do. Collective.
  std::optional<std::string> problem(int64_t width, const at::TensorOptions& options);
  // On the first stage the last one's tensor, on the last the first one's, of own's size. Collective of those two.
  at::Tensor swap_ends(const at::Tensor& own);

 private:
  // The line that leaves stage `from`.
  Communicator& line(int from, bool backward) { return *lines_.at({backward, from}); }
  int next(int stage, bool backward) const { return (stage + (backward ? stages() - 1 : 1)) % stages(); }

  struct Passed {  // under way to the next stage
    at::Tensor bytes;
    PendingCollective sent;
  };
  void pass(at::Tensor bytes);

  Communicator& group_;
  bool connected_ = false;
  std::unique_ptr<PeerLines> peers_;  // between devices that see each other's memory
  std::map<std::pair<bool, int>, std::unique_ptr<Communicator>> lines_;
  std::deque<Passed> passed_;  // oldest first
};

}  // namespace trireme
