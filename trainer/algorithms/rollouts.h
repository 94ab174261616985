// Rollouts: prompts through the engine and the rewards, gathered on every rank in data order.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "trainer/algorithms/reference_stream.h"
#include "trainer/algorithms/step_results.h"
#include "trainer/batch/sample.h"
#include "trainer/config/config.h"
#include "trainer/data/dataset.h"
#include "trainer/parallel/context.h"
#include "trainer/rewards/pool.h"
#include "trainer/rollout/driver.h"
#include "trainer/rollout/engine.h"
#include "trainer/rollout/lengths.h"
#include "trainer/telemetry/phases.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {

// Null where passes follow generation: as the configuration says, or because a GPU cannot be divided. `on_stuck`: see
// ReferenceStream.
std::unique_ptr<ReferenceStream> make_reference_stream(const Config& config, std::vector<TokenScorer> scorers,
                                                       at::Device device,
                                                       std::shared_ptr<const DevicePartition> partition,
                                                       std::function<void(const std::string&)> on_stuck);
// Of the run's reference model.
TokenScorer reference_scorer(const Config& config, const Model& reference);

struct RolloutRequest {
  const std::vector<PromptExample>* prompts = nullptr;  // the same on every rank
  int64_t samples_per_prompt = 1;
  uint64_t first_sample_id = 0;  // of prompt 0; prompt p, sample i is first + p * samples_per_prompt + i
  std::string name;              // of the queue; never used twice in a job
  SamplingOptions sampling;
  ReferenceStream* reference = nullptr;  // gets every sample as it ends; may be null
  // Gets copies of a prompt's samples when all were generated on this rank and have their raw rewards, while others are
  // generated; a rank then takes whole prompts. May be empty.
  std::function<void(std::vector<Sample>)> on_group;
  // Gets samples next to each other as soon as this rank has generated them, while others are generated; they have no
  // rewards yet. May be empty.
  std::function<void(const Sample* samples, size_t count)> on_generated;
  // For measurements: responses of these lengths, whatever the model says. Null: off.
  const RolloutLengths* forced_lengths = nullptr;
  bool ends_known = false;  // GroupRequest::ends_known
  // For measurements: raw rewards are drawn with this seed (drawn_reward), whatever the rewards say.
  std::optional<uint64_t> drawn_rewards;
};

// 0 or 1, a function of its arguments; in every group of two or more there are both.
double drawn_reward(uint64_t seed, int64_t group, int64_t index, int64_t group_size);

// What a reward is asked about a response, and what it said of samples next to each other, in their order.
RewardRequest reward_request(const PromptExample& example, const std::vector<int32_t>& response, bool truncated,
                             const Tokenizer& tokenizer);
void fill_rewards(const RewardedGroup& rewarded, Sample* samples);
void fill_drawn_rewards(uint64_t seed, int64_t group_size, Sample* samples, size_t count);
// A generated response of group `group` as a sample without rewards.
Sample to_sample(int64_t group, int64_t index, const SharedTokens& prompt, GeneratedSample generated);

class RolloutCollector final {
 public:
  // All outlive the collector. `timer` gets the phases: generation, rewards (waited for after generation), idle (waited
  // for other ranks). `timeout_s` bounds the wait for rewards after generation. Without rewards and tokenizer (both
  // null) a request says drawn_rewards.
  RolloutCollector(Engine& engine, const Tokenizer* tokenizer, RewardPool* rewards, ParallelContext& context,
                   PhaseTimer& timer, double timeout_s);

  // Collective. Samples of all prompts in order of (prompt, sample), raw rewards filled in. Adds to `shares`.
  std::vector<Sample> collect(const RolloutRequest& request, RankShares& shares);

  // Called between engine steps, for heartbeats. May be empty.
  std::function<void()> on_progress;

 private:
  class Scoring;
  double generate(const RolloutRequest& request, Scoring& scoring);  // seconds until this rank's last sample
  std::vector<Sample> exchange(std::vector<Sample> own, const std::vector<SharedTokens>& prompts,
                               double generated_after, RankShares& shares);

  Engine& engine_;
  const Tokenizer* tokenizer_;
  RewardPool* rewards_;
  ParallelContext& context_;
  PhaseTimer& timer_;
  double timeout_s_;
};

}  // namespace trireme
