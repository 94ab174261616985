// Models that divide among tensor ranks and pipeline stages, and their whole.
#pragma once

#include <ATen/ATen.h>

#include "base/text.h"
#include "tests/unit/model/testing.h"
#include "trainer/model/model.h"
#include "trainer/ops/philox.h"
#include "trainer/parallel/context.h"

namespace trireme::testing {

inline ModelConfig eight_heads(ModelFamily family, bool tied) {
  ModelConfig config = small_config(family, tied);
  config.num_heads = 8;
  config.num_kv_heads = 4;
  return config;
}

// Norms and biases must matter; a value depends on the parameter and the place in the whole of it only.
inline void fill(Model& model) {
  init_parameters(model, 11);
  const at::NoGradGuard no_grad;
  for (Parameter& parameter : model.parameters()) {
    if (parameter.tensor.dim() != 1) continue;
    for (int64_t i = 0; i < parameter.tensor.numel(); ++i) {
      parameter.tensor[i] +=
          0.2 * philox_normal(5, hash64(parameter.name), static_cast<uint64_t>(parameter.slice.range.begin + i));
    }
  }
}

// Whether a flat buffer of `model` holds zeros wherever no parameter lies.
inline bool rest_is_zero(const Model& model, const at::Tensor& flat) {
  const at::NoGradGuard no_grad;
  const at::Tensor rest = flat.detach().clone();
  for (const Parameter& parameter : model.parameters()) {
    if (parameter.offset >= flat.size(0)) continue;  // a frozen one has no gradient
    at::Tensor own = rest.narrow(0, parameter.offset, parameter.size).view(parameter.held);
    const std::vector<int64_t> shape = parameter.shape();
    for (size_t d = 0; d < shape.size(); ++d) own = own.narrow(static_cast<int64_t>(d), 0, shape[d]);
    own.zero_();
  }
  return rest.eq(0).all().item<bool>();
}

inline at::Tensor part_of(const Parameter& parameter, const at::Tensor& whole) {
  return whole.narrow(parameter.slice.dimension, parameter.slice.range.begin, parameter.slice.range.size());
}

inline bool is_expert(const Parameter& parameter) { return parameter.name.find(".experts.") != std::string::npos; }

// Adds up a gradient that is of a rank's own rows: over tensor ranks norms, routers and, where they are whole on each
// of these, experts.
inline at::Tensor sum_over_tensor_ranks(ParallelContext& context, const Parameter& parameter) {
  at::Tensor gradient = parameter.tensor.grad().clone();
  const bool own_rows = parameter.slice.alike || (is_expert(parameter) && context.layout().ep == 1);
  if (own_rows) context.tensor_parallel().all_reduce_sum(gradient);
  return gradient;
}

inline ModelOptions split_options(ParallelContext& context, const ModelConfig& config,
                                  const StageOptions& stages = {}) {
  ModelOptions options;
  set_split(options, config.shape(), context, stages);
  return options;
}

}  // namespace trireme::testing
