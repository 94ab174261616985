// Token ids of a step whose predecessors' ids are still on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace trireme::cuda {

// ids[i] = tokens[i] when that is >= 0, else previous[-tokens[i] - 1]. All int64 on the device; ids may be tokens.
void resolve_tokens(const int64_t* tokens, const int64_t* previous, int64_t* ids, int64_t count, cudaStream_t stream);

}  // namespace trireme::cuda
