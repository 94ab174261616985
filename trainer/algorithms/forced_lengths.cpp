#include "trainer/algorithms/forced_lengths.h"

#include <string>
#include <vector>

#include "base/error.h"
#include "base/log.h"

namespace trireme {

std::optional<RolloutLengths> forced_lengths(const Config& config, bool says) {
  const std::string& source = config.policy.generation.forced_lengths;
  if (source.empty()) return std::nullopt;
  RolloutLengths lengths = load_lengths(source);
  const int64_t wanted = config.grpo.num_generations_per_prompt;
  if (lengths.samples_per_prompt() != wanted) {
    fail_user("policy.generation.forced_lengths: " + source + " has " + std::to_string(lengths.samples_per_prompt()) +
              " responses for each prompt, grpo.num_generations_per_prompt is " + std::to_string(wanted));
  }
  if (lengths.longest() > config.policy.max_total_sequence_length) {
    fail_user("policy.generation.forced_lengths: the longest prompt and response of " + source + " have " +
              std::to_string(lengths.longest()) + " tokens, policy.max_total_sequence_length is " +
              std::to_string(config.policy.max_total_sequence_length));
  }
  if (says) {
    log_warn("grpo", "policy.generation.forced_lengths: responses have the lengths of " + source +
                         " and rewards are drawn; this run is a measurement");
  }
  return lengths;
}

void force_prompt(const RolloutLengths& lengths, int64_t group, PromptExample& example) {
  const auto length = static_cast<size_t>(lengths.prompts[static_cast<size_t>(group) % lengths.prompts.size()]);
  std::vector<int32_t> ids;
  for (size_t i = 0; i < length; ++i) ids.push_back(example.prompt[i % example.prompt.size()]);
  example.prompt = std::move(ids);
}

}  // namespace trireme
