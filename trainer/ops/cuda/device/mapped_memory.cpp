#include "trainer/ops/mapped_memory.h"

#include <ATen/Context.h>
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
#include "trainer/ops/cuda/device/driver.h"

namespace trireme::cuda {
namespace {

constexpr int64_t kPart = int64_t{1} << 30;  // of one allocation

struct MappingDriver {
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

const MappingDriver& driver() {
  static const MappingDriver functions = [] {
    const MappingDriver found;
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
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);  // memory may be mapped before any tensor is made
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
  struct Part {
    CUdeviceptr address = 0;
    int64_t bytes = 0;
  };
  c10::Device device;
  CUmemAllocationProp properties{};
  int64_t granule = 0;
  int64_t sections = 0;
  int64_t section_bytes = 0;  // whole granules
  CUdeviceptr address = 0;
  std::vector<Part> parts;  // mapped
  int64_t mapped_bytes = 0;

  int64_t whole_granules(int64_t bytes) const {
    return (std::max<int64_t>(bytes, 1) + granule - 1) / granule * granule;
  }
  CUdeviceptr section(int64_t index) const { return address + static_cast<CUdeviceptr>(index * section_bytes); }

  // False without memory left; then nothing is mapped. `bytes`: whole granules.
  bool try_map(int64_t bytes) {
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    for (int64_t index = 0; index < sections; ++index) {
      for (int64_t at = 0; at < bytes;) {
        const Part part{section(index) + static_cast<CUdeviceptr>(at), std::min(kPart, bytes - at)};
        CUmemGenericAllocationHandle handle = 0;
        const CUresult made = driver().create(&handle, static_cast<size_t>(part.bytes), &properties, 0);
        if (made == CUDA_ERROR_OUT_OF_MEMORY) {
          unmap();
          return false;
        }
        check(made, "cuMemCreate");
        const CUresult mapped = driver().map(part.address, static_cast<size_t>(part.bytes), 0, handle, 0);
        check(driver().release(handle), "cuMemRelease");  // the mapping keeps it
        check(mapped, "cuMemMap");
        parts.push_back(part);
        at += part.bytes;
      }
      check(driver().set_access(section(index), static_cast<size_t>(bytes), &access, 1), "cuMemSetAccess");
    }
    mapped_bytes = sections * bytes;
    return true;
  }

  void unmap() {
    for (const Part& part : parts) check(driver().unmap(part.address, static_cast<size_t>(part.bytes)), "cuMemUnmap");
    parts.clear();
    mapped_bytes = 0;
  }
};

MappedMemory::MappedMemory(c10::Device device, int64_t sections, int64_t bytes)
    : state_(std::make_unique<State>(State{device})) {
  TRIREME_CHECK(sections > 0, "mapped memory needs at least one section");
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(cudaFree(nullptr));  // makes the device's context
  State& s = *state_;
  s.properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  s.properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  s.properties.location.id = device.index();
  size_t granule = 0;
  check(driver().granularity(&granule, &s.properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
  s.granule = static_cast<int64_t>(granule);
  s.sections = sections;
  s.section_bytes = s.whole_granules(bytes);
  check(driver().reserve(&s.address, static_cast<size_t>(sections * s.section_bytes), granule, 0, 0),
        "cuMemAddressReserve");
}

MappedMemory::~MappedMemory() {
  try {
    unmap();
    check(driver().free_addresses(state_->address, static_cast<size_t>(state_->sections * state_->section_bytes)),
          "cuMemAddressFree");
  } catch (...) {
    // The device is lost, or the process ends.
  }
}

void* MappedMemory::address(int64_t section) const {
  TRIREME_CHECK(section >= 0 && section < state_->sections, "there is no such section");
  return reinterpret_cast<void*>(state_->section(section));
}
bool MappedMemory::mapped() const { return !state_->parts.empty(); }

void MappedMemory::map(int64_t wanted) {
  if (mapped()) return;
  const c10::cuda::CUDAGuard guard(state_->device);
  const int64_t bytes = state_->whole_granules(wanted);
  TRIREME_CHECK(bytes <= state_->section_bytes, "more memory than there are addresses for");
  if (!state_->try_map(bytes)) {
    c10::cuda::CUDACachingAllocator::emptyCache();
    if (!state_->try_map(bytes)) {
      size_t free = 0, total = 0;
      C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "Tried to allocate ", format_bytes(static_cast<uint64_t>(state_->sections * bytes)),
          ". The device has a total capacity of ", format_bytes(total), " of which ", format_bytes(free), " is free");
    }
  }
  count_mapped(state_->device, state_->mapped_bytes);
  for (int64_t index = 0; index < state_->sections; ++index) {
    C10_CUDA_CHECK(cudaMemsetAsync(address(index), 0, static_cast<size_t>(bytes),
                                   c10::cuda::getCurrentCUDAStream(state_->device.index())));
  }
}

void MappedMemory::unmap() {
  if (!mapped()) return;
  const c10::cuda::CUDAGuard guard(state_->device);
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  const int64_t bytes = state_->mapped_bytes;
  state_->unmap();
  count_mapped(state_->device, -bytes);
}

}  // namespace trireme::cuda
