// Rollouts: prompts through the engine and the rewards, gathered on every rank in data order.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "trainer/algorithms/reference_stream.h"
#include "trainer/algorithms/samples.h"
#include "trainer/config/config.h"
#include "trainer/data/dataset.h"
#include "trainer/parallel/context.h"
#include "trainer/rewards/pool.h"
#include "trainer/rollout/engine.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {

SamplingOptions training_sampling(const Config& config, const Tokenizer& tokenizer);
SamplingOptions validation_sampling(const Config& config, const Tokenizer& tokenizer);
EngineOptions engine_options(const Config& config, std::shared_ptr<const DevicePartition> partition = nullptr);
// The parts of `device` for generation and for reference log-probs beside its last answers; null where there are none,
// or none are wanted.
std::shared_ptr<const DevicePartition> partition_for(const Config& config, at::Device device, bool wanted);
// Null where they are computed after generation: as the configuration says, or because a GPU cannot be divided.
// `on_stuck`: see ReferenceStream.
std::unique_ptr<ReferenceStream> make_reference_stream(const Config& config, const Model* reference, at::Device device,
                                                       std::shared_ptr<const DevicePartition> partition,
                                                       std::function<void(const std::string&)> on_stuck);
std::vector<RewardOptions> reward_options(const Config& config);

struct RolloutRequest {
  const std::vector<PromptExample>* prompts = nullptr;  // the same on every rank
  int64_t samples_per_prompt = 1;
  uint64_t first_sample_id = 0;  // of prompt 0; prompt p, sample i is first + p * samples_per_prompt + i
  std::string name;              // of the queue; never used twice in a job
  SamplingOptions sampling;
  ReferenceStream* reference = nullptr;  // gets every sample as it ends; may be null
  // Gets copies of a prompt's samples when all were generated on this rank and have their raw rewards, while others are
  // generated; a rank then takes whole prompts. May be empty.
  std::function<void(std::vector<RolloutSample>)> on_group;
};

struct RolloutTimes {
  double generation_seconds = 0;  // this rank
  double rewards_seconds = 0;     // waited for rewards after generation had ended
  double gather_seconds = 0;      // waited for other ranks
};

class RolloutCollector final {
 public:
  // All outlive the collector. `timeout_s` bounds the wait for rewards after generation.
  RolloutCollector(Engine& engine, const Tokenizer& tokenizer, RewardPool& rewards, ParallelContext& context,
                   double timeout_s);

  // Collective. Samples of all prompts in order of (prompt, sample), raw rewards filled in. Times are added to `times`.
  std::vector<RolloutSample> collect(const RolloutRequest& request, RolloutTimes& times);

  // Called between engine steps, for heartbeats. May be empty.
  std::function<void()> on_progress;

 private:
  void take_rewarded(const RewardedGroup& group, std::vector<RolloutSample>& own);

  Engine& engine_;
  const Tokenizer& tokenizer_;
  RewardPool& rewards_;
  ParallelContext& context_;
  double timeout_s_;
};

}  // namespace trireme
