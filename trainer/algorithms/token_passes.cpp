#include "trainer/algorithms/token_passes.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "trainer/algorithms/pipeline_step.h"

namespace trireme {

bool is_whole(const Model& model) {
  const ModelOptions& options = model.options();
  return !(options.sharding.weights || options.split || options.context != nullptr);
}

std::vector<std::vector<float>> score_samples(const TokenScorer& scorer, std::vector<Sample> samples) {
  const c10::NoGradGuard no_grad;
  const at::Device at_device = scorer.model->options().device;
  const c10::DeviceGuard device(at_device);
  // The state before a token is that behind the one ahead; the last token of a response is in no input.
  for (Sample& sample : samples) {
    if (scorer.behind) sample.response.push_back(0);
  }
  Members members(samples.size());
  std::iota(members.begin(), members.end(), int64_t{0});
  const MicroBatch batch = make_micro_batch(samples, members, scorer.share_prompts);
  PackedBatch input = batch.input;
  input.ids = input.ids.to(at_device);
  input.positions = input.positions.to(at_device);
  const at::Tensor all =
      scorer.numbers(scorer.model->forward(input), batch, samples).to(at::kCPU, at::kFloat).contiguous();
  const float* number = all.const_data_ptr<float>();
  std::vector<std::vector<float>> of_samples;
  for (const Sample& sample : samples) {
    of_samples.emplace_back(number, number + sample.response.size());
    number += sample.response.size();
  }
  return of_samples;
}

int64_t most_tokens_of_a_pass(const std::vector<Sample>& samples, const MicroBatchOptions& size) {
  int64_t longest = 0;
  for (const Sample& sample : samples) longest = std::max(longest, sample.length());
  return size.rule == MicroBatchOptions::Rule::kFixed ? size.samples * longest : std::max(size.tokens, longest);
}

std::vector<Members> shares_of_tokens(const std::vector<Sample>& samples, std::vector<float> Sample::*numbers,
                                      int64_t ranks) {
  std::vector<Members> shares(static_cast<size_t>(ranks));
  const auto lacks = [&](const Sample& sample) { return (sample.*numbers).empty() && !sample.response.empty(); };
  int64_t total = 0, before = 0;
  for (const Sample& sample : samples) total += lacks(sample) ? sample.length() : 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    if (!lacks(samples[i])) continue;
    // By the middle of the sample, so that no rank has much more than its part.
    const int64_t rank = std::min(ranks - 1, (2 * before + samples[i].length()) * ranks / (2 * total));
    shares[static_cast<size_t>(rank)].push_back(static_cast<int64_t>(i));
    before += samples[i].length();
  }
  return shares;
}

void fill_token_numbers(std::vector<Sample>& samples, std::vector<float> Sample::*numbers, const Model& model,
                        const MicroBatchOptions& size, ParallelContext& context, const TokenNumbers& compute,
                        const std::function<void()>& on_progress) {
  const c10::NoGradGuard no_grad;
  // Whose share is whose, and who tells of it: of the ranks that compute one together the first that has the results.
  const bool whole = !model.options().split && model.options().context == nullptr;
  const auto share_of = [&](int rank) {
    return static_cast<size_t>(whole ? rank : coordinates(context.layout(), rank).dp);
  };
  const std::vector<Members> shares =
      shares_of_tokens(samples, numbers, whole ? context.world_size() : context.layout().dp);
  const Members& own = shares[share_of(context.rank())];
  std::vector<MicroBatch> passes;
  if (!own.empty()) {
    const std::vector<std::vector<Members>> of_ranks = make_micro_batches(samples, own, size, /*ranks=*/1);
    for (const Members& members : of_ranks.front()) {
      MicroBatch batch = make_micro_batch(samples, members, size.share_prompts);
      if (batch.response_tokens() > 0) passes.push_back(std::move(batch));
    }
  }
  PipelineWork work;
  for (const MicroBatch& batch : passes) work.inputs.push_back(&batch.input);
  work.finish = [&](size_t index, const at::Tensor& hidden) {
    const MicroBatch& batch = passes[index];
    const at::Tensor found = compute(hidden, batch).to(at::kCPU, at::kFloat).contiguous();
    const float* number = found.const_data_ptr<float>();
    for (const int64_t i : batch.members) {
      Sample& sample = samples[static_cast<size_t>(i)];
      (sample.*numbers).assign(number, number + sample.response.size());
      number += sample.response.size();
    }
    return found;
  };
  work.on_progress = on_progress;
  forward_passes(model, work);
  if (context.world_size() == 1) return;
  // What was found goes to all, in the order of its share.
  const bool tells = whole || context.has_results();
  std::string bytes;
  for (const int64_t i : tells ? own : Members()) {
    const std::vector<float>& found = samples[static_cast<size_t>(i)].*numbers;
    bytes.append(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(float));
  }
  const std::vector<std::string> all = context.world().all_gather_bytes(bytes);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (static_cast<int>(rank) == context.rank() || all[rank].empty()) continue;
    size_t at = 0;
    for (const int64_t i : shares[share_of(static_cast<int>(rank))]) {
      Sample& sample = samples[static_cast<size_t>(i)];
      const size_t size_of_sample = sample.response.size() * sizeof(float);
      TRIREME_CHECK(at + size_of_sample <= all[rank].size(), "a rank has found fewer numbers than its tokens");
      (sample.*numbers).resize(sample.response.size());
      std::memcpy((sample.*numbers).data(), all[rank].data() + at, size_of_sample);
      at += size_of_sample;
    }
  }
}

}  // namespace trireme
