// The same recorded rollout on 1, 2 and 4 ranks (threads with a communicator each): loss and every gradient agree.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <thread>

#include "base/fs.h"
#include "tests/unit/parallel/listening.h"
#include "trainer/algorithms/policy_trainer.h"
#include "trainer/model/safetensors.h"

namespace trireme {
namespace {

ModelConfig tiny() {
  return ModelConfig::from_json({{"model_type", "qwen3"},
                                 {"architectures", {"Qwen3ForCausalLM"}},
                                 {"vocab_size", 60},
                                 {"hidden_size", 32},
                                 {"intermediate_size", 48},
                                 {"num_hidden_layers", 2},
                                 {"num_attention_heads", 4},
                                 {"num_key_value_heads", 2},
                                 {"head_dim", 8},
                                 {"hidden_act", "silu"},
                                 {"rms_norm_eps", 1e-6},
                                 {"rope_theta", 10000.0},
                                 {"max_position_embeddings", 128},
                                 {"tie_word_embeddings", true}},
                                "test");
}

Config settings(bool dynamic) {
  Config c;
  c.grpo.num_prompts_per_step = 6;
  c.grpo.num_generations_per_prompt = 4;
  c.policy.train_global_batch_size = 12;  // two optimizer steps
  c.policy.train_micro_batch_size = 2;
  c.policy.max_total_sequence_length = 64;
  c.policy.precision = "float32";
  c.policy.dynamic_batching.enabled = dynamic;
  c.policy.dynamic_batching.sequence_length_round = 4;
  c.policy.sequence_packing.enabled = !dynamic;
  c.policy.optimizer.kwargs.lr = 1e-4;
  c.loss_fn.reference_policy_kl_penalty = 0.05;
  derive_defaults(c);
  return c;
}

std::vector<RolloutSample> recorded() {
  std::mt19937 random(17);
  std::vector<RolloutSample> samples;
  for (int64_t g = 0; g < 6; ++g) {
    for (int64_t i = 0; i < 4; ++i) {
      RolloutSample s;
      s.group = g;
      s.index = i;
      for (int64_t t = 0; t < 3 + g; ++t) s.prompt.push_back(static_cast<int32_t>((g * 7 + t) % 60));
      for (size_t t = 1 + random() % 20; t > 0; --t) {
        s.tokens.push_back(static_cast<int32_t>(random() % 60));
        s.generation_logprobs.push_back(-3.5f - 0.01f * static_cast<float>(random() % 50));
      }
      s.raw_reward = static_cast<double>(random() % 3);
      samples.push_back(std::move(s));
    }
  }
  return samples;
}

struct Outcome {
  TrainResult result;
  at::Tensor moments;  // exp_avg after two optimizer steps: a weighted sum of both gradients
  at::Tensor weights;
  int64_t micro_batches = 0;  // of rank 0: forward passes, with and without a gradient
};

Outcome run(int world, bool dynamic, const std::function<void(Config&)>& change = {}) {
  const TemporaryDirectory dir;
  ListeningPort port;
  Outcome outcome;
  std::vector<std::thread> ranks;
  std::vector<std::string> errors(static_cast<size_t>(world));
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        Config config = settings(dynamic);
        if (change) change(config);
        const RendezvousOptions rendezvous = port.place(rank, world, Milliseconds(250000));
        Layout layout;
        layout.dp = world;
        ParallelContext context(layout, rendezvous);
        Model policy(tiny(), {});
        init_parameters(policy, 5);
        ModelOptions frozen;
        frozen.trainable = false;
        Model reference(tiny(), frozen);
        init_parameters(reference, 6);
        AdamWOptions adam;
        adam.bucket_elements = 4096;
        DistributedAdamW optimizer(policy, context.data_parallel(), adam);
        PolicyTrainer trainer(config, policy, &reference, optimizer, context, /*exact=*/true);
        if (rank == 0) trainer.on_progress = [&] { ++outcome.micro_batches; };
        std::vector<RolloutSample> samples = recorded();
        assign_advantages(samples, 4, config);
        const TrainResult result = trainer.train(samples);
        optimizer.save(dir.path());
        context.data_parallel().barrier();
        if (rank == 0) {
          outcome.result = result;
          outcome.weights = policy.flat_parameters().detach().clone();
        }
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : ranks) thread.join();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  // One rank reads what all wrote, and gives it back as one file.
  Model model(tiny(), {});
  Communicator alone;
  DistributedAdamW whole(model, alone, {});
  whole.load(dir.path());
  const TemporaryDirectory merged;
  whole.save(merged.path());
  outcome.moments = SafetensorsFile(merged.path() / "rank_00000.safetensors").tensor("exp_avg").clone();
  return outcome;
}

TEST(Ranks, OneTwoAndFourGiveTheSameLossAndGradients) {
  for (const bool dynamic : {false, true}) {
    const Outcome one = run(1, dynamic);
    EXPECT_EQ(one.result.optimizer_steps, 2);
    ASSERT_TRUE(one.moments.defined());
    const double largest = one.moments.abs().max().item<double>();
    EXPECT_GT(largest, 0);
    for (const int world : {2, 4}) {
      const Outcome many = run(world, dynamic);
      ASSERT_TRUE(many.weights.defined());
      EXPECT_NEAR(many.result.metrics.at("loss"), one.result.metrics.at("loss"),
                  1e-5 * std::max(1.0, std::abs(one.result.metrics.at("loss"))));
      EXPECT_NEAR(many.result.metrics.at("grad_norm"), one.result.metrics.at("grad_norm"),
                  1e-5 * one.result.metrics.at("grad_norm"));
      EXPECT_LE((many.moments.narrow(0, 0, one.weights.numel()) - one.moments.narrow(0, 0, one.weights.numel()))
                    .abs()
                    .max()
                    .item<double>(),
                1e-5 * largest)
          << world << " ranks";
      EXPECT_EQ(many.result.metrics.at("global_valid_toks"), one.result.metrics.at("global_valid_toks"));
    }
  }
}

TEST(LogprobPasses, HaveMicroBatchesOfTheirOwnSizeAndTheSameNumbers) {
  for (const bool dynamic : {false, true}) {
    const Outcome wide = run(2, dynamic);
    const Outcome narrow = run(2, dynamic, [&](Config& c) {
      (dynamic ? c.policy.dynamic_batching.logprob_mb_tokens : c.policy.sequence_packing.logprob_mb_tokens) = 32;
    });
    EXPECT_GT(narrow.micro_batches, wide.micro_batches);
    EXPECT_NEAR(narrow.result.metrics.at("loss"), wide.result.metrics.at("loss"), 1e-6);
    EXPECT_NEAR(narrow.result.metrics.at("kl_penalty"), wide.result.metrics.at("kl_penalty"), 1e-6);
  }
  // Fixed micro-batches: counted in samples.
  const auto fixed = [](int64_t samples) {
    return run(1, true, [&](Config& c) {
      c.policy.dynamic_batching.enabled = false;
      c.policy.logprob_batch_size = samples;
    });
  };
  const Outcome six = fixed(6), one = fixed(1);
  EXPECT_EQ(one.micro_batches - six.micro_batches, 24 - 4);
  EXPECT_NEAR(one.result.metrics.at("loss"), six.result.metrics.at("loss"), 1e-6);
}

}  // namespace
}  // namespace trireme
