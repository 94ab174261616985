// Forced-length generation: what the rollout, decode and step benchmarks share.
#pragma once

#include <cstdint>
#include <vector>

#include "trainer/batch/micro_batch.h"
#include "trainer/bench/report.h"
#include "trainer/rollout/engine.h"
#include "trainer/rollout/lengths.h"

namespace trireme::bench {

// One list of random token ids for each prompt.
std::vector<std::vector<int32_t>> random_prompts(const RolloutLengths& lengths, int64_t vocabulary, uint64_t seed);

struct GenerationOptions {
  int64_t max_sequences = 256;
  int64_t cache_rows = 0;  // 0: wanted_cache_rows
  int64_t prefill_chunk_tokens = 2048;
  double temperature = 1.0;
  bool unknown_ends =
      false;  // responses end as by a stop token: the scheduler knows the longest response's length only
};
EngineOptions engine_options(const GenerationOptions& options, const RolloutLengths& lengths, int64_t ranks);
SamplingOptions sampling_options(const GenerationOptions& options, uint64_t seed);

// Responses [first, first + count) of prompt `prompt`; their sample ids are their places among all responses plus
// `base`.
GroupRequest forced_group(const RolloutLengths& lengths, const std::vector<std::vector<int32_t>>& prompts,
                          int64_t prompt, int64_t first, int64_t count, uint64_t base = 0, bool ends_known = true);

// The same prompts with short responses of 4, ..., 68 tokens: every number of samples alive is seen once, so that
// nothing is built or captured while the clock runs.
RolloutLengths staircase(const RolloutLengths& lengths);

// One engine step, or several that cannot be told apart.
struct TimedStep {
  double seconds = 0;
  int64_t steps = 1;
  int64_t alive = 0;  // samples in it (the mean, rounded)
  bool prefill = false;
};
struct TimedRollout {
  double seconds = 0;
  EngineStats stats;
  std::vector<TimedStep> steps;
  std::vector<GeneratedGroup> groups;  // in the order of prompts
};
// Drives the engine as a run does, alone, and waits for the device. Seconds are those between two idle devices; single
// steps are what the host saw, which with steps under way ahead of it is right on average only.
TimedRollout timed_rollout(Engine& engine, const RolloutLengths& lengths,
                           const std::vector<std::vector<int32_t>>& prompts, at::Device device, bool ends_known = true);

// Groups as samples, in data order.
std::vector<Sample> as_samples(const std::vector<GeneratedGroup>& groups);

struct LogprobComparison {
  int64_t tokens = 0;
  int64_t mismatched = 0;  // float32 bits of sampler and loss differ
  double largest_difference = 0;
};
// The loss's forward (response_logprobs) over all samples in packed batches of at most `tokens` tokens, against the
// sampler's log-probs.
LogprobComparison compare_logprobs(const Model& model, const std::vector<Sample>& samples,
                                   const LogprobOptions& distribution, int64_t tokens);

}  // namespace trireme::bench
