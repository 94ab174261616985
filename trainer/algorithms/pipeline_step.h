// Passes of micro-batches through the pieces of a model: an optimizer step's forward and backward ones, and forward
// ones alone. With one pipeline stage that is one micro-batch after the other; with several the tables of
// topology/pipeline.h are carried out, what goes between stages is sent beside the next pass. Where experts are split
// over ranks all of ModelOptions::passes call these together, where weights (or in training gradients) are shared all
// that share them: who has fewer micro-batches adds passes without rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "trainer/model/model.h"

namespace trireme {

// The micro-batches and what is done with their results. All ranks of a pipeline give the same inputs.
struct PipelineWork {
  std::vector<const PackedBatch*> inputs;  // on the host
  // Behind the forward pass of micro-batch `index`, on the last stage only: `hidden` as Model::forward gives it. In
  // training the result is the loss whose gradients are wanted, a scalar; else it is not looked at.
  std::function<at::Tensor(size_t index, const at::Tensor& hidden)> finish;
  // Training: before the pass whose backward completes the stage's gradients in the order of the flat buffer, and so
  // not where the stage has several pieces. May be empty, as the next one.
  std::function<void()> before_last;
  std::function<void()> on_progress;  // after each micro-batch's last pass on this rank
};

// Forward and backward: adds to the model's gradients. On each stage the backward passes of a piece are in the order of
// the micro-batches. What finish throws leaves the other stages waiting: run_and_report tells them.
void train_passes(const Model& model, const PipelineWork& work);
// Forward only, without gradients.
void forward_passes(const Model& model, const PipelineWork& work);

// What the last stage has, on all stages: a tensor of the same size on all, or bytes. Collective over the pipeline.
void share_result(const Model& model, at::Tensor values);
std::string share_result(const Model& model, const std::string& bytes);

}  // namespace trireme
