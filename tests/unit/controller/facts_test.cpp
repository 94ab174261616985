// What the planner sees, made of what was read: no informers, no threads, no clock.
#include "operator/controller/facts.h"

#include <gtest/gtest.h>

#include "api/runtime.h"
#include "base/text.h"
#include "operator/controller/echo.h"
#include "tests/unit/controller/world.h"

namespace trireme::controller {
namespace {

using std::chrono::seconds;
using testing::kTwoPods;
using testing::make_job;

struct Look {
  Facts facts;
  Sightings sightings;

  Look() {
    facts.key = {"team", "quick"};
    facts.snapshot.job = make_job(kTwoPods);
    facts.snapshot.job.status.phase = phase::kRunning;
    facts.snapshot.job.status.attempt = 1;
    facts.now = SteadyClock::time_point{} + seconds(1000);
  }
  ObservedPod& pod(int64_t rank, const std::string& node) {
    ObservedPod pod;
    pod.name = pod_name("quick", "actor", rank, 1);
    pod.uid = "uid-" + std::to_string(rank);
    pod.role = "actor";
    pod.rank = rank;
    pod.attempt = 1;
    pod.phase = PodPhase::kRunning;
    pod.node = node;
    facts.snapshot.pods.push_back(pod);
    return facts.snapshot.pods.back();
  }
  Observed at(int s) {
    facts.now = SteadyClock::time_point{} + seconds(1000 + s);
    return observe(facts, sightings);
  }
};

std::shared_ptr<const CachedService> service(const std::string& job, int64_t attempt, bool owned) {
  CachedService made;
  made.uid = "service-" + std::to_string(attempt);
  made.job = job;
  made.attempt = attempt;
  made.owned = owned;
  return std::make_shared<const CachedService>(std::move(made));
}

TEST(Facts, OnlyTheJobsOwnObjectsAreSeen) {
  Look look;
  look.facts.services_known = look.facts.policies_known = true;
  look.facts.services = {{{"team", "quick-a1"}, service("quick", 1, true)},
                         {{"team", "quick-a2"}, service("quick", 2, false)},
                         {{"team", "other-name"}, service("quick", 3, true)},
                         {{"others", "quick-a4"}, service("quick", 4, true)}};
  CachedPolicy policy{"policy", hash64("uid-quick"), 7};
  look.facts.policy = std::make_shared<const CachedPolicy>(policy);
  Observed o = look.at(0);
  ASSERT_EQ(o.services.size(), 1u);
  EXPECT_EQ(o.services.at(1).uid, "service-1");
  ASSERT_TRUE(o.policy);
  EXPECT_EQ(o.policy->spec, 7u);
  EXPECT_EQ(o.policy->stands_for, 0u);
  look.facts.answers.policy = {5, 7};
  EXPECT_EQ(look.at(0).policy->stands_for, 5u) << "admission made it of what we asked for";
  look.facts.answers.policy = {5, 6};
  EXPECT_EQ(look.at(0).policy->stands_for, 0u) << "somebody else did";
  policy.job_uid = hash64("an earlier job of the name");
  look.facts.policy = std::make_shared<const CachedPolicy>(policy);
  EXPECT_FALSE(look.at(0).policy);
}

TEST(Facts, ARefusalHoldsForItsAttemptAndRunsOut) {
  Look look;
  look.facts.answers.refusal = Refusal{"uid-quick", 1, "Pod", "exceeded quota", false, 1, look.facts.now + seconds(4)};
  EXPECT_EQ(look.at(1).rejection, "exceeded quota");
  EXPECT_EQ(look.at(1).rejection_kind, "Pod");
  EXPECT_EQ(look.at(1).rejection_wait, seconds(3));
  EXPECT_EQ(look.at(9).rejection_wait, seconds(0));
  EXPECT_TRUE(look.at(9).rejection) << "it is what the last try met with";
  look.facts.snapshot.job.metadata.uid = "uid-of-the-next";
  EXPECT_FALSE(look.at(1).rejection) << "a job that was made again under the name";
  look.facts.snapshot.job.metadata.uid = "uid-quick";
  look.facts.snapshot.job.status.attempt = 2;
  EXPECT_FALSE(look.at(1).rejection);
}

TEST(Facts, NodesAreJudgedByWhatWasHeardOfThem) {
  Look look;
  look.facts.nodes_known = look.facts.nodes_in_doubt = true;
  look.pod(0, "ready");
  EXPECT_EQ(look.at(0).pods[0].node_state, NodeState::kUnknown) << "nobody heard of it";
  look.facts.nodes["ready"] = {NodeState::kReady, {}};
  Observed o = look.at(0);
  EXPECT_EQ(o.pods[0].node_state, NodeState::kReady);
  EXPECT_FALSE(o.nodes_in_doubt) << "no business of a job whose nodes are well";
  look.pod(1, "bad");
  look.facts.nodes["bad"] = {NodeState::kNotReady, SteadyClock::time_point{} + seconds(1000)};
  look.pod(2, "bad").phase = PodPhase::kFailed;
  look.pod(3, "");
  o = look.at(5);
  EXPECT_EQ(o.pods[1].node_state, NodeState::kNotReady);
  EXPECT_EQ(o.pods[1].node_bad_for, seconds(5));
  EXPECT_TRUE(o.nodes_in_doubt);
  EXPECT_EQ(o.pods[2].node_state, NodeState::kUnknown) << "it has ended, wherever it was";
  EXPECT_EQ(o.pods[3].node_state, NodeState::kUnknown);
  look.facts.nodes_known = false;
  EXPECT_EQ(look.at(5).pods[1].node_state, NodeState::kUnknown) << "nodes are not watched";
}

TEST(Facts, ANodeIsGoneWhenTheServerSaysSo) {
  Look look;
  look.facts.nodes_known = true;
  look.pod(0, "new");
  NodeFact& node = look.facts.nodes["new"];
  for (const int s : {0, 10, 86400}) {
    const Observed o = look.at(s);
    EXPECT_EQ(o.pods[0].node_state, NodeState::kUnknown) << "the watch may be behind, after " << s << " s";
    EXPECT_TRUE(o.pods[0].node_unclear);
  }
  node.bad_since = look.facts.now;
  EXPECT_EQ(look.at(86401).pods[0].node_state, NodeState::kUnknown) << "it was heard to go, and may be back";
  node.gone = true;
  const Observed o = look.at(86402);
  EXPECT_EQ(o.pods[0].node_state, NodeState::kGone);
  EXPECT_FALSE(o.pods[0].node_unclear);
  node.cached = NodeState::kReady;
  EXPECT_EQ(look.at(86403).pods[0].node_state, NodeState::kReady) << "the watch tells of it again";
  look.facts.nodes_known = false;
  EXPECT_FALSE(look.at(86404).pods[0].node_unclear) << "nodes are not watched";
}

TEST(Facts, AnUnknownNodeIsAskedAboutWhenItsNewsAreOverdue) {
  using Names = std::vector<std::string>;
  Look look;
  look.facts.nodes_known = true;
  look.pod(0, "new");
  NodeFact& node = look.facts.nodes["new"];
  const auto asked = [&](int s) {
    look.facts.now = SteadyClock::time_point{} + seconds(1000 + s);
    return nodes_to_ask(look.facts, look.sightings, look.facts.now, seconds(10));
  };
  EXPECT_EQ(asked(0), Names{});
  look.at(0);
  EXPECT_EQ(asked(9), Names{}) << "news on its way";
  EXPECT_EQ(asked(10), Names{"new"});
  look.at(10);
  EXPECT_EQ(asked(11), Names{"new"}) << "whatever the answer was, until the watch tells of it";
  node.cached = NodeState::kReady;
  EXPECT_EQ(asked(12), Names{});
  look.at(12);
  node.cached.reset();
  look.at(13);
  EXPECT_EQ(asked(22), Names{}) << "its time begins anew";
  node.bad_since = look.facts.now;
  EXPECT_EQ(asked(22), Names{"new"}) << "it was heard to go";
}

TEST(Facts, DurationsAreMeasuredFromTheFirstSight) {
  Look look;
  look.pod(0, "").deleting = true;
  EXPECT_EQ(look.at(0).pods[0].deleting_for, seconds(0));
  EXPECT_EQ(look.at(7).pods[0].deleting_for, seconds(7));
  EXPECT_EQ(look.at(7).silent_for, seconds(7));
  EXPECT_TRUE(look.at(7).issues.empty());
}

TEST(Facts, WhatIsKnownOfTheReportPathIsPassedOn) {
  Look look;
  look.facts.path = {true, seconds(1), seconds(2), seconds(3)};
  const Observed o = look.at(0);
  EXPECT_TRUE(o.reports_out);
  EXPECT_EQ(o.reports_back_for, seconds(1));
  EXPECT_EQ(o.reports_quiet_for, seconds(2));
  EXPECT_EQ(o.reports_served_for, seconds(3));
}

TEST(Facts, SilenceIsJudgedByTheShortestLimit) {
  Health health;
  health.heartbeat_timeout_seconds = 60;
  EXPECT_EQ(silence_window(health, Milliseconds(15000)), seconds(30));
  health.phase_timeout_seconds = {{"generation", 40}, {"training", 900}};
  EXPECT_EQ(silence_window(health, Milliseconds(15000)), seconds(20));
  health.heartbeat_timeout_seconds = 1;
  EXPECT_EQ(silence_window(health, Milliseconds(15000)), seconds(15));
  EXPECT_EQ(silence_window(Health{}, Milliseconds(15000)), seconds(60));
}

TEST(Echo, ALateWatchIsGivenMoreTimeAfterEachLook) {
  const auto at = [](int s) { return SteadyClock::time_point{} + seconds(s); };
  constexpr Milliseconds kFirst{5000}, kMost{60000};
  RLJobStatus queued;
  queued.phase = phase::kQueued;
  queued.attempt = 1;
  Echo echo;
  EXPECT_EQ(echo.left(queued, at(0)), std::nullopt) << "nothing was made";
  echo.made(1, at(0), kFirst);
  EXPECT_EQ(echo.left(queued, at(2)), Milliseconds(3000));
  EXPECT_EQ(echo.left(queued, at(5)), std::nullopt);
  int now = 5;
  for (const int wait : {10, 20, 40, 60, 60}) {
    echo.late(echo.awaits(queued), 1, at(now), kFirst, kMost);
    EXPECT_EQ(echo.left(queued, at(now)), seconds(wait));
    now += wait;
  }
  echo.late(false, 1, at(now), kFirst, kMost);
  EXPECT_EQ(echo.left(queued, at(now)), kFirst) << "found without having been waited for";
  queued.attempt = 2;
  EXPECT_EQ(echo.left(queued, at(now)), std::nullopt);
  queued.attempt = 1;
  echo.nothing();
  EXPECT_EQ(echo.left(queued, at(now)), std::nullopt);
}

}  // namespace
}  // namespace trireme::controller
