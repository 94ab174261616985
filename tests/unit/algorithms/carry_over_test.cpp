// Carry-over on one and on several ranks, and of models that these share: which groups a step has, how old its tokens
// are, and that every log-prob is that of the weights which drew it.
#include "trainer/algorithms/carry_over.h"

#include <gtest/gtest.h>

#include <c10/core/GradMode.h>

#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/host.h"
#include "tests/unit/algorithms/samples.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/model/tiny.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/algorithms/token_passes.h"
#include "trainer/batch/micro_batch.h"
#include "trainer/parallel/stage_links.h"

namespace trireme {
namespace {

using test::expect_same;

struct Case {
  int64_t groups = 3, samples = 4, places = 8, age = 1, steps = 5;
  bool keep_cache = false;
  bool lend_cache = false;     // given away while others train
  int64_t restart_behind = 0;  // step; 0: none
  bool mixture = false;
  bool late_stops = false;
};

struct Seen {
  std::vector<std::vector<Sample>> steps;
  std::vector<int64_t> versions;  // of the weights that each step began with
  RankShares shares;
  int64_t carried = 0;  // samples that were unfinished when a step was complete
  // Of each step, group and index of the samples that on_samples got on this rank.
  std::vector<std::vector<std::pair<int64_t, int64_t>>> told;
};

// Responses of a step have very different lengths, so that places become free long before it is complete.
int64_t length_of(int64_t group, int64_t index) { return 1 + (group * 5 + index * 11) % 37; }

PromptExample prompt_of(int64_t group) {
  PromptExample example;
  example.prompt = {static_cast<int32_t>(group % 60 + 1), 7, 9};
  return example;
}

const ModelConfig& config(bool mixture = false) {
  static const ModelConfig kDense = test::tiny_config({.vocab = 90, .layers = 2, .initializer_range = 0.3});
  static const ModelConfig kMixture = test::tiny_config(
      {.family = ModelFamily::kQwen3Moe, .vocab = 90, .layers = 2, .initializer_range = 0.3, .tied = false});
  return mixture ? kMixture : kDense;
}

// As ranks of `context` share it in generation, with the weights of this version.
std::unique_ptr<Model> model_of(ParallelContext& context, const Case& setup, int64_t version) {
  const ModelConfig& shape = config(setup.mixture);
  const GenerationRanks& ranks = context.generation();
  ModelOptions options;
  if (ranks.apart) {
    options.split = model_split(shape.shape(), ranks.layout, context.rank());
    if (ranks.tensor->size() > 1) options.tensor = ranks.tensor;
    options.links = ranks.links;
  } else {
    options = testing::split_options(context, shape);
  }
  options.trainable = false;
  auto model = std::make_unique<Model>(shape, options);
  init_parameters(*model, static_cast<uint64_t>(1 + version));
  return model;
}

EngineOptions engine_options(ParallelContext& context, const Case& setup) {
  EngineOptions options{.cache_rows = 4000, .max_sequences = setup.places};
  options.late_stops = setup.late_stops;
  options.lanes = context.generation().layout.pp;
  return options;
}

SamplingOptions sampling_options() {
  SamplingOptions sampling;
  sampling.seed = 4;
  return sampling;
}

CarryOverOptions options_of(const Case& setup) {
  CarryOverOptions options;
  options.ledger = {.groups_per_step = setup.groups, .samples_per_group = setup.samples, .max_age = setup.age};
  options.ledger.last_step = setup.steps;
  options.first_sample_id = 1000;
  options.sampling = sampling_options();
  options.keep_cache = setup.keep_cache;
  options.drawn_rewards = 3;
  options.timeout_s = 100;
  options.prompt = [samples = setup.samples](int64_t group, bool) {
    CarriedPrompt prompt{prompt_of(group), {}};
    for (int64_t i = 0; i < samples; ++i) prompt.forced_lengths.push_back(length_of(group, i));
    return prompt;
  };
  return options;
}

Seen run(ParallelContext& context, const Case& setup) {
  const std::unique_ptr<Model> model = model_of(context, setup, 0);
  Seen seen;
  Engine engine(*model, nullptr, engine_options(context, setup), sampling_options());
  PhaseTimer timer;
  CarryOverOptions options = options_of(setup);
  auto carry = std::make_unique<CarryOver>(engine, nullptr, nullptr, context, timer, options);
  carry->on_samples = [&](std::vector<Sample>& samples) {
    for (const Sample& sample : samples) {
      EXPECT_EQ(static_cast<int64_t>(sample.response.size()), length_of(sample.group, sample.index));
      seen.told.back().emplace_back(sample.group, sample.index);
    }
  };
  for (int64_t s = 1; s <= setup.steps; ++s) {
    seen.versions.push_back(carry->ledger().newest_version());
    seen.told.emplace_back();
    CarriedStep step = carry->collect(seen.shares);
    seen.carried += carry->ledger().counts().leased_samples;
    std::vector<Sample>& samples = seen.steps.emplace_back();
    for (LedgerGroup& group : step.groups) {
      EXPECT_TRUE(group.kept);
      for (Sample& sample : group.samples) samples.push_back(std::move(sample));
    }
    if (setup.lend_cache) engine.release_cache();
    init_parameters(*model, static_cast<uint64_t>(1 + s));
    engine.weights_changed(s, setup.keep_cache ? KeptCache::kKept : KeptCache::kNothing);
    carry->trained(s);
    if (setup.restart_behind != s) continue;
    const CarryOver::Saved saved = carry->saved();
    carry->make_way();
    carry.reset();
    // What was set aside is the engine's: a restarted run has another one.
    options.first_step = s + 1;
    options.first_sample_id += static_cast<uint64_t>((s * setup.groups - options.first_group) * setup.samples);
    options.first_group = s * setup.groups;
    Engine other(*model, nullptr, engine_options(context, setup), sampling_options());
    other.weights_changed(s);
    if (!saved.groups.empty()) {  // whose prompt is another now is generated again
      CarryOver::Saved spoilt = saved;
      spoilt.prompts.back() ^= 1;
      CarryOver choosy(other, nullptr, nullptr, context, timer, options);
      EXPECT_EQ(choosy.restore(spoilt), 1);
      EXPECT_EQ(choosy.ledger().counts().complete, static_cast<int64_t>(saved.groups.size()) - 1);
    }
    CarryOver resumed(other, nullptr, nullptr, context, timer, options);
    EXPECT_EQ(resumed.restore(saved), 0);
    EXPECT_EQ(resumed.ledger().counts().complete, static_cast<int64_t>(saved.groups.size()));
    for (++s; s <= setup.steps; ++s) {
      seen.versions.push_back(resumed.ledger().newest_version());
      std::vector<Sample>& rest = seen.steps.emplace_back();
      for (LedgerGroup& group : resumed.collect(seen.shares).groups) {
        for (Sample& sample : group.samples) rest.push_back(std::move(sample));
      }
      init_parameters(*model, static_cast<uint64_t>(1 + s));
      other.weights_changed(s);
      resumed.trained(s);
    }
    return seen;
  }
  return seen;
}

std::vector<Seen> on_ranks(int world, const Case& setup) {
  std::vector<Seen> seen(static_cast<size_t>(world));
  if (world == 1) {
    ParallelContext alone;
    seen[0] = run(alone, setup);
    return seen;
  }
  Layout layout;
  layout.dp = world;
  test::on_layout(layout,
                  [&](ParallelContext& context) { seen[static_cast<size_t>(context.rank())] = run(context, setup); });
  return seen;
}

// Tokens whose log-prob a pass of training's, by the same ranks in the same layout, gives otherwise under their
// weights.
int64_t differing_in_layout(ParallelContext& context, const Case& setup, std::vector<Sample> samples) {
  std::set<int64_t> versions;
  for (const Sample& sample : samples) {
    for (const VersionSpan& span : sample.weight_versions) versions.insert(span.version);
  }
  int64_t tokens = 0;
  for (const int64_t version : versions) {
    const std::unique_ptr<Model> model = model_of(context, setup, version);
    for (Sample& sample : samples) sample.previous_logprobs.clear();
    const auto numbers = [&](const at::Tensor& hidden, const MicroBatch& batch) {
      return response_logprobs(*model, hidden, batch, sampling_options().logprob_options());
    };
    fill_token_numbers(samples, &Sample::previous_logprobs, *model, {.samples = 4}, context, numbers, {});
    for (const Sample& sample : samples) {
      if (sample.mixed_context) continue;
      for (const VersionSpan& span : sample.weight_versions) {
        if (span.version != version) continue;
        for (auto t = static_cast<size_t>(span.from); t < static_cast<size_t>(span.to); ++t)
          tokens +=
              std::memcmp(&sample.previous_logprobs.at(t), &sample.generation_logprobs[t], sizeof(float)) != 0 ? 1 : 0;
      }
    }
  }
  return tokens;
}

struct SplitCase {
  Layout layout;
  Case setup = {};
  std::optional<Layout> generation = {};
};

// Of all ranks, which have the same steps. In training's layout every token has the bits of training's passes.
std::vector<Seen> on_split(const SplitCase& split) {
  std::vector<Seen> seen(static_cast<size_t>(split.layout.world()));
  test::on_layout(
      split.layout,
      [&](ParallelContext& context) {
        Seen own = run(context, split.setup);
        for (const std::vector<Sample>& samples : own.steps) {
          if (!split.generation) {
            EXPECT_EQ(differing_in_layout(context, split.setup, samples), 0);
          }
        }
        seen[static_cast<size_t>(context.rank())] = std::move(own);
      },
      split.generation);
  for (const Seen& one : seen) {
    EXPECT_EQ(one.steps.size(), seen.front().steps.size());
    for (size_t s = 0; s < seen.front().steps.size(); ++s) expect_same(one.steps.at(s), seen.front().steps[s]);
    EXPECT_EQ(one.shares.samples, seen.front().shares.samples);
    EXPECT_EQ(one.carried, seen.front().carried);
  }
  return seen;
}

// Tokens whose log-prob a packed forward under their weights gives otherwise.
int64_t differing(const std::vector<Sample>& samples, bool marked_too, const Case& setup = {}) {
  const c10::NoGradGuard no_grad;
  ParallelContext alone;
  std::map<int64_t, std::unique_ptr<Model>> models;
  int64_t tokens = 0;
  for (const Sample& sample : samples) {
    if (sample.mixed_context && !marked_too) continue;
    for (const VersionSpan& span : sample.weight_versions) {
      std::unique_ptr<Model>& model = models[span.version];
      if (model == nullptr) model = model_of(alone, setup, span.version);
      const at::Tensor logprobs =
          response_logprobs(*model, make_micro_batch({sample}, {0}), sampling_options().logprob_options()).contiguous();
      for (int64_t t = span.from; t < span.to; ++t) {
        tokens += std::memcmp(logprobs.const_data_ptr<float>() + t, &sample.generation_logprobs[static_cast<size_t>(t)],
                              sizeof(float)) != 0
                      ? 1
                      : 0;
      }
    }
  }
  return tokens;
}

// The right groups in data order, whole, of the right lengths; no token too old. Returns how many samples span updates.
int64_t check(const Seen& seen, const Case& setup) {
  EXPECT_EQ(static_cast<int64_t>(seen.steps.size()), setup.steps);
  int64_t spanning = 0;
  for (size_t s = 0; s < seen.steps.size(); ++s) {
    EXPECT_EQ(seen.versions[s], static_cast<int64_t>(s));
    const std::vector<Sample>& samples = seen.steps[s];
    EXPECT_EQ(static_cast<int64_t>(samples.size()), setup.groups * setup.samples);
    for (size_t i = 0; i < samples.size(); ++i) {
      const Sample& sample = samples[i];
      const auto number = static_cast<int64_t>(s) * setup.groups * setup.samples + static_cast<int64_t>(i);
      EXPECT_EQ(sample.group, number / setup.samples);
      EXPECT_EQ(sample.index, number % setup.samples);
      EXPECT_EQ(*sample.prompt, prompt_of(sample.group).prompt);
      EXPECT_EQ(static_cast<int64_t>(sample.response.size()), length_of(sample.group, sample.index));
      EXPECT_EQ(sample.raw_reward, drawn_reward(3, sample.group, sample.index, setup.samples));
      EXPECT_TRUE(spans_tile(sample.weight_versions, static_cast<int64_t>(sample.response.size())));
      EXPECT_LE(sample.weight_versions.back().version, seen.versions[s]);
      EXPECT_GE(sample.weight_versions.front().version, seen.versions[s] - setup.age);
      spanning += sample.weight_versions.size() > 1 ? 1 : 0;
    }
  }
  return spanning;
}

TEST(CarryOver, WithoutAnAgeIsTheSynchronousRollout) {
  const Case setup{.age = 0, .steps = 1};
  const Seen alone = on_ranks(1, setup).front();
  EXPECT_EQ(check(alone, setup), 0);
  EXPECT_EQ(alone.carried, 0);
  // The collector's own, with the same numbers.
  ParallelContext context;
  ModelOptions frozen;
  frozen.trainable = false;
  const auto model = std::make_unique<Model>(config(), frozen);
  init_parameters(*model, 1);
  Engine engine(*model, nullptr, {.cache_rows = 4000, .max_sequences = 8}, sampling_options());
  PhaseTimer timer;
  RolloutCollector collector(engine, nullptr, nullptr, context, timer, 100);
  std::vector<PromptExample> prompts;
  RolloutLengths lengths;
  for (int64_t g = 0; g < setup.groups; ++g) {
    prompts.push_back(prompt_of(g));
    lengths.prompts.push_back(3);
    for (int64_t i = 0; i < setup.samples; ++i) lengths.outputs.push_back(length_of(g, i));
  }
  RolloutRequest request;
  request.prompts = &prompts;
  request.samples_per_prompt = setup.samples;
  request.first_sample_id = 1000;
  request.name = "test";
  request.sampling = sampling_options();
  request.forced_lengths = &lengths;
  request.drawn_rewards = 3;
  RankShares shares;
  expect_same(alone.steps.front(), collector.collect(request, shares));
  for (const Seen& seen : on_ranks(3, setup)) expect_same(seen.steps.front(), alone.steps.front());
}

TEST(CarryOver, StepsHaveTheirGroupsAndEveryTokenTheLogProbOfItsWeights) {
  for (const int64_t age : {1, 2}) {
    const Case setup{.age = age, .lend_cache = age == 1};
    const Seen seen = on_ranks(1, setup).front();
    EXPECT_GT(check(seen, setup), 0) << "no response was carried over";
    EXPECT_GT(seen.carried, 0);
    for (const std::vector<Sample>& samples : seen.steps) EXPECT_EQ(differing(samples, true), 0);
    // On one rank with drawn rewards nothing depends on time.
    const Seen again = on_ranks(1, setup).front();
    for (size_t s = 0; s < seen.steps.size(); ++s) expect_same(seen.steps[s], again.steps[s]);
  }
}

TEST(CarryOver, RanksAgreeOnEveryStep) {
  for (const Case& setup :
       {Case{}, Case{.groups = 4, .samples = 10, .places = 6, .age = 2}, Case{.groups = 1, .places = 64}}) {
    for (const int world : {2, 3}) {
      const std::vector<Seen> ranks = on_ranks(world, setup);
      check(ranks.front(), setup);
      for (const std::vector<Sample>& samples : ranks.front().steps) EXPECT_EQ(differing(samples, true), 0);
      for (const Seen& seen : ranks) {
        ASSERT_EQ(seen.steps.size(), ranks.front().steps.size());
        for (size_t s = 0; s < seen.steps.size(); ++s) expect_same(seen.steps[s], ranks.front().steps[s]);
        EXPECT_EQ(seen.shares.samples, ranks.front().shares.samples);
        EXPECT_EQ(seen.carried, ranks.front().carried);
      }
    }
  }
}

std::string name_of(const SplitCase& split) {
  return to_string(split.layout) + (split.setup.late_stops ? " late" : "") +
         (split.generation ? " generates in " + to_string(*split.generation) : "");
}

// Pipelines, with steps under way when one stops, tensor ranks, replicas of these; and mixtures whose experts replicas
// share, which have work for two, for one, and none. The bits are those of one rank's passes too, unless tensor ranks
// add up in parts.
TEST(CarryOver, RanksThatShareAModelAgreeOnEveryStep) {
  const Case few{.groups = 1, .places = 64};
  const SplitCase cases[] = {
      {{.tp = 2}},
      {{.pp = 2}},
      {{.pp = 2}, {.groups = 4, .samples = 10, .places = 6, .age = 2, .late_stops = true}},
      {{.tp = 2, .pp = 2}, {.lend_cache = true}},
      {{.tp = 2, .dp = 2}, {.late_stops = true}},
      {{.dp = 2, .pp = 2}},
      {{.ep = 2, .dp = 2}, {.lend_cache = true, .mixture = true}},
      {{.ep = 2, .dp = 2}, {.groups = few.groups, .places = few.places, .mixture = true}},
      {{.ep = 2, .dp = 4}, {.groups = 2, .age = 2, .mixture = true, .late_stops = true}},
      {{.ep = 2, .dp = 2, .pp = 2}, {.mixture = true}},
      {{.tp = 2, .ep = 2, .dp = 2}, {.mixture = true}},
  };
  for (const SplitCase& split : cases) {
    SCOPED_TRACE(name_of(split));
    const std::vector<Seen> ranks = on_split(split);
    const Layout& layout = split.layout;
    check(ranks.front(), split.setup);
    if (split.setup.places < few.places) {
      EXPECT_GT(ranks.front().carried, 0);
    }
    EXPECT_EQ(static_cast<int64_t>(ranks.front().shares.samples.size()), layout.dp);
    for (const std::vector<Sample>& samples : ranks.front().steps) {
      if (layout.tp == 1) {
        EXPECT_EQ(differing(samples, true, split.setup), 0);
      }
    }
  }
}

// One replica, whatever ranks it has, begins and stops behind the same engine steps as one rank.
TEST(CarryOver, AReplicaOfSeveralRanksHasTheSamplesOfOneRank) {
  for (const bool keep : {false, true}) {
    const Case setup{.keep_cache = keep};
    const Seen alone = on_ranks(1, setup).front();
    const Seen tensor = on_split({{.tp = 2}, setup}).front();
    ASSERT_EQ(tensor.steps.size(), alone.steps.size());
    EXPECT_EQ(tensor.carried, alone.carried);
    for (size_t s = 0; s < alone.steps.size(); ++s) {
      for (size_t i = 0; i < alone.steps[s].size(); ++i) {
        EXPECT_EQ(tensor.steps[s][i].weight_versions, alone.steps[s][i].weight_versions);
        EXPECT_EQ(tensor.steps[s][i].mixed_context, alone.steps[s][i].mixed_context);
      }
    }
  }
}

TEST(CarryOver, GenerationHasALayoutOfItsOwn) {
  for (const SplitCase& split : {SplitCase{{.tp = 2}, {}, Layout{.dp = 2}}, SplitCase{{.dp = 2}, {}, Layout{.tp = 2}},
                                 SplitCase{{.pp = 2}, {.keep_cache = true}, Layout{.dp = 2}},
                                 SplitCase{{.tp = 2, .pp = 2}, {}, Layout{.dp = 2, .pp = 2}}}) {
    SCOPED_TRACE(name_of(split));
    const std::vector<Seen> ranks = on_split(split);
    check(ranks.front(), split.setup);
    EXPECT_EQ(static_cast<int64_t>(ranks.front().shares.samples.size()), split.generation->dp);
    for (const std::vector<Sample>& samples : ranks.front().steps) {
      if (split.generation->tp == 1) {
        EXPECT_EQ(differing(samples, false), 0);
      }
    }
  }
}

// Behind a step the lines between stages are training's, whether keys are kept or not.
TEST(CarryOver, StagesLeaveNothingOnTheirLines) {
  for (const bool keep : {false, true}) {
    for (const bool late : {false, true}) {
      const Case setup{.keep_cache = keep, .late_stops = late};
      test::on_layout({.pp = 2}, [&](ParallelContext& context) {
        const std::unique_ptr<Model> model = model_of(context, setup, 0);
        Engine engine(*model, nullptr, engine_options(context, setup), sampling_options());
        PhaseTimer timer;
        CarryOver carry(engine, nullptr, nullptr, context, timer, options_of(setup));
        RankShares shares;
        int64_t unfinished = 0;
        for (int64_t s = 1; s <= setup.steps; ++s) {
          (void)carry.collect(shares);
          unfinished += engine.unfinished_samples() + engine.suspended_samples();
          StageLinks& links = *context.stage_links();
          for (const bool backward : {false, true}) {
            PendingCollective sent = links.begin_send(at::full({3}, 10 * s + links.stage(), at::kFloat), backward);
            const at::Tensor received = at::empty({3});
            links.begin_receive(received, backward).wait();
            sent.wait();
            EXPECT_EQ(received[0].item<float>(), static_cast<float>(10 * s + 1 - links.stage()));
          }
          engine.weights_changed(s, keep ? KeptCache::kKept : KeptCache::kNothing);
          carry.trained(s);
        }
        EXPECT_GT(unfinished, 0) << "nothing was under way";
      });
    }
  }
}

TEST(CarryOver, TellsEverySampleOfAStepOnceWheneverItWasGenerated) {
  const Case setup{.groups = 2, .places = 24, .age = 2};
  for (const Layout& layout : {Layout{}, Layout{.dp = 2}, Layout{.tp = 2}, Layout{.dp = 2, .pp = 2}}) {
    const std::vector<Seen> ranks = layout.world() == 1 ? on_ranks(1, setup) : on_split({layout, setup});
    check(ranks.front(), setup);
    for (size_t s = 0; s < ranks.front().steps.size(); ++s) {
      std::map<std::pair<int64_t, int64_t>, int> told;
      for (const Seen& seen : ranks) {
        for (const auto& place : seen.told[s]) ++told[place];
      }
      EXPECT_EQ(told.size(), ranks.front().steps[s].size()) << "step " << s + 1;
      for (const Sample& sample : ranks.front().steps[s]) {
        const std::pair place(sample.group, sample.index);
        EXPECT_EQ(told[place], 1) << "step " << s + 1 << " group " << sample.group;
      }
    }
  }
}

TEST(CarryOver, WhoWaitsForAnotherRankTooLongNamesItWithTheCodeOfADeadline) {
  std::atomic<bool> gave_up{false};
  test::on_layout({.dp = 2}, [&](ParallelContext& context) {
    if (context.rank() == 1) {  // has its part of the step, and does nothing
      const Deadline limit = Deadline::after(Milliseconds(200000));
      while (!gave_up && !limit.passed()) std::this_thread::sleep_for(Milliseconds(5));
      return;
    }
    ModelOptions frozen;
    frozen.trainable = false;
    Model model(config(), frozen);
    init_parameters(model, 1);
    Engine engine(model, nullptr, {.cache_rows = 4000, .max_sequences = 8}, sampling_options());
    PhaseTimer timer;
    CarryOverOptions options = options_of({});
    options.timeout_s = 0.2;
    CarryOver carry(engine, nullptr, nullptr, context, timer, options);
    RankShares shares;
    try {
      (void)carry.collect(shares);
      ADD_FAILURE() << "a step without the other rank's samples";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTimeout) << error.what();
      const std::string what = error.what();
      EXPECT_EQ(what.find("rank 0: after cluster.collective_timeout_s step 1 still waits for "), 0u) << what;
      EXPECT_NE(what.find("rank 1 has "), std::string::npos) << what;
    }
    gave_up = true;
  });
}

// A leader that comes to no turn: the other ranks of its replica do not wait for ever, and say for whom.
TEST(CarryOver, ALeaderThatStandsStillIsNamed) {
  ListeningPort port;
  test::StandStill still(1);
  const auto errors = test::on_ranks(2, [&](int rank) {
    RendezvousOptions rendezvous = port.place(rank, 2, Milliseconds(5000));
    still.watch(rendezvous);
    ParallelContext context({.tp = 2}, rendezvous);
    const std::unique_ptr<Model> model = model_of(context, {}, 0);
    Engine engine(*model, nullptr, engine_options(context, {}), sampling_options());
    PhaseTimer timer;
    CarryOver carry(engine, nullptr, nullptr, context, timer, options_of({}));
    context.world().barrier();
    if (rank == 0) return still.stand();
    still.fail([&] {
      RankShares shares;
      (void)carry.collect(shares);
    });
  });
  EXPECT_NE(errors[1].find("rank 0 on " + host_name() + " has not come"), std::string::npos) << errors[1];
  EXPECT_NE(errors[1].find("in phase generation failed"), std::string::npos) << errors[1];
}

TEST(CarryOver, KeptKeysAreMarked) {
  const Case setup{.keep_cache = true};
  for (const Layout& layout : {Layout{.tp = 2}, Layout{.pp = 2}}) {
    int64_t of_split = 0;
    const std::vector<Seen> ranks = on_split({layout, setup});
    for (const std::vector<Sample>& samples : ranks.front().steps) {
      for (const Sample& sample : samples) of_split += sample.mixed_context ? 1 : 0;
    }
    EXPECT_GT(of_split, 0) << to_string(layout);
  }
  const Seen seen = on_ranks(1, setup).front();
  EXPECT_GT(check(seen, setup), 0);
  int64_t marked = 0, off = 0;
  for (const std::vector<Sample>& samples : seen.steps) {
    EXPECT_EQ(differing(samples, false), 0);
    off += differing(samples, true);
    for (const Sample& sample : samples) marked += sample.mixed_context ? 1 : 0;
  }
  EXPECT_GT(marked, 0);
  EXPECT_GT(off, 0) << "this test would not notice keys of other weights";
}

TEST(CarryOver, GoesOnFromACheckpoint) {
  const Case setup{.groups = 2, .places = 24, .age = 2, .steps = 6, .restart_behind = 3};
  for (const Layout& layout : {Layout{}, Layout{.dp = 2}, Layout{.pp = 2}, Layout{.tp = 2, .dp = 2}}) {
    const std::vector<Seen> ranks = layout.world() == 1 ? on_ranks(1, setup) : on_split({layout, setup});
    check(ranks.front(), setup);
    for (const std::vector<Sample>& samples : ranks.front().steps) {
      if (layout.tp == 1) {
        EXPECT_EQ(differing(samples, true), 0);
      }
    }
    for (size_t s = 0; s < ranks.front().steps.size(); ++s) expect_same(ranks.back().steps[s], ranks.front().steps[s]);
  }
}

TEST(CarryOver, AStepThatWasBegunGetsItsPrompts) {
  ParallelContext context;
  ModelOptions frozen;
  frozen.trainable = false;
  const auto model = std::make_unique<Model>(config(), frozen);
  init_parameters(*model, 1);
  Engine engine(*model, nullptr, {.cache_rows = 400}, sampling_options());
  PhaseTimer timer;
  CarryOverOptions options;
  options.ledger = {.groups_per_step = 1, .samples_per_group = 2};
  options.drawn_rewards = 3;
  options.prompt = [](int64_t, bool needed) -> std::optional<CarriedPrompt> {
    EXPECT_TRUE(needed);
    return std::nullopt;
  };
  CarryOver carry(engine, nullptr, nullptr, context, timer, options);
  RankShares shares;
  EXPECT_THROW(carry.collect(shares), Error);
}

}  // namespace
}  // namespace trireme
