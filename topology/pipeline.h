// In which order the stages of a pipeline run their pieces forward and backward over the micro-batches: 1F1B,
// interleaved and forward-only passes. A table is what every stage carries out; who waits for whom follows from it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace trireme {

struct PipelinePass {
  int64_t piece = 0;  // of the stage (stage_pieces)
  int64_t micro_batch = 0;
  bool backward = false;
  bool operator==(const PipelinePass&) const = default;
};

struct PipelineTable {
  int64_t pieces = 1;
  std::vector<std::vector<PipelinePass>> stages;  // what each stage runs, in order
  // Of each stage: the most pairs of piece and micro-batch at once whose forward has begun and whose backward has not
  // ended, which is when their activations are kept. 0 in forward-only passes, which keep none.
  std::vector<int64_t> most_in_flight;
};

// One optimizer step: 1F1B, with several pieces Megatron's interleaved order (Narayanan et al., "Efficient large-scale
// language model training on GPU clusters using Megatron-LM", 2021). Any number of micro-batches from 0 on.
//   With one piece stage s has min(micro_batches, pp - s) in flight and the bubble is (pp - 1) / micro_batches.
//   With several Megatron demands a multiple of pp. Here the table of the next multiple is taken and what it says of
//   micro-batches that are not there is left out: what is left needs only what is left, so it cannot lock up, and has
//   no more in flight. (Megatron's own order over a smaller last group does lock up: 4 stages of 3 pieces, 5
//   micro-batches.)
// On every stage the backward passes of a piece are in the order of the micro-batches, so gradients are summed in it.
// Between two stages passes of one direction send in the order in which they are received.
PipelineTable training_passes(int64_t pp, int64_t pieces, int64_t micro_batches);
// The same order without backward.
PipelineTable forward_passes(int64_t pp, int64_t pieces, int64_t micro_batches);

// Where the input of a pass was made, or its output goes: a stage and its piece. Nothing: the micro-batch's tokens and
// the loss, on the first stage's first and the last stage's last piece.
struct PipelinePlace {
  int64_t stage = 0;
  int64_t piece = 0;
  bool operator==(const PipelinePlace&) const = default;
};
std::optional<PipelinePlace> input_of(const PipelineTable& table, int64_t stage, const PipelinePass& pass);
std::optional<PipelinePlace> output_of(const PipelineTable& table, int64_t stage, const PipelinePass& pass);

// How long passes take, in any unit: [stage][piece], of each kind all or none (forward 1, backward 2).
struct PipelineCosts {
  std::vector<std::vector<double>> forward, backward;
  double hop = 0;  // from a pass's end until its output is where it goes
};
struct PipelineTime {
  double total = 0;   // from the first pass to the end of the last
  double bubble = 0;  // time that stages wait over time that they work
};
// Every pass begins when its stage is free and its input there.
PipelineTime pipeline_time(const PipelineTable& table, const PipelineCosts& costs = {});

}  // namespace trireme
