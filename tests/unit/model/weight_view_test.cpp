// What of a model travels to another process, and which models' weights are alike.
#include "trainer/model/weight_view.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/unit/errors.h"
#include "tests/unit/model/tiny.h"
#include "tests/unit/parallel/ranks.h"

namespace trireme {
namespace {

TEST(WeightView, AModelThatTrainsAndOneThatGeneratesAreAlike) {
  for (const ModelFamily family : {ModelFamily::kQwen3, ModelFamily::kQwen3Moe}) {
    const auto engine = test::tiny_model({.family = family});
    ModelOptions options;
    options.gradient_dtype = at::kFloat;
    const Model actor(engine->config(), options);
    const WeightView one = weight_view(actor), other = weight_view(*engine);
    EXPECT_EQ(one.layout, other.layout);
    EXPECT_EQ(one.flat.nbytes(), other.flat.nbytes());
    EXPECT_EQ(one.flat.data_ptr(), actor.flat_parameters().data_ptr());
  }
}

TEST(WeightView, AnotherModelOrOrderIsAnotherLayout) {
  const auto layout_of = [](const test::Tiny& tiny, bool freeze_router = true) {
    ModelOptions options;
    options.freeze_router = freeze_router;
    return weight_view(Model(test::tiny_config(tiny), options)).layout;
  };
  const uint64_t base = layout_of({});
  EXPECT_EQ(layout_of({}), base);
  EXPECT_NE(layout_of({.tied = false}), base);
  EXPECT_NE(layout_of({.layers = 2}), base);
  // The same number of elements in other places.
  EXPECT_NE(layout_of({.heads = 2, .kv_heads = 1, .head_dim = 16}), base);
  const test::Tiny mixture{.family = ModelFamily::kQwen3Moe};
  EXPECT_NE(layout_of(mixture, /*freeze_router=*/false), layout_of(mixture));
}

TEST(WeightView, APartOfAModelHasALayoutOfItsOwn) {
  const ModelConfig config = test::tiny_config();
  const uint64_t whole = weight_view(Model(config, {})).layout;
  test::on_layout({.tp = 2}, [&](ParallelContext& context) {
    ModelOptions options;
    set_split(options, config.shape(), context);
    const Model model(config, options);
    EXPECT_NE(weight_view(model).layout, whole);
    EXPECT_EQ(weight_view(model).flat.data_ptr(), model.flat_parameters().data_ptr());
  });
}

TEST(WeightView, OfWeightsThatRanksShareIsThatOfAWholeModel) {
  const ModelConfig config = test::tiny_config();
  test::on_layout({.dp = 2}, [&](ParallelContext& context) {
    ModelOptions options;
    options.sharding = {.gradients = true, .weights = true, .ranks = &context.data_parallel()};
    const Model actor(config, options), engine(config, {});
    const WeightView one = weight_view(actor), other = weight_view(engine);
    EXPECT_EQ(one.layout, other.layout);
    EXPECT_EQ(one.flat.numel(), other.flat.numel());
    EXPECT_EQ(one.flat.scalar_type(), other.flat.scalar_type());
    // Whole again it has the weights of then, wherever they lie.
    actor.units()->gather();
    {
      const at::NoGradGuard no_grad;
      at::Tensor(actor.flat_parameters()).fill_(1.0F);
    }
    actor.units()->cut();
    actor.units()->release();
    actor.units()->gather();
    for (const Parameter& parameter : actor.parameters())
      EXPECT_TRUE(one.flat.narrow(0, parameter.offset, parameter.size).eq(1.0F).all().item<bool>()) << parameter.name;
  });
}

}  // namespace
}  // namespace trireme
