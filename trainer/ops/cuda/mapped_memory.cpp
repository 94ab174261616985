#include "trainer/ops/cuda/mapped_memory.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "trainer/ops/cuda/driver.h"

namespace trireme::cuda {
namespace {

constexpr int64_t kPart = int64_t{1} << 30;  // of one allocation

struct Driver {
  decltype(cuMemGetAllocationGranularity)* granularity =
      driver_function<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity", 10020);
  decltype(cuMemAddressReserve)* reserve = driver_function<decltype(cuMemAddressReserve)>("cuMemAddressReserve", 10020);
  decltype(cuMemAddressFree)* free_addresses = driver_function<decltype(cuMemAddressFree)>("cuMemAddressFree", 10020);
  decltype(cuMemCreate)* create = driver_function<decltype(cuMemCreate)>("cuMemCreate", 10020);
  decltype(cuMemRelease)* release = driver_function<decltype(cuMemRelease)>("cuMemRelease", 10020);
  decltype(cuMemMap)* map = driver_function<decltype(cuMemMap)>("cuMemMap", 10020);
  decltype(cuMemUnmap)* unmap = driver_function<decltype(cuMemUnmap)>("cuMemUnmap", 10020);
  decltype(cuMemSetAccess)* set_access = driver_function<decltype(cuMemSetAccess)>("cuMemSetAccess", 10020);
};

const Driver& driver() {
  static const Driver functions = [] {
    const Driver found;
    TRIREME_CHECK(found.granularity != nullptr && found.reserve != nullptr && found.free_addresses != nullptr &&
                      found.create != nullptr && found.release != nullptr && found.map != nullptr &&
                      found.unmap != nullptr && found.set_access != nullptr,
                  "the CUDA driver has no virtual memory management");
    return found;
  }();
  return functions;
}

void check(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS)
    fail_internal(std::string(call) + " failed with error " + std::to_string(static_cast<int>(result)));
}

// Between two changes of what is mapped the peak is LibTorch's and that.
struct Usage {
  int64_t mapped = 0, peak = 0;
};
std::mutex usage_mutex;
std::map<int, Usage> usage_of;  // by device

Usage& counted(c10::Device device) {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  Usage& usage = usage_of[device.index()];
  const int64_t tensors = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[kAll].peak;
  usage.peak = std::max(usage.peak, tensors + usage.mapped);
  c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
  return usage;
}

void count_mapped(c10::Device device, int64_t change) {
  const std::lock_guard<std::mutex> lock(usage_mutex);
  counted(device).mapped += change;
}

}  // namespace

int64_t take_peak_bytes(c10::Device device) {
  const std::lock_guard<std::mutex> lock(usage_mutex);
  return std::exchange(counted(device).peak, 0);
}

struct MappedMemory::State {
  c10::Device device;
  CUmemAllocationProp properties{};
  int64_t bytes = 0;  // whole granules
  CUdeviceptr address = 0;
  std::vector<int64_t> parts;  // mapped, from the address on

  // False without memory left; then nothing is mapped.
  bool try_map() {
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    for (int64_t at = 0; at < bytes;) {
      const int64_t part = std::min(kPart, bytes - at);
      CUmemGenericAllocationHandle handle = 0;
      const CUresult made = driver().create(&handle, static_cast<size_t>(part), &properties, 0);
      if (made == CUDA_ERROR_OUT_OF_MEMORY) {
        unmap();
        return false;
      }
      check(made, "cuMemCreate");
      const CUresult mapped =
          driver().map(address + static_cast<CUdeviceptr>(at), static_cast<size_t>(part), 0, handle, 0);
      check(driver().release(handle), "cuMemRelease");  // the mapping keeps it
      check(mapped, "cuMemMap");
      parts.push_back(part);
      at += part;
    }
    check(driver().set_access(address, static_cast<size_t>(bytes), &access, 1), "cuMemSetAccess");
    return true;
  }

  void unmap() {
    CUdeviceptr at = address;
    for (const int64_t part : parts) {
      check(driver().unmap(at, static_cast<size_t>(part)), "cuMemUnmap");
      at += static_cast<CUdeviceptr>(part);
    }
    parts.clear();
  }
};

MappedMemory::MappedMemory(c10::Device device, int64_t bytes) : state_(std::make_unique<State>(State{device})) {
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(cudaFree(nullptr));  // makes the device's context
  State& s = *state_;
  s.properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  s.properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  s.properties.location.id = device.index();
  size_t granule = 0;
  check(driver().granularity(&granule, &s.properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
  const auto step = static_cast<int64_t>(granule);
  s.bytes = (std::max<int64_t>(bytes, 1) + step - 1) / step * step;
  check(driver().reserve(&s.address, static_cast<size_t>(s.bytes), granule, 0, 0), "cuMemAddressReserve");
}

MappedMemory::~MappedMemory() {
  try {
    unmap();
    check(driver().free_addresses(state_->address, static_cast<size_t>(state_->bytes)), "cuMemAddressFree");
  } catch (...) {
    // The device is lost, or the process ends.
  }
}

void* MappedMemory::address() const { return reinterpret_cast<void*>(state_->address); }
bool MappedMemory::mapped() const { return !state_->parts.empty(); }

void MappedMemory::map() {
  if (mapped()) return;
  const c10::cuda::CUDAGuard guard(state_->device);
  if (!state_->try_map()) {
    c10::cuda::CUDACachingAllocator::emptyCache();
    if (!state_->try_map()) {
      size_t free = 0, total = 0;
      C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
      TORCH_CHECK_WITH(OutOfMemoryError, false, "Tried to allocate ",
                       format_bytes(static_cast<uint64_t>(state_->bytes)), ". The device has a total capacity of ",
                       format_bytes(total), " of which ", format_bytes(free), " is free");
    }
  }
  count_mapped(state_->device, state_->bytes);
  C10_CUDA_CHECK(cudaMemsetAsync(address(), 0, static_cast<size_t>(state_->bytes),
                                 c10::cuda::getCurrentCUDAStream(state_->device.index())));
}

void MappedMemory::unmap() {
  if (!mapped()) return;
  const c10::cuda::CUDAGuard guard(state_->device);
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  state_->unmap();
  count_mapped(state_->device, -state_->bytes);
}

}  // namespace trireme::cuda
