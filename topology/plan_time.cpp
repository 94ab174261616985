// Seconds of a step's passes over many rows: reference, training, the optimizer.
#include <algorithm>

#include "topology/pipeline.h"
#include "topology/plan_parts.h"

namespace trireme::planning {
namespace {

constexpr int64_t kMostSimulated = 256;  // micro-batches; more go on at the pace of the busiest stage

struct Seconds {
  double forward = 0, backward = 0;
  double gate_up = 0;  // of forward, experts' first products
};

// Experts are multiplied for one after the other in backward, at a rate of their own.
Seconds layer_seconds(const Case& c, const LocalShape& local, int64_t layer, const PassWork& work) {
  const DeviceRates& rates = c.devices.rates;
  const double hidden = real(local.hidden), ranks = real(c.layout.tp);
  const double query = real(local.query_width()), key = real(local.key_width());
  double elements = hidden * (2 * query + 2 * key), experts = 0;
  if (c.shape.has_experts(layer)) {
    elements += hidden * real(c.shape.experts) / ranks;
    experts = 2 * work.tokens * 3 * hidden * real(local.experts_per_token * local.moe_intermediate);
  } else {
    elements += 3 * hidden * real(local.intermediate);
  }
  const ActivationBytes bytes = activation_bytes(local, c.options.element_bytes);
  const double plain = 2 * work.tokens * elements / rates.products + 4 * query * work.pairs / rates.attention +
                       rates.moves * work.tokens * real(bytes.whole) / rates.copy;
  return {plain + experts / rates.experts_forward, 2 * plain + 2 * experts / rates.experts_backward,
          experts * 2 / 3 / rates.experts_forward};
}

double head_seconds(const Case& c, const LocalShape& local, const PassWork& work) {
  const double columns = local.value_head ? 1 : real(local.padded_vocab);
  return 2 * real(local.hidden) * columns * work.scored / c.devices.rates.products;
}

// Of every stage and piece over one micro-batch; in backward a piece computes again what its layers have not kept.
PipelineCosts pass_costs(const Case& c, const PassWork& work, const KeptLayers& kept) {
  PipelineCosts costs;
  for (int64_t stage = 0; stage < c.layout.pp; ++stage) {
    const LocalShape local = shape_of(c, stage);
    std::vector<double>&forward = costs.forward.emplace_back(), &backward = costs.backward.emplace_back();
    for (const Range& piece : layers_of(c, stage)) {
      Seconds sum;
      for (int64_t layer = piece.begin; layer < piece.end; ++layer) {
        const Seconds one = layer_seconds(c, local, layer, work);
        sum.forward += one.forward;
        const bool all = layer - piece.begin < kept.input, gates = layer - piece.begin < kept.input + kept.experts;
        sum.backward += one.backward + (all ? one.forward : 0) + (gates && !all ? one.gate_up : 0);
      }
      forward.push_back(sum.forward);
      backward.push_back(sum.backward);
    }
    if (local.head) {
      forward.back() += head_seconds(c, local, work);
      backward.back() += 2 * head_seconds(c, local, work);
    }
  }
  if (c.layout.pp > 1) {
    const double bytes = work.tokens / real(c.layout.tp) * real(c.shape.hidden * c.options.element_bytes);
    costs.hop = link(c, Axis::kPp).seconds(bytes);
  }
  return costs;
}

// Of so many micro-batches: what a stage works in the mean, and what it waits besides.
struct Passes {
  double working = 0, waiting = 0;
};
Passes run_passes(const Case& c, const PipelineCosts& costs, int64_t micro_batches, bool backward) {
  double busiest = 0, mean = 0;
  for (size_t stage = 0; stage < costs.forward.size(); ++stage) {
    double own = 0;
    for (size_t piece = 0; piece < costs.forward[stage].size(); ++piece)
      own += costs.forward[stage][piece] + (backward ? costs.backward[stage][piece] : 0);
    busiest = std::max(busiest, own);
    mean += own / real(c.layout.pp);
  }
  const double all = mean * real(micro_batches);
  if (c.layout.pp == 1) return {all, 0};
  const int64_t some = std::min(micro_batches, kMostSimulated);
  const PipelineTable table =
      backward ? training_passes(c.layout.pp, c.pieces(), some) : forward_passes(c.layout.pp, c.pieces(), some);
  const double total = pipeline_time(table, costs).total + busiest * real(micro_batches - some);
  return {all, total - all};
}

// What a message of `rows` rows of hidden takes that ranks of the axis exchange.
double rows_seconds(const Case& c, Axis axis, double rows) {
  return link(c, axis).seconds(rows * real(c.shape.hidden * c.options.element_bytes));
}

// Exchanges of a micro-batch on the stage with the most layers. `backward`: with those of backward, where inputs of
// products are gathered again; `again`: of so many layers forward's once more.
double exchange_seconds(const Case& c, const PassWork& work, bool backward, int64_t again) {
  int64_t most = 0, experts = 0;
  for (int64_t stage = 0; stage < c.layout.pp; ++stage) {
    int64_t layers = 0, sparse = 0;
    for (const Range& piece : layers_of(c, stage)) {
      layers += piece.size();
      for (int64_t layer = piece.begin; layer < piece.end; ++layer) sparse += c.shape.has_experts(layer) ? 1 : 0;
    }
    most = std::max(most, layers);
    experts = std::max(experts, sparse);
  }
  const double forward = real(most + again), behind = backward ? real(most) : 0;
  double seconds = 0;
  if (const int64_t tp = c.layout.tp; tp > 1) {
    const double one = rows_seconds(c, Axis::kTp, work.tokens * real(tp - 1) / real(tp));
    seconds += (4 * forward + 6 * behind) * one;
    seconds += (backward ? 4 : 2) * one;  // embedding and head
  }
  const bool cut = c.layout.cp > 1 && real(c.work.longest) > work.tokens;
  if (cut) {
    const double bytes = work.tokens * real(2 * c.shape.kv_heads / c.layout.tp * c.shape.head_dim) *
                         real(c.options.element_bytes * (c.layout.cp - 1));
    seconds += (forward + 2 * behind) * link(c, Axis::kCp).seconds(bytes);
  }
  if (const int64_t ranks = c.layout.ep * c.layout.etp; ranks > 1) {
    const ExpertRows sent = expert_rows(c);
    const double away = work.tokens / real(c.layout.tp) * real(ranks - 1) / real(ranks);
    const double there_and_back =
        rows_seconds(c, Axis::kEtpEp, away * sent.out) + rows_seconds(c, Axis::kEtpEp, away * sent.back);
    seconds += (real(experts) + (backward ? real(experts) : 0)) * there_and_back;
  }
  return seconds;
}

// Of one message of `bytes` of a rank's parameters, in buckets, to or from the others that share them.
double bucket_seconds(const Case& c, int64_t params, int64_t bytes, Axis axis) {
  const int64_t ranks = group_size(c.layout, axis);
  if (ranks == 1 || params == 0) return 0;
  const double buckets = real(up(params, kBucketElements));
  const double each = real(params) / buckets * real(bytes) * real(ranks - 1) / real(ranks);
  return buckets * link(c, axis).seconds(each);
}

struct OptimizerSeconds {
  double update = 0, exchanges = 0;
};
OptimizerSeconds optimizer_seconds(const Case& c, int64_t micro_batches, double compute) {
  const PlanOptions& o = c.options;
  OptimizerSeconds worst;
  for (int64_t stage = 0; stage < c.layout.pp; ++stage) {
    const Held of_rank = held(c, stage);
    const int64_t state = o.sharding == StateSharding::kNothing ? of_rank.params : of_rank.owned;
    // Master copy and moments are read and written, the gradient read, the weight written, gradients zeroed.
    const double update =
        (real(state) * real(28 + o.element_bytes) + real(of_rank.params * o.gradient_bytes)) / c.devices.rates.copy;
    const auto each = [&](int64_t bytes) {
      return bucket_seconds(c, of_rank.params - of_rank.experts, bytes, Axis::kDpCp) +
             bucket_seconds(c, of_rank.experts, bytes, Axis::kEdp);
    };
    const double reduce = each(o.gradient_bytes), gather = each(o.element_bytes);
    double exchanges = reduce + (o.sharding == StateSharding::kNothing ? reduce : gather);
    if (o.sharding >= StateSharding::kGradients) exchanges += real(micro_batches - 1) * reduce;
    // Weights come ahead of forward and of backward; what products do not hide remains.
    if (o.sharding == StateSharding::kWeights)
      exchanges += std::max(0.0, 2 * real(micro_batches) * gather - compute) - gather;
    if (update + exchanges > worst.update + worst.exchanges) worst = {update, exchanges};
  }
  return worst;
}

}  // namespace

double forward_seconds(const Case& c, const LocalShape& local, int64_t layer, const PassWork& work) {
  return layer_seconds(c, local, layer, work).forward;
}

double values_seconds(const Case& c) {
  const RankPasses passes = logprob_passes_of(c, 1);
  return run_passes(c, pass_costs(c, passes.each, {}), passes.micro_batches, false).working;
}

LogprobPass logprob_pass(const Case& c, double share) {
  const RankPasses passes = logprob_passes_of(c, share);
  const Passes forward = run_passes(c, pass_costs(c, passes.each, {}), passes.micro_batches, false);
  return {forward.working, forward.waiting, real(passes.micro_batches) * exchange_seconds(c, passes.each, false, 0)};
}

void add_previous_pass(const Case& c, double share, PlannedTime& time) {
  if (share == 0) return;
  const LogprobPass pass = logprob_pass(c, share);
  time.previous = pass.working;
  time.bubble += pass.waiting;
  time.pass_exchanges += pass.exchanges;
}

PlannedTime plan_time(const Case& c, const PlannedMemory& memory) {
  PlannedTime time;
  if (c.work.reference) {
    const LogprobPass reference = logprob_pass(c, 1);
    time.reference = reference.working;
    time.bubble += reference.waiting;
    time.pass_exchanges += reference.exchanges;
  }
  const RankPasses passes = training_passes_of(c);
  const double steps = real(c.work.optimizer_steps);
  const int64_t again = memory.kept.input;
  const Passes training = run_passes(c, pass_costs(c, passes.each, memory.kept), passes.micro_batches, true);
  const OptimizerSeconds optimizer = optimizer_seconds(c, passes.micro_batches, training.working);
  time.training = steps * training.working;
  time.bubble += steps * training.waiting;
  time.optimizer = steps * optimizer.update;
  time.gradient_exchanges = steps * optimizer.exchanges;
  time.pass_exchanges +=
      steps * real(passes.micro_batches) * exchange_seconds(c, passes.each, true, again * c.pieces());
  return time;
}

}  // namespace trireme::planning
