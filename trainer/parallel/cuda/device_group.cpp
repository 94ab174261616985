#include "trainer/parallel/device_group.h"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace trireme {

c10::intrusive_ptr<c10d::Backend> make_device_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    Milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
}

std::function<bool()> mark_current_stream() {
  const auto come = std::make_shared<at::cuda::CUDAEvent>();
  come->record();
  return [come] { return come->query(); };
}

bool capturing() { return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None; }

}  // namespace trireme
