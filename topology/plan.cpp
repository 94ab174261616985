#include "topology/plan.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "topology/combine_blocks.h"
#include "topology/plan_decode.h"
#include "topology/plan_parts.h"
#include "topology/refit.h"

namespace trireme {
namespace {

constexpr std::pair<StateSharding, const char*> kShardings[] = {{StateSharding::kNothing, "no_shard"},
                                                                {StateSharding::kOptimizer, "optim"},
                                                                {StateSharding::kGradients, "optim_grads"},
                                                                {StateSharding::kWeights, "optim_grads_params"}};

}  // namespace

const char* to_string(StateSharding sharding) {
  for (const auto& [value, name] : kShardings) {
    if (value == sharding) return name;
  }
  fail_internal("unknown sharding");
}

std::optional<StateSharding> parse_sharding(std::string_view name) {
  for (const auto& [value, known] : kShardings) {
    if (name == known) return value;
  }
  return std::nullopt;
}

std::vector<std::string> sharding_names() {
  std::vector<std::string> names;
  for (const auto& [value, name] : kShardings) names.emplace_back(name);
  return names;
}

int64_t peer_buffer_bytes(const Layout& training, const Layout& generation) {
  constexpr int64_t kMailboxes = int64_t{64} << 20;  // of all others, and one that is not used (peer_copies.cpp)
  constexpr int64_t kLines = int64_t{128} << 20;     // in both directions (peer_lines.cpp)
  int64_t bytes = planning::receive_buffer_bytes(training);
  if (const int64_t tp = training.tp; tp > 1) bytes += kMailboxes / (tp - 1) * tp;
  if (generation.tp > 1 && generation != training) bytes += planning::kReceiveBuffer;
  if (training.pp > 1) bytes += kLines;
  return bytes;
}

int64_t MemoryParts::total() const {
  return weights + reference + copy + gradients + optimizer + activations + logits + exchange + cache + critic +
         reward_model;
}

int64_t PlannedMemory::peak() const {
  return std::max({generation.total(), training.total() + (lends_cache ? 0 : generation.cache), early, critic_turn});
}

namespace planning {

int64_t receive_buffer_bytes(const Layout& layout) {
  int64_t bytes = layout.tp > 1 ? kReceiveBuffer : 0;
  // Of the same ranks one group has both.
  if (layout.ep * layout.etp > 1 && group_of(layout, Axis::kEtpEp, 0) != group_of(layout, Axis::kTp, 0))
    bytes += kReceiveBuffer;
  return bytes;
}

std::vector<Range> layers_of(const Case& c, int64_t stage) {
  return stage_pieces(c.shape.layers, c.layout.pp, stage, c.options.stages);
}

LocalShape shape_of(const Case& c, int64_t stage) {
  const ModelShape& m = c.shape;
  LocalShape local;
  local.tp = c.layout.tp;
  for (const Range& piece : layers_of(c, stage)) local.layers += piece.size();
  local.hidden = m.hidden;
  local.head_dim = m.head_dim;
  local.heads = m.heads / local.tp;
  local.kv_heads = m.kv_heads / local.tp;
  local.intermediate = m.intermediate / local.tp;
  local.experts = m.experts / c.layout.ep;
  local.experts_per_token = m.experts_per_token;
  local.moe_intermediate = m.moe_intermediate / local.tp;
  if (m.experts > 0) local.received = expert_rows_out(m.experts_per_token, c.layout.ep, c.layout.etp);
  local.padded_vocab = padded_vocab(m.vocab, local.tp) / local.tp;
  local.vocab = std::min(local.padded_vocab, m.vocab);
  local.embedding = stage == 0;
  local.head = stage == c.layout.pp - 1;
  local.value_head = m.value_head;
  local.qk_norm = m.qk_norm;
  return local;
}

Held held(const Case& c, int64_t stage) {
  const RankMemory of_rank =
      rank_memory(c.shape, c.layout, rank_of(c.layout, 0, 0, 0, stage), {.stages = c.options.stages});
  Held held;
  held.dense_ranks = group_size(c.layout, Axis::kDpCp);
  held.expert_ranks = group_size(c.layout, Axis::kEdp);
  held.params = of_rank.dense_params + of_rank.expert_params;
  held.experts = of_rank.expert_params;
  held.owned = up(of_rank.dense_params, held.dense_ranks) + up(of_rank.expert_params, held.expert_ranks);
  return held;
}

PassWork work_of_step(const Workload& work, bool shared) {
  PassWork all;
  const size_t of_prompt = work.outputs.size() / work.prompts.size();
  const auto add = [&all](double tokens, double before) {
    all.tokens += tokens;
    all.pairs += tokens * (tokens + 1) / 2 + tokens * before;
  };
  for (size_t p = 0; p < work.prompts.size(); ++p) {
    const double prompt = real(work.prompts[p]);
    if (shared) add(prompt, 0);
    for (size_t i = p * of_prompt; i < (p + 1) * of_prompt; ++i) {
      const double output = real(work.outputs[i]);
      shared ? add(output - 1, prompt) : add(prompt + output - 1, 0);
      all.scored += output;
    }
  }
  return all;
}

namespace {

// `share` of a step's samples is dealt to the data parallel ranks in micro-batches of so many samples, or tokens.
RankPasses deal_passes(const Case& c, double share, int64_t of_samples, int64_t of_tokens) {
  const PassWork all = work_of_step(c.work, c.work.share_prompts) * share;
  const double samples = real(static_cast<int64_t>(c.work.outputs.size())) * share;
  const double count = of_samples > 0 ? samples / real(of_samples) : all.tokens / real(of_tokens);
  const double batches = std::max(1.0, std::ceil(count));
  const double of_rank = std::max(1.0, batches / real(c.layout.dp));
  RankPasses passes;
  passes.micro_batches = static_cast<int64_t>(std::ceil(of_rank));
  passes.each = all * (of_rank / batches / real(passes.micro_batches) / real(c.layout.cp));
  return passes;
}

}  // namespace

RankPasses training_passes_of(const Case& c) {
  return deal_passes(c, 1 / real(c.work.optimizer_steps), c.work.train_samples, c.work.train_tokens);
}

RankPasses logprob_passes_of(const Case& c, double share) {
  return deal_passes(c, share, c.work.logprob_samples, c.work.logprob_tokens);
}

ExpertRows expert_rows(const Case& c) {
  if (c.layout.ep * c.layout.etp == 1) return {};
  const int64_t chosen = c.shape.experts_per_token;
  const int64_t blocks = combine_blocks(c.shape.experts, c.options.combine_blocks, c.layout.ep);
  return {expert_rows_out(chosen, c.layout.ep, c.layout.etp), real(c.layout.etp) * parts_reached(blocks, chosen)};
}

const LinkRates& link(const Case& c, Axis axis) {
  const bool inside = c.devices.of_node <= 0 || inside_node(c.layout, axis, c.devices.of_node);
  return inside ? c.devices.rates.in_node : c.devices.rates.between_nodes;
}

}  // namespace planning

LayoutPlan plan_layout(const ModelShape& shape, const Layout& layout, const Workload& work, const PlanOptions& options,
                       const PlanDevices& devices, const PlannedBeside& beside) {
  TRIREME_CHECK(!work.prompts.empty() && !work.outputs.empty() && work.outputs.size() % work.prompts.size() == 0,
                "plan_layout: as many responses for each prompt");
  const planning::BesidePlan others(layout, beside, devices);
  const planning::Case c{shape, layout, work, options, devices, others.critic_bytes(), others.reward_model_bytes()};
  LayoutPlan plan;
  plan.layout = layout;
  PlanOptions of_generation = options;
  if (options.fold_pipeline) of_generation.stages = {};
  const Layout other = generation_layout(layout, options.generation_tp, options.fold_pipeline);
  const bool asked = options.fold_pipeline || (options.generation_tp > 0 && options.generation_tp != layout.tp);
  bool apart = asked && other != layout;
  if (apart) {
    const LayoutReport report = check_layout(
        other,
        {.world = layout.world(), .gpus_per_node = devices.of_node, .shape = &shape, .stages = of_generation.stages});
    if (!report.ok()) plan.problems.push_back("generation in a layout of its own: " + report.errors.front());
    if (shape.experts > 0) plan.problems.push_back("experts generate as they are trained, in no layout of its own");
    apart = plan.problems.empty();
  }
  const planning::Case g{shape, apart ? other : layout, work, of_generation, devices};
  const bool needs_whole = options.sharding == StateSharding::kGradients || options.sharding == StateSharding::kWeights;
  if (layout.pp > 1 && needs_whole) {
    plan.problems.push_back(std::string(to_string(options.sharding)) + " with pp " + std::to_string(layout.pp) +
                            " would reduce every gradient in each micro-batch of each stage; with a pipeline only "
                            "no_shard and optim");
  }
  planning::plan_memory(c, g, plan);
  plan.time = planning::plan_time(c, plan.memory);
  others.add_to(options, work.longest, plan);
  if (!work.generates) return plan;
  if (work.engines > 0) {
    planning::plan_engines(c, others.critic_is_whole() || layout.world() == 1, plan);
    return plan;
  }
  if (work.age > 0) {
    planning::plan_carry_over(g, plan.memory.cache_rows, plan.time);
  } else {
    planning::plan_rollout(g, plan.memory.cache_rows, plan.time);
  }
  // Sums over other tensor ranks have other bits.
  const bool other_bits = apart && other.tp != layout.tp;
  planning::add_previous_pass(c, other_bits ? 1 : work.previous_pass ? plan.time.older : 0, plan.time);
  if (apart) plan.time.refit = planning::refit_seconds(c, g);
  if (!apart) planning::plan_background(c, others.critic_is_whole(), plan.time);
  return plan;
}

void rank_plans(std::vector<LayoutPlan>& plans) {
  std::stable_sort(plans.begin(), plans.end(), [](const LayoutPlan& a, const LayoutPlan& b) {
    if (a.fits() != b.fits()) return a.fits();
    return a.fits() ? a.time.step() < b.time.step() : a.least_memory < b.least_memory;
  });
}

std::vector<LayoutPlan> rank_layouts(const ModelShape& shape, const std::vector<Layout>& layouts, const Workload& work,
                                     const PlanOptions& options, const PlanDevices& devices,
                                     const PlannedBeside& beside) {
  std::vector<LayoutPlan> plans;
  plans.reserve(layouts.size());
  for (const Layout& layout : layouts) plans.push_back(plan_layout(shape, layout, work, options, devices, beside));
  rank_plans(plans);
  return plans;
}

}  // namespace trireme
