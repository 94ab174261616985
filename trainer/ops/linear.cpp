#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <optional>

#include "base/log.h"
#include "trainer/ops/checks.h"
#include "trainer/ops/cpu_kernels.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/linear.h"
#include "trainer/ops/ops.h"
#include "trainer/ops/parallel.h"

namespace trireme {
namespace {

std::atomic<LinearMode> current_mode{LinearMode::kRows};

constexpr int64_t kMinLibraryRows = 16;
constexpr int64_t kRowBlock = 32;
constexpr int64_t kColumnBlock = 64;

at::Tensor by_library(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const int64_t rows = x.size(0);
  at::Tensor input = x.contiguous();
  // The library picks another code path for addresses off its vector size.
  if (reinterpret_cast<uintptr_t>(input.data_ptr()) % 64 != 0) input = input.clone();
  if (rows < kMinLibraryRows) {
    at::Tensor padded = at::zeros({kMinLibraryRows, x.size(1)}, x.options());
    padded.narrow(0, 0, rows).copy_(input);
    input = padded;
  }
  const at::Tensor out = at::linear(input, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt);
  return rows < kMinLibraryRows ? out.narrow(0, 0, rows) : out;
}

template <class T>
void multiply_rows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, at::Tensor& out) {
  const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
  const T* a = x.const_data_ptr<T>();
  const T* b = weight.const_data_ptr<T>();
  const T* add = bias.defined() ? bias.const_data_ptr<T>() : nullptr;
  T* c = out.mutable_data_ptr<T>();
  const int64_t lda = x.stride(0), ldb = weight.stride(0);
  const auto& kernels = cpu_kernels<T>();
  const int64_t column_blocks = (n + kColumnBlock - 1) / kColumnBlock;
  const int64_t tasks = (m + kRowBlock - 1) / kRowBlock * column_blocks;
  parallel_dynamic(tasks, m * n * k > 200'000, [&](int64_t task) {
    const int64_t row = task / column_blocks * kRowBlock;
    const int64_t column = task % column_blocks * kColumnBlock;
    kernels.gemm_nt(a + row * lda, lda, std::min(kRowBlock, m - row), b + column * ldb, ldb,
                    std::min(kColumnBlock, n - column), k, add != nullptr ? add + column : nullptr,
                    c + row * n + column, n);
  });
}

at::Tensor by_rows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::ScalarType type = compute_type(x);
  const auto rows_of = [&](const at::Tensor& t) {
    const at::Tensor as = t.to(type);
    return as.stride(1) == 1 ? as : as.contiguous();
  };
  at::Tensor out = at::empty({x.size(0), weight.size(0)}, x.options().dtype(type));
  const at::Tensor add = bias.defined() ? bias.to(type).contiguous() : bias;
  with_compute_type(x, [&](auto zero) { multiply_rows<decltype(zero)>(rows_of(x), rows_of(weight), add, out); });
  return out.to(x.scalar_type());
}

// How backward gets the input that was not kept.
struct InputAgain final : torch::CustomClassHolder {
  explicit InputAgain(std::function<at::Tensor()> f) : call(std::move(f)) {}
  std::function<at::Tensor()> call;
};

class LinearFunction final : public torch::autograd::Function<LinearFunction> {
 public:
  // `again` null: x is kept.
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const c10::intrusive_ptr<InputAgain>& again) {
    context->save_for_backward({again ? at::Tensor() : x, weight});
    if (again) context->saved_data["again"] = c10::IValue::make_capsule(again);
    context->saved_data["bias"] = bias.has_value();
    return linear_forward(x, weight, bias.value_or(at::Tensor()));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& weight = saved[1];
    const at::Tensor dy = grads[0].contiguous();
    const auto input = [&] {
      const auto found = context->saved_data.find("again");
      if (found == context->saved_data.end()) return saved[0];
      const at::NoGradGuard no_grad;
      return c10::static_intrusive_pointer_cast<InputAgain>(found->second.toCapsule())->call();
    };
    at::Tensor dx, dweight, dbias;
    if (context->needs_input_grad(0)) dx = linear_input_gradient(dy, weight);
    if (context->needs_input_grad(1)) dweight = linear_weight_gradient(dy, input(), weight);
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(2)) dbias = linear_bias_gradient(dy);
    return {dx, dweight, dbias, at::Tensor()};
  }
};

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_cuda()) return at::equal(a.view(at::kShort), b.view(at::kShort));  // bf16
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.nbytes() == y.nbytes() && std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

}  // namespace

at::Tensor linear_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (x.is_cuda()) return cuda::linear_forward(x, weight, bias);
  return current_mode == LinearMode::kLibrary ? by_library(x, weight, bias) : by_rows(x, weight, bias);
}

void linear_forward_into(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (x.is_cuda()) return cuda::linear_forward_into(out, x, weight, bias);
  out.copy_(linear_forward(x, weight, bias));
}

at::Tensor linear_input_gradient(const at::Tensor& dy, const at::Tensor& weight) {
  return dy.is_cuda() ? cuda::linear_backward_input(dy, weight) : dy.mm(weight);
}

void linear_input_gradient_into(const at::Tensor& dx, const at::Tensor& dy, const at::Tensor& weight) {
  if (dy.is_cuda()) return cuda::linear_backward_input_into(dx, dy, weight);
  dx.copy_(dy.mm(weight));
}

at::Tensor linear_weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight) {
  if (!dy.is_cuda()) return dy.t().mm(x);
  // A parameter's gradient buffer takes the product directly: no [out, in] temporary, one rounding.
  at::Tensor accumulator = weight.grad(), own;
  if (!accumulator.defined() || !accumulator.is_contiguous()) own = accumulator = at::zeros_like(weight);
  cuda::linear_backward_weight(dy, x, accumulator);
  return own;
}

at::Tensor linear_bias_gradient(const at::Tensor& dy) {
  return dy.is_cuda() ? dy.sum(0, /*keepdim=*/false, at::kFloat).to(dy.scalar_type()) : dy.sum(0);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return linear_again(x, weight, bias, nullptr);
}

at::Tensor linear_again(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                        std::function<at::Tensor()> again) {
  require_supported("linear", x);
  require_same("linear", x, weight, "weight");
  TRIREME_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
                "linear: x [tokens, in] and weight [out, in] expected");
  if (!wants_grad(x) && !wants_grad(weight) && !wants_grad(bias)) return linear_forward(x, weight, bias);
  c10::intrusive_ptr<InputAgain> held;
  if (again) held = c10::make_intrusive<InputAgain>(std::move(again));
  return LinearFunction::apply(x, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt, held);
}

at::Tensor linear_by_rows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return by_rows(x, weight, bias);
}

LinearMode linear_mode() { return current_mode; }
void set_linear_mode(LinearMode mode) { current_mode = mode; }

namespace {

constexpr int64_t kBaseRows = 4096;  // CUDA: rows that the others repeat

// Numbers of mixed size: another order of additions shows in the last bits.
at::Tensor mixed_numbers(int64_t rows, int64_t columns, double step, at::ScalarType dtype, at::Device device) {
  return at::arange(rows * columns, at::TensorOptions().dtype(at::kDouble).device(device))
      .mul_(step)
      .sin_()
      .mul_(3.0)
      .to(dtype)
      .view({rows, columns});
}

// Calls of more rows than `whole` has, over its rows x again and again: the library chooses a kernel by their number.
bool many_rows_are_exact(const LinearShape& shape, const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& bias, const at::Tensor& whole, int64_t most_rows) {
  if (shape.head) most_rows = cuda::vocabulary_chunk_rows(most_rows, shape.out);
  const int64_t base = x.size(0);
  if (most_rows <= base) return true;
  const at::Tensor repeated = x.repeat({(most_rows + base - 1) / base, 1});
  for (const int64_t count : {most_rows, most_rows - 1, most_rows / 8 * 7 + 3, most_rows / 4 * 3, most_rows / 2 + 1}) {
    if (count <= base) continue;
    at::Tensor y = linear_forward(repeated.narrow(0, 0, count), weight, bias);
    if (shape.gate_up) y = cuda::swiglu_halves(y);
    for (int64_t from = 0; from < count; from += base) {
      const int64_t part = std::min(base, count - from);
      if (!same_bits(y.narrow(0, from, part), whole.narrow(0, 0, part))) return false;
    }
  }
  return true;
}

bool rows_are_exact(const std::vector<LinearShape>& shapes, at::ScalarType dtype, at::Device device,
                    int64_t most_rows) {
  const at::NoGradGuard no_grad;
  const bool cpu = device.is_cpu();
  const int64_t rows = cpu ? 83 : kBaseRows;
  const std::vector<int64_t> counts =
      cpu ? std::vector<int64_t>{1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 48, 64, 65}
          : std::vector<int64_t>{1,   5,   16,  17,  32,  48,  64,  80,   96,   128, 160,
                                 192, 224, 256, 288, 320, 448, 512, 1000, 2048, 3333};
  for (const LinearShape& shape : shapes) {
    const at::Tensor x = mixed_numbers(rows, shape.in, 0.7311, dtype, device);
    // A head is multiplied with the rows that fill up eight (cuda/vocabulary/vocabulary.cpp).
    const int64_t out = !cpu && shape.head ? (shape.out + 7) / 8 * 8 : shape.out;
    const at::Tensor weight = mixed_numbers(out, shape.in, 0.4177, dtype, device);
    const at::Tensor bias = shape.bias ? mixed_numbers(1, shape.out, 0.2719, dtype, device).view({-1}) : at::Tensor();
    at::Tensor whole = linear_forward(x, weight, bias);
    std::function<at::Tensor(const at::Tensor&)> part = [&](const at::Tensor& some) {
      return linear_forward(some, weight, bias);
    };
    if (!cpu && shape.gate_up) {
      whole = cuda::swiglu_halves(whole);
      part = [&](const at::Tensor& some) { return cuda::gate_up_swiglu(some, weight); };
    }
    if (!cpu && !many_rows_are_exact(shape, x, weight, bias, whole, most_rows)) return false;
    // The kernels of decoding on the whole device are chosen here, and checked.
    std::optional<cuda::DecodeScope> decoding;
    if (!cpu) decoding.emplace();
    for (const int64_t count : counts) {
      for (const int64_t from : {int64_t{0}, int64_t{1}, rows - count}) {
        if (from + count > rows) continue;
        if (!same_bits(part(x.narrow(0, from, count)), whole.narrow(0, from, count))) return false;
      }
    }
  }
  return true;
}

}  // namespace

bool linear_rows_are_exact(const std::vector<LinearShape>& shapes, at::ScalarType dtype, at::Device device,
                           int64_t most_rows) {
  if (rows_are_exact(shapes, dtype, device, most_rows)) return true;
  if (!device.is_cuda()) return false;
  // Is it one of our kernels that has other bits than the library? Then do without it.
  if (const int64_t limit = cuda::own_rows_limit(); limit != 0) {
    cuda::set_own_rows_limit(0);
    if (rows_are_exact(shapes, dtype, device, most_rows)) {
      log_warn("ops",
               "our skinny GEMMs have other bits than cublasLt on this machine; cublasLt computes "
               "everything (slower decoding)");
      return true;
    }
    cuda::set_own_rows_limit(limit);
  }
  return false;
}

LinearMode choose_linear_mode(const std::vector<LinearShape>& shapes, at::ScalarType dtype) {
  if (current_mode == LinearMode::kLibrary && !linear_rows_are_exact(shapes, dtype)) {
    log_warn(
        "ops",
        "the library's linear gives a row other bits in other batches on this machine; switching to the row kernel");
    current_mode = LinearMode::kRows;
  }
  return current_mode;
}

at::Tensor head_logits(const at::Tensor& hidden, const at::Tensor& head) {
  require_supported("head_logits", hidden);
  require_same("head_logits", hidden, head, "head");
  const at::NoGradGuard no_grad;
  return linear_forward(hidden, head, {}).to(compute_type(hidden));
}

}  // namespace trireme
