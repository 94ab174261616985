// trireme bench refit: the weights of a shape to engines in other processes, in a layout of each side: transfer, and
// what decoding stops for.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>

#include "topology/topology.h"
#include "trainer/bench/report.h"
#include "trainer/parallel/context.h"
#include "trainer/parallel/weight_link.h"

namespace trireme::bench {

struct RefitBenchOptions {
  CommonOptions common;
  WeightLinkOptions link;     // where the store is, and the deadline; the rest is filled in
  bool second_buffer = true;  // false: as an engine without room for one
  // The first `actors` ranks train in `training`, whose dp follows; 0: as few as hold the weights in it. The others are
  // engines, so many ranks in a row each.
  Layout training, engine;
  int64_t actors = 0;
};

// Collective over all ranks: those that train hold the weights and send them, by the trainer's WeightSender; each of an
// engine's receives its part, all at the same time. One transfer more than `repeats` is made, the first, which connects
// and compares checksums, is reported by itself; where nobody has less than a whole model as many follow beside forward
// passes on both sides, as of the next step and of decoding. Seconds are of the slowest rank, bytes of the one that
// receives most. All ranks return the report; rank 0 prints and writes it. Throws Error(kUser) that says how many ranks
// it needs, or what of a layout does not fit the shape.
nlohmann::json bench_refit(const RefitBenchOptions& options, ParallelContext& context, std::ostream& out);

}  // namespace trireme::bench
