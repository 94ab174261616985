// Ceilings that a benchmark measures in its own run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace trireme::bench {

// Reads `bytes` (a multiple of 16) once, writes nothing.
void launch_read(const void* data, size_t bytes, unsigned* sink, cudaStream_t stream);

}  // namespace trireme::bench
