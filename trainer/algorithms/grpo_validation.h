// Validation of a GRPO run: accuracy on held-out problems by the run's own engine and rewards.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "trainer/algorithms/rollouts.h"
#include "trainer/algorithms/session.h"

namespace trireme {

struct ValidationResult {
  double accuracy = 0;  // mean raw reward of the responses whose reward is known
  double length = 0;    // mean, tokens
  double pass_k = 0;    // share of prompts of which a response was right
  double seconds = 0;

  // By their names in the log; pass_k only with several responses a prompt.
  std::map<std::string, double> values(int64_t responses_per_prompt) const;
};

class GrpoValidation final {
 public:
  // Samples of a request with their rewards.
  using Collect = std::function<std::vector<Sample>(const RolloutRequest&)>;

  // All outlive it.
  GrpoValidation(Session& session, const Dataset& examples, Collect collect);

  // Collective. Says what came on the terminal, and some responses in rank 0's log (logger.num_val_samples_to_print).
  ValidationResult validate(int64_t step);

 private:
  struct Sums {
    std::vector<double> rewards, lengths, passed;  // passed: one a prompt, 1 when any of its responses was right
    int64_t printed = 0;
  };
  // `examples` that end before `end` in the data set: their place there makes the samples' ids.
  void add(const std::vector<PromptExample>& examples, int64_t step, int64_t first, Sums& sums);

  Session& session_;
  const Dataset& examples_;
  const Collect collect_;
};

}  // namespace trireme
