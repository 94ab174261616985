#include "trainer/model/split_experts.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "trainer/ops/checks.h"
#include "trainer/ops/expert_rows.h"
#include "trainer/ops/ops.h"
#include "trainer/parallel/dispatch.h"
#include "trainer/parallel/exchange.h"

namespace trireme {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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
  at::Tensor begins;             // [rows + 1] int32: the first choice of each
  at::Tensor gate_up;            // [choices, 2 width] before the activation; only where backward is to find it
  std::function<at::Tensor()> offsets;  // of `routes`, on the host, for backward
};

int64_t sum_of(const std::vector<int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

// What backward needs besides tensors, carried through the autograd graph.
struct SplitCall final : torch::CustomClassHolder {
  SplitCall(const ExpertShape& s, const ExpertRanks& r, std::shared_ptr<const RouterCall> w, bool again)
      : shape(s), ranks(r), watch(std::move(w)), gate_up_again(again) {}
  int64_t first_expert() const { return ranks.group->rank() / ranks.tensor * ranks.experts; }
  int64_t block_size() const { return shape.experts / shape.combine_blocks; }
  ExpertShape shape;
  ExpertRanks ranks;
  std::shared_ptr<const RouterCall> watch;
  bool gate_up_again = false;
  Dispatch plan;
  int64_t choices_here = 0;                           // of received rows, among this rank's experts
  std::vector<int64_t> sent_blocks, returned_blocks;  // rows of block sums, to and from each rank
  // Of the forward pass, without `blocks`; backward takes them, so that they go while others' backward runs.
  std::vector<Chunk> kept;
};

at::Tensor from_zero(const at::Tensor& counts) {  // [n] -> [n + 1] int32: sums of those before
  return at::constant_pad_nd(counts.cumsum(0, at::kInt), {1, 0});
}

// [rows, per_token] bool: whether a choice is its row's first in a block of experts. Choices ascend.
at::Tensor first_of_block(const at::Tensor& experts, int64_t block_size) {
  const at::Tensor block = experts.div(block_size, "floor");
  at::Tensor first = at::ones(block.sizes(), block.options().dtype(at::kBool));
  const int64_t others = block.size(1) - 1;
  first.narrow(1, 1, others).copy_(block.narrow(1, 1, others).ne(block.narrow(1, 0, others)));
  return first;
}

// Of [n] keys the places of the `count` lowest, by key, then ascending. int64.
at::Tensor places_by_key(const at::Tensor& keys, int64_t count) {
  return std::get<1>(keys.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false)).narrow(0, 0, count);
}

// How many choices and pairs of a row and a block the chunk has are known where it has all rows; else the host waits
// for the device to tell.
Chunk make_chunk(const ReceivedRows& received, int64_t first, const SplitCall& call) {
  const int64_t k = received.experts.size(1), own = call.ranks.experts;
  Chunk chunk{.first = first, .count = std::min(call.ranks.rows_at_once, received.x.size(0) - first)};
  const at::Tensor experts = received.experts.narrow(0, first, chunk.count);
  const at::Tensor local = experts - call.first_expert();
  const at::Tensor here = local.ge(0).logical_and_(local.lt(own));
  const at::Tensor starts = here.logical_and(first_of_block(experts, call.block_size()));
  int64_t choices = call.choices_here, pairs = sum_of(call.sent_blocks);
  if (chunk.count < received.x.size(0)) {
    const at::Tensor counts = at::stack({here.sum(), starts.sum()}).cpu();
    choices = counts[0].item<int64_t>();
    pairs = counts[1].item<int64_t>();
  }
  const at::Tensor keys = at::where(here, local, own).flatten();
  const at::Tensor order = places_by_key(keys, choices);
  at::Tensor places;
  std::tie(chunk.slots, places) = order.sort();
  const auto ints = received.experts.options();
  chunk.routes.places = places.to(at::kInt).unsqueeze_(1);
  chunk.routes.offsets = at::searchsorted(keys.index_select(0, order), at::arange(own + 1, ints), /*out_int32=*/true);
  chunk.routes.weights = received.weights.narrow(0, first, chunk.count).flatten().index_select(0, chunk.slots);
  chunk.routes.weights.unsqueeze_(1);
  chunk.rows = order.div(k, "floor").to(at::kInt);
  chunk.begins = from_zero(here.sum(1));
  // Each pair's first choice; all others' go to the last place, which is the end.
  const at::Tensor starting = starts.flatten().index_select(0, chunk.slots);
  const at::Tensor pair = at::where(starting, starting.cumsum(0) - 1, pairs);
  chunk.blocks = at::empty({pairs + 1}, ints).scatter_(0, pair, at::arange(choices, ints));
  chunk.blocks.narrow(0, pairs, 1).fill_(choices);
  return chunk;
}

// Which rows go where, and how many choices and block sums: whoever sends a row tells whoever gets it.
void make_plan(const at::Tensor& experts, SplitCall& call) {
  const int64_t ranks = call.ranks.group->size();
  const at::Tensor each = at::arange(ranks, experts.options()).div(call.ranks.tensor, "floor");  // whose experts it has
  const at::Tensor theirs = experts.div(call.ranks.experts, "floor").unsqueeze(2).eq(each);  // [rows, per_token, ranks]
  const at::Tensor blocks = theirs.logical_and(first_of_block(experts, call.block_size()).unsqueeze(2));
  const at::Tensor numbers = at::stack({theirs.flatten(0, 1).sum(0), blocks.flatten(0, 1).sum(0)}, 1);
  std::vector<std::vector<int64_t>> told;
  call.plan = plan_dispatch(*call.ranks.group, theirs.any(1), numbers, &told);
  for (const std::vector<int64_t>& number : told) {
    call.choices_here += number[0];
    call.sent_blocks.push_back(number[1]);
    call.returned_blocks.push_back(number[3]);
  }
}

ReceivedRows send_rows(const at::Tensor& x, const Routes& routes, SplitCall& call) {
  make_plan(routes.experts, call);
  const std::vector<at::Tensor> got = dispatch_rows(*call.ranks.group, call.plan, {x, routes.experts, routes.weights});
  return {got[0], got[1], got[2]};
}

// What came back; of experts that ranks share, the sums of what each of these gave: they have had the same rows.
at::Tensor add_parts(const at::Tensor& returned, const SplitCall& call) {
  const int64_t tensor = call.ranks.tensor;
  if (tensor == 1) return returned;
  std::vector<at::Tensor> sums;
  int64_t first = 0;
  for (size_t rank = 0; rank < call.returned_blocks.size(); rank += static_cast<size_t>(tensor)) {
    const int64_t blocks = call.returned_blocks[rank];
    sums.push_back(ordered_sum(returned.narrow(0, first, tensor * blocks).view({tensor, blocks, returned.size(1)})));
    first += tensor * blocks;
  }
  return at::cat(sums);
}

// For each own row the places of its block sums in add_parts' result, by ascending block: ranks hold experts by id.
struct BlockPlaces {
  at::Tensor places;  // [pairs of row and block] int32
  at::Tensor begins;  // [rows + 1] int32
};

BlockPlaces block_places(const at::Tensor& experts, const SplitCall& call) {
  const at::Tensor starts = first_of_block(experts, call.block_size());
  const at::Tensor part = at::where(starts, experts.div(call.ranks.experts, "floor"), call.ranks.group->size());
  const at::Tensor returned = places_by_key(part.flatten(), sum_of(call.returned_blocks) / call.ranks.tensor);
  return {std::get<1>(returned.sort()).to(at::kInt), from_zero(starts.sum(1))};
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
  for (int64_t first = 0; first < result.received.x.size(0); first += call.ranks.rows_at_once) {
    Chunk chunk = make_chunk(result.received, first, call);
    const at::Tensor own = result.received.x.narrow(0, chunk.first, chunk.count);
    const at::Tensor& offsets = chunk.routes.offsets;
    const at::Tensor gate_up = grouped_linear(gather_rows_by(own, chunk.rows), weights.gate_up, offsets, chunk.count);
    const at::Tensor y = grouped_linear(swiglu_halves(gate_up), weights.down, offsets, chunk.count);
    sums.push_back(block_sums(y, chunk.routes.places, chunk.routes.weights, chunk.blocks));
    if (!keep) continue;
    chunk.blocks.reset();
    if (!call.gate_up_again) chunk.gate_up = gate_up;
    chunk.offsets = offsets_on_host(offsets);
    call.kept.push_back(std::move(chunk));
  }
  const at::Tensor all = sums.size() == 2 ? sums.back() : at::cat(sums);
  const at::Tensor returned = exchange_rows(*call.ranks.group, all, call.sent_blocks, call.returned_blocks);
  const BlockPlaces blocks = block_places(result.routes.experts, call);
  result.y = sum_blocks(add_parts(returned, call), blocks.places, blocks.begins);
  return result;
}

// Gradients of what came, from those of what it gave, `upstream` [received rows, hidden].
struct ReceivedGradients {
  at::Tensor x;              // [rows, hidden]
  at::Tensor weights;        // [rows, per_token]; 0 where the choice is another rank's
  at::Tensor gate_up, down;  // of own experts; undefined where a parameter's own buffer took them
};

// Of received rows x; `of_weights`: the routes' weights of own rows, for their dtype.
ReceivedGradients backward_of_received(const at::Tensor& x, const at::Tensor& upstream, const ExpertWeights& weights,
                                       const at::Tensor& of_weights, SplitCall& call) {
  std::vector<Chunk> chunks = std::exchange(call.kept, {});
  TRIREME_CHECK(x.size(0) == 0 || !chunks.empty(), "split experts: a second backward pass of one forward pass");
  ReceivedGradients gradients{
      at::empty_like(x), at::zeros({x.size(0), of_weights.size(1)}, of_weights.options()), {}, {}};
  const auto add = [](at::Tensor& sum, const at::Tensor& weight, const at::Tensor& dy, const at::Tensor& input,
                      const Chunk& chunk) {
    const at::Tensor accumulator = weight.is_cuda() ? weight.grad() : at::Tensor();
    const at::Tensor part = grouped_backward_weight(dy, input, chunk.offsets(), weight, accumulator);
    if (accumulator.defined()) return;
    if (sum.defined())
      sum.add_(part);
    else
      sum = part;
  };
  for (Chunk& chunk : chunks) {
    const at::Tensor& offsets = chunk.routes.offsets;
    const at::Tensor sorted = gather_rows_by(x.narrow(0, chunk.first, chunk.count), chunk.rows);
    at::Tensor gate_up = std::exchange(chunk.gate_up, {});
    if (call.gate_up_again) gate_up = grouped_linear(sorted, weights.gate_up, offsets, chunk.count);
    const at::Tensor dy = gather_rows_by(upstream.narrow(0, chunk.first, chunk.count), chunk.rows);
    const ExpertGradients own =
        expert_gradients(gate_up, grouped_backward_input(dy, weights.down, offsets), chunk.routes);
    gate_up.reset();
    add(gradients.down, weights.down, dy, own.weighted, chunk);
    add(gradients.gate_up, weights.gate_up, own.gate_up, sorted, chunk);
    // Of a row by ascending expert.
    const at::Tensor dx = grouped_backward_input(own.gate_up, weights.gate_up, offsets);
    gradients.x.narrow(0, chunk.first, chunk.count).copy_(sum_blocks(dx, chunk.routes.places.view({-1}), chunk.begins));
    gradients.weights.narrow(0, chunk.first, chunk.count)
        .view({-1})
        .index_copy_(0, chunk.slots, own.weights.reshape({-1}));
  }
  return gradients;
}

class SplitExpertsFunction final : public torch::autograd::Function<SplitExpertsFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& router,
                            const at::Tensor& gate_up, const at::Tensor& down,
                            const c10::intrusive_ptr<SplitCall>& call) {
    const ForwardResult result = run(x, {router, gate_up, down}, *call, /*keep=*/true);
    const Routes& r = result.routes;
    context->save_for_backward({router.requires_grad() ? x : at::Tensor(), router, gate_up, down, r.experts, r.weights,
                                r.probabilities, result.received.x, result.balance});
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
    const at::Tensor upstream = dispatch_rows(group, call->plan, {grads[0].contiguous()}).front();
    const ReceivedGradients here =
        backward_of_received(saved[7], upstream, {router, saved[2], saved[3]}, routes.weights, *call);
    const std::vector<at::Tensor> back = return_rows(group, call->plan, {here.x, here.weights});
    const auto dtype = grads[0].scalar_type();
    const int64_t rows = grads[0].size(0);
    const auto type = routes.weights.scalar_type();
    at::Tensor dx = add_returned(call->plan, back[0].to(type), rows);
    const at::Tensor dweights = add_returned(call->plan, back[1], rows);
    at::Tensor dlogits = router_gradient(dweights, routes, call->shape);
    if (const at::Tensor& balance = saved[8]; balance.defined())
      dlogits += balance_by_logits(balance, call->watch->rows->sequence, routes.probabilities);
    dx = dx.addmm_(dlogits, router.to(type)).to(dtype);
    at::Tensor drouter;
    if (context->needs_input_grad(1)) drouter = dlogits.t().mm(x.to(type)).to(router.scalar_type());
    return {dx, drouter, here.gate_up, here.down, at::Tensor()};
  }
};

void check_shapes(const at::Tensor& x, const ExpertWeights& weights, const ExpertShape& shape,
                  const ExpertRanks& ranks) {
  const int64_t hidden = x.size(1), parts = ranks.group->size() / ranks.tensor, width = weights.down.size(1);
  TRIREME_CHECK(x.dim() == 2 && parts * ranks.tensor == ranks.group->size() && ranks.experts * parts == shape.experts &&
                    ranks.rows_at_once > 0 && shape.combine_blocks % parts == 0 &&
                    shape.experts % shape.combine_blocks == 0,
                "split experts: experts and blocks must divide among the ranks");
  TRIREME_CHECK(weights.router.sizes() == at::IntArrayRef({shape.experts, hidden}) &&
                    weights.gate_up.sizes() == at::IntArrayRef({ranks.experts * 2 * width, hidden}) &&
                    weights.down.sizes() == at::IntArrayRef({ranks.experts * hidden, width}),
                "split experts: the weights' shapes do not fit x");
}

}  // namespace

at::Tensor gathered_mixture_of_experts(const at::Tensor& x, const ExpertWeights& weights, const ExpertShape& shape,
                                       const ExpertRanks& ranks) {
  const at::NoGradGuard no_grad;
  check_shapes(x, weights, shape, ranks);
  Communicator& group = *ranks.group;
  const int64_t parts = group.size() / ranks.tensor, part = group.rank() / ranks.tensor;
  const int64_t blocks = shape.combine_blocks / parts;
  const at::Tensor all = gather_rows(group, x);
  // With few rows sorting and gathering are one launch, of more the own ones are fewer to copy.
  constexpr int64_t kFewRows = 256;
  at::Tensor sorted;
  const Routes routes = route(all, weights.router, shape, false, all.size(0) <= kFewRows ? &sorted : nullptr);
  const at::Tensor offsets = routes.offsets.narrow(0, part * ranks.experts, ranks.experts + 1);
  if (!sorted.defined()) sorted = gather_part(all, routes.rows, offsets);
  const at::Tensor active = grouped_part(sorted, weights.gate_up, offsets, /*swiglu=*/true);
  const at::Tensor y = grouped_part(active, weights.down, offsets, /*swiglu=*/false);
  const at::Tensor sums = part_block_sums(y, routes, shape, part * blocks, blocks);
  // Ranks hold experts by id: the owner's row has its blocks in order, of ranks that share experts each rank's sums.
  at::Tensor own = whole_rows(group, sums.view({all.size(0), blocks * x.size(1)}));
  if (ranks.tensor > 1) {
    own = own.view({x.size(0), parts, ranks.tensor, blocks * x.size(1)}).permute({2, 0, 1, 3}).contiguous();
    own = ordered_sum(own);
  }
  return sum_in_order(own.view({x.size(0), shape.combine_blocks, x.size(1)}));
}

at::Tensor split_mixture_of_experts(const at::Tensor& x, const ExpertWeights& weights, const ExpertShape& shape,
                                    const ExpertRanks& ranks, std::shared_ptr<const RouterCall> watch,
                                    bool gate_up_again) {
  check_shapes(x, weights, shape, ranks);
  auto call = c10::make_intrusive<SplitCall>(shape, ranks, std::move(watch), gate_up_again);
  const bool record =
      wants_grad(x) || wants_grad(weights.router) || wants_grad(weights.gate_up) || wants_grad(weights.down);
  if (!record) return run(x.contiguous(), weights, *call, /*keep=*/false).y;
  return SplitExpertsFunction::apply(x.contiguous(), weights.router, weights.gate_up, weights.down, call);
}

}  // namespace trireme
