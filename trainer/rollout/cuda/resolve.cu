#include "trainer/rollout/cuda/resolve.h"

namespace trireme::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void resolve_kernel(const int64_t* tokens, const int64_t* previous, int64_t* ids, int64_t count) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= count) return;
  const int64_t token = tokens[i];
  ids[i] = token >= 0 ? token : previous[-token - 1];
}

}  // namespace

void resolve_tokens(const int64_t* tokens, const int64_t* previous, int64_t* ids, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  resolve_kernel<<<blocks, kThreads, 0, stream>>>(tokens, previous, ids, count);
}

}  // namespace trireme::cuda
