#include "trainer/parallel/stage_links.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/log.h"

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
  std::string problem;
  peers_ = PeerLines::make(group_.peer_group(), device, problem);
  if (peers_ != nullptr) return;
  if (stage() == 0)
    log_warn("parallel", "the stages of group '" + group_.name() + "' send rows by NCCL, slower: " + problem);
  const at::Tensor byte = at::zeros({16}, at::TensorOptions(device).dtype(at::kByte));
  for (const auto& [key, line] : lines_)  // by direction, then by the stage that they leave
    (key.second == stage() ? line->begin_send(byte) : line->begin_receive(byte)).wait();
}

PendingCollective StageLinks::begin_send(const at::Tensor& tensor, bool backward) {
  Communicator& to = line(stage(), backward);
  if (peers_ == nullptr || !tensor.is_cuda() || tensor.numel() == 0) return to.begin_send(tensor);
  TRIREME_CHECK(tensor.is_contiguous(), "send: a contiguous tensor");
  return to.begin_send([&] { return peers_->send(tensor.detach(), backward); });
}

PendingCollective StageLinks::begin_receive(at::Tensor tensor, bool backward) {
  Communicator& from = line(next(stage(), !backward), backward);
  if (peers_ == nullptr || !tensor.is_cuda() || tensor.numel() == 0) return from.begin_receive(std::move(tensor));
  TRIREME_CHECK(tensor.is_contiguous(), "receive: a contiguous tensor");
  return from.begin_receive([this, backward, into = tensor.detach()] { peers_->receive(into, backward); });
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

std::optional<std::string> StageLinks::problem(int64_t width, const at::TensorOptions& options) {
  constexpr int64_t kBytes = int64_t{5} << 20;
  const int64_t many = kBytes / std::max<int64_t>(1, width * static_cast<int64_t>(options.dtype().itemsize())) + 2;
  // Numbers below 256 are exact in every dtype; 251 divides no chunk.
  const auto rows_of = [&](int stage, int64_t rows) {
    const at::Tensor place = at::arange(rows * width, at::TensorOptions(options.device()).dtype(at::kLong));
    return (place + 7 * stage).remainder(251).view({rows, width}).to(options.dtype());
  };
  std::optional<std::string> found;
  for (const int64_t rows : {int64_t{1}, many}) {
    for (const bool backward : {false, true}) {
      const int from = next(stage(), !backward);
      const at::Tensor own = rows_of(stage(), rows), received = at::zeros_like(own);
      PendingCollective sent = begin_send(own, backward), coming = begin_receive(received, backward);
      coming.wait();
      sent.wait();
      if (found || at::equal(received, rows_of(from, rows))) continue;
      found = "rows of " + std::to_string(width) + " elements have other bits behind their way from stage " +
              std::to_string(from) + " to stage " + std::to_string(stage()) + " (group '" + group_.name() + "')";
    }
  }
  return found;
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
