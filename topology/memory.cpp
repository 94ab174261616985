// Parameter counts, static memory of a rank, and the shapes of published models.
#include <algorithm>

#include "base/text.h"
#include "topology/topology.h"

namespace trireme {
namespace {

constexpr int64_t kHeadRows = 8;  // rows of the head come in multiples of it

struct Params {
  int64_t dense = 0;
  int64_t expert = 0;
};

// One decoder layer as one rank holds it: heads and MLP rows over TP, experts over EP and ETP, norms and router whole,
// biases of what is summed over TP on its first rank.
Params layer_params(const ModelShape& m, int64_t layer, int64_t tp, int64_t tensor_rank, int64_t ep, int64_t etp) {
  Params p;
  const int64_t q = m.heads * m.head_dim;
  const int64_t kv = m.kv_heads * m.head_dim;
  p.dense += (m.hidden * (q + 2 * kv) + q * m.hidden) / tp;
  if (m.qkv_bias) p.dense += (q + 2 * kv) / tp;
  if (m.output_bias && tensor_rank == 0) p.dense += m.hidden;
  if (m.qk_norm) p.dense += 2 * m.head_dim;
  p.dense += 2 * m.hidden;
  if (m.has_experts(layer)) {
    p.dense += m.hidden * m.experts;
    p.expert += m.experts / ep * (3 * m.hidden * m.moe_intermediate / etp);
  } else {
    p.dense += 3 * m.hidden * m.intermediate / tp;
    if (m.mlp_bias) p.dense += 2 * m.intermediate / tp + (tensor_rank == 0 ? m.hidden : 0);
  }
  return p;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct KnownModel {
  const char* name;
  ModelShape shape;
};

ModelShape dense(int64_t layers, int64_t hidden, int64_t heads, int64_t kv_heads, int64_t head_dim,
                 int64_t intermediate, int64_t vocab, bool tied) {
  return {.layers = layers,
          .hidden = hidden,
          .heads = heads,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .intermediate = intermediate,
          .vocab = vocab,
          .tied = tied};
}
ModelShape with_bias(ModelShape shape) {
  shape.qkv_bias = true;
  return shape;
}
ModelShape with_qk_norm(ModelShape shape) {
  shape.qk_norm = true;
  return shape;
}
ModelShape with_experts(ModelShape shape, int64_t experts, int64_t per_token, int64_t moe_intermediate) {
  shape.experts = experts;
  shape.experts_per_token = per_token;
  shape.moe_intermediate = moe_intermediate;
  return shape;
}

ModelShape mixtral(ModelShape shape, int64_t width) {
  shape = with_experts(shape, 8, 2, width);
  shape.mixtral_names = true;
  return shape;
}

// From the models' published config.json files.
const std::vector<KnownModel>& known_models() {
  static const std::vector<KnownModel> models = {
      {"llama-3.2-1b", dense(16, 2048, 32, 8, 64, 8192, 128256, true)},
      {"llama-3.2-3b", dense(28, 3072, 24, 8, 128, 8192, 128256, true)},
      {"llama-3-8b", dense(32, 4096, 32, 8, 128, 14336, 128256, false)},
      {"llama-3.1-8b", dense(32, 4096, 32, 8, 128, 14336, 128256, false)},
      {"llama-3-70b", dense(80, 8192, 64, 8, 128, 28672, 128256, false)},
      {"llama-3.1-70b", dense(80, 8192, 64, 8, 128, 28672, 128256, false)},
      {"llama-3.3-70b", dense(80, 8192, 64, 8, 128, 28672, 128256, false)},
      {"llama-3.1-405b", dense(126, 16384, 128, 8, 128, 53248, 128256, false)},
      {"qwen2.5-0.5b", with_bias(dense(24, 896, 14, 2, 64, 4864, 151936, true))},
      {"qwen2.5-1.5b", with_bias(dense(28, 1536, 12, 2, 128, 8960, 151936, true))},
      {"qwen2.5-math-1.5b", with_bias(dense(28, 1536, 12, 2, 128, 8960, 151936, true))},
      {"qwen2.5-3b", with_bias(dense(36, 2048, 16, 2, 128, 11008, 151936, true))},
      {"qwen2.5-7b", with_bias(dense(28, 3584, 28, 4, 128, 18944, 152064, false))},
      {"qwen2.5-math-7b", with_bias(dense(28, 3584, 28, 4, 128, 18944, 152064, false))},
      {"qwen2.5-14b", with_bias(dense(48, 5120, 40, 8, 128, 13824, 152064, false))},
      {"qwen2.5-32b", with_bias(dense(64, 5120, 40, 8, 128, 27648, 152064, false))},
      {"qwen2.5-72b", with_bias(dense(80, 8192, 64, 8, 128, 29568, 152064, false))},
      {"deepseek-r1-distill-qwen-1.5b", with_bias(dense(28, 1536, 12, 2, 128, 8960, 151936, false))},
      {"qwen3-0.6b", with_qk_norm(dense(28, 1024, 16, 8, 128, 3072, 151936, true))},
      {"qwen3-1.7b", with_qk_norm(dense(28, 2048, 16, 8, 128, 6144, 151936, true))},
      {"qwen3-4b", with_qk_norm(dense(36, 2560, 32, 8, 128, 9728, 151936, true))},
      {"qwen3-8b", with_qk_norm(dense(36, 4096, 32, 8, 128, 12288, 151936, false))},
      {"qwen3-14b", with_qk_norm(dense(40, 5120, 40, 8, 128, 17408, 151936, false))},
      {"qwen3-32b", with_qk_norm(dense(64, 5120, 64, 8, 128, 25600, 151936, false))},
      {"mixtral-8x7b", mixtral(dense(32, 4096, 32, 8, 128, 0, 32000, false), 14336)},
      {"qwen3-30b-a3b", with_experts(with_qk_norm(dense(48, 2048, 32, 4, 128, 0, 151936, false)), 128, 8, 768)},
      {"qwen3-235b-a22b", with_experts(with_qk_norm(dense(94, 4096, 64, 4, 128, 0, 151936, false)), 128, 8, 1536)},
  };
  return models;
}

}  // namespace

bool ModelShape::has_experts(int64_t layer) const {
  return experts > 0 && (layer + 1) % sparse_step == 0 &&
         std::find(dense_layers.begin(), dense_layers.end(), layer) == dense_layers.end();
}

int64_t parameter_count(const ModelShape& shape) {
  int64_t layers = 0;
  for (int64_t i = 0; i < shape.layers; ++i) {
    const Params layer = layer_params(shape, i, 1, 0, 1, 1);
    layers += layer.dense + layer.expert;
  }
  const int64_t head = shape.value_head ? shape.hidden : shape.tied ? 0 : shape.vocab * shape.hidden;
  return layers + shape.vocab * shape.hidden + head + shape.hidden;
}

int64_t padded_vocab(int64_t vocab, int64_t tp) { return ceil_div(vocab, kHeadRows * tp) * kHeadRows * tp; }

std::optional<ModelShape> known_model_shape(std::string_view source) {
  while (ends_with(source, "/")) source.remove_suffix(1);
  std::string name = to_lower(source.substr(source.rfind('/') + 1));
  if (starts_with(name, "meta-")) name.erase(0, 5);
  for (const std::string_view suffix : {"-v0.1", "-2507", "-instruct", "-thinking", "-base"}) {
    if (ends_with(name, suffix)) name.erase(name.size() - suffix.size());
  }
  for (const KnownModel& model : known_models()) {
    if (name == model.name) return model.shape;
  }
  return std::nullopt;
}

RankMemory rank_memory(const ModelShape& shape, const Layout& layout, int64_t rank, const MemoryOptions& options) {
  const Coordinates at = coordinates(layout, rank);
  RankMemory memory;
  for (const Range& piece : stage_pieces(shape.layers, layout.pp, at.pp, options.stages)) {
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      const Params layer = layer_params(shape, i, layout.tp, at.tp, layout.ep, layout.etp);
      memory.dense_params += layer.dense;
      memory.expert_params += layer.expert;
    }
  }
  const bool first = at.pp == 0;
  const bool last = at.pp == layout.pp - 1;
  const int64_t embedding = padded_vocab(shape.vocab, layout.tp) / layout.tp * shape.hidden;
  if (first) memory.dense_params += embedding;
  // Tied with pp > 1: the last stage has a copy.
  if (last && !(shape.tied && first)) memory.dense_params += shape.value_head ? shape.hidden : embedding;
  if (last) memory.dense_params += shape.hidden;  // final norm

  const int64_t params = memory.dense_params + memory.expert_params;
  memory.weights_bytes = params * options.weight_bytes * (options.reference_weights ? 2 : 1);
  memory.grads_bytes = params * options.grad_bytes;
  const int64_t dense_shards = options.shard_optimizer ? group_size(layout, Axis::kDpCp) : 1;
  const int64_t expert_shards = options.shard_optimizer ? group_size(layout, Axis::kEdp) : 1;
  memory.optimizer_bytes = options.optimizer_bytes * (ceil_div(memory.dense_params, dense_shards) +
                                                      ceil_div(memory.expert_params, expert_shards));
  return memory;
}

RankMemory peak_memory(const ModelShape& shape, const Layout& layout, const MemoryOptions& options) {
  RankMemory peak;
  for (int64_t stage = 0; stage < layout.pp; ++stage) {  // no rank of a stage holds more than its first
    const RankMemory memory = rank_memory(shape, layout, rank_of(layout, 0, 0, 0, stage), options);
    if (memory.total_bytes() > peak.total_bytes()) peak = memory;
  }
  return peak;
}

}  // namespace trireme
