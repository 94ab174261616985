#include "trainer/bench/shapes.h"

#include <filesystem>
#include <optional>
#include <system_error>

#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"

namespace trireme::bench {
namespace {

struct Sizes {
  const char* name;
  ModelFamily family;
  int64_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, positions;
  double theta, eps;
  bool tied;
  int64_t experts = 0, per_token = 0, expert_width = 0;
};

// From the models' config.json on the Hub.
constexpr Sizes kShapes[] = {
    {"llama-3.1-8b", ModelFamily::kLlama, 128256, 4096, 14336, 32, 32, 8, 128, 131072, 500000.0, 1e-5, false},
    {"llama-3.1-70b", ModelFamily::kLlama, 128256, 8192, 28672, 80, 64, 8, 128, 131072, 500000.0, 1e-5, false},
    {"qwen3-1.7b", ModelFamily::kQwen3, 151936, 2048, 6144, 28, 16, 8, 128, 40960, 1000000.0, 1e-6, true},
    {"qwen3-8b", ModelFamily::kQwen3, 151936, 4096, 12288, 36, 32, 8, 128, 40960, 1000000.0, 1e-6, false},
    {"qwen3-32b", ModelFamily::kQwen3, 151936, 5120, 25600, 64, 64, 8, 128, 40960, 1000000.0, 1e-6, false},
    {"qwen2.5-1.5b", ModelFamily::kQwen2, 151936, 1536, 8960, 28, 12, 2, 128, 131072, 1000000.0, 1e-6, true},
    {"qwen3-30b-a3b", ModelFamily::kQwen3Moe, 151936, 2048, 6144, 48, 32, 4, 128, 40960, 1000000.0, 1e-6, false, 128, 8,
     768},
    {"mixtral-8x7b", ModelFamily::kMixtral, 32000, 4096, 14336, 32, 32, 8, 128, 32768, 1000000.0, 1e-5, false, 8, 2,
     14336},
    {"tiny-moe", ModelFamily::kQwen3Moe, 512, 128, 256, 2, 4, 2, 64, 4096, 10000.0, 1e-6, true, 8, 2, 64},
    {"tiny", ModelFamily::kQwen3, 512, 128, 256, 2, 4, 2, 64, 4096, 10000.0, 1e-6, true},
};

ModelConfig config_of(const Sizes& s) {
  ModelConfig c;
  c.family = s.family;
  c.vocab_size = s.vocab;
  c.hidden_size = s.hidden;
  c.intermediate_size = s.intermediate;
  c.num_layers = s.layers;
  c.num_heads = s.heads;
  c.num_kv_heads = s.kv_heads;
  c.head_dim = s.head_dim;
  c.max_position_embeddings = s.positions;
  c.rms_norm_eps = s.eps;
  c.rope.head_dim = s.head_dim;
  c.rope.theta = s.theta;
  c.rope.original_max_position = s.positions;
  if (s.family == ModelFamily::kLlama) {
    c.rope.scaling = RopeOptions::Scaling::kLlama3;
    c.rope.factor = 8.0;
    c.rope.original_max_position = 8192;
  }
  c.tie_word_embeddings = s.tied;
  c.qkv_bias = s.family == ModelFamily::kQwen2;
  c.qk_norm = s.family == ModelFamily::kQwen3 || s.family == ModelFamily::kQwen3Moe;
  c.num_experts = s.experts;
  c.experts_per_token = s.per_token;
  c.moe_intermediate_size = s.expert_width;
  c.dtype = "bfloat16";
  return c;
}

}  // namespace

std::vector<std::string> shape_names() {
  std::vector<std::string> names;
  for (const Sizes& sizes : kShapes) names.emplace_back(sizes.name);
  return names;
}

namespace {

std::optional<ModelConfig> shape_of_file(const std::string& name) {
  const std::filesystem::path path = name;
  std::error_code unknown;
  if (std::filesystem::is_directory(path, unknown)) return ModelConfig::load(path);
  if (path.extension() != ".json") return std::nullopt;
  const nlohmann::json values = nlohmann::json::parse(read_file(path), nullptr, false);
  if (values.is_discarded()) fail_user(name + " is not valid JSON");
  return ModelConfig::from_json(values, name);
}

std::optional<ModelConfig> shape_of_table(const std::string& name) {
  for (const Sizes& sizes : kShapes) {
    if (to_lower(name) == sizes.name) return config_of(sizes);
  }
  return std::nullopt;
}

}  // namespace

ModelConfig find_shape(const std::string& name, int64_t layers) {
  std::optional<ModelConfig> config = shape_of_table(name);
  if (!config) config = shape_of_file(name);
  if (!config)
    fail_user("unknown shape '" + name + "'; known are " + join(shape_names(), ", ") +
              ", or a config.json or its folder");
  if (layers < 0 || layers > config->num_layers) {
    fail_user("--layers " + std::to_string(layers) + " is not in 1.." + std::to_string(config->num_layers) +
              ", the layers of " + name);
  }
  if (layers > 0) config->num_layers = layers;
  return *config;
}

std::unique_ptr<Model> make_random_model(const ModelConfig& config, const ModelOptions& options, uint64_t seed) {
  auto model = std::make_unique<Model>(config, options);
  draw_parameters(*model, seed);
  return model;
}

}  // namespace trireme::bench
