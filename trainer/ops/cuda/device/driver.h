// Functions of the CUDA driver, found through the runtime, so that nothing links libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace trireme::cuda {

// Null where the driver does not have it. `version`: 1000 * major + 10 * minor of the CUDA that brought it.
template <typename Function>
Function* driver_function(const char* name, unsigned version) {
  void* pointer = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &pointer, version, cudaEnableDefault, &result);
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess) return reinterpret_cast<Function*>(pointer);
  (void)cudaGetLastError();
  return nullptr;
}

}  // namespace trireme::cuda
