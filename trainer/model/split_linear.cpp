#include "trainer/model/split_linear.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "trainer/ops/linear.h"
#include "trainer/parallel/rows_beside.h"

namespace trireme {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Where this rank's rows lie among all.
struct OwnPart {
  explicit OwnPart(const SplitRows& split)
      : ranks(split.tensor->size()),
        rank(split.tensor->rank()),
        each((split.rows + ranks - 1) / ranks),
        begin(std::min(split.rows, rank * each)),
        end(std::min(split.rows, begin + each)) {}
  int64_t ranks, rank;
  int64_t each;        // with padding
  int64_t begin, end;  // without
};

// `make(out, from, to)` writes rows [from, to) of a product.
template <typename Make>
void make_rows(const at::Tensor& all, int64_t from, int64_t to, Make&& make) {
  if (from < to) make(all.narrow(0, from, to - from), from, to);
}

// [each, width] of rows from `begin` on: padding is zero.
template <typename Make>
void make_padded(const at::Tensor& out, int64_t begin, int64_t rows, Make&& make) {
  const int64_t there = std::clamp<int64_t>(rows - begin, 0, out.size(0));
  if (there > 0) make(out.narrow(0, 0, there), begin, begin + there);
  if (there < out.size(0)) out.narrow(0, there, out.size(0) - there).zero_();
}

// Rows that come while the own ones are computed: `make(out, in)` of the rows of `in`.
template <typename Make>
at::Tensor of_coming_rows(const OwnPart& part, const at::Tensor& own, RowsComing& coming, const at::Tensor& out,
                          Make&& make) {
  make_rows(out, part.begin, part.end,
            [&](const at::Tensor& to, int64_t from, int64_t end) { make(to, own.narrow(0, 0, end - from)); });
  const at::Tensor all = coming.all().narrow(0, 0, out.size(0));
  const auto others = [&](const at::Tensor& to, int64_t from, int64_t end) {
    make(to, all.narrow(0, from, end - from));
  };
  make_rows(out, 0, part.begin, others);
  make_rows(out, std::min(out.size(0), part.begin + part.each), out.size(0), others);
  return all;
}

// Partial sums of all rows that `make(out, from, to)` gives, those of the others first; `meanwhile` is called when all
// are made.
template <typename Make, typename Meanwhile>
at::Tensor sums_of_rows(const SplitRows& split, const OwnPart& part, int64_t width, const at::TensorOptions& options,
                        Make&& make, Meanwhile&& meanwhile) {
  const at::Tensor others = at::empty({(part.ranks - 1) * part.each, width}, options.requires_grad(false));
  for (int64_t rank = 0; rank < part.ranks; ++rank) {
    if (rank == part.rank) continue;
    const int64_t place = rank < part.rank ? rank : rank - 1;
    make_padded(others.narrow(0, place * part.each, part.each), rank * part.each, split.rows, make);
  }
  SumsComing coming(*split.tensor, others, split.beside);
  make_padded(coming.own(), part.rank * part.each, split.rows, make);
  meanwhile();
  return coming.finish();
}

// What both keep for backward besides tensors.
struct RowsCall final : torch::CustomClassHolder {
  RowsCall(const SplitRows& s, bool b, std::function<at::Tensor()> a) : split(s), bias(b), again(std::move(a)) {}
  SplitRows split;
  bool bias;
  std::function<at::Tensor()> again;  // gives the input, where it is not kept
};

using RowsCallHandle = c10::intrusive_ptr<RowsCall>;

void keep_call(AutogradContext& context, const at::Tensor& x, const at::Tensor& weight, const RowsCallHandle& call) {
  context.save_for_backward({call->again ? at::Tensor() : x, weight});
  context.saved_data["call"] = c10::IValue::make_capsule(call);
}

RowsCallHandle kept_call(AutogradContext& context) {
  return c10::static_intrusive_pointer_cast<RowsCall>(context.saved_data["call"].toCapsule());
}

at::Tensor input_of(const RowsCall& call, const at::Tensor& kept) {
  if (!call.again) return kept;
  const at::NoGradGuard no_grad;
  return call.again();
}

at::Tensor gathered_forward(const SplitRows& split, const at::Tensor& own, const at::Tensor& weight,
                            const at::Tensor& bias) {
  const OwnPart part(split);
  TRIREME_CHECK(own.size(0) == part.each, "gathered_linear: each rank has its part of the rows");
  RowsComing coming(*split.tensor, own, split.beside);
  const at::Tensor out = at::empty({split.rows, weight.size(0)}, own.options().requires_grad(false));
  (void)of_coming_rows(part, own, coming, out,
                       [&](const at::Tensor& to, const at::Tensor& x) { linear_forward_into(to, x, weight, bias); });
  return out;
}

at::Tensor summed_forward(const SplitRows& split, const at::Tensor& x, const at::Tensor& weight,
                          const at::Tensor& bias) {
  TRIREME_CHECK(x.size(0) == split.rows, "summed_linear: all rows expected");
  const auto make = [&](const at::Tensor& to, int64_t from, int64_t end) {
    linear_forward_into(to, x.narrow(0, from, end - from), weight, bias);
  };
  return sums_of_rows(split, OwnPart(split), weight.size(0), x.options(), make, [] {});
}

struct GatheredLinear final : public torch::autograd::Function<GatheredLinear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& own, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const RowsCallHandle& call) {
    keep_call(*context, own, weight, call);
    return gathered_forward(call->split, own, weight, bias.value_or(at::Tensor()));
  }

  // The input comes, for the weight's gradient, while its own gradient's sums are made; these travel while the weight's
  // is computed.
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const RowsCallHandle call = kept_call(*context);
    const auto saved = context->get_saved_variables();
    const at::Tensor& weight = saved[1];
    const at::Tensor dy = gradients[0].contiguous();
    at::Tensor down, dweight, dbias;
    std::optional<RowsComing> coming;
    if (context->needs_input_grad(1))
      coming.emplace(*call->split.tensor, input_of(*call, saved[0]), call->split.beside);
    const auto of_weight = [&] {
      if (coming) dweight = linear_weight_gradient(dy, coming->all().narrow(0, 0, dy.size(0)), weight);
      if (call->bias && context->needs_input_grad(2)) dbias = linear_bias_gradient(dy);
    };
    if (context->needs_input_grad(0)) {
      const auto make = [&](const at::Tensor& to, int64_t from, int64_t end) {
        linear_input_gradient_into(to, dy.narrow(0, from, end - from), weight);
      };
      down = sums_of_rows(call->split, OwnPart(call->split), weight.size(1), dy.options(), make, of_weight);
    } else {
      of_weight();
    }
    return {down, dweight, dbias, at::Tensor()};
  }
};

struct SummedLinear final : public torch::autograd::Function<SummedLinear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const RowsCallHandle& call) {
    keep_call(*context, x, weight, call);
    return summed_forward(call->split, x, weight, bias.value_or(at::Tensor()));
  }

  // The others' gradients come while the own rows' are multiplied.
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const RowsCallHandle call = kept_call(*context);
    const auto saved = context->get_saved_variables();
    const at::Tensor& weight = saved[1];
    const at::Tensor own = gradients[0].contiguous();
    at::Tensor dx, dweight, dbias, all;
    RowsComing coming(*call->split.tensor, own, call->split.beside);
    if (context->needs_input_grad(0)) {
      dx = at::empty({call->split.rows, weight.size(1)}, own.options().requires_grad(false));
      all = of_coming_rows(OwnPart(call->split), own, coming, dx, [&](const at::Tensor& to, const at::Tensor& dy) {
        linear_input_gradient_into(to, dy, weight);
      });
    } else {
      all = coming.all().narrow(0, 0, call->split.rows);
    }
    if (context->needs_input_grad(1)) dweight = linear_weight_gradient(all, input_of(*call, saved[0]), weight);
    if (call->bias && context->needs_input_grad(2)) dbias = linear_bias_gradient(all);
    return {dx, dweight, dbias, at::Tensor()};
  }
};

bool records(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return at::GradMode::is_enabled() &&
         (x.requires_grad() || weight.requires_grad() || (bias.defined() && bias.requires_grad()));
}

std::optional<at::Tensor> maybe(const at::Tensor& bias) {
  return bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt;
}

}  // namespace

at::Tensor gathered_linear(const SplitRows& split, const Activation& own, const at::Tensor& weight,
                           const at::Tensor& bias) {
  if (!records(own.value, weight, bias)) return gathered_forward(split, own.value, weight, bias);
  return GatheredLinear::apply(own.value, weight, maybe(bias),
                               c10::make_intrusive<RowsCall>(split, bias.defined(), own.again));
}

at::Tensor summed_linear(const SplitRows& split, const Activation& x, const at::Tensor& weight,
                         const at::Tensor& bias) {
  if (!records(x.value, weight, bias)) return summed_forward(split, x.value, weight, bias);
  return SummedLinear::apply(x.value, weight, maybe(bias),
                             c10::make_intrusive<RowsCall>(split, bias.defined(), x.again));
}

}  // namespace trireme
