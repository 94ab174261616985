#include "trainer/rewards/pool.h"

#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "trainer/rewards/failures.h"

namespace trireme {
namespace {

Deadline long_deadline() { return Deadline::after(Milliseconds(120000)); }

std::vector<RewardRequest> group(std::initializer_list<const char*> responses) {
  std::vector<RewardRequest> requests;
  for (const char* response : responses) requests.push_back({.response = response, .gold = "7"});
  return requests;
}

RewardOptions shell(const std::string& script, RewardFailurePolicy policy = RewardFailurePolicy::kZero) {
  RewardOptions options{.type = "command"};
  options.failure_policy = policy;
  options.command = {"sh", "-c", script};
  options.num_workers = 1;
  return options;
}
const char* const kCrashing =
    "while read -r line; do case \"$line\" in *CRASH*) exit 3;; *) echo '{\"reward\": 10}';; esac; done";

TEST(RewardPool, WeightedSumOfAllRewards) {
  RewardOptions format{.type = "format", .weight = 0.25};
  format.tags = {"answer"};
  RewardPool pool({RewardOptions{}, format});
  pool.submit(5, group({"<answer>7</answer>", "<answer>8</answer>", "7", "8"}));
  const auto done = pool.wait_any(long_deadline());
  ASSERT_TRUE(done);
  EXPECT_EQ(done->group_id, 5);
  EXPECT_EQ(done->rewards, (std::vector<double>{1.25, 0.25, 1, 0}));
  EXPECT_EQ(done->parts, (std::vector<std::vector<double>>{{1, 0, 1, 0}, {1, 1, 0, 0}}));
  EXPECT_EQ(done->failures, 0);
  EXPECT_EQ(pool.pending(), 0);
}

TEST(RewardPool, EveryGroupComesBackOnce) {
  RewardPool pool({RewardOptions{}, shell(kCrashing)});
  std::set<int64_t> open;
  for (int64_t id = 0; id < 200; ++id) {
    pool.submit(id, group({"\\boxed{7}", id % 10 == 0 ? "CRASH" : "6"}));
    open.insert(id);
  }
  while (!open.empty()) {
    const auto done = pool.wait_any(long_deadline());
    ASSERT_TRUE(done) << open.size() << " groups missing";
    EXPECT_EQ(open.erase(done->group_id), 1u);
    EXPECT_EQ(done->rewards[0], 11);
    EXPECT_EQ(done->failures, done->group_id % 10 == 0 ? 1 : 0);
  }
  EXPECT_EQ(pool.pending(), 0);
  EXPECT_FALSE(pool.wait_any(Deadline::after(Milliseconds(1))));
  const auto counters = pool.counters();
  ASSERT_EQ(counters.size(), 2u);
  EXPECT_EQ(counters[0].name, "math");
  EXPECT_EQ(counters[0].scored, 400);
  EXPECT_EQ(counters[0].failed, 0);
  EXPECT_EQ(counters[1].scored, 400);
  EXPECT_EQ(counters[1].failed, 20);
  EXPECT_NE(counters[1].last_error.find("exit code 3"), std::string::npos);
}

TEST(RewardPool, EmptyGroupsComeBackToo) {
  RewardPool pool({RewardOptions{}});
  pool.submit(1, {});
  const auto done = pool.wait_any(long_deadline());
  ASSERT_TRUE(done);
  EXPECT_TRUE(done->rewards.empty());
}

TEST(RewardPool, DropMarksTheSample) {
  RewardPool pool({RewardOptions{}, shell(kCrashing, RewardFailurePolicy::kDrop)});
  pool.submit(1, group({"7", "CRASH 7", "8"}));
  const auto done = pool.wait_any(long_deadline());
  ASSERT_TRUE(done);
  EXPECT_EQ(done->dropped, (std::vector<uint8_t>{0, 1, 0}));
  EXPECT_EQ(done->rewards, (std::vector<double>{11, 1, 10}));
  EXPECT_EQ(pool.counters()[1].dropped, 1);
}

TEST(RewardPool, ErrorThrowsOnceAndNamesTheGroup) {
  RewardPool pool({shell(kCrashing, RewardFailurePolicy::kError)});
  pool.submit(42, group({"7", "CRASH"}));
  try {
    pool.wait_any(long_deadline());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);  // kUnavailable would pass for the echo of another rank's failure
    const std::string text = error.what();
    EXPECT_NE(text.find("command"), std::string::npos);
    EXPECT_NE(text.find("group 42, sample 1"), std::string::npos) << text;
  }
  EXPECT_EQ(pool.pending(), 0);
  pool.submit(43, group({"7"}));
  const auto next = pool.wait_any(long_deadline());
  ASSERT_TRUE(next);
  EXPECT_EQ(next->group_id, 43);
}

TEST(RewardPool, ASlowRewardEndsAtItsLimitAndHoldsUpNoOther) {
  RewardOptions slow = shell("while read -r line; do sleep 600; done");
  slow.timeout_s = 0.3;
  RewardPool pool({slow, RewardOptions{}});
  pool.submit(1, group({"7"}));
  const auto done = pool.wait_any(long_deadline());
  ASSERT_TRUE(done);
  EXPECT_EQ(done->rewards[0], 1);
  EXPECT_EQ(done->failures, 1);
}

TEST(RewardPool, DestructionDoesNotWaitForAHang) {
  RewardOptions hanging = shell("while read -r line; do sleep 3600; done");
  hanging.timeout_s = 3600;
  RewardPool pool({hanging});
  for (int64_t id = 0; id < 5; ++id) pool.submit(id, group({"7"}));
  EXPECT_FALSE(pool.wait_any(Deadline::after(Milliseconds(50))));
  EXPECT_EQ(pool.pending(), 5);
}  // a wait of an hour here would trip the test's own time limit

ErrorKind probe_error(std::vector<RewardOptions> options, Milliseconds limit, std::string& text) {
  RewardPool pool(std::move(options));
  try {
    pool.probe({.prompt = "p", .response = "7", .gold = "7"}, limit);
  } catch (const Error& error) {
    text = error.what();
    return error.kind();
  }
  ADD_FAILURE() << "the probe went well";
  return ErrorKind::kInternal;
}

TEST(RewardPool, AProbeTellsMistakesAtOnce) {
  std::string text;
  const Milliseconds hour(3600000);  // waiting for it would trip the test's own time limit
  RewardOptions missing{.type = "command", .command = {"pyhton3", "grade.py"}};
  EXPECT_EQ(probe_error({RewardOptions{}, missing}, hour, text), ErrorKind::kUser);
  EXPECT_NE(text.find("reward 'command' does not work: pyhton3: cannot run 'pyhton3'"), std::string::npos) << text;
  EXPECT_EQ(probe_error({shell("exit 7")}, hour, text), ErrorKind::kUser);
  EXPECT_NE(text.find("exit code 7"), std::string::npos) << text;
  EXPECT_EQ(probe_error({shell("while read -r line; do echo hello; done")}, hour, text), ErrorKind::kUser);
  EXPECT_NE(text.find("hello"), std::string::npos) << text;
}

TEST(RewardPool, WhereNothingIsScoredAProbeOnlyWaitsForServices) {
  const RewardRequest example{.prompt = "p", .response = "7", .gold = "7"};
  RewardPool missing({RewardOptions{.type = "command", .command = {"pyhton3", "grade.py"}}, shell("exit 7")});
  EXPECT_NO_THROW(missing.probe(example, Milliseconds(3600000), /*scores=*/false));
  RewardPool nobody({RewardOptions{.type = "http", .url = "http://127.0.0.1:1/score"}});
  EXPECT_THROW(nobody.probe(example, Milliseconds(700), /*scores=*/false), Error);
}

TEST(RewardPool, AProbeWaitsForWhatMayStillCome) {
  std::string text;
  EXPECT_EQ(probe_error({shell("sleep 600")}, Milliseconds(700), text), ErrorKind::kIo);
  EXPECT_NE(text.find("env.startup_timeout_s"), std::string::npos) << text;
  RewardOptions nobody{.type = "http", .url = "http://127.0.0.1:1/score"};
  EXPECT_EQ(probe_error({nobody}, Milliseconds(1200), text), ErrorKind::kIo);
  // Whoever answers works, if only to say that it has nothing for this one; then groups are scored as ever.
  RewardPool pool({RewardOptions{}, shell("while read -r line; do echo '{\"error\": \"not this one\"}'; done")});
  pool.probe({.prompt = "p", .response = "7", .gold = "7"}, Milliseconds(60000));
  EXPECT_EQ(pool.counters()[1].failed, 0) << "the probe is not counted";
  pool.submit(1, group({"7"}));
  ASSERT_TRUE(pool.wait_any(long_deadline()));
  EXPECT_EQ(pool.counters()[1].failed, 1);
}

TEST(RewardFailures, AreThoseOfAllRanksAndQuoteTheFirstOnesError) {
  const auto counters = [](int64_t scored, int64_t failed, const char* error) {
    RewardCounters one;
    one.name = "command";
    one.scored = scored;
    one.failed = failed;
    one.dropped = failed;
    one.last_error = error;
    return std::vector<RewardCounters>{one};
  };
  const auto step = counted_since(counters(30, 12, "new"), counters(20, 2, "old"));
  EXPECT_EQ(step[0].scored, 10);
  EXPECT_EQ(step[0].failed, 10);
  EXPECT_EQ(step[0].last_error, "new");
  EXPECT_EQ(counted_since(counters(30, 2, "old"), counters(20, 2, "old"))[0].last_error, "");
  const auto sum = sum_counters({pack_counters(counters(8, 0, "")), pack_counters(step)});
  ASSERT_EQ(sum.size(), 1u);
  EXPECT_EQ(sum[0].scored, 18);
  EXPECT_EQ(sum[0].failed, 10);
  EXPECT_EQ(sum[0].dropped, 10);
  EXPECT_EQ(sum[0].last_error, "rank 1: new");
  EXPECT_EQ(too_many_failed(sum, 0.5),
            "reward 'command' failed for 10 of 18 responses, more than env.max_failed_share "
            "0.5; the last error: rank 1: new");
  EXPECT_FALSE(too_many_failed(sum, 0.6));
  EXPECT_FALSE(too_many_failed(counters(4, 2, "x"), 0.5)) << "half is not more than half";
  EXPECT_FALSE(too_many_failed(counters(4, 4, "x"), 1)) << "1 never stops a run";
  EXPECT_TRUE(too_many_failed(counters(4, 1, "x"), 0));
  EXPECT_FALSE(too_many_failed(counters(0, 0, ""), 0));
  for (const char* bad : {"", "[]", "[[1]]", "{}"})
    EXPECT_THROW(sum_counters({pack_counters(step), bad}), Error) << bad;
}

TEST(RewardPool, WithoutRewardsOfItsOwnGroupsComeBackAtOnce) {
  RewardPool pool({}, /*elsewhere=*/true);
  pool.probe({}, Milliseconds(1));
  pool.submit(3, {RewardRequest{}, RewardRequest{}});
  pool.submit(5, {});
  EXPECT_EQ(pool.pending(), 2);
  const auto first = pool.wait_any(Deadline::after(Milliseconds(0)));
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->group_id, 3);
  EXPECT_EQ(first->rewards, (std::vector<double>{0, 0}));
  EXPECT_EQ(first->dropped, (std::vector<uint8_t>{0, 0}));
  EXPECT_TRUE(first->parts.empty());
  EXPECT_EQ(pool.wait_any(Deadline::after(Milliseconds(0)))->group_id, 5);
  EXPECT_EQ(pool.pending(), 0);
  EXPECT_TRUE(pool.counters().empty());
}

TEST(RewardPool, BadOptionsStartNothing) {
  EXPECT_THROW(RewardPool({}), Error);
  EXPECT_THROW(RewardPool({RewardOptions{}, RewardOptions{.type = "http", .url = "x"}}), Error);
}

}  // namespace
}  // namespace trireme
