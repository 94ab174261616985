// Forward passes that give every response token of a rollout a number: values, log-probs.
#pragma once

#include <functional>
#include <vector>

#include "trainer/batch/micro_batch.h"
#include "trainer/parallel/context.h"

namespace trireme {

// Of hidden states of a micro-batch: a number [T] of each of its response tokens.
using TokenNumbers = std::function<at::Tensor(const at::Tensor& hidden, const MicroBatch& batch)>;

// Fills in Sample::*numbers of the samples that lack them, on all ranks: each data parallel rank computes a share with
// about as many tokens as the others', in micro-batches of `size`; of a model that is split over no ranks each rank of
// `context` does, whatever that's layout. `compute` is called where hidden states are: on a pipeline's last stage.
// Collective over the context's ranks. `on_progress` is called after each micro-batch; may be empty.
void fill_token_numbers(std::vector<Sample>& samples, std::vector<float> Sample::*numbers, const Model& model,
                        const MicroBatchOptions& size, ParallelContext& context, const TokenNumbers& compute,
                        const std::function<void()>& on_progress);

// The samples that lack them, cut into `ranks` runs of about as many tokens. Pure.
std::vector<Members> shares_of_tokens(const std::vector<Sample>& samples, std::vector<float> Sample::*numbers,
                                      int64_t ranks);

}  // namespace trireme
