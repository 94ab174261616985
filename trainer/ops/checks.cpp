#include "trainer/ops/checks.h"

#include "trainer/ops/cuda_ops.h"

namespace trireme {

void fail_unsupported(const char* op, const at::Tensor& x, Kernels kernels) {
  fail_user(std::string(op) + " has no implementation for " + x.device().str() + " " + c10::toString(x.scalar_type()) +
            " in this build; it has cpu Float, BFloat16 and Double" +
            (kernels == Kernels::kCpuAndCuda && cuda::built() ? " and cuda BFloat16" : ""));
}

}  // namespace trireme
