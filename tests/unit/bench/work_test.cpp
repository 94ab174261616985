// The arithmetic of benchmarks: operations, bytes, lengths, shapes.
#include "trainer/bench/work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/errors.h"
#include "topology/topology.h"
#include "trainer/bench/device.h"
#include "trainer/bench/rollout_bench.h"
#include "trainer/bench/shapes.h"
#include "trainer/rollout/lengths.h"

namespace trireme::bench {
namespace {

using test::error_of;

ModelConfig by_hand() {
  ModelConfig c;
  c.vocab_size = 5;
  c.hidden_size = 4;
  c.intermediate_size = 3;
  c.num_layers = 2;
  c.num_heads = 2;
  c.num_kv_heads = 1;
  c.head_dim = 2;
  return c;
}

TEST(Work, ForwardFlopsAreThoseCountedByHand) {
  // Layer: qkv 4x(4+2+2) = 32, output 4x4 = 16, gate up down 3x(4x3) = 36: 84 elements, 168 operations a token.
  EXPECT_EQ(layer_matrix_elements(by_hand()), 84);
  // Tokens 3 + 2: 2 layers x 5 x 168 = 1680. Pairs (1+2+3) + (1+2) = 9 of 2 heads x (2x2 for q.k + 2x2 for p.v) = 16:
  // 2 x 144 = 288. Head: 3 rows x 2 x 4 x 5 = 120.
  EXPECT_EQ(forward_flops(by_hand(), std::vector<int64_t>{3, 2}, 3), 1680 + 288 + 120);
  EXPECT_EQ(training_flops(by_hand(), std::vector<int64_t>{3, 2}, 3), 3 * (1680 + 288 + 120));
}

TEST(Work, ACriticsHeadIsOneColumn) {
  EXPECT_EQ(forward_flops(by_hand().with_value_head(), std::vector<int64_t>{3, 2}, 3), 1680 + 288 + 3 * 2 * 4);
}

TEST(Work, ASharedPromptIsCountedOnce) {
  // A prompt of 3 tokens with answers of 2 and 3: rows 3 + 1 + 2. Pairs 6 of the prompt, 1 x 3 + 1 and 2 x 3 + 3 of the
  // answers: 19 of 16 operations in 2 layers. Head: 5 rows.
  const auto shared = training_pieces({3}, {2, 3}, /*share_prompts=*/true);
  EXPECT_EQ(forward_flops(by_hand(), shared, 5), 2 * (6 * 168 + 19 * 16) + 5 * 2 * 4 * 5);
  // Repeated: sequences of 4 and 5 rows.
  EXPECT_EQ(training_flops(by_hand(), training_pieces({3}, {2, 3}, false), 5),
            training_flops(by_hand(), std::vector<int64_t>{4, 5}, 5));
  // Of one answer nothing is shared.
  EXPECT_EQ(forward_flops(by_hand(), training_pieces({3}, {4}, true), 4),
            forward_flops(by_hand(), std::vector<int64_t>{6}, 4));
}

TEST(Ceilings, ReadingIsMeasuredAgainstTheBetterOfCopyAndRead) {
  Ceilings ceilings;
  ceilings.copy_bytes_per_second = 4;
  ceilings.read_bytes_per_second = 5;
  ceilings.flops_per_second = 1;
  EXPECT_EQ(floor_seconds(ceilings, 20, 1), 4);
  ceilings.copy_bytes_per_second = 10;
  EXPECT_EQ(floor_seconds(ceilings, 20, 1), 2);
  const Ceilings measured = measure_ceilings(at::kCPU, at::kFloat);
  EXPECT_GT(measured.copy_bytes_per_second, 0);
  EXPECT_GT(measured.read_bytes_per_second, 0);
}

TEST(Work, ForwardFlopsAgreeWithTheModelsOwnCountTokenByToken) {
  const ModelConfig config = find_shape("qwen3-1.7b");
  double sum = 0;
  for (int64_t i = 1; i <= 50; ++i) sum += config.forward_flops_per_token(static_cast<double>(i));
  EXPECT_NEAR(forward_flops(config, std::vector<int64_t>{50}, 50) / sum, 1, 1e-12);
}

TEST(Work, DecodeReadsEveryParameterButTheEmbedding) {
  ModelConfig config = by_hand();
  ModelOptions options;
  options.trainable = false;
  for (const bool tied : {false, true}) {
    config.tie_word_embeddings = tied;
    config.rope.head_dim = config.head_dim;
    const Model model(config, options);
    double read = 0;
    for (const Parameter& parameter : model.parameters()) {
      if (tied || parameter.name != "model.embed_tokens.weight") read += static_cast<double>(2 * parameter.size);
    }
    EXPECT_EQ(decode_weight_bytes(config, 2, 1), read);
    EXPECT_EQ(decode_weight_bytes(config, 2, 64), read);
  }
  EXPECT_EQ(context_bytes_per_token(config, 2), 2 * 2 * 1 * 2 * 2);  // k and v, layers, heads, head dim, bytes
}

TEST(Work, RolloutCountsStepsAndContextsAsDecodingDoes) {
  const ModelConfig config = by_hand();
  const std::vector<int64_t> prompts = {5, 5, 7}, outputs = {4, 1, 6};
  int64_t rows = 0;
  for (size_t s = 0; s < prompts.size(); ++s) {
    for (int64_t made = 1; made < outputs[s]; ++made) rows += prompts[s] + made;
  }
  const RolloutWork work = rollout_work(config, prompts, outputs, 2, 8);
  EXPECT_EQ(work.steps, 6);
  EXPECT_EQ(work.context_bytes, static_cast<double>(rows) * context_bytes_per_token(config, 2));
  EXPECT_EQ(work.bytes(), 6 * decode_weight_bytes(config, 2, 1) + work.context_bytes);
  EXPECT_EQ(rollout_work(config, prompts, outputs, 2, 1).steps, 11);
}

TEST(AliveBins, FloorsAddUpToTheRolloutsBytes) {
  const RolloutLengths lengths = synthetic_lengths("synthetic:3x40:mean=30:max=90:prompt=20:seed=4");
  std::vector<AliveBin> bins = alive_bins({{2.0, 1, 3, true}, {1.0, 2, 16, false}, {0.5, 1, 17, false}});
  EXPECT_EQ(bins[0].steps, 2);
  EXPECT_EQ(bins[1].steps, 1);
  EXPECT_DOUBLE_EQ(bins[0].seconds, 1.0);  // the step that prefilled is not there
  const ModelConfig config = by_hand();
  add_floors(bins, lengths, config, 2, 100.0);
  double seconds = 0;
  int64_t steps = 0;
  for (const AliveBin& bin : bins) {
    seconds += bin.floor_seconds;
    steps += bin.floor_steps;
  }
  const RolloutWork work = rollout_work(config, lengths.prompt_of_each_sample(), lengths.outputs, 2, 120);
  EXPECT_EQ(steps, work.steps - 1);  // the first pass is the prompts'
  EXPECT_NEAR(seconds * 100.0, work.bytes() - decode_weight_bytes(config, 2, 1), 1e-6 * work.bytes());
}

TEST(Lengths, TheFilesOfTheRepositoryHoldWhatTheirReadmeSays) {
  for (const auto& [file, prompts] :
       {std::pair("bench/data/rollout_lengths_256.json", 8), std::pair("bench/data/rollout_lengths_2048.json", 64)}) {
    const RolloutLengths lengths = load_lengths(file);
    EXPECT_EQ(lengths.prompts.size(), static_cast<size_t>(prompts));
    EXPECT_EQ(lengths.samples_per_prompt(), 32);
    EXPECT_NEAR(static_cast<double>(lengths.output_tokens()) / static_cast<double>(lengths.samples()), 794.5, 0.1);
    EXPECT_EQ(*std::max_element(lengths.outputs.begin(), lengths.outputs.end()), 3800);
  }
}

TEST(Lengths, MistakesOfAFileNameKeyAndEntry) {
  const auto parse = [](const std::string& text) { return error_of([&] { parse_lengths(text, "L.json"); }); };
  EXPECT_MENTIONS(parse("{"), "L.json is not valid JSON");
  EXPECT_MENTIONS(parse("[1]"), "must be an object");
  EXPECT_MENTIONS(parse(R"({"prompt_lengths": [3]})"), "output_lengths is missing");
  EXPECT_MENTIONS(parse(R"({"prompt_lengths": [3], "output_lengths": []})"), "output_lengths must be a list");
  EXPECT_MENTIONS(parse(R"({"prompt_lengths": [3, 0], "output_lengths": [1, 1]})"), "prompt_lengths[1] is 0");
  EXPECT_MENTIONS(parse(R"({"prompt_lengths": [3], "output_lengths": [1, "7"]})"), "output_lengths[1] is \"7\"");
  EXPECT_MENTIONS(parse(R"({"prompt_lengths": [3], "output_lengths": [1, 2.5]})"), "output_lengths[1] is 2.5");
  EXPECT_MENTIONS(parse(R"({"prompt_lengths": [3, 3], "output_lengths": [1, 2, 3]})"), "do not divide evenly");
  EXPECT_MENTIONS(parse(R"({"prompt_lengths": [3], "output_lengths": [1], "outputs": 1})"), "unknown key outputs");
  EXPECT_MENTIONS(error_of([] { load_lengths("no/such/file.json"); }), "no lengths file no/such/file.json");
}

TEST(Lengths, SyntheticOnesHaveTheMeanAndTheLongest) {
  const std::string text = "synthetic:8x32:mean=794:max=3800:prompt=200:seed=1";
  const RolloutLengths lengths = load_lengths(text);
  EXPECT_EQ(lengths.prompts.size(), 8u);
  EXPECT_EQ(lengths.samples(), 256);
  EXPECT_NEAR(static_cast<double>(lengths.output_tokens()) / 256, 794, 0.5);
  EXPECT_EQ(*std::max_element(lengths.outputs.begin(), lengths.outputs.end()), 3800);
  EXPECT_EQ(lengths.outputs, load_lengths(text).outputs);
  EXPECT_NE(lengths.outputs, load_lengths("synthetic:8x32:mean=794:max=3800:prompt=200:seed=2").outputs);
  for (const int64_t prompt : lengths.prompts) {
    EXPECT_GE(prompt, 120);
    EXPECT_LE(prompt, 280);
  }
  const RolloutLengths equal = load_lengths("synthetic:2x3:mean=9:max=9:prompt=5");
  EXPECT_EQ(equal.outputs, std::vector<int64_t>(6, 9));
  EXPECT_EQ(equal.prompts, std::vector<int64_t>(2, 5));
}

TEST(Lengths, MistakesOfADescriptionAreNamed) {
  const auto load = [](const std::string& text) { return error_of([&] { load_lengths(text); }); };
  EXPECT_MENTIONS(load("synthetic:8:mean=3"), "the form");
  EXPECT_MENTIONS(load("synthetic:8x0:mean=3"), "number of samples is '0'");
  EXPECT_MENTIONS(load("synthetic:8x2"), "mean= is missing");
  EXPECT_MENTIONS(load("synthetic:8x2:mean=x"), "mean is 'x'");
  EXPECT_MENTIONS(load("synthetic:8x2:mean=5:most=3"), "unknown part 'most=3'");
  EXPECT_MENTIONS(load("synthetic:8x2:mean=5:max=3"), "max is below mean");
  EXPECT_MENTIONS(load("synthetic:1x2:mean=10:max=90"), "cannot have the mean 10");
}

TEST(Lengths, StairsSeeEveryNumberOfSamplesAndNeverGrow) {
  const RolloutLengths lengths = load_lengths("bench/data/rollout_lengths_256.json");
  const RolloutLengths stairs = staircase(lengths);
  for (size_t s = 0; s < lengths.outputs.size(); ++s) EXPECT_LE(stairs.outputs[s], lengths.outputs[s]);
  const int64_t longest = *std::max_element(stairs.outputs.begin(), stairs.outputs.end());
  EXPECT_LE(longest, 68);
  std::vector<int64_t> alive;
  for (int64_t t = 1; t <= longest; ++t)
    alive.push_back(std::count_if(stairs.outputs.begin(), stairs.outputs.end(), [t](int64_t n) { return n >= t; }));
  for (size_t t = 1; t < alive.size(); ++t) EXPECT_LE(alive[t - 1] - alive[t], 8);
}

TEST(Lengths, CacheRowsHoldTheLongestTogetherOrAnEvenShare) {
  RolloutLengths lengths;
  lengths.prompts = {10};
  lengths.outputs = {30, 10, 20, 40};
  EXPECT_GE(wanted_cache_rows(lengths, 4, 1), 140);
  EXPECT_LT(wanted_cache_rows(lengths, 2, 1), wanted_cache_rows(lengths, 4, 1));
  EXPECT_LT(wanted_cache_rows(lengths, 4, 2), wanted_cache_rows(lengths, 4, 1));
  EXPECT_GE(wanted_cache_rows(lengths, 1, 100), lengths.longest());
}

TEST(Shapes, HaveThePublishedParameterCounts) {
  for (const std::string& name : shape_names()) {
    if (name == "tiny" || name == "tiny-moe") continue;
    const auto known = known_model_shape(name);
    ASSERT_TRUE(known.has_value()) << name;
    EXPECT_EQ(find_shape(name).parameter_count(), parameter_count(*known)) << name;
  }
}

TEST(Shapes, AreCutAndRefusedByName) {
  EXPECT_EQ(find_shape("Llama-3.1-8B", 6).num_layers, 6);
  EXPECT_MENTIONS(error_of([] { find_shape("llama-3.1-8b", 33); }), "not in 1..32");
  EXPECT_MENTIONS(error_of([] { find_shape("llama-2"); }), "qwen3-1.7b");
}

TEST(Shapes, RandomWeightsAreNormalNormsOneBiasesZero) {
  ModelConfig config = find_shape("tiny");
  config.family = ModelFamily::kQwen2;
  config.qkv_bias = true;
  const auto model = make_random_model(config, {}, 3), same = make_random_model(config, {}, 3),
             other = make_random_model(config, {}, 4);
  double sum = 0;
  for (const Parameter& parameter : model->parameters()) {
    const at::Tensor values = parameter.tensor.detach();
    if (values.dim() > 1) {
      EXPECT_NEAR(values.mean().item<double>(), 0, 1e-3) << parameter.name;
      EXPECT_NEAR(values.std().item<double>(), config.initializer_range, 1e-3) << parameter.name;
    } else {
      const bool bias = parameter.name.find(".bias") != std::string::npos;
      EXPECT_TRUE((values == (bias ? 0.0 : 1.0)).all().item<bool>()) << parameter.name;
    }
    sum += values.to(at::kDouble).square().sum().item<double>();
  }
  EXPECT_NEAR(model->flat_parameters().to(at::kDouble).square().sum().item<double>() / sum, 1, 1e-12);  // gaps are zero
  EXPECT_TRUE(model->flat_parameters().equal(same->flat_parameters()));
  EXPECT_FALSE(model->flat_parameters().equal(other->flat_parameters()));
}

TEST(Shapes, AnyConfigJsonIsAShape) {
  const TemporaryDirectory dir;
  const ModelConfig known = find_shape("qwen2.5-1.5b");
  write_file_atomic(dir.path() / "config.json", known.to_json().dump());
  write_file_atomic(dir.path() / "mine.json", known.to_json().dump());
  EXPECT_EQ(find_shape(dir.path().string()), known);
  EXPECT_EQ(find_shape((dir.path() / "config.json").string()), known);
  EXPECT_EQ(find_shape((dir.path() / "mine.json").string(), 3).num_layers, 3);
  const auto problem = [](const std::string& name, int64_t layers = 0) {
    try {
      find_shape(name, layers);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(problem("qwen9").find("known are llama-3.1-8b"), std::string::npos) << problem("qwen9");
  EXPECT_NE(problem((dir.path() / "mine.json").string(), 29).find("1..28"), std::string::npos);
  write_file_atomic(dir.path() / "bad.json", "{");
  EXPECT_NE(problem((dir.path() / "bad.json").string()).find("not valid JSON"), std::string::npos);
  EXPECT_NE(problem((dir.path() / "none.json").string()).find("none.json"), std::string::npos);
}

// Of 8 experts, 2 a token: one sample reads 2 of them, many samples all.
TEST(Work, DecodeReadsTheExpertsThatAreChosen) {
  const ModelConfig config = find_shape("tiny-moe", 0);
  const double expert = 3.0 * 128 * 64 * 2 * 2;  // of both layers, bf16
  const double all = decode_weight_bytes(config, 2, 1e6);
  EXPECT_DOUBLE_EQ(decode_weight_bytes(config, 2, 1), all - 6 * expert);
  EXPECT_DOUBLE_EQ(decode_weight_bytes(config, 2, 2), all - 4.5 * expert);
  const RolloutWork work = rollout_work(config, {4, 4}, {1, 3}, 2, 16);
  EXPECT_EQ(work.steps, 3);
  EXPECT_DOUBLE_EQ(work.weight_bytes, decode_weight_bytes(config, 2, 2) + 2 * decode_weight_bytes(config, 2, 1));
  EXPECT_DOUBLE_EQ(layer_matrix_elements(config), 128.0 * (256 + 2 * 128) + 256 * 128 + 3.0 * 128 * 2 * 64 + 128 * 8);
}

}  // namespace
}  // namespace trireme::bench
