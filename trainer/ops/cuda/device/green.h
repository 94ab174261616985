// The driver's calls behind split_device (partition.h).
#pragma once

#include <memory>
#include <string>

#include "trainer/ops/partition.h"

namespace trireme::cuda {

// Null where it does not work; `problem` says why. The contexts and their streams are never destroyed.
std::shared_ptr<const DevicePartition> split_sms(c10::Device device, int64_t background_sms, std::string* problem);

}  // namespace trireme::cuda
