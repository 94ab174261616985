// What the first optimizer step of a rollout saw on this rank, for `trireme replay`.
#pragma once

#include <string>

#include "trainer/algorithms/training_batch.h"
#include "trainer/config/config.h"
#include "trainer/model/model.h"
#include "trainer/model/safetensors.h"

namespace trireme {

class StepDump final {
 public:
  explicit StepDump(std::string path) : path_(std::move(path)) {}  // empty: nothing is kept or written

  bool wanted() const { return !path_.empty(); }
  // A trained micro-batch: `logprobs` [T] of the forward that was differentiated, `unfiltered` those of the KL where it
  // has others (else undefined), and its loss.
  void add(const TrainingBatch& batch, const at::Tensor& logprobs, const at::Tensor& unfiltered,
           const at::Tensor& loss);
  // With the norm of each parameter's gradient (this rank's sums) and what they were divided by. Throws Error(kIo).
  void write(Model& policy, const ValidCounts& valid, const Config& config);

 private:
  std::string path_;
  NamedTensors tensors_;
  int64_t micro_batches_ = 0;
};

}  // namespace trireme
