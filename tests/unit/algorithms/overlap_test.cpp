// Collectives beside the computation change no bit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "tests/unit/algorithms/recorded_rollout.h"
#include "tests/unit/model/testing.h"

namespace trireme {
namespace {

using test::Outcome;
using test::run;
using test::RunSetup;
using test::tiny;
using testing::same_bits;

TEST(Overlap, ReducingAndGatheringBesideTheComputationChangesNoBit) {
  const auto overlapped = [](bool reduce, bool gather) {
    return [=](Config& c) {
      c.policy.megatron_cfg.enabled = true;
      c.policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce = reduce;
      c.policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather = gather;
      c.policy.megatron_cfg.optimizer.lr = 1e-3;
      c.policy.megatron_cfg.scheduler.lr_warmup_iters = 0;
      derive_defaults(c);
    };
  };
  std::vector<RunSetup> setups(3);
  for (RunSetup& setup : setups) setup.bucket_elements = 1000;
  setups[1].model.dtype = at::kBFloat16;
  setups[1].model.gradient_dtype = at::kFloat;
  setups[2].model.dtype = at::kBFloat16;
  setups[2].reduce_in_fp32 = false;
  setups[2].model.checkpoint_activations = true;
  for (const RunSetup& setup : setups) {
    for (const int world : {2, 3}) {
      const Outcome after = run(world, false, overlapped(false, false), setup);
      ASSERT_TRUE(after.weights.defined());
      for (const auto& [reduce, gather] : {std::pair{true, false}, {false, true}, {true, true}}) {
        const Outcome beside = run(world, false, overlapped(reduce, gather), setup);
        ASSERT_TRUE(beside.weights.defined());
        EXPECT_TRUE(same_bits(beside.weights, after.weights)) << world << " " << reduce << gather;
        EXPECT_TRUE(same_bits(beside.moments, after.moments)) << world << " " << reduce << gather;
        EXPECT_EQ(beside.result.metrics.at("grad_norm"), after.result.metrics.at("grad_norm"));
        EXPECT_EQ(beside.result.metrics.at("loss"), after.result.metrics.at("loss"));
      }
    }
  }
}

// Six optimizer steps: tensor ranks exchange rows beside their products, or wait for each exchange; what backward needs
// is kept, or computed again.
TEST(Overlap, ExchangesBesideProductsChangeNoBitOfWeightsAndMoments) {
  struct Sizes {
    int world, tp, pp;
  };
  const auto six_steps = [](Config& c) {
    c.policy.train_global_batch_size = 4;
    derive_defaults(c);
  };
  for (const auto& [world, tp, pp] : {Sizes{2, 2, 1}, {4, 2, 1}, {4, 2, 2}}) {
    Outcome kept;
    for (const bool again : {false, true}) {
      RunSetup setup;
      setup.tp = tp;
      setup.pp = pp;
      setup.model.checkpoint_activations = again;
      const Outcome beside = run(world, false, six_steps, setup);
      setup.model.overlap_exchanges = false;
      const Outcome behind = run(world, false, six_steps, setup);
      ASSERT_TRUE(beside.weights.defined() && behind.weights.defined());
      EXPECT_EQ(beside.result.optimizer_steps, 6);
      EXPECT_TRUE(same_bits(beside.weights, behind.weights)) << world << " " << pp << again;
      EXPECT_TRUE(same_bits(beside.moments, behind.moments)) << world << " " << pp << again;
      EXPECT_EQ(beside.result.metrics.at("loss"), behind.result.metrics.at("loss"));
      if (!again) kept = beside;
      EXPECT_TRUE(same_bits(beside.weights, kept.weights)) << world << " " << pp;
      EXPECT_TRUE(same_bits(beside.moments, kept.moments)) << world << " " << pp;
    }
  }
}

// More ranks than micro-batches: a rank without one sends zeros, in the order of the others.
TEST(Overlap, ARankWithoutAMicroBatchTakesPart) {
  const auto few = [](bool overlap) {
    return [=](Config& c) {
      c.policy.megatron_cfg.enabled = true;
      c.policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce = overlap;
      c.policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather = overlap;
      c.policy.train_global_batch_size = 2;
      derive_defaults(c);
    };
  };
  RunSetup setup;
  setup.bucket_elements = 1000;
  const Outcome after = run(3, false, few(false), setup), beside = run(3, false, few(true), setup);
  ASSERT_TRUE(after.weights.defined() && beside.weights.defined());
  EXPECT_EQ(beside.result.optimizer_steps, 12);
  EXPECT_TRUE(same_bits(beside.weights, after.weights));
  EXPECT_TRUE(same_bits(beside.moments, after.moments));
}

TEST(Overlap, BucketsBeginDuringBackwardAndWeightsArriveWhenRead) {
  ListeningPort port;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      const RendezvousOptions rendezvous = port.place(rank, 2, Milliseconds(250000));
      Layout layout;
      layout.dp = 2;
      ParallelContext context(layout, rendezvous);
      Model model(tiny(), {});
      init_parameters(model, 5);
      AdamWOptions adam;
      adam.bucket_elements = 512;
      DistributedAdamW optimizer(model, context.data_parallel(), adam);
      const PackedBatch batch = PackedBatch::from_sequences({{1, 2, 3, static_cast<int32_t>(4 + rank)}, {7, 8}});
      std::vector<int64_t> final_from;
      const auto backward = [&] { model.forward(batch).square().sum().backward(); };
      // What the model says: falling, and true. The gradients it names never change again in that pass.
      std::vector<at::Tensor> seen;
      model.on_gradients_final = [&](int64_t from) {
        final_from.push_back(from);
        seen.push_back(model.flat_gradients().narrow(0, from, model.flat_gradients().numel() - from).clone());
      };
      backward();
      ASSERT_EQ(final_from.size(), 3U);  // the final norm, two layers
      EXPECT_EQ(final_from[0], model.find("model.norm.weight")->offset);
      EXPECT_EQ(final_from[2], model.find("model.layers.0.input_layernorm.weight")->offset);
      for (size_t i = 0; i < seen.size(); ++i) {
        EXPECT_GT(seen[i].abs().max().item<double>(), 0);
        EXPECT_TRUE(same_bits(seen[i], model.flat_gradients().narrow(0, final_from[i], seen[i].numel())));
      }
      model.on_gradients_final = nullptr;
      EXPECT_EQ(optimizer.step(1e-3, 0, 1).reduced_early, 0);

      optimizer.reduce_in_next_backward();
      backward();
      const OptimizerStep step = optimizer.step(1e-3, 0, 1, DistributedAdamW::Gather::kLater);
      const int64_t elements = model.flat_parameters().numel(),
                    first = model.find("model.layers.0.input_layernorm.weight")->offset;
      EXPECT_EQ(step.reduced_early, (elements + 511) / 512 - (first + 511) / 512);
      EXPECT_TRUE(static_cast<bool>(model.before_reading));
      const at::Tensor read = model.forward(batch).detach();
      optimizer.finish_gather();
      EXPECT_FALSE(static_cast<bool>(model.before_reading));
      EXPECT_TRUE(same_bits(read, model.forward(batch).detach()));
      context.world().barrier();
    });
  }
  for (std::thread& thread : ranks) thread.join();
}

}  // namespace
}  // namespace trireme
