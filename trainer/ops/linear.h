// The forward of linear without autograd, for ops that contain one.
#pragma once

#include <ATen/core/Tensor.h>

namespace trireme {

at::Tensor linear_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
// On the host by our kernel, whatever linear_mode() is.
at::Tensor linear_by_rows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace trireme
