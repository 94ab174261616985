#include "topology/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "tests/unit/topology/planned.h"
#include "topology/combine_blocks.h"
#include "topology/pipeline.h"
#include "topology/plan_decode.h"
#include "topology/plan_parts.h"
#include "topology/refit.h"
#include "topology/split.h"

namespace trireme {
namespace {

using test::devices_of;
using test::kGiB;
using test::mixture_of_four_layers;
using test::shape_of_eight_layers;
using test::small_work;

Workload of_long_responses() {
  Workload work = small_work();
  work.longest = work.train_tokens = 16'384;
  work.places = 256;
  return work;
}

// Elements of a rank, counted from the names of the model's parameters.
int64_t elements_of(const ModelShape& shape, const Layout& layout, int64_t rank) {
  const ModelSplit split = model_split(shape, layout, rank);
  int64_t elements = 0;
  for (const ModelParameter& parameter : model_parameters(shape)) {
    if (const auto slice = parameter_slice(shape, split, parameter.name)) elements += slice->elements();
  }
  return elements;
}

const std::vector<Layout>& dense_layouts() {
  static const std::vector<Layout> layouts = {{},
                                              {.dp = 4},
                                              {.tp = 2, .dp = 2},
                                              {.tp = 4, .cp = 2},
                                              {.pp = 4},
                                              {.tp = 2, .cp = 2, .dp = 3, .pp = 2},
                                              {.dp = 2, .pp = 8}};
  return layouts;
}

TEST(Plan, StateIsThatOfTheSlicesOfTheNamedParameters) {
  for (const bool tied : {false, true}) {
    ModelShape shape = shape_of_eight_layers();
    shape.tied = tied;
    for (const Layout& layout : dense_layouts()) {
      for (const StateSharding sharding :
           {StateSharding::kNothing, StateSharding::kOptimizer, StateSharding::kGradients, StateSharding::kWeights}) {
        PlanOptions options;
        options.gradient_bytes = 2;
        options.sharding = sharding;
        const LayoutPlan plan = plan_layout(shape, layout, small_work(), options, devices_of(80 * kGiB));
        const int64_t rank = rank_of(layout, 0, 0, 0, plan.memory.stage);
        const int64_t all = elements_of(shape, layout, rank), ranks = layout.dp * layout.cp;
        const int64_t own = (all + ranks - 1) / ranks;
        const MemoryParts& training = plan.memory.training;
        const bool weights = sharding == StateSharding::kWeights && ranks > 1;
        EXPECT_EQ(training.weights, 2 * (weights ? own : all));
        EXPECT_EQ(training.reference, training.weights);
        EXPECT_EQ(plan.memory.generation.weights, 2 * all);
        EXPECT_EQ(training.optimizer, 12 * (sharding == StateSharding::kNothing ? all : own));
        const bool gradients = sharding >= StateSharding::kGradients && ranks > 1;
        const int64_t summed = ranks == 1 ? 0 : sharding == StateSharding::kNothing ? all : own;
        EXPECT_EQ(training.gradients, (gradients ? 0 : 2 * all) + 4 * summed);
      }
    }
  }
}

TEST(Plan, OnlySharedGradientsHaveAPlaceForTheirSum) {
  ModelShape shape = shape_of_eight_layers();
  shape.experts = 8;
  shape.experts_per_token = 2;
  shape.moe_intermediate = shape.intermediate;
  PlanOptions options;
  options.gradient_bytes = 4;
  for (const Layout& layout :
       {Layout{.ep = 4, .dp = 4}, Layout{.ep = 2, .dp = 4}, Layout{.tp = 2, .ep = 2, .dp = 1}, Layout{.tp = 2}}) {
    const RankMemory held = rank_memory(shape, layout, 0);
    const int64_t replicas = group_size(layout, Axis::kDpCp), copies = group_size(layout, Axis::kEdp);
    const int64_t summed =
        (replicas > 1 ? held.dense_params / replicas : 0) + (copies > 1 ? held.expert_params / copies : 0);
    const int64_t all = held.dense_params + held.expert_params;
    EXPECT_EQ(plan_layout(shape, layout, small_work(), options, devices_of(80 * kGiB)).memory.training.gradients,
              4 * (all + summed));
    if (replicas > 1) continue;
    // No units where only experts are shared: the trainer makes none.
    PlanOptions sharded = options;
    sharded.sharding = StateSharding::kWeights;
    const MemoryParts parts = plan_layout(shape, layout, small_work(), sharded, devices_of(80 * kGiB)).memory.training;
    EXPECT_EQ(parts.gradients, 4 * (all + summed));
    EXPECT_EQ(parts.weights, 2 * all);
  }
}

TEST(Plan, ALocalShapeIsThatOfTheModel) {
  const ModelShape shape = shape_of_eight_layers();
  const Workload work = small_work();
  const PlanOptions options;
  const PlanDevices devices = devices_of(80 * kGiB);
  for (const Layout& layout : dense_layouts()) {
    for (int64_t stage = 0; stage < layout.pp; ++stage) {
      const LocalShape own = planning::shape_of({shape, layout, work, options, devices}, stage);
      const LocalShape theirs = local_shape(shape, model_split(shape, layout, rank_of(layout, 0, 0, 0, stage)));
      EXPECT_EQ(own.tp, theirs.tp);
      EXPECT_EQ(own.layers, theirs.layers);
      EXPECT_EQ(own.heads, theirs.heads);
      EXPECT_EQ(own.kv_heads, theirs.kv_heads);
      EXPECT_EQ(own.intermediate, theirs.intermediate);
      EXPECT_EQ(own.padded_vocab, theirs.padded_vocab);
      EXPECT_EQ(own.head, theirs.head);
      const ActivationBytes a = activation_bytes(own, 2), b = activation_bytes(theirs, 2);
      EXPECT_EQ(a.whole, b.whole);
      EXPECT_EQ(a.passing, b.passing);
      EXPECT_EQ(a.fixed, b.fixed);
    }
  }
}

TEST(Plan, ActivationsAreOfTheMicroBatchesInFlight) {
  const ModelShape shape = shape_of_eight_layers();
  Workload work = small_work();
  work.outputs.assign(64, 40);  // some 2,240 tokens an optimizer step: nine micro-batches
  work.generates = false;
  const Layout layout{.tp = 2, .pp = 4};
  const LayoutPlan plan = plan_layout(shape, layout, work, {}, devices_of(80 * kGiB));
  EXPECT_EQ(plan.memory.micro_batches, 8);
  const LocalShape local = local_shape(shape, model_split(shape, layout, rank_of(layout, 0, 0, 0, plan.memory.stage)));
  const int64_t flying = layout.pp - plan.memory.stage;
  EXPECT_EQ(plan.memory.in_flight, flying);
  EXPECT_EQ(plan.memory.kept.whole, 2);
  const ActivationBytes bytes = activation_bytes(local, 2);
  EXPECT_EQ(plan.memory.training.activations, 256 * (flying * 2 * bytes.whole + bytes.passing));
}

TEST(Plan, ThePhasesDoNotAddUp) {
  const ModelShape shape = *known_model_shape("llama-3.1-8b");
  const Workload work = of_long_responses();
  PlanOptions options;
  options.gradient_bytes = 2;
  options.cache_fraction = 0.5;
  const LayoutPlan roomy = plan_layout(shape, {.dp = 8}, work, options, devices_of(400 * kGiB));
  EXPECT_FALSE(roomy.memory.lends_cache);
  EXPECT_EQ(roomy.memory.peak(), roomy.memory.training.total() + roomy.memory.generation.cache);
  EXPECT_EQ(roomy.memory.kept.whole, 32);
  const LayoutPlan tight = plan_layout(shape, {.dp = 8}, work, options, devices_of(140 * kGiB));
  EXPECT_TRUE(tight.memory.lends_cache);
  EXPECT_EQ(tight.memory.peak(), std::max(tight.memory.training.total(), tight.memory.generation.total()));
  EXPECT_LE(tight.memory.peak(), 140 * kGiB - devices_of(0).rates.outside_bytes);
  EXPECT_LT(tight.memory.cache_rows, roomy.memory.cache_rows);
}

TEST(Plan, ACacheThatIsKeptStaysBesideTraining) {
  const ModelShape shape = *known_model_shape("llama-3.1-8b");
  const Workload work = of_long_responses();
  PlanOptions options;
  options.gradient_bytes = 2;
  options.cache_fraction = 0.5;
  const LayoutPlan lent = plan_layout(shape, {.dp = 8}, work, options, devices_of(140 * kGiB));
  ASSERT_TRUE(lent.memory.lends_cache);
  options.keeps_cache = true;
  const LayoutPlan kept = plan_layout(shape, {.dp = 8}, work, options, devices_of(140 * kGiB));
  EXPECT_FALSE(kept.memory.lends_cache);
  EXPECT_EQ(kept.memory.cache_rows, lent.memory.cache_rows);
  EXPECT_EQ(kept.memory.peak(), kept.memory.training.total() + kept.memory.generation.cache);
  EXPECT_LT(kept.memory.kept.whole, lent.memory.kept.whole);  // backward computes more of the layers again
  EXPECT_GT(kept.least_memory, lent.least_memory);
  // Where it is beside anyway nothing changes.
  const LayoutPlan roomy = plan_layout(shape, {.dp = 8}, work, options, devices_of(400 * kGiB));
  options.keeps_cache = false;
  const LayoutPlan same = plan_layout(shape, {.dp = 8}, work, options, devices_of(400 * kGiB));
  EXPECT_EQ(roomy.memory.peak(), same.memory.peak());
  EXPECT_EQ(roomy.memory.kept.whole, same.memory.kept.whole);
}

TEST(Plan, TheLeastMemoryIsTheFirstThatFits) {
  ModelShape shape = shape_of_eight_layers();
  std::vector<PlanOptions> choices(9);
  choices[1].fit_recompute = false;
  choices[2].fit_recompute = false;
  choices[2].recomputed_layers = kEveryLayer;
  choices[3].cache_rows = 5000;
  choices[4].cache_fraction = 0.05;
  for (size_t i = 5; i < choices.size(); ++i) choices[i].keeps_cache = true;
  choices[6].cache_rows = 5000;
  choices[7].cache_fraction = 0.05;
  choices[8].fit_recompute = false;
  choices[8].cache_fraction = 1;
  for (const Layout& layout : dense_layouts()) {
    for (const PlanOptions& options : choices) {
      const int64_t least = plan_layout(shape, layout, small_work(), options, devices_of(kGiB)).least_memory;
      EXPECT_TRUE(plan_layout(shape, layout, small_work(), options, devices_of(least)).fits());
      const LayoutPlan small = plan_layout(shape, layout, small_work(), options, devices_of(least - 1));
      EXPECT_FALSE(small.fits());
      EXPECT_EQ(small.least_memory, least);
      // What it says of the device that just does holds there.
      const PlannedMemory memory = plan_layout(shape, layout, small_work(), options, devices_of(least)).memory;
      EXPECT_LE(memory.peak() + devices_of(0).rates.outside_bytes, least);
      EXPECT_GE(memory.cache_rows, small_work().longest);
    }
  }
}

// A rollout of replicas that step together, one step after the other, with nothing but the definition: `step` of the
// samples of the replica with most, of all samples, and of the tokens of the replica with most.
double decoded_step_by_step(const std::vector<std::vector<std::pair<int64_t, int64_t>>>& replicas, int64_t places,
                            const std::function<double(double alive, double together, double tokens)>& step) {
  struct Alive {
    int64_t tokens, left;
  };
  std::vector<std::vector<Alive>> alive(replicas.size());
  std::vector<size_t> next(replicas.size(), 0);
  for (double seconds = 0;;) {
    double most = 0, together = 0, tokens = 0;
    for (size_t r = 0; r < replicas.size(); ++r) {
      for (; next[r] < replicas[r].size() && static_cast<int64_t>(alive[r].size()) < places; ++next[r])
        alive[r].push_back({replicas[r][next[r]].first, replicas[r][next[r]].second});
      double own = 0;
      for (const Alive& sample : alive[r]) own += static_cast<double>(sample.tokens);
      const auto count = static_cast<double>(alive[r].size());
      most = std::max(most, count);
      together += count;
      tokens = std::max(tokens, own);
    }
    if (most == 0) return seconds;
    seconds += step(most, together, tokens);
    for (std::vector<Alive>& of_replica : alive) {
      for (Alive& sample : of_replica) {
        ++sample.tokens;
        --sample.left;
      }
      std::erase_if(of_replica, [](const Alive& sample) { return sample.left == 0; });
    }
  }
}

TEST(Plan, ARolloutTakesWhatItsStepsTake) {
  const ModelShape shape = mixture_of_four_layers();
  const DeviceRates rates = *device_rates("h200");
  // Replicas that share experts step together.
  for (const auto& [layout, in_step] : std::vector<std::pair<Layout, size_t>>{{{}, 1},
                                                                              {{.dp = 2}, 1},
                                                                              {{.tp = 2, .dp = 2}, 1},
                                                                              {{.tp = 2, .ep = 2, .dp = 2}, 1},
                                                                              {{.ep = 2, .dp = 2}, 2},
                                                                              {{.ep = 2, .dp = 4}, 2},
                                                                              {{.tp = 2, .ep = 4, .dp = 2}, 2},
                                                                              {{.cp = 2, .ep = 4, .dp = 2}, 4}}) {
    const double tp = static_cast<double>(layout.tp), ep = static_cast<double>(layout.ep);
    const auto step = [&](double alive, double together, double tokens) {
      // Of the rank's experts of each layer those that somebody in its group chose.
      const double chosen = 16 / ep * (1 - std::pow(1 - 3.0 / 16, together));
      const double dense = 256 * (256 + 2 * 128) + 256 * 256 + 2 * 256 + 256 * 16;
      const double bytes = 2 * (4 * (dense / tp + chosen * 3 * 256 * 64) + (256 + 1000 * 256) / tp);
      return (bytes + tokens * 4 * 2 * 128 / tp * 2) / rates.decode_read +
             4 * (rates.decode_layer_s + rates.decode_sample_s * alive + rates.decode_experts_s);
    };
    for (const int64_t places : {1, 3, 8}) {
      Workload work = small_work();
      work.places = places;
      PlanOptions options;
      options.cache_rows = 1 << 20;
      const LayoutPlan plan = plan_layout(shape, layout, work, options, devices_of(80 * kGiB));
      // Each replica has every so-manieth response.
      const auto replicas = static_cast<size_t>(layout.dp * layout.cp);
      std::vector<std::vector<std::pair<int64_t, int64_t>>> dealt(replicas);
      for (size_t i = 0; i < work.outputs.size(); ++i)
        dealt[i % replicas].emplace_back(work.prompts[i / 4], work.outputs[i]);
      double slowest = 0;
      for (size_t first = 0; first < replicas; first += in_step) {
        const auto begin = dealt.begin() + static_cast<std::ptrdiff_t>(first);
        slowest = std::max(slowest,
                           decoded_step_by_step({begin, begin + static_cast<std::ptrdiff_t>(in_step)}, places, step));
      }
      // Which of several replicas reads most keys is asked once for all steps between two ends.
      EXPECT_NEAR(plan.time.decode / slowest, 1, in_step == 1 ? 1e-9 : 1e-3) << to_string(layout);
      EXPECT_EQ(plan.time.tail, plan.time.decode);  // never more than 16 alive
    }
  }
}

TEST(Plan, ACacheThatHoldsFewSamplesMakesMoreSteps) {
  Workload work = small_work();
  work.places = 8;
  PlanOptions options;
  options.cache_rows = 1 << 20;
  const double all = plan_layout(shape_of_eight_layers(), {}, work, options, devices_of(80 * kGiB)).time.decode;
  options.cache_rows = 140;  // two of the mean length
  const double two = plan_layout(shape_of_eight_layers(), {}, work, options, devices_of(80 * kGiB)).time.decode;
  EXPECT_GT(two, 1.5 * all);
}

TEST(Plan, WorkIsCountedTokenByToken) {
  for (const bool shared : {false, true}) {
    const Workload work = small_work();
    double tokens = 0, pairs = 0;
    for (size_t i = 0; i < work.outputs.size(); ++i) {
      const int64_t prompt = work.prompts[i / 4];
      const bool computed = !shared || i % 4 == 0;
      for (int64_t at = computed ? 0 : prompt; at < prompt + work.outputs[i] - 1; ++at) {
        ++tokens;
        pairs += static_cast<double>(at + 1);
      }
    }
    const planning::PassWork counted = planning::work_of_step(work, shared);
    EXPECT_EQ(counted.tokens, tokens);
    EXPECT_EQ(counted.pairs, pairs);
    EXPECT_EQ(counted.scored, 5 + 60 + 33 + 8 + 90 + 12 + 41 + 77);
  }
}

TEST(Plan, EveryRankComputesItsShareOfTheStep) {
  Workload work = small_work();
  work.train_tokens = 100;
  const double all = planning::work_of_step(work, false).tokens / 2;
  const PlanOptions options;
  const PlanDevices devices = devices_of(kGiB);
  const ModelShape shape = shape_of_eight_layers();
  for (const Layout& layout : {Layout{}, Layout{.dp = 2}, Layout{.cp = 2}}) {
    const auto passes = planning::training_passes_of({shape, layout, work, options, devices});
    EXPECT_NEAR(passes.each.tokens * static_cast<double>(passes.micro_batches * layout.dp * layout.cp), all, 1e-9);
    EXPECT_LE(passes.each.tokens * static_cast<double>(layout.cp), 100);
  }
  // More ranks than micro-batches: nobody has less than one, some have none.
  const Layout many{.dp = 64};
  const auto passes = planning::training_passes_of({shape, many, work, options, devices});
  EXPECT_EQ(passes.micro_batches, 1);
  EXPECT_NEAR(passes.each.tokens, all / std::ceil(all / 100), 1e-9);
}

// Parts that get any of `chosen` draws, in the mean over all ways to draw.
double reached_parts(int64_t parts, int64_t chosen) {
  int64_t ways = 1, reached = 0;
  for (int64_t i = 0; i < chosen; ++i) ways *= parts;
  for (int64_t way = 0; way < ways; ++way) {
    std::vector<bool> seen(static_cast<size_t>(parts));
    for (int64_t i = 0, rest = way; i < chosen; ++i, rest /= parts) seen[static_cast<size_t>(rest % parts)] = true;
    reached += std::count(seen.begin(), seen.end(), true);
  }
  return static_cast<double>(reached) / static_cast<double>(ways);
}

TEST(Plan, RowsForExpertsAreCountedOverAllChoices) {
  const ModelShape shape = mixture_of_four_layers();
  const Workload work = small_work();
  const PlanOptions options;
  const PlanDevices devices = devices_of(kGiB);
  for (const int64_t ep : {2, 4, 8}) {
    const Layout layout{.ep = ep, .dp = ep};
    const planning::ExpertRows rows = planning::expert_rows({shape, layout, work, options, devices});
    EXPECT_NEAR(rows.out, reached_parts(ep, 3), 1e-12);
    EXPECT_NEAR(rows.back, reached_parts(combine_blocks(16, 0, ep), 3), 1e-12);
    // Ranks that share an expert's width each get the row, and each give something back.
    const Layout shared{.ep = ep, .dp = 2 * ep, .etp = 2};
    const planning::ExpertRows twice = planning::expert_rows({shape, shared, work, options, devices});
    EXPECT_NEAR(twice.out, 2 * rows.out, 1e-12);
    EXPECT_NEAR(twice.back, 2 * rows.back, 1e-12);
  }
  const Layout width_only{.dp = 2, .etp = 2};
  EXPECT_NEAR(planning::expert_rows({shape, width_only, work, options, devices}).out, 2, 1e-12);
}

TEST(Plan, ExpertsAreReadByTheRankThatHoldsThem) {
  const ModelShape shape = *known_model_shape("qwen3-30b-a3b");
  Workload work = small_work();
  work.prompts.assign(8, 100);
  work.outputs.assign(8 * 64, 200);
  work.places = 256;
  const LayoutPlan whole = plan_layout(shape, {.dp = 8}, work, {}, devices_of(400 * kGiB));
  const LayoutPlan split = plan_layout(shape, {.ep = 8, .dp = 8}, work, {}, devices_of(400 * kGiB));
  EXPECT_LT(split.time.decode, 0.6 * whole.time.decode);
  EXPECT_EQ(whole.time.decode_exchanges, 0);
  EXPECT_GT(split.time.decode_exchanges, 0);
  EXPECT_LT(split.memory.generation.weights * 4, whole.memory.generation.weights);
  EXPECT_LT(split.least_memory, whole.least_memory);
  const LayoutPlan shared = plan_layout(shape, {.ep = 4, .dp = 8, .etp = 2}, work, {}, devices_of(400 * kGiB));
  EXPECT_EQ(shared.memory.generation.weights, split.memory.generation.weights);
  EXPECT_GT(shared.time.decode_exchanges, split.time.decode_exchanges);
}

TEST(Plan, StagesWaitForEachOther) {
  ModelShape shape = shape_of_eight_layers();
  shape.vocab = 8;  // no head to speak of
  Workload work = small_work();
  work.reference = work.generates = false;
  work.optimizer_steps = 1;
  work.prompts.assign(64, 1);
  work.outputs.assign(64, 128);
  work.train_samples = 4;  // sixteen micro-batches
  PlanDevices devices = devices_of(80 * kGiB);
  devices.rates.in_node = {.latency_s = 0, .first_bytes = 0, .first_rate = 1e30, .further_rate = 1e30};
  EXPECT_EQ(plan_layout(shape, {}, work, {}, devices).time.bubble, 0);
  const PlannedTime four = plan_layout(shape, {.pp = 4}, work, {}, devices).time;
  EXPECT_NEAR(four.bubble / four.training, 3.0 / 16, 0.002);
  PlanOptions pieces;
  pieces.stages.virtual_stages = 2;
  const PlannedTime interleaved = plan_layout(shape, {.pp = 4}, work, pieces, devices).time;
  EXPECT_NEAR(interleaved.bubble / interleaved.training, 3.0 / 32, 0.002);
  // Of very many micro-batches the first ones are run and the others go on at their pace.
  work.prompts.assign(4096, 1);
  work.outputs.assign(4096, 128);
  const PlannedTime many = plan_layout(shape, {.pp = 4}, work, {}, devices).time;
  EXPECT_NEAR(many.bubble / many.training, 3.0 / 1024, 0.002);
}

TEST(Plan, PartsOfTheTimeAddUp) {
  for (const Layout& layout : dense_layouts()) {
    const PlannedTime t = plan_layout(shape_of_eight_layers(), layout, small_work(), {}, devices_of(80 * kGiB)).time;
    const double sum = t.prefill + t.decode + t.reference + t.training + t.bubble + t.optimizer + t.decode_exchanges +
                       t.pass_exchanges + t.gradient_exchanges;
    EXPECT_NEAR(t.step(), sum, 1e-12);
    EXPECT_LE(t.tail, t.decode);
    EXPECT_EQ(t.bubble > 0, layout.pp > 1);
    EXPECT_EQ(t.decode_exchanges > 0, layout.tp > 1 || layout.pp > 1);
    EXPECT_EQ(t.gradient_exchanges > 0, layout.dp * layout.cp > 1);
  }
}

// Two steps of 4 samples on two tensor ranks, less one: 17 sums of 4 rows of 256 bfloat16, logits of 2 rows over half
// of 1,000 tokens, 16 bytes of each of 2 samples. Of a link of a second a message and a byte.
TEST(Plan, ADecodeStepHasItsSumsOverPeerMemory) {
  PlanDevices devices = devices_of(80 * kGiB);
  devices.rates.in_node = {.latency_s = 1e9, .first_bytes = 0, .first_rate = 1, .further_rate = 1};  // of passes
  devices.rates.decode_in_node = {.latency_s = 1, .first_bytes = 0, .first_rate = 1, .further_rate = 1};
  Workload work = small_work();
  work.reference = false;
  const auto exchanges = [&](const Layout& layout, int64_t outputs, int64_t samples) {
    work.prompts.assign(1, 10);
    work.outputs.assign(static_cast<size_t>(samples), outputs);
    work.places = samples;
    return plan_layout(shape_of_eight_layers(), layout, work, {}, devices).time.decode_exchanges;
  };
  EXPECT_NEAR(exchanges({.tp = 2}, 2, 4) - exchanges({.tp = 2}, 1, 4),
              17 * (1 + 4 * 512) + (1 + 2 * 500 * 2) + (1 + 2 * 16), 1e-6);
  // Over four ranks: at once up to 256 KiB, 512 rows; above in two exchanges of three quarters.
  EXPECT_NEAR(planning::decode_sum_seconds(devices.rates.decode_in_node, 4, 262'144), 1 + 3 * 262'144, 1e-6);
  EXPECT_NEAR(planning::decode_sum_seconds(devices.rates.decode_in_node, 4, 262'148), 2 + 1.5 * 262'148, 1e-6);
  EXPECT_NEAR(planning::decode_sum_seconds(devices.rates.decode_in_node, 2, 1e6), 1 + 1e6, 1e-6);
}

// 96 MiB of receive buffers a group, 64 of mailboxes for the others, 128 of lines; what is mapped stays.
TEST(Plan, BuffersThatPeersMapAreCounted) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  const Layout none{.cp = 2, .dp = 4};
  EXPECT_EQ(peer_buffer_bytes(none, none), 0);
  EXPECT_EQ(peer_buffer_bytes({.tp = 2}, {.tp = 2}), (96 + 128) * kMiB);
  EXPECT_EQ(peer_buffer_bytes({.tp = 2, .pp = 2}, {.tp = 4}), (96 + 128 + 96 + 128) * kMiB);
  EXPECT_EQ(peer_buffer_bytes({.ep = 2, .dp = 2}, {.ep = 2, .dp = 2}), 96 * kMiB);
  EXPECT_EQ(peer_buffer_bytes({.tp = 2, .ep = 2}, {.tp = 2, .ep = 2}), (96 + 128) * kMiB);  // one group
  EXPECT_NEAR(static_cast<double>(peer_buffer_bytes({.tp = 8}, {.tp = 8})), (96 + 64 * 8 / 7.0) * kMiB, 16);
  const PlannedMemory split =
      plan_layout(shape_of_eight_layers(), {.tp = 2}, small_work(), {}, devices_of(80 * kGiB)).memory;
  EXPECT_EQ(split.generation.exchange, 224 * kMiB);
  EXPECT_GT(split.training.exchange, 224 * kMiB);
}

TEST(Plan, FasterLayoutsThatFitComeFirst) {
  const ModelShape shape = *known_model_shape("qwen3-32b");
  Workload work = small_work();
  work.longest = work.train_tokens = 4096;
  const std::vector<Layout> layouts = legal_layouts({.world = 8, .gpus_per_node = 8, .shape = &shape});
  const std::vector<LayoutPlan> plans = rank_layouts(shape, layouts, work, {}, devices_of(140 * kGiB));
  ASSERT_EQ(plans.size(), layouts.size());
  for (size_t i = 1; i < plans.size(); ++i) {
    const LayoutPlan &before = plans[i - 1], &here = plans[i];
    EXPECT_GE(before.fits(), here.fits());
    if (here.fits()) {
      EXPECT_LE(before.time.step(), here.time.step());
    } else if (!before.fits()) {
      EXPECT_LE(before.least_memory, here.least_memory);
    }
  }
  EXPECT_TRUE(plans.front().fits());
  EXPECT_FALSE(plans.back().fits());
  EXPECT_NE(plans.back().problems.front().find("a device must have"), std::string::npos);
}

TEST(Plan, GradientsAndWeightsAreNotShardedUnderAPipeline) {
  for (const std::string& name : sharding_names()) {
    PlanOptions options;
    options.sharding = *parse_sharding(name);
    EXPECT_EQ(to_string(options.sharding), name);
    const bool fits =
        plan_layout(shape_of_eight_layers(), {.dp = 2, .pp = 2}, small_work(), options, devices_of(80 * kGiB)).fits();
    EXPECT_EQ(fits, name == "no_shard" || name == "optim") << name;
  }
  EXPECT_FALSE(parse_sharding("zero3"));
}

TEST(Plan, LinksBetweenNodesAreSlower) {
  Workload work = small_work();
  PlanDevices devices = devices_of(80 * kGiB);
  const Layout layout{.tp = 2, .dp = 4};
  devices.of_node = 8;
  const double inside = plan_layout(shape_of_eight_layers(), layout, work, {}, devices).time.gradient_exchanges;
  devices.of_node = 2;
  const PlannedTime across = plan_layout(shape_of_eight_layers(), layout, work, {}, devices).time;
  EXPECT_GT(across.gradient_exchanges, inside);
}

TEST(Rates, ALongMessageGoesOnFaster) {
  const LinkRates link{.latency_s = 1, .first_bytes = 10, .first_rate = 5, .further_rate = 10};
  EXPECT_EQ(link.seconds(0), 1);
  EXPECT_EQ(link.seconds(5), 2);
  EXPECT_EQ(link.seconds(30), 1 + 2 + 2);
  for (const std::string& name : known_device_rates()) EXPECT_EQ(device_rates(name)->name, name);
  EXPECT_FALSE(device_rates("a100"));
  EXPECT_TRUE(device_rates("h200")->measured);
}

// Generation in a layout of its own: one copy more in memory, none while training, and its time.
TEST(Plan, GenerationInAnotherLayout) {
  const ModelShape shape = shape_of_eight_layers();
  const Layout training{.tp = 2, .dp = 2, .pp = 2};
  const PlanDevices devices = devices_of(64 * kGiB);
  const PlanOptions in_place;
  const LayoutPlan plain = plan_layout(shape, training, small_work(), in_place, devices);
  EXPECT_EQ(plain.memory.generation.copy, 0);
  EXPECT_EQ(plain.time.refit, 0);
  for (const auto& [tp, fold] : {std::pair<int64_t, bool>{0, true}, {1, true}, {4, true}, {1, false}, {4, false}}) {
    PlanOptions options;
    options.generation_tp = tp;
    options.fold_pipeline = fold;
    const LayoutPlan plan = plan_layout(shape, training, small_work(), options, devices);
    ASSERT_TRUE(plan.fits()) << plan.problems.front();
    const Layout own = generation_layout(training, tp, fold);
    int64_t most = 0;
    for (int64_t rank = 0; rank < own.world(); ++rank) most = std::max(most, elements_of(shape, own, rank));
    EXPECT_LE(plan.memory.generation.copy, 2 * most);
    EXPECT_GE(plan.memory.generation.copy, most);
    EXPECT_EQ(plan.memory.training.copy, 0);
    EXPECT_GT(plan.time.refit, 0);
    EXPECT_EQ(plan.time.training, plain.time.training);
    // Sums over other tensor ranks: log-probs are computed once more.
    EXPECT_EQ(plan.time.previous > 0, own.tp != training.tp);
  }
  // Named, but training's own.
  PlanOptions same;
  same.generation_tp = 2;
  EXPECT_EQ(plan_layout(shape, training, small_work(), same, devices).time.step(), plain.time.step());
  // What cannot be is a problem, not a plan.
  PlanOptions uneven;
  uneven.generation_tp = 8;
  EXPECT_FALSE(plan_layout(shape, training, small_work(), uneven, devices).fits());
  EXPECT_FALSE(plan_layout(mixture_of_four_layers(), {.dp = 4}, small_work(), {.generation_tp = 2}, devices).fits());
}

// In lanes a stage has a part of the samples at a time: a round of all lanes costs no more than all samples in turn.
TEST(Plan, LanesAreOfFewerSamples) {
  const ModelShape shape = shape_of_eight_layers();
  Workload work = small_work();
  work.places = 8;
  PlanOptions one;
  one.lanes = 1;
  const PlanDevices devices = devices_of(64 * kGiB);
  const LayoutPlan in_turn = plan_layout(shape, {.pp = 2}, work, one, devices);
  const LayoutPlan in_lanes = plan_layout(shape, {.pp = 2}, work, {}, devices);
  ASSERT_TRUE(in_turn.fits() && in_lanes.fits());
  EXPECT_LT(in_lanes.time.decode, in_turn.time.decode);
  EXPECT_GT(2 * in_lanes.time.decode, in_turn.time.decode);
}

}  // namespace
}  // namespace trireme
