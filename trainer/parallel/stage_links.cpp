#include "trainer/parallel/stage_links.h"

#include <ATen/ATen.h>

#include "base/error.h"

namespace trireme {

StageLinks::StageLinks(Communicator& group) : group_(group) {
  TRIREME_CHECK(stages() > 1, "a pipeline has several stages");
  for (const bool backward : {false, true}) {
    for (const int from : {stage(), next(stage(), !backward)}) {
      lines_[{backward, from}] =
          std::make_unique<Communicator>(group, from, next(from, backward), backward ? stages() + from : from);
    }
  }
}

void StageLinks::connect(at::Device device) {
  if (connected_ || !device.is_cuda()) return;
  connected_ = true;
  const at::Tensor byte = at::zeros({16}, at::TensorOptions(device).dtype(at::kByte));
  for (const auto& [key, line] : lines_)  // by direction, then by the stage that they leave
    (key.second == stage() ? line->begin_send(byte) : line->begin_receive(byte)).wait();
}

PendingCollective StageLinks::begin_send(const at::Tensor& tensor, bool backward) {
  return line(stage(), backward).begin_send(tensor);
}

PendingCollective StageLinks::begin_receive(at::Tensor tensor, bool backward) {
  return line(next(stage(), !backward), backward).begin_receive(std::move(tensor));
}

void StageLinks::share_last(at::Tensor tensor) {
  if (tensor.numel() > 0) group_.broadcast(std::move(tensor), stages() - 1);
}

std::string StageLinks::share_last(const std::string& bytes) {
  return group_.all_gather_bytes(stage() + 1 == stages() ? bytes : "").back();
}

at::Tensor StageLinks::swap_ends(const at::Tensor& own) {
  const bool first = stage() == 0;
  TRIREME_CHECK(first || stage() + 1 == stages(), "only the ends of a pipeline swap");
  at::Tensor other = at::empty_like(own, at::MemoryFormat::Contiguous);
  // Over the lines that close the ring: what the first stage sends back goes to the last one.
  PendingCollective sent = begin_send(own.contiguous(), first), received = begin_receive(other, !first);
  received.wait();
  sent.wait();
  return other;
}

}  // namespace trireme
