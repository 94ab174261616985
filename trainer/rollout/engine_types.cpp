// What the engine's options and results say of themselves.
#include "trainer/rollout/engine.h"

namespace trireme {

LogprobOptions SamplingOptions::logprob_options() const {
  LogprobOptions options;
  options.temperature = temperature == 0.0 ? 1.0 : temperature;
  options.top_k = top_k;
  options.top_p = top_p;
  options.min_p = min_p;
  return options;
}

const char* to_string(FinishReason reason) { return reason == FinishReason::kStop ? "stop" : "length"; }

double EngineStats::occupancy(int64_t max_sequences) const {
  const auto places = static_cast<double>(max_sequences) / static_cast<double>(lanes);  // of a step
  return steps == 0 ? 0.0 : static_cast<double>(sequence_steps) / (static_cast<double>(steps) * places);
}

}  // namespace trireme
