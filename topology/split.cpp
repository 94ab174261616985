#include "topology/split.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/text.h"

namespace trireme {
namespace {

// How the tensor ranks share a parameter.
enum class Cut {
  kQueries,  // rows by query heads
  kKeys,     // rows by key heads
  kMlp,      // rows by MLP width
  kVocabulary,
  kQueryColumns,
  kMlpColumns,
  kAlike,          // each has all of it
  kExpertRows,     // rows by an expert's width, on the ranks that hold the expert
  kExpertColumns,  // likewise
  kFirst,          // their first one has it
};

struct Part {
  std::string name;
  std::vector<int64_t> shape;
  Cut cut = Cut::kAlike;
  int64_t expert = -1;  // whose it is
};

constexpr std::string_view kLayers = "model.layers.";
constexpr std::string_view kEmbedding = "model.embed_tokens.weight";
constexpr std::string_view kHead = "lm_head.weight";
constexpr std::string_view kValueHead = "score.weight";
constexpr std::string_view kFinalNorm = "model.norm.weight";

std::string_view expert_prefix(const ModelShape& m) {
  return m.mixtral_names ? "block_sparse_moe.experts." : "mlp.experts.";
}

constexpr ExpertMatrix kExpertMatrices[] = {ExpertMatrix::kGate, ExpertMatrix::kUp, ExpertMatrix::kDown};

std::string_view expert_suffix(const ModelShape& m, ExpertMatrix matrix) {
  switch (matrix) {
    case ExpertMatrix::kGate:
      return m.mixtral_names ? ".w1.weight" : ".gate_proj.weight";
    case ExpertMatrix::kUp:
      return m.mixtral_names ? ".w3.weight" : ".up_proj.weight";
    case ExpertMatrix::kDown:
      return m.mixtral_names ? ".w2.weight" : ".down_proj.weight";
  }
  fail_internal("unknown matrix of an expert");
}

Part expert_part(const ModelShape& m, int64_t expert, ExpertMatrix matrix) {
  const bool down = matrix == ExpertMatrix::kDown;
  return {expert_name(m, expert, matrix),
          {down ? m.hidden : m.moe_intermediate, down ? m.moe_intermediate : m.hidden},
          down ? Cut::kExpertColumns : Cut::kExpertRows,
          expert};
}

// A matrix of an expert by its name behind "model.layers.N.": no list of thousands of names is made to find one.
std::optional<Part> find_expert_part(const ModelShape& m, std::string_view name) {
  const std::string_view prefix = expert_prefix(m);
  if (!starts_with(name, prefix)) return std::nullopt;
  const std::string_view rest = name.substr(prefix.size());
  const size_t dot = std::min(rest.find('.'), rest.size());
  const auto expert = parse_int(rest.substr(0, dot));
  if (!expert || *expert < 0 || *expert >= m.experts || std::to_string(*expert) != rest.substr(0, dot))
    return std::nullopt;
  for (const ExpertMatrix matrix : kExpertMatrices) {
    if (rest.substr(dot) == expert_suffix(m, matrix)) return expert_part(m, *expert, matrix);
  }
  return std::nullopt;
}

// The parameters of a layer but for its experts' matrices, in order. Names are those behind "model.layers.N.".
std::vector<Part> layer_parts(const ModelShape& m, int64_t layer) {
  const int64_t q = m.heads * m.head_dim, kv = m.kv_heads * m.head_dim;
  std::vector<Part> parts;
  const auto norm = [&](const char* name, int64_t size) { parts.push_back({name, {size}, Cut::kAlike}); };
  struct Output {
    const char* name;
    int64_t width;
    Cut cut;
  };
  // Products that share their input: all weights, then all biases.
  const auto by_rows = [&](const std::vector<Output>& outputs, bool bias) {
    for (const Output& o : outputs) parts.push_back({o.name + std::string(".weight"), {o.width, m.hidden}, o.cut});
    for (const Output& o : outputs) {
      if (bias) parts.push_back({o.name + std::string(".bias"), {o.width}, o.cut});
    }
  };
  const auto by_columns = [&](const std::string& name, int64_t width, Cut cut, bool bias) {
    parts.push_back({name + ".weight", {m.hidden, width}, cut});
    if (bias) parts.push_back({name + ".bias", {m.hidden}, Cut::kFirst});
  };
  norm("input_layernorm.weight", m.hidden);
  by_rows({{"self_attn.q_proj", q, Cut::kQueries},
           {"self_attn.k_proj", kv, Cut::kKeys},
           {"self_attn.v_proj", kv, Cut::kKeys}},
          m.qkv_bias);
  if (m.qk_norm) norm("self_attn.q_norm.weight", m.head_dim);
  if (m.qk_norm) norm("self_attn.k_norm.weight", m.head_dim);
  by_columns("self_attn.o_proj", q, Cut::kQueryColumns, m.output_bias);
  norm("post_attention_layernorm.weight", m.hidden);
  if (m.has_experts(layer)) {
    parts.push_back({router_name(m), {m.experts, m.hidden}, Cut::kAlike});
    return parts;
  }
  by_rows({{"mlp.gate_proj", m.intermediate, Cut::kMlp}, {"mlp.up_proj", m.intermediate, Cut::kMlp}}, m.mlp_bias);
  by_columns("mlp.down_proj", m.intermediate, Cut::kMlpColumns, m.mlp_bias);
  return parts;
}

Range share(int64_t total, int64_t ranks, int64_t rank) { return {total / ranks * rank, total / ranks * (rank + 1)}; }

Range times(const Range& range, int64_t factor) { return {range.begin * factor, range.end * factor}; }

// Nothing: this tensor rank has none of it.
std::optional<ParameterSlice> slice_of(const ModelShape& m, const ModelSplit& split, const Part& part) {
  const auto cut = [&](int64_t dimension, const Range& range) {
    return ParameterSlice{.shape = part.shape, .dimension = dimension, .range = range};
  };
  switch (part.cut) {
    case Cut::kQueries:
      return cut(0, times(split.query_heads, m.head_dim));
    case Cut::kKeys:
      return cut(0, times(split.key_heads, m.head_dim));
    case Cut::kMlp:
      return cut(0, split.mlp);
    case Cut::kVocabulary:
      return cut(0, {std::min(split.vocab.begin, m.vocab), std::min(split.vocab.end, m.vocab)});
    case Cut::kQueryColumns:
      return cut(1, times(split.query_heads, m.head_dim));
    case Cut::kMlpColumns:
      return cut(1, split.mlp);
    case Cut::kExpertRows:
      return cut(0, split.expert_rows);
    case Cut::kExpertColumns:
      if (split.etp > 1) return cut(1, split.expert_rows);
      break;  // whole, as what is not cut is
    case Cut::kAlike:
    case Cut::kFirst:
      break;
  }
  if (part.cut == Cut::kFirst && split.tensor_rank > 0) return std::nullopt;
  ParameterSlice whole = cut(0, {0, part.shape[0]});
  whole.alike = part.cut == Cut::kAlike;
  return whole;
}

[[noreturn]] void unknown(std::string_view name) { fail_internal(std::string(name) + " is no parameter of the model"); }

}  // namespace

bool ModelSplit::has_layer(int64_t layer) const {
  return std::any_of(layers.begin(), layers.end(),
                     [&](const Range& piece) { return piece.begin <= layer && layer < piece.end; });
}

ModelSplit model_split(const ModelShape& shape, const Layout& layout, int64_t rank, const StageOptions& stages) {
  const int64_t tp = layout.tp;
  TRIREME_CHECK(shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0 && shape.kv_heads % tp == 0 &&
                    shape.intermediate % tp == 0,
                "heads and MLP of the model in " + to_string(layout));
  const Coordinates at = coordinates(layout, rank);
  ModelSplit split{.tp = tp, .tensor_rank = at.tp, .pp = layout.pp, .stage = at.pp};
  split.stages = stages;
  split.layers = stage_pieces(shape.layers, layout.pp, at.pp, stages);
  split.key_heads = share(shape.kv_heads, tp, at.tp);
  split.query_heads = times(split.key_heads, shape.heads / shape.kv_heads);
  split.mlp = share(shape.intermediate, tp, at.tp);
  TRIREME_CHECK(shape.experts % layout.ep == 0 && shape.moe_intermediate % layout.etp == 0,
                "experts of the model in " + to_string(layout));
  split.ep = shape.experts > 0 ? layout.ep : 1;
  split.expert_rank = shape.experts > 0 ? at.ep : 0;
  split.experts = share(shape.experts, split.ep, split.expert_rank);
  split.etp = shape.experts > 0 ? layout.etp : 1;
  split.expert_tensor_rank = shape.experts > 0 ? at.etp : 0;
  split.expert_rows = share(shape.moe_intermediate, split.etp, split.expert_tensor_rank);
  split.vocab = share(padded_vocab(shape.vocab, tp), tp, at.tp);
  return split;
}

LocalShape local_shape(const ModelShape& shape, const ModelSplit& split) {
  LocalShape local;
  local.tp = split.tp;
  for (const Range& piece : split.layers) local.layers += piece.size();
  local.hidden = shape.hidden;
  local.head_dim = shape.head_dim;
  local.heads = split.query_heads.size();
  local.kv_heads = split.key_heads.size();
  local.intermediate = split.mlp.size();
  local.experts = split.experts.size();
  local.experts_per_token = shape.experts_per_token;
  local.moe_intermediate = split.expert_rows.size();
  if (shape.experts > 0) local.received = expert_rows_out(shape.experts_per_token, split.ep, split.etp);
  local.vocab = std::min(split.vocab.end, shape.vocab) - std::min(split.vocab.begin, shape.vocab);
  local.padded_vocab = split.vocab.size();
  local.embedding = split.first_stage();
  local.head = split.last_stage();
  local.value_head = shape.value_head;
  local.qk_norm = shape.qk_norm;
  return local;
}

double parts_reached(int64_t parts, int64_t chosen) {
  const auto number = static_cast<double>(parts);
  return number * (1 - std::pow(1 - 1 / number, static_cast<double>(chosen)));
}

double expert_rows_out(int64_t chosen, int64_t ep, int64_t etp) {
  return ep * etp == 1 ? 0 : static_cast<double>(etp) * parts_reached(ep, chosen);
}

std::vector<ModelParameter> model_parameters(const ModelShape& shape) {
  std::vector<ModelParameter> parameters{{std::string(kEmbedding), {shape.vocab, shape.hidden}}};
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    const std::string prefix = std::string(kLayers) + std::to_string(layer) + ".";
    const auto add = [&](const Part& part) { parameters.push_back({prefix + part.name, part.shape}); };
    for (const Part& part : layer_parts(shape, layer)) add(part);
    if (!shape.has_experts(layer)) continue;
    for (int64_t e = 0; e < shape.experts; ++e) {
      add(expert_part(shape, e, ExpertMatrix::kGate));
      add(expert_part(shape, e, ExpertMatrix::kUp));
    }
    for (int64_t e = 0; e < shape.experts; ++e) add(expert_part(shape, e, ExpertMatrix::kDown));
  }
  parameters.push_back({std::string(kFinalNorm), {shape.hidden}});
  if (shape.value_head) {
    parameters.push_back({std::string(kValueHead), {1, shape.hidden}});
  } else if (!shape.tied) {
    parameters.push_back({std::string(kHead), {shape.vocab, shape.hidden}});
  }
  return parameters;
}

std::string router_name(const ModelShape& shape) {
  return shape.mixtral_names ? "block_sparse_moe.gate.weight" : "mlp.gate.weight";
}

std::string expert_name(const ModelShape& shape, int64_t expert, ExpertMatrix matrix) {
  return std::string(expert_prefix(shape)) + std::to_string(expert) + std::string(expert_suffix(shape, matrix));
}

int64_t ParameterSlice::elements() const {
  int64_t count = range.size();
  for (size_t d = 0; d < shape.size(); ++d) count *= static_cast<int64_t>(d) == dimension ? 1 : shape[d];
  return count;
}

std::optional<ParameterSlice> parameter_slice(const ModelShape& shape, const ModelSplit& split, std::string_view name) {
  if (name == kValueHead && shape.value_head) {
    if (!split.last_stage()) return std::nullopt;
    return slice_of(shape, split, {std::string(name), {1, shape.hidden}, Cut::kAlike});
  }
  if (name == kEmbedding || (name == kHead && !shape.tied && !shape.value_head)) {
    const bool here = name == kEmbedding ? split.first_stage() : split.last_stage();
    const bool copy = name == kEmbedding && shape.tied && split.last_stage() && !here;
    if (!here && !copy) return std::nullopt;
    auto slice = slice_of(shape, split, {std::string(name), {shape.vocab, shape.hidden}, Cut::kVocabulary});
    slice->tied_copy = copy;
    return slice;
  }
  if (name == kFinalNorm) {
    if (!split.last_stage()) return std::nullopt;
    return slice_of(shape, split, {std::string(name), {shape.hidden}, Cut::kAlike});
  }
  if (!starts_with(name, kLayers)) unknown(name);
  const std::string_view rest = name.substr(kLayers.size());
  const size_t dot = rest.find('.');
  const auto layer = parse_int(rest.substr(0, dot));
  if (dot == std::string_view::npos || !layer || *layer < 0 || *layer >= shape.layers ||
      std::to_string(*layer) != rest.substr(0, dot)) {
    unknown(name);
  }
  const auto slice = [&](const Part& part) {
    return split.has_layer(*layer) ? slice_of(shape, split, part) : std::nullopt;
  };
  if (shape.has_experts(*layer)) {
    if (const auto expert = find_expert_part(shape, rest.substr(dot + 1)))
      return split.experts.begin <= expert->expert && expert->expert < split.experts.end ? slice(*expert)
                                                                                         : std::nullopt;
  }
  for (const Part& part : layer_parts(shape, *layer)) {
    if (part.name == rest.substr(dot + 1)) return slice(part);
  }
  unknown(name);
}

}  // namespace trireme
