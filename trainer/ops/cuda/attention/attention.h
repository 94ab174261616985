// Attention of cuda_ops.h, and what besides it the runner of decode steps, tests and benchmarks want. Forward:
// attention_kernels.h, row-exact. Backward: deterministic.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "trainer/ops/cuda/attention/attention_kernels.h"
#include "trainer/ops/cuda_ops.h"

namespace trireme::cuda {

// Clusters of this model's decode kernels that the device runs at once, and its SMs; of a part of it
// (sms.h) a share. Asked of the device once for each head size and group.
DecodeRoom decode_room(at::Device device, int64_t q_heads, int64_t kv_heads, int64_t head_dim);
// attention_cached of a decode plan by a given kernel, for tests and benchmarks.
at::Tensor attention_decode(const at::Tensor& q, const at::Tensor& arena_k, const at::Tensor& arena_v,
                            const CachePlan& plan, double scale, DecodeKernel kernel);

}  // namespace trireme::cuda
