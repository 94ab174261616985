// Whether a run can fit into its devices, before anything is loaded.
#pragma once

#include <cstdint>
#include <filesystem>

#include "trainer/config/config.h"
#include "trainer/model/config.h"

namespace trireme {

// What a rank's tensors may have.
struct MemoryLimit {
  int64_t bytes = 0;
  bool gpu = false;  // of a device; else its share of the host's, of which others may take some
};

// A critic beside the policy, as its training state counts.
struct CriticModel {
  Config config;  // critic_config() of the run's
  ModelConfig model;
  std::filesystem::path dir;
  Layout layout = {};  // of its ranks: the actor's, or its own
};

// A reward model, which every rank holds whole.
struct RewardModelFolder {
  ModelConfig model;
  std::filesystem::path dir;
};

struct ModelsBeside {  // the policy; null: none
  const CriticModel* critic = nullptr;
  const RewardModelFolder* reward_model = nullptr;
};

// By the formula of `trireme plan` for the configuration's layout; of a host by weights and training state alone.
// Throws Error(kUser) that says how much it wants at the least, and which layout of as many ranks wants least, where it
// cannot be whatever the formula's error is; warns, where `main`, in between. A critic adds its weights, gradients and
// optimizer state, and on a GPU its own turn counts, in which it trains beside the policy's; a reward model adds its
// weights.
void check_fits(const Config& config, const ModelConfig& model, const std::filesystem::path& dir, const Layout& layout,
                const MemoryLimit& memory, bool main, const ModelsBeside& beside = {});
// The same of ranks that have nothing but a critic of the run `config`, and only train.
void check_critic_fits(const Config& config, const CriticModel& critic, const Layout& layout, const MemoryLimit& memory,
                       bool main);

}  // namespace trireme
