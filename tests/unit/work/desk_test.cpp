// The desk: who gets work, when it goes back, what is counted once; and over random lives that each group is trained
// once, in its step, by weights that may draw it, and that nothing waits for ever.
#include "trainer/work/desk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>

namespace trireme {
namespace {

using testing::HasSubstr;

bool flat(const std::vector<Sample>& group) {
  return std::all_of(group.begin(), group.end(),
                     [&](const Sample& sample) { return sample.raw_reward == group.front().raw_reward; });
}

WorkPrompt prompt_of(int64_t group) {
  WorkPrompt prompt;
  prompt.example.prompt = {static_cast<int32_t>(group % 50), 1};
  prompt.example.prompt_text = "group " + std::to_string(group);
  prompt.example.gold = std::to_string(group);
  return prompt;
}

DeskOptions options_of(const LedgerOptions& ledger) {
  DeskOptions options;
  options.ledger = ledger;
  options.silence = Milliseconds(1000);
  options.lease = Milliseconds(5000);
  options.vocabulary = 100;
  options.rewards = 1;
  options.name = "desk";
  options.prompt = [](int64_t group, bool) { return prompt_of(group); };
  return options;
}

Desk::Time at(int64_t ms) { return Desk::Time(Milliseconds(ms)); }

struct Engine {
  Caller caller;
  int64_t version = -1, fetched = -1, steps = 0;
};

Engine join(Desk& desk, const std::string& name, int64_t ms, const std::string& session = "") {
  const JoinReply reply = desk.join({name, session.empty() ? name + "-s" : session, "", "", "", 16}, at(ms));
  return {{reply.engine, session.empty() ? name + "-s" : session, reply.desk}};
}

LeaseReply lease(Desk& desk, const Engine& engine, int64_t places, int64_t ms) {
  LeaseRequest request;
  request.caller = engine.caller;
  request.places = places;
  request.version = engine.version;
  request.fetched = std::max(engine.version, engine.fetched);
  request.steps = engine.steps;
  return desk.lease(request, at(ms));
}

GroupsRequest samples_of(const Engine& engine, const LeasedWork& work, int64_t version, bool is_flat = false,
                         int64_t scored = 0) {
  GroupsRequest request;
  request.caller = engine.caller;
  request.run = work.run;
  request.group = work.group;
  request.first_sample = work.first_sample;
  for (int64_t i = 0; i < work.count; ++i) {
    Sample sample;
    sample.index = work.first_sample + i;
    sample.response = {7, 8};
    sample.generation_logprobs = {-1, -2};
    sample.weight_versions = {{version, 0, 2}};
    sample.raw_reward = is_flat ? 1.0 : static_cast<double>(sample.index);
    sample.reward_parts = {sample.raw_reward};
    request.samples.push_back(std::move(sample));
  }
  if (scored > 0) request.counters = {{"math", scored, 0, 0, 0, ""}};
  return request;
}

TEST(Desk, EnginesShareEvenlyAndBringSamplesOnce) {
  Desk desk(options_of({.groups_per_step = 2, .samples_per_group = 4, .run_samples = 2}));
  desk.publish();
  Engine a = join(desk, "a", 0), b = join(desk, "b", 0);
  EXPECT_EQ(a.caller.engine, 0);
  EXPECT_EQ(b.caller.engine, 1);
  a.version = b.version = 0;
  EXPECT_TRUE(lease(desk, a, 16, 1).runs.empty()) << "the actor is not ready";
  desk.open();
  const LeaseReply of_a = lease(desk, a, 16, 1), of_b = lease(desk, b, 16, 1);
  ASSERT_EQ(of_a.runs.size(), 2u) << "half of eight samples, whatever room it has";
  ASSERT_EQ(of_b.runs.size(), 2u);
  EXPECT_EQ(of_a.runs[1].first_sample_id, 2u);
  EXPECT_EQ(of_b.runs[0].group, 1);
  EXPECT_EQ(of_b.runs[0].prompt_text, "group 1");
  for (const LeasedWork& work : of_a.runs)
    desk.take_groups(samples_of(a, work, 0, false, work.first_sample + 2), at(2));
  EXPECT_FALSE(desk.complete());
  EXPECT_THAT(desk.describe_wait(), HasSubstr("group 1 (b has 4 of their samples); 2 engines are there"));
  for (const LeasedWork& work : of_b.runs) {
    desk.take_groups(samples_of(b, work, 0, false, 3), at(2));
    desk.take_groups(samples_of(b, work, 0, false, 3), at(2));  // the answer was lost on the way
  }
  ASSERT_TRUE(desk.complete());
  const Desk::Step step = desk.take(1);
  ASSERT_EQ(step.groups.size(), 2u);
  EXPECT_EQ(*step.groups[1].samples[3].prompt, prompt_of(1).example.prompt);
  ASSERT_EQ(step.rewards.size(), 1u);
  EXPECT_EQ(step.rewards[0].scored, 4 + 3) << "as the engines' counters stand";
  EXPECT_EQ(step.samples, (std::map<int64_t, int64_t>{{0, 4}, {1, 4}}));
  EXPECT_EQ(desk.take_groups(samples_of(b, of_b.runs[0], 0), at(3)).result, GroupsReply::Result::kCounted)
      << "long trained, answered the same way";
  EXPECT_TRUE(lease(desk, a, 16, 3).runs.empty()) << "the next weights are not there";
  desk.trained(1);
  WeightsRequest ask{a.caller, 0, 0};
  EXPECT_EQ(desk.weights(ask, at(3)).version, -1) << "not published yet";
  desk.publish();
  const WeightsReply of_link = desk.weights(ask, at(3));
  EXPECT_EQ(of_link.version, 1);
  ask.caller = b.caller;
  const WeightsReply other = desk.weights(ask, at(3));
  EXPECT_EQ(other.engine, 1) << "from which its sources follow";
  EXPECT_NE(other.link, of_link.link);
  EXPECT_EQ(desk.behind(), (std::vector<std::string>{"a", "b"}));
  LeaseRequest waiting;
  waiting.caller = b.caller;
  waiting.version = waiting.fetched = 0;
  EXPECT_FALSE(desk.answers_now(waiting, {}));
  ask.after = 1;
  EXPECT_EQ(desk.weights(ask, at(4)).version, -1);
  EXPECT_TRUE(desk.answers_now(waiting, {})) << "it has new weights beside it";
  EXPECT_EQ(desk.behind(), (std::vector<std::string>{"a"}));
  b.version = 1;
  EXPECT_EQ(lease(desk, b, 16, 5).runs.size(), 2u);
}

// From the optimizer's first write on nobody can send them, until the next ones are whole.
TEST(Desk, WeightsThatAreWrittenAreOfferedToNobody) {
  Desk desk(options_of({.groups_per_step = 1, .samples_per_group = 2}));
  desk.publish();
  desk.open();
  Engine engine = join(desk, "a", 0);
  EXPECT_EQ(desk.weights({engine.caller, -1, 1000}, at(0)).version, 0);
  engine.version = 0;
  desk.take_groups(samples_of(engine, lease(desk, engine, 2, 1).runs.at(0), 0), at(2));
  desk.take(1);
  desk.retract();
  const Engine late = join(desk, "b", 3);
  EXPECT_EQ(desk.weights({late.caller, -1, 1000}, at(3)).version, -1) << "they are being written";
  desk.trained(1);
  EXPECT_EQ(desk.weights({late.caller, -1, 1000}, at(4)).version, -1) << "they are not published yet";
  desk.publish();
  EXPECT_EQ(desk.weights({late.caller, -1, 1000}, at(5)).version, 1);
}

TEST(Desk, WhoIsSilentOrStandsStillLosesItsLeases) {
  Desk desk(options_of({.groups_per_step = 1, .samples_per_group = 4}));
  desk.open();
  desk.publish();
  Engine a = join(desk, "a", 0);
  a.version = 0;
  const LeaseReply first = lease(desk, a, 16, 0);
  ASSERT_EQ(first.runs.size(), 1u);
  EXPECT_FALSE(desk.expire(at(1000)));
  EXPECT_TRUE(desk.expire(at(1001)));
  EXPECT_THAT(desk.take_news().back(), HasSubstr("engine a is gone: nothing was heard of it for 1 s"));
  EXPECT_FALSE(lease(desk, a, 16, 1002).known);
  // It was only slow.
  EXPECT_EQ(desk.take_groups(samples_of(a, first.runs[0], 0), at(1003)).result, GroupsReply::Result::kCounted);
  EXPECT_TRUE(desk.complete());
  desk.take(1);
  desk.trained(1);
  desk.publish();
  a = join(desk, "a", 1100);
  EXPECT_EQ(a.caller.engine, 0) << "its number of before";
  a.version = 1;
  ASSERT_EQ(lease(desk, a, 16, 2000).runs.size(), 1u);
  for (int64_t ms = 2500; ms <= 7000; ms += 500) {
    lease(desk, a, 0, ms);
    EXPECT_FALSE(desk.expire(at(ms)));
  }
  lease(desk, a, 0, 7100);
  EXPECT_TRUE(desk.expire(at(7100))) << "it speaks, but takes no step";
  EXPECT_EQ(desk.lost_engines(), 2);
  a = join(desk, "a", 7200);
  a.version = 1;
  ASSERT_EQ(lease(desk, a, 16, 7200).runs.size(), 1u);
  desk.leave({a.caller, "scaled down", false, 0}, at(7300));
  EXPECT_EQ(desk.engines(), 0);
  EXPECT_THAT(desk.describe_wait(), HasSubstr("nobody has 4); no engine is there"));
}

TEST(Desk, AnotherProcessOfTheNameTakesThePlace) {
  Desk desk(options_of({.groups_per_step = 1, .samples_per_group = 4}));
  desk.open();
  desk.publish();
  Engine a = join(desk, "a", 0, "one");
  a.version = 0;
  ASSERT_EQ(lease(desk, a, 16, 0).runs.size(), 1u);
  Engine again = join(desk, "a", 10, "two");
  EXPECT_EQ(again.caller.engine, 0);
  again.version = 0;
  EXPECT_EQ(lease(desk, again, 16, 10).runs.size(), 1u) << "at once";
  EXPECT_FALSE(lease(desk, a, 16, 11).known);
  Caller stranger = again.caller;
  stranger.desk = "another";
  EXPECT_THROW(desk.weights({stranger, 0, 0}, at(12)), Error);
}

TEST(Desk, EnginesThatAreLostInARowEndTheRun) {
  DeskOptions options = options_of({.groups_per_step = 1, .samples_per_group = 1});
  options.max_lost = 2;
  Desk desk(options);
  desk.open();
  desk.publish();
  for (int64_t i = 0; i < 2; ++i) {
    EXPECT_FALSE(desk.complete());
    Engine engine = join(desk, "e", i, std::to_string(i));
    engine.version = 0;
    ASSERT_EQ(lease(desk, engine, 1, i).runs.size(), 1u);
    desk.leave({engine.caller, "", false, 0}, at(i));
  }
  try {
    desk.complete();
    ADD_FAILURE() << "the run goes on";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("max_generation_failures"));
  }
  Desk other(options_of({}));
  other.open();
  const Engine engine = join(other, "e", 0);
  other.leave({engine.caller, "reward 'math' failed", true, static_cast<int64_t>(ErrorKind::kIo)}, at(0));
  EXPECT_THROW(other.complete(), Error) << "others would fail likewise";
}

TEST(Desk, StepsOfTheCriticAloneGiveWorkAndNoWeights) {
  DeskOptions options = options_of({.groups_per_step = 1, .samples_per_group = 2, .critic_only_steps = 2});
  options.ledger.most_steps_ahead = 0;  // in turn
  options.section = "ppo";
  Desk desk(std::move(options));
  desk.publish();
  desk.open();
  Engine engine = join(desk, "a", 0);
  engine.version = 0;
  for (int64_t step = 1; step <= 4; ++step) {
    engine.version = std::max<int64_t>(0, step - 3);  // the third step is the first one that trains the actor
    const LeaseReply reply = lease(desk, engine, 16, step);
    ASSERT_EQ(reply.runs.size(), 1u) << "step " << step << " alone";
    EXPECT_EQ(reply.runs.front().group, step - 1);
    desk.take_groups(samples_of(engine, reply.runs.front(), engine.version), at(step));
    ASSERT_TRUE(desk.complete());
    desk.take(step);
    EXPECT_TRUE(lease(desk, engine, 16, step).runs.empty()) << "step " << step << " is not trained";
    desk.trained(step);
    desk.publish();
    const WeightsReply weights = desk.weights({engine.caller, engine.version, 0}, at(step));
    EXPECT_EQ(weights.version, step < 3 ? -1 : step - 2);
    EXPECT_EQ(desk.behind().empty(), step < 3);
  }
  engine.version = 2;
  ASSERT_EQ(lease(desk, engine, 16, 10).runs.size(), 1u);
  EXPECT_TRUE(desk.expire(at(20000)));
  engine = join(desk, "a", 20000);
  engine.version = 2;
  ASSERT_EQ(lease(desk, engine, 16, 20000).runs.size(), 1u);
  for (int64_t ms = 20500; ms < 26000; ms += 500) lease(desk, engine, 0, ms);  // heard, but without a step
  desk.take_news();
  EXPECT_TRUE(desk.expire(at(26000)));
  EXPECT_THAT(desk.take_news(), testing::Contains(HasSubstr("ppo.async_ppo.lease_timeout_s")));
}

TEST(Desk, RefusesWhoWouldGenerateSomethingElseAndWhatNobodyLeased) {
  DeskOptions options = options_of({.groups_per_step = 1, .samples_per_group = 2});
  options.refuses = [](const JoinRequest& request) -> std::optional<std::string> {
    if (request.model == "other") return "has another model";
    return std::nullopt;
  };
  Desk desk(options);
  desk.open();
  desk.publish();
  EXPECT_THROW(desk.join({"e", "s", "", "other", "", 1}, at(0)), Error);
  EXPECT_EQ(desk.engines(), 0);
  Engine engine = join(desk, "e", 0);
  engine.version = 0;
  const LeaseReply leased = lease(desk, engine, 2, 0);
  ASSERT_EQ(leased.runs.size(), 1u);
  const auto refused = [&](const std::function<void(GroupsRequest&)>& change) {
    GroupsRequest request = samples_of(engine, leased.runs[0], 0);
    change(request);
    EXPECT_THROW(desk.take_groups(request, at(1)), Error);
  };
  refused([](GroupsRequest& request) { request.run = 77; });
  refused([](GroupsRequest& request) { request.samples.pop_back(); });
  refused([](GroupsRequest& request) { request.samples[0].response[0] = 100; });
  refused([](GroupsRequest& request) { request.samples[0].reward_parts.clear(); });
  refused([](GroupsRequest& request) { request.samples[1].generation_logprobs[1] = std::nanf(""); });
  refused([](GroupsRequest& request) { std::swap(request.samples[0], request.samples[1]); });
  GroupsRequest newer = samples_of(engine, leased.runs[0], 1);
  EXPECT_EQ(desk.take_groups(newer, at(1)).result, GroupsReply::Result::kTooOld) << "weights that nobody has trained";
  EXPECT_EQ(lease(desk, engine, 2, 1).runs.size(), 1u) << "it is generated again";
}

TEST(Desk, GroupsWhoseWeightsAreGoneGetNewerOnesAndItIsSaidOnce) {
  Desk desk(options_of({.groups_per_step = 1, .samples_per_group = 2, .max_age = 1, .exact_version = true}));
  desk.open();
  desk.publish();
  Engine a = join(desk, "a", 0), b = join(desk, "b", 0);
  a.version = b.version = 0;
  const LeaseReply of_a = lease(desk, a, 16, 0), of_b = lease(desk, b, 16, 0);
  ASSERT_EQ(of_a.runs.size(), 1u);
  ASSERT_EQ(of_b.runs.size(), 1u);
  desk.take_groups(samples_of(a, of_a.runs[0], 0), at(1));
  desk.take(1);
  desk.trained(1);
  desk.publish();
  a.version = 1;
  EXPECT_EQ(lease(desk, a, 16, 2).runs.size(), 1u) << "step 3's; not step 2's, which wants version 0";
  desk.take_news();
  desk.leave({b.caller, "", false, 0}, at(3));
  const std::vector<std::string> news = desk.take_news();
  ASSERT_EQ(news.size(), 2u);
  EXPECT_THAT(news[1] + news[0], HasSubstr("groups 1 get newer weights"));
  const LeaseReply more = lease(desk, a, 16, 4);
  ASSERT_EQ(more.runs.size(), 1u);
  EXPECT_EQ(more.runs[0].group, 1);
}

// With an even share in hand it gets no more; if it took newer weights then, nobody could draw what is left.
TEST(Desk, AnEngineIsToldWhetherItsWeightsAreStillWanted) {
  Desk desk(options_of({.groups_per_step = 2, .samples_per_group = 2, .max_age = 1, .exact_version = true}));
  desk.open();
  desk.publish();
  Engine a = join(desk, "a", 0);
  a.version = 0;
  std::vector<LeasedWork> taken;
  for (int i = 0; i < 3; ++i) taken.push_back(lease(desk, a, 1, 0).runs.at(0));
  for (int i = 0; i < 2; ++i) desk.take_groups(samples_of(a, taken[static_cast<size_t>(i)], 0), at(1));
  desk.take(1);
  desk.trained(1);
  desk.publish();
  const Engine b = join(desk, "b", 2);  // its first weights will be those of version 1
  a.fetched = 1;
  LeaseRequest asks;
  asks.caller = a.caller;
  asks.version = 0;
  asks.fetched = 1;
  asks.places = 16;
  asks.may_change = true;
  LeaseReply reply = desk.lease(asks, at(3));
  EXPECT_TRUE(reply.runs.empty()) << "it has two samples of four, and an engine of two is to have as many";
  EXPECT_TRUE(reply.left);
  EXPECT_FALSE(desk.answers_now(asks, reply));
  desk.take_groups(samples_of(a, taken[2], 0), at(4));
  reply = desk.lease(asks, at(5));
  ASSERT_EQ(reply.runs.size(), 1u);
  EXPECT_EQ(reply.runs[0].group, 3);
  EXPECT_FALSE(reply.left);
  reply = desk.lease(asks, at(6));
  EXPECT_TRUE(reply.runs.empty());
  EXPECT_TRUE(desk.answers_now(asks, reply)) << "it may take the newer ones";
  EXPECT_FALSE(b.caller.session.empty());
}

TEST(Desk, WeightsThatANewEngineHasFetchedAreNotGone) {
  Desk desk(options_of({.groups_per_step = 1, .samples_per_group = 2, .max_age = 1, .exact_version = true}));
  desk.open();
  desk.publish();
  Engine a = join(desk, "a", 0), b = join(desk, "b", 0);
  a.version = 0;
  const LeaseReply first = lease(desk, a, 2, 0);
  ASSERT_EQ(first.runs.size(), 1u);
  desk.weights({b.caller, /*after=*/0, /*wait_ms=*/-1}, at(1));  // b has them, and has not asked for work since
  desk.take_groups(samples_of(a, first.runs[0], 0), at(1));
  desk.take(1);
  desk.leave({a.caller, "", false, 0}, at(2));
  desk.take_news();
  desk.trained(1);
  desk.publish();
  EXPECT_TRUE(desk.take_news().empty()) << "nothing is lost";
  b.version = 0;
  const LeaseReply second = lease(desk, b, 2, 3);
  ASSERT_EQ(second.runs.size(), 1u) << "step 2's, which wants version 0";
  EXPECT_EQ(second.runs[0].group, 1);
}

TEST(Desk, TheEndOfTheDataIsNoWait) {
  DeskOptions options = options_of({.groups_per_step = 2, .samples_per_group = 1, .max_age = 1});
  options.prompt = [](int64_t group, bool needed) -> std::optional<WorkPrompt> {
    if (group >= 3 && !needed) return std::nullopt;
    return prompt_of(group);
  };
  Desk desk(options);
  desk.open();
  desk.publish();
  Engine a = join(desk, "a", 0);
  a.version = 0;
  const LeaseReply leased = lease(desk, a, 16, 0);
  ASSERT_EQ(leased.runs.size(), 3u);
  for (const LeasedWork& work : leased.runs) desk.take_groups(samples_of(a, work, 0), at(1));
  desk.take(1);
  EXPECT_EQ(lease(desk, a, 16, 2).runs.size(), 1u) << "a step that has begun is made whole";
}

// Engines, an actor and a clock, of which nothing is in time. In calm lives nobody is lost: with exact versions each
// sample is drawn from the version that its step wants.
class DeskLife final {
 public:
  explicit DeskLife(uint64_t seed) : random_(seed) {
    LedgerOptions ledger;
    ledger.groups_per_step = 1 + below(3);
    ledger.samples_per_group = 2 + below(4);
    ledger.run_samples = 1 + below(4);
    ledger.max_age = below(3);
    exact_ = below(2) == 0;
    ledger.exact_version = exact_;
    ledger.last_step = kSteps;
    flats_ = exact_ || below(2) == 0 ? 0 : below(50);
    if (flats_ > 0) {
      ledger.teaches_nothing = flat;
      ledger.max_groups_of_step = 1000;
    }
    DeskOptions options = options_of(ledger);
    options.in_flight = !exact_;
    calm_ = below(2) == 0;
    if (calm_) options.silence = options.lease = Milliseconds(1'000'000'000);
    max_age_ = ledger.max_age;
    per_step_ = ledger.groups_per_step;
    desk_ = std::make_unique<Desk>(options);
    desk_->open();
    desk_->publish();
  }

  void run() {
    int64_t without = 0;
    while (trained_ < kSteps) {
      ASSERT_LT(++without, 20000) << "nothing happens any more: " << desk_->describe_wait();
      now_ += below(20);
      const int64_t before = trained_ + desk_->progress();
      something();
      if (trained_ + desk_->progress() != before) without = 0;
      if (::testing::Test::HasFailure()) return;
    }
  }

 private:
  static constexpr int64_t kSteps = 10;
  struct Task {
    LeasedWork work;
    int64_t from = 0;  // the version that it was begun with
    bool generated = false;
  };
  struct Simulated {
    Engine engine;
    bool there = false;
    std::vector<Task> tasks;
    std::vector<GroupsRequest> late;
  };

  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool is_flat(int64_t group) const { return (group * 7919 + 13) % 100 < flats_; }

  void something() {
    Simulated& one = engines_[static_cast<size_t>(below(3))];
    const std::string name = "e" + std::to_string(&one - engines_);
    desk_->expire(at(now_));
    if (!one.there) {
      if (below(4) != 0) return;
      one.engine = join(*desk_, name, now_, name + "-" + std::to_string(sessions_++));
      one.there = true;
      one.tasks.clear();
      return;
    }
    switch (below(10)) {
      case 0:
      case 1:
      case 2:
        ask(one);
        return;
      case 3:
      case 4:
      case 5:
        bring(one);
        return;
      case 6:
        fetch(one);
        return;
      case 7:
        if (!calm_ && below(10) == 0) one.there = false;  // killed
        return;
      case 8:
        if (below(30) == 0) now_ += 1500;  // everybody is silent
        if (one.late.empty()) return;
        desk_->take_groups(one.late.back(), at(now_));
        one.late.pop_back();
        return;
      default:
        train();
    }
  }

  void ask(Simulated& one) {
    ++one.engine.steps;
    const int64_t places = below(9);
    const bool idle =
        places > 0 && std::all_of(one.tasks.begin(), one.tasks.end(), [](const Task& task) { return task.generated; });
    const LeaseReply reply = lease(*desk_, one.engine, places, now_);
    if (!reply.known) {  // it goes on with what it has
      const int64_t version = one.engine.version, fetched = one.engine.fetched;
      one.engine = join(*desk_, "e" + std::to_string(&one - engines_), now_, one.engine.caller.session);
      one.engine.version = version;
      one.engine.fetched = fetched;
      return;
    }
    for (const LeasedWork& work : reply.runs) one.tasks.push_back({work, one.engine.version});
    const bool may = !exact_ || (idle && reply.runs.empty() && !reply.left && below(3) == 0);
    if (may && one.engine.fetched > one.engine.version) one.engine.version = one.engine.fetched;
  }

  void bring(Simulated& one) {
    if (one.tasks.empty()) return;
    const auto place = static_cast<size_t>(below(static_cast<int64_t>(one.tasks.size())));
    if (!std::exchange(one.tasks[place].generated, true)) return;  // its rewards come later
    const Task task = one.tasks[place];
    one.tasks.erase(one.tasks.begin() + static_cast<int64_t>(place));
    GroupsRequest request = samples_of(one.engine, task.work, task.from, is_flat(task.work.group));
    if (one.engine.version > task.from) {
      for (Sample& sample : request.samples) sample.weight_versions = {{task.from, 0, 1}, {one.engine.version, 1, 2}};
    }
    if (below(5) == 0) one.late.push_back(request);
    EXPECT_EQ(desk_->take_groups(request, at(now_)).result, GroupsReply::Result::kCounted);
  }

  void fetch(Simulated& one) {
    if (one.engine.fetched > one.engine.version) return;  // its second buffer is full
    const WeightsReply reply = desk_->weights({one.engine.caller, one.engine.fetched, 0}, at(now_));
    if (reply.version < 0) return;
    one.engine.fetched = reply.version;
    if (one.engine.version < 0) one.engine.version = reply.version;
    (void)desk_->weights({one.engine.caller, one.engine.fetched, 0}, at(now_));
  }

  void train() {
    if (!desk_->complete()) return;
    const int64_t step = trained_ + 1;
    int64_t kept = 0;
    for (const LedgerGroup& group : desk_->take(step).groups) {
      EXPECT_EQ(group.number, next_group_++);
      EXPECT_EQ(group.kept, !is_flat(group.number));
      kept += group.kept ? 1 : 0;
      for (const Sample& sample : group.samples) {
        EXPECT_GE(sample.weight_versions.front().version, step - 1 - max_age_);
        EXPECT_LE(sample.weight_versions.back().version, step - 1);
        if (exact_ && calm_) {
          EXPECT_EQ(sample.weight_versions.front().version, std::max<int64_t>(0, step - 1 - max_age_));
        }
      }
    }
    EXPECT_EQ(kept, per_step_);
    // The write of the weights waits, where each version must reach the engines.
    for (int64_t turn = 0; exact_ && !desk_->behind().empty(); ++turn) {
      for (Simulated& one : engines_) {
        if (!one.there) continue;
        fetch(one);
        if (below(3) == 0) ask(one);
        if (below(2) == 0) bring(one);
      }
      now_ += 10;
      desk_->expire(at(now_));
      if (!calm_ && turn > 300) desk_->give_up_behind();
      ASSERT_LT(turn, 20000) << "nobody fetches the weights";
    }
    desk_->trained(step);
    desk_->publish();
    ++trained_;
  }

  std::mt19937_64 random_;
  bool exact_ = false, calm_ = false;
  int64_t flats_ = 0, max_age_ = 0, per_step_ = 1;
  std::unique_ptr<Desk> desk_;
  Simulated engines_[3];
  int64_t now_ = 0, sessions_ = 0, trained_ = 0, next_group_ = 0;
};

TEST(Desk, RandomLivesTrainEveryGroupOnceAndWaitForNothing) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    DeskLife(seed).run();
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace trireme
