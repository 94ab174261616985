// Scores of a reward model: the value head's number for the last token of prompt and response.
#pragma once

#include <functional>
#include <vector>

#include "trainer/algorithms/token_passes.h"
#include "trainer/batch/packing.h"
#include "trainer/batch/sample.h"
#include "trainer/model/model.h"
#include "trainer/parallel/context.h"

namespace trireme {

// Of each sample, the same on all ranks: each computes a share in micro-batches of `size`, and a sample's bits depend
// on neither. The model has a value head and is whole on each rank, whatever the context's layout. An empty response is
// scored by its prompt. Samples that have their Sample::score keep it. Throws Error(kData) that names a sample whose
// score is not finite. Collective. `on_progress` is called after each micro-batch; may be empty.
std::vector<float> reward_model_scores(const std::vector<Sample>& samples, const Model& model, MicroBatchOptions size,
                                       ParallelContext& context, const std::function<void()>& on_progress);

// Sample::score of finished samples, from any thread; with the bits of the above.
TokenScorer reward_model_scorer(const Model& model, bool share_prompts);

// As the last of the samples' rewards.
void add_scores(std::vector<Sample>& samples, const std::vector<float>& scores, double weight);

}  // namespace trireme
