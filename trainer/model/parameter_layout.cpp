#include "trainer/model/parameter_layout.h"

#include <optional>

namespace trireme {
namespace {

class Placing final {
 public:
  Placing(const ModelConfig& config, const ModelSplit& split)
      : config_(config), shape_(config.shape()), split_(split), norms_first_(split.tp > 1) {}

  ParameterLayout run() {
    if (norms_first_) {
      for (const ModelParameter& parameter : model_parameters(shape_)) {
        const std::optional<ParameterSlice> slice = parameter_slice(shape_, split_, parameter.name);
        if (slice && slice->alike) add({parameter.name});
      }
      layout_.alike_elements = layout_.elements;
    }
    add({"model.embed_tokens.weight"});
    for (int64_t i = 0; i < config_.num_layers; ++i) add_layer("model.layers." + std::to_string(i) + ".");
    layout_.layer_begins.push_back(layout_.elements);
    add_norm("model.norm.weight");
    if (!config_.tie_word_embeddings) add({"lm_head.weight"});
    return std::move(layout_);
  }

 private:
  // The members of a block have no gaps between them. Of what other ranks hold there is nothing.
  void add(const std::vector<std::string>& block) {
    for (const std::string& name : block) {
      const std::optional<ParameterSlice> slice = parameter_slice(shape_, split_, name);
      if (!slice) continue;
      layout_.parameters.push_back({name, *slice, layout_.elements, slice->elements()});
      layout_.elements += layout_.parameters.back().size;
    }
    layout_.elements = (layout_.elements + kParameterAlignment - 1) / kParameterAlignment * kParameterAlignment;
  }

  void add_norm(const std::string& name) {
    if (!norms_first_) add({name});
  }

  void add_products(const std::vector<std::string>& outputs, bool bias) {
    std::vector<std::string> weights, biases;
    for (const std::string& output : outputs) weights.push_back(output + ".weight");
    for (const std::string& output : outputs) biases.push_back(output + ".bias");
    add(weights);
    if (bias) add(biases);
  }

  void add_layer(const std::string& at) {
    const std::string attention = at + "self_attn.", mlp = at + "mlp.";
    layout_.layer_begins.push_back(layout_.elements);
    add_norm(at + "input_layernorm.weight");
    add_products({attention + "q_proj", attention + "k_proj", attention + "v_proj"}, config_.qkv_bias);
    if (config_.qk_norm) add_norm(attention + "q_norm.weight");
    if (config_.qk_norm) add_norm(attention + "k_norm.weight");
    add_products({attention + "o_proj"}, config_.output_bias);
    add_norm(at + "post_attention_layernorm.weight");
    add_products({mlp + "gate_proj", mlp + "up_proj"}, config_.mlp_bias);
    add_products({mlp + "down_proj"}, config_.mlp_bias);
  }

  const ModelConfig& config_;
  const ModelShape shape_;
  const ModelSplit& split_;
  const bool norms_first_;
  ParameterLayout layout_;
};

}  // namespace

std::vector<int64_t> PlacedParameter::shape() const {
  std::vector<int64_t> own = slice.shape;
  own[static_cast<size_t>(slice.dimension)] = slice.range.size();
  return own;
}

ParameterLayout parameter_layout(const ModelConfig& config, const ModelSplit& split) {
  return Placing(config, split).run();
}

}  // namespace trireme
