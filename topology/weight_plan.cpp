#include "topology/weight_plan.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "topology/owned_ranges.h"

namespace trireme {
namespace {

void check_planned(const EngineLayouts& layouts) {
  if (layouts.training.etp > 1) {
    fail_user("engines of their own get no weights of experts whose width ranks share; training is " +
              to_string(layouts.training) + ": set etp to 1, or generate where it trains");
  }
  const Layout& e = layouts.engine;
  if (e.pp != 1 || e.cp != 1 || e.dp != 1 || e.etp != 1) {
    fail_user("an engine of its own has tensor and expert parallel ranks only; its layout is " + to_string(e) +
              ": set its other sizes to 1");
  }
}

int64_t copy_ranks_of(const Layout& training) { return group_size(training, Axis::kCopyPp); }
int64_t copies_of(const Layout& training) { return training.world() / copy_ranks_of(training); }

// Whether rank `rank` of the engine has the same of the model as that actor rank.
bool has_the_same(const ModelShape& shape, const EngineLayouts& layouts, int64_t actor_rank, int64_t rank) {
  const ModelSplit there = model_split(shape, layouts.training, actor_rank, layouts.stages);
  const ModelSplit here = model_split(shape, layouts.engine, rank);
  return there.pp == 1 && there.tp == here.tp && there.tensor_rank == here.tensor_rank && there.ep == here.ep &&
         there.expert_rank == here.expert_rank;
}

}  // namespace

int64_t weight_plan_number(const EngineLayouts& layouts, int64_t engine, int64_t rank) {
  TRIREME_CHECK(engine >= 0 && rank >= 0 && rank < layouts.engine.world(), "engines and their ranks count from 0");
  // As many of its ranks read the same copy as a copy has ranks: each its own of these, where both are split alike.
  const int64_t together = copy_ranks_of(layouts.training);
  const int64_t each = (layouts.engine.world() + together - 1) / together;
  return (engine * each + rank / together) % layouts.training.world();
}

WeightPlan weight_plan(const ModelShape& shape, const std::vector<ModelParameter>& parameters,
                       const EngineLayouts& layouts, int64_t number, int64_t rank, int64_t element_bytes) {
  check_planned(layouts);
  const int64_t copies = copies_of(layouts.training);
  const std::vector<int64_t> ranks = groups(layouts.training, Axis::kCopyPp)[static_cast<size_t>(number % copies)];
  const int64_t turn = number / copies;  // among those that read the same copy
  RankSlices training(shape, layouts.training, layouts.stages, ranks);
  RankSlices engine(shape, layouts.engine, {}, {rank});
  std::vector<int64_t> alike;  // all comes from one of them
  for (const int64_t from : ranks)
    if (has_the_same(shape, layouts, from, rank)) alike.push_back(from);
  std::map<int64_t, int64_t> sent;  // bytes, by rank
  const ChooseOwner choose = [&](const std::vector<int64_t>& owners, int64_t bytes) {
    TRIREME_CHECK(!owners.empty(), "no rank trains what an engine generates with");
    if (!alike.empty()) return alike[static_cast<size_t>(turn) % alike.size()];
    const auto count = static_cast<int64_t>(owners.size());
    int64_t from = owners[static_cast<size_t>(turn % count)];
    for (int64_t i = 1; i < count; ++i) {
      const int64_t other = owners[static_cast<size_t>((turn + i) % count)];
      if (sent[other] < sent[from]) from = other;
    }
    sent[from] += bytes;
    return from;
  };
  std::vector<RefitCopy> all;
  for (size_t p = 0; p < parameters.size(); ++p) {
    engine.look_at(parameters[p]);
    const ParameterSlice* wanted = engine.slice(0);
    if (wanted == nullptr) continue;
    training.look_at(parameters[p]);
    const RefitCopy like{.to = rank, .parameter = static_cast<int64_t>(p)};
    TRIREME_CHECK(add_copies(*wanted, owned_ranges(training), like, element_bytes, choose, all),
                  "no rank trains all of " + parameters[p].name);
  }
  std::map<int64_t, WeightSource> by_rank;
  WeightPlan plan;
  for (const RefitCopy& copy : all) {
    WeightSource& source = by_rank[copy.from];
    source.actor_rank = copy.from;
    source.bytes += copy.bytes();
    plan.bytes += copy.bytes();
    source.copies.push_back(copy);
  }
  for (auto& [from, source] : by_rank) plan.sources.push_back(std::move(source));
  const auto first = turn % static_cast<int64_t>(plan.sources.size());
  std::rotate(plan.sources.begin(), plan.sources.begin() + first, plan.sources.end());
  plan.sources.front().whole = !alike.empty();
  return plan;
}

}  // namespace trireme
