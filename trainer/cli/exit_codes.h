// What the exit code of a rank says about its error, to the failure policy of a job.
#pragma once

#include <exception>
#include <string_view>

namespace trireme {

// Whether a message of CUDA's says that the device, its link or its driver is at fault, so that the same program would
// run elsewhere. Errors that a program can cause itself (a bad address, no memory left) do not count.
bool is_device_fault(std::string_view message);

// A code of api/runtime.h, or 1.
int exit_code_of(const std::exception& error);

}  // namespace trireme
