#include "trainer/parallel/device_group.h"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/error.h"

namespace trireme {

c10::intrusive_ptr<c10d::Backend> make_device_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    Milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
}

// NCCL's watchdog keeps such a copy too, for the same reason: it shares the events, and has no results.
std::function<bool()> end_of(const c10::intrusive_ptr<c10d::Work>& work) {
  using NcclWork = c10d::ProcessGroupNCCL::WorkNCCL;
  const auto* own = dynamic_cast<const NcclWork*>(work.get());
  TRIREME_CHECK(own != nullptr, "a collective of a device that is none of NCCL's");
  const auto watched = c10::make_intrusive<NcclWork>(*own);
  return [watched] { return watched->isCompleted(); };
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
