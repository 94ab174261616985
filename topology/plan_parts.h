// The parts of a plan: memory and time of a layout, each from a rank's sizes. Internal to plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "topology/plan.h"

namespace trireme::planning {

inline double real(int64_t value) { return static_cast<double>(value); }
inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline constexpr int64_t kBucketElements = int64_t{1} << 24;  // AdamWOptions::bucket_elements

// What a group's ranks map of each other's memory to exchange rows (trainer/parallel/cuda/peer_exchange.cpp).
inline constexpr int64_t kReceiveBuffer = int64_t{96} << 20;
// On a rank, of tensor ranks and of those that share experts.
int64_t receive_buffer_bytes(const Layout& layout);

// What is planned; all of it outlives the call.
struct Case {
  const ModelShape& shape;
  const Layout& layout;
  const Workload& work;
  const PlanOptions& options;
  const PlanDevices& devices;
  // Of a rank, whatever the policy does: what a critic and a reward model have.
  int64_t critic_bytes = 0, reward_model_bytes = 0;
  int64_t replicas() const { return layout.dp * layout.cp; }  // in generation
  int64_t pieces() const { return layout.pp > 1 ? options.stages.virtual_stages : 1; }
};

// Layers of each piece of a stage.
std::vector<Range> layers_of(const Case& c, int64_t stage);
// Sizes by which a stage's activations are counted. The width of experts is that of a token's row, whether tensor ranks
// share the rows or the width.
LocalShape shape_of(const Case& c, int64_t stage);

// Parameters of a stage's first rank, and those whose optimizer state it has under kOptimizer.
struct Held {
  int64_t params = 0, owned = 0;
  int64_t experts = 0;                        // of params: which other ranks share than the rest
  int64_t dense_ranks = 1, expert_ranks = 1;  // that share each
  // Of params and of owned: whose gradients are summed over ranks.
  int64_t summed_params() const { return (dense_ranks > 1 ? params - experts : 0) + (expert_ranks > 1 ? experts : 0); }
  int64_t summed_owned() const {
    return owned - (params - experts) * (dense_ranks == 1) - experts * (expert_ranks == 1);
  }
};
Held held(const Case& c, int64_t stage);

// Sequences of a pass.
struct PassWork {
  double tokens = 0;
  double pairs = 0;   // of query and key
  double scored = 0;  // rows that go through the head
  PassWork operator*(double share) const { return {tokens * share, pairs * share, scored * share}; }
};
// Of all samples of a step: all but the last token of each. `shared`: a group's prompt once for all its responses.
PassWork work_of_step(const Workload& work, bool shared);
// What a data parallel rank has of a step in passes of as many micro-batches. None has less than a micro-batch.
struct RankPasses {
  int64_t micro_batches = 1;
  PassWork each;  // of one of them, shared by the context ranks
};
RankPasses training_passes_of(const Case& c);               // of an optimizer step
RankPasses logprob_passes_of(const Case& c, double share);  // of so many of all samples

// Rows of a token's that leave for experts and that come back where these are split: one for each rank, and each block
// of experts, that has any of its choices, and of experts that ranks share for each of these. Every choice is as
// likely.
struct ExpertRows {
  double out = 0, back = 0;
};
ExpertRows expert_rows(const Case& c);

// Fills memory, problems and the least that would do. `generation`: the same in the layout of generation, which may be
// training's own.
void plan_memory(const Case& c, const Case& generation, LayoutPlan& plan);
// All but generation, refit and other models.
PlannedTime plan_time(const Case& c, const PlannedMemory& memory);
// Forward alone over all samples, without exchanges: of ranks that split no model.
double values_seconds(const Case& c);
// A forward pass for log-probs over `share` of a step's samples.
struct LogprobPass {
  double working = 0, waiting = 0, exchanges = 0;
};
LogprobPass logprob_pass(const Case& c, double share);
// One by the policy itself: of samples that other weights, or other sums, drew.
void add_previous_pass(const Case& c, double share, PlannedTime& time);
// Forward over rows into an empty cache, on all stages in turn.
double prefill_seconds(const Case& c, const PassWork& work);
// Of generation's layout, by itself.
struct Rollout;
Rollout plan_rollout(const Case& c, int64_t cache_rows, PlannedTime& time);
// The same where free places are filled and what is unfinished goes on in the next steps.
void plan_carry_over(const Case& c, int64_t cache_rows, PlannedTime& time);
// Memory of an engine's device, and why it would not fit.
void plan_engine_memory(const Case& engine, EnginesPlan& engines, std::vector<std::string>& problems);
// Engines, and what the ranks wait for them and they for the ranks; behind all else of the ranks' time.
// `values_wait`: values of the critic may be computed in such a wait.
void plan_engines(const Case& c, bool values_wait, LayoutPlan& plan);
// Whether a part of the device works beside the last responses, for gradients too.
bool has_background(const Case& c);
bool has_early_gradients(const Case& c);
// What of the passes it does: as much as its processors do until generation ends, which it makes longer. `values`: the
// critic's among them.
void plan_background(const Case& c, bool values, PlannedTime& time);
// Of the rank that fetches most (topology/refit.h).
double refit_seconds(const Case& c, const Case& generation);
// Forward of one layer over so many rows, by the rates of passes.
double forward_seconds(const Case& c, const LocalShape& local, int64_t layer, const PassWork& work);
const LinkRates& link(const Case& c, Axis axis);

// What of a policy's plan is a critic's and a reward model's (plan_beside.cpp). `models` and `devices` outlive it.
class BesidePlan final {
 public:
  BesidePlan(const Layout& policy, const PlannedBeside& models, const PlanDevices& devices);

  bool critic_is_whole() const;  // on each rank
  int64_t critic_bytes() const;  // weights, gradients and optimizer state
  int64_t reward_model_bytes() const;
  // Behind plan_memory and plan_time of the policy, whose options these are.
  void add_to(const PlanOptions& policy, int64_t longest, LayoutPlan& plan) const;

 private:
  LayoutPlan critic_beside(int64_t others, bool values) const;
  void add_critic(const PlanOptions& policy, int64_t longest, LayoutPlan& plan) const;

  const PlannedBeside& models_;
  const PlanDevices& devices_;
  const Layout replicas_;  // of a reward model: on all ranks
  Layout layout_;          // of the critic
  std::string problem_;    // why it cannot have that; empty: it can
  Workload work_;          // of the critic
  PlanOptions options_;    // of the critic
};

}  // namespace trireme::planning
