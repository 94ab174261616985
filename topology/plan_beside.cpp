// A critic and a reward model beside the policy: what they have, and their turns.
#include <algorithm>

#include "base/text.h"
#include "topology/plan_parts.h"

namespace trireme::planning {

BesidePlan::BesidePlan(const Layout& policy, const PlannedBeside& models, const PlanDevices& devices)
    : models_(models), devices_(devices), replicas_{.dp = policy.world()} {
  if (!models.critic) return;
  work_ = models.critic->work;
  work_.generates = work_.reference = false;
  options_ = models.critic->options;
  options_.generation_tp = 0;
  options_.fold_pipeline = false;
  layout_ = models.critic->layout;
  layout_.dp = derive_dp(layout_, policy.world()).value_or(layout_.dp);
  const LayoutReport report = check_layout(layout_, {.world = policy.world(),
                                                     .shape = &models.critic->shape,
                                                     .stages = options_.stages,
                                                     .stage_section = options_.stage_section});
  if (!report.ok()) problem_ = "the critic cannot be split so: " + report.errors.front();
}

// The critic's training where `others` bytes of the device are somebody else's. `values`: its time has their passes,
// as a reference model's.
LayoutPlan BesidePlan::critic_beside(int64_t others, bool values) const {
  PlanDevices left = devices_;
  left.memory_bytes = std::max<int64_t>(1, devices_.memory() - others);
  const Case c{models_.critic->shape, layout_, work_, options_, left};
  LayoutPlan plan;
  plan.layout = layout_;
  plan_memory(c, c, plan);
  Workload timed = work_;
  timed.reference = values;
  plan.time = plan_time({c.shape, c.layout, timed, c.options, c.devices}, plan.memory);
  return plan;
}

int64_t BesidePlan::critic_bytes() const {
  if (!models_.critic || !problem_.empty()) return 0;
  const MemoryParts state = critic_beside(0, /*values=*/false).memory.training;
  return state.weights + state.gradients + state.optimizer;
}

int64_t BesidePlan::reward_model_bytes() const {
  if (!models_.reward_model) return 0;
  return parameter_count(models_.reward_model->shape) * models_.reward_model->options.element_bytes;
}

// The policy's weights are those of generation until its own turn. The cache stays, unless backward would have to
// compute something again.
void BesidePlan::add_critic(const PlanOptions& policy, int64_t longest, LayoutPlan& plan) const {
  const MemoryParts &training = plan.memory.training, &generation = plan.memory.generation;
  const int64_t state = std::max(training.weights, generation.weights) + training.reference + training.gradients +
                        training.optimizer + training.reward_model;
  LayoutPlan turn = critic_beside(state + generation.cache, /*values=*/true);
  const KeptLayers& kept = turn.memory.kept;
  const bool whole = kept.input + kept.cheap + kept.experts == 0;
  const bool lends = !policy.keeps_cache && !(whole && turn.fits());
  if (lends) turn = critic_beside(state, /*values=*/true);
  const int64_t beside = state + (lends ? 0 : generation.cache);
  plan.memory.critic_turn = beside + turn.memory.training.total();
  int64_t least = state + turn.least_memory;
  if (policy.keeps_cache && plan.memory.cache_rows > 0) {
    const int64_t rows = policy.cache_rows > 0 ? policy.cache_rows : longest;
    least += generation.cache / plan.memory.cache_rows * rows;
  }
  plan.least_memory = std::max(plan.least_memory, least);
  const int64_t wanted = std::max(least, plan.memory.critic_turn + devices_.rates.outside_bytes);
  if (wanted > devices_.memory()) {
    plan.problems.push_back("the critic's training wants a device of " + format_bytes(static_cast<uint64_t>(wanted)) +
                            " beside the policy's state" + (policy.keeps_cache ? " and cache" : "") + ", not " +
                            format_bytes(static_cast<uint64_t>(devices_.memory())));
  }
  plan.time.values = turn.time.reference;
  plan.time.value_training = turn.time.training + turn.time.optimizer;
  plan.time.bubble += turn.time.bubble;
  plan.time.pass_exchanges += turn.time.pass_exchanges;
  plan.time.gradient_exchanges += turn.time.gradient_exchanges;
}

void BesidePlan::add_to(const PlanOptions& policy, int64_t longest, LayoutPlan& plan) const {
  if (!problem_.empty()) plan.problems.push_back(problem_);
  if (models_.critic && problem_.empty()) add_critic(policy, longest, plan);
  if (const auto& scorer = models_.reward_model)
    plan.time.scores = values_seconds({scorer->shape, replicas_, scorer->work, scorer->options, devices_});
}

}  // namespace trireme::planning

namespace trireme {

LayoutPlan plan_critic(const PlannedModel& critic, const Layout& layout, const PlanDevices& devices) {
  Workload work = critic.work;
  work.generates = work.reference = work.early_gradients = false;
  PlanOptions options = critic.options;
  options.generation_tp = 0;
  options.fold_pipeline = false;
  LayoutPlan plan = plan_layout(critic.shape, layout, work, options, devices);
  work.reference = true;  // whose passes are those of values
  const PlannedTime passes = planning::plan_time({critic.shape, layout, work, options, devices}, plan.memory);
  plan.time = {};
  plan.time.values = passes.reference;
  plan.time.value_training = passes.training + passes.optimizer;
  plan.time.bubble = passes.bubble;
  plan.time.pass_exchanges = passes.pass_exchanges;
  plan.time.gradient_exchanges = passes.gradient_exchanges;
  return plan;
}

}  // namespace trireme
