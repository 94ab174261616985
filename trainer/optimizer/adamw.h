// DistributedAdamW: AdamW with decoupled weight decay (Loshchilov and Hutter 2019) on fp32 master slices, ZeRO stage 1.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <vector>

#include "trainer/model/model.h"
#include "trainer/parallel/communicator.h"

namespace trireme {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  bool decay_all = true;  // false: no decay on norms and biases (Megatron's rule)
  bool reduce_in_fp32 = true;
  int64_t bucket_elements = int64_t{1} << 24;
};

struct OptimizerStep {
  double grad_norm = 0;  // before clipping, over all parameters and ranks
  double clip_factor = 1;
};

class DistributedAdamW final {
 public:
  // The model's buffers must outlive the optimizer. `data_parallel` likewise.
  DistributedAdamW(Model& model, Communicator& data_parallel, const AdamWOptions& options);

  // Consumes the model's gradients (sums over this rank's micro-batches, already divided by global counts; summed over
  // ranks here), updates the weights and zeroes the gradients. max_grad_norm 0: no clipping.
  // Throws Error(kData) that names the first parameter whose gradient is not finite; nothing is changed then.
  OptimizerStep step(double learning_rate, double weight_decay, double max_grad_norm);

  int64_t steps_done() const { return steps_done_; }
  void set_steps_done(int64_t steps) { steps_done_ = steps; }

  // This rank's part as dir/rank_00000.safetensors (crash-safe write).
  void save(const std::filesystem::path& dir) const;
  // Reads what any number of ranks have saved and takes this rank's part. Throws Error(kData) when parts are missing.
  void load(const std::filesystem::path& dir);
  // After the live weights were loaded from elsewhere.
  void reset_master_from_weights();

  int64_t owned_elements() const { return owned_; }

 private:
  struct Slice {        // one bucket's part of this rank
    int64_t begin = 0;  // in the flat buffer
    int64_t size = 0;   // inside the buffer; the padded part is longer at the end
    int64_t at = 0;     // in the owned tensors
  };
  struct Decayed {  // a run of owned elements with weight decay
    int64_t at = 0;
    int64_t size = 0;
  };
  struct Factors;  // of one step
  int64_t bucket_begin(int64_t bucket) const { return bucket * bucket_; }
  void reduce_gradients();
  double sum_of_squares() const;
  void check_finite(double squares) const;
  void update(const Factors& factors);
  void write_weights();
  void write_bucket(int64_t bucket);
  void mark_decayed_groups();
  void update_on_device(const Factors& factors);

  Model& model_;
  Communicator& group_;
  AdamWOptions options_;
  int64_t elements_ = 0;
  int64_t bucket_ = 0;  // elements, a multiple of the number of ranks
  int64_t buckets_ = 0;
  int64_t owned_ = 0;
  std::vector<Slice> slices_;
  std::vector<Decayed> decayed_;
  at::Tensor master_;   // [owned] fp32; with one rank and fp32 weights a view of them
  at::Tensor exp_avg_;  // [owned] fp32
  at::Tensor exp_avg_sq_;
  at::Tensor grads_;  // [owned] fp32, scratch; undefined on CUDA with one rank, where the model's are read in place
  at::Tensor decay_bits_;  // CUDA: int32, a bit for each 64 elements of the flat buffer
  int64_t steps_done_ = 0;
};

}  // namespace trireme
