// Who reaches a job's pods: the policy as an object, its peers as text, and its life beside the job's.
#include "operator/controller/network_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "operator/controller/actions.h"
#include "operator/controller/cache.h"
#include "tests/unit/controller/cluster.h"
#include "tests/unit/controller/manifests.h"

namespace trireme::controller {
namespace {

using testing::Cluster;
using testing::eventually;
using testing::fast_options;
using ::testing::HasSubstr;
using testing::kModelAndConfig;
using testing::kRewardRole;
using testing::kTwoPods;
using testing::Made;
using testing::make_job;
using testing::ObjectKey;
using testing::World;
namespace resources = kube::resources;

const char* kMonitoring = R"([{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"monitoring"}}}])";

Made made(const std::string& yaml) { return testing::made(yaml, kMonitoring); }

TEST(NetworkPolicy, OwnPodsEverywhereAndScrapersAtTheMetricsPort) {
  const Made m = made(std::string(kTwoPods) + "  network: {metricsPort: 9500}\n");
  const Json policy = network_policy(m.context());
  EXPECT_EQ(policy["metadata"]["name"], "quick-network");
  EXPECT_EQ(policy["metadata"]["namespace"], "team");
  EXPECT_EQ(policy["metadata"]["labels"][kLabelJobUid], "uid-quick");
  EXPECT_FALSE(policy["metadata"]["labels"].contains(kLabelAttempt)) << "it spans attempts";
  EXPECT_EQ(policy["metadata"]["ownerReferences"][0]["uid"], "uid-quick");
  EXPECT_EQ(policy["spec"], Json::parse(R"({
    "podSelector": {"matchLabels": {"trireme.dev/job-uid": "uid-quick"}},
    "policyTypes": ["Ingress"],
    "ingress": [
      {"from": [{"podSelector": {"matchLabels": {"trireme.dev/job-uid": "uid-quick"}}}]},
      {"from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
       "ports": [{"port": 9500, "protocol": "TCP"}]}]})"));
  // What it selects and lets in are the labels that pods of every role really have.
  const Json labels = pod(m.context(), "actor", 1)["metadata"]["labels"];
  EXPECT_EQ(labels[kLabelJobUid], policy["spec"]["podSelector"]["matchLabels"][kLabelJobUid]);
}

// Generation pods reach actor 0's store and its server of work, and the critic's that store and each other, under
// whatever ports, and so do those that are made again; nobody else does.
TEST(NetworkPolicy, PodsOfAllRolesReachActor0AtEveryPort) {
  const Made m = made(kModelAndConfig + "  roles:\n    actor: {}\n    critic: {}\n    generation: {}\n");
  const Json spec = network_policy(m.context())["spec"];
  const Json& first = spec["ingress"][0];
  EXPECT_FALSE(first.contains("ports"));
  const Json wanted = first["from"][0]["podSelector"]["matchLabels"];
  for (const Json& made : {pod(m.context(), "generation", 0), pod(m.context(), "generation", 0, 3, 1),
                           pod(m.context(), "critic", 0), pod(m.context(), "actor", 0)}) {
    for (const auto& [label, value] : wanted.items()) EXPECT_EQ(made["metadata"]["labels"][label], value) << label;
  }
  for (size_t i = 1; i < spec["ingress"].size(); ++i) EXPECT_EQ(spec["ingress"][i]["ports"][0]["port"], 9400);
}

TEST(NetworkPolicy, WithoutScrapersNobodyElse) {
  Made m = made(kTwoPods);
  m.options.scraped_by = Json::array();
  const Json ingress = network_policy(m.context())["spec"]["ingress"];
  ASSERT_EQ(ingress.size(), 1u) << "a rule with an empty list of peers would let in everybody";
  EXPECT_FALSE(ingress[0]["from"].empty());
}

TEST(NetworkPolicy, JobsInTheNodesNetworkGetNone) {
  Made m = made(kTwoPods);
  EXPECT_TRUE(wants_network_policy(m.job, m.options));
  EXPECT_FALSE(wants_network_policy(made(std::string(kTwoPods) + "  network: {hostNetwork: true}\n").job, m.options));
  const Made one_role =
      made(kModelAndConfig + "  roles:\n    actor: {template: {spec: {hostNetwork: true}}}\n" + kRewardRole);
  EXPECT_FALSE(wants_network_policy(one_role.job, m.options)) << "the reward pod would hear the node's address";
  m.options.network_policies = false;
  EXPECT_FALSE(wants_network_policy(m.job, m.options));
}

TEST(NetworkPolicy, PeersAreReadAsTheServerAnswersThem) {
  EXPECT_EQ(parse_policy_peers("[]"), Json::array());
  EXPECT_EQ(parse_policy_peers(R"([{"namespaceSelector":{"matchLabels":{}},"podSelector":{"matchLabels":{"a":"b"},
    "matchExpressions":[{"key":"c","operator":"Exists","values":[]},{"key":"d","operator":"In","values":["e"]}]}},
    {"ipBlock":{"cidr":"10.0.0.0/8","except":[]}}])"),
            Json::parse(R"([{"namespaceSelector":{},"podSelector":{"matchLabels":{"a":"b"},
    "matchExpressions":[{"key":"c","operator":"Exists"},{"key":"d","operator":"In","values":["e"]}]}},
    {"ipBlock":{"cidr":"10.0.0.0/8"}}])"));
}

TEST(NetworkPolicy, PeersThatTheServerWouldRefuseAreNamed) {
  const auto said = [](const std::string& text) {
    try {
      parse_policy_peers(text);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("(taken)");
  };
  EXPECT_THAT(said("monitoring"), HasSubstr("list of peers"));
  EXPECT_THAT(said("{}"), HasSubstr("must be a JSON list"));
  EXPECT_THAT(said("[{}]"), HasSubstr("peer [0] is empty"));
  EXPECT_THAT(said(R"([{"podSelector":{}},{"namespaces":{}}])"), HasSubstr("peer [1] has the unknown key namespaces"));
  EXPECT_THAT(said(R"([{"podSelector":{"matchLabels":{"a":1}}}])"), HasSubstr("matchLabels.a must be a string"));
  EXPECT_THAT(said(R"([{"podSelector":{"matchExpressions":[{"key":"a","operator":"Is"}]}}])"), HasSubstr("must be In"));
  EXPECT_THAT(said(R"([{"podSelector":{"matchExpressions":[{"key":"a","operator":"In"}]}}])"),
              HasSubstr("needs values"));
  EXPECT_THAT(said(R"([{"ipBlock":{"cidr":"10.0.0.0/8"},"podSelector":{}}])"), HasSubstr("no selector"));
  EXPECT_THAT(said(R"([{"ipBlock":{"cidr":"everywhere"}}])"), HasSubstr("10.0.0.0/8"));
}

// ---- in a plan

World running() {
  World w(make_job(kTwoPods));
  w.options.objects.network_policies = true;
  w.options.objects.scraped_by = parse_policy_peers(kMonitoring);
  w.run();
  return w;
}

TEST(NetworkPolicy, IsThereBeforeThePodsAndStaysOverARestart) {
  World w = running();
  ASSERT_EQ(w.job.status.phase, phase::kRunning);
  ASSERT_TRUE(w.policy);
  const std::string uid = w.policy->uid;
  w.fail_pod(w.actor(1), 1);
  w.reconcile();
  w.finish_deletions();
  w.run();
  EXPECT_EQ(w.job.status.attempt, 2);
  ASSERT_TRUE(w.policy);
  EXPECT_EQ(w.policy->uid, uid);
  EXPECT_EQ(w.violations, std::vector<std::string>{});
}

TEST(NetworkPolicy, IsPutRightWhenTakenAwayOrChanged) {
  World w = running();
  const uint64_t right = w.policy->spec;
  w.policy->spec = 1;
  w.reconcile();
  EXPECT_EQ(w.policy->spec, right);
  w.policy.reset();
  w.reconcile();
  ASSERT_TRUE(w.policy);
  EXPECT_EQ(w.policy->spec, right);
  EXPECT_EQ(w.job.status.attempt, 1);
  // Nothing to do is nothing done, and asks for no look at the API server.
  const Plan p = plan(w.observe(), w.options);
  EXPECT_FALSE(p.needs_live);
  EXPECT_TRUE(p.actions.empty());
}

TEST(NetworkPolicy, WhatAdmissionMadeOfItIsLeftUntilWeWantAnother) {
  World w = running();
  w.policy->stands_for = w.policy->spec;
  w.policy->spec = 1;
  EXPECT_TRUE(plan(w.observe(), w.options).actions.empty());
  EXPECT_FALSE(plan(w.observe(), w.options).needs_live);
  w.options.objects.scraped_by = parse_policy_peers(R"([{"podSelector":{}}])");
  EXPECT_TRUE(plan(w.observe(), w.options).needs_live);
}

TEST(NetworkPolicy, OtherScrapersReachJobsThatRun) {
  World w = running();
  const uint64_t before = w.policy->spec;
  w.options.objects.scraped_by = parse_policy_peers(R"([{"podSelector":{}}])");
  w.reconcile();
  EXPECT_NE(w.policy->spec, before);
  EXPECT_EQ(w.job.status.attempt, 1);
}

TEST(NetworkPolicy, GoesAfterTheLastPod) {
  World w = running();
  w.options.completion_grace = Milliseconds(0);
  w.pods.at(w.actor(0)).phase = PodPhase::kSucceeded;  // the other one is taken away
  w.reconcile();
  ASSERT_EQ(w.job.status.phase, phase::kComplete);
  w.reconcile();
  ASSERT_GT(w.alive(), 0);
  EXPECT_TRUE(w.policy);
  w.finish_deletions();
  w.reconcile();
  EXPECT_FALSE(w.policy);
  EXPECT_EQ(w.violations, std::vector<std::string>{});
}

TEST(NetworkPolicy, OneThatIsNoLongerWantedGoesBeforeThePods) {
  World w = running();
  w.job.spec.suspend = true;
  for (int i = 0; i < 3; ++i) {
    w.reconcile();
    w.finish_deletions();
  }
  ASSERT_EQ(w.job.status.phase, phase::kSuspended);
  EXPECT_TRUE(w.policy);
  w.job.spec.suspend = false;
  w.job.spec.network.host_network = true;
  w.options.objects.network_policies = true;
  w.job.metadata.generation += 1;
  Observed o = w.observe();
  o.live = true;
  o.job.status.phase = phase::kQueued;
  o.job.status.attempt = 2;
  const Plan p = plan(o, w.options);
  ASSERT_FALSE(p.actions.empty());
  EXPECT_EQ(p.actions[0].resource.plural, "networkpolicies");
  EXPECT_EQ(p.actions[0].kind, Action::Kind::kDelete);
  EXPECT_EQ(p.actions[0].uid, w.policy->uid);
  EXPECT_EQ(p.actions.back().resource.plural, "pods");
  EXPECT_LT(p.actions[0].wave, p.actions.back().wave);
}

// ---- against the API server

TEST(NetworkPolicy, ALoosenedOneIsPutRightInOneWrite) {
  Cluster c;
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  const Json right = c.policy("quick");
  ASSERT_TRUE(right.is_object());
  ASSERT_TRUE(c.server.modify(resources::kNetworkPolicies, {"team", "quick-network"}, [](Json& p) {
    p["metadata"]["labels"]["team"] = "blue";
    p["spec"]["ingress"].push_back(Json::object());  // lets everybody in
    p["spec"]["egress"] = Json::array({Json::object()});
  }));
  ASSERT_TRUE(eventually([&] { return c.policy("quick")["spec"] == right["spec"]; }));
  EXPECT_EQ(c.policy("quick")["metadata"]["uid"], right["metadata"]["uid"]);
  EXPECT_EQ(c.policy("quick")["metadata"]["labels"]["team"], "blue");
  EXPECT_EQ(c.server.count("DELETE", "/networkpolicies/"), 0) << "there is no moment without it";
  c.server.erase(resources::kNetworkPolicies, {"team", "quick-network"});
  ASSERT_TRUE(eventually([&] { return c.policy("quick").is_object() && c.policy("quick")["spec"] == right["spec"]; }));
  EXPECT_EQ(c.attempt(job), 1);
}

TEST(NetworkPolicy, OneThatAdmissionRewritesIsToldOfOnceAndLeft) {
  Cluster c;
  c.server.admit(resources::kNetworkPolicies, [](Json& p) { p["spec"]["policyTypes"] = {"Egress", "Ingress"}; });
  kube::EventRecorder events(c.client);
  struct Stop {  // before the events go
    Cluster& c;
    ~Stop() { c.stop_operator(); }
  } stop{c};
  ReconcilerOptions options = fast_options();
  options.events = &events;
  c.start_operator(-1, options);
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(c.wait_phase(job, phase::kRunning));
  const auto told = [&] {
    int64_t times = 0;
    for (const Json& event : c.server.list(resources::kEvents)) {
      if (event["reason"] == "PolicyRewritten") times += event.value("count", int64_t{1});
    }
    return times;
  };
  ASSERT_TRUE(eventually([&] { return told() > 0; }));
  const auto writes = [&] {
    return c.server.count("POST", "/networkpolicies") + c.server.count("PATCH", "/networkpolicies");
  };
  const auto look_often = [&] {
    for (int i = 0; i < 20; ++i) {
      c.op->enqueue(job);
      std::this_thread::sleep_for(Milliseconds(10));
    }
  };
  look_often();  // the watch has told of it by then
  const int before = writes();
  EXPECT_EQ(c.server.count("PATCH", "/networkpolicies"), 0);
  look_often();
  EXPECT_EQ(writes(), before);
  // A change that is not the webhook's is put right as ever, into what the webhook makes of it.
  const Json rewritten = c.policy("quick")["spec"];
  ASSERT_TRUE(c.server.modify(resources::kNetworkPolicies, {"team", "quick-network"},
                              [](Json& p) { p["spec"]["ingress"].push_back(Json::object()); }));
  ASSERT_TRUE(eventually([&] { return c.policy("quick")["spec"] == rewritten; }));
  look_often();
  EXPECT_EQ(c.server.count("PATCH", "/networkpolicies"), 1);
  EXPECT_TRUE(events.flush(Deadline::after(Milliseconds(60000))));
  EXPECT_EQ(told(), 1);
}

TEST(NetworkPolicy, ForeignOneInTheWayIsNotTouched) {
  Cluster c;
  const Json foreign = {{"metadata", {{"name", "quick-network"}, {"namespace", "team"}}},
                        {"spec", {{"podSelector", Json::object()}}}};
  c.server.put(resources::kNetworkPolicies, foreign);
  c.start_operator();
  const ObjectKey job = c.add_job("quick");
  ASSERT_TRUE(eventually([&] { return c.server.count("GET", "/networkpolicies/quick-network") >= 2; }));
  EXPECT_TRUE(c.pods().empty()) << "no pod without its policy";
  EXPECT_EQ(c.policy("quick")["spec"], foreign["spec"]);
  c.server.erase(resources::kNetworkPolicies, {"team", "quick-network"});
  EXPECT_TRUE(c.wait_phase(job, phase::kRunning));
}

TEST(NetworkPolicy, ARefusedOneHoldsThePodsBackAndIsSaid) {
  // 400: of an admission webhook that names no code.
  for (const auto& [status, why] : {std::pair{403, "Forbidden"}, {400, ""}, {422, "Invalid"}}) {
    SCOPED_TRACE(status);
    Cluster c;
    c.server.inject({.method = "POST", .path_part = "/networkpolicies", .status = status, .reason = why, .times = -1});
    c.start_operator();
    const ObjectKey job = c.add_job("quick");
    ASSERT_TRUE(eventually([&] { return c.server.count("POST", "/networkpolicies") >= 3; }));
    EXPECT_EQ(c.phase(job), phase::kQueued);
    EXPECT_TRUE(eventually([&] { return c.job(job)["status"].value("waiting", "") == "NetworkPolicyRejected"; }));
    EXPECT_TRUE(c.pods().empty());
    c.server.clear_faults();
    EXPECT_TRUE(c.wait_phase(job, phase::kRunning));
    EXPECT_EQ(c.attempt(job), 1);
  }
}

TEST(NetworkPolicy, OffAsksForNoRights) {
  Cluster c;
  c.server.unserve(resources::kNetworkPolicies);
  ReconcilerOptions options = fast_options();
  options.plan.objects.network_policies = false;
  c.start_operator(-1, options);
  const ObjectKey job = c.add_job("quick");
  EXPECT_TRUE(c.wait_phase(job, phase::kRunning));
  EXPECT_EQ(c.server.count("GET", "networkpolicies") + c.server.count("POST", "networkpolicies"), 0);
}

}  // namespace
}  // namespace trireme::controller
