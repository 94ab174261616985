#include "trainer/parallel/device.h"

#ifdef TRIREME_CUDA
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#endif

#include "base/error.h"

namespace trireme {

void require_hopper(const std::string& name, int major, int minor) {
  if (major == 9 && minor == 0) return;
  fail_user("this machine's GPU is a " + name + " (compute capability " + std::to_string(major) + "." +
            std::to_string(minor) +
            "); the kernels are for Hopper (9.0: H100, H200, GH200). Use one of these, or the "
            "CPU (cluster.device=cpu, --device cpu)");
}

at::Device choose_device(const std::string& setting, int local_rank) {
  if (setting == "cpu") return at::kCPU;
  TRIREME_CHECK(setting == "cuda" || setting == "auto", "unknown device " + setting);
#ifdef TRIREME_CUDA
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
#else
  if (setting == "cuda") {
    fail_user("cluster.device is cuda but this is the CPU build; build the preset cuda, or use cluster.device=cpu");
  }
  return at::kCPU;
#endif
}

void synchronize(at::Device device) {
#ifdef TRIREME_CUDA
  if (device.is_cuda()) c10::cuda::device_synchronize();
#endif
}

std::string device_name(at::Device device) {
#ifdef TRIREME_CUDA
  if (device.is_cuda()) {
    cudaDeviceProp properties{};
    C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
    return properties.name;
  }
#endif
  return "cpu";
}

}  // namespace trireme
