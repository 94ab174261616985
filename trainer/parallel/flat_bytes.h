// A tensor as what goes over a wire.
#pragma once

#include <ATen/ATen.h>

#include "base/error.h"

namespace trireme {

// The memory of a contiguous `tensor` of any dtype, [bytes]. Not view({-1}): a tensor of one element may say any
// stride, which a view in bytes refuses.
inline at::Tensor flat_bytes(const at::Tensor& tensor) {
  TRIREME_CHECK(tensor.is_contiguous(), "bytes of a tensor that is not contiguous");
  return tensor.detach().as_strided({tensor.numel()}, {1}).view(at::kByte);
}

}  // namespace trireme
