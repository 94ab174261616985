// Forward passes that give every response token of a rollout a number: values, log-probs.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "trainer/batch/micro_batch.h"
#include "trainer/parallel/context.h"

namespace trireme {

// Of hidden states of a micro-batch: a number [T] of each of its response tokens.
using TokenNumbers = std::function<at::Tensor(const at::Tensor& hidden, const MicroBatch& batch)>;

// A model whose numbers of finished samples may be had by any thread on its own: it is whole on this rank, and nobody
// writes it meanwhile. A number depends on its sample only, not on what is computed beside it.
struct TokenScorer {
  const Model* model = nullptr;
  // As TokenNumbers; `batch` is of `samples`.
  std::function<at::Tensor(const at::Tensor& hidden, const MicroBatch& batch, const std::vector<Sample>& samples)>
      numbers;
  // A response's numbers, into the sample.
  std::function<void(Sample& sample, std::vector<float> numbers)> keep;
  // There is one number more: of the state behind the last token.
  bool behind = false;
  bool share_prompts = false;  // MicroBatchOptions::share_prompts
};

// Whether a model is whole on this rank, so that its passes need no other.
bool is_whole(const Model& model);

// The numbers of each of `samples`, none of which has an empty response, in one pass on this rank alone.
std::vector<std::vector<float>> score_samples(const TokenScorer& scorer, std::vector<Sample> samples);

// Fills in Sample::*numbers of the samples that lack them, on all ranks: each data parallel rank computes a share with
// about as many tokens as the others', in micro-batches of `size`; of a model that is split over no ranks each rank of
// `context` does, whatever that's layout. `compute` is called where hidden states are: on a pipeline's last stage.
// Collective over the context's ranks. `on_progress` is called after each micro-batch; may be empty.
void fill_token_numbers(std::vector<Sample>& samples, std::vector<float> Sample::*numbers, const Model& model,
                        const MicroBatchOptions& size, ParallelContext& context, const TokenNumbers& compute,
                        const std::function<void()>& on_progress);

// Tokens of the largest micro-batch of `size` that passes over these samples may have. Pure.
int64_t most_tokens_of_a_pass(const std::vector<Sample>& samples, const MicroBatchOptions& size);

// The samples that lack them, cut into `ranks` runs of about as many tokens. Pure.
std::vector<Members> shares_of_tokens(const std::vector<Sample>& samples, std::vector<float> Sample::*numbers,
                                      int64_t ranks);

}  // namespace trireme
