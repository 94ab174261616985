// What ranks share of the training state: one answer, and how much memory of each rank it leaves.
#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "tests/unit/model/tiny.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/optimizer/adamw.h"

namespace trireme {
namespace {

enum class Shared { kNothing, kState, kGradients, kWeights };

ModelConfig small(int64_t layers = 3) {
  return test::tiny_config(
      {.vocab = 50, .hidden = 32, .intermediate = 40, .layers = layers, .heads = 2, .kv_heads = 1, .positions = 64});
}

ModelOptions options_of(Shared shared, ParallelContext& context, int64_t bucket_elements) {
  ModelOptions options;
  if (shared >= Shared::kGradients) {
    options.sharding = {.gradients = true,
                        .weights = shared == Shared::kWeights,
                        .ranks = &context.data_parallel(),
                        .bucket_elements = bucket_elements};
  }
  return options;
}

// A rank's model and optimizer.
struct Rank {
  Rank(Shared shared, ParallelContext& context, const ModelConfig& config, int64_t bucket_elements = 1000,
       bool reduce_in_fp32 = true)
      : model(config, options_of(shared, context, bucket_elements)) {
    init_parameters(model, 3);
    AdamWOptions adam;
    adam.shard_state = shared != Shared::kNothing;
    adam.bucket_elements = bucket_elements;
    adam.reduce_in_fp32 = reduce_in_fp32;
    optimizer = std::make_unique<DistributedAdamW>(model, context.data_parallel(), adam);
    if (model.units() != nullptr) model.units()->release();
  }
  void pass(const std::vector<int32_t>& tokens) {
    const PackedBatch batch = PackedBatch::from_sequences({tokens});
    const at::Tensor hidden = model.forward(batch);
    (model.logprobs(hidden, batch.ids.roll(-1), {}).sum() / 10).backward();
    if (model.units() != nullptr) model.units()->end_passes();
  }
  OptimizerStep step() { return optimizer->step(0.01, 0.1, 0.5); }
  at::Tensor weights() {
    if (model.units() != nullptr) model.units()->gather();
    return model.flat_parameters().detach().clone();
  }

  Model model;
  std::unique_ptr<DistributedAdamW> optimizer;
};

struct Trained {
  at::Tensor weights;
  double grad_norm = 0;
};

// Three steps of `passes` micro-batches on each of `ranks`. `carried`: sums over micro-batches go through the
// reductions; else they are added behind them.
Trained train(Shared shared, int ranks, int passes, bool carried = true) {
  Trained trained;
  test::on_layout(Layout{.dp = ranks}, [&](ParallelContext& context) {
    Rank rank(shared, context, small(), 1000, /*reduce_in_fp32=*/carried);
    OptimizerStep done;
    for (int step = 0; step < 3; ++step) {
      for (int i = 0; i < passes; ++i) {
        const int seed = 100 * step + 10 * i + context.rank();
        std::vector<int32_t> tokens;
        for (int t = 0; t < 4 + i; ++t) tokens.push_back((7 * seed + t * t) % 50);
        rank.pass(tokens);
      }
      done = rank.step();
      if (rank.model.units() != nullptr) rank.model.units()->release();
    }
    const at::Tensor weights = rank.weights();
    // Alike on all ranks.
    const std::string bytes(static_cast<const char*>(weights.const_data_ptr()), weights.nbytes());
    for (const std::string& other : context.world().all_gather_bytes(bytes)) EXPECT_TRUE(other == bytes);
    if (context.is_main()) trained = {weights, done.grad_norm};
  });
  return trained;
}

// Two addends have no order, and one micro-batch adds to nothing.
TEST(Sharding, TwoRanksOfOneMicroBatchHaveTheBitsOfSharedState) {
  const Trained wanted = train(Shared::kState, 2, 1);
  for (const Shared shared : {Shared::kNothing, Shared::kGradients, Shared::kWeights}) {
    const Trained got = train(shared, 2, 1);
    EXPECT_TRUE(at::equal(got.weights, wanted.weights)) << static_cast<int>(shared);
    EXPECT_NEAR(got.grad_norm, wanted.grad_norm, 1e-12 * wanted.grad_norm);
  }
}

TEST(Sharding, MoreRanksAndMicroBatchesDifferByRounding) {
  const Trained wanted = train(Shared::kState, 3, 3);
  const double largest = wanted.weights.abs().max().item<double>();
  for (const Shared shared : {Shared::kNothing, Shared::kGradients, Shared::kWeights}) {
    for (const bool carried : {true, false}) {
      const Trained got = train(shared, 3, 3, carried);
      EXPECT_LE((got.weights - wanted.weights).abs().max().item<double>(), 1e-5 * largest) << static_cast<int>(shared);
      EXPECT_NEAR(got.grad_norm, wanted.grad_norm, 1e-5 * wanted.grad_norm);
    }
  }
}

// A step's sums begin with its first micro-batch: none of the step before is in them.
TEST(Sharding, AStepWithoutAPassHasNoGradients) {
  for (const Shared shared : {Shared::kGradients, Shared::kWeights}) {
    test::on_layout(Layout{.dp = 2}, [&](ParallelContext& context) {
      Rank rank(shared, context, small());
      rank.pass({1, 2, 3});
      const double norm = rank.step().grad_norm;
      EXPECT_GT(norm, 0);
      EXPECT_EQ(rank.step().grad_norm, 0);
    });
  }
}

TEST(Sharding, ASharedGradientThatIsNotFiniteIsNamedOnAllRanks) {
  for (const Shared shared : {Shared::kGradients, Shared::kWeights}) {
    std::vector<std::string> said(2);
    test::on_layout(Layout{.dp = 2}, [&](ParallelContext& context) {
      Rank rank(shared, context, small());
      ShardedUnits& units = *rank.model.units();
      const int64_t offset = rank.model.find("model.layers.1.mlp.down_proj.weight")->offset;
      const auto reduce = units.on_gradients;
      units.on_gradients = [&](int64_t begin, const at::Tensor& gradients) {
        if (context.rank() == 1 && begin <= offset && offset < begin + gradients.size(0))
          gradients[offset - begin + 3].fill_(std::nan(""));
        reduce(begin, gradients);
      };
      rank.pass({1, 2, 3});
      const auto weights = [&] {
        const at::Tensor now = rank.weights();
        units.release();
        return now;
      };
      const at::Tensor before = weights();
      try {
        rank.step();
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kData);
        said[static_cast<size_t>(context.rank())] = error.what();
      }
      EXPECT_TRUE(at::equal(weights(), before));
    });
    for (const std::string& one : said)
      EXPECT_EQ(one,
                "the ranks' sum of gradients of model.layers.1.mlp.down_proj.weight at optimizer step 1 is not finite; "
                "the weights were not changed");
  }
}

// Bytes of the host that tensors hold, of all threads.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto block = std::make_unique<Block>(Block{c10::GetDefaultCPUAllocator()->allocate(bytes), bytes, this});
    const int64_t now = live_ += static_cast<int64_t>(bytes);
    int64_t most = most_.load();
    while (most < now && !most_.compare_exchange_weak(most, now)) {
    }
    void* data = block->memory.get();
    return {data, block.release(), &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  int64_t live() const { return live_; }
  int64_t take_most() { return most_.exchange(live_); }

 private:
  struct Block {
    c10::DataPtr memory;
    size_t bytes;
    CountingAllocator* counter;
  };
  static void free_block(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->counter->live_ -= static_cast<int64_t>(block->bytes);
  }
  std::atomic<int64_t> live_{0}, most_{0};
};

struct Bytes {
  int64_t kept = 0;  // of both ranks' models and optimizers between passes
  int64_t most = 0;  // in addition in two passes
};

Bytes bytes_of(Shared shared, const ModelConfig& config, CountingAllocator& allocator) {
  Bytes bytes;
  const int64_t before = allocator.live();
  test::on_layout(Layout{.dp = 2}, [&](ParallelContext& context) {
    Rank rank(shared, context, config, int64_t{1} << 24);
    const auto two_passes = [&] {
      for (int i = 0; i < 2; ++i) rank.pass({1, 2, static_cast<int32_t>(3 + context.rank())});
    };
    two_passes();  // what belongs to the program (rotations, pools) is there after a first step
    rank.step();
    context.world().barrier();
    const int64_t kept = allocator.live();
    if (context.is_main()) allocator.take_most();
    context.world().barrier();
    two_passes();
    context.world().barrier();
    if (context.is_main()) bytes = {kept - before, allocator.take_most() - kept};
    context.world().barrier();
  });
  return bytes;
}

TEST(Sharding, ARankHoldsItsSlicesAndAFewUnits) {
  ModelConfig config = small(/*layers=*/12);
  config.hidden_size = 96;
  config.intermediate_size = 256;
  config.head_dim = 48;
  config.rope.head_dim = 48;
  static CountingAllocator allocator;  // its blocks may outlive the test
  c10::Allocator* const usual = c10::GetDefaultCPUAllocator();
  const ParameterLayout layout = parameter_layout(config, whole_model(config));
  const int64_t all = layout.elements * 4;
  int64_t unit = 0;
  for (const WeightUnit& one : weight_units(layout)) unit = std::max(unit, (one.end - one.begin) * 4);
  ASSERT_LT(10 * unit, all);

  c10::SetCPUAllocator(&allocator, /*priority=*/100);
  const Bytes state = bytes_of(Shared::kState, config, allocator);
  const Bytes gradients = bytes_of(Shared::kGradients, config, allocator);
  const Bytes weights = bytes_of(Shared::kWeights, config, allocator);
  c10::SetCPUAllocator(usual, /*priority=*/100);
  // Of two ranks: weights and gradients twice, and master weights, moments and summed gradients once.
  const int64_t spare = all / 5;  // rotations, what has come of a sum
  EXPECT_GT(state.kept, 8 * all - spare);
  EXPECT_LT(gradients.kept, 6 * all + spare) << "no buffer of gradients";
  EXPECT_LT(weights.kept, 4 * all + spare) << "parts only";
  EXPECT_LT(gradients.most, 2 * 6 * unit) << "one unit's gradients, those before it on their way, and a product's";
  EXPECT_LT(weights.most, 2 * 10 * unit) << "and of weights the head, one unit and the next one";
  EXPECT_LT(gradients.kept + gradients.most, state.kept) << "less at any time than is kept with whole gradients";
  EXPECT_LT(weights.kept + weights.most, gradients.kept);
}

}  // namespace
}  // namespace trireme
