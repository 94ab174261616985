// Steps that overlap, and engines: what a plan says against time lines drawn by hand. A decode step takes a second
// whatever is alive, passes take none, and the only rank's optimizer 34 bytes a parameter, the copy of new weights 4.
#include <gtest/gtest.h>

#include "tests/unit/topology/planned.h"
#include "topology/plan.h"

namespace trireme {
namespace {

using test::devices_of;
using test::kGiB;
using test::shape_of_eight_layers;
using test::small_work;

// Attention 256 x (256 + 2 x 128) and 256 x 256, MLP 3 x 256 x 512; with two norms a layer, embedding, head, final
// norm.
constexpr int64_t kProducts = 256 * 512 + 256 * 256 + 3 * 256 * 512;
constexpr int64_t kModel = 8 * (kProducts + 2 * 256) + 2 * 1000 * 256 + 256;
// Of two tensor ranks each: products and tables in halves, the latter of 1,008 rows, so that 16 divide them; norms
// whole.
constexpr int64_t kHalf = 8 * (kProducts / 2 + 2 * 256) + 2 * 504 * 256 + 256;

// A response of four tokens and one of two, for one prompt of a token.
Workload two_responses() {
  Workload work;
  work.prompts = {1};
  work.outputs = {4, 2};
  work.longest = 8;
  work.train_tokens = work.logprob_tokens = 64;
  work.places = 2;
  return work;
}

// `byte_s`: of a byte that the device copies; `transfer_s`: of all weights to an engine.
PlanDevices one_second_a_step(double byte_s = 0, double transfer_s = 0) {
  PlanDevices devices = devices_of(80 * kGiB);
  DeviceRates& rates = devices.rates;
  rates.decode_read = rates.products = rates.attention = 1e30;
  rates.decode_layer_s = 1.0 / 8;
  rates.decode_sample_s = rates.moves = 0;
  rates.copy = byte_s > 0 ? 1 / byte_s : 1e30;
  const double rate = transfer_s > 0 ? 2.0 * kModel / transfer_s : 1e30;
  rates.in_node = {.latency_s = 0, .first_bytes = 0, .first_rate = rate, .further_rate = rate};
  rates.between_nodes = rates.in_node;
  return devices;
}

LayoutPlan plan_of(const Workload& work, const PlanDevices& devices, const Layout& layout = {}) {
  return plan_layout(shape_of_eight_layers(), layout, work, {}, devices);
}

// Two places. Step 1: 0 to 4, the short one ends at 2, the next step's long one begins; step 2: 4 to 6, with its short
// one. Then as at the beginning: four and two seconds by turns. Of every second step older weights drew one response of
// two.
TEST(PlanCarryOver, FreePlacesAreFilled) {
  Workload work = two_responses();
  EXPECT_NEAR(plan_of(work, one_second_a_step()).time.decode, 4, 1e-9);
  work.age = 1;
  const PlannedTime time = plan_of(work, one_second_a_step()).time;
  EXPECT_NEAR(time.decode, 3, 1e-9);
  EXPECT_NEAR(time.older, 0.25, 1e-12);
  EXPECT_NEAR(time.tail, 3, 1e-9);
  EXPECT_EQ(time.shared, 0);
}

// A replica of several ranks has one rank's places: which responses older weights draw follows from its decode steps.
TEST(PlanCarryOver, AReplicaOfSeveralRanksIsFilledLikeOneRank) {
  for (const Layout& layout : {Layout{.tp = 2}, Layout{.pp = 2}}) {
    Workload work = two_responses();
    const double in_step = plan_of(work, one_second_a_step(), layout).time.decode;
    work.age = 1;
    const PlannedTime time = plan_of(work, one_second_a_step(), layout).time;
    EXPECT_GT(time.decode, 0);
    EXPECT_LT(time.decode, in_step) << to_string(layout);
    EXPECT_NEAR(time.older, 0.25, 1e-12) << to_string(layout);
  }
}

// With an age of 1 a response of 40 tokens has two steps' time, with any number of places.
TEST(PlanCarryOver, TheLongestResponseHasAsManyStepsAsItsAgeAllows) {
  Workload work = two_responses();
  work.longest = 64;
  work.outputs = {40, 2};
  work.places = 64;
  for (const int64_t age : {1, 3}) {
    work.age = age;
    const double decode = plan_of(work, one_second_a_step()).time.decode;
    EXPECT_GE(decode, 40.0 / static_cast<double>(age + 1) - 1e-9);
    EXPECT_LT(decode, 40);
  }
}

// In every second step the long response goes on: its prompt and two tokens are computed again.
TEST(PlanCarryOver, KeysOfWhatGoesOnAreComputedAgain) {
  PlanDevices devices = one_second_a_step();
  devices.rates.products = 1e9;
  const double token_s = 2.0 * 8 * kProducts / 1e9, head_s = 2.0 * 256 * 1000 / 1e9;
  Workload work = two_responses();
  work.age = 1;
  const PlannedTime again = plan_of(work, devices).time;
  EXPECT_NEAR(again.again / (3 * token_s / 2), 1, 1e-9);
  EXPECT_NEAR(again.prefill / token_s, 1, 1e-9);
  EXPECT_EQ(again.previous, 0);
  work.recomputes_keys = false;
  EXPECT_EQ(plan_of(work, devices).time.again, 0);
  // Of the six rows of a step a quarter goes through the policy once more.
  work.previous_pass = true;
  const PlannedTime previous = plan_of(work, devices).time;
  EXPECT_NEAR(previous.previous / (1.5 * (token_s + head_s)), 1, 1e-9);
  EXPECT_NEAR(previous.step(),
              previous.prefill + previous.decode + previous.previous + previous.training + previous.optimizer, 1e-12);
}

TEST(PlanEngines, InTurnAStepIsTheSum) {
  Workload work = two_responses();
  work.engines = 1;
  // Training 3.4 s, the weights' way 1 s, their copy 0.4 s, a rollout 4 s.
  const LayoutPlan plan = plan_of(work, one_second_a_step(0.1 / kModel, 1));
  ASSERT_TRUE(plan.fits());
  ASSERT_TRUE(plan.engines);
  EXPECT_NEAR(plan.time.optimizer, 3.4, 1e-9);
  EXPECT_NEAR(plan.engines->transfer, 1, 1e-9);
  EXPECT_NEAR(plan.engines->stall, 0.4, 1e-9);
  EXPECT_NEAR(plan.engines->generation(), 4.4, 1e-9);
  EXPECT_NEAR(plan.time.idle, 5.4, 1e-9);
  EXPECT_NEAR(plan.time.step(), 8.8, 1e-9);
  EXPECT_EQ(plan.time.prefill + plan.time.decode, 0);  // the ranks generate nothing
  EXPECT_EQ(plan.time.older, 0);
  // Two engines take a response each, the longer one of four tokens.
  work.engines = 2;
  EXPECT_NEAR(plan_of(work, one_second_a_step(0.1 / kModel, 1)).engines->decode, 4, 1e-9);
  work.outputs = {2, 2};
  work.places = 1;
  EXPECT_NEAR(plan_of(work, one_second_a_step(0.1 / kModel, 1)).engines->decode, 2, 1e-9);
  work.engines = 1;
  EXPECT_NEAR(plan_of(work, one_second_a_step(0.1 / kModel, 1)).engines->decode, 4, 1e-9);
}

// One rank sends to all engines, or each to one of its own.
TEST(PlanEngines, ARankSendsToAllOfItsEnginesAtOnce) {
  Workload work = two_responses();
  const auto transfer = [&](int64_t engines, int64_t ranks) {
    work.engines = engines;
    return plan_of(work, one_second_a_step(0, 1), {.dp = ranks}).engines->transfer;
  };
  EXPECT_NEAR(transfer(3, 1), 3, 1e-9);
  EXPECT_NEAR(transfer(3, 2), 2, 1e-9);
  EXPECT_NEAR(transfer(3, 4), 1, 1e-9);
  work.engines = 1;
  work.engines_near = false;
  PlanDevices devices = one_second_a_step(0, 1);
  devices.rates.between_nodes.further_rate /= 5;
  EXPECT_NEAR(plan_of(work, devices).engines->transfer, 5, 1e-9);
}

// The ranks of a copy send a part each, at the same time to different engines; an engine takes one after the other.
TEST(PlanEngines, RanksThatShareAPolicySendTheirPartsOfIt) {
  Workload work = two_responses();
  const auto transfer = [&](int64_t engines, const Layout& layout) {
    work.engines = engines;
    return plan_of(work, one_second_a_step(0, 1), layout).engines->transfer;
  };
  EXPECT_NEAR(transfer(1, {.pp = 2}), 1, 1e-9);
  EXPECT_NEAR(transfer(2, {.pp = 2}), 1, 1e-9);
  EXPECT_NEAR(transfer(4, {.pp = 2}), 2, 1e-9);
  EXPECT_NEAR(transfer(4, {.dp = 2, .pp = 2}), 1, 1e-9);
  EXPECT_NEAR(transfer(4, {.tp = 4}), 1, 1e-9);
}

TEST(PlanEngines, OfTensorRanksAllSamplesHaveAPass) {
  Workload work = small_work();
  work.engines = 1;
  const auto time_of = [&](const Layout& layout) { return plan_of(work, devices_of(80 * kGiB), layout).time; };
  EXPECT_EQ(time_of({.dp = 2}).previous, 0);
  EXPECT_EQ(time_of({.pp = 2}).previous, 0);
  const PlannedTime split = time_of({.tp = 2});
  EXPECT_NEAR(split.previous, split.reference, 1e-12);  // the same pass, by another model
  EXPECT_GT(split.previous, 0);
  EXPECT_EQ(split.older, 0);
}

// Of engines of two ranks, that exchange nothing but by messages of 10 ms.
LayoutPlan plan_of_pairs(Workload work, PlanDevices devices, const Layout& layout = {},
                         const PlanOptions& options = {}) {
  work.engine = {.tp = 2};
  devices.rates.decode_in_node = {.latency_s = 0.01, .first_bytes = 0, .first_rate = 1e30, .further_rate = 1e30};
  return plan_layout(shape_of_eight_layers(), layout, work, options, devices);
}

// A decode step has 17 sums (behind attention and MLP of each layer and behind the embedding), the logits of a rank's
// rows and what was drawn of them: 19 messages beside its second.
TEST(PlanEngines, RanksOfAnEngineExchangeWhileTheyDecode) {
  Workload work = two_responses();
  work.engines = 1;
  const LayoutPlan plan = plan_of_pairs(work, one_second_a_step(0.1 / kModel, 0));
  ASSERT_TRUE(plan.fits());
  EXPECT_EQ(plan.engines->count, 1);
  EXPECT_EQ(plan.engines->layout.world(), 2);
  EXPECT_NEAR(plan.engines->decode, 4, 1e-9);
  EXPECT_NEAR(plan.engines->exchanges, 4 * 0.19, 1e-9);
  // New weights stop it for a copy of its half: it reads and writes two bytes of each.
  const double copied = 4.0 * kHalf * 0.1 / kModel;
  EXPECT_NEAR(plan.engines->stall, copied, 1e-9);
  EXPECT_NEAR(plan.engines->generation(), 4.76 + copied, 1e-9);
  EXPECT_NEAR(plan.time.idle, 4.76 + copied, 1e-9);
  EXPECT_NEAR(plan.time.step(), 3.4 + 4.76 + copied, 1e-9);
  EXPECT_EQ(plan.time.decode_exchanges, 0);  // of the ranks that train
  // Engines have no part in each other's steps.
  work.engines = 2;
  work.outputs = {2, 2};
  EXPECT_NEAR(plan_of_pairs(work, one_second_a_step()).engines->exchanges, 2 * 0.19, 1e-9);
}

// Four and two decode steps by turns, as with carry-over: three in the mean, with their messages.
TEST(PlanEngines, InFlightExchangesAreInTheClockToo) {
  Workload work = two_responses();
  work.engines = 1;
  work.age = 1;
  work.in_flight = true;
  const LayoutPlan plan = plan_of_pairs(work, one_second_a_step());
  EXPECT_NEAR(plan.engines->decode, 3, 1e-9);
  EXPECT_NEAR(plan.engines->exchanges, 3 * 0.19, 1e-9);
  EXPECT_NEAR(plan.time.step(), 3 * 1.19, 1e-9);
  work.in_flight = false;
  EXPECT_NEAR(plan_of_pairs(work, one_second_a_step()).time.step(), 4 * 1.19, 1e-9);
}

// Each rank of an engine gets its half, by itself.
TEST(PlanEngines, EveryRankOfAnEngineReadsItsPart) {
  Workload work = two_responses();
  const auto transfer = [&](int64_t engines, const Layout& layout) {
    work.engines = engines;
    return plan_of_pairs(work, one_second_a_step(0, 1), layout).engines->transfer * kModel / kHalf;
  };
  EXPECT_NEAR(transfer(1, {}), 2, 1e-9);                  // one rank sends both halves
  EXPECT_NEAR(transfer(1, {.dp = 2}), 1, 1e-9);           // each its half
  EXPECT_NEAR(transfer(2, {.dp = 2}), 2, 1e-9);           // and two of them
  EXPECT_NEAR(transfer(1, {.tp = 2}), 1, 1e-9);           // in the same halves
  EXPECT_NEAR(transfer(3, {.tp = 2}), 3, 1e-9);           // of three engines
  EXPECT_NEAR(transfer(1, {.tp = 4}), 1, 1e-9);           // a quarter from each of two
  EXPECT_NEAR(transfer(4, {.tp = 2, .pp = 2}), 2, 1e-9);  // eight halves from four ranks
  EXPECT_NEAR(transfer(2, {.tp = 2, .dp = 2}), 1, 1e-9);  // an engine to each copy
  EXPECT_EQ(plan_of_pairs(work, one_second_a_step(), {.tp = 2, .dp = 2, .pp = 2}).engines->sources, 4);
  EXPECT_EQ(plan_of_pairs(work, one_second_a_step(), {.tp = 2, .dp = 2}).engines->sources, 1);  // all from its like
  EXPECT_EQ(plan_of_pairs(work, one_second_a_step(), {.tp = 4}).engines->sources, 4);
}

TEST(PlanEngines, AnEngineIsOnOneNode) {
  Workload work = small_work();
  work.engines = 1;
  PlanDevices devices = devices_of(80 * kGiB);
  devices.engine_node = 2;
  EXPECT_TRUE(plan_of_pairs(work, devices).fits());
  devices.engine_node = 1;
  const LayoutPlan plan = plan_of_pairs(work, devices);
  ASSERT_EQ(plan.problems.size(), 1U);
  EXPECT_EQ(plan.problems.front(),
            "an engine in tp=2,cp=1,ep=1,dp=1,pp=1,etp=1 cannot be: its 2 devices must share a node, which has 1");
}

TEST(PlanEngines, WithAsManyTensorRanksAsTrainingNothingIsComputedAgain) {
  Workload work = small_work();
  work.engines = 1;
  const auto time_of = [&](const Layout& layout) { return plan_of_pairs(work, devices_of(80 * kGiB), layout).time; };
  EXPECT_EQ(time_of({.tp = 2}).previous, 0);
  EXPECT_EQ(time_of({.tp = 2, .dp = 2, .pp = 2}).previous, 0);
  for (const Layout& other : {Layout{}, Layout{.tp = 4}, Layout{.pp = 2}}) {
    const PlannedTime time = time_of(other);
    EXPECT_GT(time.previous, 0) << to_string(other);
    EXPECT_NEAR(time.previous, time.reference, 1e-12);
  }
}

TEST(PlanEngines, ADeviceOfAnEngineHasItsPartTwice) {
  Workload work = small_work();
  work.engines = 3;
  PlanOptions options;
  options.cache_rows = 5000;
  const LayoutPlan plan = plan_of_pairs(work, devices_of(80 * kGiB), {.dp = 3}, options);
  const MemoryParts& memory = plan.engines->memory;
  EXPECT_EQ(memory.weights, 2 * kHalf);
  EXPECT_EQ(memory.copy, 2 * kHalf);
  EXPECT_EQ(memory.cache, 5000 * 8 * 2 * 64 * 2);  // keys and values of half of the heads
  // What the two map of each other's memory, and a chunk of weights on their way, whoever sends them; from a rank that
  // has the same half they come to where they belong.
  const auto exchange = [&](const Layout& layout) {
    return plan_of_pairs(work, devices_of(80 * kGiB), layout, options).engines->memory.exchange;
  };
  EXPECT_EQ(memory.exchange, (int64_t{96} << 20) + (int64_t{32} << 20));
  EXPECT_EQ(exchange({.tp = 2, .dp = 2, .pp = 2}), memory.exchange);
  EXPECT_EQ(exchange({.tp = 2, .dp = 2}), int64_t{96} << 20);
}

// Router, attention and norms are whole or in halves; experts are whole on each rank, or half of them each.
TEST(PlanEngines, ExpertsAreSplitByTheirOwnNumberOfRanks) {
  Workload work = small_work();
  work.engines = 1;
  const auto plan = [&](const Layout& engine, const Layout& training = {}, int64_t blocks = 0) {
    work.engine = engine;
    PlanOptions options;
    options.combine_blocks = blocks;
    return plan_layout(test::mixture_of_four_layers(), training, work, options, devices_of(80 * kGiB));
  };
  constexpr int64_t kExpert = 3 * 256 * 64;
  constexpr int64_t kRest = 4 * ((256 * 512 + 256 * 256) / 2 + 16 * 256 + 2 * 256) + 2 * 504 * 256 + 256;
  EXPECT_EQ(plan({.tp = 2}).engines->memory.weights, 2 * (kRest + 4 * 16 * kExpert));
  const LayoutPlan split = plan({.tp = 2, .ep = 2});
  EXPECT_EQ(split.engines->memory.weights, 2 * (kRest + 4 * 8 * kExpert));
  EXPECT_GT(split.engines->exchanges, plan({.tp = 2}).engines->exchanges);  // rows go to them and back
  // Experts split otherwise than training's are gathered.
  EXPECT_EQ(plan({.tp = 2, .ep = 2}, {.tp = 2, .ep = 2}).engines->sources, 1);
  EXPECT_EQ(plan({.tp = 2, .ep = 2}, {.tp = 2, .ep = 4, .dp = 2}).engines->sources, 4);
  // Blocks are training's: with as many tensor ranks no bit differs.
  EXPECT_EQ(plan({.tp = 2, .ep = 2}, {.tp = 2, .ep = 16, .dp = 8}).time.previous, 0);
  EXPECT_TRUE(plan({.tp = 2, .ep = 2}, {}, 2).fits());
  for (const LayoutPlan& refused : {plan({.tp = 2, .ep = 2}, {}, 1), plan({.tp = 3}), plan({.tp = 2, .ep = 4})}) {
    ASSERT_EQ(refused.problems.size(), 1U);
    EXPECT_EQ(refused.problems.front().find("an engine in tp="), 0U) << refused.problems.front();
    EXPECT_FALSE(refused.engines);
  }
}

TEST(PlanEngines, WithExactVersionsTheLongerOfBothCounts) {
  Workload work = two_responses();
  work.engines = 1;
  work.age = 1;
  const auto time = [&](double unit_s, double transfer_s) {
    return plan_of(work, one_second_a_step(unit_s / kModel, transfer_s)).time;
  };
  // Training 3.4 s and generation 4.4 s: the ranks wait a second, in which the weights go.
  EXPECT_NEAR(time(0.1, 0.5).step(), 4.4, 1e-9);
  EXPECT_NEAR(time(0.1, 0.5).idle, 1, 1e-9);
  EXPECT_NEAR(time(0.1, 0.5).weight_sync, 0, 1e-9);
  EXPECT_EQ(time(0.1, 0.5).older, 1);
  // Training 6.8 s and generation 4.8 s; the optimizer is all there is, and waits until the weights have gone.
  EXPECT_NEAR(time(0.2, 0.5).idle, 0, 1e-9);
  EXPECT_NEAR(time(0.2, 0.5).weight_sync, 0.5, 1e-9);
  EXPECT_NEAR(time(0.2, 0.5).step(), 7.3, 1e-9);
  // A step in two: weights are trained (3.4), go (2), generate (4.4), all in two steps' time, 4.9 s; but behind 2 s on
  // the way come 3.4 s in which they change.
  EXPECT_NEAR(time(0.1, 2).idle, 1.5, 1e-9);
  EXPECT_NEAR(time(0.1, 2).step(), 5.4, 1e-9);
  // With three steps' time generation alone counts.
  work.age = 2;
  EXPECT_NEAR(time(0.1, 0.9).step(), 4.4, 1e-9);
}

// Training 1.7 s, the weights' way 0.7 s, their copy 0.2 s. Steps 1 and 2 are there at 4 and at 6, as with carry-over.
// At 6.4 come the weights behind step 1, at 6.6 step 3 begins; at 8.6 its short one ends, those behind step 2 (8.4) are
// taken until 8.8, step 4 begins in its place; step 3 is there at 10.8, step 4 at 12.8: 6.8 s behind step 2, and on.
TEST(PlanEngines, InFlightPlacesAreFilledAsSoonAsWeightsCome) {
  Workload work = two_responses();
  work.engines = 1;
  work.age = 1;
  work.in_flight = true;
  const LayoutPlan plan = plan_of(work, one_second_a_step(0.05 / kModel, 0.7));
  EXPECT_NEAR(plan.time.step(), 3.4, 1e-9);
  EXPECT_NEAR(plan.time.idle, 1.7, 1e-9);
  EXPECT_NEAR(plan.time.weight_sync, 0, 1e-9);
  EXPECT_NEAR(plan.time.older, 1, 1e-12);
  EXPECT_NEAR(plan.engines->decode, 3, 1e-9);
  EXPECT_NEAR(plan.engines->stall, 0.2, 1e-9);
  // In versions it waits until nothing is unfinished.
  work.in_flight = false;
  EXPECT_NEAR(plan_of(work, one_second_a_step(0.05 / kModel, 0.7)).time.step(), 4.2, 1e-9);
  // Training that takes longer than all else is what a step takes.
  work.in_flight = true;
  const LayoutPlan slow = plan_of(work, one_second_a_step(0.5 / kModel, 0));
  EXPECT_NEAR(slow.time.step(), 17, 1e-9);
  EXPECT_NEAR(slow.time.idle, 0, 1e-9);
}

TEST(PlanEngines, AnEngineHasWeightsTwiceACacheAndNoState) {
  Workload work = small_work();
  work.engines = 2;
  PlanOptions options;
  options.cache_rows = 5000;
  const LayoutPlan plan = plan_layout(shape_of_eight_layers(), {.dp = 3}, work, options, devices_of(80 * kGiB));
  const MemoryParts& memory = plan.engines->memory;
  EXPECT_EQ(plan.engines->count, 2);
  EXPECT_TRUE(plan.engines->second_buffer);
  EXPECT_EQ(memory.weights, 2 * kModel);
  EXPECT_EQ(memory.copy, 2 * kModel);
  EXPECT_EQ(memory.cache, 5000 * 8 * 2 * 128 * 2);  // keys and values of eight layers, 128 wide
  EXPECT_EQ(memory.reference + memory.gradients + memory.optimizer + memory.exchange + memory.critic, 0);
  // What the ranks have is theirs whoever generates.
  Workload alone = small_work();
  const LayoutPlan ranks = plan_layout(shape_of_eight_layers(), {.dp = 3}, alone, options, devices_of(80 * kGiB));
  EXPECT_EQ(plan.memory.peak(), ranks.memory.peak());
  EXPECT_FALSE(ranks.engines);
}

TEST(PlanEngines, WithoutRoomForASecondBufferDecodingStops) {
  const auto plan = [](int64_t bytes, int64_t rows) {
    Workload work = small_work();
    work.engines = 1;
    PlanOptions options;
    options.cache_rows = rows;
    return plan_layout(shape_of_eight_layers(), {}, work, options, devices_of(bytes));
  };
  const auto engine_fits = [](const LayoutPlan& of) {
    for (const std::string& problem : of.problems) {
      if (problem.find("an engine's device must have") == 0) return false;
    }
    return true;
  };
  const int64_t outside = devices_of(0).rates.outside_bytes, weights = 2 * kModel;
  const MemoryParts parts = plan(80 * kGiB, 200).engines->memory;
  const int64_t rest = parts.activations + parts.logits + 200 * 4096;
  ASSERT_LT(rest, weights);
  const LayoutPlan one = plan(outside + weights + rest, 200);
  EXPECT_TRUE(engine_fits(one));
  EXPECT_FALSE(one.engines->second_buffer);
  EXPECT_EQ(one.engines->memory.copy, 0);
  EXPECT_EQ(one.engines->stall, one.engines->transfer);
  EXPECT_FALSE(engine_fits(plan(outside + weights + rest - 1, 200)));
  const LayoutPlan two = plan(outside + 2 * weights + rest, 200);
  EXPECT_TRUE(engine_fits(two));
  EXPECT_TRUE(two.engines->second_buffer);
  EXPECT_EQ(two.engines->least_memory, outside + 2 * weights + rest);
  EXPECT_FALSE(engine_fits(plan(outside + 2 * weights + rest - 1, 200)));
}

TEST(PlanEngines, RankZeroComputesValuesWhileItWaits) {
  Workload work = small_work();
  work.engines = 1;
  PlannedBeside beside;
  beside.critic = PlannedModel{shape_of_eight_layers(), small_work(), {}};
  beside.critic->shape.value_head = true;
  const PlanDevices devices = devices_of(80 * kGiB);
  const auto time = [&](const Layout& layout, const PlannedBeside& models) {
    return plan_layout(shape_of_eight_layers(), layout, work, {}, devices, models).time;
  };
  const PlannedTime two = time({.dp = 2}, beside);
  ASSERT_GT(two.values, 0);
  EXPECT_GT(two.values_under, 0);
  EXPECT_LE(two.values_under, two.values);
  // In turn the ranks wait as long whatever they do meanwhile.
  EXPECT_NEAR(two.idle + two.values_under, time({.dp = 2}, {}).idle, 1e-12);
  EXPECT_EQ(two.reference_under, 0);
  // A critic that ranks share is collective.
  beside.critic->options.sharding = StateSharding::kWeights;
  EXPECT_EQ(time({.dp = 2}, beside).values_under, 0);
  EXPECT_GT(time({}, beside).values_under, 0);
}

}  // namespace
}  // namespace trireme
