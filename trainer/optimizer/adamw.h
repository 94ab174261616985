// DistributedAdamW: AdamW with decoupled weight decay (Loshchilov and Hutter 2019) on fp32 master slices: ZeRO stages 0
// to 3 (Rajbhandari et al. 2020).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <vector>

#include "trainer/model/model.h"
#include "trainer/model/safetensors.h"
#include "trainer/optimizer/state_pieces.h"
#include "trainer/parallel/communicator.h"
#include "trainer/parallel/stage_links.h"

namespace trireme {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  bool decay_all = true;  // false: no decay on norms and biases (Megatron's rule)
  bool reduce_in_fp32 = true;
  int64_t bucket_elements = int64_t{1} << 24;  // where a model shares gradients or weights, its Sharding's count
  bool shard_state = true;  // false: every rank has all of its part of the model; not where the model shares anything
};

struct OptimizerStep {
  double grad_norm = 0;  // before clipping, over all parameters and ranks
  double clip_factor = 1;
  int64_t reduced_early = 0;  // buckets whose reduction began before step() was called
};

class DistributedAdamW final {
 public:
  // The model's buffers must outlive the optimizer. `data_parallel` likewise: the ranks with the same part of the
  // model, which are those of its Sharding, where it has one: then every backward pass reduces each unit's gradients,
  // and step() only what is left. Where the model is split its own groups count too: gradients of what tensor ranks
  // hold alike are summed over these, those of a tied embedding over the pipeline's ends, and the norm is that of the
  // whole model. `expert_data_parallel`: where experts are apart (ModelSplit), the ranks that hold the same ones;
  // else null.
  DistributedAdamW(Model& model, Communicator& data_parallel, const AdamWOptions& options,
                   Communicator* expert_data_parallel = nullptr);

  ~DistributedAdamW();
  DistributedAdamW(const DistributedAdamW&) = delete;
  DistributedAdamW& operator=(const DistributedAdamW&) = delete;

  // Call before the forward pass of the last micro-batch of an optimizer step: its backward pass then begins to reduce
  // each bucket when no gradient in it will change any more; step() does the rest. The sums are those of a reduction
  // after the backward pass, bit for bit. A rank without a micro-batch does not call it, unless it makes passes without
  // rows for the others' sake (ModelOptions::passes): these all call it before the same pass, since the exchanges of
  // experts' rows stand between reductions. Experts that are apart are reduced in step(). Nothing with one rank.
  void reduce_in_next_backward();

  enum class Gather {
    kNow,    // step() returns with the weights whole (on CUDA: for what the current stream does next)
    kLater,  // each bucket when a forward pass reads it first (Model::before_reading), all at finish_gather()
  };

  // Consumes the model's gradients (sums over this rank's micro-batches, already divided by global counts; summed over
  // ranks here), updates the weights and zeroes the gradients. max_grad_norm 0: no clipping.
  // Throws Error(kData) that names the first parameter whose gradient is not finite; nothing is changed then.
  OptimizerStep step(double learning_rate, double weight_decay, double max_grad_norm, Gather gather = Gather::kNow);
  // After this the weights may be read by any means. Collective only in that every rank's step() came before.
  void finish_gather();

  int64_t steps_done() const { return steps_done_; }
  void set_steps_done(int64_t steps) { steps_done_ = steps; }

  // Called in step() before anything that saved() or the weights hold is written: whoever reads them beside the
  // training thread is waited for there. May be empty; what it throws, step() throws, with nothing changed.
  std::function<void()> before_update;

  // This rank's part, rank_00000.safetensors: views of the live state, valid until the next step(). Its metadata name
  // what of which parameter lies where (state_pieces.h).
  TensorFile saved() const;
  // Writes it into the folder (crash-safe).
  void save(const std::filesystem::path& dir) const;
  // Reads what the ranks of any layout have saved and takes this rank's part. Throws Error(kData) that names the first
  // elements that are missing.
  void load(const std::filesystem::path& dir);
  // After the live weights were loaded from elsewhere.
  void reset_master_from_weights();

  int64_t owned_elements() const { return owned_; }

 private:
  struct Bucket : FlatBucket {  // a part of the flat buffer that is reduced, and gathered, at once
    Communicator* group = nullptr;
    bool sharded() const { return group->size() == ranks; }
  };
  struct Slice {        // one bucket's part of this rank
    int64_t begin = 0;  // in the flat buffer
    int64_t size = 0;   // inside the buffer; the padded part is longer at the end
    int64_t at = 0;     // in the owned tensors
    // Of its summed gradients in grads_; kInPlace: nobody else has any, and they are read where backward left them.
    int64_t summed_at = 0;
  };
  static constexpr int64_t kInPlace = -1;
  struct OwnedElements {  // a run of them
    int64_t at = 0;
    int64_t size = 0;
  };
  struct CountedRun {  // of gradients: of the model's, or of grads_
    bool in_place = false;
    int64_t at = 0;
    int64_t size = 0;
  };
  struct Factors {  // of one step
    double learning_rate = 0;
    double weight_decay = 0;
    double clip = 1;
    double correction1 = 1;
    double correction2 = 1;
  };
  struct Reduction {  // of a bucket, under way
    int64_t bucket = 0;
    PendingCollective pending;
    at::Tensor sent;      // what is summed: a view of the gradients or a copy
    at::Tensor received;  // undefined: it goes into grads_ directly
    bool adds = false;    // to what grads_ holds
  };
  struct Gathering {
    int64_t begin = 0, size = 0;  // of the bucket, in the flat buffer
    PendingCollective pending;
    at::Tensor padded;  // of a bucket with padding: gathered here first
    at::Tensor mine;
  };
  std::vector<StatePiece> own_pieces(const OwnedElements& part) const;
  // What one file of a folder gives this rank: adds to `taken`, the elements of each of own_pieces() that are there.
  struct Taken {
    StatePiece piece;
    std::vector<StateCopy> copies;
  };
  void take_state(const SafetensorsFile& file, const std::filesystem::path& path, std::vector<Taken>& taken);
  void make_buckets();
  void make_state();
  void add_decayed();
  bool shares_weights() const;
  // What of a bucket this rank counts, and of its state saves: its slice, also of state that it has whole.
  Slice share_of(const Bucket& bucket) const;
  // Where the elements lie that saved() gives.
  OwnedElements saved_elements() const;
  // Begins the reduction of all buckets that begin at or behind `from` and have not begun, the last one first; not of
  // experts' that are apart, which reduce_experts does.
  void reduce_from(int64_t from);
  void reduce_experts();
  void reduce_bucket(int64_t index);
  void begin_reduction(int64_t index, const at::Tensor& gradients, bool adds);
  // A backward pass takes memory for a unit's gradients, begins to add to them, and has all of them:
  // ShardedUnits::before_gradient_memory, before_gradients and on_gradients.
  void await_sums(int64_t begin, int64_t end);
  void continue_sums(int64_t begin, const at::Tensor& gradients);
  void reduce_unit(int64_t begin, const at::Tensor& gradients);
  bool gradients_carry_sums() const;
  size_t first_bucket_from(int64_t begin) const;  // of the flat buffer
  void finish_oldest_reduction();
  void finish_reduction();
  void sum_alike();
  void sum_tied();
  int ranks_of_model() const;  // that share it, and this one's number among all ranks
  int job_rank() const;
  void count_elements();
  double sum_of_squares() const;
  void check_finite(double squares) const;
  std::string first_not_finite() const;
  void update(const Factors& factors);
  void write_weights();
  void gather_bucket(const Bucket& bucket);
  at::Tensor weights() const;
  void finish_gather_before(int64_t end);
  // On CUDA: cuda/adamw_device.cpp, and no_cuda/adamw_device.cpp in builds without.
  static double sum_of_squares_on_device(const at::Tensor& gradients);
  void mark_decayed_groups();
  void update_on_device(const Factors& factors);

  Model& model_;
  Communicator& group_;
  AdamWOptions options_;
  int64_t elements_ = 0;
  Communicator* experts_ = nullptr;  // null: experts are not apart
  std::vector<Bucket> buckets_;      // ascending
  int64_t owned_ = 0;
  int64_t summed_elements_ = 0;      // of them: those in grads_
  std::vector<CountedRun> counted_;  // in the norm: what no other rank has counted
  Communicator* tensor_ = nullptr;   // null: the model is not split over tensor ranks
  StageLinks* links_ = nullptr;      // null: it has one pipeline stage
  std::vector<Slice> slices_;
  std::vector<OwnedElements> decayed_;  // with weight decay
  at::Tensor master_;                   // [owned] fp32; a view of fp32 weights that are this rank's to write
  at::Tensor exp_avg_;                  // [owned] fp32
  at::Tensor exp_avg_sq_;
  at::Tensor grads_;  // [summed] fp32, scratch; undefined where all gradients are read in place
  std::deque<Reduction> reductions_;
  std::vector<bool> summed_;   // by bucket: reduce_unit has begun to sum it since the last step
  int64_t dense_ = 0;          // buckets before those of experts that are apart
  int64_t unreduced_ = 0;      // buckets 0 .. unreduced_ - 1 of this step, of dense_, have not begun
  int64_t reduced_early_ = 0;  // by reduce_unit since the last step
  bool armed_ = false;         // the model calls reduce_from
  std::deque<Gathering> gatherings_;
  bool watching_ = false;  // the model calls finish_gather_before
  at::Tensor decay_bits_;  // CUDA: int32, a bit for each 64 elements of the flat buffer
  int64_t steps_done_ = 0;
};

}  // namespace trireme
