// trireme bench train: forward, GRPO loss, backward and optimizer on packed micro-batches.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>

#include "trainer/bench/report.h"
#include "trainer/parallel/context.h"

namespace trireme::bench {

struct TrainBenchOptions {
  CommonOptions common;
  int64_t tokens = 16384;                  // of a micro-batch of one rank
  int64_t sequences = 4;                   // in a micro-batch; they share its tokens evenly
  int64_t prompt_tokens = 0;               // of each sequence, not scored; 0: 200, or half a sequence if that is less
  int64_t micro_batches = 4;               // of a rank in one optimizer step
  std::string gradient_dtype = "float32";  // in which backward adds up and ranks reduce
  std::string sharding = "optim";          // what data parallel ranks share (topology/sharding.h)
  bool optimizer = true;
  bool checkpoint_activations = false;
  int64_t recompute_layers = -1;  // policy.recompute_layers
  // Gradients reduced beside the last backward pass, weights gathered beside the next forward, rows of tensor ranks
  // exchanged beside products.
  bool overlap = true;
  std::string trace;  // file for the kernels of one more step; .RANK is added where there are several; empty: none
};
// Collective: ranks train together as they do in a run. Every rank returns the report; rank 0 prints and writes it.
// Seconds are of a whole optimizer step, the slowest rank's; TFLOP/s are those of one device.
nlohmann::json bench_train(const TrainBenchOptions& options, ParallelContext& context, std::ostream& out);

}  // namespace trireme::bench
