// drive_rollout: one rank's part of a rollout, from a source of runs through the engine. The one loop of trainer,
// benchmarks and `trireme generate`.
#pragma once

#include <functional>
#include <string>

#include "trainer/rollout/engine.h"
#include "trainer/rollout/queue.h"

namespace trireme {

// A sample that has just ended; others of its run may still be generated. Valid during the call.
struct FinishedSample {
  const SampleRun& run;
  int64_t index = 0;  // in its group
  const GroupRequest& request;
  const GeneratedSample& generated;
};

// All are called from the thread that drives. Only `request` must be there.
struct DriverHooks {
  // A run as the engine wants it. first_sample_id is that of the run's first sample, of no other unfinished run;
  // group_id and samples are filled in.
  std::function<GroupRequest(const SampleRun& run)> request;
  // What a message about a run that the engine refuses begins with ("prompts.jsonl:3: ").
  std::function<std::string(const SampleRun& run)> origin;
  std::function<void(const FinishedSample& sample)> finished;
  std::function<void(const SampleRun& run, GeneratedGroup samples)> complete;  // all samples of the run have ended
  std::function<void()> between_steps;
};

// Returns when `source` gives no more and the engine is idle. Errors of engine and hooks go through.
void drive_rollout(Engine& engine, RunSource& source, const DriverHooks& hooks);

}  // namespace trireme
