// WeightWire: bytes from one device to another, of another process. Builds with CUDA link cuda/weight_wire.cpp, the
// others no_cuda/, where no devices are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "trainer/parallel/device_group.h"
#include "trainer/parallel/link_pair.h"

namespace trireme {

// A group of two of NCCL's, apart from those of the ranks: its failure is an error here and ends no process, as that of
// c10d's groups would. It has a stream of its own, so that it runs beside what the devices compute. One thread calls
// it. What fails or is cancelled throws, after which it is only good to be destroyed.
class WeightWire final {
 public:
  static constexpr int64_t kIdBytes = 128;
  static std::string make_id();  // of side 0, for both

  // Collective. Throws Error(kTimeout) at the deadline, Error(kUnavailable) when cancelled or NCCL says so.
  WeightWire(at::Device device, int side, const std::string& id, const Deadline& deadline, const LinkCancel& cancel);
  ~WeightWire();  // breaks what is under way, and waits until the device has left it

  // Queued on the own stream behind `after` (mark_time; may be null). The tensor, contiguous, may be neither written
  // nor freed before done().
  void send(const at::Tensor& tensor, const TimeMark& after);
  void receive(at::Tensor tensor, const TimeMark& after);
  // What `queue` launches, on the own stream, behind `after` and what was queued before.
  void run(const std::function<void()>& queue, const TimeMark& after);
  // Until what was queued lies in the stream, so that more may be. It need not be done.
  void settle(const Deadline& deadline, const LinkCancel& cancel);
  // Until what was queued is done.
  // `meanwhile` is called again and again, and may throw.
  void wait(const Deadline& deadline, const LinkCancel& cancel, const std::function<void()>& meanwhile = {});
  // weight_checksum on the own stream, behind `after` and what was queued; waits for it.
  uint64_t checksum(const at::Tensor& tensor, const TimeMark& after);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
