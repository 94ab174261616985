// Memory of the ranks of a layout, stage by stage.
#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "topology/pipeline.h"
#include "topology/plan_parts.h"

namespace trireme::planning {
namespace {

constexpr int64_t kReductions = 9;  // under way at once: the optimizer waits for the oldest of more than eight
constexpr int64_t kCacheLeaves = int64_t{1} << 30;   // what the cache leaves free in any case (kDriverBytes)
constexpr int64_t kRefitBytes = int64_t{512} << 20;  // of buckets under way (Refit)
constexpr int64_t kLinkRows = 4;                     // a stage sends and awaits one of each direction
constexpr int64_t kTableBatches = 64;  // with more micro-batches than several rounds of all stages nothing more is kept

std::string size_text(int64_t bytes) { return format_bytes(static_cast<uint64_t>(std::max<int64_t>(0, bytes))); }

int64_t bytes_of(double value) { return static_cast<int64_t>(value); }

bool shards(const Case& c, StateSharding at_least) { return c.options.sharding >= at_least; }

// Rows of a micro-batch of `tokens`: samples are dealt as if each had its prompt, so that shared ones make it smaller.
int64_t rows_of(const Workload& work, int64_t tokens) {
  if (work.share_prompts) {
    const double share = work_of_step(work, true).tokens / work_of_step(work, false).tokens;
    tokens = std::max(std::min(work.longest, tokens), bytes_of(std::ceil(share * real(tokens))));
  }
  return tokens;
}

// Of the largest one of training on a rank.
int64_t training_rows(const Case& c) {
  const Workload& work = c.work;
  const int64_t tokens = work.train_samples > 0 ? work.train_samples * work.longest : work.train_tokens;
  return up(rows_of(work, tokens), c.layout.cp);
}

int64_t early_rows(const Case& c) { return rows_of(c.work, std::max(kBackgroundTokens, c.work.longest)); }

// Stages are the same ones, or all are folded into one.
int64_t stage_of_generation(const Case& g, int64_t stage) { return g.layout.pp == 1 ? 0 : stage; }

// What is there whatever is computed.
void add_state(const Case& c, const Case& g, int64_t stage, MemoryParts& training, MemoryParts& generation) {
  const Held of_rank = held(c, stage);
  const int64_t params = of_rank.params, owned = of_rank.owned;
  const PlanOptions& o = c.options;
  const bool shared = owned < params;
  const int64_t state = shards(c, StateSharding::kOptimizer) ? owned : params;
  // Units of gradients and weights are shared where the whole model is, not where only its experts are.
  const bool units = of_rank.dense_ranks > 1;
  training.weights = (units && shards(c, StateSharding::kWeights) ? owned : params) * o.element_bytes;
  const bool apart = g.layout != c.layout;  // then weights that ranks share stay so
  generation.weights = apart ? training.weights : params * o.element_bytes;
  if (apart) {
    generation.copy = held(g, stage_of_generation(g, stage)).params * o.element_bytes;
    generation.exchange = kRefitBytes;
  }
  generation.exchange += peer_buffer_bytes(c.layout, g.layout);
  if (c.work.reference) training.reference = generation.reference = training.weights;
  // In float32 the weights of the only rank are their own master copy.
  training.optimizer = state * (o.element_bytes == 4 && !shared ? 8 : 12);
  const int64_t whole = units && shards(c, StateSharding::kGradients) ? 0 : params * o.gradient_bytes;
  // Shared gradients are summed into a place of their own; others are read where backward leaves them.
  const int64_t sums = 4 * (units && shards(c, StateSharding::kGradients) ? owned
                            : shards(c, StateSharding::kOptimizer)        ? of_rank.summed_owned()
                                                                          : of_rank.summed_params());
  training.gradients = whole + sums;
  generation.optimizer = training.optimizer;
  training.critic = generation.critic = c.critic_bytes;
  training.reward_model = generation.reward_model = c.reward_model_bytes;
  // Whole ones lend their memory to the copy.
  generation.gradients = sums + std::max<int64_t>(0, whole - generation.copy);
}

// Buffers while training.
int64_t exchange_bytes(const Case& c, int64_t stage, const LocalShape& local) {
  const Held of_rank = held(c, stage);
  const int64_t params = of_rank.params, owned = of_rank.owned;
  const int64_t element = c.options.element_bytes, rows = training_rows(c);
  int64_t bytes = 0;
  if (owned < params && shards(c, StateSharding::kOptimizer)) {
    // Units are there whole while a pass needs them: at the head, when all activations are kept, the head's and a
    // layer's or two.
    const int64_t table = local.padded_vocab * local.hidden;
    const int64_t layer =
        (params - (c.shape.tied || c.shape.value_head ? 1 : 2) * table) / std::max<int64_t>(1, local.layers);
    const bool units = of_rank.dense_ranks > 1 && shards(c, StateSharding::kGradients);
    const int64_t summed = units ? table : kReductions * std::min(kBucketElements, params);
    if (c.options.gradient_bytes != 4) bytes += up(summed * owned, params) * c.options.gradient_bytes;
    if (units) bytes += (table + layer) * c.options.gradient_bytes;
    if (units && shards(c, StateSharding::kWeights)) bytes += (table + 2 * layer) * element;
  }
  if (c.layout.tp > 1) bytes += rows * local.hidden * element;  // parts of a sum
  if (c.layout.pp > 1) bytes += kLinkRows * up(rows, local.tp) * local.hidden * element;
  const ExpertRows sent = expert_rows(c);  // both ways, of values and of gradients
  bytes += bytes_of(2 * (sent.out + sent.back) * real(rows * local.hidden * element));
  return bytes;
}

// What an engine step wants besides weights and cache.
void add_engine_step(const Case& c, const LocalShape& local, MemoryParts& generation) {
  const int64_t rows = c.work.prefill_tokens + c.work.places;
  const int64_t wide = std::max(local.intermediate, local.experts_per_token * (local.moe_intermediate + local.hidden));
  generation.activations = rows * c.options.element_bytes *
                           (8 * local.hidden + 2 * (local.query_width() + 2 * local.key_width()) + 3 * wide);
  if (local.head) generation.logits = 4 * c.work.places * local.padded_vocab;
}

struct StageMemory {
  MemoryParts training, generation;
  ActivationBytes bytes;
  int64_t layers = 0;  // of one piece
  int64_t rows = 0, in_flight = 1;
  int64_t row_bytes = 0;   // of the cache
  int64_t cache_rows = 0;  // that it has room for
  KeptLayers kept;
  bool lends_cache = false;
  bool early = false;  // gradients are computed under generation
};

// Tokens that a stage's cache holds beside the rest of `memory`.
int64_t room_for_rows(const Case& c, const StageMemory& s, int64_t memory) {
  if (c.options.cache_rows > 0) return c.options.cache_rows;
  const int64_t left = memory - s.generation.total();
  const int64_t bytes = std::min(bytes_of(c.options.cache_fraction * real(left)), left - kCacheLeaves);
  return std::clamp<int64_t>(bytes / std::max<int64_t>(1, s.row_bytes), 0, c.work.places * c.work.longest);
}

StageMemory stage_memory(const Case& c, const Case& g, int64_t stage, const PipelineTable& table, int64_t memory) {
  StageMemory s;
  const LocalShape local = shape_of(c, stage);
  s.layers = local.layers / c.pieces();
  s.rows = training_rows(c);
  const bool cut = c.layout.cp > 1 && c.work.longest > s.rows;
  s.bytes = activation_bytes(local, c.options.element_bytes, c.options.gradient_bytes, cut ? real(c.layout.cp) : 0);
  s.in_flight = std::max<int64_t>(1, table.most_in_flight.at(static_cast<size_t>(stage)));
  add_state(c, g, stage, s.training, s.generation);
  s.training.exchange = exchange_bytes(c, stage, local) + peer_buffer_bytes(c.layout, g.layout);
  s.training.logits = s.bytes.fixed;
  if (!c.work.generates) {
    s.generation = {};
    return s;
  }
  const LocalShape of_generation = shape_of(g, stage_of_generation(g, stage));
  add_engine_step(c, of_generation, s.generation);
  s.row_bytes = 2 * of_generation.layers * of_generation.key_width() * c.options.element_bytes;
  s.cache_rows = room_for_rows(c, s, memory);
  s.early = has_early_gradients(c) && c.layout == g.layout;
  return s;
}

// Of one piece's layers, when nothing or all that may be is computed again.
KeptLayers kept_at_most(const Case& c, int64_t layers) {
  if (c.options.fit_recompute) return {.whole = layers};
  const int64_t again = std::min(c.options.recomputed_layers, layers);
  const int64_t others = layers - again;
  if (!c.options.cheap_recompute) return {.input = again, .whole = others};
  return c.options.expert_recompute ? KeptLayers{.input = again, .experts = others}
                                    : KeptLayers{.input = again, .cheap = others};
}
KeptLayers kept_at_least(const Case& c, int64_t layers) {
  return c.options.fit_recompute ? KeptLayers{.input = layers} : kept_at_most(c, layers);
}

// Activations that stay beside the rest of `memory`; the cache lends its own where something would be computed again,
// unless it keeps what it holds.
void keep_activations(const Case& c, StageMemory& s, int64_t memory) {
  s.training.activations = 0;
  const int64_t room = memory - s.training.total() + s.training.logits;
  const auto fit = [&](int64_t bytes) { return fit_layers(s.bytes, s.layers, s.rows, s.in_flight, bytes); };
  const FittedLayers beside = fit(room - s.generation.cache);
  s.lends_cache = !c.options.keeps_cache && beside.kept.whole < s.layers;
  if (c.options.fit_recompute) {
    s.kept = s.lends_cache ? fit(room).kept : beside.kept;
  } else {
    s.kept = kept_at_most(c, s.layers);
  }
  ActivationBytes of_layers = s.bytes;
  of_layers.fixed = 0;
  s.training.activations = activation_total(of_layers, s.kept, s.rows, s.in_flight);
  s.training.logits = activation_total(s.bytes, s.kept, s.rows, s.in_flight) - s.training.activations;
}

// What is there while gradients are computed beside the last responses, but for their activations: generation's, whose
// few samples want next to nothing besides.
int64_t beside_early(const MemoryParts& generation) {
  return generation.total() - generation.activations - generation.logits;
}

int64_t early_total(const Case& c, const StageMemory& s, int64_t memory) {
  const int64_t beside = beside_early(s.generation), rows = early_rows(c);
  const KeptLayers kept = c.options.fit_recompute ? fit_layers(s.bytes, s.layers, rows, 1, memory - beside).kept
                                                  : kept_at_most(c, s.layers);
  return beside + activation_total(s.bytes, kept, rows, 1);
}

// From how much on a cache by the fraction stays beside training that wants `training`, generation wanting `generation`
// without it. The cache is the least of three: a share of what is free, all of it but what it leaves, and what all
// places can use; what each is beside grows with the memory, so that the first that does decides.
int64_t least_beside_cache(const Case& c, const StageMemory& s, int64_t training, int64_t generation) {
  const double fraction = c.options.cache_fraction;
  int64_t least = training + c.work.places * c.work.longest * s.row_bytes;
  if (training <= generation + kCacheLeaves) return 0;
  if (fraction < 1)
    least = std::min(least, bytes_of((real(training) - fraction * real(generation)) / (1 - fraction)) + 1);
  return least;
}

// With gradients under generation: their least activations beside a cache for the longest sample.
int64_t least_with_early(const Case& c, const StageMemory& s, const MemoryParts& generation, int64_t cache) {
  const int64_t most = activation_total(s.bytes, kept_at_least(c, s.layers), early_rows(c), 1);
  const int64_t with_room = c.options.fit_recompute ? bytes_of(real(most) / kUsableForActivations) + 1 : most;
  const int64_t early = beside_early(generation) + with_room;
  return c.options.cache_rows > 0 ? early + cache
                                  : std::max(early + cache, least_beside_cache(c, s, early, generation.total()));
}

// Of a device besides all else of generation: room for a cache of the longest sample.
int64_t room_for_cache(const Case& c, int64_t row_bytes) {
  const int64_t cache = std::max(c.options.cache_rows, c.work.longest) * row_bytes;
  if (c.options.cache_rows > 0) return cache;
  return std::max(cache + kCacheLeaves, bytes_of(real(cache) / c.options.cache_fraction) + 1);
}

// Of a device, for this stage: the training with all computed again that may be, and a cache for the longest sample.
int64_t least_memory(const Case& c, const StageMemory& s) {
  MemoryParts training = s.training, generation = s.generation;
  training.activations = training.logits = generation.cache = 0;
  const int64_t most = activation_total(s.bytes, kept_at_least(c, s.layers), s.rows, s.in_flight);
  const int64_t with_room = c.options.fit_recompute ? bytes_of(real(most) / kUsableForActivations) + 1 : most;
  int64_t least = training.total() + with_room;
  if (c.work.generates) {
    const int64_t cache = std::max(c.options.cache_rows, c.work.longest) * s.row_bytes;
    if (c.options.keeps_cache) {
      least = c.options.cache_rows > 0 ? least + cache
                                       : std::max(least, least_beside_cache(c, s, least, generation.total()));
    }
    least = std::max(least, generation.total() + room_for_cache(c, s.row_bytes));
    if (s.early) least = std::max(least, least_with_early(c, s, generation, cache));
  }
  return least + c.devices.rates.outside_bytes;
}

// Why the device does not do, by the stage that wants most.
void add_problem(const Case& c, const std::vector<StageMemory>& stages, int64_t memory, LayoutPlan& plan) {
  if (plan.least_memory <= c.devices.memory()) return;
  size_t stage = 0;
  for (size_t s = 0; s < stages.size(); ++s) {
    if (least_memory(c, stages[s]) == plan.least_memory) stage = s;
  }
  const std::string where = c.layout.pp > 1 ? " on stage " + std::to_string(stage) : "";
  plan.problems.push_back("a device must have " + size_text(plan.least_memory) + " at the least" + where + ", not " +
                          size_text(c.devices.memory()) + " (" + size_text(memory) +
                          " for tensors): for everything computed again that may be and a cache for one sample of " +
                          std::to_string(c.work.longest) + " tokens");
}

}  // namespace

void plan_memory(const Case& c, const Case& generation, LayoutPlan& plan) {
  const int64_t memory = c.devices.memory() - c.devices.rates.outside_bytes;
  PlannedMemory& m = plan.memory;
  m.micro_batches = training_passes_of(c).micro_batches;
  std::vector<StageMemory> stages;
  const PipelineTable table = training_passes(
      c.layout.pp, c.pieces(), std::min(m.micro_batches, std::max(kTableBatches, 4 * c.layout.pp * c.pieces())));
  for (int64_t stage = 0; stage < c.layout.pp; ++stage)
    stages.push_back(stage_memory(c, generation, stage, table, memory));
  m.cache_rows = stages.front().cache_rows;
  for (const StageMemory& s : stages) m.cache_rows = std::min(m.cache_rows, s.cache_rows);
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    StageMemory& s = stages[stage];
    s.generation.cache = m.cache_rows * s.row_bytes;
    keep_activations(c, s, memory);
    plan.least_memory = std::max(plan.least_memory, least_memory(c, s));
    PlannedMemory of_stage = m;
    of_stage.stage = static_cast<int64_t>(stage);
    of_stage.training = s.training;
    of_stage.generation = s.generation;
    of_stage.lends_cache = s.lends_cache;
    of_stage.kept = s.kept;
    if (s.early) of_stage.early = early_total(c, s, memory);
    of_stage.in_flight = s.in_flight;
    if (stage == 0 || of_stage.peak() > m.peak()) m = of_stage;
  }
  add_problem(c, stages, memory, plan);
}

namespace {

// Besides what ranks map of each other: parts of weights that lie in several places of the own ones go through a
// chunk, one after the other.
int64_t engine_exchange_bytes(const EnginesPlan& engines) {
  constexpr int64_t kChunk = int64_t{32} << 20;  // trainer/parallel/weight_protocol.h
  return receive_buffer_bytes(engines.layout) + (engines.alike ? 0 : kChunk);
}

}  // namespace

// It takes the second buffer where there is memory for it, before it knows what is left for the cache.
void plan_engine_memory(const Case& engine, EnginesPlan& engines, std::vector<std::string>& problems) {
  const int64_t memory = engine.devices.memory() - engine.devices.rates.outside_bytes;
  StageMemory s;
  const LocalShape local = shape_of(engine, 0);
  s.row_bytes = 2 * local.layers * local.key_width() * engine.options.element_bytes;
  s.generation.weights = held(engine, 0).params * engine.options.element_bytes;
  const int64_t weights = s.generation.weights;
  add_engine_step(engine, local, s.generation);
  s.generation.exchange = engine_exchange_bytes(engines);
  const int64_t rest = s.generation.total() - weights + room_for_cache(engine, s.row_bytes);
  engines.second_buffer = 2 * weights <= memory;
  if (engines.second_buffer) s.generation.copy = weights;
  engines.cache_rows = room_for_rows(engine, s, memory);
  s.generation.cache = engines.cache_rows * s.row_bytes;
  engines.memory = s.generation;
  // A device that holds the rest in the place of the second buffer would take that.
  const bool second = engines.second_buffer || rest >= weights;
  engines.least_memory = (second ? 2 : 1) * weights + rest + engine.devices.rates.outside_bytes;
  if (engines.least_memory <= engine.devices.memory()) return;
  problems.push_back("an engine's device must have " + size_text(engines.least_memory) + " at the least, not " +
                     size_text(engine.devices.memory()) + ": for the weights" +
                     (second ? ", the second buffer that new ones come into" : "") + " and a cache for one sample of " +
                     std::to_string(engine.work.longest) + " tokens");
}

}  // namespace trireme::planning
