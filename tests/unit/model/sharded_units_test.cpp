// Weights and gradients that ranks share: how they are dealt, bits of passes, memory.
#include <ATen/ATen.h>

#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"

namespace trireme {
namespace {

using testing::eight_heads;
using testing::fill;
using testing::random_tokens;
using testing::same_bits;
using testing::split_options;

// Every element that is trained is in one bucket, and each of its ranks' parts holds others.
void expect_dealt(const ParameterLayout& layout, const ShardLayout& shards) {
  int64_t next = 0, owned = 0;
  for (const FlatBucket& bucket : shards.buckets) {
    EXPECT_EQ(bucket.begin, next);
    EXPECT_EQ(bucket.at, owned);
    EXPECT_GE(bucket.width, bucket.size);
    EXPECT_LT(bucket.width - bucket.size, bucket.ranks) << "padding is memory of every rank";
    EXPECT_EQ(bucket.part() * bucket.ranks, bucket.width);
    EXPECT_EQ(bucket.experts, bucket.begin >= layout.split_experts);
    next += bucket.size;
    owned += bucket.part();
  }
  EXPECT_EQ(next, layout.elements);
  EXPECT_EQ(shards.owned, owned);
}

TEST(ShardLayout, UnitsTileWhatIsTrainedAndNoBucketCrossesTheirBorders) {
  for (const ModelFamily family : testing::kAllFamilies) {
    for (const bool tied : {false, true}) {
      const ModelConfig config = eight_heads(family, tied);
      const bool dense = config.num_experts == 0;
      for (const Layout& sizes : {Layout{.dp = 4}, Layout{.tp = 2, .dp = 2}, Layout{.ep = 2, .dp = 4}}) {
        if (dense && sizes.ep > 1) continue;
        const ParameterLayout layout = parameter_layout(config, model_split(config.shape(), sizes, 1), true);
        const std::vector<WeightUnit> units = weight_units(layout);
        int64_t next = layout.alike_elements;
        for (const WeightUnit& unit : units) {
          EXPECT_EQ(unit.begin, next);
          next = unit.end;
          for (const PlacedParameter& parameter : layout.parameters) {
            const bool begins = parameter.offset >= unit.begin && parameter.offset < unit.end;
            if (!begins || parameter.frozen) continue;
            EXPECT_LE(parameter.offset + parameter.size, unit.end) << parameter.name;
            const std::string layer = "model.layers." + std::to_string(unit.place - 1) + ".";
            const bool of_layer = parameter.name.find("model.layers.") == 0;
            EXPECT_EQ(of_layer, parameter.name.find(layer) == 0) << parameter.name << " at place " << unit.place;
          }
        }
        EXPECT_EQ(next, layout.elements);
        for (const int64_t bucket : {int64_t{100}, int64_t{1000}, int64_t{1} << 24}) {
          const ShardLayout shards = shard_layout(layout, 4, 2, bucket);
          expect_dealt(layout, shards);
          for (const WeightUnit& unit : units) {
            for (const FlatBucket& one : shards.buckets) {
              if (one.begin < unit.begin || one.begin >= unit.end) continue;
              EXPECT_LE(one.begin + one.size, unit.end);
            }
          }
        }
      }
    }
  }
}

struct Result {
  at::Tensor hidden, logprobs;
  std::vector<at::Tensor> gradients;  // of each unit, as backward gave them, the last one first
};

// `follows`: another one comes behind it.
Result passes(Model& model, const PackedBatch& batch, bool follows = false) {
  Result result;
  if (model.units() != nullptr) {
    model.units()->on_gradients = [&](int64_t, const at::Tensor& gradients) {
      result.gradients.push_back(gradients.clone());
    };
  }
  result.hidden = model.forward(batch);
  result.logprobs = model.logprobs(result.hidden, batch.ids.roll(-1), {});
  if (model.units() != nullptr) model.units()->expect_forward(follows);
  result.logprobs.sum().backward();
  result.hidden = result.hidden.detach();
  result.logprobs = result.logprobs.detach();
  if (model.units() != nullptr && !follows) model.units()->end_passes();
  return result;
}

class SharedWeights : public ::testing::TestWithParam<std::tuple<ModelFamily, bool, at::ScalarType>> {};
INSTANTIATE_TEST_SUITE_P(Sharding, SharedWeights,
                         ::testing::Values(std::tuple{ModelFamily::kLlama, false, at::kFloat},
                                           std::tuple{ModelFamily::kQwen3, true, at::kFloat},
                                           std::tuple{ModelFamily::kQwen2, true, at::kBFloat16},
                                           std::tuple{ModelFamily::kMixtral, false, at::kFloat}),
                         [](const auto& info) {
                           return std::string(to_string(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) ? "_tied_" : "_") + c10::toString(std::get<2>(info.param));
                         });

// Whole or gathered unit by unit, with and without recomputation: every row and every gradient.
TEST_P(SharedWeights, ChangeNoBitOfAPass) {
  const auto [family, tied, dtype] = GetParam();
  const ModelConfig config = eight_heads(family, tied);
  ModelOptions options;
  options.dtype = dtype;
  if (dtype == at::kBFloat16) options.gradient_dtype = at::kFloat;
  Model plain(config, options);
  fill(plain);
  const PackedBatch batch = PackedBatch::from_sequences({random_tokens(17, 3), random_tokens(5, 4)});
  const Result wanted = passes(plain, batch);
  test::on_layout(Layout{.dp = 3}, [&, &config = config](ParallelContext& context) {
    ModelOptions own = options;
    own.sharding = {.gradients = true, .weights = true, .ranks = &context.data_parallel(), .bucket_elements = 1000};
    Model model(config, own);
    fill(model);
    ShardedUnits& units = *model.units();
    units.cut();
    for (const bool whole : {false, true}) {
      if (whole) units.gather();
      if (!whole) units.release();
      EXPECT_EQ(units.whole(), whole);
      for (const Recompute& recompute : {Recompute{}, Recompute{1, 2}}) {
        model.set_recompute(recompute);
        const Result got = passes(model, batch);
        EXPECT_TRUE(same_bits(got.hidden, wanted.hidden));
        EXPECT_TRUE(same_bits(got.logprobs, wanted.logprobs));
        const std::vector<WeightUnit> all = weight_units(parameter_layout(config, model.split()));
        ASSERT_EQ(got.gradients.size(), all.size());
        for (size_t i = 0; i < all.size(); ++i) {
          const WeightUnit& unit = all[all.size() - 1 - i];
          const int64_t size = unit.end - unit.begin;
          EXPECT_TRUE(
              same_bits(got.gradients[i].narrow(0, 0, size), plain.flat_gradients().narrow(0, unit.begin, size)))
              << "the unit at place " << unit.place;
          EXPECT_EQ(got.gradients[i].narrow(0, size, got.gradients[i].size(0) - size).count_nonzero().item<int64_t>(),
                    0);
        }
        const at::NoGradGuard no_grad;  // the head stays from one forward pass to the next
        for (int again = 0; again < 2; ++again) EXPECT_TRUE(same_bits(model.forward(batch), wanted.hidden));
        units.end_passes();
      }
    }
    for (const Parameter& parameter : model.parameters())
      EXPECT_TRUE(same_bits(parameter.tensor.detach(), plain.find(parameter.name)->tensor.detach())) << parameter.name;
  });
}

// What a pass begins to gather, or keeps, for the next one: the bits of passes by themselves, and nothing is left.
TEST_P(SharedWeights, ChangeNoBitOfPassesInARow) {
  const auto [family, tied, dtype] = GetParam();
  for (const int layers : {1, 2, 3}) {
    ModelConfig config = eight_heads(family, tied);
    config.num_layers = layers;
    ModelOptions options;
    options.dtype = dtype;
    if (dtype == at::kBFloat16) options.gradient_dtype = at::kFloat;
    Model plain(config, options);
    fill(plain);
    std::vector<PackedBatch> batches;
    std::vector<Result> wanted;
    std::vector<at::Tensor> gradients;
    for (int i = 0; i < 3; ++i) {
      batches.push_back(PackedBatch::from_sequences({random_tokens(5 + 4 * i, 3), random_tokens(7, 4 + i)}));
      plain.zero_gradients();
      wanted.push_back(passes(plain, batches.back()));
      gradients.push_back(plain.flat_gradients().clone());
    }
    test::on_layout(Layout{.dp = 2}, [&, &config = config](ParallelContext& context) {
      ModelOptions own = options;
      own.sharding = {.gradients = true, .weights = true, .ranks = &context.data_parallel(), .bucket_elements = 1000};
      Model model(config, own);
      fill(model);
      model.units()->cut();
      model.units()->release();
      const std::vector<WeightUnit> all = weight_units(parameter_layout(config, model.split()));
      for (int round = 0; round < 2; ++round) {
        for (size_t i = 0; i < batches.size(); ++i) {
          const Result got = passes(model, batches[i], /*follows=*/i + 1 < batches.size());
          EXPECT_TRUE(same_bits(got.hidden, wanted[i].hidden)) << layers << " layers, pass " << i;
          EXPECT_TRUE(same_bits(got.logprobs, wanted[i].logprobs)) << layers << " layers, pass " << i;
          ASSERT_EQ(got.gradients.size(), all.size());
          for (size_t u = 0; u < all.size(); ++u) {
            const WeightUnit& unit = all[all.size() - 1 - u];
            const int64_t size = unit.end - unit.begin;
            EXPECT_TRUE(same_bits(got.gradients[u].narrow(0, 0, size), gradients[i].narrow(0, unit.begin, size)))
                << layers << " layers, pass " << i << ", the unit at place " << unit.place;
          }
        }
        for (const Parameter& parameter : model.parameters()) {
          if (parameter.frozen) continue;
          EXPECT_EQ(parameter.tensor.storage().data(), nullptr) << parameter.name << " is still there";
        }
      }
    });
  }
}

TEST(SharedWeights, ThatAreNotThereHaveNoAddress) {
  const ModelConfig config = eight_heads(ModelFamily::kLlama, false);
  test::on_layout(Layout{.dp = 2}, [&](ParallelContext& context) {
    ModelOptions options;
    options.sharding = {.gradients = true, .weights = true, .ranks = &context.data_parallel()};
    Model model(config, options);
    fill(model);
    model.units()->cut();
    int asked = 0;
    model.units()->before_release = [&] { ++asked; };
    model.units()->release();
    model.units()->release();
    EXPECT_EQ(asked, 1);
    EXPECT_ANY_THROW((void)model.flat_parameters().const_data_ptr<float>());
    EXPECT_ANY_THROW((void)model.head_weight().const_data_ptr<float>());
    model.units()->gather();
    EXPECT_GT(model.flat_parameters().detach().abs().sum().item<double>(), 0);
  });
}

// Rows behind the head by which its number is a multiple of 8: there to be read wherever its memory is.
void expect_spare_rows(const at::Tensor& head) {
  const int64_t in = head.size(1), rows = (head.size(0) + kHeadRows - 1) / kHeadRows * kHeadRows;
  ASSERT_GT(rows, head.size(0));
  const auto end = static_cast<size_t>(head.storage_offset() + rows * in) * head.element_size();
  ASSERT_LE(end, head.storage().nbytes());
  EXPECT_TRUE(head.detach().as_strided({rows, in}, {in, 1}).isfinite().all().item<bool>());
}

TEST(SharedWeights, AHeadHasItsSpareRows) {
  for (const bool tied : {false, true}) {
    const ModelConfig config = eight_heads(ModelFamily::kLlama, tied);
    for (const int ranks : {1, 3}) {
      test::on_layout(Layout{.dp = ranks}, [&](ParallelContext& context) {
        ModelOptions options;
        options.sharding = {.gradients = true, .weights = true, .ranks = &context.data_parallel()};
        Model model(config, options);
        fill(model);
        ShardedUnits& units = *model.units();
        units.cut();
        expect_spare_rows(model.head_weight());
        units.release();
        const at::NoGradGuard no_grad;
        for (int64_t place = 0; place < units.places(); ++place) units.read(place);
        expect_spare_rows(model.head_weight());
        units.end_forward(/*backward=*/false);
        units.end_passes();
        units.gather();
        expect_spare_rows(model.head_weight());
      });
    }
    ModelOptions copy;
    copy.trainable = false;
    copy.releasable = true;
    Model model(config, copy);
    model.take_memory();
    expect_spare_rows(model.head_weight());
  }
}

}  // namespace
}  // namespace trireme
