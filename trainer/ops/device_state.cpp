#include "trainer/ops/device_state.h"

#ifdef TRIREME_CUDA
#include "trainer/ops/cuda/elementwise/row_ops.h"
#endif

namespace trireme {

void throw_on_bad_ids([[maybe_unused]] c10::Device device) {
#ifdef TRIREME_CUDA
  if (device.is_cuda()) cuda::throw_on_bad_ids(device);
#endif
}

}  // namespace trireme
