// A device in two parts that compute at the same time without sharing SMs (CUDA's green contexts): the
// foreground waits for one small kernel after another, the background has large products.
//
// Why: kernels of two ordinary streams share every multiprocessor, and each of a decode step's hundreds of short
// kernels then waits for a block of a large product to end.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <memory>
#include <string>

namespace trireme {

struct DevicePartition {
  c10::Stream foreground, background;
  int foreground_sms = 0, background_sms = 0;
};

// About `background_sms` SMs for the background, at most half of them; the driver deals them out in eights, and more
// than were asked for where a product's thread block clusters would not start on so few. Made once for each device and
// number, and kept until the process ends, as their streams are. Null with a warning where the driver cannot, and on a
// CPU.
std::shared_ptr<const DevicePartition> split_device(c10::Device device, int64_t background_sms);

// While one lives, what this thread launches runs in a part: on its stream, with kernels cut for its SMs.
class PartitionScope final {
 public:
  enum class Part { kForeground, kBackground };
  PartitionScope(const DevicePartition& partition, Part part);
  ~PartitionScope();
  PartitionScope(const PartitionScope&) = delete;
  PartitionScope& operator=(const PartitionScope&) = delete;

 private:
  c10::StreamGuard stream_;
  int limit_before_, lane_before_;
};

namespace cuda {

// The driver's calls behind split_device, of builds with CUDA. Null where it does not work; `problem` says why. The
// contexts and their streams are never destroyed.
std::shared_ptr<const DevicePartition> split_sms(c10::Device device, int64_t background_sms, std::string* problem);

}  // namespace cuda
}  // namespace trireme
