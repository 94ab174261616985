#include "trainer/model/config.h"

#include "base/fs.h"
#include "tests/unit/model/testing.h"

namespace trireme {
namespace {

using nlohmann::json;
using testing::error_of;
using testing::small_config;

json base_json() {
  return {{"model_type", "llama"},  {"vocab_size", 100},        {"hidden_size", 64}, {"intermediate_size", 128},
          {"num_hidden_layers", 2}, {"num_attention_heads", 4}, {"eos_token_id", 7}};
}

ModelConfig parse(const json& values) { return ModelConfig::from_json(values, "config.json"); }

TEST(ModelConfig, DefaultsFollowFromTheSizes) {
  const ModelConfig config = parse(base_json());
  EXPECT_EQ(config.num_kv_heads, 4);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.rope.theta, 10000.0);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_EQ(config.eos_token_ids, (std::vector<int32_t>{7}));
  json qwen3 = base_json();
  qwen3["model_type"] = "qwen3";
  EXPECT_EQ(parse(qwen3).head_dim, 128);
  EXPECT_TRUE(parse(qwen3).qk_norm);
  json qwen2 = base_json();
  qwen2["model_type"] = "qwen2";
  EXPECT_TRUE(parse(qwen2).qkv_bias);
  EXPECT_FALSE(parse(qwen2).output_bias);
}

TEST(ModelConfig, BothSpellingsMeanTheSame) {
  json four = base_json(), five = base_json();
  const json scaling = {{"rope_type", "llama3"},
                        {"factor", 8.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 8192}};
  four.update({{"rope_theta", 500000.0},
               {"rope_scaling", scaling},
               {"torch_dtype", "bfloat16"},
               {"eos_token_id", {1, 2}},
               {"head_dim", nullptr}});
  json parameters = scaling;
  parameters["rope_theta"] = 500000.0;
  five.update({{"rope_parameters", parameters}, {"dtype", "bfloat16"}, {"eos_token_id", {1, 2}}});
  EXPECT_EQ(parse(four), parse(five));
  EXPECT_EQ(parse(four).rope.scaling, RopeOptions::Scaling::kLlama3);
  EXPECT_EQ(parse(four).rope.theta, 500000.0);
  EXPECT_EQ(parse(four).dtype, "bfloat16");
  EXPECT_EQ(parse(four).eos_token_ids, (std::vector<int32_t>{1, 2}));
}

TEST(ModelConfig, WhatIsWrittenIsReadBack) {
  for (const auto family : testing::kAllFamilies) {
    ModelConfig config = small_config(family, true);
    EXPECT_EQ(parse(config.to_json()), config);
    config.eos_token_ids = {4, 5};
    config.rope.factor = 32.0;
    using Scaling = RopeOptions::Scaling;
    for (const Scaling scaling : {Scaling::kLlama3, Scaling::kLinear, Scaling::kDynamic, Scaling::kYarn}) {
      config.rope.scaling = scaling;
      if (scaling == Scaling::kYarn) {
        config.rope.beta_fast = 24.0;
        config.rope.truncate = false;
        config.rope.attention_factor = 1.25;
      }
      const ModelConfig again = parse(config.to_json());
      EXPECT_EQ(again, config);
      EXPECT_EQ(again.rope.scaling, scaling);
      EXPECT_EQ(again.rope.attention_factor, config.rope.attention_factor);
    }
  }
}

TEST(ModelConfig, ScalingSaysHowFarPositionsReach) {
  json values = base_json();
  values["max_position_embeddings"] = 40960;
  EXPECT_EQ(parse(values).positions(), 40960);
  const auto with = [&](const json& scaling) {
    values["rope_scaling"] = scaling;
    return parse(values).positions();
  };
  EXPECT_EQ(with({{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32768}}), 131072);
  EXPECT_EQ(with({{"type", "yarn"}, {"factor", 2.0}}), 81920);
  EXPECT_EQ(with({{"rope_type", "yarn"}, {"original_max_position_embeddings", 10240}}), 40960);
  EXPECT_EQ(with({{"rope_type", "linear"}, {"factor", 2.0}}), 81920);
  EXPECT_EQ(with({{"rope_type", "dynamic"}, {"factor", 4.0}}), 40960);
}

TEST(ModelConfig, ExpertsAreReadInBothSpellings) {
  json qwen = base_json();
  qwen.update({{"model_type", "qwen3_moe"},
               {"num_experts", 16},
               {"num_experts_per_tok", 4},
               {"moe_intermediate_size", 24},
               {"norm_topk_prob", true},
               {"decoder_sparse_step", 2},
               {"mlp_only_layers", {1}},
               {"num_hidden_layers", 4}});
  const ModelConfig config = parse(qwen);
  EXPECT_EQ(config.num_experts, 16);
  EXPECT_EQ(config.experts_per_token, 4);
  EXPECT_EQ(config.moe_intermediate_size, 24);
  EXPECT_TRUE(config.qk_norm && config.normalize_experts);
  const ModelShape shape = config.shape();
  // Every second layer, but layer 1 is named as dense.
  for (int64_t layer = 0; layer < 4; ++layer) EXPECT_EQ(shape.has_experts(layer), layer == 3) << layer;
  EXPECT_EQ(router_name(shape), "mlp.gate.weight");
  EXPECT_EQ(expert_name(shape, 3, ExpertMatrix::kUp), "mlp.experts.3.up_proj.weight");
  json mixtral = base_json();
  mixtral.update({{"model_type", "mixtral"}, {"num_local_experts", 4}, {"sliding_window", nullptr}});
  const ModelConfig other = parse(mixtral);
  EXPECT_EQ(other.num_experts, 4);
  EXPECT_EQ(other.experts_per_token, 2);
  EXPECT_EQ(other.moe_intermediate_size, 128);
  EXPECT_TRUE(other.normalize_experts);
  EXPECT_EQ(other.layers_with_experts(), 2);
  EXPECT_EQ(router_name(other.shape()), "block_sparse_moe.gate.weight");
  EXPECT_EQ(expert_name(other.shape(), 3, ExpertMatrix::kUp), "block_sparse_moe.experts.3.w3.weight");
  // transformers 5 knows either name of the count for both.
  qwen.erase("num_experts");
  qwen["num_local_experts"] = 16;
  EXPECT_EQ(parse(qwen).num_experts, 16);
  qwen["num_experts"] = 12;
  EXPECT_MENTIONS(error_of([&] { parse(qwen); }), "num_local_experts is another number than num_experts");
  qwen.erase("num_local_experts");
  mixtral.erase("num_local_experts");
  mixtral["num_experts"] = 4;
  EXPECT_EQ(parse(mixtral).num_experts, 4);
  // Qwen's default, as transformers reads a file that does not say.
  qwen.erase("norm_topk_prob");
  EXPECT_FALSE(parse(qwen).normalize_experts);
}

TEST(ModelConfig, RoutingOfOtherKindsIsRefusedByName) {
  const auto with = [](const char* key, const json& value) {
    json values = base_json();
    values["model_type"] = "qwen3_moe";
    values[key] = value;
    return error_of([&] { parse(values); });
  };
  EXPECT_MENTIONS(with("shared_expert_intermediate_size", 512), "shared experts are not supported");
  EXPECT_MENTIONS(with("n_group", 8), "routing by groups of experts is not supported");
  EXPECT_MENTIONS(with("scoring_func", "sigmoid"), "sigmoid is not supported; softmax is");
  EXPECT_MENTIONS(with("use_expert_bias", true), "chosen without a bias");
  EXPECT_MENTIONS(with("topk_method", "noaux_tc"), "noaux_tc is not supported; greedy is");
  EXPECT_MENTIONS(with("moe_router_activation_func", "sigmoid"), "sigmoid is not supported");
  EXPECT_MENTIONS(with("first_k_dense_replace", 1), "mlp_only_layers");
  EXPECT_MENTIONS(with("moe_layer_freq", 2), "decoder_sparse_step");
  EXPECT_MENTIONS(with("num_experts_per_tok", 200), "num_experts_per_tok 200 is more than");
  EXPECT_MENTIONS(with("mlp_only_layers", {7}), "names 7, which is none of the layers");
  json mixtral = base_json();
  mixtral.update({{"model_type", "mixtral"}, {"sliding_window", 4096}});
  EXPECT_MENTIONS(error_of([&] { parse(mixtral); }), "sliding_window 4096 is not supported; null is");
}

TEST(ModelConfig, MistakesAreNamed) {
  const auto with = [](const char* key, const json& value) {
    json values = base_json();
    values[key] = value;
    return error_of([&] { parse(values); });
  };
  EXPECT_MENTIONS(with("model_type", "gpt2"), "unknown architecture gpt2; known are llama");
  EXPECT_MENTIONS(with("model_type", "qwen2_moe"), "unknown architecture qwen2_moe; known are llama");
  EXPECT_MENTIONS(with("num_experts", 8), "num_experts makes it a mixture of experts, which llama is not");
  EXPECT_MENTIONS(with("hidden_size", "big"), "hidden_size must be an integer");
  EXPECT_MENTIONS(with("hidden_size", -4), "hidden_size must be positive");
  EXPECT_MENTIONS(with("num_key_value_heads", 3), "num_attention_heads 4 is not a multiple");
  EXPECT_MENTIONS(with("head_dim", 15), "odd");
  EXPECT_MENTIONS(with("hidden_act", "gelu"), "gelu is not supported");
  EXPECT_MENTIONS(with("rope_scaling", {{"rope_type", "longrope"}, {"factor", 4.0}}), "longrope is not supported");
  EXPECT_MENTIONS(with("rope_scaling", {{"rope_type", "yarn"}, {"factor", 0.5}}), "factor must be at least 1");
  EXPECT_MENTIONS(with("rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}, {"beta_fast", 0.5}}), "beta_slow");
  EXPECT_MENTIONS(with("use_sliding_window", true), "use_sliding_window");
  EXPECT_MENTIONS(with("layer_types", {"full_attention", "sliding_attention"}), "sliding_attention");
  json missing = base_json();
  missing.erase("vocab_size");
  EXPECT_MENTIONS(error_of([&] { parse(missing); }), "config.json: key vocab_size is missing");
  const TemporaryDirectory dir;
  EXPECT_MENTIONS(error_of([&] { ModelConfig::load(dir.path()); }), "has no config.json");
  write_file_atomic(dir.path() / "config.json", "{");
  EXPECT_MENTIONS(error_of([&] { ModelConfig::load(dir.path()); }), "not valid JSON");
}

TEST(ModelConfig, AModelForAnotherPurposeIsRefusedByItsArchitecture) {
  const auto with = [](const char* type, const json& architectures) {
    json values = base_json();
    values["model_type"] = type;
    values["architectures"] = architectures;
    return error_of([&] { parse(values); });
  };
  json plain = base_json();
  plain["model_type"] = "qwen3";
  for (const json& architectures : {json{"Qwen3ForCausalLM"}, json::array(), json()}) {
    plain["architectures"] = architectures;
    EXPECT_EQ(parse(plain).family, ModelFamily::kQwen3);
  }
  EXPECT_MENTIONS(with("qwen3", {"GemmaForSequenceClassification"}), "GemmaForSequenceClassification; known are llama");
  EXPECT_MENTIONS(with("qwen2", {"LlamaForSequenceClassification"}),
                  "model_type qwen2 and architecture LlamaForSequenceClassification");
  EXPECT_MENTIONS(with("llama", {"LlamaForTokenClassification"}), "unknown architecture LlamaForTok");
  EXPECT_MENTIONS(with("llama", {"MistralForCausalLM"}), "unknown architecture MistralForCausalLM");
  EXPECT_MENTIONS(with("qwen2", {"Qwen2Model"}), "unknown architecture Qwen2Model");
  EXPECT_MENTIONS(with("", {"GemmaForCausalLM"}), "unknown architecture GemmaForCausalLM");
  EXPECT_MENTIONS(with("qwen2", {"LlamaForCausalLM"}), "model_type qwen2 and architecture LlamaForCausalLM");
  EXPECT_MENTIONS(with("qwen2", "Qwen2ForCausalLM"), "architectures must be a list");
}

TEST(ModelConfig, CountsParametersAndOperations) {
  ModelConfig config = small_config(ModelFamily::kQwen3);
  const int64_t untied = config.parameter_count();
  config.tie_word_embeddings = true;
  EXPECT_EQ(untied - config.parameter_count(), config.vocab_size * config.hidden_size);
  EXPECT_GT(config.forward_flops_per_token(100), config.forward_flops_per_token(0));
}

}  // namespace
}  // namespace trireme
