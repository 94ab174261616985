// The row-local ops and fused steps of cuda_ops.h: checks and autograd over row_kernels.h.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "trainer/ops/checks.h"
#include "trainer/ops/cuda/device/stream.h"
#include "trainer/ops/cuda/elementwise/row_kernels.h"
#include "trainer/ops/cuda/exchange/peer_kernels.h"
#include "trainer/ops/cuda/gemm/linear.h"
#include "trainer/ops/cuda_ops.h"

namespace trireme::cuda {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr uintptr_t kAlignment = 16;

// Contiguous, and where the kernels can read it in 16-byte pieces.
at::Tensor ready(const at::Tensor& x) {
  const at::Tensor dense = x.contiguous();
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % kAlignment == 0 ? dense : dense.clone();
}

const Bf16* data(const at::Tensor& x) { return static_cast<const Bf16*>(x.const_data_ptr()); }
const Bf16* data_or_null(const at::Tensor& x) { return x.defined() ? data(x) : nullptr; }
Bf16* mutable_data(const at::Tensor& x) { return static_cast<Bf16*>(x.mutable_data_ptr()); }

void require_width(const char* op, int64_t width) {
  if (width > 0 && width % 8 == 0) return;
  fail_user(std::string(op) + " on cuda needs rows of a multiple of 8 elements, not " + std::to_string(width));
}

void require_norm_width(const char* op, int64_t width) {
  if (width >= kMinNormWidth && width <= kMaxNormWidth && width % 8 == 0) return;
  fail_user(std::string(op) + " on cuda needs rows of a multiple of 8 elements between " +
            std::to_string(kMinNormWidth) + " and " + std::to_string(kMaxNormWidth) + ", not " + std::to_string(width));
}

// ---- norms

struct NormGradients {
  at::Tensor dx, dweight;
};

NormRows norm_rows(const at::Tensor& x, int64_t counted) {
  const int64_t width = x.size(-1);
  return {x.numel() / width, width, counted > 0 ? counted : width};
}

// delta undefined: sum is x.
NormResult norm_forward(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps,
                        int64_t counted) {
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor in = ready(x), more = delta.defined() ? ready(delta) : delta, scale = ready(weight);
  const at::Tensor sum = delta.defined() ? at::empty_like(in) : in, normed = at::empty_like(in);
  add_rms_norm_forward(data(in), data_or_null(more), data(scale), static_cast<float>(eps), norm_rows(in, counted),
                       delta.defined() ? mutable_data(sum) : nullptr, mutable_data(normed), stream_of(x),
                       may_begin_early());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {sum, normed};
}

NormGradients norm_backward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& dnormed,
                            const at::Tensor& dsum, double eps, int64_t counted, bool weight_too) {
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor in = ready(x), scale = ready(weight), dy = ready(dnormed),
                   through = dsum.defined() ? ready(dsum) : dsum;
  const int64_t width = in.size(-1), rows = in.numel() / width;
  const cudaStream_t stream = stream_of(x);
  NormGradients gradients{at::empty_like(in), at::Tensor()};
  at::Tensor partial;
  if (weight_too) partial = at::empty({norm_partials(rows, width), width}, in.options().dtype(at::kFloat));
  cuda::rms_norm_backward(data(in), data(dy), data_or_null(through), data(scale), static_cast<float>(eps),
                          norm_rows(in, counted), mutable_data(gradients.dx),
                          weight_too ? partial.mutable_data_ptr<float>() : nullptr, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  if (weight_too) {
    gradients.dweight = at::empty({width}, in.options());
    reduce_partials(partial.const_data_ptr<float>(), partial.size(0), width, mutable_data(gradients.dweight), stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return gradients;
}

class RmsNormFunction final : public torch::autograd::Function<RmsNormFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, double eps,
                            int64_t counted) {
    context->save_for_backward({x, weight});
    context->saved_data["eps"] = eps;
    context->saved_data["counted"] = counted;
    return norm_forward(x, at::Tensor(), weight, eps, counted).normed;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const NormGradients gradients =
        norm_backward(saved[0], saved[1], grads[0], at::Tensor(), context->saved_data["eps"].toDouble(),
                      context->saved_data["counted"].toInt(), context->needs_input_grad(1));
    return {gradients.dx, gradients.dweight, at::Tensor(), at::Tensor()};
  }
};

// Returns {sum, normed}.
class AddRmsNormFunction final : public torch::autograd::Function<AddRmsNormFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& delta,
                               const at::Tensor& weight, double eps, int64_t counted) {
    const NormResult result = norm_forward(x, delta, weight, eps, counted);
    context->save_for_backward({result.sum, weight});
    context->saved_data["eps"] = eps;
    context->saved_data["counted"] = counted;
    context->set_materialize_grads(false);
    return {result.sum, result.normed};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    if (!grads[1].defined()) return {grads[0], grads[0], at::Tensor(), at::Tensor(), at::Tensor()};
    const auto saved = context->get_saved_variables();
    const NormGradients gradients =
        norm_backward(saved[0], saved[1], grads[1], grads[0], context->saved_data["eps"].toDouble(),
                      context->saved_data["counted"].toInt(), context->needs_input_grad(2));
    return {gradients.dx, gradients.dx, gradients.dweight, at::Tensor(), at::Tensor()};
  }
};

// ---- swiglu

// Where the rows of gate and up lie: in two matrices, or in the halves of one.
struct GatedRows {
  at::Tensor gate, up;
  int64_t width, rows, stride;
};
GatedRows gated_rows(const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor g = ready(gate), u = ready(up);
  const int64_t width = g.size(-1);
  return {g, u, width, g.numel() / width, width};
}
GatedRows gated_halves(const at::Tensor& gate_up) {
  const at::Tensor both = ready(gate_up);
  const int64_t width = both.size(1) / 2;
  return {both.narrow(1, 0, width), both.narrow(1, width, width), width, both.size(0), 2 * width};
}

at::Tensor gated_forward(const GatedRows& in, at::IntArrayRef shape) {
  const c10::cuda::CUDAGuard guard(in.gate.device());
  at::Tensor out = at::empty(shape, in.gate.options());
  cuda::swiglu_forward(data(in.gate), data(in.up), in.stride, in.rows, in.width, mutable_data(out), stream_of(in.gate));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

// dgate and dup lie as gate and up do.
void gated_backward(const GatedRows& in, const at::Tensor& dy, const at::Tensor& dgate, const at::Tensor& dup) {
  const c10::cuda::CUDAGuard guard(in.gate.device());
  const at::Tensor gradient = ready(dy);
  cuda::swiglu_backward(data(in.gate), data(in.up), data(gradient), in.stride, in.rows, in.width, mutable_data(dgate),
                        mutable_data(dup), stream_of(in.gate));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

class SwigluFunction final : public torch::autograd::Function<SwigluFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    context->save_for_backward({gate, up});
    return gated_forward(gated_rows(gate, up), gate.sizes());
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor dgate = at::empty(saved[0].sizes(), saved[0].options()), dup = at::empty_like(dgate);
    gated_backward(gated_rows(saved[0], saved[1]), grads[0], dgate, dup);
    return {dgate, dup};
  }
};

class SwigluHalvesFunction final : public torch::autograd::Function<SwigluHalvesFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate_up) {
    context->save_for_backward({gate_up});
    return gated_forward(gated_halves(gate_up), {gate_up.size(0), gate_up.size(1) / 2});
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const at::Tensor gate_up = context->get_saved_variables()[0];
    const int64_t width = gate_up.size(1) / 2;
    const at::Tensor out = at::empty(gate_up.sizes(), gate_up.options());
    gated_backward(gated_halves(gate_up), grads[0], out.narrow(1, 0, width), out.narrow(1, width, width));
    return {out};
  }
};

// ---- embed

at::Tensor embed_rows(const at::Tensor& weight, const at::Tensor& ids, const EmbeddingPart& part) {
  const c10::cuda::CUDAGuard guard(weight.device());
  const at::Tensor table = ready(weight), index = ids.contiguous();
  at::Tensor out = at::empty({part.rows, weight.size(1)}, weight.options());
  cuda::embed_forward(data(table), index.const_data_ptr<int64_t>(), {part.first, weight.size(0), part.vocabulary},
                      ids.size(0), part.rows, weight.size(1), mutable_data(out), stream_of(weight));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

class EmbedFunction final : public torch::autograd::Function<EmbedFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& ids, int64_t first,
                            int64_t vocabulary, int64_t rows) {
    context->save_for_backward({weight, first == 0 ? ids : ids - first});  // others' ids are outside of `weight`
    return embed_rows(weight, ids, {first, vocabulary, rows});
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& weight = saved[0];
    const c10::cuda::CUDAGuard guard(weight.device());
    at::Tensor dweight, accumulator;
    if (weight.is_leaf()) accumulator = weight.grad();
    const bool direct = accumulator.defined() && accumulator.is_contiguous() &&
                        (accumulator.scalar_type() == at::kFloat || accumulator.scalar_type() == at::kBFloat16) &&
                        reinterpret_cast<uintptr_t>(accumulator.const_data_ptr()) % kAlignment == 0;
    if (!direct) dweight = accumulator = at::zeros(weight.sizes(), weight.options());
    const at::Tensor dy = ready(grads[0]);
    const auto [sorted, order] = at::sort(saved[1], /*stable=*/true, /*dim=*/0, /*descending=*/false);
    cuda::embed_backward(data(dy), sorted.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>(), sorted.size(0),
                         weight.size(0), weight.size(1), accumulator.mutable_data_ptr(),
                         accumulator.scalar_type() == at::kFloat, stream_of(weight));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return {dweight, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// ---- query, key and value heads

struct QkvInput {
  at::Tensor qkv, q_norm, k_norm, table, positions;  // made ready; the norms may be undefined
  QkvLayout layout;

  QkvRows rows() const {
    QkvRows rows;
    rows.tokens = positions.size(0);
    rows.q_heads = static_cast<int>(layout.q_heads);
    rows.kv_heads = static_cast<int>(layout.kv_heads);
    rows.head_dim = static_cast<int>(layout.head_dim);
    rows.qkv = data_or_null(qkv);
    rows.q_norm = data_or_null(q_norm);
    rows.k_norm = data_or_null(k_norm);
    rows.eps = static_cast<float>(layout.eps);
    rows.table = table.const_data_ptr<float>();
    rows.table_rows = table.size(0);
    rows.positions = positions.const_data_ptr<int64_t>();
    return rows;
  }
};

// qkv undefined: a backward that does not need it.
QkvInput qkv_input(const at::Tensor& qkv, const at::Tensor& q_norm, const at::Tensor& k_norm, const at::Tensor& table,
                   const at::Tensor& positions, const QkvLayout& layout) {
  if (layout.head_dim != 64 && layout.head_dim != 128 && layout.head_dim != 256) {
    fail_user("split_qkv on cuda has kernels for head_dim 64, 128 and 256, not " + std::to_string(layout.head_dim));
  }
  TRIREME_CHECK(table.is_cuda() && table.scalar_type() == at::kFloat && positions.is_cuda(),
                "split_qkv on cuda: table [positions, 2, head_dim / 2] float32 and positions must be on the device");
  const auto some = [](const at::Tensor& x) { return x.defined() ? ready(x) : x; };
  return {some(qkv), some(q_norm), some(k_norm), ready(table), positions.contiguous(), layout};
}

at::Tensor heads_like(const at::Tensor& qkv, int64_t heads, const QkvLayout& layout) {
  return at::empty({qkv.size(0), heads, layout.head_dim}, qkv.options());
}

Qkv split_forward(const QkvInput& in, bool copy_v) {
  const c10::cuda::CUDAGuard guard(in.qkv.device());
  const QkvLayout& layout = in.layout;
  const int64_t kv_width = layout.kv_heads * layout.head_dim;
  Qkv out{heads_like(in.qkv, layout.q_heads, layout), heads_like(in.qkv, layout.kv_heads, layout), at::Tensor()};
  if (copy_v) {
    out.v = heads_like(in.qkv, layout.kv_heads, layout);
  } else {
    out.v =
        in.qkv.narrow(1, in.qkv.size(1) - kv_width, kv_width).view({in.qkv.size(0), layout.kv_heads, layout.head_dim});
  }
  split_qkv_forward(in.rows(), mutable_data(out.q), mutable_data(out.k), copy_v ? mutable_data(out.v) : nullptr,
                    nullptr, stream_of(in.qkv));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

class SplitQkvFunction final : public torch::autograd::Function<SplitQkvFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& qkv, const std::optional<at::Tensor>& q_norm,
                               const std::optional<at::Tensor>& k_norm, const at::Tensor& table,
                               const at::Tensor& positions, const QkvLayout& layout) {
    const at::Tensor none;
    const bool norm = q_norm.has_value();
    context->save_for_backward({norm ? qkv : none, q_norm.value_or(none), k_norm.value_or(none), table, positions});
    context->saved_data["layout"] = std::vector<int64_t>{layout.q_heads, layout.kv_heads, layout.head_dim};
    context->saved_data["eps"] = layout.eps;
    const Qkv out = split_forward(
        qkv_input(qkv, q_norm.value_or(none), k_norm.value_or(none), table, positions, layout), /*copy_v=*/!norm);
    return {out.q, out.k, out.v};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const std::vector<int64_t> sizes = context->saved_data["layout"].toIntVector();
    const QkvLayout layout{sizes[0], sizes[1], sizes[2], context->saved_data["eps"].toDouble()};
    const at::Tensor dq = ready(grads[0]), dk = ready(grads[1]), dv = ready(grads[2]);
    const c10::cuda::CUDAGuard guard(dq.device());
    const QkvInput in = qkv_input(saved[0], saved[1], saved[2], saved[3], saved[4], layout);
    const QkvRows rows = in.rows();
    const int64_t width = (layout.q_heads + 2 * layout.kv_heads) * layout.head_dim;
    const cudaStream_t stream = stream_of(dq);
    at::Tensor dqkv = at::empty({dq.size(0), width}, dq.options());
    const at::Tensor partial =
        at::empty({split_qkv_partials(rows), 2 * layout.head_dim}, dq.options().dtype(at::kFloat));
    split_qkv_backward(rows, data(dq), data(dk), data(dv), mutable_data(dqkv), partial.mutable_data_ptr<float>(),
                       stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    at::Tensor dq_norm, dk_norm;
    if (in.q_norm.defined()) {
      const at::Tensor both = at::empty({2 * layout.head_dim}, dq.options());
      reduce_partials(partial.const_data_ptr<float>(), partial.size(0), 2 * layout.head_dim, mutable_data(both),
                      stream);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      dq_norm = both.narrow(0, 0, layout.head_dim);
      dk_norm = both.narrow(0, layout.head_dim, layout.head_dim);
    }
    return {dqkv, dq_norm, dk_norm, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

void require_arena(const char* op, const at::Tensor& arena_k, const at::Tensor& arena_v, const at::Tensor& rows,
                   int64_t tokens) {
  TRIREME_CHECK(arena_k.is_contiguous() && arena_v.is_contiguous() && arena_k.sizes() == arena_v.sizes(),
                std::string(op) + ": the arena must be contiguous");
  TRIREME_CHECK(rows.defined() && rows.is_cuda() && rows.scalar_type() == at::kLong && rows.is_contiguous() &&
                    rows.dim() == 1 && rows.size(0) == tokens,
                std::string(op) + ": plan.token_rows must be [tokens] int64 on the device (make_cache_plan)");
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, int64_t counted) {
  require_norm_width("rms_norm", x.size(-1));
  if (wants_grad(x) || wants_grad(weight)) return RmsNormFunction::apply(x, weight, eps, counted);
  return norm_forward(x, at::Tensor(), weight, eps, counted).normed;
}

NormResult add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps,
                        int64_t counted) {
  if (!delta.defined()) return {x, cuda::rms_norm(x, weight, eps, counted)};
  require_norm_width("add_rms_norm", x.size(-1));
  if (!wants_grad(x) && !wants_grad(delta) && !wants_grad(weight)) return norm_forward(x, delta, weight, eps, counted);
  const variable_list out = AddRmsNormFunction::apply(x, delta, weight, eps, counted);
  return {out[0], out[1]};
}

at::Tensor ordered_sum(const at::Tensor& parts) {
  const c10::cuda::CUDAGuard guard(parts.device());
  const at::Tensor in = ready(parts);
  at::Tensor sum = at::empty(in.sizes().slice(1), in.options());
  ordered_sum(data(in), static_cast<int>(in.size(0)), sum.numel(), mutable_data(sum), stream_of(in));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return sum;
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  require_width("swiglu", gate.size(-1));
  if (wants_grad(gate) || wants_grad(up)) return SwigluFunction::apply(gate, up);
  return gated_forward(gated_rows(gate, up), gate.sizes());
}

at::Tensor swiglu_halves(const at::Tensor& gate_up) {
  require_width("swiglu_halves", gate_up.size(1) / 2);
  if (wants_grad(gate_up)) return SwigluHalvesFunction::apply(gate_up);
  return gated_forward(gated_halves(gate_up), {gate_up.size(0), gate_up.size(1) / 2});
}

at::Tensor embed(const at::Tensor& weight, const at::Tensor& ids) {
  return embed_part(weight, ids, {0, weight.size(0), ids.size(0)});
}

at::Tensor embed_part(const at::Tensor& weight, const at::Tensor& ids, const EmbeddingPart& part) {
  require_width("embed", weight.size(1));
  TRIREME_CHECK(part.rows >= ids.size(0), "embed_part: fewer rows than ids");
  if (wants_grad(weight)) return EmbedFunction::apply(weight, ids, part.first, part.vocabulary, part.rows);
  return embed_rows(weight, ids, part);
}

void throw_on_bad_ids(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  BadId found;
  C10_CUDA_CHECK(take_bad_id(&found, stream_of(device.index())));
  if (found.token < 0) return;
  fail_data("token " + std::to_string(found.token) + " of a batch has id " + std::to_string(found.id) +
            ", which is outside the model's vocabulary (is this the tokenizer of another model?)");
}

Qkv split_qkv(const at::Tensor& qkv, const at::Tensor& q_norm, const at::Tensor& k_norm, const at::Tensor& table,
              const at::Tensor& positions, const QkvLayout& layout) {
  if (!wants_grad(qkv) && !wants_grad(q_norm) && !wants_grad(k_norm)) {
    return split_forward(qkv_input(qkv, q_norm, k_norm, table, positions, layout), /*copy_v=*/false);
  }
  const auto some = [](const at::Tensor& x) { return x.defined() ? std::optional<at::Tensor>(x) : std::nullopt; };
  const variable_list out = SplitQkvFunction::apply(qkv, some(q_norm), some(k_norm), table, positions, layout);
  return {out[0], out[1], out[2]};
}

at::Tensor split_qkv_cached(const at::Tensor& qkv, const at::Tensor& q_norm, const at::Tensor& k_norm,
                            const at::Tensor& table, const at::Tensor& positions, const QkvLayout& layout,
                            const at::Tensor& arena_k, const at::Tensor& arena_v, const CachePlan& plan) {
  const c10::cuda::CUDAGuard guard(qkv.device());
  require_arena("split_qkv_cached", arena_k, arena_v, plan.token_rows, qkv.size(0));
  const QkvInput in = qkv_input(qkv, q_norm, k_norm, table, positions, layout);
  at::Tensor q = heads_like(qkv, layout.q_heads, layout);
  split_qkv_forward(in.rows(), mutable_data(q), mutable_data(arena_k), mutable_data(arena_v),
                    plan.token_rows.const_data_ptr<int64_t>(), stream_of(qkv), may_begin_early());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return q;
}

at::Tensor device_addresses(const std::vector<at::Tensor>& tensors) {
  TRIREME_CHECK(!tensors.empty() && tensors.front().is_cuda(), "device_addresses: tensors on a device expected");
  std::vector<int64_t> addresses;
  for (const at::Tensor& tensor : tensors)
    addresses.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr())));
  return at::tensor(addresses, at::kLong).to(tensors.front().device());
}

void copy_arena_rows(const at::Tensor& addresses, int64_t row_bytes, const std::vector<std::array<int64_t, 3>>& moves,
                     bool ordered) {
  if (moves.empty()) return;
  TRIREME_CHECK(row_bytes > 0 && row_bytes % static_cast<int64_t>(kAlignment) == 0,
                "copy_arena_rows: rows of a multiple of 16 bytes expected, not " + std::to_string(row_bytes));
  const c10::cuda::CUDAGuard guard(addresses.device());
  const auto count = static_cast<int64_t>(moves.size());
  // Page-locked: the copy does not wait, and LibTorch keeps the host memory until it is done.
  at::Tensor host = at::empty({count, 3}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  std::memcpy(host.mutable_data_ptr(), moves.data(), moves.size() * sizeof moves[0]);
  const at::Tensor list = host.to(addresses.device(), /*non_blocking=*/true);
  const auto buffers = reinterpret_cast<void* const*>(addresses.const_data_ptr<int64_t>());
  if (ordered) {
    move_arena_rows(buffers, addresses.size(0), row_bytes, list.const_data_ptr<int64_t>(), count, stream_of(addresses));
  } else {
    int64_t most_rows = 0;
    for (const auto& move : moves) most_rows = std::max(most_rows, move[2]);
    copy_arena_rows(buffers, addresses.size(0), row_bytes, list.const_data_ptr<int64_t>(), count, most_rows,
                    stream_of(addresses));
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace trireme::cuda
