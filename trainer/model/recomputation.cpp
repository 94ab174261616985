#include "trainer/model/recomputation.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace trireme {

namespace {

// The layer to run again in backward, carried through the autograd graph.
struct LayerCall final : torch::CustomClassHolder {
  using Run = std::function<Residual(const NormResult&)>;
  using Norm = std::function<at::Tensor(const at::Tensor&)>;
  LayerCall(Run r, Norm n) : run(std::move(r)), norm(std::move(n)) {}
  Run run;
  Norm norm;  // of the sum, with the bits that forward's had
};

// `anchor` is an input so that the node exists when the others need no gradient.
class RecomputeFunction final : public torch::autograd::Function<RecomputeFunction> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor& sum,
                                                const at::Tensor& normed, const at::Tensor& anchor,
                                                const c10::intrusive_ptr<LayerCall>& layer) {
    context->save_for_backward({sum});
    context->saved_data["layer"] = c10::IValue::make_capsule(layer);
    const auto [out, delta] = layer->run({sum, normed});
    return {out, delta};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto layer = c10::static_intrusive_pointer_cast<LayerCall>(context->saved_data["layer"].toCapsule());
    const at::Tensor sum = context->get_saved_variables()[0].detach().set_requires_grad(true);
    at::Tensor normed;
    {
      const at::NoGradGuard no_grad;
      normed = layer->norm(sum);
    }
    normed = normed.detach().set_requires_grad(true);
    const at::AutoGradMode record(true);
    const auto [out, delta] = layer->run({sum, normed});
    torch::autograd::backward({out, delta}, {grads[0], grads[1]});
    return {sum.grad(), normed.grad(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

Activation normed(const NormResult& norm, const at::Tensor& scale, double eps, int64_t counted, bool again) {
  if (!again) return {norm.normed, {}};
  // The norm of a sum has the bits that add_rms_norm gave it.
  return {norm.normed, [sum = norm.sum.detach(), scale, eps, counted] { return rms_norm(sum, scale, eps, counted); }};
}

Activation activated(const at::Tensor& gate_up, bool again) {
  at::Tensor active = swiglu_halves(gate_up);
  if (!again) return {std::move(active), {}};
  return {std::move(active), [kept = gate_up.detach()] { return swiglu_halves(kept); }};
}

at::Tensor product(const Activation& x, const at::Tensor& weight, const at::Tensor& bias) {
  return x.again ? linear_again(x.value, weight, bias, x.again) : trireme::linear(x.value, weight, bias);
}

Residual layer_again(const NormResult& input, const at::Tensor& anchor,
                     std::function<Residual(const NormResult&)> layer,
                     std::function<at::Tensor(const at::Tensor&)> norm) {
  auto call = c10::make_intrusive<LayerCall>(std::move(layer), std::move(norm));
  const torch::autograd::variable_list outputs = RecomputeFunction::apply(input.sum, input.normed, anchor, call);
  return {outputs[0], outputs[1]};
}

}  // namespace trireme
