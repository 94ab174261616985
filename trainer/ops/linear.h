// linear in parts, without autograd, for ops that contain one.
#pragma once

#include <ATen/core/Tensor.h>

namespace trireme {

at::Tensor linear_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
// Into `out`, rows of a contiguous [tokens, out].
void linear_forward_into(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
// Its backward, of what `dy` [tokens, out] and `x` [tokens, in] hold: the gradient of some rows of the input, into rows
// of a contiguous [tokens, in]; that of the weight, undefined where the weight's own gradient buffer has taken it; that
// of the bias.
at::Tensor linear_input_gradient(const at::Tensor& dy, const at::Tensor& weight);
void linear_input_gradient_into(const at::Tensor& dx, const at::Tensor& dy, const at::Tensor& weight);
at::Tensor linear_weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight);
at::Tensor linear_bias_gradient(const at::Tensor& dy);
// On the host by our kernel, whatever linear_mode() is.
at::Tensor linear_by_rows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace trireme
