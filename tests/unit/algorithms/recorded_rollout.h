// A recorded rollout, and its training on ranks that are threads.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/fs.h"
#include "tests/unit/model/tiny.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/algorithms/policy_trainer.h"
#include "trainer/algorithms/sample_advantages.h"
#include "trainer/model/safetensors.h"

namespace trireme::test {

inline ModelConfig tiny(ModelFamily family = ModelFamily::kQwen3, int64_t layers = 2) {
  return tiny_config({.family = family,
                      .vocab = 60,
                      .layers = layers,
                      .heads = 8,
                      .kv_heads = 4,
                      .tied = family == ModelFamily::kQwen3});
}

inline Config settings(bool dynamic) {
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

// Of settings(): three optimizer steps.
inline void take_three_steps(Config& config) { config.policy.train_global_batch_size = 8; }

inline std::vector<Sample> recorded() {
  std::mt19937 random(17);
  std::vector<Sample> samples;
  for (int64_t g = 0; g < 6; ++g) {
    for (int64_t i = 0; i < 4; ++i) {
      Sample s;
      s.group = g;
      s.index = i;
      std::vector<int32_t> prompt;
      for (int64_t t = 0; t < 3 + g; ++t) prompt.push_back(static_cast<int32_t>((g * 7 + t) % 60));
      s.prompt = SharedTokens(std::move(prompt));
      for (size_t t = 1 + random() % 20; t > 0; --t) {
        s.response.push_back(static_cast<int32_t>(random() % 60));
        s.generation_logprobs.push_back(-3.5f - 0.01f * static_cast<float>(random() % 50));
      }
      s.raw_reward = static_cast<double>(random() % 3);
      samples.push_back(std::move(s));
    }
  }
  return samples;
}

// The sampler's log-probs are those that `policy` gives them.
inline void as_sampled_by(const Model& policy, std::vector<Sample>& samples) {
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < samples.size(); ++i) {
    const at::Tensor logprobs = response_logprobs(policy, make_micro_batch(samples, {static_cast<int64_t>(i)}), {});
    const float* of = logprobs.const_data_ptr<float>();
    samples[i].generation_logprobs.assign(of, of + logprobs.numel());
  }
}

// One rank with its policy, and no reference model. The configuration outlives it.
struct OneRank {
  explicit OneRank(const Config& config, bool exact = true, const ModelConfig& shape = tiny(),
                   const ModelOptions& options = {})
      : policy(shape, options),
        optimizer((init_parameters(policy, 5), policy), context.data_parallel(), {}),
        trainer(config, policy, nullptr, optimizer, context, timer, exact) {}
  ParallelContext context{Layout{}, {}};
  Model policy;
  DistributedAdamW optimizer;
  PhaseTimer timer;
  PolicyTrainer trainer;
};

using ByParameter = std::map<std::string, at::Tensor>;

// What optimizers of all ranks have written, read by one: weights and first moments of the whole model.
struct WholeState {
  ByParameter weights, moments;
  at::Tensor flat_weights, flat_moments;
};
inline WholeState whole_state(const std::filesystem::path& dir, const ModelConfig& shape,
                              const ModelOptions& options = {}) {
  Model model(shape, options);
  Communicator alone;
  DistributedAdamW whole(model, alone, {});
  whole.load(dir);
  const TemporaryDirectory merged;
  whole.save(merged.path());
  WholeState state;
  state.flat_weights = model.flat_parameters().detach().clone();
  state.flat_moments = SafetensorsFile(merged.path() / "rank_00000.safetensors").tensor("exp_avg").clone();
  for (const Parameter& parameter : model.parameters()) {
    state.weights[parameter.name] = parameter.tensor.detach().clone();
    if (parameter.frozen) continue;
    EXPECT_LE(parameter.offset + parameter.size, state.flat_moments.numel());
    state.moments[parameter.name] = state.flat_moments.narrow(0, parameter.offset, parameter.size).clone();
  }
  return state;
}

// Each within 1e-5 of its largest, or of a thousandth of the largest of all.
inline void expect_close(const ByParameter& got, const ByParameter& wanted, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  double of_all = 0;
  for (const auto& [name, tensor] : wanted) of_all = std::max(of_all, tensor.abs().max().item<double>());
  ASSERT_GT(of_all, 0) << what;
  for (const auto& [name, tensor] : wanted) {
    const double largest = std::max(tensor.abs().max().item<double>(), 1e-3 * of_all);
    EXPECT_LE((got.at(name) - tensor).abs().max().item<double>(), 1e-5 * largest) << what << ": " << name;
  }
}

struct Outcome {
  TrainResult result;
  WholeState state;
  at::Tensor moments;         // exp_avg after the optimizer steps, a weighted sum of their gradients: state's, flat
  at::Tensor weights;         // likewise
  int64_t micro_batches = 0;  // of rank 0: forward passes, with and without a gradient
};

struct RunSetup {
  int64_t bucket_elements = 4096;
  ModelOptions model;
  bool reduce_in_fp32 = true;
  int64_t tp = 1, pp = 1, cp = 1;  // the rest of the world are replicas
  int64_t ep = 1, etp = 1;         // of a mixture of experts
  StageOptions stages;
  ModelFamily family = ModelFamily::kQwen3;
  int64_t layers = 2;
  StateSharding shared = StateSharding::kOptimizer;
};

// How ranks share a model's gradients and weights, as far as `shared` says so.
inline Sharding sharding_of(StateSharding shared, ParallelContext& context, int64_t bucket_elements,
                            const std::optional<ModelSplit>& split = {}) {
  if (shared < StateSharding::kGradients) return {};
  return {.gradients = true,
          .weights = shared == StateSharding::kWeights,
          .ranks = &context.data_parallel(),
          .experts = context.expert_data_parallel(split),
          .bucket_elements = bucket_elements};
}

inline Outcome run(int world, bool dynamic, const std::function<void(Config&)>& change = {},
                   const RunSetup& setup = {}) {
  const TemporaryDirectory dir;
  Outcome outcome;
  Layout layout;
  layout.tp = setup.tp;
  layout.pp = setup.pp;
  layout.cp = setup.cp;
  layout.ep = setup.ep;
  layout.etp = setup.etp;
  layout.dp = world / setup.tp / setup.pp / setup.cp;
  on_layout(layout, [&](ParallelContext& context) {
    Config config = settings(dynamic);
    if (change) change(config);
    const ModelConfig shape = tiny(setup.family, setup.layers);
    ModelOptions options = setup.model;
    if (world > 1) set_split(options, shape.shape(), context, setup.stages);
    if (setup.shared >= StateSharding::kGradients)
      options.sharding = sharding_of(setup.shared, context, setup.bucket_elements, options.split);
    Model policy(shape, options);
    init_parameters(policy, 5);
    ModelOptions frozen = options;
    frozen.trainable = false;
    Model reference(shape, frozen);
    init_parameters(reference, 6);
    if (ShardedUnits* units = reference.units()) {
      units->cut();
      units->release();
    }
    AdamWOptions adam;
    adam.bucket_elements = setup.bucket_elements;
    adam.eps = 1e-3;  // where gradients are almost 0 their sign is chance
    adam.reduce_in_fp32 = setup.reduce_in_fp32;
    adam.shard_state = setup.shared != StateSharding::kNothing;
    DistributedAdamW optimizer(policy, context.data_parallel(), adam,
                               context.expert_data_parallel(policy.options().split));
    PhaseTimer timer;
    PolicyTrainer trainer(config, policy, &reference, optimizer, context, timer, /*exact=*/true);
    if (context.is_main()) trainer.on_progress = [&] { ++outcome.micro_batches; };
    std::vector<Sample> samples = recorded();
    assign_advantages(samples, 4, config);
    const TrainResult result = trainer.train(samples);
    optimizer.save(dir.path());
    if (context.is_main()) outcome.result = result;
  });
  outcome.state = whole_state(dir.path(), tiny(setup.family, setup.layers), setup.model);
  outcome.weights = outcome.state.flat_weights;
  outcome.moments = outcome.state.flat_moments;
  return outcome;
}

// Whoever holds which slice: metrics, and moments and weights of each parameter, of one rank, as far as sums in another
// order differ.
inline void expect_answer_of_one(const Outcome& many, const Outcome& one, const std::string& where) {
  for (const char* key : {"loss", "grad_norm", "global_valid_toks"}) {
    const double wanted = one.result.metrics.at(key);
    EXPECT_NEAR(many.result.metrics.at(key), wanted, 1e-5 * std::max(key[0] == 'l' ? 1.0 : 0.0, std::abs(wanted)))
        << where << ": " << key;
  }
  expect_close(many.state.moments, one.state.moments, where + ", moments");
  expect_close(many.state.weights, one.state.weights, where + ", weights");
}

}  // namespace trireme::test
