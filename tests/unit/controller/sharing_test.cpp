// A reconciler that shares its cluster: other people's pods, quotas, an API server that asks for patience, a standby.
#include <gtest/gtest.h>

#include "tests/unit/controller/cluster.h"

namespace trireme::controller {
namespace {

using testing::Cluster;
using testing::eventually;
using testing::fast_options;
using testing::ObjectKey;
namespace resources = kube::resources;

Json condition(const Json& job, const std::string& type) {
  for (const Json& c : job["status"]["conditions"]) {
    if (c["type"] == type) return c;
  }
  return {};
}
void settle() { std::this_thread::sleep_for(Milliseconds(300)); }

Json with_reward_pod(const std::string& name) {
  Json object = testing::job_object(name);
  object["spec"]["roles"]["reward"] = {
      {"replicas", 1},
      {"port", 8000},
      {"template", {{"spec", {{"containers", Json::array({{{"name", "reward"}, {"image", "r"}}})}}}}}};
  return object;
}

// A pod as somebody else makes it, with the labels of a job's own.
Json copy_of(const Json& pod, const std::string& ns, const std::string& name, const std::string& attempt) {
  Json copy = {{"metadata", {{"name", name}, {"namespace", ns}, {"labels", pod["metadata"]["labels"]}}},
               {"spec", {{"nodeName", "node-0"}}},
               {"status", {{"phase", "Running"}}}};
  copy["metadata"]["labels"][kLabelAttempt] = attempt;
  return copy;
}

TEST(Foreign, PodsWithCopiedLabelsAreNobodysBusiness) {
  Cluster c;
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  const Json own = *c.server.get(resources::kPods, {"team", "quick-actor-1-a1"});
  const auto fail = [](Json pod, int code) {
    pod["status"] = {
        {"phase", "Failed"},
        {"containerStatuses", Json::array({{{"name", "trainer"}, {"state", {{"terminated", {{"exitCode", code}}}}}}})}};
    return pod;
  };
  // In another namespace: of a later attempt, and failed as by a mistake in the configuration; with the owner, too.
  c.server.put(resources::kPods, copy_of(own, "others", "quick-actor-1-a9999", "9999"));
  c.server.put(resources::kPods, fail(copy_of(own, "others", "quick-actor-1-a1", "1"), 10));
  Json owned = fail(copy_of(own, "others", "quick-actor-0-a1", "1"), 10);
  owned["metadata"]["ownerReferences"] = own["metadata"]["ownerReferences"];
  c.server.put(resources::kPods, owned);
  // In its own: without the owner; and with it, under another name.
  c.server.put(resources::kPods, fail(copy_of(own, "team", "quick-actor-1-a77", "77"), 10));
  Json renamed = fail(copy_of(own, "team", "copy", "1"), 10);
  renamed["metadata"]["ownerReferences"] = own["metadata"]["ownerReferences"];
  c.server.put(resources::kPods, renamed);
  // A Service, of an attempt that would be over.
  Json service = copy_of(own, "others", "quick-a0", "0");
  service["metadata"]["labels"][kLabelAttempt] = "1";
  c.server.put(resources::kServices, service);
  ASSERT_TRUE(eventually([&] { return c.op->pod_count() >= 7; }));
  settle();
  EXPECT_EQ(c.phase(job), phase::kRunning);
  EXPECT_EQ(c.attempt(job), 1);
  EXPECT_FALSE(c.job(job)["status"].contains("lastFailure"));
  EXPECT_EQ(c.server.count("DELETE", ""), 0);
  EXPECT_EQ(c.job(job)["status"]["roles"][0]["created"], 2);
}

TEST(Foreign, ObjectsUnderOurNamesAreNotDeleted) {
  Cluster c;
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  // Somebody takes ours away and puts their own in its place.
  const ObjectKey map{"team", topology_config_map_name("quick", 1)};
  c.server.erase(resources::kConfigMaps, map);
  c.server.put(resources::kConfigMaps, {{"metadata", {{"name", map.name}, {"namespace", map.ns}}}});
  c.trainers_end = true;
  ASSERT_TRUE(c.wait_phase(job, phase::kComplete));
  ASSERT_TRUE(eventually([&] { return c.server.list(resources::kServices).empty(); }));
  EXPECT_TRUE(c.server.get(resources::kConfigMaps, map));
  for (const auto& request : c.server.requests()) {
    if (request.method != "DELETE") continue;
    EXPECT_TRUE(Json::parse(request.body).value("preconditions", Json::object()).contains("uid")) << request.path;
  }
}

TEST(Quota, TwoJobsThatFitOneAfterTheOtherBothEnd) {
  Cluster c;
  c.trainers_end = true;
  c.server.limit_pods("team", 6);
  ReconcilerOptions options = fast_options();
  options.plan.release_backoff = Milliseconds(2000);
  c.start_operator(-1, options);
  Json object = testing::job_object("a", "  scheduling: {schedulingTimeoutSeconds: 1}\n");
  object["spec"]["roles"]["actor"]["replicas"] = 4;
  // Three and three of four are made side by side.
  c.server.limit_pods("team", 3);
  c.server.put(resources::kRlJobs, object);
  ASSERT_TRUE(eventually([&] { return c.pods().size() == 3; }));
  c.server.limit_pods("team", 6);
  for (const char* field : {"uid", "resourceVersion"}) object["metadata"].erase(field);
  object["metadata"]["name"] = "b";
  c.server.put(resources::kRlJobs, object);
  for (const char* name : {"a", "b"}) {
    const ObjectKey job{"team", name};
    ASSERT_TRUE(c.wait_phase(job, phase::kComplete)) << c.job(job).dump(1);
    EXPECT_EQ(c.job(job)["status"].value("restarts", 0), 0);
  }
  EXPECT_EQ(c.violations(), std::vector<std::string>{});
}

TEST(Quota, ARefusalIsToldAndAskedAboutSeldom) {
  Cluster c;
  c.server.limit_pods("team", 1);
  ReconcilerOptions options = fast_options();
  options.refusal_min = Milliseconds(500);
  options.refusal_max = Milliseconds(1000);
  c.start_operator(-1, options);
  const ObjectKey job = c.add_job("quick", "  scheduling: {schedulingTimeoutSeconds: 0}\n");
  ASSERT_TRUE(eventually([&] {
    const Json j = c.job(job);
    return j.is_object() && j.contains("status") &&
           condition(j, "GangScheduled").value("reason", "") == "QuotaExceeded";
  }));
  const Stopwatch watch;
  const int before = c.server.count("POST", "/pods?");
  for (int i = 0; i < 40; ++i) {  // news of the job do not make it ask more often
    c.op->enqueue(job);
    std::this_thread::sleep_for(Milliseconds(25));
  }
  const int asked = c.server.count("POST", "/pods?") - before;
  EXPECT_LE(asked, 2 * (2 + static_cast<int>(watch.seconds()))) << "of two pods each time";
  EXPECT_EQ(c.job(job)["status"]["waiting"], "QuotaExceeded");
  EXPECT_NE(condition(c.job(job), "GangScheduled")["message"].get<std::string>().find("exceeded quota"),
            std::string::npos);
  c.server.limit_pods("team", 10);
  EXPECT_TRUE(c.wait_phase(job, phase::kRunning));
}

// Its room is taken while it crashes.
TEST(Quota, AServicePodThatItKeepsAwayIsAskedForSeldom) {
  Cluster c;
  ReconcilerOptions options = fast_options();
  options.refusal_min = Milliseconds(500);
  options.refusal_max = Milliseconds(1000);
  c.start_operator(-1, options);
  c.server.put(resources::kRlJobs, with_reward_pod("quick"));
  const ObjectKey job{"team", "quick"}, reward{"team", "quick-reward-0-a1"};
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  c.server.limit_pods("team", 2);
  const auto asked = [&] { return c.server.count("POST", "/pods?"); };
  const auto looked = [&] { return c.server.count("GET", "/rljobs/quick?"); };
  const int made = asked();
  c.fail_pod(reward.name, 1);
  ASSERT_TRUE(eventually([&] { return asked() > made; }));
  const Stopwatch watch;
  const int asks = asked(), looks = looked();
  std::this_thread::sleep_for(Milliseconds(1000));  // trainers report all the while
  const int more_asks = asked() - asks, more_looks = looked() - looks, most = 2 + static_cast<int>(watch.seconds());
  EXPECT_LE(more_asks, most);
  EXPECT_LE(more_looks, most);
  EXPECT_TRUE(eventually([&] { return c.job(job)["status"].value("waiting", "") == "QuotaExceeded"; }));
  EXPECT_NE(condition(c.job(job), "PodsReady")["message"].get<std::string>().find("exceeded quota"), std::string::npos);
  EXPECT_EQ(c.phase(job), phase::kRunning);
  c.server.limit_pods("team", 10);
  EXPECT_TRUE(eventually([&] { return condition(c.job(job), "PodsReady").value("reason", "") == "Ready"; }));
  EXPECT_TRUE(c.server.get(resources::kPods, {"team", "quick-reward-0-a1-i1"}));
  EXPECT_EQ(c.attempt(job), 1);
}

TEST(Patience, RetryAfterDecidesWhenAKeyComesAgain) {
  Cluster c;
  c.server.inject({.method = "POST", .path_part = "/services", .status = 429, .retry_after_s = 2});
  c.start_operator();
  const Stopwatch watch;
  const ObjectKey job = c.add_job("quick");
  EXPECT_TRUE(eventually([&] {
    c.op->enqueue(job);
    return c.server.count("POST", "") >= 2;
  }));
  EXPECT_GE(watch.seconds(), 2) << "whatever news there are";
  EXPECT_TRUE(c.wait_phase(job, phase::kRunning));
}

TEST(Standby, QueuesNothing) {
  Cluster c;
  for (int i = 0; i < 20; ++i) c.add_job("job-" + std::to_string(i));
  kube::Metrics metrics;
  ReconcilerOptions options = fast_options();
  options.metrics = &metrics;
  ReportStore reports;
  Reconciler standby(c.client, std::move(options), reports);
  standby.start_informers();
  ASSERT_TRUE(standby.wait_synced(Deadline::after(Milliseconds(60000))));
  ASSERT_TRUE(eventually([&] { return standby.job_count() == 20; }));
  c.add_job("late");
  ASSERT_TRUE(eventually([&] { return standby.job_count() == 21; }));
  settle();
  EXPECT_EQ(standby.queue().size() + standby.queue().delayed(), 0u);
  // But it misses nothing.
  standby.start_workers();
  EXPECT_TRUE(eventually([&] { return c.attempt({"team", "late"}) == 1 && c.attempt({"team", "job-0"}) == 1; }));
  standby.stop();
}

TEST(Reports, JobsWithoutThemRunToTheirEnd) {
  Cluster c;
  c.trainers = false;
  ReconcilerOptions options = fast_options();
  options.plan.objects.status_url.clear();
  c.start_operator(-1, options);
  const ObjectKey job = c.add_job("quick", "  health: {heartbeatTimeoutSeconds: 1, startupDeadlineSeconds: 1}\n");
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  std::this_thread::sleep_for(Milliseconds(2500));
  EXPECT_EQ(c.attempt(job), 1);
  EXPECT_EQ(condition(c.job(job), "Progressing")["reason"], "ReportsOff");
}

TEST(Reports, ThatStopForEverybodyEndNobody) {
  Cluster c;
  c.start_operator();
  const ObjectKey a = c.add_job("a", "  health: {heartbeatTimeoutSeconds: 1}\n");
  const ObjectKey b = c.add_job("b", "  health: {heartbeatTimeoutSeconds: 1}\n");
  for (const ObjectKey& job : {a, b}) ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  settle();
  c.trainers = false;  // as when their reports do not arrive
  for (const ObjectKey& job : {a, b})
    EXPECT_TRUE(eventually([&] { return condition(c.job(job), "Progressing")["reason"] == "ReportsLost"; }));
  std::this_thread::sleep_for(Milliseconds(1500));  // longer than a silence that ends one job
  for (const ObjectKey& job : {a, b}) EXPECT_EQ(c.attempt(job), 1);
  c.trainers = true;
  EXPECT_TRUE(eventually([&] { return condition(c.job(a), "Progressing")["reason"] == "Reporting"; }));
  EXPECT_EQ(c.attempt(a), 1);
  EXPECT_EQ(c.attempt(b), 1);
}

TEST(Nodes, ManyThatAreSilentAtOnceTakeNobodyAlong) {
  Cluster c;
  c.start_operator();
  const ObjectKey job =
      c.add_job("quick", "  health: {nodeNotReadyGraceSeconds: 3, heartbeatTimeoutSeconds: 1000000}\n");
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  c.trainers = false;
  for (int i = 0; i < 3; ++i) c.put_node(i, false);  // all of them in less than that grace
  std::this_thread::sleep_for(Milliseconds(4000));
  EXPECT_EQ(c.attempt(job), 1);
  c.put_node(2, true);  // two of three: one zone's nodes may well be that few, and the grace begins now
  EXPECT_TRUE(eventually([&] { return c.attempt(job) == 2; }));
  EXPECT_EQ(c.job(job)["status"]["lastFailure"]["reason"], "NodeLost");
}

TEST(RewardPod, IsMadeAgainInTheSameAttempt) {
  Cluster c;
  c.start_operator();
  c.server.put(resources::kRlJobs, with_reward_pod("quick"));
  const ObjectKey job{"team", "quick"}, reward{"team", "quick-reward-0-a1"};
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  c.fail_pod(reward.name, 1);
  ASSERT_TRUE(eventually([&] {
    const auto pod = c.server.get(resources::kPods, {"team", "quick-reward-0-a1-i1"});
    return pod && (*pod)["status"].value("phase", "") == "Running";
  }));
  EXPECT_TRUE(eventually([&] { return c.job(job)["status"]["roles"][1].value("restarts", 0) == 1; }));
  EXPECT_EQ(c.phase(job), phase::kRunning);
  EXPECT_EQ(c.attempt(job), 1);
  EXPECT_EQ(c.job(job)["status"].value("restarts", 0), 0);
}

}  // namespace
}  // namespace trireme::controller
