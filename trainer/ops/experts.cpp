#include "trainer/ops/experts.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>

#include "trainer/ops/checks.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/expert_rows.h"
#include "trainer/ops/linear.h"
#include "trainer/ops/ops.h"
#include "trainer/ops/router_watch.h"

namespace trireme {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What does not depend on a tensor, carried through the autograd graph.
struct ExpertCall final : torch::CustomClassHolder {
  ExpertCall(const ExpertShape& s, ExpertsAgain a, std::shared_ptr<const RouterCall> w)
      : shape(s), again(std::move(a)), watch(std::move(w)) {}
  ExpertShape shape;
  ExpertsAgain again;
  std::shared_ptr<const RouterCall> watch;
  std::function<at::Tensor()> offsets;  // of the routes, on the host, once they are made
};

struct ForwardResult {
  at::Tensor y;
  Routes routes;
  at::Tensor gate_up;  // before the activation, where it is kept
  at::Tensor balance;  // RouterWatch::add's; undefined without a balancing loss
};

// `record`: for backward; `keep`: with gate and up before their activation.
ForwardResult run(const at::Tensor& x, const ExpertWeights& weights, const ExpertShape& shape, bool record, bool keep,
                  const RouterCall* watch = nullptr) {
  ForwardResult result;
  at::Tensor sorted;
  result.routes = route(x, weights.router, shape, record && (!shape.normalize || watch != nullptr), &sorted);
  if (watch != nullptr) {
    result.balance = watch->watch->add(watch->layer, result.routes, shape, *watch->rows);
    if (shape.normalize && !result.balance.defined()) result.routes.probabilities = at::Tensor();
  }
  const Routes& routes = result.routes;
  at::Tensor active;
  if (!keep && x.is_cuda()) {
    active = cuda::grouped_gate_up_swiglu(sorted, weights.gate_up, routes.offsets, x.size(0));
  } else {
    const at::Tensor gate_up = grouped_linear(sorted, weights.gate_up, routes.offsets, x.size(0));
    active = swiglu_halves(gate_up);
    if (keep) result.gate_up = gate_up;
  }
  result.y = combine(grouped_linear(active, weights.down, routes.offsets, x.size(0)), routes, shape);
  return result;
}

class ExpertsFunction final : public torch::autograd::Function<ExpertsFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& router,
                            const at::Tensor& gate_up, const at::Tensor& down,
                            const c10::intrusive_ptr<ExpertCall>& call) {
    const ForwardResult result = run(x, {router, gate_up, down}, call->shape, /*record=*/true,
                                     /*keep=*/!call->again.gate_up, call->watch.get());
    const Routes& r = result.routes;
    if (gate_up.requires_grad() || down.requires_grad()) call->offsets = offsets_on_host(r.offsets);
    context->save_for_backward({call->again.x ? at::Tensor() : x, router, gate_up, down, result.gate_up, r.experts,
                                r.weights, r.offsets, r.rows, r.places, r.probabilities, result.balance});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return result.y;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const at::NoGradGuard no_grad;
    const auto saved = context->get_saved_variables();
    const auto call = c10::static_intrusive_pointer_cast<ExpertCall>(context->saved_data["call"].toCapsule());
    const at::Tensor x = call->again.x ? call->again.x() : saved[0];
    const at::Tensor &router = saved[1], &gate_up = saved[2], &down = saved[3];
    const Routes routes{saved[5], saved[6], saved[7], saved[8], saved[9], saved[10]};
    const at::Tensor dy = gather_rows_by(grads[0].contiguous(), routes.rows);
    at::Tensor sorted, both = saved[4];
    if (call->again.gate_up || context->needs_input_grad(2)) sorted = gather_rows_by(x, routes.rows);
    if (call->again.gate_up) both = grouped_linear(sorted, gate_up, routes.offsets, x.size(0));
    const ExpertGradients gradients = expert_gradients(both, grouped_backward_input(dy, down, routes.offsets), routes);
    both.reset();
    const auto of_weight = [&](size_t index, const at::Tensor& weight, const at::Tensor& upstream,
                               const at::Tensor& input) {
      if (!context->needs_input_grad(index)) return at::Tensor();
      // A parameter's gradient buffer takes the products directly.
      const at::Tensor accumulator = weight.is_cuda() ? weight.grad() : at::Tensor();
      const at::Tensor own = grouped_backward_weight(upstream, input, call->offsets(), weight, accumulator);
      return accumulator.defined() ? at::Tensor() : own;
    };
    const at::Tensor ddown = of_weight(3, down, dy, gradients.weighted);
    const at::Tensor dgate_up = of_weight(2, gate_up, gradients.gate_up, sorted);
    at::Tensor dx, drouter;
    const bool input_too = context->needs_input_grad(0), router_too = context->needs_input_grad(1);
    if (input_too) dx = sum_places(grouped_backward_input(gradients.gate_up, gate_up, routes.offsets), routes.places);
    if (input_too || router_too) {
      at::Tensor dlogits = router_gradient(gradients.weights, routes, call->shape);
      if (const at::Tensor& balance = saved[11]; balance.defined())
        dlogits += balance_by_logits(balance, call->watch->rows->sequence, routes.probabilities);
      const at::ScalarType type = dlogits.scalar_type();
      if (input_too) dx = dx.to(type).addmm_(dlogits, router.to(type)).to(x.scalar_type());
      if (router_too) drouter = dlogits.t().mm(x.to(type)).to(router.scalar_type());
    }
    return {dx, drouter, dgate_up, ddown, at::Tensor()};
  }
};

}  // namespace

at::Tensor mixture_of_experts(const at::Tensor& x, const ExpertWeights& weights, const ExpertShape& shape,
                              ExpertsAgain again, std::shared_ptr<const RouterCall> watch) {
  require_supported("mixture_of_experts", x);
  require_same("mixture_of_experts", x, weights.router, "router");
  require_same("mixture_of_experts", x, weights.gate_up, "gate_up");
  require_same("mixture_of_experts", x, weights.down, "down");
  const int64_t hidden = x.size(1), experts = shape.experts;
  TRIREME_CHECK(x.dim() == 2 && experts > 0 && shape.per_token > 0 && shape.per_token <= experts &&
                    shape.combine_blocks > 0 && experts % shape.combine_blocks == 0,
                "mixture_of_experts: rows, experts, choices and blocks do not fit each other");
  const int64_t width = weights.down.size(1);
  TRIREME_CHECK(weights.router.sizes() == at::IntArrayRef({experts, hidden}) &&
                    weights.gate_up.sizes() == at::IntArrayRef({experts * 2 * width, hidden}) &&
                    weights.down.sizes() == at::IntArrayRef({experts * hidden, width}),
                "mixture_of_experts: the weights' shapes do not fit x");
  const bool record =
      wants_grad(x) || wants_grad(weights.router) || wants_grad(weights.gate_up) || wants_grad(weights.down);
  if (!record) return run(x, weights, shape, /*record=*/false, /*keep=*/false).y;
  return ExpertsFunction::apply(x, weights.router, weights.gate_up, weights.down,
                                c10::make_intrusive<ExpertCall>(shape, std::move(again), std::move(watch)));
}

}  // namespace trireme
