// Host memory that a GPU reads and writes without a copy between. Builds with CUDA link cuda/, the others no_cuda/.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace trireme {

// Whole pages, already written to once, so that they are there. False where the driver does not; `problem` says why.
// Makes `device` the thread's current one.
bool pin_memory(c10::Device device, void* memory, int64_t bytes, std::string* problem);
// Nothing where it was not pinned.
void unpin_memory(void* memory);

}  // namespace trireme
