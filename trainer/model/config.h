// ModelConfig: a Hugging Face config.json as typed values; spellings of transformers 4 and 5.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "topology/split.h"
#include "topology/topology.h"
#include "trainer/ops/ops.h"

namespace trireme {

enum class ModelFamily { kLlama, kQwen2, kQwen3, kQwen3Moe, kMixtral };
// The model_type of config.json: "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral".
const char* to_string(ModelFamily family);

struct ModelConfig {
  ModelFamily family = ModelFamily::kLlama;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  RopeOptions rope;
  bool tie_word_embeddings = false;
  // A value or reward model: score.weight [1, hidden] gives one number of each row, there is no vocabulary's head
  // (Hugging Face's ...ForSequenceClassification with one label). Nothing is tied then.
  bool value_head = false;
  bool qkv_bias = false;
  bool output_bias = false;  // of o_proj
  bool mlp_bias = false;
  bool qk_norm = false;
  // Mixtures of experts; num_experts 0: none. A layer has experts where shape().has_experts(layer).
  int64_t num_experts = 0;
  int64_t experts_per_token = 0;
  int64_t moe_intermediate_size = 0;  // of an expert
  bool normalize_experts = true;      // norm_topk_prob: the weights of the chosen experts add up to 1
  int64_t sparse_step = 1;            // decoder_sparse_step
  std::vector<int64_t> dense_layers;  // mlp_only_layers
  double router_aux_loss_coef = 0.001;
  std::vector<int32_t> eos_token_ids;  // one or many; empty when the file names none
  int32_t bos_token_id = -1;           // -1: none
  std::string dtype = "float32";       // what the checkpoint was saved in: float32, bfloat16, float16

  // Reads dir/config.json. Throws Error(kUser) that names file and key: unknown architectures (with the known ones),
  // kinds of experts and routing that are not implemented, sizes that do not divide, scalings, more than one label.
  static ModelConfig load(const std::filesystem::path& dir);
  static ModelConfig from_json(const nlohmann::json& json, const std::string& source);

  // This model's layers under a value head.
  ModelConfig with_value_head() const;

  // A complete config.json that transformers 4 and 5 read.
  nlohmann::json to_json() const;

  // Tokens of the longest sequence that the model knows: max_position_embeddings, more where rope scaling stretches it
  // (yarn: factor times the original length, linear: factor times max_position_embeddings).
  int64_t positions() const;
  int64_t parameter_count() const;  // a tied head counted once
  ModelShape shape() const;         // what layouts depend on
  int64_t layers_with_experts() const;
  // Every (in, out) of its linears with the head, for the exactness self-test.
  std::vector<LinearShape> linear_shapes() const;                       // of the whole model
  std::vector<LinearShape> linear_shapes(const LocalShape& own) const;  // of a rank's part
  // Floating point operations of one forward for one token after `context` earlier ones (multiply and add count 2).
  double forward_flops_per_token(double context) const;
  bool operator==(const ModelConfig& other) const { return to_json() == other.to_json(); }
};

}  // namespace trireme
