// Parallel layout maths: ranks, coordinates, groups, validity, placement on nodes, memory. Pure functions; knows
// nobody.
//
// Two grids over the same ranks, leftmost axis fastest (Megatron's order tp-cp-ep-dp-pp):
//   dense grid   rank = tp + TP * (cp + CP * (dp + DP * pp))
//   expert grid  rank = etp + ETP * (ep + EP * (edp + EDP * pp)),  EDP = world / (ETP * EP * PP)
// EP folds over TP x CP x DP, so it is not limited by DP. The pipeline groups of both grids are the same.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "topology/stages.h"

namespace trireme {

struct Layout {
  int64_t tp = 1;   // tensor (and sequence) parallel
  int64_t cp = 1;   // context parallel
  int64_t ep = 1;   // expert parallel (expert grid)
  int64_t dp = 1;   // data parallel (dense grid)
  int64_t pp = 1;   // pipeline parallel
  int64_t etp = 1;  // tensor parallel of the experts (expert grid)

  int64_t world() const { return tp * cp * dp * pp; }
  int64_t expert_dp() const { return world() / (etp * ep * pp); }  // only of a valid layout
  // Of a stage, that hold all of its weights together, experts too: whole tensor groups and whole expert groups.
  int64_t copy_ranks() const { return std::lcm(tp, etp * ep); }
  bool operator==(const Layout&) const = default;
};

// "tp=4,cp=1,ep=1,dp=4,pp=4,etp=1": the form of the trainer's --layout flag and of TRIREME_LAYOUT.
std::string to_string(const Layout& layout);
// Reads it back; keys may be missing (1). Throws Error(kUser) that names the offending part.
Layout parse_layout(std::string_view text);

// The few sizes of a model that a layout depends on.
struct ModelShape {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;  // dense MLP; 0 when every layer has experts
  int64_t vocab = 0;
  bool tied = false;         // input and output embeddings are one tensor
  bool value_head = false;   // one number of each row in place of the vocabulary's head; never tied
  bool qkv_bias = false;     // Qwen2
  bool output_bias = false;  // of attention's output
  bool mlp_bias = false;
  bool qk_norm = false;  // Qwen3
  int64_t experts = 0;   // 0: dense model
  int64_t experts_per_token = 0;
  int64_t moe_intermediate = 0;
  int64_t sparse_step = 1;            // layers sparse_step - 1, 2 sparse_step - 1, ... have experts,
  std::vector<int64_t> dense_layers;  // but not these: the others a dense MLP
  bool mixtral_names = false;         // of the experts' parameters; else Qwen's
  bool has_experts(int64_t layer) const;
};

int64_t parameter_count(const ModelShape& shape);

// Rows of the embedding and of the head that tp ranks share: padded so that each has a multiple of 8. Padding is no
// token of anybody: never a target, never sampled, never saved.
int64_t padded_vocab(int64_t vocab, int64_t tp);

// Shape of a published model by its hub id or directory name ("meta-llama/Llama-3.1-8B-Instruct"), if it is one we
// know.
std::optional<ModelShape> known_model_shape(std::string_view source);

// ---- validity ----------------------------------------------------------------------------------------------------

struct LayoutCheck {
  int64_t world = 0;                  // 0: the layout's own (dp is not checked against it)
  int64_t gpus_per_node = 0;          // processes per node; 0: one node
  const ModelShape* shape = nullptr;  // null: divisibility by the model is not checked
  StageOptions stages = {};           // how the shape's layers are dealt to the pipeline's stages
  std::string stage_section = {};     // of a configuration, before the keys of `stages` in sentences
};

struct LayoutReport {
  std::vector<std::string> errors;    // each one sentence that names the legal values
  std::vector<std::string> warnings;  // legal but slow (CP or EP across nodes)
  bool ok() const { return errors.empty(); }
};

LayoutReport check_layout(const Layout& layout, const LayoutCheck& check);

// Sizes of one grid, tp x cp x pp or etp x ep x pp, whose product does not divide the ranks.
struct ProductProblem {
  struct Size {
    std::string name;  // of the axis
    int64_t size = 1;
    std::vector<int64_t> legal;  // with the others as they are; none: another size must change
  };
  std::vector<Size> sizes;
  int64_t product = 1;         // the largest number there is where it is above that
  std::string ranks;           // "8 ranks"
  std::vector<int64_t> legal;  // products; none where there are more ranks than can be
};
// Nothing where both products divide `world`. Of any sizes and ranks above 0; their sentences are check_layout's.
std::vector<ProductProblem> product_problems(const Layout& layout, int64_t world, int64_t gpus_per_node = 0);
// "tp 4 x cp 1 x pp 3 = 12 does not divide the 8 ranks; with the others as they are, tp can be ...". Whoever knows the
// sizes by other names may have put these in, and left sizes out.
std::string to_string(const ProductProblem& problem);

// dp of a layout whose other sizes are given, or nothing if world is not divisible by tp * cp * pp.
std::optional<int64_t> derive_dp(const Layout& layout, int64_t world);

// All legal layouts of check.world ranks with this etp (ep > 1 only if the shape has experts), smallest tp * cp * pp
// first.
std::vector<Layout> legal_layouts(const LayoutCheck& check, int64_t etp = 1);

std::vector<int64_t> divisors(int64_t number);  // ascending

// ---- ranks and groups --------------------------------------------------------------------------------------------

struct Coordinates {
  int64_t tp = 0, cp = 0, dp = 0, pp = 0;  // dense grid
  int64_t etp = 0, ep = 0, edp = 0;        // expert grid (its pp is the same)
  bool operator==(const Coordinates&) const = default;
};

// The layout must be valid (check_layout) and 0 <= rank < world.
Coordinates coordinates(const Layout& layout, int64_t rank);
int64_t rank_of(const Layout& layout, int64_t tp, int64_t cp, int64_t dp, int64_t pp);
int64_t expert_rank_of(const Layout& layout, int64_t etp, int64_t ep, int64_t edp, int64_t pp);

// "rank 37 (tp 1, pp 2, dp 1)": the axes that are split, where more than one is; else "rank 37". Any rank may be asked
// for: one that the layout does not have is named without its place.
std::string name_of_rank(const Layout& layout, int64_t rank);

enum class Axis {
  kTp,
  kCp,
  kDp,
  kPp,
  kEtp,
  kEp,
  kEdp,
  kDpCp,     // gradients of dense parameters, optimizer slices
  kTpCp,     // one copy of a stage's activations
  kTpPp,     // one copy of the dense weights
  kEtpEp,    // one copy of a stage's experts
  kEtpEpPp,  // one copy of all experts
  // Runs of a stage's ranks that neither grid has: the smallest that no group of what they are named for leaves.
  kCopy,    // one copy of a stage's weights: tp and etp-ep. Who steps together in generation
  kCopyPp,  // one copy of all weights: the same of every stage
  kPasses,  // tp-cp and etp-ep. Who makes the passes of training together
};
inline constexpr Axis kAllAxes[] = {Axis::kTp,    Axis::kCp,      Axis::kDp,   Axis::kPp,     Axis::kEtp,
                                    Axis::kEp,    Axis::kEdp,     Axis::kDpCp, Axis::kTpCp,   Axis::kTpPp,
                                    Axis::kEtpEp, Axis::kEtpEpPp, Axis::kCopy, Axis::kCopyPp, Axis::kPasses};
const char* to_string(Axis axis);  // "tp", "dp-cp", ...

int64_t group_size(const Layout& layout, Axis axis);
// Every group of the axis: a partition of the world; ranks ascend inside a group, groups ascend by first rank.
std::vector<std::vector<int64_t>> groups(const Layout& layout, Axis axis);
// The group that `rank` is in. Costs its own size, not the world's.
std::vector<int64_t> group_of(const Layout& layout, Axis axis, int64_t rank);

// ---- placement ---------------------------------------------------------------------------------------------------

struct NodeSlot {
  int64_t node = 0;
  int64_t local_rank = 0;
};
// Ranks fill nodes in order, so that TP (then CP) peers are neighbours.
NodeSlot slot_of(int64_t rank, int64_t gpus_per_node);
// True if no group of the axis spans two nodes.
bool inside_node(const Layout& layout, Axis axis, int64_t gpus_per_node);

// ---- memory ------------------------------------------------------------------------------------------------------

struct MemoryOptions {
  int64_t weight_bytes = 2;        // live weights, bf16
  int64_t grad_bytes = 4;          // fp32 gradients
  int64_t optimizer_bytes = 12;    // fp32 master, two moments; sliced by ZeRO-1
  bool shard_optimizer = true;     // over dp-cp (dense) and expert-dp (experts)
  bool reference_weights = false;  // a second copy of the weights for the KL term
  StageOptions stages = {};        // how the layers are dealt to the pipeline's stages
};

struct RankMemory {
  int64_t dense_params = 0;   // held by this rank
  int64_t expert_params = 0;  // held by this rank
  int64_t weights_bytes = 0;
  int64_t grads_bytes = 0;
  int64_t optimizer_bytes = 0;
  int64_t total_bytes() const { return weights_bytes + grads_bytes + optimizer_bytes; }
};

// Static memory of one rank (no activations, no KV cache). The layout must be valid for the shape.
RankMemory rank_memory(const ModelShape& shape, const Layout& layout, int64_t rank, const MemoryOptions& options = {});
// The largest over all ranks.
RankMemory peak_memory(const ModelShape& shape, const Layout& layout, const MemoryOptions& options = {});

}  // namespace trireme
