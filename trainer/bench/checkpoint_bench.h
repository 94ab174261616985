// trireme bench checkpoint: what a step waits for its checkpoint, and how fast that is written.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>

#include "trainer/bench/report.h"
#include "trainer/parallel/context.h"

namespace trireme::bench {

struct CheckpointBenchOptions {
  CommonOptions common;
  std::string directory;          // checkpoints go into a folder of their own below it; empty: a temporary one
  double generation_seconds = 0;  // between a save and the next optimizer step; 0: 20 on CUDA, 1 on CPU
  double staging_gib = 0;         // checkpointing.staging_gib
  // Above 0: of weights and state nothing is kept, and a rank's writing takes as long as at this rate. For states that
  // are larger than the disk at hand.
  double disk_gigabytes_per_second = 0;
  std::string gradient_dtype = "float32";
};

// Collective. Weights and optimizer state of the shape are saved by the trainer's own CheckpointManager while forward
// passes of the model keep the device busy as decoding does; then comes an optimizer step, which waits until its state
// is copied. One save more than `repeats` is made: the first is reported by itself, since memory may still be pinned.
// Every rank returns the report; rank 0 prints and writes it.
nlohmann::json bench_checkpoint(const CheckpointBenchOptions& options, ParallelContext& context, std::ostream& out);

}  // namespace trireme::bench
