// Where the parameters of a rank lie in its flat buffers. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "topology/split.h"
#include "trainer/model/config.h"

namespace trireme {

// Parameters lie in blocks: q, k and v of a layer (weights; biases), gate and up, gate and up of all experts one after
// another, down of all experts, else one each. A block begins at a multiple of this many elements (at least 64 bytes in
// every dtype) and has no gaps inside; gaps behind it hold zeros for ever.
inline constexpr int64_t kParameterAlignment = 64;

// Kernels on CUDA take rows of a multiple of 8 elements. A hidden size or an MLP's width that is none is held with
// zeros behind it, up to a width that our kernels for few rows take too.
inline constexpr int64_t padded_width(int64_t width) { return width % 8 == 0 ? width : (width + 63) / 64 * 64; }

struct PlacedParameter {
  std::string name;                    // Hugging Face's, e.g. "model.layers.0.self_attn.q_proj.weight"
  ParameterSlice slice;                // the whole model's shape, and what of it this rank holds
  int64_t offset = 0;                  // first element in the flat buffers
  int64_t size = 0;                    // elements there, padding included
  bool frozen = false;                 // has no gradient and no optimizer state
  std::vector<int64_t> held;           // shape there: shape(), or padded_width of hidden sizes and of MLP widths
  std::vector<int64_t> shape() const;  // of what this rank holds
};

// In registration order, which is stable for a configuration and a split: embedding, layers, final norm, head; a tied
// head is absent, but the last of several pipeline stages has a copy of the embedding in its place; a value model has
// score.weight there. Of a model split over tensor ranks, first what all of these hold alike (norms, trained routers, a
// value model's head): read first, complete last, summed over the ranks before anything else is done with it. Experts
// that are apart (ModelSplit) come behind everything else that is trained. Frozen routers come last of all.
struct ParameterLayout {
  std::vector<PlacedParameter> parameters;
  int64_t elements = 0;  // that are trained; those of frozen parameters follow
  int64_t frozen_elements = 0;
  int64_t alike_elements = 0;  // the first of them
  int64_t split_experts = 0;   // the first of experts that are apart; `elements` where they are not
  // First element of each layer that the rank has, then of what follows them; alike ones lie before.
  std::vector<int64_t> layer_begins;
  std::vector<Range> expert_layers;  // of each layer, what lies behind split_experts; nothing: experts are not apart
};
// `padded`: widths that are no multiple of 8 are padded, whose elements are zeros for ever, as in gaps.
ParameterLayout parameter_layout(const ModelConfig& config, const ModelSplit& split, bool freeze_router = true,
                                 bool padded = false);

// Of a model on one rank.
inline ModelSplit whole_model(const ModelConfig& config) { return model_split(config.shape(), {}, 0); }

}  // namespace trireme
