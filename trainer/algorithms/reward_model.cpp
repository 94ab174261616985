#include "trainer/algorithms/reward_model.h"

#include <cmath>

#include "base/error.h"
#include "trainer/algorithms/token_passes.h"

namespace trireme {

std::vector<float> reward_model_scores(const std::vector<Sample>& samples, const Model& model, MicroBatchOptions size,
                                       ParallelContext& context, const std::function<void()>& on_progress) {
  // A pass for values gives the state before each token. With one more behind a response, which is in no input, that of
  // the last one is the state behind the whole response.
  std::vector<Sample> longer(samples.size());
  for (size_t i = 0; i < samples.size(); ++i) {
    longer[i].group = samples[i].group;
    longer[i].index = samples[i].index;
    longer[i].prompt = samples[i].prompt;
    longer[i].response = samples[i].response;
    longer[i].response.push_back(0);
    if (samples[i].score) longer[i].values.assign(longer[i].response.size(), *samples[i].score);  // the last counts
  }
  // Inputs are one token shorter than what is packed, so that the longest sample has room.
  if (size.rule != MicroBatchOptions::Rule::kFixed)
    size.tokens += size.rule == MicroBatchOptions::Rule::kDynamic ? size.round : 1;
  fill_token_numbers(
      longer, &Sample::values, model, size, context,
      [&](const at::Tensor& hidden, const MicroBatch& batch) { return response_values(model, hidden, batch); },
      on_progress);
  std::vector<float> scores;
  for (const Sample& s : longer) {
    scores.push_back(s.values.back());
    if (std::isfinite(scores.back())) continue;
    fail_data("the reward model's score of response " + std::to_string(s.index) + " of group " +
              std::to_string(s.group) + " is not finite");
  }
  return scores;
}

TokenScorer reward_model_scorer(const Model& model, bool share_prompts) {
  TokenScorer scorer;
  scorer.model = &model;
  scorer.numbers = [&model](const at::Tensor& hidden, const MicroBatch& batch, const std::vector<Sample>&) {
    return response_values(model, hidden, batch);
  };
  scorer.keep = [](Sample& sample, const std::vector<float>& numbers) { sample.score = numbers.back(); };
  scorer.behind = true;
  scorer.share_prompts = share_prompts;
  return scorer;
}

void add_scores(std::vector<Sample>& samples, const std::vector<float>& scores, double weight) {
  TRIREME_CHECK(samples.size() == scores.size(), "a score for each sample");
  for (size_t i = 0; i < samples.size(); ++i) {
    samples[i].raw_reward += weight * static_cast<double>(scores[i]);
    samples[i].reward_parts.push_back(static_cast<double>(scores[i]));
  }
}

}  // namespace trireme
