// A prompt that its group shares, and a dumped step that is computed again.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/algorithms/recorded_rollout.h"
#include "tests/unit/model/testing.h"
#include "trainer/algorithms/policy_trainer.h"
#include "trainer/algorithms/replay.h"
#include "trainer/algorithms/sample_advantages.h"
#include "trainer/model/safetensors.h"

namespace trireme {
namespace {

using test::OneRank;
using test::Outcome;
using test::recorded;
using test::run;
using test::settings;
using test::tiny;
using testing::same_bits;

TEST(SharedPrompts, LogprobsHaveTheSameBitsAndGradientsDifferByRounding) {
  const std::vector<Sample> samples = recorded();
  Members members;
  for (int64_t i = 0; i < static_cast<int64_t>(samples.size()); i += 1 + i % 2) members.push_back(i);
  const MicroBatch apart = make_micro_batch(samples, members), shared = make_micro_batch(samples, members, true);
  ASSERT_LT(shared.input.tokens(), apart.input.tokens());
  for (const auto family : {ModelFamily::kLlama, ModelFamily::kQwen2, ModelFamily::kQwen3, ModelFamily::kQwen3Moe}) {
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      ModelOptions options;
      options.dtype = type;
      Model model(tiny(family), options);
      init_parameters(model, 5);
      const at::Tensor a = response_logprobs(model, apart, {});
      at::mul(a, at::arange(a.numel(), at::kFloat).sin()).sum().backward();
      const at::Tensor expected = model.flat_gradients().clone();
      model.zero_gradients();
      const at::Tensor s = response_logprobs(model, shared, {});
      EXPECT_TRUE(same_bits(s.detach(), a.detach()));
      at::mul(s, at::arange(s.numel(), at::kFloat).sin()).sum().backward();
      const c10::NoGradGuard no_grad;
      EXPECT_TRUE(same_bits(response_logprobs(model, shared, {}), a.detach()));
      if (type != at::kFloat) continue;
      for (const Parameter& p : model.parameters()) {
        if (!p.trainable) continue;
        const at::Tensor want = expected.narrow(0, p.offset, p.size);
        const at::Tensor got = model.flat_gradients().narrow(0, p.offset, p.size);
        EXPECT_LE((got - want).abs().max().item<double>(), 1e-5 * want.abs().max().item<double>()) << p.name;
      }
    }
  }
}

TEST(SharedPrompts, ARolloutTrainsTheSame) {
  const auto share = [](bool on) {
    return [on](Config& c) {
      c.policy.sequence_packing.share_prompts = on;
      c.policy.sequence_packing.train_mb_tokens = 90;
      c.policy.sequence_packing.logprob_mb_tokens = 70;
    };
  };
  for (const int world : {1, 2}) {
    const Outcome apart = run(world, false, share(false)), shared = run(world, false, share(true));
    ASSERT_TRUE(apart.weights.defined() && shared.weights.defined());
    EXPECT_EQ(shared.result.optimizer_steps, apart.result.optimizer_steps);
    EXPECT_EQ(shared.result.metrics.at("global_valid_toks"), apart.result.metrics.at("global_valid_toks"));
    for (const char* key : {"loss", "kl_penalty", "grad_norm"}) {
      EXPECT_NEAR(shared.result.metrics.at(key), apart.result.metrics.at(key),
                  1e-5 * std::max(1.0, std::abs(apart.result.metrics.at(key))))
          << key;
    }
    const double largest = apart.moments.abs().max().item<double>();
    EXPECT_LE((shared.moments - apart.moments).abs().max().item<double>(), 1e-5 * largest);
    EXPECT_FALSE(same_bits(shared.moments, apart.moments)) << "nothing was shared";
  }
}

TEST(SharedPrompts, ADumpedStepIsComputedAgain) {
  const TemporaryDirectory dir;
  Config config = settings(false);
  config.policy.sequence_packing.share_prompts = true;
  config.loss_fn.reference_policy_kl_penalty = 0;
  OneRank rank(config);
  save_model(rank.policy, dir.path() / "model", {});
  std::vector<Sample> samples = recorded();
  assign_advantages(samples, 4, config);
  rank.trainer.train(samples, (dir.path() / "dump.safetensors").string());
  std::ostringstream out;
  const ReplayResult again = replay(dir.path() / "dump.safetensors", dir.path() / "model", "cpu", out);
  EXPECT_GT(again.micro_batches, 0);
  EXPECT_EQ(again.largest_logprob_error, 0);
  if (at::hasCUDA()) return;  // there it is computed
  try {
    replay(dir.path() / "dump.safetensors", dir.path() / "model", "cuda", out);
    ADD_FAILURE() << "computed on the CPU though CUDA was asked for";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
  }
}

// Weights of a version tell of the tokens that they drew, in whatever step these are trained.
TEST(Replay, TokensAreComparedByTheVersionThatDrewThem) {
  const TemporaryDirectory dir;
  Config config = settings(false);
  config.loss_fn.reference_policy_kl_penalty = 0;
  OneRank rank(config);
  save_model(rank.policy, dir.path() / "model", {});
  std::vector<Sample> samples = recorded();
  assign_advantages(samples, 4, config);
  // What version 4 drew has its bits, what version 3 drew has others.
  ReplayResult::OfVersion older, newer;
  for (Sample& sample : samples) {
    const auto size = static_cast<int64_t>(sample.response.size()), from = size / 2;
    sample.weight_versions.clear();
    if (from > 0) sample.weight_versions.push_back({3, 0, from});
    sample.weight_versions.push_back({4, from, size});
  }
  rank.trainer.train(samples, (dir.path() / "dump.safetensors").string());
  const SafetensorsFile file(dir.path() / "dump.safetensors");
  NamedTensors tensors;
  for (const std::string& name : file.names()) {
    at::Tensor tensor = file.tensor(name).clone();
    if (const size_t at = name.find("generation_logprobs"); at != std::string::npos) {
      const std::string batch = name.substr(0, at);
      const at::Tensor of_older = file.tensor(batch + "weight_versions").eq(3);
      const at::Tensor exact = file.tensor(batch + "current_logprobs").to(at::kFloat);
      tensor = at::where(of_older, exact - 1, exact);
      older.tokens += of_older.sum().item<int64_t>();
      newer.tokens += tensor.numel() - of_older.sum().item<int64_t>();
    }
    tensors.emplace_back(name, std::move(tensor));
  }
  write_safetensors(dir.path() / "changed.safetensors", tensors,
                    {file.header().metadata.begin(), file.header().metadata.end()});
  std::ostringstream out;
  const ReplayResult result = replay(dir.path() / "changed.safetensors", dir.path() / "model", "cpu", out);
  ASSERT_GT(older.tokens, 0);
  ASSERT_GT(newer.tokens, 0);
  ASSERT_EQ(result.versions.size(), 2u);
  EXPECT_EQ(result.versions.at(3).tokens, older.tokens);
  EXPECT_EQ(result.versions.at(3).differing, older.tokens);
  EXPECT_EQ(result.versions.at(4).tokens, newer.tokens);
  EXPECT_EQ(result.versions.at(4).differing, 0);
  EXPECT_EQ(result.differing_tokens, older.tokens);
  const std::string line = "weight version 4: " + std::to_string(newer.tokens) + " tokens, 0 differ";
  EXPECT_NE(out.str().find(line), std::string::npos) << out.str();
}

// A run over more expert ranks than eight derives more blocks than one rank that replays its step would.
TEST(Replay, ExpertsAreCombinedInTheBlocksOfTheRun) {
  const TemporaryDirectory dir;
  Config config = settings(false);
  config.policy.precision = "bfloat16";
  config.loss_fn.reference_policy_kl_penalty = 0;
  ASSERT_EQ(config.policy.moe_combine_blocks, 0);
  ModelConfig mixture = tiny(ModelFamily::kQwen3Moe);
  mixture.experts_per_token = 6;
  mixture.initializer_range = 0.3;
  const auto error_of = [&](int64_t blocks) {
    ModelOptions options;
    options.dtype = at::kBFloat16;
    options.combine_blocks = blocks;  // what another layout would have derived
    OneRank rank(config, /*exact=*/true, mixture, options);
    save_model(rank.policy, dir.path() / "model", {});
    std::vector<Sample> samples = recorded();
    assign_advantages(samples, 4, config);
    rank.trainer.train(samples, (dir.path() / "dump.safetensors").string());
    std::ostringstream out;
    return replay(dir.path() / "dump.safetensors", dir.path() / "model", "cpu", out).largest_logprob_error;
  };
  EXPECT_EQ(error_of(0), 0);
  EXPECT_EQ(error_of(2), 0);
  // Without the dump's word the derived blocks would be taken, and they have other bits: the above shows something.
  const SafetensorsFile file(dir.path() / "dump.safetensors");
  EXPECT_EQ(file.header().metadata.at("expert_blocks"), "2");
  NamedTensors tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, file.tensor(name).clone());
  const auto error_with = [&](const std::string& blocks) {
    std::map<std::string, std::string> metadata(file.header().metadata.begin(), file.header().metadata.end());
    metadata.erase("expert_blocks");
    if (!blocks.empty()) metadata["expert_blocks"] = blocks;
    write_safetensors(dir.path() / "changed.safetensors", tensors, metadata);
    std::ostringstream out;
    return replay(dir.path() / "changed.safetensors", dir.path() / "model", "cpu", out).largest_logprob_error;
  };
  EXPECT_GT(error_with(""), 0);
  for (const char* wrong : {"3", "0", "many"}) EXPECT_THROW((void)error_with(wrong), Error) << wrong;
}

}  // namespace
}  // namespace trireme
