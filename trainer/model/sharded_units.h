// ShardedUnits: gradients, or weights too, that the ranks which hold the same of a model share: whole only for a unit
// at a time, while a pass needs it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "trainer/model/shard_layout.h"
#include "trainer/model/unit_memory.h"
#include "trainer/ops/mapped_memory.h"
#include "trainer/parallel/communicator.h"

namespace trireme {

// `gradients`: a backward pass has gradients of a unit only until they are reduced. `weights`: besides, a rank keeps
// its part of each unit.
struct Sharding {
  bool gradients = false, weights = false;
  // Those that hold the same, and of them those with the same experts (null where these are not split). They outlive
  // the model.
  Communicator* ranks = nullptr;
  Communicator* experts = nullptr;
  // Most of what is gathered or summed at once: a unit is complete when its last bucket is, so few large ones are best.
  int64_t bucket_elements = int64_t{1} << 28;
  bool any() const { return gradients || weights; }
};

// The memory of a model's weights where all of it may come and go: on CUDA under stable addresses.
class WholeMemory final {
 public:
  WholeMemory(int64_t elements, const at::TensorOptions& options);
  at::Tensor map();  // zeros
  void unmap();

 private:
  int64_t elements_;
  at::TensorOptions options_;
  std::unique_ptr<cuda::MappedMemory> mapped_;  // null on a CPU
};

// A pass reads units in the order of their places and then goes back; one pass at a time. The ranks of both groups make
// the same calls.
class ShardedUnits final {
 public:
  struct Shape {
    ParameterLayout layout;
    at::TensorOptions weights;
    at::ScalarType gradients = at::kFloat;
    bool trainable = true;
    bool tied = false;           // the head is the embedding
    int64_t spare_elements = 0;  // zeros that are read behind a head
  };
  ShardedUnits(const Sharding& sharding, const Shape& shape);

  const ShardLayout& shards() const { return shards_; }
  int64_t places() const { return last_place_ + 1; }
  int64_t place_of(int64_t offset) const;  // of an element of the flat buffers; 0 where it is always there
  bool shares_weights() const { return sharding_.weights; }

  // The flat weights, and from element `offset` of the flat buffers on the weights, where these are shared, or
  // gradients of a leaf.
  at::Tensor flat_weights() const;
  at::Tensor weights(int64_t offset, const std::vector<int64_t>& shape) const;
  at::Tensor gradients(int64_t offset, const std::vector<int64_t>& shape) const;
  // Of what tensor ranks hold alike: kept from pass to pass.
  const at::Tensor& alike_gradients() const { return alike_gradients_; }

  // Called in every backward pass when the gradients of a unit are complete: the flat element that the first one is of,
  // and all of them, behind them zeros up to the width of the unit's buckets. May be empty.
  std::function<void(int64_t begin, const at::Tensor& gradients)> on_gradients;
  // Called before memory is taken for the gradients of elements [begin, end): what was handed over of an earlier pass,
  // and still has its memory, is waited for there. May be empty.
  std::function<void(int64_t begin, int64_t end)> before_gradient_memory;
  // Called before the pass adds to gradients, when they are zeros: what is written there is in the sum. May be empty.
  std::function<void(int64_t begin, const at::Tensor& gradients)> before_gradients;

  // Before a forward pass reads what is at `place`, and behind its last place. `backward`: one follows.
  void read(int64_t place);
  void end_forward(bool backward);
  // In backward: everything at `place` is differentiated.
  void differentiated(int64_t place);
  // Before a backward pass: whether a forward pass follows it. What that reads first is then gathered, or kept, while
  // the first layers are differentiated. False until it is said.
  void expect_forward(bool follows) { forward_follows_ = follows; }
  // No pass reads any more.
  void end_passes();

  // Weights that are shared. Whole, as after the construction (zeros): one flat tensor, which anybody may read.
  bool whole() const { return !sharding_.weights || flat_.here(); }
  void gather();   // collective
  void release();  // keeps this rank's parts as they are in parts()
  // Called before whole weights go: whoever reads them beside the training thread is waited for there. May be empty.
  std::function<void()> before_release;
  // [shards().owned], of the weights' dtype: by bucket, padding is zero.
  const at::Tensor& parts() const { return parts_; }
  void cut();      // parts from the whole weights
  void refresh();  // everything that is there from the parts; collective

 private:
  struct Unit : WeightUnit {
    std::vector<FlatBucket> buckets;
    Communicator* group = nullptr;
    int64_t width = 0;  // of its buckets together
    UnitMemory values, gradients;
    at::Tensor coming;  // gathered into, until `pending` are done
    std::vector<PendingCollective> pending;
  };
  struct Resident {  // weights that are always there
    int64_t begin = 0;
    UnitMemory values;
    at::Tensor kept;  // while the whole weights are not there
  };
  Communicator& group_of(const FlatBucket& bucket) const;
  bool stays(const Unit& unit) const;  // to the end of the pass
  void begin_gather(Unit& unit);
  void have(int64_t place);
  void ahead(int64_t place);
  void leave(Unit& unit);
  void make_gradients(int64_t place);
  void point_at(const at::Tensor& whole);

  const Sharding sharding_;
  const Shape shape_;
  int64_t last_place_ = 0;
  bool forward_follows_ = false;
  ShardLayout shards_;
  std::vector<Unit> units_;
  at::Tensor parts_and_spare_, parts_, alike_gradients_;  // the second one without the spare elements
  UnitMemory flat_;
  Resident alike_, frozen_;
  std::unique_ptr<WholeMemory> memory_;
};

}  // namespace trireme
