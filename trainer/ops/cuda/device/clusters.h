#pragma once

#include <cuda_runtime_api.h>

namespace trireme::cuda {

// Whether a cluster of `blocks` thread blocks, each of which takes an SM for itself, starts on `stream`: whether the
// stream's SMs lie together so. Runs an empty kernel and waits for it.
bool clusters_start(cudaStream_t stream, int blocks);

}  // namespace trireme::cuda
