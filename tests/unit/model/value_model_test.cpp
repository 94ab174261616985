// Value models: the same decoders under a head of one number a row.
#include <filesystem>

#include "base/fs.h"
#include "tests/unit/model/testing.h"
#include "trainer/model/safetensors.h"

namespace trireme {
namespace {

using nlohmann::json;
using testing::error_of;
using testing::random_tokens;
using testing::same_bits;
using testing::small_config;
using testing::small_model;

std::unique_ptr<Model> small_value_model(ModelFamily family, ModelOptions options = {}) {
  auto model = std::make_unique<Model>(small_config(family).with_value_head(), options);
  init_parameters(*model, 23);
  return model;
}

at::Tensor values_of(const Model& model, const std::vector<std::vector<int32_t>>& sequences) {
  return model.values(model.forward(PackedBatch::from_sequences(sequences)));
}

TEST(ValueModel, IsReadAndWrittenAsASequenceClassifierWithOneLabel) {
  for (const auto family : testing::kAllFamilies) {
    const ModelConfig config = small_config(family, /*tied=*/true).with_value_head();
    EXPECT_FALSE(config.tie_word_embeddings);
    const json written = config.to_json();
    const std::string architecture = written.at("architectures").at(0);
    EXPECT_NE(architecture.find("ForSequenceClassification"), std::string::npos);
    EXPECT_EQ(written.at("id2label").size(), 1u);
    const ModelConfig back = ModelConfig::from_json(written, "config.json");
    EXPECT_TRUE(back.value_head);
    EXPECT_EQ(back, config);
    EXPECT_EQ(back.family, family);
    EXPECT_FALSE(ModelConfig::from_json(small_config(family).to_json(), "config.json").value_head);
  }
}

TEST(ValueModel, SeveralLabelsAreRefusedByName) {
  const auto with = [](const json& changes) {
    json values = small_config(ModelFamily::kQwen2).with_value_head().to_json();
    values.erase("id2label");
    values.erase("label2id");
    values.update(changes);
    return error_of([&] { ModelConfig::from_json(values, "config.json"); });
  };
  EXPECT_MENTIONS(with({{"id2label", {{"0", "a"}, {"1", "b"}, {"2", "c"}}}}),
                  "config.json: Qwen2ForSequenceClassification with 3 labels");
  EXPECT_MENTIONS(with({{"num_labels", 5}}), "with 5 labels");
  EXPECT_MENTIONS(with(json::object()), "with 2 labels");  // transformers' default
  EXPECT_MENTIONS(with({{"id2label", {"a"}}}), "id2label must be an object");
  EXPECT_EQ(with({{"num_labels", 1}}), "");
  EXPECT_EQ(with({{"id2label", {{"0", "reward"}}}}), "");
}

TEST(ValueModel, HasAScoreWhereOthersHaveAVocabulary) {
  for (const auto family : testing::kAllFamilies) {
    ModelOptions options;
    options.freeze_router = false;
    const auto model = small_value_model(family, options);
    EXPECT_EQ(model->find("lm_head.weight"), nullptr);
    EXPECT_EQ(model->parameters().back().name, "score.weight");
    EXPECT_EQ(model->head_weight().sizes(), (at::IntArrayRef{1, 48}));
    int64_t elements = 0;
    for (const Parameter& parameter : model->parameters()) elements += parameter.size;
    EXPECT_EQ(elements, model->config().parameter_count());
    for (const LinearShape& shape : model->linear_shapes()) EXPECT_FALSE(shape.head);
  }
}

TEST(ValueModel, ARowHasItsBitsWhateverTheOthers) {
  const auto model = small_value_model(ModelFamily::kQwen3);
  const auto a = random_tokens(40, 1), b = random_tokens(25, 2);
  const at::Tensor both = values_of(*model, {a, b}).detach();
  EXPECT_TRUE(same_bits(values_of(*model, {b, a}).detach().narrow(0, 25, 40), both.narrow(0, 0, 40)));
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(same_bits(values_of(*model, {b}), both.narrow(0, 40, 25)));
}

TEST(ValueModel, GradientMatchesFiniteDifferences) {
  for (const auto family : testing::kAllFamilies) {
    ModelOptions options;
    options.dtype = at::kDouble;
    const auto model = small_value_model(family, options);
    const std::vector<std::vector<int32_t>> sequences = {random_tokens(12, 1), random_tokens(7, 2)};
    const auto loss_of = [&] {
      const at::Tensor values = values_of(*model, sequences);
      return (values - at::arange(values.size(0), at::kDouble) / 10).square().mean();
    };
    loss_of().backward();
    EXPECT_GT(model->find("score.weight")->tensor.grad().abs().max().item<double>(), 0);
    EXPECT_NEAR(testing::differences_by_gradient(*model, loss_of), 1.0, 1e-5) << to_string(family);
  }
}

TEST(ValueModel, ACausalFolderGivesItsLayersUnderAHeadOfZeros) {
  for (const bool tied : {false, true}) {
    const auto causal = small_model(ModelFamily::kQwen2, tied);
    const TemporaryDirectory source, saved;
    save_model(*causal, source.path(), {});
    json config = json::parse(read_file(source.path() / "config.json"));
    config["pad_token_id"] = 3;
    write_file_atomic(source.path() / "config.json", config.dump());
    const auto value = load_value_model(source.path(), {});
    EXPECT_EQ(value->head_weight().abs().max().item<float>(), 0);
    for (const Parameter& parameter : causal->parameters()) {
      if (parameter.name == "lm_head.weight") continue;
      EXPECT_TRUE(same_bits(value->find(parameter.name)->tensor.detach(), parameter.tensor.detach())) << parameter.name;
    }
    const std::vector<std::vector<int32_t>> sequences = {random_tokens(9, 4)};
    EXPECT_EQ(values_of(*value, sequences).abs().max().item<float>(), 0);
    {
      const at::NoGradGuard no_grad;
      value->find("score.weight")->tensor.detach().fill_(0.5);
    }
    SaveOptions options;
    options.source_dir = source.path();
    save_model(*value, saved.path(), options);
    const json written = json::parse(read_file(saved.path() / "config.json"));
    EXPECT_EQ(written.at("architectures"), json({"Qwen2ForSequenceClassification"}));
    EXPECT_EQ(written.at("id2label").size(), 1u);
    EXPECT_EQ(written.at("tie_word_embeddings"), false);
    EXPECT_EQ(written.at("pad_token_id"), 3);  // a key that is unknown here goes along
    const auto back = load_value_model(saved.path(), {});
    EXPECT_TRUE(same_bits(back->flat_parameters(), value->flat_parameters()));
    EXPECT_TRUE(same_bits(values_of(*back, sequences).detach(), values_of(*value, sequences).detach()));
    // Read into a model that has values: those of the folder count, also where it has none.
    load_parameters(*back, source.path());
    EXPECT_EQ(back->head_weight().abs().max().item<float>(), 0);
  }
}

TEST(ValueModel, FoldersOfTheOtherKindAndMissingScoresAreNamed) {
  const TemporaryDirectory dir;
  save_model(*small_value_model(ModelFamily::kLlama), dir.path(), {});
  EXPECT_MENTIONS(error_of([&] { load_model(dir.path(), {}); }), "is a value or reward model");
  testing::rewrite(dir.path(), [](NamedTensors& tensors) {
    std::erase_if(tensors, [](const auto& tensor) { return tensor.first == "score.weight"; });
  });
  EXPECT_MENTIONS(error_of([&] { load_value_model(dir.path(), {}); }), "lack 1 tensor: score.weight");
  EXPECT_THROW(small_model(ModelFamily::kLlama)->values(at::zeros({1, 48})), Error);
  EXPECT_THROW(small_value_model(ModelFamily::kLlama)->logprobs(at::zeros({1, 48}), at::zeros({1}, at::kLong), {}),
               Error);
}

}  // namespace
}  // namespace trireme
