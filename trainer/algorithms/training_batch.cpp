#include "trainer/algorithms/training_batch.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace trireme {

void TrainingBatch::count(ValidCounts& counts) const {
  counts.tokens += mask.sum().item<double>();
  counts.sequences += sequence_mask.sum().item<double>();
  if (positive.defined()) counts.positive_tokens += (mask * positive).sum().item<double>();
}

namespace {

at::Tensor token_versions(const std::vector<Sample>& samples, const Members& members) {
  std::vector<int64_t> versions;
  for (const int64_t i : members) {
    const Sample& sample = samples[static_cast<size_t>(i)];
    const size_t begin = versions.size();
    versions.resize(begin + sample.response.size(), -1);
    for (const VersionSpan& span : sample.weight_versions)
      std::fill_n(versions.begin() + static_cast<int64_t>(begin) + span.from, span.to - span.from, span.version);
  }
  return at::tensor(versions, at::kLong);
}

}  // namespace

TrainingBatch make_training_batch(const std::vector<Sample>& samples, const Members& members, bool share_prompts,
                                  bool positive) {
  TrainingBatch batch;
  batch.micro_batch = make_micro_batch(samples, members, share_prompts);
  batch.generation = generation_logprobs(samples, members);
  std::vector<float> sequences;
  std::vector<double> correct;
  for (const int64_t i : members) {
    const Sample& s = samples[static_cast<size_t>(i)];
    sequences.push_back(static_cast<float>(s.loss_multiplier));
    correct.push_back(s.raw_reward > 0 ? 1 : 0);
  }
  batch.advantages = of_tokens(samples, members, &Sample::advantages);
  batch.mask = loss_mask(samples, members);
  batch.sequence_mask = at::tensor(sequences, at::kFloat);
  const bool values = std::all_of(members.begin(), members.end(), [&](int64_t i) {
    const Sample& s = samples[static_cast<size_t>(i)];
    return s.values.size() == s.response.size() && s.returns.size() == s.response.size();
  });
  if (values) {
    batch.values = of_tokens(samples, members, &Sample::values);
    batch.returns = of_tokens(samples, members, &Sample::returns);
  }
  if (positive) batch.positive = spread(samples, members, correct);
  batch.versions = token_versions(samples, members);
  return batch;
}

at::Tensor tokens_of_version(const std::vector<Sample>& samples, const Members& members, int64_t version) {
  std::vector<double> of;
  for (const int64_t i : members) of.push_back(samples[static_cast<size_t>(i)].is_of(version) ? 1 : 0);
  return spread(samples, members, of);
}

void mask_mismatched_sequences(TrainingBatch& b, double threshold) {
  const at::Tensor& sequence = b.micro_batch.sequence;
  const int64_t count = b.sequence_mask.size(0);
  const at::Tensor previous = b.previous.masked_fill(at::isneginf(b.previous), 0);
  const at::Tensor error = (b.generation - previous).abs().exp();
  const at::Tensor sums = at::zeros({count}, error.options()).index_add(0, sequence, error * b.mask);
  const at::Tensor tokens = at::zeros({count}, error.options()).index_add(0, sequence, b.mask).clamp_min(1);
  const at::Tensor keep = (sums / tokens <= threshold).to(at::kFloat);
  b.sequence_mask = b.sequence_mask * keep;
  b.mask = b.mask * keep.index_select(0, sequence);
}

}  // namespace trireme
