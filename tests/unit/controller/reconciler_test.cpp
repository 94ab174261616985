#include "operator/controller/reconciler.h"

#include <gtest/gtest.h>

#include "operator/controller/job_metrics.h"
#include "tests/unit/controller/cluster.h"

namespace trireme::controller {
namespace {

using testing::Cluster;
using testing::eventually;
using testing::fast_options;
using testing::ObjectKey;
namespace resources = kube::resources;

void expect_sound(const Cluster& c) {
  EXPECT_EQ(c.violations(), std::vector<std::string>{});
  EXPECT_EQ(c.created_twice(), std::vector<std::string>{});
}

// The pods' watch never opens: what there is after the operator's start is only seen by live looks.
void stall_pod_watch(Cluster& c) {
  c.server.inject({.method = "GET", .path_part = "/api/v1/pods?allowWatchBookmarks", .status = 503, .times = -1});
}
int pod_lists(const Cluster& c) { return c.server.count("GET", "/namespaces/team/pods?"); }
int pod_reads(const Cluster& c, const std::string& name) {
  return c.server.count("GET", "/namespaces/team/pods/" + name + "?");
}
int pod_creates(const Cluster& c) { return c.server.count("POST", "/namespaces/team/pods?"); }
ReconcilerOptions short_echo() {
  ReconcilerOptions options = fast_options();
  options.create_echo = Milliseconds(10);
  return options;
}
bool eventually_looking(Cluster& c, const ObjectKey& job, const std::function<bool()>& condition) {
  return eventually([&] {
    c.op->enqueue(job);
    return condition();
  });
}

TEST(Reconciler, FromApplyToComplete) {
  Cluster c;
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  EXPECT_TRUE(eventually([&] { return c.job(job)["status"].contains("progress"); }));
  EXPECT_TRUE(eventually([&] { return c.op->find_job(job)->step > 0; }));
  std::string text;  // the operator's own copy of the job may be behind the server's
  EXPECT_TRUE(eventually([&] {
    text.clear();
    write_job_metrics(*c.op, *c.reports, [&](std::string_view piece) {
      text += piece;
      return true;
    });
    return text.find("trireme_jobs{phase=\"Running\"} 1") != std::string::npos;
  }));
  EXPECT_NE(text.find("trireme_job_phase{namespace=\"team\",job=\"quick\",phase=\"Running\"} 1"), std::string::npos)
      << text;
  EXPECT_NE(text.find("trireme_job_reward{namespace=\"team\",job=\"quick\"} 0.5"), std::string::npos) << text;
  EXPECT_NE(text.find("trireme_jobs{phase=\"Running\"} 1"), std::string::npos) << text;
  c.trainers_end = true;
  ASSERT_TRUE(c.wait_phase(job, phase::kComplete));
  EXPECT_TRUE(eventually([&] { return c.clean() && c.no_policies(); }));
  EXPECT_EQ(c.attempt(job), 1);
  EXPECT_EQ(c.pods().size(), 2u);
  expect_sound(c);
}

TEST(Reconciler, FailedPodRestartsTheAttempt) {
  Cluster c;
  c.fail_first = 1;
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(eventually([&] { return c.attempt(job) == 2 && c.phase(job) == phase::kRunning; }));
  const Json status = c.job(job)["status"];
  EXPECT_EQ(status["restarts"], 1);
  EXPECT_EQ(status["lastFailure"]["pod"], "quick-actor-1-a1");
  EXPECT_EQ(status["lastFailure"]["logTail"], "last words");
  EXPECT_TRUE(c.server.get(resources::kPods, {"team", "quick-actor-1-a1"})) << "kept for its logs";
  EXPECT_TRUE(eventually([&] { return !c.server.get(resources::kServices, {"team", "quick-a1"}); }));
  c.trainers_end = true;
  ASSERT_TRUE(c.wait_phase(job, phase::kComplete));
  expect_sound(c);
}

TEST(Reconciler, SuspendAndResume) {
  Cluster c;
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  c.server.modify(resources::kRlJobs, job, [](Json& j) { j["spec"]["suspend"] = true; });
  ASSERT_TRUE(c.wait_phase(job, phase::kSuspended));
  EXPECT_TRUE(eventually([&] { return c.clean() && c.pods().empty(); }));
  c.server.modify(resources::kRlJobs, job, [](Json& j) { j["spec"]["suspend"] = false; });
  c.trainers_end = true;
  ASSERT_TRUE(c.wait_phase(job, phase::kComplete));
  EXPECT_EQ(c.attempt(job), 2);
  expect_sound(c);
}

TEST(Reconciler, DeletionLeavesNothingAndMakesNothing) {
  Cluster c;
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  c.client.remove(resources::kRlJobs, job);
  EXPECT_TRUE(eventually([&] {
    return c.pods().empty() && c.server.list(resources::kServices).empty() &&
           c.server.list(resources::kConfigMaps).empty() && c.no_policies();
  }));
  EXPECT_TRUE(
      eventually([&] { return c.op->job_count() == 0 && c.op->pod_count() == 0 && c.op->queue().size() == 0; }));
  EXPECT_TRUE(c.pods().empty());
  expect_sound(c);
}

TEST(Reconciler, PodsOfADeletedJobAreReleasedFromKueue) {
  Cluster c;
  c.kubelets = false;  // the pods stay, as Kueue's finalizer makes them
  const kube::Resource workloads = kube::resource_of("kueue.x-k8s.io/v1beta1", "workloads", "Workload");
  c.server.serve(workloads, false);
  ReconcilerOptions options = fast_options();
  options.plan.discovery["kueue.x-k8s.io/v1beta1"] = {"workloads"};
  c.start_operator(-1, options);
  const ObjectKey job = c.add_job("queued", "  queueName: team\n");
  ASSERT_TRUE(eventually([&] { return c.pods().size() == 2; }));
  for (const char* name : {"queued", "other"}) {
    const Json owner = {{"kind", "Pod"}, {"name", std::string(name) + "-actor-0-a1"}};
    c.server.put(
        workloads,
        {{"metadata",
          {{"name", std::string(name) + "-a1"}, {"namespace", "team"}, {"ownerReferences", Json::array({owner})}}}});
  }
  c.client.remove(resources::kRlJobs, job);
  EXPECT_TRUE(eventually([&] { return !c.server.get(workloads, {"team", "queued-a1"}); }));
  EXPECT_TRUE(c.server.get(workloads, {"team", "other-a1"}));
  EXPECT_EQ(c.pods().size(), 2u);
}

// As when the watch of Services is behind: the job has ended and been looked at before its Service is heard of.
TEST(Reconciler, ServiceHeardOfAfterTheEndIsRemoved) {
  Cluster c;
  c.trainers_end = true;
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(c.wait_phase(job, phase::kComplete));
  ASSERT_TRUE(eventually([&] { return c.clean(); }));
  const std::string uid = c.job(job)["metadata"]["uid"];
  c.server.put(
      resources::kServices,
      {{"metadata",
        {{"name", "quick-a1"},
         {"namespace", "team"},
         {"ownerReferences", Json::array({{{"kind", "RLJob"}, {"name", "quick"}, {"uid", uid}, {"controller", true}}})},
         {"labels", {{kLabelJob, "quick"}, {kLabelJobUid, uid}, {kLabelAttempt, "1"}}}}}});
  EXPECT_TRUE(eventually([&] { return c.clean(); }));
}

TEST(Reconciler, TtlRemovesTheJob) {
  Cluster c;
  c.trainers_end = true;
  c.start_operator();
  const ObjectKey job = c.add_job("quick", "  ttlSecondsAfterFinished: 0\n");
  EXPECT_TRUE(eventually([&] { return c.attempt(job) == 0 && c.server.count("DELETE", "/rljobs/quick") > 0; }));
  EXPECT_TRUE(eventually([&] { return !c.server.get(resources::kRlJobs, job) && c.pods().empty(); }));
}

// One job of two attempts, run by operators that each die at their n-th write, for every n.
TEST(Reconciler, SurvivesADeathAtEveryWrite) {
  int n = 1;
  for (bool whole = false; !whole; ++n) {
    SCOPED_TRACE("death at write " + std::to_string(n));
    ASSERT_LT(n, 200);
    Cluster c;
    c.fail_first = 1;
    c.trainers_end = true;
    const ObjectKey job = c.add_job("quick");
    c.start_operator(n);
    auto over = [&] { return c.phase(job) == phase::kComplete && c.clean() && c.no_policies(); };
    ASSERT_TRUE(eventually([&] { return over() || c.is_dead(); }));
    whole = over() && !c.is_dead();
    c.stop_operator();
    c.start_operator();
    ASSERT_TRUE(eventually(over)) << c.job(job).dump(1);
    EXPECT_EQ(c.attempt(job), 2);
    EXPECT_EQ(c.job(job)["status"]["restarts"], 1);
    expect_sound(c);
    if (::testing::Test::HasFailure()) return;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    n += 2;  // a third of the deaths is enough for what sanitizers look for
#endif
  }
  EXPECT_GT(n, 10);
}

// Every operator dies after three writes, again and again.
TEST(Reconciler, SurvivesDyingAllTheTime) {
  Cluster c;
  c.fail_first = 2;
  c.trainers_end = true;
  const ObjectKey job = c.add_job("quick");
  auto over = [&] { return c.phase(job) == phase::kComplete && c.clean(); };
  for (int i = 0; i < 100 && !over(); ++i) {
    c.start_operator(3);
    ASSERT_TRUE(eventually([&] { return over() || c.is_dead(); }));
    c.stop_operator();
  }
  EXPECT_TRUE(over()) << c.job(job).dump(1);
  EXPECT_EQ(c.attempt(job), 3);
  expect_sound(c);
}

TEST(Reconciler, SurvivesAStormOfErrorsAndLostAnswers) {
  Cluster c;
  c.fail_first = 1;
  c.trainers_end = true;
  for (int i = 0; i < 6; ++i) {
    c.server.inject({.method = "POST", .path_part = "/namespaces/team", .status = 429, .retry_after_s = 0});
    c.server.inject({.method = "POST", .path_part = "/namespaces/team", .status = 500, .apply_first = true});
    c.server.inject({.method = "PATCH", .path_part = "/rljobs", .status = 503});
    c.server.inject({.method = "PATCH", .path_part = "/rljobs", .status = 504, .apply_first = true});
    c.server.inject({.method = "DELETE", .path_part = "/namespaces/team", .status = 500, .apply_first = true});
    c.server.inject({.method = "GET", .path_part = "/rljobs/quick", .status = 503});
    c.server.inject({.method = "POST", .path_part = "/pods", .apply_first = true, .cut = true});
  }
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  EXPECT_TRUE(eventually([&] {
    c.server.cut_watches();
    std::this_thread::sleep_for(Milliseconds(50));
    return c.phase(job) == phase::kComplete && c.clean();
  })) << c.job(job).dump(1);
  EXPECT_EQ(c.attempt(job), 2);
  EXPECT_EQ(c.violations(), std::vector<std::string>{});
  EXPECT_EQ(c.created_twice(), std::vector<std::string>{});
}

TEST(Reconciler, ForgottenHistoryCreatesNothingTwice) {
  Cluster c;
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  for (int i = 0; i < 5; ++i) {
    c.server.expire_history();
    std::this_thread::sleep_for(Milliseconds(20));
  }
  c.trainers_end = true;
  ASSERT_TRUE(c.wait_phase(job, phase::kComplete));
  EXPECT_EQ(c.attempt(job), 1);
  expect_sound(c);
}

TEST(Reconciler, PodDeletedByHandRestarts) {
  Cluster c;
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  c.client.remove(resources::kPods, {"team", "quick-actor-1-a1"});
  ASSERT_TRUE(eventually([&] { return c.attempt(job) == 2 && c.phase(job) == phase::kRunning; }));
  EXPECT_EQ(c.job(job)["status"]["freeRestarts"], 1);
  EXPECT_EQ(c.job(job)["status"].value("restarts", 0), 0);
  expect_sound(c);
}

TEST(Reconciler, LostNodeRestarts) {
  Cluster c;
  c.start_operator();
  const ObjectKey job = c.add_job("quick", "  health: {nodeNotReadyGraceSeconds: 1}\n");
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  const std::string node = (*c.server.get(resources::kPods, {"team", "quick-actor-1-a1"}))["spec"]["nodeName"];
  const int number = node.back() - '0';
  c.trainers = false;  // rank 0 has lost its peer
  c.put_node(number, false);
  ASSERT_TRUE(eventually([&] { return c.attempt(job) >= 2; }));
  EXPECT_EQ(c.job(job)["status"]["lastFailure"]["reason"], "NodeLost");
  c.put_node(number, true);
  c.trainers = true;
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  EXPECT_EQ(c.violations(), std::vector<std::string>{});
}

TEST(Reconciler, NodesThatTheWatchKeepsBackAreNotLost) {
  Cluster c;
  const auto node_of = [](int i) { return ObjectKey{"", "node-" + std::to_string(i)}; };
  for (int i = 0; i < 3; ++i) c.server.erase(resources::kNodes, node_of(i));
  c.server.inject({.method = "GET", .path_part = "/api/v1/nodes?allowWatchBookmarks", .status = 503, .times = -1});
  c.start_operator();
  for (int i = 0; i < 3; ++i) c.put_node(i, true);  // as an autoscaler does
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  ASSERT_TRUE(eventually_looking(c, job, [&] { return c.server.count("GET", "/api/v1/nodes/node-") >= 4; }));
  EXPECT_EQ(c.attempt(job), 1);
  EXPECT_EQ(c.job(job)["status"].value("freeRestarts", 0), 0);
  // No answer is no loss either; 404 is.
  c.server.inject({.method = "GET", .path_part = "/api/v1/nodes/node-", .status = 403, .times = 4});
  const int before = c.server.count("GET", "/api/v1/nodes/node-");
  ASSERT_TRUE(eventually_looking(c, job, [&] { return c.server.count("GET", "/api/v1/nodes/node-") >= before + 4; }));
  EXPECT_EQ(c.attempt(job), 1);
  for (int i = 0; i < 3; ++i) c.server.erase(resources::kNodes, node_of(i));
  ASSERT_TRUE(eventually_looking(c, job, [&] { return c.attempt(job) >= 2; }));
  EXPECT_EQ(c.job(job)["status"]["lastFailure"]["reason"], "NodeLost");
}

TEST(Reconciler, ForeignPodInTheWayIsNotTouched) {
  Cluster c;
  c.kubelets = false;
  const ObjectKey taken{"team", "quick-actor-1-a1"};
  c.server.put(resources::kPods,
               {{"metadata", {{"name", taken.name}, {"namespace", taken.ns}}}, {"spec", Json::object()}});
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(eventually([&] { return c.server.count("GET", "/pods/quick-actor-1-a1") >= 2; }));
  EXPECT_TRUE(c.server.get(resources::kPods, taken));
  EXPECT_EQ(c.phase(job), phase::kQueued);
  c.server.erase(resources::kPods, taken);
  c.kubelets = true;
  EXPECT_TRUE(c.wait_phase(job, phase::kRunning));
}

TEST(Reconciler, PodsThatTheServerRefusesFailTheJob) {
  Cluster c;
  c.server.inject({.method = "POST", .path_part = "/pods", .status = 422, .reason = "Invalid", .times = -1});
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(c.wait_phase(job, phase::kFailed));
  bool said = false;
  const Json conditions = c.job(job)["status"]["conditions"];
  for (const Json& condition : conditions)
    said |= condition["type"] == "Failed" && condition["reason"] == "PodsRejected";
  EXPECT_TRUE(said);
  EXPECT_TRUE(eventually([&] { return c.clean(); }));
}

// A webhook that names no code denies with 400, and may be mended or be gone in a minute.
TEST(Reconciler, PodsThatAWebhookDeniesAreAskedForAgain) {
  Cluster c;
  c.server.inject({.method = "POST", .path_part = "/pods", .status = 400, .times = -1});
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(eventually([&] { return pod_creates(c) >= 6; }));
  EXPECT_EQ(c.phase(job), phase::kQueued);
  EXPECT_TRUE(eventually([&] { return c.job(job)["status"].value("waiting", "") == "PodsRejected"; }));
  c.server.clear_faults();
  EXPECT_TRUE(c.wait_phase(job, phase::kRunning));
  EXPECT_EQ(c.attempt(job), 1);
}

TEST(Reconciler, InvalidJobIsRefusedWithoutAWebhook) {
  Cluster c;
  c.start_operator();
  Json object = testing::job_object("bad");
  object["spec"]["roles"] = Json::object();
  c.server.put(resources::kRlJobs, object);
  const ObjectKey job{"team", "bad"};
  ASSERT_TRUE(c.wait_phase(job, phase::kPending));
  EXPECT_TRUE(c.pods().empty());
  object = c.job(job);
  c.server.modify(resources::kRlJobs, job, [](Json& j) { j["spec"]["roles"] = {{"actor", {{"replicas", 2}}}}; });
  EXPECT_TRUE(c.wait_phase(job, phase::kRunning));
}

TEST(Reconciler, ManyJobsAtOnce) {
  Cluster c;
  c.trainers_end = true;
  c.start_operator();
  std::vector<ObjectKey> jobs;
  for (int i = 0; i < 20; ++i) jobs.push_back(c.add_job("job-" + std::to_string(i)));
  for (const ObjectKey& job : jobs) ASSERT_TRUE(c.wait_phase(job, phase::kComplete)) << job.name;
  EXPECT_TRUE(eventually([&] { return c.clean(); }));
  expect_sound(c);
}

TEST(Reconciler, MakingComesBeforeDescribing) {
  Cluster c;
  c.trainers = false;  // a rendezvous is told at once
  constexpr int kJobs = 20;
  for (int i = 0; i < kJobs; ++i) c.add_job("job-" + std::to_string(i));
  ReconcilerOptions options = fast_options();
  options.workers = 1;
  c.start_operator(-1, options);
  for (int i = 0; i < kJobs; ++i)
    ASSERT_TRUE(c.wait_phase({"team", "job-" + std::to_string(i)}, phase::kStarting)) << i;
  // Pods were placed while others were still to be made; what that changed in the status came afterwards.
  size_t made = 0;
  for (const auto& request : c.server.requests()) {
    if (request.method == "POST" && ends_with(request.path, "/pods")) ++made;
    if (request.method == "PATCH" && request.body.find("\"Starting\"") != std::string::npos) break;
  }
  EXPECT_EQ(made, 2u * kJobs);
  expect_sound(c);
}

TEST(Reconciler, LargeGangIsMadeOnce) {
  Cluster c;
  c.start_operator();
  Json object = testing::job_object("big");
  object["spec"]["roles"]["actor"]["replicas"] = 100;
  c.server.put(resources::kRlJobs, object);
  ASSERT_TRUE(c.wait_phase({"team", "big"}, phase::kRunning));
  EXPECT_EQ(c.pods().size(), 100u);
  expect_sound(c);
}

TEST(Reconciler, PodsThatTheWatchKeepsBackAreReadByName) {
  Cluster c;
  stall_pod_watch(c);
  c.start_operator(-1, short_echo());
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(eventually_looking(c, job, [&] { return c.phase(job) == phase::kRunning; }));
  EXPECT_EQ(c.op->pod_count(), 0u);
  EXPECT_EQ(pod_lists(c), 0);
  EXPECT_GT(pod_reads(c, "quick-actor-0-a1"), 0);
  EXPECT_GT(pod_reads(c, "quick-actor-1-a1"), 0);
  c.server.clear_faults();
  c.trainers_end = true;
  ASSERT_TRUE(c.wait_phase(job, phase::kComplete));
  EXPECT_EQ(c.attempt(job), 1);
  expect_sound(c);
}

TEST(Reconciler, PodThatIsNotThereIsMadeAgain) {
  Cluster c;
  c.kubelets = false;
  stall_pod_watch(c);
  c.start_operator(-1, short_echo());
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(eventually([&] { return c.pods().size() == 2; }));
  c.server.inject({.method = "GET", .path_part = "/pods/quick-actor-0-a1", .status = 503, .times = -1});
  c.server.erase(resources::kPods, {"team", "quick-actor-1-a1"});
  ASSERT_TRUE(eventually_looking(c, job, [&] { return pod_reads(c, "quick-actor-0-a1") >= 3; }));
  EXPECT_EQ(pod_creates(c), 2) << "a look that failed shows nothing";
  c.server.clear_faults();
  stall_pod_watch(c);
  ASSERT_TRUE(eventually_looking(c, job, [&] { return c.pods().size() == 2; }));
  EXPECT_EQ(pod_creates(c), 3);
  EXPECT_EQ(pod_lists(c), 0);
}

TEST(Reconciler, LeftoverThatTheWatchKeepsBackIsSeen) {
  Cluster c;
  stall_pod_watch(c);
  c.start_operator(-1, short_echo());
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(eventually_looking(c, job, [&] { return c.phase(job) == phase::kRunning; }));
  c.kubelets = false;
  c.fail_pod("quick-actor-1-a1", 1);
  ASSERT_TRUE(eventually_looking(c, job, [&] { return c.server.count("DELETE", "/pods/quick-actor-0-a1") > 0; }));
  const int looks = pod_reads(c, "quick-actor-0-a1");
  ASSERT_TRUE(eventually_looking(c, job, [&] { return pod_reads(c, "quick-actor-0-a1") >= looks + 3; }));
  EXPECT_EQ(c.attempt(job), 2);
  EXPECT_EQ(pod_creates(c), 2) << "a pod of attempt 1 is alive";
  c.kubelets = true;
  ASSERT_TRUE(eventually_looking(c, job, [&] { return c.attempt(job) == 2 && c.phase(job) == phase::kRunning; }));
  EXPECT_EQ(pod_lists(c), 0);
  expect_sound(c);
}

// As when a job is deleted and made again under its name while the old pods are still going.
TEST(Reconciler, PodOfAnEarlierJobOfTheNameIsNotTakenForOurs) {
  Cluster c;
  c.kubelets = false;
  const ObjectKey taken{"team", "quick-actor-1-a1"};
  c.server.put(resources::kPods, {{"metadata",
                                   {{"name", taken.name},
                                    {"namespace", taken.ns},
                                    {"labels",
                                     {{kLabelJob, "quick"},
                                      {kLabelJobUid, "earlier"},
                                      {kLabelRole, "actor"},
                                      {kLabelRank, "1"},
                                      {kLabelAttempt, "1"}}}}},
                                  {"spec", Json::object()}});
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(eventually([&] { return pod_creates(c) >= 4; })) << "it was looked for, and is made again and again";
  EXPECT_EQ(c.phase(job), phase::kQueued);
  c.server.erase(resources::kPods, taken);
  c.kubelets = true;
  EXPECT_TRUE(c.wait_phase(job, phase::kRunning));
  EXPECT_EQ(pod_lists(c), 0);
}

TEST(Reconciler, AmongFewPodsAListIsCheaper) {
  Cluster c;
  stall_pod_watch(c);
  ReconcilerOptions options = short_echo();
  options.pods_a_get = ReconcilerOptions().pods_a_get;
  c.start_operator(-1, options);
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(eventually_looking(c, job, [&] { return c.phase(job) == phase::kRunning; }));
  EXPECT_GT(pod_lists(c), 0);
  EXPECT_EQ(pod_reads(c, "quick-actor-0-a1"), 0);
  expect_sound(c);
}

TEST(Reconciler, LargeGangIsListed) {
  Cluster c;
  stall_pod_watch(c);
  c.start_operator(-1, short_echo());
  Json object = testing::job_object("big");
  object["spec"]["roles"]["actor"]["replicas"] = PodNames::kMost + 4;
  c.server.put(resources::kRlJobs, object);
  const ObjectKey job{"team", "big"};
  ASSERT_TRUE(eventually_looking(c, job, [&] { return c.phase(job) == phase::kRunning; }));
  EXPECT_GT(pod_lists(c), 0);
  EXPECT_EQ(pod_reads(c, "big-actor-0-a1"), 0);
  expect_sound(c);
}

TEST(Reconciler, PodsOfAnotherProcessAreListedOnce) {
  Cluster c;
  c.kubelets = false;
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(eventually([&] { return c.pods().size() == 2; }));
  c.stop_operator();
  EXPECT_EQ(pod_lists(c), 0);
  stall_pod_watch(c);
  for (int i = 0; i < 2; ++i) {
    c.server.erase(resources::kPods, {"team", "quick-actor-1-a1"});
    if (i == 0) c.start_operator(-1, short_echo());
    ASSERT_TRUE(eventually_looking(c, job, [&] { return c.pods().size() == 2; }));
    EXPECT_EQ(pod_lists(c), 1);
  }
}

TEST(Reconciler, ALateWatchIsGivenMoreTimeAfterEachLook) {
  Cluster c;
  c.kubelets = false;
  stall_pod_watch(c);
  ReconcilerOptions options = fast_options();
  options.create_echo = Milliseconds(20);
  const Stopwatch watch;
  c.start_operator(-1, options);
  const ObjectKey job = c.add_job("quick");
  int looks = 0;
  ASSERT_TRUE(eventually_looking(c, job, [&] { return (looks = pod_reads(c, "quick-actor-0-a1")) >= 4; }));
  // 20, 40, 80 and 160 ms, although there were news every few.
  EXPECT_GE(watch.seconds(), 0.3);
  EXPECT_EQ(pod_creates(c), 2);
}

TEST(Reconciler, StandbyWritesNothing) {
  Cluster c;
  ReconcilerOptions options = fast_options();
  std::atomic<int> asked{0};
  options.may_write = [&] {
    ++asked;
    return false;
  };
  c.start_operator(-1, std::move(options));
  c.add_job("quick");
  ASSERT_TRUE(eventually([&] { return asked > 0; }));
  EXPECT_EQ(c.server.count("POST", "/namespaces/team"), 0);
  EXPECT_EQ(c.server.count("PATCH", ""), 0);
}

TEST(Reconciler, FewClaimsAreReadAndNoneAfterAFailure) {
  for (const bool fails : {false, true}) {
    Cluster c;
    if (fails) c.server.inject({.method = "GET", .path_part = "/persistentvolumeclaims/", .status = 403, .times = -1});
    Json object = testing::job_object("quick");
    Json volumes = Json::array();
    for (int i = 0; i < 40; ++i) {
      const std::string name = "claim-" + std::to_string(i);
      volumes.push_back({{"name", name}, {"persistentVolumeClaim", {{"claimName", name}}}});
    }
    object["spec"]["roles"]["actor"]["template"]["spec"] = {{"containers", Json::array({{{"name", "trainer"}}})},
                                                            {"volumes", volumes}};
    c.server.put(resources::kRlJobs, object);
    c.start_operator();
    ASSERT_TRUE(c.wait_phase({"team", "quick"}, phase::kRunning));
    EXPECT_EQ(c.attempt({"team", "quick"}), 1);
    const int reads = c.server.count("GET", "/persistentvolumeclaims/");
    EXPECT_GE(reads, 1);
    EXPECT_LE(reads, fails ? 1 : 16) << "fewer where the time for them all is over";
  }
}

// A wave of 32 pods of the actor and one of generation, with five threads.
struct WaveOfPods {
  kube::testing::FakeApiServer server;
  kube::Client client{server.config(), {.qps = 0}};
  Pool pool{4};
  Writer writer{client, {}, pool, [] { return Load{}; }};
  RLJob job;

  WaveOfPods() {
    std::vector<Issue> issues;
    job = rljob_from_json(server.put(resources::kRlJobs, testing::job_object("quick")), issues, {.strict = false});
  }
  bool carry_out() {
    std::vector<Action> actions;
    for (int i = 0; i <= 32; ++i) {
      Action action;
      action.resource = resources::kPods;
      action.name = "pod-" + std::to_string(i);
      action.role = i < 32 ? "actor" : "generation";
      const Json metadata = {{"name", action.name}, {"namespace", "team"}, {"labels", {{kLabelRole, action.role}}}};
      action.make = [metadata] { return Json{{"metadata", metadata}}; };
      actions.push_back(std::move(action));
    }
    return writer.carry_out({"team", "quick"}, job, std::move(actions), Deadline::after(Milliseconds(60000)));
  }
  int asked(const std::string& role) const {
    int n = 0;
    for (const auto& request : server.requests())
      n += request.method == "POST" && request.body.find("\"" + role + "\"") != std::string::npos;
    return n;
  }
};

TEST(Wave, AfterARefusalTheOthersOfTheRoleAreNotAskedFor) {
  WaveOfPods w;
  w.server.limit_pods("team", 0);
  EXPECT_FALSE(w.carry_out());
  EXPECT_GE(w.asked("actor"), 1);
  EXPECT_LE(w.asked("actor"), 5) << "one for each thread that had begun";
  EXPECT_EQ(w.asked("generation"), 1) << "a pod of another template may be taken";
  ASSERT_TRUE(w.writer.answers({"team", "quick"}).refusal);
  w.server.limit_pods("team", 100);
  EXPECT_TRUE(w.carry_out()) << "the next wave asks again";
  EXPECT_EQ(w.server.list(resources::kPods).size(), 33u);
}

TEST(Wave, AServerThatAsksForLessIsSentNoMore) {
  WaveOfPods w;
  w.server.inject({.method = "POST", .path_part = "/pods", .status = 429, .reason = "TooManyRequests", .times = -1});
  EXPECT_THROW(w.carry_out(), kube::ApiError);
  EXPECT_LE(w.asked("actor") + w.asked("generation"), 5);
}

TEST(Pool, RunsAllAndThrowsTheFirstFailure) {
  Pool pool(3);
  std::atomic<int> done{0};
  std::vector<std::function<void()>> tasks;
  for (int i = 0; i < 50; ++i) {
    tasks.push_back([&, i] {
      ++done;
      if (i == 7) throw std::runtime_error("seven");
    });
  }
  EXPECT_THROW(pool.run(std::move(tasks)), std::runtime_error);
  EXPECT_EQ(done, 50);
}

}  // namespace
}  // namespace trireme::controller
