// Refit: the model that generation runs on where its layout is another than training's.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "topology/refit.h"
#include "trainer/config/config.h"
#include "trainer/model/model.h"
#include "trainer/parallel/context.h"

namespace trireme {

// The layout that the ranks of `training` generate in, where policy.generation asks for another one. Where processes of
// their own generate there is none: what these ranks generate, for validation, they do as they train.
std::optional<Layout> generation_layout(const Config& config, const Layout& training);

// Why that cannot be, or the layout of engines elsewhere: one sentence that begins with the key; nothing where it can.
// `of_node`: ranks of a node, which tensor ranks do not leave; 0: not known.
std::optional<std::string> generation_problem(const Config& config, const ModelShape& shape, const std::string& model,
                                              const Layout& training, int64_t of_node);

// A second model without gradients, in the layout of generation. It has memory from fill() to release(), and then the
// weights of the first one, byte for byte: each rank fetches what it has not from the nearest rank that has it, by the
// plan of topology/refit.h. The policy's gradients have none meanwhile, where it lends theirs; of a policy whose
// weights ranks share a few units are whole at a time. One thread calls it; what is collective is so over all ranks.
class Refit final {
 public:
  // What a rank sends at once, and receives: four such buffers are there while weights travel. NCCL is at its rate from
  // a few MiB for each pair on.
  static constexpr int64_t kBucketBytes = int64_t{128} << 20;
  // `policy` outlives it. `of_node`: ranks of a host. Collective.
  Refit(Model& policy, const StageOptions& stages, ParallelContext& context, int64_t of_node,
        int64_t bucket_bytes = kBucketBytes);

  const Model& model() const { return *model_; }
  // Bytes that the rank which fetches most fetches from others at each fill.
  int64_t most_bytes() const { return most_bytes_; }

  // The policy's weights as they are now; nothing while they are there already. Returns whether it has copied, and then
  // when the device has. Whole weights of a policy that shares them are released. Collective.
  bool fill();
  // Gives the memory back, and the policy's gradients theirs: before training.
  void release();

 private:
  struct Turn {  // of a bucket that is under way
    at::Tensor in, out;
    PendingCollective pending;
  };
  // What is copied while the policy has it: everything, or what lies at one place of its units.
  struct Part {
    std::vector<ModelParameter> parameters;
    RankRefit plan;
    std::shared_ptr<Communicator> group;
  };
  std::vector<Part> parts_of_policy() const;
  at::Tensor range(const Model& model, const Part& part, const RefitCopy& copy) const;
  void copy(const Part& part);
  void begin(const Part& part, size_t bucket);
  void finish(const Part& part, size_t bucket);
  ShardedUnits* shared_weights() const;  // null: the policy has all of its own

  Model& policy_;
  std::unique_ptr<Model> model_;
  std::vector<Part> parts_;
  std::array<Turn, 2> turns_;
  int64_t most_bytes_ = 0;
  bool filled_ = false;
};

}  // namespace trireme
