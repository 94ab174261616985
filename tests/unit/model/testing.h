// Small models of every family for the model tests.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/unit/errors.h"
#include "trainer/model/model.h"
#include "trainer/model/safetensors.h"
#include "trainer/ops/philox.h"

namespace trireme::testing {

inline ModelConfig small_config(ModelFamily family, bool tied = false) {
  ModelConfig config;
  config.family = family;
  config.vocab_size = 61;
  config.hidden_size = 48;
  config.intermediate_size = 80;
  config.num_layers = 3;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 12;
  config.max_position_embeddings = 512;
  config.initializer_range = 0.15;
  config.rope.head_dim = 12;
  config.tie_word_embeddings = tied;
  config.qkv_bias = family == ModelFamily::kQwen2;
  config.qk_norm = family == ModelFamily::kQwen3 || family == ModelFamily::kQwen3Moe;
  const bool mixture = family == ModelFamily::kQwen3Moe || family == ModelFamily::kMixtral;
  if (mixture) {
    config.num_experts = 8;
    config.experts_per_token = 2;
    config.moe_intermediate_size = family == ModelFamily::kMixtral ? config.intermediate_size : 24;
  }
  if (family == ModelFamily::kQwen3Moe) config.dense_layers = {1};
  config.rope.original_max_position = 512;
  config.eos_token_ids = {2};
  return config;
}

inline constexpr ModelFamily kAllFamilies[] = {ModelFamily::kLlama, ModelFamily::kQwen2, ModelFamily::kQwen3,
                                               ModelFamily::kQwen3Moe, ModelFamily::kMixtral};

inline std::unique_ptr<Model> small_model(ModelFamily family, bool tied = false, ModelOptions options = {}) {
  auto model = std::make_unique<Model>(small_config(family, tied), options);
  init_parameters(*model, 11);
  const at::NoGradGuard no_grad;
  for (Parameter& parameter : model->parameters()) {  // biases and norms must matter
    if (parameter.tensor.dim() != 1) continue;
    for (int64_t i = 0; i < parameter.tensor.numel(); ++i) {
      parameter.tensor[i] += 0.2 * philox_normal(5, static_cast<uint64_t>(parameter.offset), static_cast<uint64_t>(i));
    }
  }
  return model;
}

inline std::vector<int32_t> random_tokens(int64_t count, uint64_t seed, int64_t vocab = 61) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<int32_t>(philox_uniform(seed, 1, i) * static_cast<double>(vocab));
  return ids;
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

using test::error_of;

// Central differences of `loss`, whose gradient the model has, in float64 along a random direction of all parameters at
// once. Returns their ratio to the slope that the gradient gives: 1.
template <typename Loss>
double differences_by_gradient(Model& model, const Loss& loss) {
  const at::NoGradGuard no_grad;
  const at::Tensor trained = model.flat_parameters().narrow(0, 0, model.trained_elements());
  at::Tensor direction = at::zeros_like(trained);
  for (const Parameter& p : model.parameters()) {
    for (int64_t i = 0; i < p.size && !p.frozen; ++i)
      direction.data_ptr<double>()[p.offset + i] =
          philox_normal(9, static_cast<uint64_t>(p.offset), static_cast<uint64_t>(i));
  }
  const double slope = (model.flat_gradients() * direction).sum().item<double>();
  const auto at_step = [&](double step) {
    trained.add_(direction, step);
    const double value = loss().template item<double>();
    trained.sub_(direction, step);
    return value;
  };
  constexpr double kStep = 1e-6;
  return (at_step(kStep) - at_step(-kStep)) / (2 * kStep) / slope;
}

// Rewrites the single weights file of a saved model.
inline void rewrite(const std::filesystem::path& dir, const std::function<void(NamedTensors&)>& change) {
  const SafetensorsFile file(dir / "model.safetensors");
  NamedTensors tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, file.tensor(name).clone());
  change(tensors);
  write_safetensors(dir / "model.safetensors", tensors);
}

}  // namespace trireme::testing
