// Engine: generates the samples of prompt groups by continuous batching over a KV cache. Contract in README.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trainer/batch/versions.h"
#include "trainer/model/model.h"
#include "trainer/ops/partition.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {

struct SamplingOptions {
  double temperature = 1.0;               // 0: greedy, log-probs at temperature 1
  int64_t top_k = 0;                      // 0: off
  double top_p = 1.0;                     // 1: off
  double min_p = 0.0;                     // 0: off
  bool greedy = false;                    // the most likely token; log-probs are those of the distribution above
  int64_t max_new_tokens = 0;             // <= 0: up to the engine's max_total_length
  std::vector<int32_t> stop_ids;          // the sample ends with one of these, which it keeps
  std::vector<std::string> stop_strings;  // in the response's text; the tokens up to its end are kept
  uint64_t seed = 0;

  // What the loss must compute to get the engine's log-probs.
  LogprobOptions logprob_options() const;
};

struct EngineOptions {
  // 0: what max_sequences full-length samples need, within cache_memory_fraction of the memory that is free at the
  // first submit; on CUDA beside what the steps themselves want: the largest is run and all graphs are captured first.
  int64_t cache_rows = 0;
  double cache_memory_fraction = 0.6;
  int64_t max_sequences = 256;          // decoded at once
  int64_t prefill_chunk_tokens = 2048;  // prompt tokens in one step
  int64_t max_total_length = 0;         // prompt and response; 0: ModelConfig::positions()
  int64_t headroom_rows = 64;           // see SchedulerOptions
  double grow_factor = 1.5;
  // A step's tokens are looked at after the next step was started; the token that a stopped sample got meanwhile is
  // dropped. For devices that run ahead of the host (always on CUDA); the samples are the same.
  bool late_stops = false;
  // Of a model with several stages: so many schedulers take turns at most (lanes.h), as many as have places and room
  // for the longest sequence. No sample depends on it. Ranks that generate together say the same.
  int64_t lanes = 1;
  // Of ranks that generate together with the same model: the least of their numbers of cache rows, so that their plans
  // are alike. Collective; called in take_cache() or submit(). Empty: this one's own.
  std::function<int64_t(int64_t rows)> least_of_ranks;
  // Of the model's device, for share_device; null: it is never shared.
  std::shared_ptr<const DevicePartition> partition;
};

struct GroupRequest {
  int64_t group_id = 0;
  std::vector<int32_t> prompt;
  int64_t samples = 1;
  uint64_t first_sample_id = 0;  // sample i draws its random numbers as first_sample_id + i
  int64_t max_new_tokens = 0;    // <= 0: the sampling options' value
  // For benchmarks: sample i ends after exactly forced_lengths[i] tokens, stops are ignored. Empty: off.
  std::vector<int64_t> forced_lengths;
  // Whether the scheduler is told forced_lengths. Else they end as by a stop token (FinishReason::kStop), and it knows
  // the limit only, as in a run.
  bool ends_known = true;
  std::optional<SamplingOptions> sampling;  // instead of the engine's
};

// What becomes of the keys and values of unfinished samples when the weights change.
enum class KeptCache {
  kNothing,  // they are computed again, so that each token's log-prob is that of its weights, bit for bit
  kKept,     // they stay: samples that go on over them are marked (mixed_context)
};

enum class FinishReason { kStop, kLength };
const char* to_string(FinishReason reason);  // "stop", "length"

struct GeneratedSample {
  std::vector<int32_t> response;
  std::vector<float> logprobs;  // one a token, of the distribution it was drawn from
  VersionSpans versions;        // of the weights that drew the tokens
  bool mixed_context = false;   // some were drawn over keys and values of older weights (KeptCache)
  FinishReason finish = FinishReason::kLength;
};

struct GeneratedGroup {
  int64_t group_id = 0;
  uint64_t first_sample_id = 0;
  std::vector<int32_t> prompt;
  std::vector<GeneratedSample> samples;
};

struct EngineStats {
  int64_t steps = 0;
  int64_t prefill_tokens = 0;
  int64_t decode_tokens = 0;
  int64_t sampled_tokens = 0;  // kept ones
  int64_t surplus_tokens = 0;  // dropped by late_stops
  int64_t preemptions = 0;
  int64_t copied_rows = 0;      // prompts copied, extents moved
  int64_t recomputed_rows = 0;  // of samples with tokens: computed again after an update or a preemption
  int64_t cache_rows = 0;       // capacity; 0 while there is no cache
  int64_t peak_cache_rows = 0;
  int64_t lanes = 1;                              // schedulers that take turns
  int64_t sequence_steps = 0;                     // sequences in a step, summed over steps
  double seconds = 0.0;                           // in step(), all of the following and planning
  double forward_seconds = 0.0;                   // starting steps; on CPU their computation
  double waiting_seconds = 0.0;                   // for the device
  double host_seconds = 0.0;                      // preparing steps, stop checks
  double occupancy(int64_t max_sequences) const;  // mean part of max_sequences in use
};

// Engines over a model whose experts are split step together: take_cache(), step() and run() are collective over
// ModelOptions::steps, with rows of an engine's own or none. They take their caches before anything is submitted.
// Before each step() all of them ask somebody_unfinished() or largest_together(), and step, or not, by its answer.
// Samples, stops and preemption are each engine's own, or its replica's.
//
// Engines over a model with several stages (ModelOptions::links) are collective over the pipeline: the same submits and
// steps on all stages. A stage is ahead of the next one by a turn of a lane or some. With split experts too each stage
// steps with the same stage of the other replicas, turn by turn: these have as many lanes, and an idle lane takes its
// turns without rows.
//
// One thread owns an engine. It reads the model's live weights: nobody may write them during step(), and after a write
// weights_changed() comes before the next step(). Until the first one the weights' version is 0.
class Engine final {
 public:
  // `tokenizer` is needed for stop strings only. Both outlive the engine. Throws Error(kUser) on impossible options.
  Engine(const Model& model, const Tokenizer* tokenizer, const EngineOptions& options, const SamplingOptions& sampling);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Of engines that step together: takes the cache's memory, where it has none. Nothing for others, whose first submit
  // does. drive_rollout and run() call it.
  void take_cache();
  // Throws Error(kUser) that names the group when it can never be generated; the engine is unchanged then.
  void submit(GroupRequest request);
  // One batch through the model, of each lane. Returns the groups that became complete. Nothing happens when idle, but
  // for a batch without rows where engines step together.
  std::vector<GeneratedGroup> step();
  bool idle() const;
  int64_t unfinished_samples() const;
  // Of this engine or of one that it steps together with. Collective over these.
  bool somebody_unfinished() const;
  // The largest of the values that this engine and those that it steps together with name. Collective over these.
  int64_t largest_together(int64_t value) const;
  // In the last step a sample that could have begun found no room: prefill budget, cache rows or places. Of lanes: in
  // each of them.
  bool crowded() const;
  // Steps until idle; groups in the order in which they were submitted.
  std::vector<GeneratedGroup> run();

  // Called in step() for every sample that has ended, before its group is complete. `index`: in the group. May be
  // empty.
  std::function<void(const GroupRequest& group, int64_t index, const GeneratedSample& sample)> on_sample;
  // From the next step on, while few samples are left (kSharedDeviceSamples), generation keeps to the foreground of
  // EngineOptions::partition. Switched off again before anything else reads or writes what the engine does.
  void share_device(bool on);

  // The weights are those of `version` from the next step on. Unfinished samples go on with them.
  void weights_changed(int64_t version, KeptCache kept = KeptCache::kNothing);
  int64_t weights_version() const;
  // Takes the tokens that are under way, and returns the groups that these have completed. What is unfinished stays.
  // Behind it the device does nothing for the engine, and the lines between stages are others' until the next step.
  std::vector<GeneratedGroup> settle();
  // settle(), and sets all unfinished samples aside with the tokens they have: nothing is cached any more, and the
  // engine is idle. Of an engine over stages all ranks do either behind the same step; of engines that step together
  // each for itself.
  std::vector<GeneratedGroup> suspend();
  // What was set aside goes on. Before anything else is submitted.
  void resume();
  int64_t suspended_samples() const;
  // Gives the cache's memory back; the next submit, or resume, takes it again (captured graphs stay): where others have
  // taken some of it meanwhile and the engine found its size itself, as much as there is. Only when idle.
  void release_cache();

  const EngineOptions& options() const;  // cache_rows as given
  const SamplingOptions& sampling() const;
  const EngineStats& stats() const;
  void reset_stats();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
