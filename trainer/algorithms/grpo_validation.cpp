#include "trainer/algorithms/grpo_validation.h"

#include <algorithm>
#include <numeric>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/algorithms/options.h"

namespace trireme {
namespace {

double mean(const std::vector<double>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

std::map<std::string, double> ValidationResult::values(int64_t responses_per_prompt) const {
  std::map<std::string, double> values = {{"timing/validation/total_validation_time", seconds},
                                          {"validation/accuracy", accuracy},
                                          {"validation/avg_length", length}};
  if (responses_per_prompt > 1) values["validation/pass_k"] = pass_k;
  return values;
}

GrpoValidation::GrpoValidation(Session& session, const Dataset& examples, Collect collect)
    : session_(session), examples_(examples), collect_(std::move(collect)) {}

void GrpoValidation::add(const std::vector<PromptExample>& examples, int64_t step, int64_t first, Sums& sums) {
  if (examples.empty()) return;
  const Config& config = session_.config;
  RolloutRequest request;
  request.prompts = &examples;
  request.samples_per_prompt = config.grpo.val_num_generations_per_prompt;
  request.first_sample_id = static_cast<uint64_t>(first) * static_cast<uint64_t>(request.samples_per_prompt);
  request.name = "validation-" + std::to_string(step) + "-" + std::to_string(first);
  request.sampling = validation_sampling(config, *session_.tokenizer);
  int64_t prompt = -1;
  for (const Sample& s : collect_(request)) {
    if (s.dropped) continue;  // nobody knows whether it was right
    sums.rewards.push_back(s.raw_reward);
    sums.lengths.push_back(static_cast<double>(s.response.size()));
    if (s.group != prompt) sums.passed.push_back(0);
    prompt = s.group;
    if (s.raw_reward > 0) sums.passed.back() = 1;
    if (session_.context.is_main() && sums.printed < config.logger.num_val_samples_to_print) {
      ++sums.printed;
      log_info("validation", "prompt " + examples[static_cast<size_t>(s.group)].prompt_text + " response " +
                                 session_.tokenizer->decode(s.response) + " reward " + format_double(s.raw_reward));
    }
  }
}

ValidationResult GrpoValidation::validate(int64_t step) {
  const GrpoConfig& g = session_.config.grpo;
  Stopwatch watch;
  session_.reporting.phase("validation", step);
  const int64_t count = std::min(g.max_val_samples, examples_.size());
  Sums sums;
  std::vector<PromptExample> batch;
  int64_t first = 0;  // row of the batch's first prompt: no two batches draw the same random numbers
  for (int64_t i = 0; i < count; ++i) {
    if (batch.empty()) first = i;
    if (auto example = examples_.example(i)) batch.push_back(std::move(*example));
    if (static_cast<int64_t>(batch.size()) < g.val_batch_size) continue;
    add(batch, step, first, sums);
    batch.clear();
  }
  add(batch, step, first, sums);
  const ValidationResult result{mean(sums.rewards), mean(sums.lengths), mean(sums.passed), watch.seconds()};
  session_.reporting.validation(step, result.accuracy, result.length, result.seconds);
  return result;
}

}  // namespace trireme
