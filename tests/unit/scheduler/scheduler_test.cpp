// The scheduler alone: plans are carried out on an array of labels instead of an arena, so that every row a step reads
// is checked to be the row it should be.
#include "trainer/rollout/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "base/error.h"

namespace trireme {
namespace {

// What a cache row holds: token `position` of the group's prompt (sequence -1) or of one sequence.
struct Label {
  int64_t group = -1;
  int64_t sequence = -1;
  int64_t position = -1;
  bool operator==(const Label&) const = default;
};

struct Group {
  int64_t prompt = 0;
  std::vector<int64_t> max_new;
  std::vector<int64_t> stop_after;  // tokens after which it stops by itself, at most max_new
  std::vector<int64_t> made = {};   // tokens that it has already, of samples that were begun elsewhere
};

// Drives a scheduler to the end and checks everything on the way.
class Simulation {
 public:
  // late_stops: what a step sampled is looked at after the next step was committed, as with a device that runs ahead.
  explicit Simulation(const SchedulerOptions& options, bool late_stops = false)
      : scheduler_(options), late_stops_(late_stops), arena_(options.first_row + options.cache_rows) {}

  void add(const Group& group) {
    const bool begun = !group.made.empty();
    const int64_t first = begun ? scheduler_.add_begun(group.prompt, group.max_new, group.made)
                                : scheduler_.add_group(group.prompt, group.max_new);
    for (size_t i = 0; i < group.max_new.size(); ++i) {
      const int64_t made = begun ? group.made[i] : 0;
      sequences_[first + static_cast<int64_t>(i)] = {first, group.prompt, group.max_new[i], group.stop_after[i],
                                                     made,  made};
    }
    scheduler_.check();
  }

  void step() {
    scheduler_.plan(plan_);
    StepPlan again;
    scheduler_.plan(again);  // planning changes nothing
    ASSERT_EQ(plan_.segments, again.segments);
    ASSERT_EQ(plan_.placements, again.placements);
    ASSERT_EQ(plan_.moves, again.moves);
    ASSERT_EQ(plan_.outputs, again.outputs);
    ASSERT_EQ(plan_.empty(), scheduler_.idle());
    if (plan_.empty()) return;
    ++steps_;
    preemptions_ += static_cast<int64_t>(plan_.preempted.size());
    prefill_tokens_ += plan_.prefill_tokens;
    moves_ += static_cast<int64_t>(plan_.moves.size());
    carry_out();
    scheduler_.commit(plan_);
    scheduler_.check();
    for (const Output& o : plan_.outputs) {
      Sequence& s = sequences_.at(o.sequence);
      ASSERT_EQ(o.position, s.prompt + s.sampled);
      ++s.sampled;
      ASSERT_LE(s.sampled, s.max_new);
    }
    if (late_stops_) std::swap(plan_.outputs, unseen_);
    take_outputs(plan_.outputs);
  }

  void run(int64_t max_steps) {
    for (int64_t i = 0; i < max_steps && !scheduler_.idle(); ++i) {
      step();
      if (::testing::Test::HasFatalFailure()) return;
    }
    take_outputs(unseen_);
    ASSERT_TRUE(scheduler_.idle()) << "not done after " << max_steps << " steps";
    ASSERT_EQ(finished_, static_cast<int64_t>(sequences_.size()));
    ASSERT_EQ(scheduler_.used_rows(), 0);
    ASSERT_EQ(scheduler_.residents(), 0);
    for (const auto& [id, s] : sequences_) ASSERT_EQ(s.produced, s.stop_after) << id;
  }

  Scheduler& scheduler() { return scheduler_; }
  const StepPlan& plan() const { return plan_; }
  int64_t steps_ = 0, preemptions_ = 0, prefill_tokens_ = 0, finished_ = 0, moves_ = 0;

 private:
  struct Sequence {
    int64_t group = 0, prompt = 0, max_new = 0, stop_after = 0;
    int64_t sampled = 0;   // by committed steps
    int64_t produced = 0;  // of those, kept
    bool done = false;
  };
  void take_outputs(const std::vector<Output>& outputs) {
    for (const Output& o : outputs) {
      Sequence& s = sequences_.at(o.sequence);
      if (s.done) {  // only a late stop leaves a surplus, and only one token
        ASSERT_TRUE(late_stops_) << "a token after the end of sequence " << o.sequence;
        ASSERT_EQ(o.position, s.prompt + s.produced);
        continue;
      }
      ++s.produced;
      if (s.produced < s.stop_after) continue;
      s.done = true;
      if (s.produced < s.max_new) scheduler_.stop(o.sequence);
      ++finished_;
      scheduler_.check();
    }
  }
  Label label(int64_t id, int64_t position) const {
    const Sequence& s = sequences_.at(id);
    return {s.group, position < s.prompt ? -1 : id, position};
  }
  void move(const RowCopy& c) {
    ASSERT_GE(std::min(c.from, c.to), scheduler_.options().first_row);
    ASSERT_LE(std::max(c.from, c.to) + c.rows, static_cast<int64_t>(arena_.size()));
    const std::vector<Label> rows(arena_.begin() + c.from, arena_.begin() + c.from + c.rows);
    std::copy(rows.begin(), rows.end(), arena_.begin() + c.to);
  }
  void carry_out() {
    for (const RowCopy& c : plan_.moves) move(c);
    for (const RowCopy& c : plan_.copies) move(c);
    int64_t tokens = 0;
    for (const Segment& segment : plan_.segments) {
      ASSERT_GE(segment.start, scheduler_.options().first_row);
      ASSERT_LE(segment.start + segment.past + segment.count, static_cast<int64_t>(arena_.size()));
      for (int64_t i = 0; i < segment.past; ++i) {
        ASSERT_EQ(arena_[segment.start + i], label(segment.sequence, i))
            << "sequence " << segment.sequence << " row " << i;
      }
      tokens += segment.count;
    }
    ASSERT_EQ(tokens, plan_.tokens);
    ASSERT_EQ(tokens, plan_.prefill_tokens + plan_.decode_tokens);
    ASSERT_LE(plan_.prefill_tokens, scheduler_.options().prefill_chunk_tokens);
    ASSERT_LE(static_cast<int64_t>(plan_.segments.size()), scheduler_.options().max_sequences);
    int64_t row = 0;
    for (const Segment& segment : plan_.segments) {
      for (int64_t i = 0; i < segment.count; ++i, ++row) {
        const int64_t position = segment.past + i;
        ASSERT_LT(position, sequences_.at(segment.sequence).prompt + sequences_.at(segment.sequence).sampled)
            << "computes a token that nobody knows";
        arena_[segment.start + position] = label(segment.sequence, position);
        row_label_[row] = label(segment.sequence, position);
      }
    }
    for (const Output& o : plan_.outputs) ASSERT_EQ(row_label_.at(o.row), label(o.sequence, o.position - 1));
  }

  Scheduler scheduler_;
  bool late_stops_ = false;
  std::vector<Output> unseen_;
  std::vector<Label> arena_;
  std::map<int64_t, Sequence> sequences_;
  std::map<int64_t, Label> row_label_;
  StepPlan plan_;
};

Group uniform_group(int64_t prompt, int64_t samples, int64_t length) {
  return {prompt, std::vector<int64_t>(samples, length), std::vector<int64_t>(samples, length)};
}

TEST(Scheduler, PromptIsPrefilledOncePerGroup) {
  Simulation s({.cache_rows = 1000, .max_sequences = 64, .prefill_chunk_tokens = 1000});
  s.add(uniform_group(20, 8, 5));
  s.run(100);
  EXPECT_EQ(s.prefill_tokens_, 20);
  EXPECT_EQ(s.steps_, 5);  // the first step computes the prompt and samples all eight first tokens
  EXPECT_EQ(s.preemptions_, 0);
}

TEST(Scheduler, LongPromptsAreCutByTheBudget) {
  Simulation s({.cache_rows = 1000, .max_sequences = 64, .prefill_chunk_tokens = 16});
  s.add(uniform_group(50, 2, 3));
  s.step();
  EXPECT_EQ(s.plan().tokens, 16);
  EXPECT_TRUE(s.plan().outputs.empty());
  s.run(100);
  EXPECT_EQ(s.steps_, 6);  // 16 + 16 + 16 + 2, then two of two rows
}

TEST(Scheduler, DecodingGoesOnWhileAnotherPromptIsComputed) {
  Simulation s({.cache_rows = 1000, .max_sequences = 64, .prefill_chunk_tokens = 8});
  s.add(uniform_group(4, 2, 8));
  s.step();
  s.add(uniform_group(30, 1, 2));
  s.step();
  EXPECT_EQ(s.plan().decode_tokens, 2);
  EXPECT_EQ(s.plan().prefill_tokens, 8);
  s.run(100);
}

TEST(Scheduler, FullCachePreemptsTheNewestAndLosesNothing) {
  Simulation s({.cache_rows = 100, .max_sequences = 8, .prefill_chunk_tokens = 64, .headroom_rows = 4});
  for (int i = 0; i < 4; ++i) s.add(uniform_group(8, 2, 60));
  s.run(10000);
  EXPECT_GT(s.preemptions_, 0);
  EXPECT_EQ(s.finished_, 8);
}

TEST(Scheduler, ASampleAsLargeAsTheCacheRuns) {
  Simulation s({.cache_rows = 40, .max_sequences = 8, .prefill_chunk_tokens = 64, .headroom_rows = 4});
  for (int i = 0; i < 3; ++i) s.add(uniform_group(11, 2, 30));
  s.run(10000);
}

TEST(Scheduler, TheLastHolderHandsThePromptOver) {
  // One sequence at a time: each sample that ends gives its extent to the next, so the prompt is computed once.
  Simulation s({.cache_rows = 30, .max_sequences = 1, .prefill_chunk_tokens = 64, .headroom_rows = 20});
  s.add(uniform_group(12, 5, 4));
  s.run(1000);
  EXPECT_EQ(s.prefill_tokens_, 12);
}

TEST(Scheduler, GroupsFinishInTurnWhenPlacesAreShort) {
  Simulation s({.cache_rows = 10000, .max_sequences = 8, .prefill_chunk_tokens = 1000});
  for (int i = 0; i < 10; ++i) s.add(uniform_group(5, 8, 10));
  s.step();
  EXPECT_EQ(s.plan().admitted, 1);  // the siblings of the first group have the other seven places
  s.run(1000);
  EXPECT_LE(s.steps_, 10 * 11);
}

TEST(Scheduler, RefusesWhatCanNeverFit) {
  Scheduler scheduler({.cache_rows = 50});
  EXPECT_NO_THROW(scheduler.add_group(20, {31}));
  try {
    scheduler.add_group(20, {1, 32});
    FAIL() << "accepted a sample that needs 51 rows of 50";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUser);
    EXPECT_NE(std::string(e.what()).find("needs 51 cache rows"), std::string::npos) << e.what();
  }
  EXPECT_THROW(scheduler.add_group(0, {1}), Error);
  EXPECT_THROW(scheduler.add_group(5, {}), Error);
  EXPECT_THROW(scheduler.add_group(5, {0}), Error);
  EXPECT_EQ(scheduler.unfinished(), 1);  // the refused ones left nothing behind
  EXPECT_THROW(Scheduler({.cache_rows = 0}), Error);
  EXPECT_THROW(Scheduler({.cache_rows = 8, .max_sequences = 0}), Error);
  EXPECT_THROW(Scheduler({.cache_rows = 8, .prefill_chunk_tokens = 0}), Error);
  EXPECT_THROW(Scheduler({.cache_rows = 8, .grow_factor = 0.5}), Error);
}

TEST(Scheduler, AStalePlanIsRefused) {
  Scheduler scheduler({.cache_rows = 50});
  scheduler.add_group(5, {3});
  StepPlan plan;
  scheduler.plan(plan);
  scheduler.add_group(5, {3});
  EXPECT_THROW(scheduler.commit(plan), Error);
  scheduler.plan(plan);
  scheduler.commit(plan);
  EXPECT_THROW(scheduler.commit(plan), Error);
}

// The prompt once, and each sample's own tokens but the last.
TEST(Scheduler, SamplesThatWereBegunElsewhereAreComputedAgain) {
  Simulation s({.cache_rows = 1000, .max_sequences = 64, .prefill_chunk_tokens = 30});
  Group group = uniform_group(20, 3, 10);
  group.made = {4, 1, 9};
  s.add(group);
  EXPECT_FALSE(s.scheduler().reads_cached(0));
  s.step();
  EXPECT_TRUE(s.scheduler().reads_cached(0));
  EXPECT_TRUE(s.scheduler().reads_cached(2)) << "the prompt";
  s.run(1000);
  EXPECT_EQ(s.prefill_tokens_, 20 + 4 + 9);
  EXPECT_FALSE(s.scheduler().reads_cached(0)) << "it has ended";
  Scheduler scheduler({.cache_rows = 100});
  EXPECT_THROW(scheduler.add_begun(5, {3, 3}, {1, 0}), Error);
  EXPECT_THROW(scheduler.add_begun(5, {3, 3}, {1, 3}), Error);
  EXPECT_THROW(scheduler.add_begun(5, {3, 3}, {1}), Error);
}

TEST(Scheduler, DroppedCacheIsComputedAgain) {
  Simulation s({.cache_rows = 1000, .max_sequences = 64, .prefill_chunk_tokens = 30});
  s.add(uniform_group(20, 4, 10));
  s.add(uniform_group(25, 4, 10));
  for (int i = 0; i < 4; ++i) {
    s.step();
    s.scheduler().drop_cache();
    s.scheduler().check();
    EXPECT_EQ(s.scheduler().used_rows(), 0);
  }
  s.run(1000);
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kWorkloads = 500;  // these builds are slow
#else
constexpr uint64_t kWorkloads = 4000;
#endif

// Random workloads in random caches, groups arriving on the way.
TEST(Scheduler, RandomWorkloadsKeepEveryInvariant) {
  int64_t preemptions = 0, moves = 0;
  for (uint64_t seed = 0; seed < kWorkloads; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto draw = [&random](int64_t low, int64_t high) {
      return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
    };
    SchedulerOptions options;
    options.cache_rows = draw(8, 200);
    options.first_row = draw(0, 2) == 0 ? draw(1, 50) : 0;
    options.max_sequences = draw(1, 24);
    options.prefill_chunk_tokens = draw(1, 60);
    options.chunk_alignment = draw(1, std::min<int64_t>(16, options.prefill_chunk_tokens));
    options.headroom_rows = draw(0, 20);
    options.grow_factor = 1.0 + static_cast<double>(draw(0, 4)) / 4.0;
    Simulation simulation(options, /*late_stops=*/draw(0, 1) == 1);
    const int64_t groups = draw(1, 10);
    int64_t total_tokens = 0;
    for (int64_t g = 0; g < groups; ++g) {
      Group group;
      group.prompt = draw(1, options.cache_rows);
      const int64_t longest = options.cache_rows - group.prompt + 1;
      const int64_t samples = draw(1, 8);
      for (int64_t i = 0; i < samples; ++i) {
        group.max_new.push_back(draw(1, std::min<int64_t>(longest, 40)));
        group.stop_after.push_back(draw(0, 2) == 0 ? draw(1, group.max_new.back()) : group.max_new.back());
        total_tokens += group.prompt + group.max_new.back();
      }
      const bool goes_on =
          std::all_of(group.stop_after.begin(), group.stop_after.end(), [](int64_t n) { return n > 1; });
      for (const int64_t stop : group.stop_after) {
        if (goes_on && seed % 3 == 0) group.made.push_back(draw(1, stop - 1));
      }
      simulation.add(group);
      for (int64_t i = draw(0, 4); i > 0; --i) {
        simulation.step();
        if (HasFatalFailure()) return;
      }
      if (draw(0, 9) == 0) simulation.scheduler().drop_cache();
    }
    // Even one token a step with everything computed again for each token would end before this.
    simulation.run(total_tokens * options.cache_rows);
    if (HasFatalFailure()) return;
    preemptions += simulation.preemptions_;
    moves += simulation.moves_;
  }
  // The workloads do exercise the hard paths.
  EXPECT_GT(preemptions, static_cast<int64_t>(kWorkloads) / 5);
  EXPECT_GT(moves, static_cast<int64_t>(kWorkloads) / 5);
}

TEST(Scheduler, SameCallsSamePlans) {
  const auto trace = [] {
    std::vector<int64_t> numbers;
    Scheduler scheduler({.cache_rows = 90, .max_sequences = 6, .prefill_chunk_tokens = 20, .headroom_rows = 3});
    for (int i = 0; i < 5; ++i) scheduler.add_group(7 + i, {20, 25, 30});
    StepPlan plan;
    while (!scheduler.idle()) {
      scheduler.plan(plan);
      for (const Segment& s : plan.segments) numbers.insert(numbers.end(), {s.sequence, s.start, s.past, s.count});
      for (const RowCopy& c : plan.moves) numbers.insert(numbers.end(), {c.from, c.to, c.rows});
      scheduler.commit(plan);
    }
    return numbers;
  };
  EXPECT_EQ(trace(), trace());
}

}  // namespace
}  // namespace trireme
