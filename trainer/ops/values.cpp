// token_values: the head of a value model.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "trainer/ops/checks.h"
#include "trainer/ops/ops.h"

namespace trireme {
namespace {

// Element-wise steps only: a library's sum over rows takes another order of additions for another number of rows.
at::Tensor values_of(const at::Tensor& hidden, const at::Tensor& score) {
  const at::ScalarType type = compute_type(hidden);
  at::Tensor sums = at::mul(hidden.to(type), score.to(type));
  while (sums.size(1) > 1) {
    const int64_t width = sums.size(1), half = (width + 1) / 2;
    sums.narrow(1, 0, width - half).add_(sums.narrow(1, half, width - half));
    sums = sums.narrow(1, 0, half);
  }
  return sums.select(1, 0).contiguous();
}

class ValuesFunction final : public torch::autograd::Function<ValuesFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& score) {
    context->save_for_backward({hidden, score});
    return values_of(hidden, score);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &hidden = saved[0], &score = saved[1];
    const at::ScalarType type = compute_type(hidden);
    const at::Tensor dvalues = for_compute(grads[0]);
    at::Tensor dhidden, dscore;
    if (context->needs_input_grad(0)) dhidden = at::mul(dvalues.unsqueeze(1), score.to(type)).to(hidden.scalar_type());
    if (context->needs_input_grad(1)) dscore = dvalues.unsqueeze(0).mm(hidden.to(type)).to(score.scalar_type());
    return {dhidden, dscore};
  }
};

}  // namespace

at::Tensor token_values(const at::Tensor& hidden, const at::Tensor& score) {
  require_supported("token_values", hidden);
  require_same("token_values", hidden, score, "score");
  TRIREME_CHECK(hidden.dim() == 2 && score.dim() == 2 && score.size(0) == 1 && hidden.size(1) == score.size(1) &&
                    score.size(1) > 0,
                "token_values: hidden [rows, hidden] and score [1, hidden] expected");
  if (wants_grad(hidden) || wants_grad(score)) return ValuesFunction::apply(hidden, score);
  const at::NoGradGuard no_grad;
  return values_of(hidden, score);
}

}  // namespace trireme
