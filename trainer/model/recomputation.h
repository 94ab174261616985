// What forward does not keep for backward, which computes it again with the same bits: inputs of products, whole
// layers.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "trainer/ops/ops.h"

namespace trireme {

// The residual stream between layers: a sum, and the last block's output (undefined: none), which the next norm adds.
struct Residual {
  at::Tensor sum, delta;
};

// What a product reads. `again` is called in backward, with grad mode off, and gives the bits of `value`, which is not
// kept then; empty: it is kept.
struct Activation {
  at::Tensor value;
  std::function<at::Tensor()> again;
};

// The norm that `norm` holds, of weight `scale` and so many counted elements (rms_norm).
Activation normed(const NormResult& norm, const at::Tensor& scale, double eps, int64_t counted, bool again);
Activation activated(const at::Tensor& gate_up, bool again);  // swiglu_halves
at::Tensor product(const Activation& x, const at::Tensor& weight, const at::Tensor& bias);

// layer(input), keeping input.sum only, which the norm before it keeps too. `norm` of it has the bits of input.normed.
// `anchor` is one of the layer's parameters: the inner backward adds up their gradients, whether the input needs one or
// not.
Residual layer_again(const NormResult& input, const at::Tensor& anchor,
                     std::function<Residual(const NormResult&)> layer,
                     std::function<at::Tensor(const at::Tensor&)> norm);

}  // namespace trireme
