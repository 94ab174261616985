// Slices of all ranks against owners of single elements, found from what an element is for: the head or token that it
// belongs to.
#include "topology/split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/error.h"

namespace trireme {
namespace {

using testing::ElementsAre;

ModelShape small(bool tied, bool qkv_bias, bool qk_norm, bool other_biases, int64_t vocab) {
  ModelShape shape{.layers = 8, .hidden = 6, .heads = 8, .kv_heads = 4, .head_dim = 3, .intermediate = 12};
  shape.vocab = vocab;
  shape.tied = tied;
  shape.qkv_bias = qkv_bias;
  shape.output_bias = shape.mlp_bias = other_biases;
  shape.qk_norm = qk_norm;
  return shape;
}

// Layers 1, 5 and 7 have a dense MLP, or, of Mixtral's, none.
ModelShape small_mixture(bool mixtral) {
  ModelShape shape = small(false, false, !mixtral, false, 41);
  shape.experts = 4;
  shape.experts_per_token = 2;
  shape.moe_intermediate = 8;
  shape.mixtral_names = mixtral;
  if (mixtral) {
    shape.intermediate = 0;
  } else {
    shape.dense_layers = {1, 5, 7};
  }
  return shape;
}

std::vector<ModelShape> small_shapes() {
  return {small(false, false, false, false, 64),  // Llama
          small(true, false, false, true, 50),    // Llama with all biases
          small(true, true, false, false, 33),    // Qwen2, tied
          small(false, true, false, false, 10),   // fewer tokens than the padding of 4 ranks
          small(false, false, true, false, 41),   // Qwen3
          small(true, false, true, false, 96),   small_mixture(false), small_mixture(true)};
}

struct Dealt {
  Layout layout;
  StageOptions stages;
};

// Every legal (tp, pp) of the shape, and some with stages of other sizes or in pieces; of mixtures also those with
// experts over ranks.
std::vector<Dealt> every_split(const ModelShape& shape) {
  std::vector<Dealt> all;
  for (int64_t tp = 1; tp <= 8; ++tp) {
    for (int64_t pp = 1; pp <= shape.layers; ++pp) {
      for (const StageOptions& stages :
           {StageOptions{}, StageOptions{.virtual_stages = 2}, StageOptions{.virtual_stages = 4},
            StageOptions{.first_layers = 3}, StageOptions{.first_layers = 1, .last_layers = 3},
            StageOptions{.first_layers = 2, .last_layers = 2, .virtual_stages = 2}}) {
        const Layout layout{.tp = tp, .pp = pp};
        if (check_layout(layout, {.shape = &shape, .stages = stages}).ok()) all.push_back({layout, stages});
      }
    }
  }
  if (shape.experts == 0) return all;
  for (const Layout& layout :
       {Layout{.ep = 2, .dp = 2}, Layout{.ep = 4, .dp = 8}, Layout{.cp = 2, .ep = 2}, Layout{.tp = 2, .ep = 2},
        Layout{.tp = 2, .ep = 4, .dp = 2, .pp = 2}, Layout{.tp = 4, .ep = 2, .dp = 2},
        Layout{.tp = 2, .cp = 2, .ep = 4}, Layout{.dp = 2, .etp = 2}, Layout{.tp = 2, .ep = 2, .dp = 2, .etp = 2},
        Layout{.tp = 2, .ep = 2, .dp = 4, .pp = 2, .etp = 4}}) {
    all.push_back({layout, {}});
  }
  return all;
}

enum class Kind { kQuery, kKey, kMlp, kVocab, kQueryColumn, kMlpColumn, kAlike, kFirst, kExpert };
const std::map<std::string, Kind> kKinds = {
    {"self_attn.q_proj.weight", Kind::kQuery},
    {"self_attn.q_proj.bias", Kind::kQuery},
    {"self_attn.k_proj.weight", Kind::kKey},
    {"self_attn.k_proj.bias", Kind::kKey},
    {"self_attn.v_proj.weight", Kind::kKey},
    {"self_attn.v_proj.bias", Kind::kKey},
    {"self_attn.o_proj.weight", Kind::kQueryColumn},
    {"self_attn.o_proj.bias", Kind::kFirst},
    {"self_attn.q_norm.weight", Kind::kAlike},
    {"self_attn.k_norm.weight", Kind::kAlike},
    {"mlp.gate_proj.weight", Kind::kMlp},
    {"mlp.gate_proj.bias", Kind::kMlp},
    {"mlp.up_proj.weight", Kind::kMlp},
    {"mlp.up_proj.bias", Kind::kMlp},
    {"mlp.down_proj.weight", Kind::kMlpColumn},
    {"mlp.down_proj.bias", Kind::kFirst},
    {"input_layernorm.weight", Kind::kAlike},
    {"post_attention_layernorm.weight", Kind::kAlike},
    {"model.embed_tokens.weight", Kind::kVocab},
    {"model.norm.weight", Kind::kAlike},
    {"lm_head.weight", Kind::kVocab},
};

Kind kind_of(const std::string& name) {
  if (name.find(".experts.") != std::string::npos) return Kind::kExpert;
  if (name == "mlp.gate.weight" || name == "block_sparse_moe.gate.weight") return Kind::kAlike;
  return kKinds.at(name);
}

// The layer of a name, -1 for the others; `kind` of what is left of it.
int64_t layer_of(const std::string& name, Kind& kind) {
  const std::string prefix = "model.layers.";
  if (name.rfind(prefix, 0) != 0) {
    kind = kKinds.at(name);
    return -1;
  }
  const size_t dot = name.find('.', prefix.size());
  kind = kind_of(name.substr(dot + 1));
  return std::stoll(name.substr(prefix.size(), dot - prefix.size()));
}

// The tensor rank that reads element (row, column); -1: all of them.
int64_t owner(const ModelShape& m, Kind kind, int64_t tp, int64_t row, int64_t column) {
  const int64_t padded = padded_vocab(m.vocab, tp);
  const int64_t keys_of_rank = m.kv_heads / tp, queries_of_key = m.heads / m.kv_heads;
  switch (kind) {
    case Kind::kQuery:
      return row / m.head_dim / queries_of_key / keys_of_rank;
    case Kind::kQueryColumn:
      return column / m.head_dim / queries_of_key / keys_of_rank;
    case Kind::kKey:
      return row / m.head_dim / keys_of_rank;
    case Kind::kMlp:
      return row * tp / m.intermediate;
    case Kind::kMlpColumn:
      return column * tp / m.intermediate;
    case Kind::kVocab:
      return row * tp / padded;
    case Kind::kAlike:
    case Kind::kExpert:
      return -1;
    case Kind::kFirst:
      return 0;
  }
  return -2;
}

bool holds(const ParameterSlice& slice, int64_t row, int64_t column) {
  const int64_t at = slice.dimension == 0 ? row : column;
  return slice.range.begin <= at && at < slice.range.end;
}

// How often the ranks hold each element of a parameter, beside copies of a tied embedding; and that each holds its own.
void expect_tiled(const ModelShape& shape, const Dealt& dealt, const ModelParameter& parameter) {
  Kind kind = Kind::kAlike;
  layer_of(parameter.name, kind);
  const int64_t rows = parameter.shape[0], columns = parameter.shape.size() > 1 ? parameter.shape[1] : 1;
  std::vector<int> held(static_cast<size_t>(rows * columns), 0), copied(held);
  const bool down =
      parameter.name.find(".down_proj.") != std::string::npos || parameter.name.find(".w2.") != std::string::npos;
  for (int64_t rank = 0; rank < dealt.layout.world(); ++rank) {
    const ModelSplit split = model_split(shape, dealt.layout, rank, dealt.stages);
    const auto slice = parameter_slice(shape, split, parameter.name);
    if (!slice) continue;
    ASSERT_EQ(slice->shape, parameter.shape);
    ASSERT_EQ(slice->alike, kind == Kind::kAlike);
    int64_t elements = 0;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        const bool has = holds(*slice, row, column);
        const int64_t whose = owner(shape, kind, dealt.layout.tp, row, column);
        if (kind == Kind::kExpert) {  // an expert's width is shared
          const int64_t of_width = down ? column : row;
          ASSERT_EQ(has, of_width * dealt.layout.etp / shape.moe_intermediate == split.expert_tensor_rank);
        } else {
          ASSERT_EQ(has, whose < 0 || whose == split.tensor_rank);
        }
        elements += has ? 1 : 0;
        (slice->tied_copy ? copied : held)[static_cast<size_t>(row * columns + column)] += has ? 1 : 0;
      }
    }
    ASSERT_EQ(slice->elements(), elements);
  }
  const bool tied = shape.tied && parameter.name == "model.embed_tokens.weight" && dealt.layout.pp > 1;
  const Layout& layout = dealt.layout;
  const int64_t ranks = layout.tp * layout.cp * layout.dp;  // of a stage
  const int64_t sharing = kind == Kind::kAlike ? 1 : kind == Kind::kExpert ? layout.ep * layout.etp : layout.tp;
  ASSERT_EQ(held, std::vector<int>(held.size(), static_cast<int>(ranks / sharing)));
  ASSERT_EQ(copied, std::vector<int>(copied.size(), tied ? static_cast<int>(ranks / layout.tp) : 0));
}

TEST(Split, EveryElementIsHeldOnceOrByAllAlike) {
  int64_t checked = 0;
  for (const ModelShape& shape : small_shapes()) {
    for (const Dealt& dealt : every_split(shape)) {
      for (const ModelParameter& parameter : model_parameters(shape)) {
        ASSERT_NO_FATAL_FAILURE(expect_tiled(shape, dealt, parameter))
            << parameter.name << " in " << to_string(dealt.layout);
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 10000);
}

// Where a layer's parameters lie its rows pass: the stage that has one has all, embedding and head are at the ends.
TEST(Split, LayersAreWholeOnOneStage) {
  for (const ModelShape& shape : small_shapes()) {
    for (const Dealt& dealt : every_split(shape)) {
      std::map<int64_t, std::set<int64_t>> stages_of;
      for (int64_t rank = 0; rank < dealt.layout.world(); ++rank) {
        const ModelSplit split = model_split(shape, dealt.layout, rank, dealt.stages);
        for (const ModelParameter& parameter : model_parameters(shape)) {
          Kind kind = Kind::kAlike;
          const int64_t layer = layer_of(parameter.name, kind);
          const auto slice = parameter_slice(shape, split, parameter.name);
          if (layer < 0) {
            const bool embedding = parameter.name == "model.embed_tokens.weight";
            const bool copy = embedding && shape.tied && split.last_stage() && !split.first_stage();
            EXPECT_EQ(slice.has_value(), copy || (embedding ? split.first_stage() : split.last_stage()));
            EXPECT_EQ(slice && slice->tied_copy, copy);
          } else if (slice) {
            EXPECT_TRUE(split.has_layer(layer));
            stages_of[layer].insert(split.stage);
          } else {
            EXPECT_TRUE(!split.has_layer(layer) || (kind == Kind::kFirst && split.tensor_rank > 0) ||
                        (kind == Kind::kExpert && split.ep > 1));
          }
        }
      }
      EXPECT_EQ(static_cast<int64_t>(stages_of.size()), shape.layers);
      for (const auto& [layer, stages] : stages_of) EXPECT_EQ(stages.size(), 1u) << layer;
    }
  }
}

bool first_replica(const Layout& layout, int64_t rank) {
  const Coordinates at = coordinates(layout, rank);
  return at.cp == 0 && at.dp == 0;
}

TEST(Split, LocalSizesAreThoseOfTheSlices) {
  for (const ModelShape& shape : small_shapes()) {
    for (const Dealt& dealt : every_split(shape)) {
      int64_t vocab = 0, padded = 0, layers = 0;
      for (int64_t rank = 0; rank < dealt.layout.world(); ++rank) {
        const ModelSplit split = model_split(shape, dealt.layout, rank, dealt.stages);
        const LocalShape local = local_shape(shape, split);
        const int64_t first = split.layers.front().begin;
        const auto rows = [&](const std::string& name) {
          return parameter_slice(shape, split, "model.layers." + std::to_string(first) + "." + name)->range.size();
        };
        EXPECT_EQ(rows("self_attn.q_proj.weight"), local.query_width());
        EXPECT_EQ(rows("self_attn.o_proj.weight"), local.query_width());
        EXPECT_EQ(rows("self_attn.k_proj.weight"), local.key_width());
        EXPECT_EQ(rows("self_attn.v_proj.weight"), local.key_width());
        if (shape.has_experts(first)) {
          EXPECT_EQ(split.experts.size(), local.experts);
          const auto own = [&](ExpertMatrix matrix) { return rows(expert_name(shape, split.experts.begin, matrix)); };
          EXPECT_EQ(own(ExpertMatrix::kGate), local.moe_intermediate);
          EXPECT_EQ(own(ExpertMatrix::kUp), local.moe_intermediate);
          EXPECT_EQ(own(ExpertMatrix::kDown), split.etp > 1 ? local.moe_intermediate : local.hidden);
        } else {
          EXPECT_EQ(rows("mlp.gate_proj.weight"), local.intermediate);
          EXPECT_EQ(rows("mlp.down_proj.weight"), local.intermediate);
        }
        EXPECT_EQ(rows("input_layernorm.weight"), local.hidden);
        EXPECT_EQ(local.heads * shape.kv_heads, local.kv_heads * shape.heads);
        EXPECT_EQ(local.padded_vocab % 8, 0);
        EXPECT_EQ(local.embedding, split.first_stage());
        EXPECT_EQ(local.head, split.last_stage());
        if (local.embedding) {
          EXPECT_EQ(parameter_slice(shape, split, "model.embed_tokens.weight")->range.size(), local.vocab);
          if (first_replica(dealt.layout, rank)) vocab += local.vocab;
          if (first_replica(dealt.layout, rank)) padded += local.padded_vocab;
        }
        if (split.tensor_rank == 0 && first_replica(dealt.layout, rank)) layers += local.layers;
      }
      EXPECT_EQ(layers, shape.layers);
      EXPECT_EQ(vocab, shape.vocab);
      EXPECT_GE(padded, shape.vocab);
      EXPECT_LT(padded - shape.vocab, 8 * dealt.layout.tp);
    }
  }
}

// Published models: parts that all have are counted once, and the memory of a rank counts what it holds.
TEST(Split, ParametersAddUpToTheModel) {
  for (const char* name : {"Llama-3.1-8B", "Llama-3.3-70B", "Llama-3.1-405B", "Llama-3.2-1B", "Qwen2.5-0.5B",
                           "Qwen2.5-7B", "Qwen2.5-72B", "Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Mixtral-8x7B"}) {
    const ModelShape shape = *known_model_shape(name);
    const std::vector<ModelParameter> parameters = model_parameters(shape);
    std::set<std::string> names;
    int64_t total = 0;
    for (const ModelParameter& parameter : parameters) {
      names.insert(parameter.name);
      int64_t size = 1;
      for (const int64_t extent : parameter.shape) size *= extent;
      total += size;
    }
    EXPECT_EQ(names.size(), parameters.size());
    EXPECT_EQ(total, parameter_count(shape)) << name;
    for (int64_t tp = 1; tp <= 8; tp *= 2) {
      for (int64_t pp = 1; pp <= 8; pp *= 2) {
        const Layout layout{.tp = tp, .pp = pp};
        if (!check_layout(layout, {.shape = &shape}).ok()) continue;
        int64_t once = 0;
        for (int64_t rank = 0; rank < layout.world(); ++rank) {
          const ModelSplit split = model_split(shape, layout, rank);
          int64_t held = 0;
          for (const ModelParameter& parameter : parameters) {
            const auto slice = parameter_slice(shape, split, parameter.name);
            if (!slice) continue;
            held += slice->elements();
            const bool all_have = slice->alike || parameter.name.find(".experts.") != std::string::npos;
            if (!slice->tied_copy && (!all_have || split.tensor_rank == 0)) once += slice->elements();
          }
          const LocalShape local = local_shape(shape, split);
          const int64_t copies = (local.embedding ? 1 : 0) + (local.head && !(shape.tied && local.embedding) ? 1 : 0);
          const int64_t padding = copies * (local.padded_vocab - local.vocab) * shape.hidden;
          const RankMemory memory = rank_memory(shape, layout, rank);
          EXPECT_EQ(memory.dense_params + memory.expert_params, held + padding) << name << " " << to_string(layout);
        }
        EXPECT_EQ(once, parameter_count(shape)) << name << " " << to_string(layout);
      }
    }
  }
}

TEST(Split, MemoryCountsBiasesOfEveryKind) {
  for (const ModelShape& shape : small_shapes()) {
    for (const Dealt& dealt : every_split(shape)) {
      for (int64_t rank = 0; rank < dealt.layout.world(); ++rank) {
        const ModelSplit split = model_split(shape, dealt.layout, rank, dealt.stages);
        const LocalShape local = local_shape(shape, split);
        int64_t held = 0;
        for (const ModelParameter& parameter : model_parameters(shape)) {
          const auto slice = parameter_slice(shape, split, parameter.name);
          if (!slice) continue;
          const bool vocabulary = slice->shape[0] == shape.vocab;
          held += slice->elements() + (vocabulary ? (local.padded_vocab - local.vocab) * shape.hidden : 0);
        }
        const RankMemory memory = rank_memory(shape, dealt.layout, rank, {.stages = dealt.stages});
        EXPECT_EQ(memory.dense_params + memory.expert_params, held);
      }
    }
  }
}

TEST(Split, ByHand) {
  // Llama-3.1-70B in TP4 PP4, rank 5: tensor rank 1 of the second stage.
  const ModelShape shape = *known_model_shape("Llama-3.1-70B");
  const ModelSplit split = model_split(shape, {.tp = 4, .pp = 4}, 5);
  EXPECT_THAT(split.layers, ElementsAre(Range{20, 40}));
  EXPECT_EQ(split.query_heads, (Range{16, 32}));
  EXPECT_EQ(split.key_heads, (Range{2, 4}));
  EXPECT_EQ(split.mlp, (Range{7168, 14336}));
  EXPECT_EQ(split.vocab, (Range{32064, 64128}));
  const auto slice = [&](const std::string& name) { return parameter_slice(shape, split, "model.layers.20." + name); };
  EXPECT_EQ(slice("self_attn.k_proj.weight")->range, (Range{256, 512}));
  EXPECT_EQ(slice("self_attn.o_proj.weight")->dimension, 1);
  EXPECT_EQ(slice("self_attn.o_proj.weight")->range, (Range{2048, 4096}));
  EXPECT_FALSE(parameter_slice(shape, split, "model.layers.40.mlp.up_proj.weight"));
  EXPECT_FALSE(parameter_slice(shape, split, "lm_head.weight"));
  // Qwen2's vocabulary of 151,936 in 4 parts is a multiple of 8 each; 151,937 would not be.
  EXPECT_EQ(padded_vocab(151936, 4), 151936);
  EXPECT_EQ(padded_vocab(151937, 4), 151968);
  EXPECT_EQ(padded_vocab(10, 4), 32);
}

// Experts are whole on a rank that has them; their matrices are found by name without a list of all.
TEST(Split, ExpertsAreParametersOfTheirLayers) {
  ModelShape shape = *known_model_shape("Qwen3-30B-A3B");
  const ModelSplit whole = model_split(shape, {.dp = 8}, 3);
  const std::string layer = "model.layers.47.";
  const auto slice = parameter_slice(shape, whole, layer + "mlp.experts.127.down_proj.weight");
  ASSERT_TRUE(slice);
  EXPECT_EQ(slice->shape, (std::vector<int64_t>{2048, 768}));
  EXPECT_EQ(parameter_slice(shape, whole, layer + "mlp.gate.weight")->shape, (std::vector<int64_t>{128, 2048}));
  for (const char* name :
       {"mlp.experts.128.down_proj.weight", "mlp.experts.01.up_proj.weight", "mlp.experts.up_proj.weight",
        "mlp.experts.1.w1.weight", "mlp.gate_proj.weight", "mlp.experts.1.gate_proj.bias"}) {
    EXPECT_THROW(parameter_slice(shape, whole, layer + name), Error) << name;
  }
  int64_t elements = 0;
  for (const ModelParameter& parameter : model_parameters(shape)) {
    const auto own = parameter_slice(shape, whole, parameter.name);
    ASSERT_TRUE(own && own->shape == parameter.shape) << parameter.name;
    elements += own->elements();
  }
  EXPECT_EQ(elements, parameter_count(shape));
  shape.sparse_step = 2;
  shape.dense_layers = {3};
  shape.intermediate = 512;
  EXPECT_TRUE(parameter_slice(shape, whole, "model.layers.1.mlp.gate.weight"));
  EXPECT_TRUE(parameter_slice(shape, whole, "model.layers.3.mlp.gate_proj.weight"));
  EXPECT_THROW(parameter_slice(shape, whole, "model.layers.3.mlp.gate.weight"), Error);
}

TEST(Split, RefusesWhatIsNoParameter) {
  const ModelShape shape = small(true, false, false, false, 64);
  const ModelSplit split = model_split(shape, {.tp = 2, .pp = 2}, 0);
  for (const char* name : {"", "model.layers.", "model.layers.0", "model.layers.8.mlp.up_proj.weight",
                           "model.layers.-1.mlp.up_proj.weight", "model.layers.01.mlp.up_proj.weight",
                           "model.layers.x.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias",
                           "model.layers.0.self_attn.q_norm.weight", "lm_head.weight", "transformer.wte.weight"}) {
    EXPECT_THROW(parameter_slice(shape, split, name), Error) << name;
  }
  EXPECT_THROW(model_split(shape, {.tp = 3}, 0), Error);
  EXPECT_THROW(model_split(shape, {.pp = 3}, 0), Error);
  EXPECT_THROW(model_split(*known_model_shape("Qwen3-30B-A3B"), {.tp = 8}, 0), Error);  // of 4 key heads
  // Names of other stages are no mistake.
  EXPECT_FALSE(parameter_slice(shape, split, "model.layers.7.mlp.up_proj.weight"));
}

}  // namespace
}  // namespace trireme
