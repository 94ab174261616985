#include <fstream>
#include <set>

#include "base/fs.h"
#include "base/safetensors.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/model/testing.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/model/model.h"
#include "trainer/model/safetensors.h"

namespace trireme {
namespace {

using nlohmann::json;
using testing::error_of;
using testing::random_tokens;
using testing::rewrite;
using testing::same_bits;
using testing::small_config;
using testing::small_model;

TEST(Safetensors, WritesAndReadsEveryDtype) {
  const TemporaryDirectory dir;
  const auto path = dir.path() / "t.safetensors";
  const NamedTensors tensors = {{"bytes", at::arange(3, at::kByte)},
                                {"f32", at::randn({3, 5})},
                                {"bf16", at::randn({7}).to(at::kBFloat16)},
                                {"transposed", at::arange(6, at::kInt).view({2, 3}).t()},
                                {"i64", at::arange(4, at::kLong)},
                                {"scalar", at::tensor(2.5)},
                                {"empty", at::empty({0, 4})},
                                {"f16", at::ones({2}, at::kHalf)},
                                {"f64", at::ones({2}, at::kDouble)},
                                {"flag", at::ones({2}, at::kBool)}};
  write_safetensors(path, tensors, {{"who", "test"}});
  const SafetensorsFile file(path);
  EXPECT_EQ(file.header().metadata.at("who"), "test");
  EXPECT_EQ(file.names().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(same_bits(file.tensor(name), tensor)) << name;
  EXPECT_MENTIONS(error_of([&] { file.tensor("nothing"); }), "has no tensor nothing");
  at::Tensor kept;
  {
    const SafetensorsFile other(path);
    kept = other.tensor("f32");
  }
  EXPECT_TRUE(same_bits(kept, tensors[1].second));  // the tensor keeps the mapping alive
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(dir.path())) ++files;
  EXPECT_EQ(files, 1u);  // no temporary file is left
}

TEST(Safetensors, EveryTruncationIsNoticed) {
  const TemporaryDirectory dir;
  write_safetensors(dir.path() / "whole", {{"a", at::ones({5})}, {"b", at::ones({3, 2}, at::kLong)}});
  const std::string bytes = read_file(dir.path() / "whole");
  for (size_t size = 0; size < bytes.size(); ++size) {
    write_file_atomic(dir.path() / "cut", bytes.substr(0, size));
    EXPECT_MENTIONS(error_of([&] { SafetensorsFile file(dir.path() / "cut"); }), "cut");
  }
  write_file_atomic(dir.path() / "cut", bytes + "x");
  EXPECT_MENTIONS(error_of([&] { SafetensorsFile file(dir.path() / "cut"); }), "belong to none");
}

TEST(Safetensors, UnwritableFolderIsAnIoError) {
  EXPECT_MENTIONS(error_of([] {
                    write_safetensors("/nonexistent/folder/x.safetensors", {{"a", at::ones({1})}});
                  }),
                  "/nonexistent/folder/x.safetensors");
}

std::vector<float> logprobs_of(const Model& model) { return score(model, {random_tokens(20, 3)})[0]; }

TEST(ModelFiles, SavedModelsLoadWithTheSameBits) {
  for (const auto family : testing::kAllFamilies) {
    for (const bool tied : {false, true}) {
      const auto model = small_model(family, tied);
      const TemporaryDirectory dir;
      for (const int64_t shard_bytes : {int64_t{1} << 30, int64_t{30'000}, int64_t{1}}) {
        SaveOptions options;
        options.max_shard_bytes = shard_bytes;
        save_model(*model, dir.path(), options);
        const auto loaded = load_model(dir.path(), {});
        EXPECT_EQ(loaded->config(), model->config());
        EXPECT_TRUE(same_bits(loaded->flat_parameters(), model->flat_parameters()));
        EXPECT_EQ(logprobs_of(*loaded), logprobs_of(*model));
        EXPECT_EQ(std::filesystem::exists(dir.path() / "model.safetensors"), shard_bytes == int64_t{1} << 30);
      }
    }
  }
}

TEST(ModelFiles, DtypesConvert) {
  const auto model = small_model(ModelFamily::kQwen2);
  const TemporaryDirectory dir;
  SaveOptions options;
  options.dtype = at::kBFloat16;
  save_model(*model, dir.path(), options);
  EXPECT_EQ(ModelConfig::load(dir.path()).dtype, "bfloat16");
  EXPECT_EQ(SafetensorsFile(dir.path() / "model.safetensors").tensor("model.norm.weight").scalar_type(), at::kBFloat16);
  const auto loaded = load_model(dir.path(), {});
  EXPECT_TRUE(same_bits(loaded->flat_parameters(), model->flat_parameters().to(at::kBFloat16).to(at::kFloat)));
}

TEST(ModelFiles, CompanionsAndUnknownKeysGoAlong) {
  const auto model = small_model(ModelFamily::kLlama);
  const TemporaryDirectory source, target;
  json config = model->config().to_json();
  config["made_by"] = "somebody";
  config["torch_dtype"] = "bfloat16";
  config.erase("dtype");
  write_file_atomic(source.path() / "config.json", config.dump());
  write_file_atomic(source.path() / "tokenizer.json", "{\"a\": 1}");
  write_file_atomic(source.path() / "generation_config.json", "{\"eos_token_id\": [2, 9]}");
  SaveOptions options;
  options.source_dir = source.path();
  save_model(*model, target.path(), options);
  EXPECT_EQ(read_file(target.path() / "tokenizer.json"), "{\"a\": 1}");
  EXPECT_EQ(read_file(target.path() / "generation_config.json"), "{\"eos_token_id\": [2, 9]}");
  const json written = json::parse(read_file(target.path() / "config.json"));
  EXPECT_EQ(written["made_by"], "somebody");
  EXPECT_EQ(written["torch_dtype"], "float32");
}

TEST(ModelFiles, BadWeightsAreNamed) {
  const auto load_after = [](const std::function<void(NamedTensors&)>& change) {
    const TemporaryDirectory dir;
    save_model(*small_model(ModelFamily::kQwen3), dir.path(), {});
    rewrite(dir.path(), change);
    return error_of([&] { load_model(dir.path(), {}); });
  };
  EXPECT_MENTIONS(load_after([](NamedTensors& t) { t.pop_back(); }), "lack 1 tensor: lm_head.weight");
  EXPECT_MENTIONS(load_after([](NamedTensors& t) { t.resize(5); }), "...");
  EXPECT_MENTIONS(load_after([](NamedTensors& t) { t.emplace_back("model.layers.9.extra", at::ones({2})); }),
                  "unexpected tensor model.layers.9.extra [2]");
  EXPECT_MENTIONS(load_after([](NamedTensors& t) {
                    t[0].second = at::ones({61, 47});
                  }),
                  "model.embed_tokens.weight has shape [61, 47], config.json says [61, 48]");
  EXPECT_MENTIONS(load_after([](NamedTensors& t) { t[0].second = at::ones({61, 48}, at::kLong); }), "dtype Long");
}

// What can be wrong with an expert's tensor: its name has the layer and the expert.
struct BadExpert {
  ModelFamily family;
  int64_t expert;
  std::string name, wrong, right;  // shapes
};
const std::vector<BadExpert> kBadExperts = {
    {ModelFamily::kQwen3Moe, 5, "model.layers.2.mlp.experts.5.up_proj.weight", "[24, 47]", "[24, 48]"},
    {ModelFamily::kMixtral, 3, "model.layers.1.block_sparse_moe.experts.3.w2.weight", "[48, 79]", "[48, 80]"}};

void save_without(const BadExpert& bad, const std::filesystem::path& dir) {
  save_model(*small_model(bad.family), dir, {});
  rewrite(dir, [&](NamedTensors& t) { std::erase_if(t, [&](const auto& entry) { return entry.first == bad.name; }); });
}

void save_narrower(const BadExpert& bad, const std::filesystem::path& dir) {
  save_model(*small_model(bad.family), dir, {});
  rewrite(dir, [&](NamedTensors& t) {
    for (auto& [name, tensor] : t) {
      if (name == bad.name) tensor = tensor.narrow(1, 0, tensor.size(1) - 1).clone();
    }
  });
}

TEST(ModelFiles, BadExpertsAreNamedByLayerAndExpert) {
  for (const BadExpert& bad : kBadExperts) {
    const TemporaryDirectory without, narrower;
    save_without(bad, without.path());
    EXPECT_MENTIONS(error_of([&] { load_model(without.path(), {}); }), "the weights lack 1 tensor: " + bad.name);
    save_narrower(bad, narrower.path());
    EXPECT_MENTIONS(error_of([&] { load_model(narrower.path(), {}); }),
                    bad.name + " has shape " + bad.wrong + ", config.json says " + bad.right);
  }
}

// Over expert ranks by those that hold the expert, whole or a part of its width; the others have what they need.
TEST(ModelFiles, BadExpertsAreNamedByTheRanksThatHoldThem) {
  for (const BadExpert& bad : kBadExperts) {
    const TemporaryDirectory without, narrower;
    save_without(bad, without.path());
    save_narrower(bad, narrower.path());
    for (const Layout& layout : {Layout{.ep = 4, .dp = 4}, Layout{.ep = 2, .dp = 4, .etp = 2}}) {
      test::on_layout(layout, [&](ParallelContext& context) {
        const ModelConfig config = small_config(bad.family);
        Model model(config, testing::split_options(context, config));
        const Range own = model.split().experts;
        const bool holds = own.begin <= bad.expert && bad.expert < own.end;
        EXPECT_EQ(error_of([&] { load_parameters(model, without.path()); }),
                  holds ? without.path().string() + ": the weights lack 1 tensor: " + bad.name : "");
        const std::string error = error_of([&] { load_parameters(model, narrower.path()); });
        EXPECT_EQ(error.find(bad.name + " has shape " + bad.wrong) != std::string::npos, holds) << error;
        EXPECT_EQ(context.world().all_reduce_sum(int64_t{holds ? 1 : 0}), layout.etp);
      });
    }
  }
}

TEST(ModelFiles, ATiedCheckpointMayCarryItsHead) {
  const TemporaryDirectory dir;
  const auto model = small_model(ModelFamily::kLlama, true);
  save_model(*model, dir.path(), {});
  rewrite(dir.path(), [](NamedTensors& t) {
    t.emplace_back("lm_head.weight", t[0].second);
    t.emplace_back("model.layers.0.self_attn.rotary_emb.inv_freq", at::ones({6}));
  });
  EXPECT_TRUE(same_bits(load_model(dir.path(), {})->flat_parameters(), model->flat_parameters()));
}

TEST(ModelFiles, BrokenShardsAreNamed) {
  const TemporaryDirectory dir;
  SaveOptions options;
  options.max_shard_bytes = 30'000;
  save_model(*small_model(ModelFamily::kLlama), dir.path(), options);
  const auto index_path = dir.path() / "model.safetensors.index.json";
  const std::string index = read_file(index_path);
  json changed = json::parse(index);
  changed["weight_map"].erase("model.norm.weight");
  write_file_atomic(index_path, changed.dump());
  EXPECT_MENTIONS(error_of([&] { load_model(dir.path(), {}); }),
                  "model.norm.weight is not in model.safetensors.index.json");
  changed = json::parse(index);
  changed["weight_map"]["phantom"] = changed["weight_map"]["model.norm.weight"];
  write_file_atomic(index_path, changed.dump());
  EXPECT_MENTIONS(error_of([&] { load_model(dir.path(), {}); }), "lacks tensor phantom");
  write_file_atomic(index_path, index);
  std::filesystem::remove(dir.path() / json::parse(index)["weight_map"]["model.norm.weight"].get<std::string>());
  EXPECT_MENTIONS(error_of([&] { load_model(dir.path(), {}); }), "is missing");
  std::filesystem::remove(index_path);
  EXPECT_MENTIONS(error_of([&] { load_model(dir.path(), {}); }), "has neither model.safetensors nor");
}

TEST(InitModel, IsAFunctionOfSeedAndName) {
  const TemporaryDirectory a, b, c;
  const ModelConfig config = small_config(ModelFamily::kQwen2);
  init_model(a.path(), config, 1);
  init_model(b.path(), config, 1);
  init_model(c.path(), config, 2);
  EXPECT_EQ(read_file(a.path() / "model.safetensors"), read_file(b.path() / "model.safetensors"));
  EXPECT_NE(read_file(a.path() / "model.safetensors"), read_file(c.path() / "model.safetensors"));
  ModelConfig fewer = config;
  fewer.num_layers = 1;  // another layout: the shared tensors stay
  const TemporaryDirectory d;
  init_model(d.path(), fewer, 1);
  const SafetensorsFile whole(a.path() / "model.safetensors"), part(d.path() / "model.safetensors");
  for (const std::string& name : part.names()) EXPECT_TRUE(same_bits(whole.tensor(name), part.tensor(name))) << name;
  const at::Tensor weight = whole.tensor("model.layers.1.mlp.up_proj.weight");
  EXPECT_NEAR(weight.std().item<double>(), config.initializer_range, 0.01);
  EXPECT_EQ(whole.tensor("model.norm.weight").sum().item<double>(), 48.0);
  EXPECT_EQ(whole.tensor("model.layers.0.self_attn.q_proj.bias").abs().sum().item<double>(), 0.0);
  EXPECT_TRUE(std::filesystem::exists(a.path() / "generation_config.json"));
}

// Said from config.json, before a weight is read.
TEST(ModelFiles, ShapesWithoutKernelsOnCudaAreNamed) {
  ModelConfig config = small_config(ModelFamily::kQwen3);
  config.head_dim = 64;
  EXPECT_NO_THROW(require_cuda_kernels(config, "config.json"));
  config.vocab_size = 61;  // any number of tokens
  EXPECT_NO_THROW(require_cuda_kernels(config, "config.json"));
  config.intermediate_size = 81;  // padded
  config.hidden_size = 44;
  EXPECT_NO_THROW(require_cuda_kernels(config, "config.json"));
  config.head_dim = 96;
  EXPECT_MENTIONS(error_of([&] { require_cuda_kernels(config, "m/config.json"); }),
                  "m/config.json: head_dim 96 has no kernels on CUDA");
  ModelConfig mixture = small_config(ModelFamily::kQwen3Moe);
  mixture.head_dim = 64;
  mixture.hidden_size = 128;
  mixture.intermediate_size = 80;
  mixture.moe_intermediate_size = 192;
  EXPECT_NO_THROW(require_cuda_kernels(mixture, "config.json", /*etp=*/3));
  EXPECT_MENTIONS(
      error_of([&] { require_cuda_kernels(mixture, "config.json", /*etp=*/2); }),
      "an expert's width 192 is no multiple of 64 for each of 2 expert tensor parallel ranks; the CPU takes it");
}

// The head of a ragged vocabulary has rows behind it that are part of nothing.
TEST(ModelFiles, RowsBehindTheHeadAreNoPartOfTheParameters) {
  for (const bool tied : {false, true}) {
    const auto model = small_model(ModelFamily::kQwen3, tied);
    const at::Tensor& head = model->head_weight();
    ASSERT_NE(head.size(0) % kHeadRows, 0);
    const int64_t rows = (head.size(0) + kHeadRows - 1) / kHeadRows * kHeadRows;
    EXPECT_LE(static_cast<size_t>((head.storage_offset() + rows * head.size(1)) * 4), head.storage().nbytes());
    const Parameter& last = model->parameters().back();
    EXPECT_LT(model->flat_parameters().numel() - last.offset - last.size, kParameterAlignment);
    EXPECT_EQ(model->flat_gradients().numel(), model->flat_parameters().numel());
  }
}

}  // namespace
}  // namespace trireme
