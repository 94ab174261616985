// Checks shared by the ops' entry points.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <string>

#include "base/error.h"

namespace trireme {

// Where an op has kernels, in builds with CUDA.
enum class Kernels { kCpuOnly, kCpuAndCuda };

[[noreturn]] void fail_unsupported(const char* op, const at::Tensor& x, Kernels kernels);

// Throws Error(kUser) where this build has no kernels for the tensor's device and dtype.
inline void require_supported(const char* op, const at::Tensor& x, Kernels kernels = Kernels::kCpuAndCuda) {
  const at::ScalarType type = x.scalar_type();
  if (x.is_cpu() && (type == at::kFloat || type == at::kDouble || type == at::kBFloat16)) return;
  if (kernels == Kernels::kCpuAndCuda && x.is_cuda() && type == at::kBFloat16) return;
  fail_unsupported(op, x, kernels);
}

inline void require_same(const char* op, const at::Tensor& x, const at::Tensor& y, const char* name) {
  TRIREME_CHECK(y.defined() && y.device() == x.device() && y.scalar_type() == x.scalar_type(),
                std::string(op) + ": " + name + " must have the device and dtype of the first argument");
}

inline bool wants_grad(const at::Tensor& x) { return x.defined() && at::GradMode::is_enabled() && x.requires_grad(); }

// The dtype in which an op computes: float32 for bfloat16, else the tensor's own.
inline at::ScalarType compute_type(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 ? at::kFloat : x.scalar_type();
}
inline at::Tensor for_compute(const at::Tensor& x) { return x.to(compute_type(x)).contiguous(); }

// Calls f(float{}) or f(double{}).
template <class F>
auto with_compute_type(const at::Tensor& x, F&& f) {
  return compute_type(x) == at::kDouble ? f(double{}) : f(float{});
}

}  // namespace trireme
