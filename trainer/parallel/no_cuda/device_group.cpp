#include "trainer/parallel/device_group.h"

#include "base/error.h"

namespace trireme {

c10::intrusive_ptr<c10d::Backend> make_device_group(const c10::intrusive_ptr<c10d::Store>&, int, int, Milliseconds) {
  fail_internal("this build has collectives for CPU tensors only");
}

std::function<bool()> end_of(const c10::intrusive_ptr<c10d::Work>&) { fail_internal("this build has no CUDA"); }

std::function<bool()> mark_current_stream() { fail_internal("this build has no CUDA"); }

TimeMark mark_time() { fail_internal("this build has no CUDA"); }
double seconds_between(const TimeMark&, const TimeMark&) { fail_internal("this build has no CUDA"); }

bool capturing() { return false; }

}  // namespace trireme
