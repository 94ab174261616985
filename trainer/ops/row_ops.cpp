// rms_norm, swiglu, embed, rope: each row by itself.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <cstring>

#include "trainer/ops/checks.h"
#include "trainer/ops/cpu_kernels.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/ops.h"
#include "trainer/ops/parallel.h"
#include "trainer/ops/rope_frequencies.h"

namespace trireme {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Elements a thread should have to be worth waking.
constexpr int64_t kGrainElements = 16'384;

int64_t grain_rows(int64_t width) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, width)); }

// ---- rms_norm

// y, and 1 / rms of every row.
std::pair<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x, const at::Tensor& weight, double eps,
                                                   int64_t counted) {
  const at::Tensor in = for_compute(x), scale = for_compute(weight);
  at::Tensor out = counted == in.size(-1) ? at::empty_like(in) : at::zeros_like(in);
  const int64_t width = in.size(-1), rows = width == 0 ? 0 : in.numel() / width;
  at::Tensor inv = at::empty({rows}, in.options());
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const T* from = in.const_data_ptr<T>();
    const T* w = scale.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    T* invs = inv.mutable_data_ptr<T>();
    parallel_tasks(rows, grain_rows(width), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        invs[r] = cpu_kernels<T>().rms_norm(from + r * width, w, static_cast<T>(eps), to + r * width, counted);
      }
    });
  });
  return {out.to(x.scalar_type()), inv};
}

class RmsNormFunction final : public torch::autograd::Function<RmsNormFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, double eps,
                            int64_t counted) {
    auto [y, inv] = rms_norm_forward(x, weight, eps, counted);
    context->save_for_backward({x, weight, inv});
    context->saved_data["counted"] = counted;
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor x = for_compute(saved[0]), weight = for_compute(saved[1]), inv = saved[2],
                     dy = for_compute(grads[0]);
    const bool weight_too = context->needs_input_grad(1);
    const int64_t width = x.size(-1), rows = inv.size(0), counted = context->saved_data["counted"].toInt();
    // The weight's gradient is summed over fixed blocks of rows, so that it does not depend on the number of threads.
    constexpr int64_t kBlock = 256;
    const int64_t blocks = (rows + kBlock - 1) / kBlock;
    at::Tensor dx = counted == width ? at::empty_like(x) : at::zeros_like(x);
    at::Tensor partial = at::zeros({weight_too ? std::max<int64_t>(blocks, 1) : 0, width}, x.options());
    with_compute_type(x, [&](auto zero) {
      using T = decltype(zero);
      const T* px = x.const_data_ptr<T>();
      const T* pw = weight.const_data_ptr<T>();
      const T* pdy = dy.const_data_ptr<T>();
      const T* pinv = inv.const_data_ptr<T>();
      T* pdx = dx.mutable_data_ptr<T>();
      T* sums = weight_too ? partial.mutable_data_ptr<T>() : nullptr;
      parallel_tasks(blocks, std::max<int64_t>(1, grain_rows(width) / kBlock), [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
          for (int64_t r = block * kBlock; r < std::min(rows, (block + 1) * kBlock); ++r) {
            cpu_kernels<T>().rms_norm_backward(px + r * width, pw, pdy + r * width, pinv[r], pdx + r * width,
                                               weight_too ? sums + block * width : nullptr, counted);
          }
        }
      });
      for (int64_t block = 1; weight_too && block < blocks; ++block)
        cpu_kernels<T>().add_to(sums, sums + block * width, width);
    });
    at::Tensor dweight;
    if (weight_too) dweight = partial.select(0, 0).to(saved[1].scalar_type());
    return {dx.to(saved[0].scalar_type()), dweight, at::Tensor(), at::Tensor()};
  }
};

// ---- swiglu

at::Tensor swiglu_forward(const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor g = for_compute(gate), u = for_compute(up);
  at::Tensor out = at::empty_like(g);
  const int64_t width = g.size(-1), rows = width == 0 ? 0 : g.numel() / width;
  with_compute_type(gate, [&](auto zero) {
    using T = decltype(zero);
    const T* pg = g.const_data_ptr<T>();
    const T* pu = u.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    parallel_tasks(rows, grain_rows(width), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        cpu_kernels<T>().swiglu(pg + r * width, pu + r * width, to + r * width, width);
    });
  });
  return out.to(gate.scalar_type());
}

class SwigluFunction final : public torch::autograd::Function<SwigluFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    context->save_for_backward({gate, up});
    return swiglu_forward(gate, up);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor g = for_compute(saved[0]), u = for_compute(saved[1]), dy = for_compute(grads[0]);
    at::Tensor dg = at::empty_like(g), du = at::empty_like(u);
    const int64_t width = g.size(-1), rows = width == 0 ? 0 : g.numel() / width;
    with_compute_type(g, [&](auto zero) {
      using T = decltype(zero);
      const T* pg = g.const_data_ptr<T>();
      const T* pu = u.const_data_ptr<T>();
      const T* pdy = dy.const_data_ptr<T>();
      T* pdg = dg.mutable_data_ptr<T>();
      T* pdu = du.mutable_data_ptr<T>();
      parallel_tasks(rows, grain_rows(width), [&](int64_t begin, int64_t end) {
        for (int64_t at = begin * width; at < end * width; at += width) {
          cpu_kernels<T>().swiglu_backward(pg + at, pu + at, pdy + at, pdg + at, pdu + at, width);
        }
      });
    });
    return {dg.to(saved[0].scalar_type()), du.to(saved[1].scalar_type())};
  }
};

// ---- embed

at::Tensor embed_forward(const at::Tensor& weight, const at::Tensor& ids) {
  const at::Tensor index = ids.contiguous();
  const int64_t* id = index.const_data_ptr<int64_t>();
  const int64_t rows = index.size(0), vocab = weight.size(0);
  for (int64_t i = 0; i < rows; ++i) {
    if (id[i] < 0 || id[i] >= vocab) {
      fail_data("token " + std::to_string(i) + " has id " + std::to_string(id[i]) + ", the model's vocabulary has " +
                std::to_string(vocab) + " (is this the tokenizer of another model?)");
    }
  }
  const at::Tensor table = weight.contiguous();
  at::Tensor out = at::empty({rows, weight.size(1)}, weight.options());
  const size_t row_bytes = static_cast<size_t>(weight.size(1)) * weight.element_size();
  const auto* from = static_cast<const char*>(table.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * row_bytes, from + id[i] * row_bytes, row_bytes);
  return out;
}

class EmbedFunction final : public torch::autograd::Function<EmbedFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& ids) {
    context->save_for_backward({ids});
    context->saved_data["vocab"] = weight.size(0);
    return embed_forward(weight, ids);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const at::Tensor ids = context->get_saved_variables()[0].contiguous();
    const at::Tensor dy = for_compute(grads[0]);
    const int64_t width = dy.size(1);
    at::Tensor dweight = at::zeros({context->saved_data["vocab"].toInt(), width}, dy.options());
    with_compute_type(dy, [&](auto zero) {
      using T = decltype(zero);
      const int64_t* id = ids.const_data_ptr<int64_t>();
      const T* from = dy.const_data_ptr<T>();
      T* to = dweight.mutable_data_ptr<T>();
      for (int64_t i = 0; i < ids.size(0); ++i) cpu_kernels<T>().add_to(to + id[i] * width, from + i * width, width);
    });
    return {dweight.to(grads[0].scalar_type()), at::Tensor()};
  }
};

// ---- rope

at::Tensor rotate_heads(const at::Tensor& x, const at::Tensor& table, double sign) {
  const at::Tensor in = for_compute(x);
  const at::Tensor angles = table.to(in.scalar_type()).contiguous();
  at::Tensor out = at::empty_like(in);
  const int64_t tokens = in.size(0), heads = in.size(1), dim = in.size(2), half = dim / 2;
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const T* from = in.const_data_ptr<T>();
    const T* angle = angles.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    parallel_tasks(tokens, grain_rows(heads * dim), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* cos = angle + t * dim;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t at = (t * heads + h) * dim;
          cpu_kernels<T>().rotate(from + at, cos, cos + half, static_cast<T>(sign), to + at, half);
        }
      }
    });
  });
  return out.to(x.scalar_type());
}

class RopeFunction final : public torch::autograd::Function<RopeFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& table) {
    context->save_for_backward({table});
    return rotate_heads(x, table, 1.0);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {rotate_heads(grads[0], context->get_saved_variables()[0], -1.0), at::Tensor()};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, int64_t counted) {
  require_supported("rms_norm", x);
  require_same("rms_norm", x, weight, "weight");
  TRIREME_CHECK(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(-1), "rms_norm: weight must be [width]");
  TRIREME_CHECK(counted >= 0 && counted <= x.size(-1), "rms_norm: more elements count than there are");
  if (x.is_cuda()) return cuda::rms_norm(x, weight, eps, counted);
  if (counted == 0) counted = x.size(-1);
  if (wants_grad(x) || wants_grad(weight)) return RmsNormFunction::apply(x, weight, eps, counted);
  return rms_norm_forward(x, weight, eps, counted).first;
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  require_supported("swiglu", gate);
  require_same("swiglu", gate, up, "up");
  TRIREME_CHECK(gate.sizes() == up.sizes() && gate.dim() >= 1, "swiglu: gate and up must have the same shape");
  if (gate.is_cuda()) return cuda::swiglu(gate, up);
  if (wants_grad(gate) || wants_grad(up)) return SwigluFunction::apply(gate, up);
  return swiglu_forward(gate, up);
}

at::Tensor embed(const at::Tensor& weight, const at::Tensor& ids) {
  require_supported("embed", weight);
  TRIREME_CHECK(
      weight.dim() == 2 && ids.dim() == 1 && ids.scalar_type() == at::kLong && ids.device() == weight.device(),
      "embed: weight [vocab, hidden] and ids [tokens] int64 on one device expected");
  if (weight.is_cuda()) return cuda::embed(weight, ids);
  if (wants_grad(weight)) return EmbedFunction::apply(weight, ids);
  return embed_forward(weight, ids);
}

at::Tensor embed_part(const at::Tensor& weight, const at::Tensor& ids, const EmbeddingPart& part) {
  if (weight.is_cuda()) return cuda::embed_part(weight, ids, part);
  // No rank would know an id of nobody: it would count as a row of zeros.
  if (ids.size(0) > 0 && (ids.min().item<int64_t>() < 0 || ids.max().item<int64_t>() >= part.vocabulary))
    fail_data("a token id is outside the vocabulary of " + std::to_string(part.vocabulary));
  const int64_t own = weight.size(0);
  if (own == 0) return at::zeros({part.rows, weight.size(1)}, weight.options());
  const at::Tensor shifted = at::constant_pad_nd(ids - part.first, {0, part.rows - ids.size(0)}, -1);
  const at::Tensor others = (shifted < 0).logical_or_(shifted >= own);
  return embed(weight, shifted.clamp(0, own - 1)).masked_fill(others.unsqueeze(1), 0);
}

at::Tensor rope_table(const at::Tensor& positions, const RopeOptions& options, at::ScalarType dtype) {
  TRIREME_CHECK(positions.dim() == 1 && positions.scalar_type() == at::kLong,
                "rope_table: positions [tokens] int64 expected");
  const at::Tensor host = positions.to(at::kCPU).contiguous();
  const int64_t tokens = host.size(0), half = options.head_dim / 2;
  if (options.scaling == RopeOptions::Scaling::kDynamic && tokens > 0 &&
      host.max().item<int64_t>() >= options.original_max_position) {
    fail_user("dynamic rope scaling: position " + std::to_string(host.max().item<int64_t>()) + " lies beyond the " +
              std::to_string(options.original_max_position) +
              " positions of the model, where every token's rotation would change with the length of its sequence; "
              "keep sequences within them, or use yarn or linear scaling");
  }
  const std::vector<float> frequencies = rope_frequencies(options);
  at::Tensor table = at::empty({tokens, 2, half}, at::TensorOptions().dtype(dtype));
  const auto fill = [&](auto* out) {
    const int64_t* position = host.const_data_ptr<int64_t>();
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<float>(position[t]) * frequencies[static_cast<size_t>(i)];
        using T = std::remove_pointer_t<decltype(out)>;
        out[t * 2 * half + i] = static_cast<T>(std::cos(angle) * options.attention_factor);
        out[t * 2 * half + half + i] = static_cast<T>(std::sin(angle) * options.attention_factor);
      }
    }
  };
  if (dtype == at::kDouble) {
    fill(table.mutable_data_ptr<double>());
  } else {
    TRIREME_CHECK(dtype == at::kFloat, "rope_table: float32 or float64");
    fill(table.mutable_data_ptr<float>());
  }
  return table.to(positions.device());
}

at::Tensor rope(const at::Tensor& x, const at::Tensor& table) {
  require_supported("rope", x, Kernels::kCpuOnly);
  TRIREME_CHECK(x.dim() == 3 && x.size(2) % 2 == 0 && table.dim() == 3 && table.size(0) == x.size(0) &&
                    table.size(1) == 2 && table.size(2) * 2 == x.size(2),
                "rope: x [tokens, heads, head_dim] and table [tokens, 2, head_dim / 2] expected");
  if (wants_grad(x)) return RopeFunction::apply(x, table);
  return rotate_heads(x, table, 1.0);
}

}  // namespace trireme
