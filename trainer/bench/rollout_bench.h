// trireme bench rollout and decode: the generation engine against the bytes it must read.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "trainer/bench/generation.h"

namespace trireme::bench {

struct RolloutBenchOptions {
  CommonOptions common;
  GenerationOptions generation;
  std::string lengths;           // see load_lengths
  int64_t lanes = 0;             // of a pipeline; 0: as many as stages
  int64_t score_tokens = 16384;  // of a packed batch of the comparison with the loss; 0: no comparison
};
// Of one replica, whose ranks are those of `context`; collective over them. The first one prints its tables to `out`
// and writes its JSON, all return theirs.
nlohmann::json bench_rollout(const RolloutBenchOptions& options, ParallelContext& context, std::ostream& out);

struct DecodeBenchOptions {
  CommonOptions common;
  GenerationOptions generation;  // max_sequences does not matter
  std::vector<int64_t> batch_sizes = {16, 64};
  int64_t context = 400;       // mean tokens of a sample over the measured steps
  int64_t steps = 64;          // measured
  int64_t background_sms = 0;  // left to somebody else (who does nothing); steps of few samples only
  std::string trace;  // file for the kernels of some more steps; with several batch sizes NAME.N each; empty: none
};
nlohmann::json bench_decode(const DecodeBenchOptions& options, ParallelContext& context, std::ostream& out);

// Decode steps by how many samples were alive in them.
struct AliveBin {
  int64_t low = 0, high = 0;  // samples; high 0: no limit
  int64_t steps = 0;
  double seconds = 0;
  int64_t floor_steps = 0;  // of a schedule in which all samples start together; 0 when they cannot
  double floor_seconds = 0;
};
std::vector<AliveBin> alive_bins(const std::vector<TimedStep>& steps);  // without those that prefill
// Fills the floors: each step reads the weights that its samples need, and every alive sample's context.
void add_floors(std::vector<AliveBin>& bins, const RolloutLengths& lengths, const ModelConfig& config,
                int64_t element_bytes, double bytes_per_second);

}  // namespace trireme::bench
