// Hidden sizes and MLP widths that are no multiple of 8, held with zeros behind them as on CUDA, against the same model
// without any.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "base/fs.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/model/model.h"

namespace trireme {
namespace {

using testing::fill;
using testing::part_of;
using testing::random_tokens;
using testing::rest_is_zero;
using testing::same_bits;

constexpr int64_t kHidden = 44, kPaddedHidden = 64;

ModelConfig odd_config(ModelFamily family, bool tied) {
  ModelConfig config = testing::eight_heads(family, tied);
  config.hidden_size = kHidden;
  config.intermediate_size = 84;
  // Of all kinds in one family.
  if (family == ModelFamily::kLlama) config.qkv_bias = config.output_bias = config.mlp_bias = true;
  return config;
}

ModelOptions padded(ModelOptions options = {}) {
  options.pad_widths = true;
  return options;
}

ModelOptions in_float64() {
  ModelOptions options;
  options.dtype = at::kDouble;
  return options;
}

PackedBatch some_batch() { return PackedBatch::from_sequences({random_tokens(17, 1), random_tokens(9, 2)}); }

// Returns the hidden states.
at::Tensor pass(Model& model, const PackedBatch& batch) {
  const at::Tensor hidden = model.forward(batch);
  const at::Tensor scores =
      model.config().value_head ? model.values(hidden) : model.logprobs(hidden, batch.ids.roll(1), LogprobOptions());
  (scores.flatten() * at::linspace(-1, 2, scores.numel(), scores.options().requires_grad(false))).sum().backward();
  return hidden.detach();
}

void expect_near(const at::Tensor& got, const at::Tensor& wanted, double tolerance, const std::string& what) {
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  const double largest = std::max(1e-3, wanted.abs().max().item<double>());
  EXPECT_LE((got - wanted).abs().max().item<double>(), tolerance * largest) << what;
}

class OddWidths : public ::testing::TestWithParam<ModelFamily> {
 protected:
  bool tied() const { return GetParam() == ModelFamily::kQwen3; }
};
INSTANTIATE_TEST_SUITE_P(Families, OddWidths,
                         ::testing::Values(ModelFamily::kLlama, ModelFamily::kQwen2, ModelFamily::kQwen3),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(OddWidths, GiveTheAnswerOfTheModelWithoutPadding) {
  for (const bool values : {false, true}) {
    ModelConfig config = odd_config(GetParam(), tied());
    if (values) config = config.with_value_head();
    Model plain(config, in_float64()), model(config, padded(in_float64()));
    EXPECT_EQ(model.local().hidden, kPaddedHidden);
    EXPECT_EQ(model.local().intermediate, 128);
    fill(plain);
    fill(model);
    const PackedBatch batch = some_batch();
    const at::Tensor wanted = pass(plain, batch), got = pass(model, batch);
    expect_near(got.narrow(1, 0, kHidden), wanted, 1e-11, "hidden");
    EXPECT_TRUE(got.narrow(1, kHidden, kPaddedHidden - kHidden).eq(0).all().item<bool>());
    for (const Parameter& parameter : model.parameters()) {
      const Parameter& other = *plain.find(parameter.name);
      EXPECT_TRUE(same_bits(parameter.tensor.detach(), other.tensor.detach())) << parameter.name;
      expect_near(parameter.tensor.grad(), other.tensor.grad(), 1e-11, parameter.name);
    }
    EXPECT_TRUE(rest_is_zero(model, model.flat_parameters()));
    EXPECT_TRUE(rest_is_zero(model, model.flat_gradients()));
  }
}

TEST_P(OddWidths, RecomputationChangesNoBit) {
  Model model(odd_config(GetParam(), tied()), padded());
  fill(model);
  const auto gradients = [&](const Recompute& recompute) {
    model.zero_gradients();
    model.set_recompute(recompute);
    pass(model, some_batch());
    return model.flat_gradients().clone();
  };
  const at::Tensor kept = gradients({});
  EXPECT_TRUE(same_bits(gradients({.whole_layers = 3}), kept));
  EXPECT_TRUE(same_bits(gradients({.whole_layers = 1, .cheap_layers = 2}), kept));
}

// What is drawn, written and read is the model without its padding.
TEST_P(OddWidths, AreNeverSaved) {
  const ModelConfig config = odd_config(GetParam(), tied());
  Model plain(config, {}), model(config, padded());
  fill(plain);
  fill(model);
  const TemporaryDirectory of_plain, of_padded;
  save_model(plain, of_plain.path(), {});
  save_model(model, of_padded.path(), {});
  for (const char* name : {"config.json", "model.safetensors"})
    EXPECT_EQ(read_file(of_padded.path() / name), read_file(of_plain.path() / name)) << name;
  const auto read = load_model(of_plain.path(), padded());
  EXPECT_TRUE(same_bits(read->flat_parameters(), model.flat_parameters()));
  EXPECT_TRUE(same_bits(load_model(of_padded.path(), {})->flat_parameters(), plain.flat_parameters()));
  read->copy_parameters_from(model);
  EXPECT_THROW(read->copy_parameters_from(plain), Error);
}

// Against an arena as in the packed pass, bit for bit.
TEST_P(OddWidths, CachedRowsHaveTheBitsOfPackedOnes) {
  Model model(odd_config(GetParam(), tied()), padded());
  fill(model);
  const at::NoGradGuard no_grad;
  const std::vector<int32_t> tokens = random_tokens(12, 3);
  const PackedBatch whole = PackedBatch::from_sequences({tokens});
  const at::Tensor wanted = model.forward(whole);
  KvArena arena(model.local(), 12, at::kFloat, at::kCPU);
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 7}, {7, 1}, {8, 4}}) {
    CachedBatch part;
    part.ids = whole.ids.narrow(0, first, count);
    part.positions = whole.positions.narrow(0, first, count);
    part.plan.host_runs = {{0, first, count}};
    EXPECT_TRUE(same_bits(model.forward_cached(part, arena), wanted.narrow(0, first, count))) << first;
  }
}

// A tensor rank's part of the width is padded by itself: 84 over four ranks are 21 each, held as 64.
TEST(OddWidthsOfRanks, GiveTheAnswerOfTheWhole) {
  const ModelConfig config = odd_config(ModelFamily::kQwen2, false);
  const PackedBatch batch = some_batch();
  Model whole(config, {});
  fill(whole);
  const at::Tensor wanted = pass(whole, batch);
  Layout layout;
  layout.tp = 4;
  test::on_layout(layout, [&](ParallelContext& context) {
    Model model(config, padded(testing::split_options(context, config)));
    EXPECT_EQ(model.local().intermediate, 64);
    fill(model);
    const at::Tensor got = pass(model, batch);
    expect_near(got.narrow(1, 0, kHidden), wanted, 1e-5, "hidden");
    for (const Parameter& parameter : model.parameters()) {
      expect_near(testing::sum_over_tensor_ranks(context, parameter),
                  part_of(parameter, whole.find(parameter.name)->tensor.grad()), 1e-5, parameter.name);
    }
    EXPECT_TRUE(rest_is_zero(model, model.flat_gradients()));
  });
}

}  // namespace
}  // namespace trireme
