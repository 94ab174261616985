// Log-probs that training begins with: where they are the sampler's, bit for bit, and where a pass gives them.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "base/fs.h"
#include "tests/unit/algorithms/recorded_rollout.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/policy_trainer.h"
#include "trainer/algorithms/sample_advantages.h"
#include "trainer/model/safetensors.h"

namespace trireme {
namespace {

using test::as_sampled_by;
using test::OneRank;
using test::Outcome;
using test::recorded;
using test::run;
using test::settings;
using test::tiny;

TEST(LogprobBits, AreComparedWhereTheWeightsAreThoseThatSampled) {
  const auto train = [](double rate) {
    Config config = settings(false);
    config.loss_fn.reference_policy_kl_penalty = 0;
    config.policy.optimizer.kwargs.lr = rate;
    OneRank rank(config);
    std::vector<Sample> samples = recorded();
    as_sampled_by(rank.policy, samples);
    samples[1].generation_logprobs[0] += 0.5f;   // of the first optimizer step
    samples[20].generation_logprobs[0] += 0.5f;  // of the second one
    assign_advantages(samples, 4, config);
    return rank.trainer.train(samples);
  };
  const auto tokens = [](size_t from, size_t to) {
    const std::vector<Sample> samples = recorded();
    size_t sum = 0;
    for (size_t i = from; i < to; ++i) sum += samples[i].response.size();
    return static_cast<int64_t>(sum);
  };
  const TrainResult moved = train(1e-3);
  EXPECT_EQ(moved.optimizer_steps, 2);
  EXPECT_EQ(moved.compared_optimizer_steps, 1);
  EXPECT_EQ(moved.compared_tokens, tokens(0, 12));
  EXPECT_EQ(moved.mismatched_tokens, 1);
  const TrainResult still = train(0);
  EXPECT_EQ(still.compared_optimizer_steps, 2);
  EXPECT_EQ(still.compared_tokens, tokens(0, 24));
  EXPECT_EQ(still.mismatched_tokens, 2);
}

// Some of the responses were drawn by older weights than version 7, in part or as a whole.
struct Trained {
  TrainResult result;
  std::vector<Sample> samples;
  std::vector<float> previous, current, generation, versions;
  int64_t passes = 0;
};

Trained train_older(RatioFrom from, bool exact, bool all_fresh, bool forced = false,
                    std::optional<double> threshold = std::nullopt) {
  const TemporaryDirectory dir;
  Config config = settings(false);
  config.loss_fn.reference_policy_kl_penalty = 0;
  config.loss_fn.use_importance_sampling_correction = true;
  config.policy.train_global_batch_size = 24;
  config.policy.sequence_packing.train_mb_tokens = config.policy.sequence_packing.logprob_mb_tokens = 4000;
  config.grpo.async_grpo.ratio_from = from;
  config.loss_fn.force_on_policy_ratio = forced;
  config.grpo.seq_logprob_error_threshold = threshold;
  OneRank rank(config, exact);
  Trained trained;
  rank.trainer.on_progress = [&] { ++trained.passes; };
  std::vector<Sample>& samples = trained.samples = recorded();
  as_sampled_by(rank.policy, samples);
  for (size_t i = 0; i < samples.size(); ++i) {
    const auto length = static_cast<int64_t>(samples[i].response.size());
    samples[i].weight_versions = {{7, 0, length}};
    if (all_fresh) continue;
    if (i == 2) samples[i].weight_versions = {{6, 0, length}};
    if (i == 9) samples[i].weight_versions = {{5, 0, 1}};
    if (i == 9 && length > 1) samples[i].weight_versions.push_back({7, 1, length});
    samples[i].mixed_context = i == 11;
    if (!samples[i].is_of(7)) samples[i].generation_logprobs[0] -= 0.25f;
  }
  assign_advantages(samples, 4, config);
  trained.result = rank.trainer.train(samples, (dir.path() / "dump.safetensors").string(), /*version=*/7);
  const SafetensorsFile file(dir.path() / "dump.safetensors");
  const auto get = [&](const char* name) {
    const at::Tensor flat = file.tensor(std::string("micro_batch.0.") + name).to(at::kFloat).contiguous();
    return std::vector<float>(flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel());
  };
  trained.previous = get("previous_logprobs");
  trained.current = get("current_logprobs");
  trained.generation = get("generation_logprobs");
  trained.versions = get("weight_versions");
  return trained;
}

// Of responses that older weights drew, whole or in part, the previous log-probs are computed, or are the sampler's, as
// the configuration says; of the others they are the sampler's, and only these are compared.
TEST(OlderTokens, HaveThePreviousLogProbsThatWereAskedFor) {
  const auto count = [](const std::vector<float>& a, const std::vector<float>& b) {
    int64_t differing = 0;
    for (size_t t = 0; t < a.size(); ++t) differing += a.at(t) != b.at(t) ? 1 : 0;
    return differing;
  };
  const Trained fresh = train_older(RatioFrom::kTraining, true, /*all_fresh=*/true);
  EXPECT_EQ(fresh.passes, 1) << "the backward pass";
  EXPECT_EQ(fresh.result.mismatched_tokens, 0);
  int64_t all = 0, older = 0, stale = 0;
  const Trained training = train_older(RatioFrom::kTraining, true, false);
  for (const Sample& sample : training.samples) {
    all += static_cast<int64_t>(sample.response.size());
    if (sample.is_of(7)) continue;
    older += static_cast<int64_t>(sample.response.size());
    ++stale;
  }
  ASSERT_EQ(stale, 3);
  EXPECT_EQ(fresh.result.compared_tokens, all);
  EXPECT_EQ(training.passes, 2) << "one forward pass over the older responses";
  EXPECT_EQ(training.result.compared_tokens, all - older);
  EXPECT_EQ(training.result.mismatched_tokens, 0) << "an older token was compared";
  EXPECT_EQ(training.previous, training.current);
  EXPECT_EQ(count(training.previous, training.generation), stale) << "the first token of each";
  EXPECT_EQ(std::count_if(training.versions.begin(), training.versions.end(), [](float v) { return v == 5; }), 1);
  EXPECT_NE(training.result.metrics.at("sampling_importance_ratio"), 1);
  EXPECT_EQ(training.result.metrics.at("probs_ratio_max"), 1);
  const Trained generation = train_older(RatioFrom::kGeneration, true, false);
  EXPECT_EQ(generation.passes, 1);
  EXPECT_EQ(generation.previous, generation.generation);
  EXPECT_EQ(generation.result.compared_tokens, all - older);
  EXPECT_NEAR(generation.result.metrics.at("sampling_importance_ratio"), 1, 1e-6);
  EXPECT_NEAR(generation.result.metrics.at("probs_ratio_max"), std::exp(0.25), 1e-4);
  // Where rows are not exact a pass runs for the new ones, as ever.
  const Trained inexact = train_older(RatioFrom::kGeneration, false, false);
  EXPECT_EQ(inexact.passes, 2);
  EXPECT_EQ(count(inexact.previous, inexact.generation), 0) << "rows are exact here after all";
}

// The pass would give the bits that the only optimizer step begins with: without it nothing differs.
TEST(OlderTokens, NeedNoPassWhereEveryRatioIsTakenForOne) {
  const Trained asked = train_older(RatioFrom::kTraining, true, false);
  const Trained forced = train_older(RatioFrom::kTraining, true, false, /*forced=*/true);
  EXPECT_EQ(asked.passes, 2);
  EXPECT_EQ(forced.passes, 1);
  EXPECT_EQ(forced.result.mismatched_tokens, 0);
  for (const char* name : {"loss", "grad_norm", "sampling_importance_ratio", "probs_ratio_max"})
    EXPECT_EQ(forced.result.metrics.at(name), asked.result.metrics.at(name)) << name;
  // Who else reads them gets them.
  EXPECT_EQ(train_older(RatioFrom::kTraining, true, false, /*forced=*/true, /*threshold=*/100.0).passes, 2);
  Config config;
  EXPECT_TRUE(reads_previous_logprobs(config));
  config.loss_fn.force_on_policy_ratio = true;
  config.loss_fn.reference_policy_kl_penalty = 0.1;
  EXPECT_FALSE(reads_previous_logprobs(config));
  config.loss_fn.use_kl_in_reward = true;
  EXPECT_TRUE(reads_previous_logprobs(config)) << "the KL of rewards is of the weights of now";
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
