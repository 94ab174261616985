// trireme bench refit: the weights of a shape to engines in other processes: transfer, and what decoding stops for.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>

#include "trainer/bench/report.h"
#include "trainer/parallel/context.h"
#include "trainer/parallel/weight_link.h"

namespace trireme::bench {

struct RefitBenchOptions {
  CommonOptions common;
  WeightLinkOptions link;     // where the store is, and the deadline; the rest is filled in
  bool second_buffer = true;  // false: as an engine without room for one
};

// Collective over at least two ranks. Rank 0 holds the weights and sends them, by the trainer's WeightSender; each
// other one is an engine that receives all of them. One transfer more than `repeats` is made, the first, which connects
// and compares checksums, is reported by itself; as many follow beside forward passes on both sides, as of the next
// step and of decoding. All ranks return the report; rank 0 prints and writes it.
nlohmann::json bench_refit(const RefitBenchOptions& options, ParallelContext& context, std::ostream& out);

}  // namespace trireme::bench
