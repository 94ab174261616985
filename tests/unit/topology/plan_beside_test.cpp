// What is beside the policy or under its generation, a critic, a reward model, passes in a part of the device: memory
// and time against arithmetic by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "tests/unit/errors.h"
#include "tests/unit/topology/planned.h"
#include "topology/plan.h"

namespace trireme {
namespace {

using test::devices_of;
using test::kGiB;
using test::shape_of_eight_layers;
using test::small_work;

// Attention 256 x (256 + 2 x 128) and 256 x 256, MLP 3 x 256 x 512, two norms; embedding, final norm, one row of a
// head.
constexpr int64_t kLayer = 256 * 512 + 256 * 256 + 3 * 256 * 512 + 2 * 256;
constexpr int64_t kValueModel = 8 * kLayer + 1000 * 256 + 256 + 256;

PlannedModel value_model(int64_t layers = 8) {
  PlannedModel model{shape_of_eight_layers(), small_work(), {}};
  model.shape.layers = layers;
  model.shape.value_head = true;
  return model;
}

TEST(PlanBeside, StateOfTheOthersIsThereInBothPhases) {
  const PlannedBeside beside{value_model(), value_model()};
  const LayoutPlan plan =
      plan_layout(shape_of_eight_layers(), {.dp = 2}, small_work(), {}, devices_of(80 * kGiB), beside);
  const LayoutPlan alone = plan_layout(shape_of_eight_layers(), {.dp = 2}, small_work(), {}, devices_of(80 * kGiB));
  // bfloat16 weights, float32 gradients, their sum over two ranks and the optimizer state of half of them.
  const int64_t critic = 2 * kValueModel + 4 * kValueModel + (4 + 12) * kValueModel / 2;
  for (const MemoryParts& phase : {plan.memory.training, plan.memory.generation}) {
    EXPECT_EQ(phase.critic, critic);
    EXPECT_EQ(phase.reward_model, 2 * kValueModel);
  }
  EXPECT_EQ(plan.memory.training.total(), alone.memory.training.total() + critic + 2 * kValueModel);
  EXPECT_EQ(alone.memory.critic_turn, 0);
  EXPECT_EQ(plan.least_memory, alone.least_memory + critic + 2 * kValueModel);
}

TEST(PlanBeside, UnevenStagesOfACriticAreRefusedByTheirKeys) {
  PlannedBeside beside{value_model(), std::nullopt};
  beside.critic->layout.pp = 2;
  beside.critic->options.stages.first_layers = 9;
  beside.critic->options.stage_section = "value.megatron_cfg.";
  const LayoutPlan plan =
      plan_layout(shape_of_eight_layers(), {.dp = 2}, small_work(), {}, devices_of(80 * kGiB), beside);
  EXPECT_MENTIONS(plan.problems.front(),
                  "the critic cannot be split so: value.megatron_cfg.num_layers_in_first_pipeline_stage 9 is no");
}

TEST(PlanBeside, ShardedCriticsKeepTheirSlices) {
  PlannedBeside beside{value_model(), std::nullopt};
  for (const auto& [sharding, bytes] : std::vector<std::pair<StateSharding, int64_t>>{
           {StateSharding::kNothing, (2 + 4 + 4 + 12) * kValueModel},
           {StateSharding::kOptimizer, (2 + 4) * kValueModel + (4 + 12) * kValueModel / 4},
           {StateSharding::kGradients, 2 * kValueModel + (4 + 12) * kValueModel / 4},
           {StateSharding::kWeights, (2 + 4 + 12) * kValueModel / 4}}) {
    beside.critic->options.sharding = sharding;
    const LayoutPlan plan =
        plan_layout(shape_of_eight_layers(), {.dp = 4}, small_work(), {}, devices_of(80 * kGiB), beside);
    EXPECT_EQ(plan.memory.training.critic, bytes);
  }
}

// Of a critic over two tensor ranks: matrices and embedding (1,000 rows padded to 1,008) by halves, norms and head
// whole.
TEST(PlanBeside, ACriticIsCountedByItsLayout) {
  constexpr int64_t kMatrices = kLayer - 2 * 256, kOthers = 2 * 256;
  constexpr int64_t kHalf = 8 * (kMatrices / 2 + kOthers) + 504 * 256 + 256 + 256;
  PlannedBeside beside{value_model(), std::nullopt};
  beside.critic->layout.tp = 2;
  const auto plan_of = [&](const Layout& policy) {
    return plan_layout(shape_of_eight_layers(), policy, small_work(), {}, devices_of(80 * kGiB), beside);
  };
  for (const Layout& policy : {Layout{.dp = 4}, Layout{.tp = 2, .dp = 2}, Layout{.cp = 2, .pp = 2}}) {
    const LayoutPlan plan = plan_of(policy);
    EXPECT_TRUE(plan.fits());
    EXPECT_EQ(plan.memory.training.critic, 2 * kHalf + 4 * kHalf + (4 + 12) * kHalf / 2) << to_string(policy);
  }
  // Its ranks exchange rows in passes, and half of a pass is a rank's.
  PlannedBeside whole = beside;
  whole.critic->layout.tp = 1;
  const PlannedTime split = plan_of({.dp = 4}).time;
  const PlannedTime replicas =
      plan_layout(shape_of_eight_layers(), {.dp = 4}, small_work(), {}, devices_of(80 * kGiB), whole).time;
  EXPECT_EQ(replicas.pass_exchanges, 0);
  EXPECT_GT(split.pass_exchanges, 0);
  EXPECT_GT(split.values, 0);
  // Stages wait for each other.
  beside.critic->layout = {.pp = 2};
  EXPECT_GT(plan_of({.dp = 4}).time.bubble, 0);
  // More ranks than key heads.
  beside.critic->layout = {.tp = 8};
  const LayoutPlan wrong = plan_of({.dp = 8});
  ASSERT_FALSE(wrong.fits());
  EXPECT_EQ(wrong.problems.front().find("the critic cannot be split so: tp 8"), 0U) << wrong.problems.front();
  EXPECT_EQ(wrong.memory.training.critic, 0);
}

// Nothing of the policy is there, and nothing of it waits.
TEST(PlanBeside, ACriticOnRanksOfItsOwnHasTheDeviceToItself) {
  const PlanDevices devices = devices_of(80 * kGiB);
  PlannedModel critic = value_model();
  critic.work.generates = true;  // whatever it says
  const LayoutPlan plan = plan_critic(critic, {.dp = 3}, devices);
  EXPECT_TRUE(plan.fits());
  EXPECT_EQ(plan.layout, Layout{.dp = 3});
  EXPECT_EQ(plan.memory.training.weights, 2 * kValueModel);
  EXPECT_EQ(plan.memory.training.critic, 0);
  EXPECT_EQ(plan.memory.generation.cache, 0);
  EXPECT_EQ(plan.memory.training.reference, 0);
  const PlannedBeside beside{value_model(), std::nullopt};
  const LayoutPlan shared = plan_layout(shape_of_eight_layers(), {.dp = 3}, small_work(), {}, devices, beside);
  EXPECT_LT(plan.least_memory, shared.least_memory);
  EXPECT_EQ(plan.time.values, shared.time.values);
  EXPECT_EQ(plan.time.value_training, shared.time.value_training);
  EXPECT_NEAR(plan.time.step(), plan.time.values + plan.time.value_training + plan.time.bubble + plan.time.exchanges(),
              1e-12);
  EXPECT_FALSE(plan_critic(value_model(400), {}, devices_of(kGiB)).fits());
}

// One model whose only difference is the head: 999 columns of logits less.
TEST(PlanBeside, TimeIsThatOfTheSamePassesWithoutAVocabulary) {
  const PlanDevices devices = devices_of(80 * kGiB);
  const Workload work = small_work();
  const PlannedBeside beside{value_model(), value_model()};
  const PlannedTime alone = plan_layout(shape_of_eight_layers(), {}, work, {}, devices).time;
  const PlannedTime time = plan_layout(shape_of_eight_layers(), {}, work, {}, devices, beside).time;
  const auto scored = static_cast<double>(std::accumulate(work.outputs.begin(), work.outputs.end(), int64_t{0}));
  const double head = 2 * 256 * 999 * scored / devices.rates.products;
  EXPECT_NEAR((time.reference - time.values) / head, 1, 1e-9);
  EXPECT_EQ(time.scores, time.values);
  // Master copy and moments read and written, the gradient read, the weight written, for 999 rows less, twice a step.
  const double rows = 999 * 256, update = 2 * rows * (28 + 2 + 4) / devices.rates.copy;
  EXPECT_NEAR((time.training + time.optimizer - time.value_training) / (3 * head + update), 1, 1e-9);
  EXPECT_EQ(time.training, alone.training);
  EXPECT_NEAR(time.step() - alone.step(), time.values + time.scores + time.value_training, 1e-12);
  EXPECT_GT(plan_layout(shape_of_eight_layers(), {.dp = 2}, work, {}, devices, beside).time.gradient_exchanges,
            1.9 * plan_layout(shape_of_eight_layers(), {.dp = 2}, work, {}, devices).time.gradient_exchanges);
}

TEST(PlanBeside, TheCriticsTurnCountsWhereItIsTheFullest) {
  const PlanDevices devices = devices_of(80 * kGiB);
  PlannedBeside beside{value_model(40), value_model()};
  beside.critic->work.train_tokens = 65536;
  beside.critic->work.longest = 65536;
  PlanOptions options;
  options.cache_rows = 1000;
  const PlannedMemory memory = plan_layout(shape_of_eight_layers(), {}, small_work(), options, devices, beside).memory;
  // By itself, and what of the policy stays.
  Workload of_critic = beside.critic->work;
  of_critic.generates = of_critic.reference = false;
  const MemoryParts critic = plan_layout(beside.critic->shape, {}, of_critic, {}, devices).memory.training;
  const MemoryParts& policy = memory.training;
  EXPECT_EQ(memory.critic_turn, critic.total() + policy.weights + policy.reference + policy.gradients +
                                    policy.optimizer + 2 * kValueModel + memory.generation.cache);
  EXPECT_EQ(memory.peak(), memory.critic_turn);
}

TEST(PlanBeside, TheLeastMemoryIsTheFirstThatFits) {
  for (const int64_t layers : {2, 8, 40}) {
    const PlannedBeside beside{value_model(layers), value_model()};
    for (const bool recompute : {true, false}) {
      PlanOptions options;
      options.fit_recompute = recompute;
      const auto plan_of = [&](int64_t bytes) {
        return plan_layout(shape_of_eight_layers(), {.dp = 4}, small_work(), options, devices_of(bytes), beside);
      };
      const int64_t least = plan_of(kGiB).least_memory;
      EXPECT_TRUE(plan_of(least).fits());
      EXPECT_FALSE(plan_of(least - 1).fits());
      EXPECT_EQ(plan_of(least - 1).least_memory, least);
      EXPECT_LE(plan_of(least).memory.peak() + devices_of(0).rates.outside_bytes, least);
    }
  }
}

// Of 132 processors 33 work beside the last 32 samples: a quarter of the time that these then take.
TEST(PlanUnderGeneration, AsMuchIsDoneAsThePartsProcessorsDo) {
  const PlanDevices devices = devices_of(80 * kGiB);
  Workload work = small_work();
  work.places = 64;  // 8 samples: all of decode is shared
  work.background_processors = 33;
  PlannedTime time = plan_layout(shape_of_eight_layers(), {}, work, {}, devices).time;
  EXPECT_EQ(time.shared, time.decode);
  ASSERT_GT(time.decode / 3, time.reference);
  EXPECT_EQ(time.reference_under, time.reference);  // all of it
  EXPECT_EQ(time.training_under, 0);
  work.outputs.assign(2, 3);  // two steps of decode beside as much again of prompts
  work.prompts = {4000, 4000};
  work.longest = 4096;
  time = plan_layout(shape_of_eight_layers(), {}, work, {}, devices).time;
  ASSERT_LT(time.decode / 3, time.reference);
  EXPECT_NEAR(time.reference_under / (time.decode / 3), 1, 1e-9);
  // The sum of a step is what it is without.
  work.background_processors = 0;
  const PlannedTime after = plan_layout(shape_of_eight_layers(), {}, work, {}, devices).time;
  EXPECT_EQ(after.reference_under, 0);
  EXPECT_EQ(time.step(), after.step());
  // More than half of a device is never given away.
  work.background_processors = 132;
  time = plan_layout(shape_of_eight_layers(), {}, work, {}, devices).time;
  EXPECT_NEAR(std::min(time.decode, time.reference) / time.reference_under, 1, 1e-9);
}

// A sample gets the numbers of all models before the next one gets any.
TEST(PlanUnderGeneration, ValuesAndScoresShareThePartWithTheReferences) {
  const PlanDevices devices = devices_of(80 * kGiB);
  PlannedBeside beside{value_model(), value_model()};
  Workload work = small_work();
  work.places = 64;
  work.background_processors = 33;
  const auto time_of = [&](const Layout& layout) {
    return plan_layout(shape_of_eight_layers(), layout, work, {}, devices, beside).time;
  };
  const PlannedTime all = time_of({});
  ASSERT_GT(all.decode / 3, all.reference + all.values + all.scores);
  EXPECT_EQ(all.reference_under, all.reference);
  EXPECT_EQ(all.values_under, all.values);
  EXPECT_EQ(all.scores_under, all.scores);
  work.outputs.assign(2, 3);
  work.prompts = {4000, 4000};
  work.longest = 4096;
  const PlannedTime some = time_of({});
  ASSERT_LT(some.decode / 3, some.reference);
  EXPECT_NEAR((some.reference_under + some.values_under + some.scores_under) / (some.decode / 3), 1, 1e-9);
  EXPECT_NEAR(some.values_under / some.values / (some.reference_under / some.reference), 1, 1e-9);
  EXPECT_NEAR(some.scores_under / some.scores / (some.reference_under / some.reference), 1, 1e-9);
  // The values of a critic that ranks share follow generation, the scores need nobody.
  beside.critic->options.sharding = StateSharding::kWeights;
  EXPECT_EQ(time_of({.dp = 2}).values_under, 0);
  EXPECT_GT(time_of({.dp = 2}).scores_under, 0);
  beside.critic->options.sharding = StateSharding::kOptimizer;
  beside.critic->layout.tp = 2;
  EXPECT_EQ(time_of({.dp = 2}).values_under, 0);
  beside.critic->layout.tp = 1;
  EXPECT_GT(time_of({.dp = 2}).values_under, 0);
  // Nothing is left of the device where free places are filled.
  work.age = 1;
  const PlannedTime filled = time_of({});
  EXPECT_EQ(filled.reference_under + filled.values_under + filled.scores_under, 0);
}

TEST(PlanUnderGeneration, GradientsAreOfTheFirstStepBehindTheReferences) {
  const PlanDevices devices = devices_of(80 * kGiB);
  Workload work = small_work();
  work.places = 64;
  work.background_processors = 33;
  work.early_gradients = true;
  const PlannedTime time = plan_layout(shape_of_eight_layers(), {}, work, {}, devices).time;
  EXPECT_EQ(time.reference_under, time.reference);
  const double left = time.decode / 3 - time.reference;
  EXPECT_NEAR(time.training_under / std::min(left, time.training / 2), 1, 1e-9);
  // Ranks that share a model, its weights or its gradients have nobody beside them.
  PlanOptions shared;
  shared.sharding = StateSharding::kGradients;
  EXPECT_EQ(plan_layout(shape_of_eight_layers(), {.dp = 2}, work, shared, devices).time.training_under, 0);
  EXPECT_GT(plan_layout(shape_of_eight_layers(), {.dp = 2}, work, shared, devices).time.reference_under, 0);
  shared.sharding = StateSharding::kWeights;
  EXPECT_EQ(plan_layout(shape_of_eight_layers(), {.dp = 2}, work, shared, devices).time.reference_under, 0);
  EXPECT_EQ(plan_layout(shape_of_eight_layers(), {.tp = 2}, work, {}, devices).time.reference_under, 0);
  EXPECT_EQ(plan_layout(shape_of_eight_layers(), {.dp = 2}, work, {.generation_tp = 2}, devices).time.reference_under,
            0);
}

TEST(PlanUnderGeneration, EarlyGradientsHaveTheirActivationsBesideTheCache) {
  Workload work = small_work();
  work.background_processors = 33;
  PlanOptions options;
  options.cache_rows = 100000;
  const PlanDevices devices = devices_of(80 * kGiB);
  EXPECT_EQ(plan_layout(shape_of_eight_layers(), {}, work, options, devices).memory.early, 0);
  work.early_gradients = true;
  const PlannedMemory memory = plan_layout(shape_of_eight_layers(), {}, work, options, devices).memory;
  // A layer's 6,688 bytes a token (4 x 256, q, k, v and attention's result 768, MLP 3 x 512; 8 log-sums), 4,096 tokens.
  const MemoryParts& m = memory.generation;
  const int64_t state = m.weights + m.reference + m.gradients + m.optimizer + m.cache;
  const int64_t layers = 8 * 4096 * (2 * (4 * 256 + 768 + 3 * 512) + 4 * 8);
  const int64_t ending = 4096 * 2 * 4 * 256 + 3 * (int64_t{512} << 20);  // at the head
  EXPECT_EQ(memory.early, state + layers + ending);
  for (const double fraction : {0.8, 0.05, 1.0}) {
    options.cache_rows = 0;
    options.cache_fraction = fraction;
    const auto plan_of = [&](int64_t bytes) {
      return plan_layout(shape_of_eight_layers(), {}, work, options, devices_of(bytes));
    };
    const int64_t least = plan_of(kGiB).least_memory;
    EXPECT_TRUE(plan_of(least).fits());
    EXPECT_FALSE(plan_of(least - 1).fits());
    EXPECT_LE(plan_of(least).memory.peak() + devices_of(0).rates.outside_bytes, least);
  }
}

}  // namespace
}  // namespace trireme
