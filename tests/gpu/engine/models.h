// Models, requests and comparisons of the tests of an engine on a GPU.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "trainer/model/model.h"
#include "trainer/parallel/device.h"
#include "trainer/rollout/engine.h"

namespace trireme::gpu {

inline ModelConfig config_of(ModelFamily family, int64_t heads = 16, int64_t kv_heads = 8, int64_t head_dim = 128) {
  ModelConfig config;
  config.family = family;
  config.vocab_size = 32'064;
  config.hidden_size = 1024;
  config.intermediate_size = 3072;
  config.num_layers = 4;
  config.num_heads = heads;
  config.num_kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.max_position_embeddings = 4096;
  config.initializer_range = 0.05;
  config.rope.head_dim = head_dim;
  config.rope.theta = 1e6;
  config.qk_norm = family == ModelFamily::kQwen3 || family == ModelFamily::kQwen3Moe;
  if (family == ModelFamily::kQwen3Moe || family == ModelFamily::kMixtral) {
    config.num_experts = family == ModelFamily::kMixtral ? 8 : 32;
    config.experts_per_token = family == ModelFamily::kMixtral ? 2 : 4;
    config.moe_intermediate_size = family == ModelFamily::kMixtral ? config.intermediate_size : 384;
    if (family == ModelFamily::kQwen3Moe) config.dense_layers = {1};
  }
  config.qkv_bias = family == ModelFamily::kQwen2;
  config.tie_word_embeddings = family == ModelFamily::kQwen3;
  config.dtype = "bfloat16";
  return config;
}

// Normal weights drawn on the device; norms and biases are not trivial either. The same for the same seed.
inline void draw_weights(const Model& model, uint64_t seed) {
  const at::NoGradGuard no_grad;
  at::Generator generator = at::globalContext().defaultGenerator(model.options().device);
  generator.set_current_seed(seed);
  for (const Parameter& p : model.parameters()) {
    at::Tensor target = p.tensor.detach();
    const bool norm = p.name.find("norm") != std::string::npos;
    target.normal_(norm ? 1.0 : 0.0, norm ? 0.1 : model.config().initializer_range);
  }
}

inline std::unique_ptr<Model> gpu_model(const ModelConfig& config, bool trainable = false, uint64_t seed = 1) {
  ModelOptions options;
  options.dtype = at::kBFloat16;
  options.device = choose_device("cuda", 0);
  options.trainable = trainable;
  auto model = std::make_unique<Model>(config, options);
  draw_weights(*model, seed);
  return model;
}

inline std::vector<GroupRequest> requests(const std::vector<int64_t>& prompts, int64_t samples, uint32_t seed = 7) {
  std::vector<GroupRequest> result;
  std::mt19937 random(seed);
  uint64_t next = 1000;
  for (size_t g = 0; g < prompts.size(); ++g) {
    GroupRequest request;
    request.group_id = static_cast<int64_t>(g);
    request.samples = samples;
    request.first_sample_id = next;
    next += static_cast<uint64_t>(samples);
    for (int64_t i = 0; i < prompts[g]; ++i) request.prompt.push_back(static_cast<int32_t>(random() % 32'000));
    for (int64_t i = 0; i < samples; ++i) request.forced_lengths.push_back(1 + static_cast<int64_t>(random() % 60));
    result.push_back(std::move(request));
  }
  return result;
}

using Groups = std::map<int64_t, GeneratedGroup>;

inline Groups generate(const Model& model, EngineOptions options, const SamplingOptions& sampling,
                       const std::vector<GroupRequest>& groups, EngineStats* stats = nullptr) {
  options.max_total_length = 2048;
  if (options.cache_rows == 0) options.cache_rows = 200'000;
  Engine engine(model, nullptr, options, sampling);
  for (const GroupRequest& request : groups) engine.submit(request);
  Groups result;
  for (GeneratedGroup& group : engine.run()) result.emplace(group.group_id, std::move(group));
  if (stats != nullptr) *stats = engine.stats();
  return result;
}

inline SamplingOptions sampling_options() {
  SamplingOptions sampling;
  sampling.temperature = 0.9;
  sampling.seed = 42;
  return sampling;
}

inline void expect_same(const Groups& a, const Groups& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [id, group] : a) {
    const GeneratedGroup& other = b.at(id);
    for (size_t i = 0; i < group.samples.size(); ++i) {
      ASSERT_EQ(group.samples[i].response, other.samples[i].response) << what << ": group " << id << " sample " << i;
      ASSERT_EQ(0, std::memcmp(group.samples[i].logprobs.data(), other.samples[i].logprobs.data(),
                               group.samples[i].logprobs.size() * sizeof(float)))
          << what << ": log-prob bits of group " << id << " sample " << i;
    }
  }
}

struct Packed {
  std::vector<std::vector<int32_t>> sequences;
  std::vector<int64_t> rows, targets;
  std::vector<float> expected;
};

// Every sample in another order than the engine's. With `wanted` only those of its tokens are compared.
inline Packed pack(const Groups& groups,
                   const std::function<bool(const GeneratedSample&, int64_t token)>& wanted = {}) {
  Packed packed;
  int64_t offset = 0;
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
    for (const GeneratedSample& sample : group->second.samples) {
      std::vector<int32_t> ids = group->second.prompt;
      for (size_t i = 0; i < sample.response.size(); ++i) {
        if (!wanted || wanted(sample, static_cast<int64_t>(i))) {
          packed.rows.push_back(offset + static_cast<int64_t>(ids.size()) - 1);
          packed.targets.push_back(sample.response[i]);
          packed.expected.push_back(sample.logprobs[i]);
        }
        ids.push_back(sample.response[i]);
      }
      offset += static_cast<int64_t>(ids.size());
      packed.sequences.push_back(std::move(ids));
    }
  }
  return packed;
}

inline at::Tensor logprobs_of_the_loss(const Model& model, const Packed& packed, const LogprobOptions& options) {
  const at::Device device = model.options().device;
  PackedBatch batch = PackedBatch::from_sequences(packed.sequences);
  batch.ids = batch.ids.to(device);
  batch.positions = batch.positions.to(device);
  const at::Tensor hidden = model.forward(batch).index_select(0, at::tensor(packed.rows, at::kLong).to(device));
  return token_logprobs(hidden, model.head_weight(), at::tensor(packed.targets, at::kLong).to(device), options);
}

inline int64_t differing(const at::Tensor& logprobs, const std::vector<float>& expected) {
  const at::Tensor host = logprobs.detach().to(at::kCPU).contiguous();
  const float* value = host.const_data_ptr<float>();
  int64_t count = 0;
  for (size_t i = 0; i < expected.size(); ++i) count += std::memcmp(value + i, &expected[i], sizeof(float)) != 0;
  return count;
}

inline const std::vector<int64_t> kPrompts = {5, 300, 64, 129, 17, 700, 128, 33};

// Groups as they become complete, each once.
class Answers {
 public:
  void keep(std::vector<GeneratedGroup> more) {
    for (GeneratedGroup& group : more) {
      const int64_t id = group.group_id;
      EXPECT_TRUE(groups.emplace(id, std::move(group)).second) << "group " << id << " came twice";
    }
  }
  void steps(Engine& engine, int64_t count) {
    for (int64_t i = 0; i < count && !engine.idle(); ++i) keep(engine.step());
  }
  Groups groups;
};

class Batching : public ::testing::TestWithParam<ModelFamily> {};

}  // namespace trireme::gpu
