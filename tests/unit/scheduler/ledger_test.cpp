// The ledger: what it gives, to whom and when, and over thousands of random lives that every group is trained once, in
// its step, by nothing older than it may be, and that nothing waits for ever.
#include "trainer/rollout/ledger.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "base/error.h"

namespace trireme {
namespace {

// A group whose samples all have one reward teaches nothing.
bool flat(const std::vector<Sample>& group) {
  return std::all_of(group.begin(), group.end(),
                     [&](const Sample& sample) { return sample.raw_reward == group.front().raw_reward; });
}

Sample sample_of(int64_t group, int64_t index, VersionSpans versions, bool is_flat = false) {
  Sample sample;
  sample.group = group;
  sample.index = index;
  sample.weight_versions = std::move(versions);
  sample.response.assign(static_cast<size_t>(sample.weight_versions.empty() ? 1 : sample.weight_versions.back().to), 7);
  sample.raw_reward = is_flat ? 1.0 : static_cast<double>(index);
  return sample;
}

std::vector<Sample> samples_of(const LeasedRun& run, bool is_flat = false) {
  std::vector<Sample> samples;
  for (int64_t i = 0; i < run.span.count; ++i)
    samples.push_back(sample_of(run.span.group, run.span.first_sample + i, {{run.version, 0, 3}}, is_flat));
  return samples;
}

std::vector<SampleSpan> spans_of(const std::vector<LeasedRun>& runs) {
  std::vector<SampleSpan> spans;
  for (const LeasedRun& run : runs) spans.push_back(run.span);
  return spans;
}
using Spans = std::vector<SampleSpan>;

TEST(Ledger, OnPolicyAStepIsTheNextGroupsAndNothingElse) {
  Ledger ledger({.groups_per_step = 2, .samples_per_group = 3});
  EXPECT_EQ(ledger.leasable(), 6);
  const auto first = ledger.lease(0, 4, 0);
  EXPECT_EQ(spans_of(first), (Spans{{0, 0, 3}, {1, 0, 3}})) << "whole groups, the last one over its places";
  EXPECT_TRUE(ledger.lease(0, 100, 0).empty()) << "groups of the next step";
  EXPECT_EQ(ledger.complete(first[1].id, samples_of(first[1])), Completion::kTaken);
  EXPECT_FALSE(ledger.complete());
  EXPECT_EQ(ledger.missing(), (std::vector<MissingGroup>{{0, 0, {{0, 3}}}}));
  EXPECT_EQ(describe(ledger.missing(), "rank"), "group 0 (rank 0 has 3 of their samples)");
  EXPECT_THROW(ledger.take(1), Error);
  EXPECT_EQ(ledger.complete(first[0].id, samples_of(first[0])), Completion::kTaken);
  ASSERT_TRUE(ledger.complete());
  EXPECT_THROW(ledger.take(2), Error);
  const auto taken = ledger.take(1);
  ASSERT_EQ(taken.size(), 2u);
  EXPECT_EQ(taken[0].number, 0);
  EXPECT_EQ(taken[1].number, 1);
  EXPECT_TRUE(ledger.lease(0, 100, 0).empty()) << "its weights are still being trained";
  ledger.trained(1);
  EXPECT_EQ(ledger.newest_version(), 1);
  EXPECT_TRUE(ledger.lease(0, 100, 0).empty()) << "an engine with the old weights";
  EXPECT_EQ(spans_of(ledger.lease(1, 1, 1)), (Spans{{2, 0, 3}}));
  EXPECT_EQ(ledger.complete(first[0].id, samples_of(first[0])), Completion::kKnown) << "its step is trained";
  EXPECT_EQ(ledger.complete(77, {}), Completion::kForeign);
}

TEST(Ledger, FreePlacesTakeGroupsOfNextStepsUpToTheAge) {
  Ledger ledger({.groups_per_step = 2, .samples_per_group = 2, .max_age = 1});
  EXPECT_EQ(ledger.leasable(), 8);
  const auto runs = ledger.lease(0, 100, 0);
  EXPECT_EQ(spans_of(runs), (Spans{{0, 0, 2}, {1, 0, 2}, {2, 0, 2}, {3, 0, 2}}));
  for (const size_t i : {3, 0, 1}) EXPECT_EQ(ledger.complete(runs[i].id, samples_of(runs[i])), Completion::kTaken);
  EXPECT_EQ(ledger.take(1).size(), 2u);
  ledger.trained(1);
  EXPECT_EQ(spans_of(ledger.lease(0, 2, 1)), (Spans{{4, 0, 2}}));
  EXPECT_EQ(ledger.missing(), (std::vector<MissingGroup>{{2, 0, {{0, 2}}}}));
  // It went on over the update.
  std::vector<Sample> spanning = {sample_of(2, 0, {{0, 0, 2}, {1, 2, 4}}), sample_of(2, 1, {{1, 0, 1}})};
  EXPECT_EQ(ledger.complete(runs[2].id, spanning), Completion::kTaken);
  EXPECT_EQ(ledger.take(2).at(1).number, 3);
}

TEST(Ledger, WhatAnEngineHadIsOpenAgainAndCountedOnce) {
  Ledger ledger({.groups_per_step = 1, .samples_per_group = 6, .run_samples = 4});
  const auto runs = ledger.lease(5, 100, 0);
  EXPECT_EQ(spans_of(runs), (Spans{{0, 0, 4}, {0, 4, 2}}));
  EXPECT_EQ(ledger.complete(runs[1].id, samples_of(runs[1])), Completion::kTaken);
  EXPECT_EQ(ledger.held(), (std::map<int64_t, int64_t>{{5, 4}}));
  EXPECT_EQ(ledger.lost(5), 4);
  EXPECT_EQ(ledger.lost(5), 0);
  EXPECT_EQ(ledger.missing(), (std::vector<MissingGroup>{{0, 4, {}}}));
  EXPECT_EQ(describe(ledger.missing(), "engine"), "group 0 (nobody has 4)");
  const auto again = ledger.lease(6, 1, 0);
  EXPECT_EQ(spans_of(again), (Spans{{0, 0, 4}}));
  // The first one was not dead but slow.
  EXPECT_EQ(ledger.complete(runs[0].id, samples_of(runs[0])), Completion::kTaken);
  EXPECT_TRUE(ledger.complete());
  EXPECT_EQ(ledger.complete(again[0].id, samples_of(again[0])), Completion::kKnown);
  EXPECT_EQ(ledger.take(1).at(0).samples.size(), 6u);
}

TEST(Ledger, RefusesWhatIsNotTheRunsOrIsTooOld) {
  Ledger ledger({.groups_per_step = 1, .samples_per_group = 2, .max_age = 1}, /*first_step=*/4, /*first_group=*/10);
  EXPECT_EQ(ledger.newest_version(), 3);
  const auto runs = ledger.lease(0, 2, 2);
  ASSERT_EQ(spans_of(runs), (Spans{{10, 0, 2}}));
  const auto complete = [&](std::vector<Sample> samples) { return ledger.complete(runs[0].id, std::move(samples)); };
  EXPECT_EQ(complete({sample_of(10, 0, {})}), Completion::kForeign) << "one is missing";
  EXPECT_EQ(complete({sample_of(10, 1, {}), sample_of(10, 0, {})}), Completion::kForeign);
  EXPECT_EQ(complete({sample_of(11, 0, {}), sample_of(11, 1, {})}), Completion::kForeign);
  EXPECT_EQ(complete({sample_of(10, 0, {}), sample_of(10, 1, {{3, 1, 2}})}), Completion::kForeign) << "a gap";
  EXPECT_TRUE(ledger.lease(0, 1, 2).empty()) << "still leased";
  EXPECT_EQ(complete({sample_of(10, 0, {{2, 0, 1}}), sample_of(10, 1, {{1, 0, 1}})}), Completion::kTooOld);
  EXPECT_EQ(complete({sample_of(10, 0, {{2, 0, 1}}), sample_of(10, 1, {{4, 0, 1}})}), Completion::kTooOld)
      << "weights that nobody has";
  EXPECT_EQ(ledger.missing(), (std::vector<MissingGroup>{{10, 2, {}}})) << "it is leased again";
  EXPECT_EQ(ledger.lease(0, 1, 3).size(), 1u);
  EXPECT_TRUE(ledger.lease(1, 1, 1).empty());
  EXPECT_THROW(ledger.lease(1, 1, 4), Error);
}

TEST(Ledger, AGroupThatTeachesNothingIsReplacedAtOnce) {
  Ledger ledger({.groups_per_step = 2, .samples_per_group = 2, .teaches_nothing = flat, .max_groups_of_step = 4});
  auto runs = ledger.lease(0, 100, 0);
  ASSERT_EQ(runs.size(), 2u);
  ledger.complete(runs[1].id, samples_of(runs[1], /*is_flat=*/true));
  EXPECT_EQ(ledger.leasable(), 2);
  const auto third = ledger.lease(0, 100, 0);
  EXPECT_EQ(spans_of(third), (Spans{{2, 0, 2}}));
  ledger.complete(third[0].id, samples_of(third[0]));
  EXPECT_FALSE(ledger.complete()) << "the first groups in data order, not those that came first";
  ledger.complete(runs[0].id, samples_of(runs[0], /*is_flat=*/true));
  const auto fourth = ledger.lease(0, 100, 0);
  EXPECT_EQ(spans_of(fourth), (Spans{{3, 0, 2}}));
  Ledger last = ledger;  // two lives from here
  ledger.complete(fourth[0].id, samples_of(fourth[0]));
  ASSERT_TRUE(ledger.complete());
  const auto taken = ledger.take(1);
  ASSERT_EQ(taken.size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(taken[i].kept, i >= 2);
  last.complete(fourth[0].id, samples_of(fourth[0], /*is_flat=*/true));
  EXPECT_FALSE(last.complete());
  ASSERT_TRUE(last.exhausted().has_value());
  EXPECT_EQ(last.exhausted()->kept, 1);
  EXPECT_EQ(last.exhausted()->used_up, 4);
}

// Which step a group is of is not known while groups ahead of it may be left out: the latest one counts.
TEST(Ledger, TheAgeIsThatOfTheLatestStepThatAGroupCanBeOf) {
  Ledger ledger(
      {.groups_per_step = 2, .samples_per_group = 2, .max_age = 1, .teaches_nothing = flat, .max_groups_of_step = 20});
  const auto runs = ledger.lease(0, 100, 0);
  ASSERT_EQ(runs.size(), 4u) << "two steps' groups, if all are kept";
  ledger.complete(runs[2].id, samples_of(runs[2], /*is_flat=*/true));
  EXPECT_EQ(ledger.leasable(), 2) << "one more can only be of step 2";
  for (const size_t i : {0, 1}) ledger.complete(runs[i].id, samples_of(runs[i]));
  EXPECT_EQ(ledger.take(1).size(), 2u);
  ledger.trained(1);
  EXPECT_EQ(spans_of(ledger.lease(0, 100, 0)), (Spans{{4, 0, 2}})) << "older weights may still begin it";
  EXPECT_EQ(spans_of(ledger.lease(0, 100, 1)), (Spans{{5, 0, 2}, {6, 0, 2}}));
}

TEST(Ledger, StepsOfTheCriticAloneMakeNoWeights) {
  Ledger ledger({.groups_per_step = 1, .samples_per_group = 1, .max_age = 1, .critic_only_steps = 3});
  EXPECT_EQ(ledger.version_of(1), 0);
  EXPECT_EQ(ledger.version_of(4), 0);
  EXPECT_EQ(ledger.version_of(5), 1);
  EXPECT_EQ(ledger.leasable(), 5);
  Ledger ends({.groups_per_step = 1, .samples_per_group = 1, .max_age = 5, .last_step = 3});
  EXPECT_EQ(ends.leasable(), 3);
  ends.end_at(2);
  EXPECT_EQ(ends.lease(0, 100, 0).size(), 2u);
}

TEST(Ledger, WhileTheCriticAloneTrainsTheLeadBoundsWhatIsBegun) {
  LedgerOptions options{.groups_per_step = 1, .samples_per_group = 1, .max_age = 1, .critic_only_steps = 5};
  options.most_steps_ahead = 3;
  Ledger ledger(options);
  std::vector<int64_t> begun;  // behind each step, how many groups were
  for (int64_t step = 1; step <= 9; ++step) {
    for (const LeasedRun& run : ledger.lease(0, 100, ledger.newest_version()))
      EXPECT_EQ(ledger.complete(run.id, samples_of(run)), Completion::kTaken);
    EXPECT_EQ(ledger.take(step).front().number, step - 1);
    EXPECT_EQ(ledger.leasable(), 0) << "step " << step << " is not trained yet";
    begun.push_back(ledger.end_group());
    ledger.trained(step);
  }
  // Three steps ahead, but of the steps that train the actor, from the sixth on, only the next is of its first weights.
  EXPECT_EQ(begun, (std::vector<int64_t>{4, 5, 6, 7, 7, 7, 8, 9, 10}));
  options.max_age = 0;
  options.most_steps_ahead = 0;
  Ledger in_turn(options);
  EXPECT_EQ(in_turn.leasable(), 1);
  options.max_age = 2;
  EXPECT_THROW(Ledger{options}, Error) << "a lead below the age";
}

TEST(Ledger, SaysWhichSamplesOfTheNextStepAreThere) {
  Ledger ledger({.groups_per_step = 2, .samples_per_group = 4, .max_age = 1, .run_samples = 2});
  const auto runs = ledger.lease(0, 100, 0);  // two runs of each of four groups
  ASSERT_EQ(runs.size(), 8u);
  for (const size_t i : {1, 2, 3, 4}) ledger.complete(runs[i].id, samples_of(runs[i]));
  const auto ready = [&] {
    Spans spans;
    ledger.visit_ready([&](const Sample* samples, size_t count) {
      spans.push_back({samples->group, samples->index, static_cast<int64_t>(count)});
    });
    return spans;
  };
  EXPECT_EQ(ready(), (Spans{{0, 2, 2}, {1, 0, 4}})) << "the third group is of a later step";
  ledger.complete(runs[0].id, samples_of(runs[0]));
  ledger.take(1);
  EXPECT_EQ(ready(), (Spans{{2, 0, 2}}));
}

TEST(Ledger, ACheckpointHasWhatIsComplete) {
  const LedgerOptions options{.groups_per_step = 1, .samples_per_group = 2, .max_age = 2};
  Ledger ledger(options);
  const auto runs = ledger.lease(0, 100, 0);
  ASSERT_EQ(runs.size(), 3u);
  for (const size_t i : {0, 2}) ledger.complete(runs[i].id, samples_of(runs[i]));
  ledger.take(1);
  ledger.trained(1);
  const auto saved = ledger.whole_groups();
  ASSERT_EQ(saved.size(), 1u);
  EXPECT_EQ(saved[0].number, 2);
  Ledger resumed(options, 2, 1);
  EXPECT_EQ(resumed.restore(saved), 0);
  EXPECT_EQ(spans_of(resumed.lease(0, 100, 1)), (Spans{{1, 0, 2}, {3, 0, 2}}));
  EXPECT_EQ(resumed.counts().complete, 1);
  EXPECT_EQ(resumed.counts().leased_samples, 4);
  // With a smaller age it is generated again.
  LedgerOptions strict = options;
  strict.max_age = 1;
  Ledger other(strict, 2, 1);
  EXPECT_EQ(other.restore(saved), 1);
  EXPECT_EQ(other.whole_groups().size(), 0u);
  strict = options;
  strict.samples_per_group = 3;
  EXPECT_EQ(Ledger(strict, 2, 1).restore(saved), 1);
  EXPECT_THROW(resumed.restore(saved), Error);
}

TEST(Ledger, WhatCanBeginIsDealtEvenlyAndTheRestStaysOpen) {
  Ledger ledger({.groups_per_step = 3, .samples_per_group = 8, .max_age = 1, .run_samples = 4});
  const auto carried = ledger.lease(1, 12, 0);  // engine 1 has some already
  ASSERT_EQ(carried.size(), 3u);
  const auto expected = ledger.leasable_runs(1000);
  EXPECT_EQ(expected.size(), 9u);
  const auto dealt = deal_evenly(ledger, 2, /*places=*/16);
  ASSERT_EQ(dealt.size(), 5u);
  EXPECT_EQ(spans_of(dealt), Spans(expected.begin(), expected.begin() + 5)) << "in data-set order";
  EXPECT_EQ(ledger.held(), (std::map<int64_t, int64_t>{{0, 16}, {1, 16}}));
  EXPECT_EQ(ledger.leasable_runs(1000), Spans(expected.begin() + 5, expected.end()));
  for (size_t i = 5; i < expected.size(); ++i) {  // one after the other, by whoever has room
    EXPECT_EQ(spans_of(ledger.lease(static_cast<int64_t>(i % 2), 1, 0)), Spans{expected[i]});
  }
  EXPECT_EQ(ledger.leasable(), 0);
  Ledger few({.groups_per_step = 1, .samples_per_group = 8, .run_samples = 2});
  EXPECT_EQ(deal_evenly(few, 3, 1000).size(), 4u) << "nobody gets more than an even share, but for a run's end";
  EXPECT_EQ(few.held(), (std::map<int64_t, int64_t>{{0, 4}, {1, 2}, {2, 2}}));
}

TEST(Ledger, WithExactVersionsAGroupIsBegunByOneVersionOnly) {
  Ledger ledger({.groups_per_step = 1, .samples_per_group = 2, .max_age = 1, .exact_version = true, .last_step = 5});
  const auto first = ledger.lease(0, 100, 0);
  EXPECT_EQ(spans_of(first), (Spans{{0, 0, 2}, {1, 0, 2}})) << "steps 1 and 2 want version 0";
  EXPECT_TRUE(ledger.wanting_older().empty());
  ledger.complete(first[0].id, samples_of(first[0]));
  ledger.take(1);
  ledger.trained(1);
  EXPECT_EQ(ledger.wanting_older(), (std::vector<int64_t>{1})) << "step 2 wants version 0, which a resumed run lacks";
  EXPECT_EQ(ledger.lost(0), 2);
  EXPECT_EQ(spans_of(ledger.lease(1, 100, 1)), (Spans{{2, 0, 2}})) << "step 3; not step 2";
  EXPECT_EQ(ledger.leasable(0), 2);
  EXPECT_EQ(ledger.leasable(), 0);
  // Nobody has version 0 any more.
  EXPECT_EQ(ledger.gone_before(1), (std::vector<int64_t>{1}));
  EXPECT_TRUE(ledger.gone_before(1).empty()) << "once";
  const auto again = ledger.lease(1, 100, 1);
  EXPECT_EQ(spans_of(again), (Spans{{1, 0, 2}}));
  EXPECT_EQ(ledger.complete(again[0].id, samples_of(again[0])), Completion::kTaken);
  EXPECT_TRUE(ledger.wanting_older().empty());
  EXPECT_EQ(ledger.complete(first[1].id, samples_of(first[1])), Completion::kKnown);
  EXPECT_EQ(ledger.take(2).size(), 1u);
  // A run that goes on has the newest weights only.
  Ledger resumed({.groups_per_step = 1, .samples_per_group = 2, .max_age = 2, .exact_version = true}, 5, 4);
  EXPECT_EQ(spans_of(resumed.lease(0, 100, 4)), (Spans{{4, 0, 2}, {5, 0, 2}, {6, 0, 2}}));
}

TEST(Ledger, RefusesImpossibleOptions) {
  EXPECT_THROW(Ledger({.max_age = 1, .exact_version = true, .teaches_nothing = flat, .max_groups_of_step = 9}), Error);
  EXPECT_THROW(Ledger({.groups_per_step = 0}), Error);
  EXPECT_THROW(Ledger({.samples_per_group = 0}), Error);
  EXPECT_THROW(Ledger({.max_age = -1}), Error);
  EXPECT_THROW(Ledger({.groups_per_step = 3, .teaches_nothing = flat, .max_groups_of_step = 2}), Error);
  EXPECT_THROW(Ledger({}, 0), Error);
}

// A life: engines that take, go on, complete, die and come back late, and a trainer; checkpoints that another ledger
// goes on from. With exact versions an engine changes its weights only with nothing in hand, and somebody says when
// older ones are nowhere any more. Everything that happens is drawn.
class Life final {
 public:
  explicit Life(uint64_t seed) : random_(seed), flats_(seed % 2 == 0 ? 0 : below(60)) {
    options_.groups_per_step = 1 + below(4);
    options_.samples_per_group = 1 + below(5);
    options_.max_age = below(4);
    options_.critic_only_steps = below(4) == 0 ? below(3) : 0;
    if (options_.critic_only_steps > 0) options_.most_steps_ahead = options_.max_age + below(3);
    options_.run_samples = below(3) == 0 ? 0 : 1 + below(5);
    if (options_.samples_per_group == 1) flats_ = 0;  // a group of one never differs
    if (flats_ > 0) {
      options_.teaches_nothing = flat;
      options_.max_groups_of_step = 1000;
    }
    options_.exact_version = flats_ == 0 && below(2) == 0;
    if (below(4) == 0) options_.last_step = kSteps;
    ledger_ = std::make_unique<Ledger>(options_);
    twin_ = std::make_unique<Ledger>(options_);
    engines_.resize(static_cast<size_t>(1 + below(4)));
  }

  void run() {
    int64_t without_progress = 0;
    while (trained_ < kSteps) {
      ASSERT_LT(++without_progress, 20000) << "nothing happens any more";
      if (something()) without_progress = 0;
      if (::testing::Test::HasFatalFailure() || ::testing::Test::HasNonfatalFailure()) return;
    }
    EXPECT_EQ(next_group_, ledger_->first_group());
  }

 private:
  static constexpr int64_t kSteps = 12;
  struct Task {
    LeasedRun run;
    std::vector<VersionSpans> spans;  // so far, of its samples
  };
  struct Engine {
    int64_t version = 0;
    std::vector<Task> tasks;
  };

  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool is_flat(int64_t group) const { return (group * 7919 + 13) % 100 < flats_; }

  // The same calls, the same answers.
  std::vector<LeasedRun> lease(int64_t engine, int64_t places, int64_t version) {
    const auto runs = ledger_->lease(engine, places, version);
    EXPECT_EQ(runs, twin_->lease(engine, places, version));
    return runs;
  }
  Completion complete(const Task& task) {
    std::vector<Sample> samples;
    for (size_t i = 0; i < task.spans.size(); ++i)
      samples.push_back(sample_of(task.run.span.group, task.run.span.first_sample + static_cast<int64_t>(i),
                                  task.spans[i], is_flat(task.run.span.group)));
    const Completion result = ledger_->complete(task.run.id, samples);
    EXPECT_EQ(result, twin_->complete(task.run.id, samples));
    EXPECT_EQ(ledger_->missing(), twin_->missing());
    return result;
  }

  bool something() {
    Engine& engine = engines_[static_cast<size_t>(below(static_cast<int64_t>(engines_.size())))];
    const int64_t number = &engine - engines_.data();
    switch (below(12)) {
      case 0:
      case 1:
      case 2: {  // it has room
        const auto runs = lease(number, 1 + below(9), engine.version);
        int64_t samples = 0;
        for (const LeasedRun& run : runs) {
          EXPECT_LE(run.span.first_sample + run.span.count, options_.samples_per_group);
          EXPECT_EQ(run.version, engine.version);
          const bool as_wanted = !options_.exact_version || run.version == wanted_version(run.span.group);
          EXPECT_TRUE(as_wanted || wanted_version(run.span.group) < gone_) << "a group of other weights was begun";
          for (int64_t i = 0; i < run.span.count; ++i) {
            const auto sample = std::pair(run.span.group, run.span.first_sample + i);
            EXPECT_TRUE(leased_.insert(sample).second) << "a sample was leased twice at once";
            EXPECT_FALSE(done_.count(sample)) << "a sample that is there was leased again";
            if (!as_wanted) newer_.insert(sample);
          }
          samples += run.span.count;
          engine.tasks.push_back({run, std::vector<VersionSpans>(static_cast<size_t>(run.span.count))});
        }
        return samples > 0;
      }
      case 3:
      case 4:
      case 5:
        decode(engine);
        return false;
      case 6:
      case 7: {  // a run has ended
        if (engine.tasks.empty()) return false;
        const auto at = static_cast<size_t>(below(static_cast<int64_t>(engine.tasks.size())));
        Task task = engine.tasks[at];
        engine.tasks.erase(engine.tasks.begin() + static_cast<int64_t>(at));
        for (VersionSpans& spans : task.spans) append_version(spans, engine.version);
        finish(task, /*late=*/false);
        if (below(4) == 0) {
          EXPECT_EQ(complete(task), Completion::kKnown) << "the same again";
        }
        return true;
      }
      case 8:  // newer weights; unfinished samples go on with them
        if (options_.exact_version && !engine.tasks.empty()) return false;
        if (options_.exact_version && below(2) == 0) give_up();
        engine.version += below(ledger_->newest_version() - engine.version + 1);
        return false;
      case 9:
        if (below(6) != 0) return false;
        EXPECT_EQ(ledger_->lost(number), twin_->lost(number));
        for (Task& task : engine.tasks) {
          forget(task.run);
          if (below(2) == 0) slow_.push_back(task);  // it is not dead, only slow
        }
        engine.tasks.clear();
        return false;
      case 10: {
        if (slow_.empty()) return false;
        Task task = slow_.back();
        slow_.pop_back();
        for (VersionSpans& spans : task.spans) append_version(spans, std::max(task.run.version, last(spans)));
        finish(task, /*late=*/true);
        return false;
      }
      default:
        return train();
    }
  }

  static int64_t last(const VersionSpans& spans) { return spans.empty() ? 0 : spans.back().version; }

  void decode(Engine& engine) {
    for (Task& task : engine.tasks) {
      for (VersionSpans& spans : task.spans) append_version(spans, engine.version);
    }
  }

  void forget(const LeasedRun& run) {
    for (int64_t i = 0; i < run.span.count; ++i) leased_.erase({run.span.group, run.span.first_sample + i});
  }

  void finish(const Task& task, bool late) {
    std::set<std::pair<int64_t, int64_t>> fresh;
    for (int64_t i = 0; i < task.run.span.count; ++i) {
      const auto sample = std::pair(task.run.span.group, task.run.span.first_sample + i);
      if (!done_.count(sample) && sample.first >= ledger_->first_group()) fresh.insert(sample);
    }
    const Completion result = complete(task);
    EXPECT_EQ(result, fresh.empty() ? Completion::kKnown : Completion::kTaken) << "late: " << late;
    for (const auto& sample : fresh) {
      done_.insert(sample);
      leased_.erase(sample);
    }
  }

  // With exact versions no group is left out: a group's step is known, and so are the weights that it wants.
  int64_t wanted_version(int64_t group) const {
    return std::max<int64_t>(0, ledger_->version_of(1 + group / options_.groups_per_step) - options_.max_age);
  }

  // No engine has weights of these versions any more, nor will have.
  void give_up() {
    const int64_t oldest = std::min_element(engines_.begin(), engines_.end(), [](const Engine& a, const Engine& b) {
                             return a.version < b.version;
                           })->version;
    EXPECT_EQ(ledger_->gone_before(oldest), twin_->gone_before(oldest));
    gone_ = std::max(gone_, oldest);
  }

  // Whether an engine can begin something, with the weights that it has or, without exact versions, the newest ones.
  bool somebody_can_begin() const {
    if (!options_.exact_version) return ledger_->leasable() > 0;
    return std::any_of(engines_.begin(), engines_.end(), [&](const Engine& engine) {
      for (int64_t version = engine.version; version <= ledger_->newest_version(); ++version) {
        if (ledger_->leasable(version) > 0) return true;
      }
      return false;
    });
  }

  // What the next step must consist of.
  std::vector<int64_t> wanted() const {
    std::vector<int64_t> groups;
    int64_t kept = 0;
    for (int64_t group = next_group_; kept < options_.groups_per_step; ++group) {
      groups.push_back(group);
      kept += is_flat(group) ? 0 : 1;
    }
    return groups;
  }

  bool train() {
    EXPECT_EQ(ledger_->missing(), twin_->missing());
    if (!ledger_->complete()) {
      // Somebody has it, or may have it.
      bool somebody = somebody_can_begin();
      for (const MissingGroup& group : ledger_->missing()) somebody = somebody || !group.holders.empty();
      if (!somebody && options_.exact_version) {  // all engines have passed by the weights that it wants
        give_up();
        somebody = somebody_can_begin();
      }
      EXPECT_TRUE(somebody) << "step " << ledger_->next_step() << " waits for ever";
      return false;
    }
    const int64_t step = ++trained_;
    const auto taken = ledger_->take(step);
    EXPECT_EQ(twin_->take(step).size(), taken.size());
    std::vector<int64_t> numbers;
    for (const LedgerGroup& group : taken) {
      numbers.push_back(group.number);
      EXPECT_EQ(static_cast<int64_t>(group.samples.size()), options_.samples_per_group);
      for (size_t i = 0; i < group.samples.size(); ++i) {
        EXPECT_EQ(group.samples[i].group, group.number);
        EXPECT_EQ(group.samples[i].index, static_cast<int64_t>(i));
        for (const VersionSpan& span : group.samples[i].weight_versions) {
          EXPECT_LE(ledger_->version_of(step) - span.version, options_.max_age) << "a token is too old";
          EXPECT_GE(span.version, 0);
          EXPECT_LE(span.version, ledger_->version_of(step)) << "a token of weights that there were not";
        }
        if (options_.exact_version && !newer_.count({group.number, static_cast<int64_t>(i)})) {
          const VersionSpans& spans = group.samples[i].weight_versions;
          EXPECT_EQ(spans.size(), 1u);
          EXPECT_EQ(spans.front().version, wanted_version(group.number)) << "a token of other weights than wanted";
        }
      }
    }
    EXPECT_EQ(numbers, wanted());
    next_group_ = numbers.back() + 1;
    ledger_->trained(step);
    twin_->trained(step);
    EXPECT_EQ(ledger_->newest_version(), ledger_->version_of(step + 1));
    if (below(6) == 0) resume();
    return true;
  }

  // The run was killed behind a checkpoint.
  void resume() {
    const auto saved = ledger_->whole_groups();
    const int64_t step = ledger_->next_step(), group = ledger_->first_group();
    if (options_.exact_version) expect_wanting_older(saved);
    ledger_ = std::make_unique<Ledger>(options_, step, group);
    twin_ = std::make_unique<Ledger>(options_, step, group);
    EXPECT_EQ(ledger_->restore(saved), 0);
    EXPECT_EQ(twin_->restore(saved), 0);
    done_.clear();
    for (const LedgerGroup& whole : saved) {
      for (const Sample& sample : whole.samples) done_.insert({whole.number, sample.index});
    }
    leased_.clear();
    slow_.clear();
    std::erase_if(newer_, [&](const auto& sample) { return !done_.count(sample); });
    gone_ = ledger_->newest_version();
    for (Engine& engine : engines_) engine = {ledger_->newest_version(), {}};
  }

  // What a checkpoint lacks that only older weights would begin.
  void expect_wanting_older(const std::vector<LedgerGroup>& saved) const {
    std::set<int64_t> whole;
    for (const LedgerGroup& group : saved) whole.insert(group.number);
    std::vector<int64_t> lacking;
    for (int64_t group = ledger_->first_group(); wanted_version(group) < ledger_->newest_version(); ++group) {
      if (1 + group / options_.groups_per_step > options_.last_step) break;
      if (!whole.count(group)) lacking.push_back(group);
    }
    EXPECT_EQ(ledger_->wanting_older(), lacking);
  }

  std::mt19937_64 random_;
  int64_t flats_ = 0;  // of 100 groups
  LedgerOptions options_;
  std::unique_ptr<Ledger> ledger_, twin_;
  std::vector<Engine> engines_;
  std::vector<Task> slow_;
  std::set<std::pair<int64_t, int64_t>> leased_, done_, newer_;  // newer_: leased to newer weights than it wanted
  int64_t gone_ = 0;                                             // weights of versions below are nowhere any more
  int64_t trained_ = 0, next_group_ = 0;
};

TEST(Ledger, RandomLivesTrainEveryGroupOnceInItsStepAndNothingTooOld) {
  for (uint64_t seed = 0; seed < 4000 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Life(seed).run();
  }
}

}  // namespace
}  // namespace trireme
