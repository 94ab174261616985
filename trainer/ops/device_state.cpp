#include "trainer/ops/device_state.h"

#include "trainer/ops/cuda_ops.h"

namespace trireme {

void throw_on_bad_ids(c10::Device device) {
  if (device.is_cuda()) cuda::throw_on_bad_ids(device);
}

}  // namespace trireme
