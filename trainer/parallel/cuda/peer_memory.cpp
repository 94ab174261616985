#include "trainer/parallel/cuda/peer_memory.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <sys/stat.h>

#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "base/fs.h"
#include "base/host.h"

namespace trireme {
namespace {

// Processes of which this says the same can hand each other memory: one machine, one network namespace.
std::string neighbourhood() {
  struct stat status {};
  const std::string network = ::stat("/proc/self/ns/net", &status) == 0 ? std::to_string(status.st_ino) : "?";
  std::string boot = "?";
  try {
    boot = read_file("/proc/sys/kernel/random/boot_id");
  } catch (const Error&) {
    boot = host_name();
  }
  return boot + "/" + network;
}

bool forbidden() {
  const char* value = std::getenv("NCCL_P2P_DISABLE");
  return value != nullptr && std::atoi(value) != 0;
}

// What every rank says before memory is mapped.
struct Introduction {
  std::string where;
  int device = 0;
};

// Why this rank's device cannot be reached by the others', or cannot reach them; nothing when they can.
std::string obstacle(const std::vector<std::string>& introductions, int rank, int device) {
  if (forbidden()) return "NCCL_P2P_DISABLE is set";
  const auto parse = [](const std::string& text) {
    const size_t end = text.find('\n');
    return Introduction{text.substr(end + 1), std::atoi(text.c_str())};
  };
  const Introduction own = parse(introductions[static_cast<size_t>(rank)]);
  for (size_t other = 0; other < introductions.size(); ++other) {
    if (static_cast<int>(other) == rank) continue;
    const Introduction theirs = parse(introductions[other]);
    if (theirs.where != own.where) return "its ranks are on several hosts, or in network namespaces of their own";
    if (theirs.device == device) return "two of its ranks share a GPU";
    int can = 0;
    const bool known = cudaDeviceCanAccessPeer(&can, device, theirs.device) == cudaSuccess;
    if (!known) (void)cudaGetLastError();  // or the next launch would be blamed
    if (!known || can == 0)
      return "GPU " + std::to_string(device) + " cannot reach the memory of GPU " + std::to_string(theirs.device);
  }
  return "";
}

}  // namespace

std::unique_ptr<PeerMemory> PeerMemory::make(const PeerGroup& group, at::Device device, int64_t bytes,
                                             const std::function<void(void*)>& fill, std::string& problem) {
  const std::vector<std::string> introductions =
      group.all_gather_bytes(std::to_string(device.index()) + "\n" + neighbourhood());
  const auto agreed = [&](const std::string& own) {
    for (const std::string& theirs : group.all_gather_bytes(own))
      if (!theirs.empty()) return theirs;
    return std::string();
  };
  problem = agreed(obstacle(introductions, group.rank, device.index()));
  std::unique_ptr<PeerMemory> made(new PeerMemory(group, device));
  // One step on every rank: what fails on one is known to all before the next.
  const auto step = [&](const std::function<void()>& run) {
    if (!problem.empty()) return;
    std::string failed;
    try {
      run();
    } catch (const std::exception& error) {
      const std::string why = error.what();
      failed = "mapping their memory failed: " + why.substr(0, why.find('\n'));
    }
    problem = agreed(failed);
  };
  std::string handle;
  step([&] { handle = made->allocate(bytes, fill); });
  const std::vector<std::string> handles = group.all_gather_bytes(handle);
  step([&] { made->open(handles); });
  if (problem.empty()) return made;
  made->close();
  (void)group.all_gather_bytes("");  // nobody has another's memory mapped
  made->free();
  return nullptr;
}

// The result lets the others map it. Not from LibTorch's allocator, whose segments cannot be mapped elsewhere.
std::string PeerMemory::allocate(int64_t bytes, const std::function<void(void*)>& fill) {
  const c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(cudaMalloc(&own_, static_cast<size_t>(bytes)));
  fill(own_);
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  cudaIpcMemHandle_t handle;
  C10_CUDA_CHECK(cudaIpcGetMemHandle(&handle, own_));
  return std::string(reinterpret_cast<const char*>(&handle), sizeof handle);
}

void PeerMemory::open(const std::vector<std::string>& handles) {
  const c10::cuda::CUDAGuard guard(device_);
  for (size_t rank = 0; rank < handles.size(); ++rank) {
    views_.push_back(own_);
    if (static_cast<int>(rank) == rank_) continue;
    views_.back() = nullptr;
    cudaIpcMemHandle_t handle;
    std::memcpy(&handle, handles[rank].data(), sizeof handle);
    C10_CUDA_CHECK(cudaIpcOpenMemHandle(&views_.back(), handle, cudaIpcMemLazyEnablePeerAccess));
  }
}

PeerMemory::~PeerMemory() {
  if (views_.empty()) return;
  const c10::cuda::CUDAGuard guard(device_);
  (void)cudaDeviceSynchronize();  // kernels may still read what goes now
  close();
}

void PeerMemory::close() {
  for (void* view : views_)
    if (view != own_ && view != nullptr) (void)cudaIpcCloseMemHandle(view);
  views_.clear();
}

void PeerMemory::free() {
  if (own_ == nullptr) return;
  const c10::cuda::CUDAGuard guard(device_);
  (void)cudaFree(own_);
  own_ = nullptr;
}

}  // namespace trireme
