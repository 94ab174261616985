// The model of generation has, after each fill, what the policy has then: every element, in any pair of layouts.
#include "trainer/algorithms/refit.h"

#include <ATen/ATen.h>

#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"

namespace trireme {
namespace {

using testing::eight_heads;
using testing::fill;
using testing::part_of;
using testing::split_options;

ModelConfig four_layers(ModelFamily family, bool tied) {
  ModelConfig config = eight_heads(family, tied);
  config.num_layers = 4;
  return config;
}

struct Case {
  Layout training, generation;
  StageOptions stages;
};

void expect_weights(const Refit& refit, const Model& whole, double factor) {
  for (const Parameter& parameter : refit.model().parameters()) {
    const at::Tensor expected = part_of(parameter, whole.find(parameter.name)->tensor) * factor;
    EXPECT_TRUE(at::equal(parameter.tensor, expected)) << parameter.name;
  }
}

void check(const ModelConfig& config, const Case& setup, int64_t bucket_bytes) {
  Model whole(config, {});
  fill(whole);
  test::on_layout(
      setup.training,
      [&](ParallelContext& context) {
        const at::NoGradGuard no_grad;
        Model policy(config, split_options(context, config, setup.stages));
        for (Parameter& parameter : policy.parameters())
          parameter.tensor.copy_(part_of(parameter, whole.find(parameter.name)->tensor));
        Refit refit(policy, setup.stages, context, /*of_node=*/2, bucket_bytes);
        for (int64_t round = 1; round <= 3; ++round) {
          EXPECT_TRUE(refit.fill());
          EXPECT_FALSE(refit.fill());  // they are there
          expect_weights(refit, whole, static_cast<double>(round));
          refit.release();
          for (Parameter& parameter : policy.parameters())
            parameter.tensor.copy_(part_of(parameter, whole.find(parameter.name)->tensor) *
                                   static_cast<double>(round + 1));
        }
      },
      setup.generation);
}

TEST(Refit, EveryRankHasItsPartOfThePolicyAsItIsNow) {
  const Case cases[] = {
      {{.pp = 4}, {.dp = 4}, {}},
      {{.tp = 2, .pp = 2}, {.tp = 2, .dp = 2}, {}},
      {{.tp = 2, .pp = 2}, {.tp = 4}, {}},
      {{.tp = 2, .pp = 2}, {.dp = 2, .pp = 2}, {}},
      {{.dp = 4}, {.tp = 4}, {}},
      {{.tp = 4}, {.tp = 2, .dp = 2}, {}},
      {{.cp = 2, .pp = 2}, {.dp = 4}, {.virtual_stages = 2}},
      {{.pp = 2}, {.dp = 2}, {.first_layers = 3}},
  };
  for (const Case& setup : cases) {
    SCOPED_TRACE(to_string(setup.training) + " to " + to_string(setup.generation));
    ModelConfig config = four_layers(ModelFamily::kQwen2, /*tied=*/true);
    config.vocab_size = 83;  // padded, and differently, under each tp
    check(config, setup, int64_t{4} << 10);
  }
}

// Weights that ranks share are never whole together, and each part comes to those who have it in generation.
TEST(Refit, OfSharedWeightsAFewUnitsAreWholeAtATime) {
  const Case cases[] = {{{.dp = 4}, {.tp = 4}, {}},
                        {{.dp = 4}, {.tp = 2, .dp = 2}, {}},
                        {{.tp = 2, .dp = 2}, {.tp = 4}, {}},
                        {{.tp = 2, .dp = 2}, {.dp = 4}, {}},
                        {{.tp = 2, .cp = 2}, {.dp = 4}, {}}};
  for (const bool tied : {false, true}) {
    const ModelConfig config = four_layers(ModelFamily::kQwen2, tied);
    Model whole(config, {});
    fill(whole);
    for (const Case& setup : cases) {
      SCOPED_TRACE(to_string(setup.training) + " to " + to_string(setup.generation));
      test::on_layout(
          setup.training,
          [&](ParallelContext& context) {
            const at::NoGradGuard no_grad;
            ModelOptions options = split_options(context, config);
            options.sharding = {
                .gradients = true, .weights = true, .ranks = &context.data_parallel(), .bucket_elements = 1000};
            Model policy(config, options);
            ShardedUnits& units = *policy.units();
            const auto set = [&](double factor) {
              units.gather();
              for (Parameter& parameter : policy.parameters())
                parameter.tensor.copy_(part_of(parameter, whole.find(parameter.name)->tensor) * factor);
              units.cut();
            };
            set(1);
            int released = 0;
            units.before_release = [&] { ++released; };
            Refit refit(policy, {}, context, /*of_node=*/2, /*bucket_bytes=*/int64_t{4} << 10);
            for (int round = 1; round <= 3; ++round) {
              EXPECT_TRUE(refit.fill());
              EXPECT_FALSE(units.whole());
              EXPECT_EQ(released, round);
              for (const Parameter& parameter : policy.parameters()) {
                if (parameter.offset < policy.alike_elements()) continue;
                EXPECT_EQ(parameter.tensor.storage().data(), nullptr) << parameter.name << " is still there";
              }
              expect_weights(refit, whole, static_cast<double>(round));
              refit.release();
              set(round + 1);
            }
          },
          setup.generation);
    }
  }
}

// The memory of gradients is the second model's while it generates, and they are zeros when it comes back.
TEST(Refit, GradientsLendTheirMemory) {
  const ModelConfig config = four_layers(ModelFamily::kQwen3, /*tied=*/false);
  const PackedBatch batch = PackedBatch::from_sequences({{3, 1, 4, 1, 5}, {9, 2, 6}});
  test::on_layout(
      {.tp = 2, .dp = 2},
      [&](ParallelContext& context) {
        ModelOptions options = split_options(context, config);
        Model plain(config, options);
        options.lends_gradients = true;
        Model policy(config, options);
        fill(plain);
        fill(policy);
        EXPECT_EQ(plain.lent_bytes(), 0);
        EXPECT_EQ(policy.lent_bytes(), 4 * policy.trained_elements());
        const auto backward = [&](Model& model) {
          const at::Tensor hidden = model.forward(batch);
          model.logprobs(hidden, batch.ids.roll(-1), {}).sum().backward();
          return model.flat_gradients().clone();
        };
        const at::Tensor wanted = backward(plain);
        EXPECT_GT(wanted.abs().max().item<double>(), 0);
        Refit refit(policy, {}, context, /*of_node=*/0);
        EXPECT_EQ(refit.model().lent_bytes(), 0);
        for (int round = 0; round < 2; ++round) {
          EXPECT_TRUE(at::equal(backward(policy), wanted)) << "added up from zeros, in round " << round;
          refit.fill();
          EXPECT_EQ(policy.flat_gradients().storage().data(), nullptr) << "they are lent";
          policy.zero_gradients();  // of none
          refit.release();
          EXPECT_EQ(policy.flat_gradients().abs().max().item<double>(), 0);
          EXPECT_EQ(policy.parameters().front().tensor.grad().data_ptr(), policy.flat_gradients().data_ptr());
        }
      },
      Layout{.tp = 4});
}

TEST(Refit, FamiliesAndSizesOfBuckets) {
  const Case setup{{.tp = 2, .pp = 2}, {.tp = 4}, {}};
  for (const ModelFamily family : {ModelFamily::kLlama, ModelFamily::kQwen3}) {
    for (const int64_t bytes : {int64_t{100}, Refit::kBucketBytes}) check(four_layers(family, false), setup, bytes);
  }
}

// Tensor ranks of generation stay on a node, as those of training do.
TEST(Refit, GenerationOverTwoNodesIsRefused) {
  Config config;
  config.policy.generation.tensor_parallel_size = 4;
  const ModelShape shape = eight_heads(ModelFamily::kLlama, false).shape();
  const Layout training{.tp = 2, .dp = 4};
  EXPECT_FALSE(generation_problem(config, shape, "a model", training, /*of_node=*/4));
  const auto problem = generation_problem(config, shape, "a model", training, /*of_node=*/2);
  ASSERT_TRUE(problem);
  EXPECT_NE(problem->find("policy.generation.tensor_parallel_size 4"), std::string::npos) << *problem;
  EXPECT_NE(problem->find("node"), std::string::npos) << *problem;
}

// A forward pass of the second model has the bits of the policy's, and so after its memory has gone and come.
TEST(Refit, PassesHaveTheBitsOfThePolicys) {
  const ModelConfig config = four_layers(ModelFamily::kQwen3, /*tied=*/true);
  Model whole(config, {});
  fill(whole);
  const PackedBatch batch = PackedBatch::from_sequences({{3, 1, 4, 1, 5}, {9, 2, 6}});
  const at::NoGradGuard no_grad;
  const at::Tensor expected = whole.forward(batch);
  test::on_layout(
      {.pp = 2},
      [&](ParallelContext& context) {
        const at::NoGradGuard here;
        Model policy(config, split_options(context, config));
        fill(policy);
        Refit refit(policy, {}, context, /*of_node=*/0);
        for (int round = 0; round < 2; ++round) {
          refit.fill();
          EXPECT_TRUE(at::equal(refit.model().forward(batch), expected));
          refit.release();
        }
      },
      Layout{.dp = 2});
}

}  // namespace
}  // namespace trireme
