// What of a model a rank holds under tensor, pipeline and expert parallelism: layers, heads, MLP, vocabulary, experts;
// the slice of a parameter by its Hugging Face name; and the sizes of the rank's own part. Context and data parallel
// ranks hold the same as each other, but for experts where these are split.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "topology/stages.h"
#include "topology/topology.h"

namespace trireme {

// Ranges are of the whole model. A rank's query heads are those that read its key heads.
struct ModelSplit {
  int64_t tp = 1, tensor_rank = 0;
  int64_t pp = 1, stage = 0;
  int64_t ep = 1, expert_rank = 0;
  int64_t etp = 1, expert_tensor_rank = 0;
  StageOptions stages;        // how the layers are dealt, of all stages
  std::vector<Range> layers;  // of each piece of the stage, ascending
  Range query_heads, key_heads;
  Range mlp;          // of the MLP's intermediate rows
  Range experts;      // by id, of each layer that has some
  Range expert_rows;  // of an expert's width
  Range vocab;        // rows of embedding and head, padding included: the last ones may be no tokens

  bool first_stage() const { return stage == 0; }      // has the embedding, before its first piece
  bool last_stage() const { return stage == pp - 1; }  // has the final norm and the head, behind its last piece
  // Whether a piece of this stage is the model's first one, behind the embedding; its last one, before the final norm.
  bool begins(int64_t piece) const { return first_stage() && piece == 0; }
  bool ends(int64_t piece) const { return last_stage() && piece + 1 == static_cast<int64_t>(layers.size()); }
  bool has_layer(int64_t layer) const;
  // Whether other ranks hold the same experts than hold the same of the rest: experts take the rows of tensor ranks as
  // those of data parallel ones, and have flat buffers, reductions and optimizer slices of their own.
  bool experts_apart() const { return experts.size() > 0 && (tp > 1 || ep > 1 || etp > 1); }
};
// The layout must be legal for the shape.
ModelSplit model_split(const ModelShape& shape, const Layout& layout, int64_t rank, const StageOptions& stages = {});

// Sizes of a rank's own part, made once. Whoever sizes tensors asks these; whoever speaks of the model to a user asks
// its ModelShape.
struct LocalShape {
  int64_t tp = 1;      // outside of attention and a dense MLP a rank has every tp-th row of a micro-batch only
  int64_t layers = 0;  // of all pieces
  int64_t hidden = 0;  // whole, as head_dim
  int64_t head_dim = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t intermediate = 0;  // of a dense MLP
  int64_t experts = 0;       // own ones of each layer that has experts; 0: none has
  int64_t experts_per_token = 0;
  int64_t moe_intermediate = 0;  // own part of an expert's width
  // Of experts that ranks share: rows that a token's choices send, to all of them and in the mean (expert_rows_out),
  // which is what a rank receives of as many ranks as tokens; 0: each rank has all experts.
  double received = 0;
  int64_t vocab = 0;         // rows of embedding and head that are tokens
  int64_t padded_vocab = 0;  // and those there are
  bool embedding = false;    // a first stage's
  bool head = false;         // a last stage's, with the final norm
  bool value_head = false;   // and it gives one number a row, no logits
  bool qk_norm = false;

  int64_t query_width() const { return heads * head_dim; }
  int64_t key_width() const { return kv_heads * head_dim; }
};
LocalShape local_shape(const ModelShape& shape, const ModelSplit& split);

// Of so many parts those that have any of a token's `chosen` choices, in the mean: every choice is as likely.
double parts_reached(int64_t parts, int64_t chosen);
// Rows of a token's that leave for experts: one for each part of the experts that has any of its choices, to all ranks
// that share the part; 0 where each rank has all experts.
double expert_rows_out(int64_t chosen, int64_t ep, int64_t etp);

struct ModelParameter {
  std::string name;            // Hugging Face's
  std::vector<int64_t> shape;  // of the whole model's
};
// All of a model's, in the model's order: embedding, layers, final norm, head unless it is tied. Of a layer with
// experts the router, gate and up of each expert, then down of each.
std::vector<ModelParameter> model_parameters(const ModelShape& shape);

// Names of a layer with experts behind "model.layers.N.".
enum class ExpertMatrix { kGate, kUp, kDown };
std::string router_name(const ModelShape& shape);
std::string expert_name(const ModelShape& shape, int64_t expert, ExpertMatrix matrix);

struct ParameterSlice {
  std::vector<int64_t> shape;  // of the whole parameter
  int64_t dimension = 0;
  Range range;             // of `dimension`; all of it where the parameter is whole. May be empty: padding only
  bool alike = false;      // every tensor rank holds the whole: its gradient is a sum over them
  bool tied_copy = false;  // the last stage's copy of an embedding that the first one has too
  int64_t elements() const;
};
// Nothing where the rank has no part of it: it is another stage's, another rank's expert, or a bias of what is summed
// over tensor ranks, which their first one adds. Error(kInternal) for a name that is no parameter of the model.
std::optional<ParameterSlice> parameter_slice(const ModelShape& shape, const ModelSplit& split, std::string_view name);

}  // namespace trireme
