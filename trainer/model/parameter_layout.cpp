#include "trainer/model/parameter_layout.h"

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <utility>

#include "base/text.h"

namespace trireme {
namespace {

class Placing final {
 public:
  Placing(const ModelConfig& config, const ModelSplit& split, bool freeze_router, bool padded)
      : config_(config),
        shape_(config.shape()),
        split_(split),
        alike_first_(split.tp > 1),
        freeze_router_(freeze_router),
        padded_(padded) {}

  ParameterLayout run() {
    if (alike_first_) {
      for (const ModelParameter& parameter : model_parameters(shape_)) {
        const std::optional<ParameterSlice> slice = parameter_slice(shape_, split_, parameter.name);
        if (slice && slice->alike && !is_frozen_router(parameter.name)) add({parameter.name});
      }
      layout_.alike_elements = layout_.elements;
    }
    add({"model.embed_tokens.weight"});
    for_layers([&](int64_t i) { add_layer(i); });
    layout_.layer_begins.push_back(layout_.elements);
    add_alike("model.norm.weight");
    if (config_.value_head) {
      add_alike("score.weight");
    } else if (!config_.tie_word_embeddings) {
      add({"lm_head.weight"});
    }
    layout_.split_experts = layout_.elements;
    if (split_.experts_apart()) {
      for_layers([&](int64_t i) {
        const int64_t begin = layout_.elements;
        if (shape_.has_experts(i)) add_matrices(layer_name(i));
        layout_.expert_layers.push_back({begin, layout_.elements});
      });
    }
    if (freeze_router_) add_frozen_routers();
    return std::move(layout_);
  }

 private:
  // The members of a block have no gaps between them. Of what other ranks hold there is nothing.
  void add(const std::vector<std::string>& block) {
    for (const std::string& name : block) {
      const std::optional<ParameterSlice> slice = parameter_slice(shape_, split_, name);
      if (!slice) continue;
      PlacedParameter placed{.name = name, .slice = *slice, .offset = layout_.elements, .held = {}};
      placed.held = held_shape(name, placed.shape());
      placed.size = std::accumulate(placed.held.begin(), placed.held.end(), int64_t{1}, std::multiplies<>());
      layout_.elements += placed.size;
      layout_.parameters.push_back(std::move(placed));
    }
    layout_.elements = (layout_.elements + kParameterAlignment - 1) / kParameterAlignment * kParameterAlignment;
  }

  // Hidden states and what lies between an MLP's products are rows of padded widths. Experts have none.
  std::vector<int64_t> held_shape(const std::string& name, std::vector<int64_t> shape) const {
    if (!padded_ || name.find(".experts.") != std::string::npos) return shape;
    const auto any_of = [&](std::initializer_list<const char*> ends) {
      return std::any_of(ends.begin(), ends.end(), [&](const char* end) { return ends_with(name, end); });
    };
    if (shape.size() == 2 && !ends_with(name, ".o_proj.weight")) shape[1] = padded_width(shape[1]);
    if (any_of({".o_proj.weight", ".o_proj.bias", ".mlp.gate_proj.weight", ".mlp.gate_proj.bias", ".mlp.up_proj.weight",
                ".mlp.up_proj.bias", ".mlp.down_proj.weight", ".mlp.down_proj.bias", "layernorm.weight",
                "model.norm.weight"}))
      shape[0] = padded_width(shape[0]);
    return shape;
  }

  // Norms, trained routers and a value model's head.
  void add_alike(const std::string& name) {
    if (!alike_first_) add({name});
  }

  bool is_frozen_router(const std::string& name) const {
    return freeze_router_ && shape_.experts > 0 && ends_with(name, "." + router_name(shape_));
  }

  // Of the rank.
  template <class F>
  void for_layers(F&& f) const {
    for (const Range& piece : split_.layers) {
      for (int64_t i = piece.begin; i < piece.end; ++i) f(i);
    }
  }

  void add_products(const std::vector<std::string>& outputs, bool bias) {
    std::vector<std::string> weights, biases;
    for (const std::string& output : outputs) weights.push_back(output + ".weight");
    for (const std::string& output : outputs) biases.push_back(output + ".bias");
    add(weights);
    if (bias) add(biases);
  }

  void add_layer(int64_t index) {
    const std::string at = layer_name(index);
    const std::string attention = at + "self_attn.", mlp = at + "mlp.";
    layout_.layer_begins.push_back(layout_.elements);
    add_alike(at + "input_layernorm.weight");
    add_products({attention + "q_proj", attention + "k_proj", attention + "v_proj"}, config_.qkv_bias);
    if (config_.qk_norm) add_alike(attention + "q_norm.weight");
    if (config_.qk_norm) add_alike(attention + "k_norm.weight");
    add_products({attention + "o_proj"}, config_.output_bias);
    add_alike(at + "post_attention_layernorm.weight");
    if (shape_.has_experts(index)) {
      if (!freeze_router_) add_alike(at + router_name(shape_));
      if (!split_.experts_apart()) add_matrices(at);
      return;
    }
    add_products({mlp + "gate_proj", mlp + "up_proj"}, config_.mlp_bias);
    add_products({mlp + "down_proj"}, config_.mlp_bias);
  }

  // Of the layer's experts, as far as the rank has them.
  void add_matrices(const std::string& at) {
    std::vector<std::string> gate_up, down;
    for (int64_t e = split_.experts.begin; e < split_.experts.end; ++e) {
      gate_up.push_back(at + expert_name(shape_, e, ExpertMatrix::kGate));
      gate_up.push_back(at + expert_name(shape_, e, ExpertMatrix::kUp));
      down.push_back(at + expert_name(shape_, e, ExpertMatrix::kDown));
    }
    add(gate_up);
    add(down);
  }

  void add_frozen_routers() {
    const int64_t trained = layout_.elements;
    const size_t first = layout_.parameters.size();
    for_layers([&](int64_t i) {
      if (shape_.has_experts(i)) add({layer_name(i) + router_name(shape_)});
    });
    for (size_t i = first; i < layout_.parameters.size(); ++i) layout_.parameters[i].frozen = true;
    layout_.frozen_elements = layout_.elements - trained;
    layout_.elements = trained;
  }

  static std::string layer_name(int64_t index) { return "model.layers." + std::to_string(index) + "."; }

  const ModelConfig& config_;
  const ModelShape shape_;
  const ModelSplit& split_;
  const bool alike_first_, freeze_router_, padded_;
  ParameterLayout layout_;
};

}  // namespace

std::vector<int64_t> PlacedParameter::shape() const {
  std::vector<int64_t> own = slice.shape;
  own[static_cast<size_t>(slice.dimension)] = slice.range.size();
  return own;
}

ParameterLayout parameter_layout(const ModelConfig& config, const ModelSplit& split, bool freeze_router, bool padded) {
  return Placing(config, split, freeze_router, padded).run();
}

}  // namespace trireme
