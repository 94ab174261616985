// A critic that ranks split, in the actor's layout or in one of its own: values, gradients, training and checkpoints
// against one rank.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>

#include "base/fs.h"
#include "tests/unit/algorithms/recorded_rollout.h"
#include "tests/unit/errors.h"
#include "trainer/algorithms/critic.h"
#include "trainer/algorithms/critic_wire.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/token_passes.h"
#include "trainer/checkpoint/checkpoint.h"

namespace trireme {
namespace {

using test::expect_close;
using test::WholeState;

struct SplitCase {
  Layout layout;                     // the critic's
  std::optional<Layout> actor = {};  // of the same ranks, where it is another one
  bool share_prompts = false;
  int64_t pieces = 1;  // of a stage
  StateSharding shared = StateSharding::kOptimizer;
  ModelFamily family = ModelFamily::kQwen3;

  std::string name() const {
    return to_string(layout) + (actor ? " beside " + to_string(*actor) : "") +
           (share_prompts ? ", shared prompts" : "") + ", " + std::to_string(pieces) + " pieces, " + to_string(shared);
  }
};

ModelConfig split_shape(ModelFamily family) {
  ModelConfig config = test::tiny(family, 4);
  config.max_position_embeddings = config.rope.original_max_position = 512;
  return config;
}

// Some masked, and one that context ranks cut.
std::vector<Sample> rollout_with_a_long_one() {
  std::vector<Sample> samples = test::recorded();
  samples[3].loss_multiplier = 0;
  samples[5].loss_mask.assign(samples[5].response.size(), 1);
  samples[5].loss_mask[0] = 0;
  Sample& longest = samples[20];
  for (int32_t token = 0; longest.response.size() < 300; ++token) {
    longest.response.push_back(token * 7 % 60);
    longest.generation_logprobs.push_back(-3.5F);
  }
  return samples;
}

Config split_settings(bool share_prompts, int64_t batch) {
  Config c = test::settings(/*dynamic=*/false);
  c.policy.max_total_sequence_length = 512;
  c.policy.sequence_packing.train_mb_tokens = c.policy.sequence_packing.logprob_mb_tokens = 400;
  c.policy.sequence_packing.share_prompts = share_prompts;
  c.policy.train_global_batch_size = batch;
  c.policy.optimizer.kwargs.lr = 1e-4;
  c.value_loss_fn = {.scale = 1, .cliprange = 0.5};
  return c;
}

// One rank's part of a critic.
struct SplitCritic {
  SplitCritic(const SplitCase& one, ParallelContext& context) {
    if (one.actor) apart = std::make_unique<ParallelContext>(context, one.layout, "value");
    ranks = apart ? apart.get() : &context;
    const ModelConfig shape = split_shape(one.family).with_value_head();
    ModelOptions options;
    set_split(options, shape.shape(), *ranks, {.virtual_stages = one.pieces});
    options.sharding = test::sharding_of(one.shared, *ranks, 4096);
    model = std::make_unique<Model>(shape, options);
    init_parameters(*model, 9);
    AdamWOptions adam;
    adam.bucket_elements = 4096;
    adam.shard_state = one.shared != StateSharding::kNothing;
    adam.eps = 1e-4;  // where gradients are almost 0 their sign is chance
    optimizer = std::make_unique<DistributedAdamW>(*model, ranks->data_parallel(), adam,
                                                   ranks->expert_data_parallel(options.split));
  }
  std::unique_ptr<ParallelContext> apart;
  ParallelContext* ranks = nullptr;
  std::unique_ptr<Model> model;
  std::unique_ptr<DistributedAdamW> optimizer;
};

struct SplitOutcome {
  std::vector<Sample> samples;  // with values of before training
  MetricSums metrics;
  WholeState state;
};

SplitOutcome train_split(const SplitCase& one, int64_t batch, int64_t passes) {
  const TemporaryDirectory dir;
  SplitOutcome outcome;
  const Config config = split_settings(one.share_prompts, batch);
  test::on_layout(one.actor.value_or(one.layout), [&](ParallelContext& context) {
    SplitCritic critic(one, context);
    CriticTrainer trainer(config, *critic.model, *critic.optimizer, *critic.ranks);
    std::vector<Sample> samples = rollout_with_a_long_one();
    trainer.fill_values(samples);
    const std::string own = pack_values(samples);
    for (const std::string& values : context.world().all_gather_bytes(own)) EXPECT_TRUE(values == own);
    for (Sample& s : samples) s.returns.assign(s.response.size(), s.raw_reward - 1);
    const MetricSums metrics = trainer.train(samples, passes);
    critic.optimizer->save(dir.path());
    context.world().barrier();  // nobody's groups end while others use them
    if (!context.is_main()) return;
    outcome.samples = samples;
    outcome.metrics = metrics;
  });
  outcome.state = test::whole_state(dir.path(), split_shape(one.family).with_value_head());
  return outcome;
}

void expect_outcome(const SplitOutcome& got, const SplitOutcome& wanted, const std::string& what) {
  ASSERT_EQ(got.metrics.size(), wanted.metrics.size()) << what;
  for (const auto& [name, value] : wanted.metrics)
    EXPECT_NEAR(got.metrics.at(name), value, 1e-5 * std::max(1.0, std::abs(value))) << what << ": " << name;
  expect_close(got.state.moments, wanted.state.moments, what + ", moments");
  expect_close(got.state.weights, wanted.state.weights, what + ", weights");
}

// The same bits, or within 1e-5.
void expect_values(const std::vector<Sample>& got, const std::vector<Sample>& wanted, bool bits,
                   const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    const std::vector<float>&a = got[i].values, &b = wanted[i].values;
    ASSERT_EQ(a.size(), got[i].response.size()) << what;
    ASSERT_EQ(a.size(), b.size()) << what;
    const bool same = std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    EXPECT_TRUE(same || !bits) << what << ", sample " << i;
    for (size_t t = 0; t < a.size(); ++t) EXPECT_NEAR(a[t], b[t], 1e-5) << what << ", sample " << i;
  }
}

// Of each number of tensor ranks the first has these alone; values of all others of it have its bits.
void expect_as_of_one_rank(const std::vector<SplitCase>& cases, ModelFamily family) {
  constexpr int64_t kAll = 24;  // samples: one optimizer step, whose moments are its gradients
  const SplitCase whole{.layout = {}, .family = family};
  const SplitOutcome gradients = train_split(whole, kAll, 1), trained = train_split(whole, kAll / 2, 3);
  std::map<int64_t, std::vector<Sample>> of_tensor_ranks{{1, gradients.samples}};
  for (const SplitCase& one : cases) {
    const SplitOutcome step = train_split(one, kAll, 1);
    const bool first = of_tensor_ranks.emplace(one.layout.tp, step.samples).second;
    EXPECT_TRUE(!first || one.layout.world() == one.layout.tp) << one.name();
    expect_values(step.samples, of_tensor_ranks.at(one.layout.tp), /*bits=*/true, one.name());
    expect_values(step.samples, gradients.samples, /*bits=*/false, one.name());
    expect_outcome(step, gradients, one.name() + ", one step");
    expect_outcome(train_split(one, kAll / 2, 3), trained, one.name() + ", six steps");
  }
}

TEST(SplitCritic, ValuesGradientsAndTrainingAreThoseOfOneRank) {
  expect_as_of_one_rank({{.layout = {.dp = 2}},
                         {.layout = {.pp = 2}},
                         {.layout = {.pp = 2}, .share_prompts = true, .pieces = 2},
                         {.layout = {.cp = 2}},
                         {.layout = {.cp = 2}, .share_prompts = true},
                         {.layout = {.cp = 2, .pp = 2}},
                         {.layout = {.dp = 2, .pp = 2}, .shared = StateSharding::kNothing},
                         {.layout = {.cp = 2, .dp = 2}, .shared = StateSharding::kGradients},
                         {.layout = {.tp = 2}},
                         {.layout = {.tp = 2}, .share_prompts = true},
                         {.layout = {.tp = 2, .pp = 2}},
                         {.layout = {.tp = 2, .cp = 2}},
                         {.layout = {.tp = 2, .dp = 2}, .shared = StateSharding::kGradients}},
                        ModelFamily::kQwen3);
}

TEST(SplitCritic, ItMayHaveAnotherLayoutThanTheActorOnTheSameRanks) {
  expect_as_of_one_rank({{.layout = {.dp = 2}, .actor = Layout{.tp = 2}},
                         {.layout = {.pp = 2}, .actor = Layout{.dp = 2}},
                         {.layout = {.tp = 2}, .actor = Layout{.pp = 2}},
                         {.layout = {.tp = 2, .dp = 2}, .actor = Layout{.cp = 2, .pp = 2}},
                         {.layout = {.cp = 2, .pp = 2}, .actor = Layout{.tp = 2, .dp = 2}}},
                        ModelFamily::kQwen3);
}

TEST(SplitCritic, SharedWeightsAndSplitExpertsChangeNoBitOfAValue) {
  for (const int64_t tp : {1, 2}) {
    const SplitOutcome alone = train_split({.layout = {.tp = tp}}, 24, 1);
    const SplitCase shared{.layout = {.tp = tp, .cp = 3 - tp, .dp = 2}, .shared = StateSharding::kWeights};
    const SplitOutcome outcome = train_split(shared, 24, 1);
    expect_values(outcome.samples, alone.samples, /*bits=*/true, shared.name());
    expect_outcome(outcome, alone, shared.name());
  }
  expect_as_of_one_rank({{.layout = {.ep = 2, .dp = 2}, .family = ModelFamily::kQwen3Moe},
                         {.layout = {.ep = 2, .dp = 2, .pp = 2}, .family = ModelFamily::kQwen3Moe}},
                        ModelFamily::kQwen3Moe);
}

TEST(SplitCritic, AValueThatIsNotFiniteIsNamedByAllWhoHaveIt) {
  for (const Layout& layout : {Layout{.tp = 2}, Layout{.cp = 2}}) {
    test::on_layout(layout, [&](ParallelContext& context) {
      SplitCritic critic({.layout = layout}, context);
      const Config config = split_settings(false, 24);
      CriticTrainer trainer(config, *critic.model, *critic.optimizer, *critic.ranks);
      critic.model->find("score.weight")->tensor.detach().fill_(std::numeric_limits<float>::quiet_NaN());
      std::vector<Sample> samples = rollout_with_a_long_one();
      const std::string error = test::error_of([&] { trainer.fill_values(samples); });
      EXPECT_MENTIONS(error, "the critic's value before token 0 of the response of sample");
      EXPECT_FALSE(trainer.values_alone());
    });
  }
}

// As rewards of tokens with a KL ask for them.
TEST(TokenPasses, LogProbsOfASplitModelHaveTheBitsOfItsTensorRanks) {
  const Config config = split_settings(/*share_prompts=*/true, 24);
  std::map<int64_t, std::vector<Sample>> wanted;
  for (const Layout& layout : {Layout{}, Layout{.pp = 2}, Layout{.cp = 2, .dp = 2}, Layout{.tp = 2},
                               Layout{.tp = 2, .pp = 2}, Layout{.tp = 2, .dp = 2}}) {
    std::vector<Sample> filled;
    test::on_layout(layout, [&](ParallelContext& context) {
      const ModelConfig shape = split_shape(ModelFamily::kQwen3);
      ModelOptions options;
      options.trainable = false;
      set_split(options, shape.shape(), context);
      Model model(shape, options);
      init_parameters(model, 5);
      std::vector<Sample> samples = rollout_with_a_long_one();
      samples[7].reference_logprobs.assign(samples[7].response.size(), -1);  // has them
      fill_token_numbers(samples, &Sample::reference_logprobs, model, logprob_micro_batches(config), context,
                         [&](const at::Tensor& hidden, const MicroBatch& batch) {
                           return response_logprobs(model, hidden, batch, {});
                         },
                         {});
      if (context.rank() + 1 == context.world_size()) filled = std::move(samples);
    });
    const std::vector<Sample>& of_tensor_ranks = wanted.emplace(layout.tp, filled).first->second;
    ASSERT_EQ(filled.size(), 24U);
    for (size_t i = 0; i < filled.size(); ++i) {
      const std::vector<float>&a = filled[i].reference_logprobs, &b = of_tensor_ranks[i].reference_logprobs;
      ASSERT_EQ(a.size(), filled[i].response.size()) << to_string(layout);
      EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << to_string(layout) << " " << i;
      for (size_t t = 0; t < a.size(); ++t) EXPECT_NEAR(a[t], wanted.at(1)[i].reference_logprobs[t], 1e-4);
    }
  }
}

// An actor with its checkpoints, in which a critic is too.
struct ActorWithCritic {
  ActorWithCritic(const SplitCase& one, ParallelContext& context, const std::filesystem::path& dir)
      : critic(one, context) {
    const ModelConfig shape = split_shape(ModelFamily::kQwen3);
    ModelOptions options;
    set_split(options, shape.shape(), context);
    policy = std::make_unique<Model>(shape, options);
    init_parameters(*policy, 5);
    optimizer = std::make_unique<DistributedAdamW>(*policy, context.data_parallel(), AdamWOptions{});
    CheckpointOptions checkpoint;
    checkpoint.directory = dir;
    manager = std::make_unique<CheckpointManager>(checkpoint, nlohmann::json{{"model", 1}}, context);
    manager->add("value", *critic.model, *critic.optimizer, {}, critic.ranks);
  }
  SplitCritic critic;
  std::unique_ptr<Model> policy;
  std::unique_ptr<DistributedAdamW> optimizer;
  std::unique_ptr<CheckpointManager> manager;
};

TEST(SplitCritic, ACheckpointOfOneLayoutIsReadInAnother) {
  const TemporaryDirectory dir, own;
  const SplitCase saved{.layout = {.tp = 2, .dp = 2}, .actor = Layout{.dp = 2, .pp = 2}};
  test::on_layout(*saved.actor, [&](ParallelContext& context) {
    ActorWithCritic both(saved, context, dir.path());
    const Config config = split_settings(false, 24);
    CriticTrainer trainer(config, *both.critic.model, *both.critic.optimizer, *both.critic.ranks);
    std::vector<Sample> samples = rollout_with_a_long_one();
    trainer.fill_values(samples);
    for (Sample& s : samples) s.returns.assign(s.response.size(), s.raw_reward - 1);
    (void)trainer.train(samples, 1);
    both.critic.optimizer->save(own.path());
    both.manager->save(1, *both.policy, *both.optimizer, {{"a", 1}}, {}, "b: 2\n");
    context.world().barrier();
  });
  const ModelConfig shape = split_shape(ModelFamily::kQwen3).with_value_head();
  const WholeState wanted = test::whole_state(own.path(), shape);
  const auto from_files = load_value_model(dir.path() / "step_1/value/weights", {});
  for (const auto& [name, tensor] : wanted.weights)
    EXPECT_TRUE(at::equal(from_files->find(name)->tensor.detach(), tensor)) << name;
  for (const SplitCase& loaded : {SplitCase{.layout = {}}, SplitCase{.layout = {.pp = 2}},
                                  SplitCase{.layout = {.cp = 2}, .actor = Layout{.tp = 2}}}) {
    const TemporaryDirectory again;
    test::on_layout(loaded.actor.value_or(loaded.layout), [&](ParallelContext& context) {
      ActorWithCritic both(loaded, context, dir.path());
      init_parameters(*both.critic.model, 77);
      ASSERT_TRUE(both.manager->load_latest(*both.policy, *both.optimizer));
      both.critic.optimizer->save(again.path());
      for (const Parameter& parameter : both.critic.model->parameters()) {
        const ParameterSlice& slice = parameter.slice;
        EXPECT_TRUE(
            at::equal(parameter.tensor.detach(),
                      wanted.weights.at(parameter.name).narrow(slice.dimension, slice.range.begin, slice.range.size())))
            << loaded.name() << ": " << parameter.name;
      }
      context.world().barrier();
    });
    const WholeState state = test::whole_state(again.path(), shape);
    for (const auto& [name, tensor] : wanted.moments)
      EXPECT_TRUE(at::equal(state.moments.at(name), tensor)) << loaded.name() << ": " << name;
  }
}

TEST(SplitCritic, ACausalFolderGivesEachRankItsPartUnderAHeadOfZeros) {
  const TemporaryDirectory dir;
  Model causal(split_shape(ModelFamily::kQwen3), {});
  init_parameters(causal, 5);
  save_model(causal, dir.path(), {});
  for (const Layout& layout : {Layout{.tp = 2}, Layout{.pp = 2}}) {
    test::on_layout(layout, [&](ParallelContext& context) {
      ModelOptions options;
      set_split(options, causal.config().with_value_head().shape(), context);
      const auto critic = load_value_model(dir.path(), options);
      for (const Parameter& parameter : critic->parameters()) {
        const at::Tensor own = parameter.tensor.detach();
        if (parameter.name == "score.weight") {
          EXPECT_EQ(own.abs().max().item<float>(), 0);
          continue;
        }
        const ParameterSlice& slice = parameter.slice;
        const at::Tensor whole = causal.find(parameter.name)->tensor.detach();
        EXPECT_TRUE(at::equal(own, whole.narrow(slice.dimension, slice.range.begin, slice.range.size())))
            << to_string(layout) << ": " << parameter.name;
      }
      EXPECT_EQ(critic->find("score.weight") != nullptr, critic->split().last_stage());
    });
  }
}

TEST(SplitCritic, ItsLayoutIsThatOfItsSizes) {
  const auto of = [](std::vector<std::string> overrides, int64_t ranks) {
    overrides.insert(
        overrides.begin(),
        {"algorithm=ppo", "cluster.gpus_per_node=4", "cluster.device=cpu", "policy.megatron_cfg.enabled=true",
         "policy.megatron_cfg.tensor_model_parallel_size=4", "value.megatron_cfg.enabled=true"});
    return critic_layout(load_config_text("", overrides), ranks);
  };
  EXPECT_EQ(of({}, 4), (Layout{.dp = 4}));
  EXPECT_EQ(of({"value.megatron_cfg.pipeline_model_parallel_size=2"}, 4), (Layout{.dp = 2, .pp = 2}));
  EXPECT_EQ(test::error_of([&] { of({"value.megatron_cfg.tensor_model_parallel_size=2"}, 3); }),
            "the critic's 3 ranks cannot be divided by the 2 of its tensor x pipeline x context parallel size "
            "(value.megatron_cfg, value.dtensor_cfg, or an RLJob's spec.roles.critic.parallelism)");
  // Of an RLJob's sizes, whatever dp they say.
  EXPECT_EQ(critic_layout(Layout{.tp = 2, .dp = 7, .pp = 2}, 8), (Layout{.tp = 2, .dp = 2, .pp = 2}));
}

}  // namespace
}  // namespace trireme
