// Recorded rollouts by recipe: a family, a way to make micro-batches, a loss; under any layout.
#pragma once

#include <map>
#include <string>

#include "tests/unit/algorithms/recorded_rollout.h"
#include "tests/unit/checkpoint/trained_rank.h"

namespace trireme::test {

struct Recipe {
  ModelFamily family;
  std::string batches, loss;  // packed, dynamic or shared; kl, gspo, or sft, which has no rollout
  std::string name() const { return std::string(to_string(family)) + "_" + batches + "_" + loss; }
};

// Three optimizer steps.
inline Outcome train_rollout(const Recipe& recipe, const Sizes& sizes, int64_t layers) {
  RunSetup setup;
  setup.tp = sizes.tp;
  setup.pp = sizes.pp;
  setup.cp = sizes.cp;
  setup.ep = sizes.ep;
  setup.etp = sizes.etp;
  setup.stages = sizes.stages;
  setup.family = recipe.family;
  setup.layers = layers;
  const std::map<Shared, StateSharding> sharing = {{Shared::kNothing, StateSharding::kNothing},
                                                   {Shared::kState, StateSharding::kOptimizer},
                                                   {Shared::kGradients, StateSharding::kGradients},
                                                   {Shared::kWeights, StateSharding::kWeights}};
  setup.shared = sharing.at(sizes.shared);
  const auto change = [&](Config& config) {
    take_three_steps(config);
    if (recipe.batches == "shared") {
      config.policy.sequence_packing.share_prompts = true;
      config.policy.sequence_packing.train_mb_tokens = 128;
    }
    if (recipe.loss == "gspo") {
      config.loss_fn.sequence_level_importance_ratios = true;
      config.loss_fn.token_level_loss = false;
      config.loss_fn.reference_policy_kl_penalty = 0;
    }
  };
  return run(static_cast<int>(layout_of(sizes).world()), recipe.batches == "dynamic", change, setup);
}

}  // namespace trireme::test
