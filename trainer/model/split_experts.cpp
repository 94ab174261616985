#include "trainer/model/split_experts.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "trainer/ops/checks.h"
#include "trainer/ops/expert_rows.h"
#include "trainer/ops/ops.h"
#include "trainer/parallel/dispatch.h"

namespace trireme {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rows of several tensors [rows, ...] as rows of bytes, so that one exchange carries them.
at::Tensor pack_rows(const at::Tensor& a, const at::Tensor& b) {
  return at::cat({a.contiguous().view(at::kByte), b.contiguous().view(at::kByte)}, 1);
}

at::Tensor unpack_rows(const at::Tensor& packed, int64_t first, int64_t columns, at::ScalarType dtype) {
  const auto bytes = columns * static_cast<int64_t>(c10::elementSize(dtype));
  return packed.narrow(1, first, bytes).clone(at::MemoryFormat::Contiguous).view(dtype);
}

int64_t row_bytes(const at::Tensor& rows) { return rows.size(1) * rows.element_size(); }

// Rows that came to this rank, and what they want of its experts.
struct ReceivedRows {
  at::Tensor x;        // [rows, hidden]
  at::Tensor experts;  // [rows, per_token] int32, of the whole model; others' among them
  at::Tensor weights;  // [rows, per_token]
};

// Some of the received rows. A choice is a row and one of the experts here that it chose, by row, then by expert.
struct Chunk {
  int64_t first = 0, count = 0;  // received rows
  Routes routes;                 // of the choices, as rows that choose one of this rank's experts each
  at::Tensor rows;               // [choices] int32, in sorted order: the row in the chunk
  at::Tensor slots;              // [choices] int64: row in the chunk times per_token, plus the choice's place in it
  at::Tensor blocks;             // [pairs of row and block + 1] int32: the first choice of each
};

// What backward needs besides tensors, carried through the autograd graph.
struct SplitCall final : torch::CustomClassHolder {
  SplitCall(const ExpertShape& s, const ExpertRanks& r, std::shared_ptr<const RouterCall> w)
      : shape(s), ranks(r), watch(std::move(w)) {}
  int64_t first_expert() const { return ranks.group->rank() * ranks.experts; }
  int64_t block_size() const { return shape.experts / shape.combine_blocks; }
  ExpertShape shape;
  ExpertRanks ranks;
  std::shared_ptr<const RouterCall> watch;
  Dispatch plan;
  std::vector<int64_t> sent_blocks, returned_blocks;  // rows of block sums, to and from each rank
};

at::Tensor int32_tensor(const std::vector<int32_t>& values) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kInt);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int32_t>());
  return tensor;
}

Chunk make_chunk(const ReceivedRows& received, int64_t first, const SplitCall& call) {
  const int64_t k = received.experts.size(1), begin = call.first_expert(), end = begin + call.ranks.experts;
  Chunk chunk{.first = first, .count = std::min(call.ranks.rows_at_once, received.x.size(0) - first)};
  const int32_t* chosen = received.experts.const_data_ptr<int32_t>() + first * k;
  std::vector<int32_t> experts, rows, blocks;
  std::vector<int64_t> slots;
  for (int64_t row = 0; row < chunk.count; ++row) {
    int64_t block = -1;
    for (int64_t j = 0; j < k; ++j) {
      const int64_t expert = chosen[row * k + j];
      if (expert < begin || expert >= end) continue;
      if (expert / call.block_size() != block) blocks.push_back(static_cast<int32_t>(experts.size()));
      block = expert / call.block_size();
      experts.push_back(static_cast<int32_t>(expert - begin));
      rows.push_back(static_cast<int32_t>(row));
      slots.push_back(row * k + j);
    }
  }
  blocks.push_back(static_cast<int32_t>(experts.size()));
  chunk.routes.experts = int32_tensor(experts).unsqueeze(1);
  chunk.slots = at::tensor(slots, at::kLong);
  chunk.routes.weights = received.weights.narrow(0, first, chunk.count).reshape({-1}).index_select(0, chunk.slots);
  chunk.routes.weights.unsqueeze_(1);
  sort_by_expert(chunk.routes, call.ranks.experts);
  chunk.rows = int32_tensor(rows).index_select(0, chunk.routes.rows);
  chunk.blocks = int32_tensor(blocks);
  return chunk;
}

template <class F>
void for_chunks(const ReceivedRows& received, const SplitCall& call, F&& f) {
  for (int64_t first = 0; first < received.x.size(0); first += call.ranks.rows_at_once)
    f(make_chunk(received, first, call));
}

// Numbers of pairs of a row and a block of experts [begin, end) that it chose, of rows first, first + 1, ...
int64_t count_blocks(const at::Tensor& experts, int64_t first, int64_t count, int64_t begin, int64_t end,
                     int64_t block_size) {
  const int64_t k = experts.size(1);
  const int32_t* chosen = experts.const_data_ptr<int32_t>() + first * k;
  int64_t blocks = 0;
  for (int64_t row = 0; row < count; ++row) {
    int64_t block = -1;
    for (int64_t j = 0; j < k; ++j) {
      const int64_t expert = chosen[row * k + j];
      if (expert < begin || expert >= end) continue;
      if (expert / block_size != block) ++blocks;
      block = expert / block_size;
    }
  }
  return blocks;
}

Dispatch plan_of(const at::Tensor& experts, const SplitCall& call) {
  const int64_t rows = experts.size(0), k = experts.size(1), ranks = call.ranks.group->size();
  at::Tensor wanted = at::zeros({rows, ranks}, at::kBool);
  const int32_t* chosen = experts.const_data_ptr<int32_t>();
  bool* want = wanted.mutable_data_ptr<bool>();
  for (int64_t i = 0; i < rows * k; ++i) want[i / k * ranks + chosen[i] / call.ranks.experts] = true;
  return plan_dispatch(*call.ranks.group, wanted);
}

ReceivedRows send_rows(const at::Tensor& x, const Routes& routes, SplitCall& call) {
  Communicator& group = *call.ranks.group;
  call.plan = plan_of(routes.experts, call);
  const at::Tensor packed =
      dispatch_rows(group, call.plan, at::cat({pack_rows(x, routes.weights), routes.experts.view(at::kByte)}, 1));
  const int64_t k = call.shape.per_token;
  ReceivedRows received{
      unpack_rows(packed, 0, x.size(1), x.scalar_type()),
      unpack_rows(packed, row_bytes(x) + row_bytes(routes.weights), k, at::kInt),
      unpack_rows(packed, row_bytes(x), k, routes.weights.scalar_type()),
  };
  // Who sends and who gets a row know which blocks it chose.
  const at::Tensor sent = routes.experts.index_select(0, call.plan.rows);
  int64_t to = 0, from = 0;
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    const int64_t mine = call.first_expert(), theirs = rank * call.ranks.experts;
    const int64_t gets = call.plan.from[static_cast<size_t>(rank)], gave = call.plan.to[static_cast<size_t>(rank)];
    call.sent_blocks.push_back(
        count_blocks(received.experts, from, gets, mine, mine + call.ranks.experts, call.block_size()));
    call.returned_blocks.push_back(
        count_blocks(sent, to, gave, theirs, theirs + call.ranks.experts, call.block_size()));
    from += gets;
    to += gave;
  }
  return received;
}

// For each own row the places of its block sums among the returned ones, by ascending block: ranks hold experts by id.
struct BlockPlaces {
  at::Tensor places;  // [pairs of row and block] int32
  at::Tensor begins;  // [rows + 1] int32
};

BlockPlaces block_places(const at::Tensor& experts, const SplitCall& call) {
  const int64_t rows = experts.size(0), k = experts.size(1);
  const int32_t* chosen = experts.const_data_ptr<int32_t>();
  const int64_t* sent = call.plan.rows.const_data_ptr<int64_t>();
  std::vector<std::vector<int32_t>> of_row(static_cast<size_t>(rows));
  int32_t next = 0;
  for (size_t rank = 0; rank < call.plan.to.size(); ++rank) {
    const int64_t begin = static_cast<int64_t>(rank) * call.ranks.experts, end = begin + call.ranks.experts;
    for (int64_t i = 0; i < call.plan.to[rank]; ++i, ++sent) {
      int64_t block = -1;
      for (int64_t j = 0; j < k; ++j) {
        const int64_t expert = chosen[*sent * k + j];
        if (expert < begin || expert >= end) continue;
        if (expert / call.block_size() != block) of_row[static_cast<size_t>(*sent)].push_back(next++);
        block = expert / call.block_size();
      }
    }
  }
  std::vector<int32_t> places, begins{0};
  for (const std::vector<int32_t>& row : of_row) {
    places.insert(places.end(), row.begin(), row.end());
    begins.push_back(static_cast<int32_t>(places.size()));
  }
  return {int32_tensor(places), int32_tensor(begins)};
}

struct ForwardResult {
  at::Tensor y;
  Routes routes;
  ReceivedRows received;
  at::Tensor balance;  // RouterWatch::add's; undefined without a balancing loss
};

ForwardResult run(const at::Tensor& x, const ExpertWeights& weights, SplitCall& call, bool keep) {
  ForwardResult result;
  const RouterCall* const watch = keep ? call.watch.get() : nullptr;
  result.routes = route(x, weights.router, call.shape, keep && (!call.shape.normalize || watch != nullptr));
  if (watch != nullptr) {
    result.balance = watch->watch->add(watch->layer, result.routes, call.shape, *watch->rows);
    if (call.shape.normalize && !result.balance.defined()) result.routes.probabilities = at::Tensor();
  }
  result.received = send_rows(x, result.routes, call);
  std::vector<at::Tensor> sums{at::empty({0, x.size(1)}, x.options())};
  for_chunks(result.received, call, [&](const Chunk& chunk) {
    const at::Tensor own = result.received.x.narrow(0, chunk.first, chunk.count);
    const at::Tensor& offsets = chunk.routes.offsets;
    const at::Tensor gate_up = grouped_linear(gather_rows_by(own, chunk.rows), weights.gate_up, offsets, chunk.count);
    const at::Tensor y = grouped_linear(swiglu_halves(gate_up), weights.down, offsets, chunk.count);
    sums.push_back(block_sums(y, chunk.routes.places, chunk.routes.weights, chunk.blocks));
  });
  const at::Tensor returned = exchange_rows(*call.ranks.group, at::cat(sums), call.sent_blocks, call.returned_blocks);
  const BlockPlaces blocks = block_places(result.routes.experts, call);
  result.y = sum_blocks(returned, blocks.places, blocks.begins);
  return result;
}

// Gradients of what came, from those of what it gave, `upstream` [received rows, hidden].
struct ReceivedGradients {
  at::Tensor x;        // [rows, hidden]
  at::Tensor weights;  // [rows, per_token]; 0 where the choice is another rank's
  at::Tensor gate_up, down;
};

ReceivedGradients backward_of_received(const ReceivedRows& received, const at::Tensor& upstream,
                                       const ExpertWeights& weights, const SplitCall& call) {
  ReceivedGradients gradients{at::empty_like(received.x), at::zeros_like(received.weights), {}, {}};
  const auto add = [](at::Tensor& sum, const at::Tensor& part) {
    if (sum.defined())
      sum.add_(part);
    else
      sum = part;
  };
  for_chunks(received, call, [&](const Chunk& chunk) {
    const at::Tensor& offsets = chunk.routes.offsets;
    const at::Tensor sorted = gather_rows_by(received.x.narrow(0, chunk.first, chunk.count), chunk.rows);
    const at::Tensor gate_up = grouped_linear(sorted, weights.gate_up, offsets, chunk.count);
    const at::Tensor dy = gather_rows_by(upstream.narrow(0, chunk.first, chunk.count), chunk.rows);
    const ExpertGradients own =
        expert_gradients(gate_up, grouped_backward_input(dy, weights.down, offsets), chunk.routes);
    add(gradients.down, grouped_backward_weight(dy, own.weighted, offsets, weights.down, {}));
    add(gradients.gate_up, grouped_backward_weight(own.gate_up, sorted, offsets, weights.gate_up, {}));
    const at::Tensor dx = grouped_backward_input(own.gate_up, weights.gate_up, offsets);
    // Sorted rows are by expert: of a row they are added by ascending id.
    const auto wide = compute_type(dx);
    const at::Tensor sum = at::zeros({chunk.count, dx.size(1)}, dx.options().dtype(wide));
    sum.index_add_(0, chunk.rows, dx.to(wide));
    gradients.x.narrow(0, chunk.first, chunk.count).copy_(sum);
    gradients.weights.narrow(0, chunk.first, chunk.count)
        .view({-1})
        .index_copy_(0, chunk.slots, own.weights.reshape({-1}));
  });
  return gradients;
}

class SplitExpertsFunction final : public torch::autograd::Function<SplitExpertsFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& router,
                            const at::Tensor& gate_up, const at::Tensor& down,
                            const c10::intrusive_ptr<SplitCall>& call) {
    const ForwardResult result = run(x, {router, gate_up, down}, *call, /*keep=*/true);
    const Routes& r = result.routes;
    const ReceivedRows& received = result.received;
    context->save_for_backward({router.requires_grad() ? x : at::Tensor(), router, gate_up, down, r.experts, r.weights,
                                r.probabilities, received.x, received.experts, received.weights, result.balance});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return result.y;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const at::NoGradGuard no_grad;
    const auto saved = context->get_saved_variables();
    const auto call = c10::static_intrusive_pointer_cast<SplitCall>(context->saved_data["call"].toCapsule());
    Communicator& group = *call->ranks.group;
    const at::Tensor &x = saved[0], &router = saved[1];
    Routes routes;
    routes.experts = saved[4];
    routes.weights = saved[5];
    routes.probabilities = saved[6];
    const at::Tensor upstream = dispatch_rows(group, call->plan, grads[0].contiguous());
    const ReceivedGradients here =
        backward_of_received({saved[7], saved[8], saved[9]}, upstream, {router, saved[2], saved[3]}, *call);
    const at::Tensor back = return_rows(group, call->plan, pack_rows(here.x, here.weights));
    const auto dtype = grads[0].scalar_type();
    const int64_t rows = grads[0].size(0), hidden = grads[0].size(1);
    const auto type = routes.weights.scalar_type();
    at::Tensor dx = add_returned(call->plan, unpack_rows(back, 0, hidden, dtype).to(type), rows);
    const at::Tensor dweights =
        add_returned(call->plan, unpack_rows(back, row_bytes(here.x), call->shape.per_token, type), rows);
    at::Tensor dlogits = router_gradient(dweights, routes, call->shape);
    if (const at::Tensor& balance = saved[10]; balance.defined())
      dlogits += balance_by_logits(balance, call->watch->rows->sequence, routes.probabilities);
    dx = dx.addmm_(dlogits, router.to(type)).to(dtype);
    at::Tensor drouter;
    if (context->needs_input_grad(1)) drouter = dlogits.t().mm(x.to(type)).to(router.scalar_type());
    return {dx, drouter, here.gate_up, here.down, at::Tensor()};
  }
};

}  // namespace

at::Tensor split_mixture_of_experts(const at::Tensor& x, const ExpertWeights& weights, const ExpertShape& shape,
                                    const ExpertRanks& ranks, std::shared_ptr<const RouterCall> watch) {
  const int64_t hidden = x.size(1), size = ranks.group->size();
  TRIREME_CHECK(x.is_cpu() && x.dim() == 2 && ranks.experts * size == shape.experts && ranks.rows_at_once > 0 &&
                    shape.combine_blocks % size == 0 && shape.experts % shape.combine_blocks == 0,
                "split_mixture_of_experts: experts and blocks must divide among the ranks");
  const int64_t width = weights.down.size(1);
  TRIREME_CHECK(weights.router.sizes() == at::IntArrayRef({shape.experts, hidden}) &&
                    weights.gate_up.sizes() == at::IntArrayRef({ranks.experts * 2 * width, hidden}) &&
                    weights.down.sizes() == at::IntArrayRef({ranks.experts * hidden, width}),
                "split_mixture_of_experts: the weights' shapes do not fit x");
  auto call = c10::make_intrusive<SplitCall>(shape, ranks, std::move(watch));
  const bool record =
      wants_grad(x) || wants_grad(weights.router) || wants_grad(weights.gate_up) || wants_grad(weights.down);
  if (!record) return run(x.contiguous(), weights, *call, /*keep=*/false).y;
  return SplitExpertsFunction::apply(x.contiguous(), weights.router, weights.gate_up, weights.down, call);
}

}  // namespace trireme
