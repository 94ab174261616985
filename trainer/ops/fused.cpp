// A layer's fused steps on CPU: compositions of the other ops, with their bits and their gradients.
#include <ATen/ATen.h>

#include "trainer/ops/checks.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/ops.h"

namespace trireme {
namespace {

void check_qkv(const char* op, const at::Tensor& qkv, const at::Tensor& q_norm, const at::Tensor& k_norm,
               const at::Tensor& table, const at::Tensor& positions, const QkvLayout& layout) {
  require_supported(op, qkv);
  const std::string name = op;
  TRIREME_CHECK(layout.q_heads > 0 && layout.kv_heads > 0 && layout.head_dim > 0 && layout.head_dim % 2 == 0 &&
                    qkv.dim() == 2 && qkv.size(1) == (layout.q_heads + 2 * layout.kv_heads) * layout.head_dim,
                name + ": qkv [tokens, (q_heads + 2 kv_heads) * head_dim] expected");
  TRIREME_CHECK(q_norm.defined() == k_norm.defined(), name + ": q_norm and k_norm come together");
  for (const at::Tensor* norm : {&q_norm, &k_norm}) {
    if (!norm->defined()) continue;
    require_same(op, qkv, *norm, "a head norm");
    TRIREME_CHECK(norm->dim() == 1 && norm->size(0) == layout.head_dim, name + ": a head norm must be [head_dim]");
  }
  TRIREME_CHECK(table.dim() == 3 && table.size(1) == 2 && table.size(2) * 2 == layout.head_dim,
                name + ": table [positions, 2, head_dim / 2] expected");
  TRIREME_CHECK(positions.dim() == 1 && positions.scalar_type() == at::kLong && positions.size(0) == qkv.size(0),
                name + ": positions [tokens] int64 expected");
}

}  // namespace

NormResult add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps,
                        int64_t counted) {
  require_supported("add_rms_norm", x);
  require_same("add_rms_norm", x, weight, "weight");
  TRIREME_CHECK(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(-1),
                "add_rms_norm: weight must be [width]");
  if (delta.defined()) {
    require_same("add_rms_norm", x, delta, "delta");
    TRIREME_CHECK(delta.sizes() == x.sizes(), "add_rms_norm: x and delta must have the same shape");
  }
  TRIREME_CHECK(counted >= 0 && counted <= x.size(-1), "add_rms_norm: more elements count than there are");
  if (x.is_cuda()) return cuda::add_rms_norm(x, delta, weight, eps, counted);
  const at::Tensor sum = delta.defined() ? x + delta : x;
  return {sum, trireme::rms_norm(sum, weight, eps, counted)};
}

at::Tensor swiglu_halves(const at::Tensor& gate_up) {
  require_supported("swiglu_halves", gate_up);
  TRIREME_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "swiglu_halves: gate_up [tokens, 2 * width] expected");
  if (gate_up.is_cuda()) return cuda::swiglu_halves(gate_up);
  const int64_t width = gate_up.size(1) / 2;
  return swiglu(gate_up.narrow(1, 0, width), gate_up.narrow(1, width, width));
}

Qkv split_qkv(const at::Tensor& qkv, const at::Tensor& q_norm, const at::Tensor& k_norm, const at::Tensor& table,
              const at::Tensor& positions, const QkvLayout& layout) {
  check_qkv("split_qkv", qkv, q_norm, k_norm, table, positions, layout);
  if (qkv.is_cuda()) return cuda::split_qkv(qkv, q_norm, k_norm, table, positions, layout);
  const int64_t q_width = layout.q_heads * layout.head_dim, kv_width = layout.kv_heads * layout.head_dim;
  const auto heads = [&](int64_t first, int64_t width) {
    return qkv.narrow(1, first, width).view({qkv.size(0), width / layout.head_dim, layout.head_dim});
  };
  at::Tensor q = heads(0, q_width), k = heads(q_width, kv_width);
  if (q_norm.defined()) {
    q = trireme::rms_norm(q, q_norm, layout.eps);
    k = trireme::rms_norm(k, k_norm, layout.eps);
  }
  const at::Tensor angles = table.index_select(0, positions);
  return {rope(q, angles), rope(k, angles), heads(q_width + kv_width, kv_width)};
}

at::Tensor split_qkv_cached(const at::Tensor& qkv, const at::Tensor& q_norm, const at::Tensor& k_norm,
                            const at::Tensor& table, const at::Tensor& positions, const QkvLayout& layout,
                            const at::Tensor& arena_k, const at::Tensor& arena_v, const CachePlan& plan) {
  check_qkv("split_qkv_cached", qkv, q_norm, k_norm, table, positions, layout);
  for (const at::Tensor* arena : {&arena_k, &arena_v}) {
    require_same("split_qkv_cached", qkv, *arena, "the arena");
    TRIREME_CHECK(arena->dim() == 3 && arena->size(1) == layout.kv_heads && arena->size(2) == layout.head_dim,
                  "split_qkv_cached: an arena of [capacity, kv_heads, head_dim] expected");
  }
  const at::NoGradGuard no_grad;
  if (qkv.is_cuda()) {
    return cuda::split_qkv_cached(qkv, q_norm, k_norm, table, positions, layout, arena_k, arena_v, plan);
  }
  const Qkv parts = split_qkv(qkv, q_norm, k_norm, table, positions, layout);
  append_cached(parts.k, parts.v, arena_k, arena_v, plan);
  return parts.q;
}

}  // namespace trireme
