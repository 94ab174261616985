#include "trainer/parallel/stage_links.h"

#include <ATen/ATen.h>

#include <cstring>

#include "base/error.h"

namespace trireme {
namespace {

constexpr size_t kPassedAhead = 64;               // messages that the next stage may not have received yet
constexpr int64_t kMostBytes = int64_t{1} << 30;  // of a message

}  // namespace

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

void StageLinks::pass(at::Tensor bytes) {
  if (stage() + 1 == stages()) return;
  if (passed_.size() == kPassedAhead) {
    passed_.front().sent.wait();
    passed_.pop_front();
  }
  passed_.push_back({bytes, begin_send(bytes, /*backward=*/false)});
}

std::string StageLinks::pass_on(const std::string& bytes) {
  const bool first = stage() == 0;
  at::Tensor size = at::full({1}, static_cast<int64_t>(bytes.size()), at::kLong);
  if (!first) begin_receive(size, /*backward=*/false).wait();
  pass(size);
  const int64_t count = size.item<int64_t>();
  TRIREME_CHECK(count >= 0 && count <= kMostBytes, "a message between stages has no such size");
  at::Tensor body = at::empty({count}, at::kByte);
  if (count == 0) return "";
  if (first) {
    std::memcpy(body.mutable_data_ptr(), bytes.data(), bytes.size());
  } else {
    begin_receive(body, /*backward=*/false).wait();
  }
  pass(body);
  return {static_cast<const char*>(body.const_data_ptr()), static_cast<size_t>(count)};
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
