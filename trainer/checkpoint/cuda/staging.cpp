// Of staging.h and pinned_memory.h what reads a GPU.
#include "trainer/checkpoint/staging.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>

#include "trainer/checkpoint/pinned_memory.h"

namespace trireme {

bool pin_memory(c10::Device device, void* memory, int64_t bytes, std::string* problem) {
  c10::cuda::set_device(device.index());
  const cudaError_t error = cudaHostRegister(memory, static_cast<size_t>(bytes), cudaHostRegisterPortable);
  if (error == cudaSuccess) return true;
  (void)cudaGetLastError();
  *problem = cudaGetErrorString(error);
  return false;
}

void unpin_memory(void* memory) {
  if (cudaHostUnregister(memory) != cudaSuccess) (void)cudaGetLastError();
}

namespace {
// A small copy of the training thread waits for at most two of these.
constexpr int64_t kPiece = int64_t{16} << 20;
}  // namespace

struct StateReader::Impl {
  at::Device device = at::kCPU;
  cudaStream_t stream = nullptr;
  cudaEvent_t start = nullptr;
  cudaEvent_t pieces[2] = {nullptr, nullptr};
  int64_t in_piece = 0;  // bytes queued since the last event
  int64_t events = 0;    // recorded since finish()
};

StateReader::StateReader(at::Device device) : impl_(std::make_unique<Impl>()) {
  impl_->device = device;
  if (!device.is_cuda()) return;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&impl_->stream, cudaStreamNonBlocking));
  const unsigned int flags = cudaEventDisableTiming | cudaEventBlockingSync;
  for (cudaEvent_t* event : {&impl_->start, &impl_->pieces[0], &impl_->pieces[1]})
    C10_CUDA_CHECK(cudaEventCreateWithFlags(event, flags));
}

StateReader::~StateReader() {
  if (!impl_->device.is_cuda()) return;
  for (cudaEvent_t event : {impl_->start, impl_->pieces[0], impl_->pieces[1]}) (void)cudaEventDestroy(event);
  (void)cudaStreamDestroy(impl_->stream);
}

void StateReader::mark() {
  if (!impl_->device.is_cuda()) return;
  C10_CUDA_CHECK(cudaEventRecord(impl_->start, c10::cuda::getCurrentCUDAStream(impl_->device.index()).stream()));
}

void StateReader::begin() {
  if (!impl_->device.is_cuda()) return;
  c10::cuda::set_device(impl_->device.index());
  C10_CUDA_CHECK(cudaStreamWaitEvent(impl_->stream, impl_->start));
  impl_->in_piece = impl_->events = 0;
}

void StateReader::read(void* to, const void* from, int64_t bytes) {
  if (!impl_->device.is_cuda()) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  auto* target = static_cast<uint8_t*>(to);
  auto* source = static_cast<const uint8_t*>(from);
  while (bytes > 0) {
    const int64_t n = std::min(bytes, kPiece - impl_->in_piece);
    C10_CUDA_CHECK(cudaMemcpyAsync(target, source, static_cast<size_t>(n), cudaMemcpyDeviceToHost, impl_->stream));
    target += n;
    source += n;
    bytes -= n;
    impl_->in_piece += n;
    if (impl_->in_piece < kPiece) continue;
    impl_->in_piece = 0;
    C10_CUDA_CHECK(cudaEventRecord(impl_->pieces[impl_->events % 2], impl_->stream));
    ++impl_->events;
    if (impl_->events > 1) C10_CUDA_CHECK(cudaEventSynchronize(impl_->pieces[impl_->events % 2]));  // the one before
  }
}

void StateReader::finish() {
  if (!impl_->device.is_cuda()) return;
  C10_CUDA_CHECK(cudaEventRecord(impl_->pieces[0], impl_->stream));
  C10_CUDA_CHECK(cudaEventSynchronize(impl_->pieces[0]));
  impl_->in_piece = impl_->events = 0;
}

}  // namespace trireme
