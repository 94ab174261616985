#include "trainer/bench/generation.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "trainer/algorithms/pipeline_step.h"
#include "trainer/ops/philox.h"
#include "trainer/parallel/device.h"
#include "trainer/rollout/driver.h"

namespace trireme::bench {
namespace {

constexpr int64_t kShortest = 4, kStairs = 64;

}  // namespace

std::vector<std::vector<int32_t>> random_prompts(const RolloutLengths& lengths, int64_t vocabulary, uint64_t seed) {
  std::vector<std::vector<int32_t>> prompts;
  for (size_t p = 0; p < lengths.prompts.size(); ++p) {
    std::vector<int32_t> ids(static_cast<size_t>(lengths.prompts[p]));
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<int32_t>(philox_uniform(seed, p, i) * static_cast<double>(vocabulary));
    prompts.push_back(std::move(ids));
  }
  return prompts;
}

EngineOptions engine_options(const GenerationOptions& options, const RolloutLengths& lengths, int64_t ranks) {
  if (options.max_sequences < 1) fail_user("--max-sequences must be at least 1");
  if (options.cache_rows < 0) fail_user("--cache-rows must not be negative");
  EngineOptions engine;
  engine.max_sequences = options.max_sequences;
  engine.prefill_chunk_tokens = options.prefill_chunk_tokens;
  engine.max_total_length = lengths.longest();
  engine.cache_rows = options.cache_rows > 0
                          ? options.cache_rows
                          : wanted_cache_rows(lengths, options.max_sequences, ranks) +
                                engine.headroom_rows * std::min(options.max_sequences, lengths.samples());
  return engine;
}

SamplingOptions sampling_options(const GenerationOptions& options, uint64_t seed) {
  SamplingOptions sampling;
  sampling.temperature = options.temperature;
  sampling.seed = seed;
  return sampling;
}

GroupRequest forced_group(const RolloutLengths& lengths, const std::vector<std::vector<int32_t>>& prompts,
                          int64_t prompt, int64_t first, int64_t count, uint64_t base, bool ends_known) {
  const int64_t begin = prompt * lengths.samples_per_prompt() + first;
  GroupRequest group;
  group.group_id = prompt;
  group.prompt = prompts[static_cast<size_t>(prompt)];
  group.samples = count;
  group.first_sample_id = base + static_cast<uint64_t>(begin);
  group.ends_known = ends_known;
  group.forced_lengths.assign(lengths.outputs.begin() + begin, lengths.outputs.begin() + begin + count);
  return group;
}

RolloutLengths staircase(const RolloutLengths& lengths) {
  RolloutLengths result = lengths;
  for (int64_t s = 0; s < lengths.samples(); ++s) {
    int64_t& output = result.outputs[static_cast<size_t>(s)];
    output = std::min(output, kShortest + kStairs * s / lengths.samples());
  }
  return result;
}

TimedRollout timed_rollout(Engine& engine, const RolloutLengths& lengths,
                           const std::vector<std::vector<int32_t>>& prompts, at::Device device, bool ends_known) {
  TimedRollout result;
  engine.reset_stats();
  synchronize(device);
  Stopwatch whole, step_watch;
  QueueShape shape;
  shape.groups = static_cast<int64_t>(prompts.size());
  shape.samples = lengths.samples_per_prompt();
  shape.places = engine.options().max_sequences;
  LocalCounter counter;
  SampleQueue queue(shape, counter, "rollout");
  EngineStats before = engine.stats();
  double carried = 0;  // of calls that began no step
  DriverHooks hooks;
  hooks.request = [&](const SampleSpan& span) {
    return forced_group(lengths, prompts, span.group, span.first_sample, span.count, /*base=*/0, ends_known);
  };
  hooks.complete = [&](const SampleSpan&, GeneratedGroup group) { result.groups.push_back(std::move(group)); };
  hooks.between_steps = [&] {
    const EngineStats& now = engine.stats();
    carried += step_watch.lap();
    const int64_t steps = now.steps - before.steps;
    if (steps == 0) return;
    TimedStep step;
    step.seconds = carried;
    step.steps = steps;
    step.alive = (now.sequence_steps - before.sequence_steps + steps / 2) / steps;
    step.prefill = now.prefill_tokens > before.prefill_tokens;
    result.steps.push_back(step);
    carried = 0;
    before = now;
  };
  drive_rollout(engine, queue, hooks);
  synchronize(device);
  result.seconds = whole.seconds();
  result.stats = engine.stats();
  std::sort(result.groups.begin(), result.groups.end(),
            [](const GeneratedGroup& a, const GeneratedGroup& b) { return a.group_id < b.group_id; });
  return result;
}

std::vector<Sample> as_samples(const std::vector<GeneratedGroup>& groups) {
  std::vector<Sample> samples;
  for (const GeneratedGroup& group : groups) {
    const SharedTokens prompt(group.prompt);
    for (size_t i = 0; i < group.samples.size(); ++i) {
      Sample sample;
      sample.group = group.group_id;
      sample.index = static_cast<int64_t>(i);
      sample.prompt = prompt;
      sample.response = group.samples[i].response;
      sample.generation_logprobs = group.samples[i].logprobs;
      samples.push_back(std::move(sample));
    }
  }
  return samples;
}

LogprobComparison compare_logprobs(const Model& model, const std::vector<Sample>& samples,
                                   const LogprobOptions& distribution, int64_t tokens) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> lengths;
  for (const Sample& sample : samples) {
    lengths.push_back(sample.length());
    tokens = std::max(tokens, sample.length());
  }
  std::vector<MicroBatch> batches;
  for (const Members& members : pack_bins(lengths, tokens, PackingAlgorithm::kFirstFitDecreasing, 0))
    batches.push_back(make_micro_batch(samples, members));
  LogprobComparison result;
  PipelineWork work;
  for (const MicroBatch& batch : batches) work.inputs.push_back(&batch.input);
  work.finish = [&](size_t index, const at::Tensor& hidden) {
    const MicroBatch& batch = batches[index];
    const at::Tensor theirs = generation_logprobs(samples, batch.members).contiguous();
    const at::Tensor ours = response_logprobs(model, hidden, batch, distribution).to(at::kCPU, at::kFloat).contiguous();
    const float* a = theirs.const_data_ptr<float>();
    const float* b = ours.const_data_ptr<float>();
    for (int64_t i = 0; i < ours.numel(); ++i) {
      result.mismatched += std::memcmp(a + i, b + i, sizeof(float)) != 0 ? 1 : 0;
      const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
      if (!(difference <= result.largest_difference)) result.largest_difference = difference;  // NaN too
    }
    result.tokens += ours.numel();
    return ours;
  };
  forward_passes(model, work);
  at::Tensor found = at::tensor(
      {static_cast<double>(result.mismatched), static_cast<double>(result.tokens), result.largest_difference},
      at::kDouble);
  share_result(model, found);  // the last stage's
  const double* values = found.const_data_ptr<double>();
  return {.tokens = static_cast<int64_t>(values[1]),
          .mismatched = static_cast<int64_t>(values[0]),
          .largest_difference = values[2]};
}

}  // namespace trireme::bench
