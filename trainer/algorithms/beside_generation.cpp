#include "trainer/algorithms/beside_generation.h"

#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "trainer/algorithms/critic.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/reward_model.h"
#include "trainer/algorithms/rollouts.h"

namespace trireme {

bool works_beside_generation(const Session& session) {
  const bool values = session.critic != nullptr && is_whole(*session.critic->model);
  return needs_reference(session.config) || session.config.grpo.early_gradients || values ||
         session.reward_model != nullptr;
}

bool early_gradients_beside(const Session& session, bool split, bool row_exact) {
  const bool wanted = session.config.grpo.early_gradients;
  const bool shared = session.policy->options().sharding.gradients;
  if (session.context.is_main()) {
    if (split && works_beside_generation(session))
      log_info("grpo",
               "the model is split, or generation has its own layout: reference log-probs, values and scores follow "
               "generation, grpo.early_gradients is off");
    if (wanted && shared && !split)
      log_info("grpo", "every backward pass reduces gradients over the ranks: grpo.early_gradients is off");
    if (wanted && !split && !row_exact)
      log_warn("grpo", "grpo.early_gradients is off: it needs linear layers that keep row bits");
  }
  return wanted && row_exact && !split && !shared;
}

std::unique_ptr<ReferenceStream> stream_beside_generation(const Session& session, const Model* reference,
                                                          const CriticTrainer* critic, bool early_gradients,
                                                          std::shared_ptr<const DevicePartition> partition,
                                                          std::function<void(const std::string&)> on_stuck) {
  const Config& config = session.config;
  std::vector<TokenScorer> scorers;
  if (reference != nullptr) scorers.push_back(reference_scorer(config, *reference));
  if (critic != nullptr && critic->is_whole()) scorers.push_back(critic->scorer());
  if (critic != nullptr && !critic->is_whole() && session.context.is_main())
    log_info("grpo", "ranks split the critic or share its weights: values follow generation");
  if (session.reward_model != nullptr)
    scorers.push_back(reward_model_scorer(*session.reward_model, config.policy.sequence_packing.share_prompts));
  if (scorers.empty() && !early_gradients) return nullptr;
  const at::Device device = session.policy->options().device;
  std::unique_ptr<ReferenceStream> stream =
      make_reference_stream(config, std::move(scorers), device, std::move(partition), std::move(on_stuck));
  if (early_gradients && stream == nullptr) {
    fail_user(device.is_cpu()
                  ? "grpo.early_gradients needs a thread of its own: set policy.generation.background_sms to 1, or "
                    "grpo.early_gradients to false"
                  : "grpo.early_gradients needs a part of the GPU of its own, and this one cannot be divided (see the "
                    "warning above): set it to false");
  }
  return stream;
}

}  // namespace trireme
