// Rotations under every kind of scaling against tests/data/rope_goldens.json (tests/parity/make_rope_goldens.py).
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/fs.h"
#include "tests/unit/model/testing.h"
#include "trainer/ops/rope_frequencies.h"

namespace trireme {
namespace {

using nlohmann::json;
using testing::error_of;

json goldens() { return json::parse(read_file("tests/data/rope_goldens.json")); }

// A config.json with these rotations, in the spelling of transformers 5 or of 4.
ModelConfig config_of(const json& golden, bool five) {
  json values = {{"model_type", "qwen3"},
                 {"vocab_size", 100},
                 {"hidden_size", 64},
                 {"intermediate_size", 128},
                 {"num_hidden_layers", 1},
                 {"num_attention_heads", 2},
                 {"num_key_value_heads", 1},
                 {"head_dim", golden["head_dim"]},
                 {"max_position_embeddings", golden["max_position_embeddings"]}};
  json rope = golden["rope"];
  if (five) {
    values["rope_parameters"] = rope;
  } else {
    values["rope_theta"] = rope["rope_theta"];
    rope.erase("rope_theta");
    values["rope_scaling"] = rope;
  }
  return ModelConfig::from_json(values, "config.json");
}

TEST(RopeScaling, FrequenciesAreThoseOfThePapers) {
  for (const json& golden : goldens()) {
    for (const bool five : {true, false}) {
      const ModelConfig config = config_of(golden, five);
      const std::vector<float> actual = rope_frequencies(config.rope);
      ASSERT_EQ(actual.size(), golden["frequencies"].size());
      for (size_t i = 0; i < actual.size(); ++i) {
        const double expected = golden["frequencies"][i].get<double>();
        EXPECT_NEAR(actual[i] / expected, 1.0, 1e-6) << golden["rope"] << ", pair " << i;
      }
    }
  }
}

// An angle is position times a float32: the further the position, the more that rounding counts.
TEST(RopeScaling, TablesAreThoseOfThePapers) {
  for (const json& golden : goldens()) {
    const ModelConfig config = config_of(golden, true);
    for (const json& row : golden["table"]) {
      const auto position = row["position"].get<int64_t>();
      ASSERT_LT(position, config.positions());
      const at::Tensor table = rope_table(at::tensor({position}, at::kLong), config.rope);
      for (size_t i = 0; i < golden["frequencies"].size(); ++i) {
        const double angle = static_cast<double>(position) * golden["frequencies"][i].get<double>();
        const double close = 1e-6 + 4e-7 * angle;
        const auto pair = static_cast<int64_t>(i);
        EXPECT_NEAR(table[0][0][pair].item<double>(), row["cos"][i].get<double>(), close) << golden["rope"];
        EXPECT_NEAR(table[0][1][pair].item<double>(), row["sin"][i].get<double>(), close) << golden["rope"];
      }
    }
  }
}

TEST(RopeScaling, YarnLeavesShortWavesAndStretchesLongOnes) {
  RopeOptions plain;
  plain.head_dim = 128;
  plain.theta = 1e6;
  RopeOptions yarn = plain;
  yarn.scaling = RopeOptions::Scaling::kYarn;
  yarn.factor = 4.0;
  yarn.original_max_position = 32768;
  const std::vector<float> a = rope_frequencies(plain), b = rope_frequencies(yarn);
  EXPECT_EQ(a.front(), b.front());
  EXPECT_NEAR(a.back() / b.back(), 4.0, 1e-5);
  EXPECT_NEAR(yarn_attention_factor(4.0, 0, 0), 1.1386294361, 1e-9);
  EXPECT_EQ(yarn_attention_factor(1.0, 0, 0), 1.0);
}

// Beyond the model's own length every rotation would change with the sequence: refused, never computed otherwise.
TEST(RopeScaling, DynamicScalingEndsAtTheModelsOwnLength) {
  ModelConfig config = testing::small_config(ModelFamily::kQwen3);
  const auto rows = [&](int64_t tokens) {
    Model model(config, ModelOptions{});
    init_parameters(model, 3);
    const at::NoGradGuard no_grad;
    return model.forward(PackedBatch::from_sequences({testing::random_tokens(tokens, 5)}));
  };
  config.max_position_embeddings = config.rope.original_max_position = 100;
  const at::Tensor plain = rows(100);
  config.rope.scaling = RopeOptions::Scaling::kDynamic;
  config.rope.factor = 4.0;
  EXPECT_TRUE(testing::same_bits(rows(100), plain));
  EXPECT_MENTIONS(error_of([&] { rows(101); }), "position 100 lies beyond the 100 positions");
}

}  // namespace
}  // namespace trireme
