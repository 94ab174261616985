// split_sms (partition.h) by green contexts.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <algorithm>

#include "trainer/ops/cuda/device/clusters.h"
#include "trainer/ops/cuda/device/driver.h"
#include "trainer/ops/partition.h"

namespace trireme::cuda {
namespace {

constexpr unsigned kVersion = 12050;
constexpr int kCluster = 4;  // thread blocks: the largest clusters of the library's products

struct Driver {
  decltype(cuDeviceGetDevResource)* resource_of_device =
      driver_function<decltype(cuDeviceGetDevResource)>("cuDeviceGetDevResource", kVersion);
  decltype(cuDevSmResourceSplitByCount)* split =
      driver_function<decltype(cuDevSmResourceSplitByCount)>("cuDevSmResourceSplitByCount", kVersion);
  decltype(cuDevResourceGenerateDesc)* describe =
      driver_function<decltype(cuDevResourceGenerateDesc)>("cuDevResourceGenerateDesc", kVersion);
  decltype(cuGreenCtxCreate)* create = driver_function<decltype(cuGreenCtxCreate)>("cuGreenCtxCreate", kVersion);
  decltype(cuGreenCtxStreamCreate)* create_stream =
      driver_function<decltype(cuGreenCtxStreamCreate)>("cuGreenCtxStreamCreate", kVersion);
  decltype(cuDeviceGet)* device = driver_function<decltype(cuDeviceGet)>("cuDeviceGet", kVersion);
  bool complete() const {
    return resource_of_device != nullptr && split != nullptr && describe != nullptr && create != nullptr &&
           create_stream != nullptr && device != nullptr;
  }
};

// Both parts of a device whose foreground has `foreground_sms` SMs, or as many more as the driver's eights ask for.
std::shared_ptr<const DevicePartition> divide(const Driver& driver, CUdevice number, c10::DeviceIndex index,
                                              CUdevResource all, int64_t foreground_sms, std::string* problem) {
  const auto failed = [&](CUresult result, const char* call) {
    if (result == CUDA_SUCCESS) return false;
    *problem = std::string(call) + " failed with error " + std::to_string(static_cast<int>(result));
    return true;
  };
  // The group is the foreground: what remains has no guarantee for clusters, which decoding uses most.
  CUdevResource front{}, rest{};
  unsigned groups = 1;
  if (failed(driver.split(&front, &groups, &all, &rest, 0, static_cast<unsigned>(foreground_sms)),
             "cuDevSmResourceSplitByCount")) {
    return nullptr;
  }
  if (groups != 1 || rest.sm.smCount == 0) {
    *problem = std::to_string(all.sm.smCount) + " of them leave none beside " + std::to_string(foreground_sms);
    return nullptr;
  }
  const auto stream_of = [&](CUdevResource& resource, cudaStream_t* stream) {
    CUdevResourceDesc description{};
    CUgreenCtx context = nullptr;
    CUstream made = nullptr;
    if (failed(driver.describe(&description, &resource, 1), "cuDevResourceGenerateDesc") ||
        failed(driver.create(&context, description, number, CU_GREEN_CTX_DEFAULT_STREAM), "cuGreenCtxCreate") ||
        failed(driver.create_stream(&made, context, CU_STREAM_NON_BLOCKING, 0), "cuGreenCtxStreamCreate")) {
      return false;
    }
    *stream = made;
    return true;
  };
  cudaStream_t first = nullptr, second = nullptr;
  if (!stream_of(front, &first) || !stream_of(rest, &second)) return nullptr;
  if (!clusters_start(second, kCluster)) {
    *problem = "no cluster of " + std::to_string(kCluster) + " starts on the " + std::to_string(rest.sm.smCount) +
               " that are left beside " + std::to_string(front.sm.smCount);
    return nullptr;
  }
  return std::make_shared<DevicePartition>(DevicePartition{
      c10::cuda::getStreamFromExternal(first, index).unwrap(), c10::cuda::getStreamFromExternal(second, index).unwrap(),
      static_cast<int>(front.sm.smCount), static_cast<int>(rest.sm.smCount)});
}

}  // namespace

std::shared_ptr<const DevicePartition> split_sms(c10::Device device, int64_t background_sms, std::string* problem) {
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(cudaFree(nullptr));  // makes the primary context
  const Driver driver;
  if (!driver.complete()) {
    *problem = "the driver has no green contexts (CUDA 12.5 or newer)";
    return nullptr;
  }
  CUdevice number = 0;
  CUdevResource all{};
  if (const CUresult result = driver.device(&number, device.index()); result != CUDA_SUCCESS) {
    *problem = "cuDeviceGet failed with error " + std::to_string(static_cast<int>(result));
    return nullptr;
  }
  if (const CUresult result = driver.resource_of_device(number, &all, CU_DEV_RESOURCE_TYPE_SM);
      result != CUDA_SUCCESS) {
    *problem = "cuDeviceGetDevResource failed with error " + std::to_string(static_cast<int>(result));
    return nullptr;
  }
  const auto count = static_cast<int64_t>(all.sm.smCount);
  // Where so few are left that a product's clusters do not start there, eight more at a time.
  for (int64_t background = background_sms;; background += 8) {
    const int64_t foreground = std::max(count - background, count / 2);
    auto partition = divide(driver, number, device.index(), all, foreground, problem);
    if (partition != nullptr || foreground == count / 2) return partition;
  }
}

}  // namespace trireme::cuda
