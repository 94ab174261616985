// The same recorded rollout on 1, 2 and 4 ranks (threads with a communicator each): loss and every gradient agree.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/algorithms/recorded_rollout.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/policy_trainer.h"
#include "trainer/algorithms/replay.h"
#include "trainer/algorithms/sample_advantages.h"
#include "trainer/model/safetensors.h"

namespace trireme {
namespace {

using test::Outcome;
using test::recorded;
using test::run;
using test::RunSetup;
using test::settings;
using test::tiny;

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

// What a recipe may ask for, with each family: the answer of one rank, whoever holds which slice.
TEST(Ranks, TensorRanksGiveTheAnswerOfOne) {
  struct Recipe {
    const char* name;
    ModelFamily family;
    bool dynamic;
    std::function<void(Config&)> change;
  };
  const std::vector<Recipe> recipes = {{"packed, KL", ModelFamily::kLlama, false, {}},
                                       {"dynamic", ModelFamily::kQwen2, true, {}},
                                       {"shared prompts", ModelFamily::kQwen3, false,
                                        [](Config& c) {
                                          c.policy.sequence_packing.share_prompts = true;
                                          c.policy.sequence_packing.train_mb_tokens = 128;
                                        }},
                                       {"GSPO", ModelFamily::kQwen3, false, [](Config& c) {
                                          c.loss_fn.sequence_level_importance_ratios = true;
                                          c.loss_fn.token_level_loss = false;
                                          c.loss_fn.reference_policy_kl_penalty = 0;
                                        }}};
  for (const Recipe& recipe : recipes) {
    RunSetup setup;
    setup.family = recipe.family;
    const Outcome one = run(1, recipe.dynamic, recipe.change, setup);
    const double largest = one.moments.abs().max().item<double>();
    ASSERT_GT(largest, 0) << recipe.name;
    for (const auto& [world, tp] : {std::pair{2, 2}, {4, 4}, {4, 2}, {8, 4}}) {
      setup.tp = tp;
      const Outcome many = run(world, recipe.dynamic, recipe.change, setup);
      const std::string where =
          std::string(recipe.name) + ", " + std::to_string(world) + " ranks, tp " + std::to_string(tp);
      for (const char* key : {"loss", "grad_norm", "global_valid_toks"}) {
        const double wanted = one.result.metrics.at(key);
        EXPECT_NEAR(many.result.metrics.at(key), wanted, 1e-5 * std::max(key[0] == 'l' ? 1.0 : 0.0, std::abs(wanted)))
            << where << ": " << key;
      }
      EXPECT_LE((many.moments - one.moments).abs().max().item<double>(), 1e-5 * largest) << where;
      EXPECT_LE((many.weights - one.weights).abs().max().item<double>(), 1e-5 * one.weights.abs().max().item<double>())
          << where;
    }
  }
}

// Whole micro-batches go to context ranks, whose losses see whole sequences: the answer of one rank, also where prompts
// are shared over ranks, and where most ranks have no rows.
TEST(Ranks, ContextRanksGiveTheAnswerOfOne) {
  struct Recipe {
    const char* name;
    bool dynamic;
    std::function<void(Config&)> change;
  };
  const std::vector<Recipe> recipes = {{"packed, KL", false, {}},
                                       {"one sample each", true,
                                        [](Config& c) {
                                          c.policy.dynamic_batching.enabled = false;
                                          c.policy.train_micro_batch_size = 1;
                                        }},
                                       {"shared prompts", false,
                                        [](Config& c) {
                                          c.policy.sequence_packing.share_prompts = true;
                                          c.policy.sequence_packing.train_mb_tokens = 128;
                                        }},
                                       {"GSPO", false, [](Config& c) {
                                          c.loss_fn.sequence_level_importance_ratios = true;
                                          c.loss_fn.token_level_loss = false;
                                          c.loss_fn.reference_policy_kl_penalty = 0;
                                        }}};
  for (const Recipe& recipe : recipes) {
    const Outcome one = run(1, recipe.dynamic, recipe.change);
    const double largest = one.moments.abs().max().item<double>();
    ASSERT_GT(largest, 0) << recipe.name;
    struct Sizes {
      int world, tp, pp, cp;
    };
    for (const auto& [world, tp, pp, cp] :
         {Sizes{2, 1, 1, 2}, {4, 1, 1, 2}, {4, 2, 1, 2}, {4, 1, 2, 2}, {4, 1, 1, 4}}) {
      RunSetup setup;
      setup.tp = tp;
      setup.pp = pp;
      setup.cp = cp;
      const Outcome many = run(world, recipe.dynamic, recipe.change, setup);
      const std::string where = std::string(recipe.name) + ", " + std::to_string(world) + " ranks, tp " +
                                std::to_string(tp) + " pp " + std::to_string(pp) + " cp " + std::to_string(cp);
      for (const char* key : {"loss", "grad_norm", "global_valid_toks"}) {
        const double wanted = one.result.metrics.at(key);
        EXPECT_NEAR(many.result.metrics.at(key), wanted, 1e-5 * std::max(key[0] == 'l' ? 1.0 : 0.0, std::abs(wanted)))
            << where << ": " << key;
      }
      EXPECT_EQ(many.result.compared_tokens, one.result.compared_tokens) << where;
      EXPECT_LE((many.moments - one.moments).abs().max().item<double>(), 1e-5 * largest) << where;
      EXPECT_LE((many.weights - one.weights).abs().max().item<double>(), 1e-5 * one.weights.abs().max().item<double>())
          << where;
    }
  }
}

// Whatever of the training state ranks share: the answer of one rank, also where some have fewer micro-batches than
// others, or none.
TEST(Ranks, SharedStateGivesTheAnswerOfOne) {
  struct Recipe {
    const char* name;
    std::function<void(Config&)> change;
  };
  const std::vector<Recipe> recipes = {{"packed, KL", {}},
                                       {"four samples a step",
                                        [](Config& c) {
                                          c.policy.train_global_batch_size = 4;
                                          c.policy.sequence_packing.train_mb_tokens = 64;
                                        }},
                                       {"everything again", [](Config& c) {
                                          c.policy.activation_checkpointing = true;
                                          c.loss_fn.token_level_loss = false;
                                        }}};
  struct Sizes {
    int world, tp, pp, cp;
  };
  for (const Recipe& recipe : recipes) {
    const Outcome one = run(1, false, recipe.change);
    const double largest = one.moments.abs().max().item<double>();
    ASSERT_GT(largest, 0) << recipe.name;
    for (const StateSharding shared : {StateSharding::kNothing, StateSharding::kGradients, StateSharding::kWeights}) {
      const bool stages = shared == StateSharding::kNothing;
      for (const auto& [world, tp, pp, cp] :
           {Sizes{2, 1, 1, 1}, {4, 1, 1, 1}, {4, 2, 1, 1}, {4, 1, 1, 2}, {4, 1, 2, 1}}) {
        if (pp > 1 && !stages) continue;
        RunSetup setup;
        setup.tp = tp;
        setup.pp = pp;
        setup.cp = cp;
        setup.shared = shared;
        const Outcome many = run(world, false, recipe.change, setup);
        const std::string where = std::string(recipe.name) + ", " + std::to_string(world) + " ranks, tp " +
                                  std::to_string(tp) + " pp " + std::to_string(pp) + " cp " + std::to_string(cp) +
                                  ", sharing " + std::to_string(static_cast<int>(shared));
        for (const char* key : {"loss", "grad_norm", "global_valid_toks"}) {
          const double wanted = one.result.metrics.at(key);
          EXPECT_NEAR(many.result.metrics.at(key), wanted, 1e-5 * std::max(key[0] == 'l' ? 1.0 : 0.0, std::abs(wanted)))
              << where << ": " << key;
        }
        EXPECT_EQ(many.result.compared_tokens, one.result.compared_tokens) << where;
        EXPECT_LE((many.moments - one.moments).abs().max().item<double>(), 1e-5 * largest) << where;
        EXPECT_LE((many.weights - one.weights).abs().max().item<double>(),
                  1e-5 * one.weights.abs().max().item<double>())
            << where;
      }
    }
  }
}

TEST(EarlyGradients, ABatchWithoutAValidTokenTrainsNothing) {
  for (const bool by_tokens : {true, false}) {
    Config config = settings(false);
    config.grpo.overlong_filtering = true;
    config.loss_fn.reference_policy_kl_penalty = 0;
    config.loss_fn.token_level_loss = by_tokens;
    ParallelContext context(Layout{}, {});
    Model policy(tiny(), {});
    init_parameters(policy, 5);
    const at::Tensor before = policy.flat_parameters().detach().clone();
    DistributedAdamW optimizer(policy, context.data_parallel(), {});
    PhaseTimer timer;
    PolicyTrainer trainer(config, policy, nullptr, optimizer, context, timer, /*exact=*/true);
    std::vector<Sample> samples = recorded();
    for (Sample& sample : samples) sample.truncated = true;
    assign_advantages(samples, 4, config);
    trainer.train_early({samples.begin(), samples.begin() + 4});
    for (size_t i = 0; i < 4; ++i) samples[i].trained_early = true;
    const TrainResult result = trainer.train(samples);
    EXPECT_EQ(result.metrics.at("loss"), 0);
    EXPECT_EQ(result.metrics.at("grad_norm"), 0);
    for (const auto& [key, value] : result.metrics) EXPECT_TRUE(std::isfinite(value)) << key;
    EXPECT_EQ(result.compared_tokens, 0);
    EXPECT_TRUE(at::isfinite(policy.flat_parameters()).all().item<bool>());
    EXPECT_LT((policy.flat_parameters() - before).abs().max().item<double>(), 1e-5);  // weight decay only
  }
}

TEST(LogprobBits, AreComparedWhereTheWeightsAreThoseThatSampled) {
  const auto train = [](double rate) {
    Config config = settings(false);
    config.loss_fn.reference_policy_kl_penalty = 0;
    config.policy.optimizer.kwargs.lr = rate;
    ParallelContext context(Layout{}, {});
    Model policy(tiny(), {});
    init_parameters(policy, 5);
    DistributedAdamW optimizer(policy, context.data_parallel(), {});
    PhaseTimer timer;
    PolicyTrainer trainer(config, policy, nullptr, optimizer, context, timer, /*exact=*/true);
    std::vector<Sample> samples = recorded();
    for (size_t i = 0; i < samples.size(); ++i) {  // as this model would have sampled them
      const c10::NoGradGuard no_grad;
      const at::Tensor logprobs = response_logprobs(policy, make_micro_batch(samples, {static_cast<int64_t>(i)}), {});
      const float* of = logprobs.const_data_ptr<float>();
      samples[i].generation_logprobs.assign(of, of + logprobs.numel());
    }
    samples[1].generation_logprobs[0] += 0.5f;   // of the first optimizer step
    samples[20].generation_logprobs[0] += 0.5f;  // of the second one
    assign_advantages(samples, 4, config);
    return trainer.train(samples);
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

Trained train_older(RatioFrom from, bool exact, bool all_fresh) {
  const TemporaryDirectory dir;
  Config config = settings(false);
  config.loss_fn.reference_policy_kl_penalty = 0;
  config.loss_fn.use_importance_sampling_correction = true;
  config.policy.train_global_batch_size = 24;
  config.policy.sequence_packing.train_mb_tokens = config.policy.sequence_packing.logprob_mb_tokens = 4000;
  config.grpo.async_grpo.ratio_from = from;
  ParallelContext context(Layout{}, {});
  Model policy(tiny(), {});
  init_parameters(policy, 5);
  DistributedAdamW optimizer(policy, context.data_parallel(), {});
  PhaseTimer timer;
  PolicyTrainer trainer(config, policy, nullptr, optimizer, context, timer, exact);
  Trained trained;
  trainer.on_progress = [&] { ++trained.passes; };
  std::vector<Sample>& samples = trained.samples = recorded();
  for (size_t i = 0; i < samples.size(); ++i) {
    const c10::NoGradGuard no_grad;
    const at::Tensor logprobs = response_logprobs(policy, make_micro_batch(samples, {static_cast<int64_t>(i)}), {});
    const float* of = logprobs.const_data_ptr<float>();
    samples[i].generation_logprobs.assign(of, of + logprobs.numel());
    const auto length = logprobs.numel();
    samples[i].weight_versions = {{7, 0, length}};
    if (all_fresh) continue;
    if (i == 2) samples[i].weight_versions = {{6, 0, length}};
    if (i == 9) samples[i].weight_versions = {{5, 0, 1}};
    if (i == 9 && length > 1) samples[i].weight_versions.push_back({7, 1, length});
    samples[i].mixed_context = i == 11;
    if (!samples[i].is_of(7)) samples[i].generation_logprobs[0] -= 0.25f;
  }
  assign_advantages(samples, 4, config);
  trained.result = trainer.train(samples, (dir.path() / "dump.safetensors").string(), /*version=*/7);
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

void kl_in_reward(Config& c) {
  c.grpo.adv_estimator.name = AdvantageEstimator::kReinforcePlusPlus;
  c.grpo.overlong_filtering = true;
  c.grpo.advantage_clip_high = 1.5;
  c.loss_fn.use_kl_in_reward = true;
  c.loss_fn.reference_policy_kl_penalty = 0.3;
}

// The formula once more, from the paper: r - mean of the group - beta * KL of the token, whitened over the batch's
// tokens.
TEST(KlInReward, IsTakenOffEveryTokenBeforeWhitening) {
  const TemporaryDirectory dir;
  Config config = settings(false);
  kl_in_reward(config);
  config.policy.sequence_packing.enabled = false;  // one micro-batch, samples in order
  config.policy.train_global_batch_size = config.policy.train_micro_batch_size = 24;
  ParallelContext context(Layout{}, {});
  Model policy(tiny(), {}), reference(tiny(), {});
  init_parameters(policy, 5);
  init_parameters(reference, 6);
  DistributedAdamW optimizer(policy, context.data_parallel(), {});
  PhaseTimer timer;
  PolicyTrainer trainer(config, policy, &reference, optimizer, context, timer, /*exact=*/true);
  std::vector<Sample> samples = recorded();
  samples[7].truncated = true;  // in its group's mean, not in the loss
  samples[9].dropped = true;    // in neither
  assign_advantages(samples, 4, config);
  const TrainResult result = trainer.train(samples, (dir.path() / "dump.safetensors").string());
  const SafetensorsFile file(dir.path() / "dump.safetensors");
  const auto get = [&](const char* name) {
    const at::Tensor flat = file.tensor(std::string("micro_batch.0.") + name).to(at::kDouble).contiguous();
    return std::vector<double>(flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel());
  };
  const std::vector<double> previous = get("previous_logprobs"), other = get("reference_logprobs");
  EXPECT_EQ(get("weight_versions"), std::vector<double>(previous.size(), -1)) << "nobody said";
  std::vector<double> tokens;
  std::vector<bool> valid;
  double kl_sum = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    double mean = 0, members = 0;
    for (size_t j = i / 4 * 4; j < i / 4 * 4 + 4; ++j) {
      if (samples[j].dropped) continue;
      mean += samples[j].raw_reward;
      members += 1;
    }
    for (size_t t = 0; t < samples[i].response.size(); ++t) {
      const double x = other.at(tokens.size()) - previous.at(tokens.size()), kl = std::exp(x) - 1 - x;
      valid.push_back(i != 7 && i != 9);
      kl_sum += valid.back() ? kl : 0;
      tokens.push_back(samples[i].raw_reward - mean / members - 0.3 * kl);
    }
  }
  double count = 0, sum = 0, squares = 0;
  for (size_t t = 0; t < tokens.size(); ++t) {
    count += valid[t] ? 1 : 0;
    sum += valid[t] ? tokens[t] : 0;
  }
  for (size_t t = 0; t < tokens.size(); ++t) squares += valid[t] ? std::pow(tokens[t] - sum / count, 2) : 0;
  const std::vector<double> advantages = get("advantages");
  ASSERT_EQ(advantages.size(), tokens.size());
  bool clipped = false;
  for (size_t t = 0; t < tokens.size(); ++t) {
    if (!valid[t]) continue;
    const double white = (tokens[t] - sum / count) / std::sqrt(squares / count);
    EXPECT_NEAR(advantages[t], std::min(white, 1.5), 1e-5) << t;
    clipped = clipped || white > 1.5;
  }
  EXPECT_TRUE(clipped);
  EXPECT_NEAR(result.metrics.at("kl_penalty"), kl_sum / count, 1e-6);
  EXPECT_EQ(result.metrics.at("advantages/max"), 1.5);
}

TEST(KlInReward, OneTwoAndFourRanksAgree) {
  const Outcome one = run(1, false, kl_in_reward);
  ASSERT_TRUE(one.moments.defined());
  for (const int world : {2, 4}) {
    const Outcome many = run(world, false, kl_in_reward);
    ASSERT_TRUE(many.moments.defined());
    for (const char* key : {"loss", "grad_norm", "kl_penalty", "advantages/min", "advantages/mean"}) {
      EXPECT_NEAR(many.result.metrics.at(key), one.result.metrics.at(key),
                  1e-5 * std::max(1.0, std::abs(one.result.metrics.at(key))))
          << key;
    }
  }
}

TEST(PositiveExamples, TheirMeanDoesNotDependOnRanksOrMicroBatches) {
  const auto with = [](int world, int64_t micro_batch_tokens) {
    return run(world, false, [=](Config& c) {
      c.loss_fn.positive_example_nll_weight = 0.5;
      c.policy.sequence_packing.train_mb_tokens = micro_batch_tokens;
    });
  };
  const Outcome one = with(1, 2000);
  const double nll = one.result.metrics.at("positive_nll_loss");
  EXPECT_GT(nll, 3.5);  // nearly a uniform guess among 60 tokens: log 60 = 4.1, for each token of a correct answer
  EXPECT_LT(nll, 4.7);
  for (const auto& [world, tokens] : {std::pair{1, 64}, {2, 64}, {4, 128}}) {
    const Outcome cut = with(world, tokens);
    ASSERT_TRUE(cut.moments.defined());
    EXPECT_NEAR(cut.result.metrics.at("positive_nll_loss"), nll, 1e-5 * nll) << world << " " << tokens;
    EXPECT_NEAR(cut.result.metrics.at("grad_norm"), one.result.metrics.at("grad_norm"),
                1e-5 * one.result.metrics.at("grad_norm"));
  }
}

TEST(Schedule, MovesOnceARolloutWhateverTheNumberOfOptimizerSteps) {
  Config config = settings(false);
  config.loss_fn.reference_policy_kl_penalty = 0;
  config.policy.optimizer.kwargs.lr = 0.008;
  config.policy.scheduler.pieces = {{"LinearLR", {{"start_factor", 0.25}, {"end_factor", 1.0}, {"total_iters", 3}}}};
  const auto rates = [&](int64_t optimizer_batch, int64_t rollouts_before) {
    config.policy.train_global_batch_size = optimizer_batch;
    ParallelContext context(Layout{}, {});
    Model policy(tiny(), {});
    init_parameters(policy, 5);
    DistributedAdamW optimizer(policy, context.data_parallel(), {});
    PhaseTimer timer;
    PolicyTrainer trainer(config, policy, nullptr, optimizer, context, timer, /*exact=*/true);
    if (rollouts_before > 0) trainer.set_passes_done(rollouts_before);  // a resumed run, without optimizer state
    std::vector<Sample> samples = recorded();
    assign_advantages(samples, 4, config);
    std::vector<double> seen;
    for (int64_t r = rollouts_before; r < 4; ++r) seen.push_back(trainer.train(samples).metrics.at("lr"));
    EXPECT_EQ(optimizer.steps_done(), (4 - rollouts_before) * 24 / optimizer_batch);
    return seen;
  };
  for (const int64_t optimizer_batch : {24, 6}) {
    const std::vector<double> seen = rates(optimizer_batch, 0);
    for (size_t r = 0; r < seen.size(); ++r) EXPECT_NEAR(seen[r], 0.002 * static_cast<double>(r + 1), 1e-12);
    const std::vector<double> rest = rates(optimizer_batch, 2);
    EXPECT_EQ(rest, std::vector<double>(seen.begin() + 2, seen.end()));
  }
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.scalar_type() == y.scalar_type() && x.nbytes() == y.nbytes() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

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
  Layout layout;
  ParallelContext context(layout, {});
  Model policy(tiny(), {});
  init_parameters(policy, 5);
  save_model(policy, dir.path() / "model", {});
  DistributedAdamW optimizer(policy, context.data_parallel(), {});
  PhaseTimer timer;
  PolicyTrainer trainer(config, policy, nullptr, optimizer, context, timer, /*exact=*/true);
  std::vector<Sample> samples = recorded();
  assign_advantages(samples, 4, config);
  trainer.train(samples, (dir.path() / "dump.safetensors").string());
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
  ParallelContext context(Layout(), {});
  const auto error_of = [&](int64_t blocks) {
    ModelOptions options;
    options.dtype = at::kBFloat16;
    options.combine_blocks = blocks;  // what another layout would have derived
    Model policy(mixture, options);
    init_parameters(policy, 5);
    save_model(policy, dir.path() / "model", {});
    DistributedAdamW optimizer(policy, context.data_parallel(), {});
    PhaseTimer timer;
    PolicyTrainer trainer(config, policy, nullptr, optimizer, context, timer, /*exact=*/true);
    std::vector<Sample> samples = recorded();
    assign_advantages(samples, 4, config);
    trainer.train(samples, (dir.path() / "dump.safetensors").string());
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
