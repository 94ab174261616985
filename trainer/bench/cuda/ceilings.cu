#include "trainer/bench/cuda/ceilings.h"

namespace trireme::bench {
namespace {

__global__ void __launch_bounds__(512) read_all(const uint4* data, size_t count, unsigned* sink) {
  unsigned all = 0;
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += 4 * stride) {
    uint4 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = i + j * stride < count ? __ldcs(data + i + j * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < 4; ++j) all ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  if (all == 0x9e3779b9U) *sink = all;  // keeps the loads
}

}  // namespace

void launch_read(const void* data, size_t bytes, unsigned* sink, cudaStream_t stream) {
  int device = 0, sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  read_all<<<sms * 4, 512, 0, stream>>>(static_cast<const uint4*>(data), bytes / 16, sink);
}

}  // namespace trireme::bench
