// LibTorch's current stream on this thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

namespace trireme::cuda {

inline cudaStream_t stream_of(int device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

// Of the tensor's device.
inline cudaStream_t stream_of(const at::Tensor& x) { return stream_of(x.device().index()); }

}  // namespace trireme::cuda
