// Weights as numbers: each element of a model has its own, and ranks have those of their slices.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "topology/split.h"

namespace trireme::test {

constexpr int64_t kNothing = -1;

// What a rank has of each parameter, whole and row by row; kNothing where it has none.
using Memory = std::vector<std::vector<int64_t>>;

inline int64_t columns_of(const ModelParameter& parameter) {
  return parameter.shape.size() > 1 ? parameter.shape[1] : 1;
}
inline int64_t elements_of(const ModelParameter& parameter) { return parameter.shape[0] * columns_of(parameter); }

// Calls `visit` with every place of the indices `range` of `dimension`, row by row.
inline void visit_places(const ModelParameter& parameter, int64_t dimension, const Range& range,
                         const std::function<void(size_t place)>& visit) {
  const int64_t columns = columns_of(parameter);
  const Range rows = dimension == 0 ? range : Range{0, parameter.shape[0]};
  const Range of_row = dimension == 0 ? Range{0, columns} : range;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t column = of_row.begin; column < of_row.end; ++column)
      visit(static_cast<size_t>(row * columns + column));
  }
}

inline std::vector<Memory> memories(const ModelShape& shape, const std::vector<ModelParameter>& parameters,
                                    const Layout& layout, const StageOptions& stages) {
  std::vector<Memory> all(static_cast<size_t>(layout.world()));
  for (int64_t rank = 0; rank < layout.world(); ++rank) {
    const ModelSplit split = model_split(shape, layout, rank, stages);
    for (size_t p = 0; p < parameters.size(); ++p) {
      std::vector<int64_t>& own =
          all[static_cast<size_t>(rank)].emplace_back(static_cast<size_t>(elements_of(parameters[p])), kNothing);
      const auto slice = parameter_slice(shape, split, parameters[p].name);
      if (!slice) continue;
      const auto base = static_cast<int64_t>(p) * 1000000;
      visit_places(parameters[p], slice->dimension, slice->range,
                   [&](size_t place) { own[place] = base + static_cast<int64_t>(place); });
    }
  }
  return all;
}

inline ModelShape small(int64_t heads, int64_t kv_heads, int64_t intermediate, int64_t vocab) {
  ModelShape shape{.layers = 4, .hidden = 3, .heads = heads, .kv_heads = kv_heads, .head_dim = 1};
  shape.intermediate = intermediate;
  shape.vocab = vocab;
  return shape;
}

// Llama with all biases; Qwen2, tied, with fewer tokens than the padding of some layouts; Qwen3.
inline std::vector<ModelShape> small_shapes() {
  std::vector<ModelShape> shapes{small(8, 4, 8, 33), small(6, 6, 12, 10), small(12, 12, 12, 50)};
  shapes[0].output_bias = shapes[0].mlp_bias = true;
  shapes[1].tied = shapes[1].qkv_bias = true;
  shapes[2].tied = shapes[2].qk_norm = true;
  return shapes;
}

inline constexpr StageOptions kStages[] = {
    {}, {.virtual_stages = 2}, {.first_layers = 1}, {.first_layers = 1, .last_layers = 1}};

// The same with experts in every layer but the second.
inline ModelShape small_mixture() {
  ModelShape shape = small(4, 4, 4, 20);
  shape.experts = 8;
  shape.experts_per_token = 2;
  shape.moe_intermediate = 3;
  shape.dense_layers = {1};
  return shape;
}

}  // namespace trireme::test
