// Attention on CUDA behind ops.h: bf16, head_dim 64 or 128, any number of query heads a key head (decode: up to 16).
// Forward: attention_kernels.h, row-exact. Backward: deterministic.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "trainer/ops/cuda/attention/attention_kernels.h"
#include "trainer/ops/ops.h"

namespace trireme::cuda {

// Elements of q, or of keys, that the kernels' 32-bit row offsets reach.
inline constexpr int64_t kAddressable = int64_t{1} << 32;

// Contracts of the same names in ops.h. Inputs may have any row stride that is a multiple of 8 elements; other layouts
// are copied. attention_packed keeps the device arrays of the last few `starts`, so that the layers of a model share
// one copy to the device; it must not be captured into a graph. The others may be. With a prefix for each
// sequence it is attention_shared: keys and values are laid out once more, each sequence's behind its prefix's.
at::Tensor attention_packed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& starts, const std::vector<int64_t>& prefix, double scale);
CachePlan make_cache_plan(std::vector<CacheRun> runs, int64_t group, at::Device device);
at::Tensor attention_cached(const at::Tensor& q, const at::Tensor& arena_k, const at::Tensor& arena_v,
                            const CachePlan& plan, double scale);
void append_cached(const at::Tensor& k, const at::Tensor& v, const at::Tensor& arena_k, const at::Tensor& arena_v,
                   const CachePlan& plan);

// Clusters of this model's decode kernels that the device runs at once, and its SMs; of a part of it
// (sms.h) a share. Asked of the device once for each head size and group.
DecodeRoom decode_room(at::Device device, int64_t q_heads, int64_t kv_heads, int64_t head_dim);
// attention_cached of a decode plan by a given kernel, for tests and benchmarks.
at::Tensor attention_decode(const at::Tensor& q, const at::Tensor& arena_k, const at::Tensor& arena_v,
                            const CachePlan& plan, double scale, DecodeKernel kernel);

}  // namespace trireme::cuda
