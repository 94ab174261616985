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

TimeMark mark_time() {
  const auto mark = std::make_shared<at::cuda::CUDAEvent>(cudaEventDefault);
  mark->record();
  return mark;
}

double seconds_between(const TimeMark& begin, const TimeMark& end) {
  const auto& last = *static_cast<const at::cuda::CUDAEvent*>(end.get());
  last.synchronize();
  return 1e-3 * static_cast<const at::cuda::CUDAEvent*>(begin.get())->elapsed_time(last);
}

bool capturing() { return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None; }

}  // namespace trireme
