// What actor and critic ranks write to each other: samples with their prompts, values, and what a call asks for.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "trainer/algorithms/metric_sums.h"
#include "trainer/batch/sample.h"

namespace trireme {

// Of a sample what a critic reads: group, index, prompt, response with the sampler's log-probs, loss multiplier and
// mask, values and returns as far as they are there. unpack throws Error(kData) for a malformed buffer.
std::string pack_for_critic(const std::vector<Sample>& samples);
std::vector<Sample> unpack_for_critic(std::string_view bytes);

// Sample::values of all samples, in order. unpack throws Error(kData) where there are not as many as tokens.
std::string pack_values(const std::vector<Sample>& samples);
void unpack_values(std::string_view bytes, std::vector<Sample>& samples);

// Actor rank 0 to all critic ranks, numbered in the order of the run.
struct CriticCall {
  enum class Kind {
    kValues,  // of the samples
    kTrain,   // on the samples, which have values and returns, in so many passes
    kSave,    // a checkpoint of the step; the actor's metrics of it
    kEnd,     // the run has ended, or was stopped
  };
  Kind kind = Kind::kEnd;
  int64_t step = 0;
  int64_t passes = 0;
  bool stopped = false;
  std::map<std::string, double> metrics;
  std::vector<Sample> samples;
};
// unpack throws Error(kData) for a malformed buffer, here and below.
std::string pack_call(const CriticCall& call);
CriticCall unpack_call(std::string_view bytes);

// What a critic's training gave; `seconds` on its own ranks.
struct CriticTrained {
  MetricSums metrics;
  double seconds = 0;
};
std::string pack_trained(const CriticTrained& trained);
CriticTrained unpack_trained(std::string_view bytes);

}  // namespace trireme
