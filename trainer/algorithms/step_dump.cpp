#include "trainer/algorithms/step_dump.h"

#include <ATen/ATen.h>

#include <map>
#include <string>

namespace trireme {

void StepDump::add(const TrainingBatch& batch, const at::Tensor& logprobs, const at::Tensor& unfiltered,
                   const at::Tensor& loss) {
  const MicroBatch& micro = batch.micro_batch;
  const std::string prefix = "micro_batch." + std::to_string(micro_batches_++) + ".";
  const auto keep = [&](const char* name, at::Tensor tensor) {
    tensors_.emplace_back(prefix + name, std::move(tensor));
  };
  keep("ids", micro.input.ids);
  keep("starts", at::tensor(micro.input.starts, at::kLong));
  keep("rows", micro.rows);
  keep("targets", micro.targets);
  keep("sequence", micro.sequence);
  keep("mask", batch.mask);
  keep("sequence_mask", batch.sequence_mask);
  keep("advantages", batch.advantages);
  keep("weight_versions", batch.versions);
  keep("generation_logprobs", batch.generation);
  keep("previous_logprobs", batch.previous);
  keep("current_logprobs", logprobs.to(at::kCPU));
  if (unfiltered.defined()) keep("unfiltered_logprobs", unfiltered.to(at::kCPU));
  keep("loss", loss.detach().to(at::kCPU, at::kDouble).reshape({1}));
  if (batch.reference.defined()) keep("reference_logprobs", batch.reference);
  if (batch.positive.defined()) keep("positive", batch.positive);
  if (batch.values.defined() && batch.values.numel() > 0) {
    keep("values", batch.values);
    keep("returns", batch.returns);
  }
  if (!micro.input.prefix.empty()) keep("prefix", at::tensor(micro.input.prefix, at::kLong));
}

void StepDump::write(Model& policy, const ValidCounts& valid, const Config& config) {
  for (const Parameter& parameter : policy.parameters()) {
    if (!parameter.trainable || policy.units() != nullptr) continue;  // shared gradients are not this rank's any more
    const at::Tensor gradient = policy.flat_gradients().narrow(0, parameter.offset, parameter.size);
    tensors_.emplace_back("grad_norm." + parameter.name, gradient.to(at::kDouble).norm().reshape({1}).to(at::kCPU));
  }
  std::map<std::string, std::string> metadata = {{"micro_batches", std::to_string(micro_batches_)},
                                                 {"global_valid_tokens", std::to_string(valid.tokens)},
                                                 {"global_valid_sequences", std::to_string(valid.sequences)},
                                                 {"global_positive_tokens", std::to_string(valid.positive_tokens)},
                                                 {"config", to_yaml(config)}};
  // The configuration may leave it to be derived from the layout, which whoever replays the step does not have.
  if (policy.config().num_experts > 0) metadata["expert_blocks"] = std::to_string(policy.expert_blocks());
  write_safetensors(path_, tensors_, metadata);
}

}  // namespace trireme
