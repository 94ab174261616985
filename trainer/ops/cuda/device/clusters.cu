#include "trainer/ops/cuda/device/clusters.h"

namespace trireme::cuda {
namespace {

__global__ void nothing() {}

}  // namespace

bool clusters_start(cudaStream_t stream, int blocks) {
  int device = 0, shared_memory = 0;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(blocks);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = 32;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  bool started =
      cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess &&
      cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory) == cudaSuccess;
  config.dynamicSmemBytes = static_cast<size_t>(shared_memory);
  started = started && cudaLaunchKernelEx(&config, nothing) == cudaSuccess;
  started = started && cudaStreamSynchronize(stream) == cudaSuccess;
  cudaGetLastError();  // a launch that was refused is no error of whoever launches next
  return started;
}

}  // namespace trireme::cuda
