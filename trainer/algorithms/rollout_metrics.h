// What a step's log says of its samples: of all that were generated, of those that are trained, and of how. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "trainer/algorithms/step_results.h"
#include "trainer/batch/sample.h"
#include "trainer/telemetry/rollout_log.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {

// Of one or, under dynamic sampling, several rollouts of a step.
struct GeneratedTotals {
  int64_t samples = 0, tokens = 0, response_tokens = 0;  // tokens: prompts and responses
  int64_t groups = 0, flat_groups = 0;                   // flat: rewards that are all equal, or none
  int64_t rewarded = 0, correct = 0;                     // rewarded: not dropped
  double reward = 0;                                     // sum of raw ones
  std::vector<double> parts;                             // sums of each reward

  // Samples in data order, `group_size` apart.
  void add(const std::vector<Sample>& samples, int64_t group_size);
};

// Adds "train/...": of `generated` the rewards ("train/reward", "train/rewards/NAME" of `reward_names`), the share of
// correct responses and of flat groups; of the trained samples the rest, and with `filtered` their mean reward as
// "train/filtered_reward", NeMo-RL's name.
void describe_rollout(const GeneratedTotals& generated, const std::vector<Sample>& trained,
                      const std::vector<std::string>& reward_names, bool filtered,
                      std::map<std::string, double>& values);

// Adds "performance/...": how evenly the ranks generated, where there are several. The fastest waited longest for the
// others' last samples.
void describe_shares(const RankShares& shares, std::map<std::string, double>& values);

// Adds "train/..." of the optimizer steps: the loss's own metrics, and how many log-probs were compared.
void describe_training(const TrainResult& trained, std::map<std::string, double>& values);

// Adds "train/..." of how old the tokens of trained samples are: `version` is that of the weights that their step began
// with. A sample's age is that of its oldest token.
void describe_ages(const std::vector<Sample>& trained, int64_t version, std::map<std::string, double>& values);

// The part of the samples whose gradients, or reference log-probs, came with them from generation.
double share_trained_early(const std::vector<Sample>& samples);
double share_with_reference(const std::vector<Sample>& samples);
// Of the samples those that have values of the critic, or came with a score of the reward model.
double share_with_values(const std::vector<Sample>& samples);
double share_with_score(const std::vector<Sample>& samples);

// The first whole groups that have at most `max_samples` samples (always one group) as lines of the log of rollouts.
std::vector<RolloutLine> rollout_lines(const std::vector<Sample>& samples, int64_t group_size, int64_t max_samples,
                                       const std::vector<std::string>& reward_names, const Tokenizer& tokenizer);

// True when no reward of these samples differs from another, dropped ones left out; such a group teaches nothing.
bool is_flat(std::vector<Sample>::const_iterator begin, std::vector<Sample>::const_iterator end);

}  // namespace trireme
