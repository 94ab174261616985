// drive_rollout: one rank's part of a rollout, from a source of spans through the engine. The one loop of trainer,
// benchmarks and `trireme generate`.
#pragma once

#include <functional>
#include <string>

#include "trainer/rollout/engine.h"
#include "trainer/rollout/queue.h"

namespace trireme {

// A sample that has just ended; others of its span may still be generated. Valid during the call.
struct FinishedSample {
  const SampleSpan& span;
  int64_t index = 0;  // in its group
  const GroupRequest& request;
  const GeneratedSample& generated;
};

// All are called from the thread that drives. Only `request` must be there.
struct DriverHooks {
  // A span as the engine wants it. first_sample_id is that of the span's first sample, of no other unfinished span;
  // group_id and samples are filled in.
  std::function<GroupRequest(const SampleSpan& span)> request;
  // What a message about a span that the engine refuses begins with ("prompts.jsonl:3: ").
  std::function<std::string(const SampleSpan& span)> origin;
  std::function<void(const FinishedSample& sample)> finished;
  std::function<void(const SampleSpan& span, GeneratedGroup samples)> complete;  // all samples of the span have ended
  std::function<void()> between_steps;
};

// Returns when `source` gives no more and the engine is idle, and where experts are split (engine.h) so are those of
// the expert group, all of which drive their rollouts at once. Errors of engine and hooks go through.
void drive_rollout(Engine& engine, SampleSource& source, const DriverHooks& hooks);

}  // namespace trireme
