#include "trainer/cli/exit_codes.h"

#include "api/runtime.h"
#include "base/error.h"

namespace trireme {

bool is_device_fault(std::string_view message) {
  // As cudaGetErrorString words them (cudaErrorECCUncorrectable, ...HardwareStackError, ...DevicesUnavailable,
  // ...NoDevice, ...NvlinkUncorrectable, ...Contained, ...SystemNotReady, ...SystemDriverMismatch,
  // ...InsufficientDriver).
  static constexpr std::string_view kFaults[] = {"uncorrectable ECC error",
                                                 "hardware stack error",
                                                 "CUDA-capable device(s) is/are busy or unavailable",
                                                 "no CUDA-capable device is detected",
                                                 "uncorrectable NVLink error",
                                                 "over nvlink or a hardware error",
                                                 "system not yet initialized",
                                                 "system has unsupported display driver / cuda driver combination",
                                                 "CUDA driver version is insufficient"};
  for (const std::string_view fault : kFaults) {
    if (message.find(fault) != std::string_view::npos) return true;
  }
  return false;
}

int exit_code_of(const std::exception& error) {
  if (is_device_fault(error.what())) return kExitNode;
  const auto* ours = dynamic_cast<const Error*>(&error);
  if (ours == nullptr) return 1;
  switch (ours->kind()) {
    case ErrorKind::kUser:
    case ErrorKind::kNotFound:
      return kExitConfig;
    case ErrorKind::kTimeout:
    case ErrorKind::kUnavailable:
    case ErrorKind::kConflict:
      return kExitCommunication;
    case ErrorKind::kData:
      return kExitNumerics;
    case ErrorKind::kIo:
    case ErrorKind::kInternal:
      return 1;
  }
  return 1;
}

}  // namespace trireme
