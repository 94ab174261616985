#include "trainer/parallel/device.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstdlib>

#include "base/error.h"
#include "base/host.h"

namespace trireme {

void prepare_devices(const std::vector<Layout>& layouts) {
  for (const auto& [name, value] : driver_settings(layouts)) ::setenv(name.c_str(), value.c_str(), /*overwrite=*/0);
}

at::Device choose_device(const std::string& setting, int local_rank) {
  if (setting == "cpu") return at::kCPU;
  TRIREME_CHECK(setting == "cuda" || setting == "auto", "unknown device " + setting);
  const int count = c10::cuda::device_count();
  if (count == 0 && setting == "auto") return at::kCPU;
  if (count == 0) fail_user("cluster.device is cuda but this machine shows no NVIDIA GPU; use cluster.device=cpu");
  if (local_rank >= count) {
    fail_user("local rank " + std::to_string(local_rank) + " has no GPU: this machine shows " + std::to_string(count) +
              "; start at most that many ranks on it (trireme launch --nproc-per-node)");
  }
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, local_rank));
  require_hopper(properties.name, properties.major, properties.minor);
  // Micro-batches differ in size: without this, freed blocks of one size cannot serve another.
  c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(local_rank));
  return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(local_rank));
}

void synchronize(at::Device device) {
  if (device.is_cuda()) c10::cuda::device_synchronize();
}

int64_t memory_bytes_of(at::Device device) {
  if (!device.is_cuda()) return total_memory_bytes();
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  return static_cast<int64_t>(properties.totalGlobalMem);
}

std::string device_name(at::Device device) {
  if (!device.is_cuda()) return "cpu";
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  return properties.name;
}

bool queue_call(at::Device device, void (*call)(void*)) {
  if (!device.is_cuda()) return false;
  C10_CUDA_CHECK(cudaLaunchHostFunc(c10::cuda::getCurrentCUDAStream().stream(), call, nullptr));
  return true;
}

}  // namespace trireme
