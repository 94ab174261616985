// A tiny model of random weights, for tests of whatever has a model in it.
#pragma once

#include <memory>

#include "trainer/model/model.h"

namespace trireme::test {

// What tests choose; the rest is as in config.json files of the family.
struct Tiny {
  ModelFamily family = ModelFamily::kQwen3;
  int64_t vocab = 90;
  int64_t hidden = 32;
  int64_t intermediate = 48;
  int64_t layers = 1;
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t head_dim = 8;
  int64_t positions = 128;
  double initializer_range = 0.02;  // 0.2 and more: the model prefers some tokens
  bool tied = true;                 // head and embedding
};

inline ModelConfig tiny_config(const Tiny& tiny = {}) {
  ModelConfig config;
  config.family = tiny.family;
  config.vocab_size = tiny.vocab;
  config.hidden_size = tiny.hidden;
  config.intermediate_size = tiny.intermediate;
  config.num_layers = tiny.layers;
  config.num_heads = tiny.heads;
  config.num_kv_heads = tiny.kv_heads;
  config.head_dim = config.rope.head_dim = tiny.head_dim;
  config.max_position_embeddings = config.rope.original_max_position = tiny.positions;
  config.initializer_range = tiny.initializer_range;
  config.qkv_bias = tiny.family == ModelFamily::kQwen2;
  config.qk_norm = tiny.family == ModelFamily::kQwen3 || tiny.family == ModelFamily::kQwen3Moe;
  const bool mixture = tiny.family == ModelFamily::kQwen3Moe || tiny.family == ModelFamily::kMixtral;
  if (mixture) {
    config.num_experts = 8;
    config.experts_per_token = 2;
    config.moe_intermediate_size = tiny.family == ModelFamily::kMixtral ? tiny.intermediate : 24;
  }
  config.tie_word_embeddings = tiny.tied;
  return config;
}

// In float32 on the CPU, without gradients.
inline std::unique_ptr<Model> tiny_model(const Tiny& tiny = {}, uint64_t seed = 1) {
  ModelOptions options;
  options.trainable = false;
  auto model = std::make_unique<Model>(tiny_config(tiny), options);
  init_parameters(*model, seed);
  return model;
}

}  // namespace trireme::test
