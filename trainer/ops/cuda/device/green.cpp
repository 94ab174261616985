// split_sms (partition.h) by green contexts.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <algorithm>

#include "trainer/ops/cuda/device/driver.h"
#include "trainer/ops/partition.h"

namespace trireme::cuda {
namespace {

constexpr unsigned kVersion = 12050;

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

}  // namespace

std::shared_ptr<const DevicePartition> split_sms(c10::Device device, int64_t background_sms, std::string* problem) {
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(cudaFree(nullptr));  // makes the primary context
  const Driver driver;
  if (!driver.complete()) {
    *problem = "the driver has no green contexts (CUDA 12.5 or newer)";
    return nullptr;
  }
  const auto failed = [&](CUresult result, const char* call) {
    if (result == CUDA_SUCCESS) return false;
    *problem = std::string(call) + " failed with error " + std::to_string(static_cast<int>(result));
    return true;
  };
  CUdevice number = 0;
  CUdevResource all{}, front{}, rest{};
  if (failed(driver.device(&number, device.index()), "cuDeviceGet") ||
      failed(driver.resource_of_device(number, &all, CU_DEV_RESOURCE_TYPE_SM), "cuDeviceGetDevResource")) {
    return nullptr;
  }
  // The group is the foreground: what remains has no guarantee for large clusters, which only decoding uses.
  const auto count = static_cast<int64_t>(all.sm.smCount);
  const int64_t wanted = std::max(count - background_sms, count / 2);
  unsigned groups = 1;
  if (failed(driver.split(&front, &groups, &all, &rest, 0, static_cast<unsigned>(wanted)),
             "cuDevSmResourceSplitByCount")) {
    return nullptr;
  }
  if (groups != 1 || rest.sm.smCount == 0) {
    *problem = std::to_string(count) + " of them leave none beside " + std::to_string(wanted);
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
  return std::make_shared<DevicePartition>(
      DevicePartition{c10::cuda::getStreamFromExternal(first, device.index()).unwrap(),
                      c10::cuda::getStreamFromExternal(second, device.index()).unwrap(),
                      static_cast<int>(front.sm.smCount), static_cast<int>(rest.sm.smCount)});
}

}  // namespace trireme::cuda
