// StepRunner: carries one planned step out on a device. The engine plans and looks at tokens, a runner computes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "trainer/model/model.h"
#include "trainer/ops/partition.h"
#include "trainer/rollout/scheduler.h"

namespace trireme {

struct StepRequest {
  const StepPlan* plan = nullptr;
  int64_t lane = 0;  // whose step it is (lanes.h); 0 where there is one
  // [plan.tokens]: the token's id, or -(i + 1) for the one that output i of the lane's previous step samples: its id
  // may not have reached the host yet.
  std::vector<int64_t> tokens;
  std::vector<SampleRow> rows;  // one for each output of the plan
};

// One thread owns it. Steps are started in order; their results are taken in the same order, of each lane at most one
// step late. Where the model has several stages, start(), proceed() and take() are collective over them: each stage
// makes the same calls, whenever it comes to them.
class StepRunner {
 public:
  virtual ~StepRunner() = default;
  // Moves and copies cache rows, runs the first of the stage's pieces, samples behind the model's last one. May return
  // before the device is done; the request may change afterwards.
  virtual void start(const StepRequest& request) = 0;
  // The next piece of the step that the lane started last, with rows or without. Only where stages have several pieces.
  virtual void proceed(int64_t lane) = 0;
  // A lane's turn of those this rank steps together with, in which it has no rows; it has no results. Only where
  // experts are split: there start() is collective over ModelOptions::steps too, on CUDA.
  virtual void start_without_rows(int64_t lane);
  // The results of the oldest step that was not taken yet; waits for it.
  virtual SampleResult take() = 0;
  // Runs the largest step there can be, prompts of `prefill_tokens` beside a token of every sequence, and captures all
  // graphs, so that afterwards a step wants no memory that is not there yet. `like`: how tokens are sampled. Only while
  // nobody's rows are in the arena: they are overwritten.
  virtual void warm_up(int64_t /*prefill_tokens*/, const SampleRow& /*like*/) {}
  // From the next step on: steps of at most kSharedDeviceSamples samples run in the foreground of the partition, so
  // that somebody else can compute in its background. Nothing where there is no partition.
  virtual void share_device(bool /*on*/) {}
};
inline constexpr int64_t kSharedDeviceSamples = 32;

// CPU: everything happens in start(). `arena` has the plan's rows.
std::unique_ptr<StepRunner> make_host_runner(const Model& model, KvArena& arena);

// CUDA: start() only queues work. Pure decode steps are CUDA graphs, by bucket of rows and number of samples. The last
// row of `arena` is none that the scheduler knows of: padded rows write to it. `max_rows`: most sequences of a step;
// `lanes`: most lanes there will be. `partition` may be null.
std::unique_ptr<StepRunner> make_device_runner(const Model& model, KvArena& arena, int64_t max_rows, int64_t lanes,
                                               std::shared_ptr<const DevicePartition> partition);
inline constexpr int64_t kDeviceScratchRows = 1;

// These, as make_device_runner, are for CUDA devices: in builds without CUDA (no_cuda/) they throw.
struct DeviceMemory {
  int64_t total = 0;
  int64_t free = 0;     // that nobody holds
  int64_t tensors = 0;  // of LibTorch
  int64_t cached = 0;   // that its allocator keeps for itself
};
DeviceMemory device_memory(at::Device device);
std::string to_string(const DeviceMemory& memory);
// Gives the allocator's part back.
void empty_device_cache(at::Device device);
// Free and cached.
int64_t device_available_bytes(at::Device device);

// Rows [outputs, hidden] of `hidden` that are sampled from.
at::Tensor output_rows(const at::Tensor& hidden, const StepPlan& plan);

}  // namespace trireme
