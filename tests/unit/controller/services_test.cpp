// Pods of services while their attempt goes on: lost and made again, given up, more and fewer of them.
#include <gtest/gtest.h>

#include "operator/controller/failure.h"
#include "operator/controller/objects.h"
#include "tests/unit/controller/world.h"

namespace trireme::controller {
namespace {

using testing::count_events;
using testing::expect_asked_seldom;
using testing::make_job;
using testing::pod_of;
using testing::reconcile_and_hear;
using testing::World;

World with_rewards(const std::string& more = "", int replicas = 1) {
  return World(
      make_job("  model: {source: /m}\n  config: {path: c.yaml}\n  roles: {actor: {replicas: 2}, reward: {replicas: " +
               std::to_string(replicas) +
               ", port: 8000, template: {spec: {containers: [{name: reward, image: r}]}}}}\n" + more));
}

// The newest pod of a place crashes, and is made again when its wait is over.
void crash(World& w, const std::string& role, int index) {
  w.place_all();
  w.fail_pod(w.newest(role, index)->name, 1);
  w.rendezvous();
  w.reconcile();
  w.now_ms += 15'000;
  w.rendezvous();
  w.reconcile();
}

// ---- reward pods

TEST(RewardPod, ThatCrashesIsReplacedAlone) {
  World w = with_rewards();
  w.run();
  const std::string name = "quick-reward-0-a1";
  w.fail_pod(name, 1);
  reconcile_and_hear(w);
  ASSERT_NE(pod_of(w, name + "-i1"), nullptr) << "at once, the first time, under a name of its own";
  EXPECT_EQ(w.job.status.last_failure->action, kActionReplacePod);
  EXPECT_EQ(w.job.status.last_failure->log_tail, "last words of " + name);
  EXPECT_EQ(count_events(w, "PodReplaced"), 1);
  w.place_all();
  w.reconcile();
  EXPECT_NE(pod_of(w, name), nullptr) << "the last failure's logs can be read";
  EXPECT_EQ(w.condition("PodsReady")->reason, "Ready");
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_EQ(w.job.status.restarts + w.job.status.free_restarts, 0);
  EXPECT_EQ(w.job.status.roles[1].restarts, 1);
  w.fail_pod(name + "-i1", 1);
  w.reconcile();
  w.reconcile();
  EXPECT_EQ(pod_of(w, name), nullptr);
  EXPECT_NE(pod_of(w, name + "-i1"), nullptr);
  EXPECT_TRUE(w.violations.empty());
}

TEST(RewardPod, ThatCrashesAgainWaits) {
  World w = with_rewards("", 2);
  w.run();
  int64_t last_wait = 0;
  for (int64_t i = 0; i < 5; ++i) {
    w.place_all();
    w.fail_pod(w.newest("reward", 1)->name, 1);
    int64_t waited = 0;
    w.rendezvous();
    w.reconcile();
    for (; w.newest("reward", 1)->failed() && waited < 1'000'000; waited += 1000) {
      w.now_ms += 1000;
      w.rendezvous();
      w.reconcile();
    }
    EXPECT_TRUE(i == 0 ? waited == 0 : waited > last_wait) << i << ": " << waited;
    EXPECT_EQ(w.newest("reward", 1)->failures_before, i + 1);
    last_wait = waited;
  }
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_EQ(w.job.status.roles[1].restarts, 5);
  w.place_all();
  ObservedPod& pod = *w.newest("reward", 1);
  w.fail_pod(pod.name, 1);
  pod.lived_ms = 3'600'000;
  w.reconcile();
  EXPECT_TRUE(w.newest("reward", 1)->alive()) << "one that had lived long is replaced at once";
  EXPECT_EQ(w.newest("reward", 1)->failures_before, 0);
  EXPECT_TRUE(w.violations.empty());
}

TEST(RewardPod, ThatNeverStopsCrashingEndsTheAttempt) {
  World w = with_rewards("  failurePolicy: {maxReplacements: 2}\n");
  w.run();
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(w.job.status.attempt, 1) << i;
    crash(w, "reward", 0);
  }
  EXPECT_EQ(w.job.status.phase, phase::kRestarting);
  EXPECT_EQ(w.job.status.restarts, 1);
}

TEST(RewardPod, DeletedByHandIsMadeAgain) {
  World w = with_rewards();
  w.run();
  w.take("quick-reward-0-a1");
  w.reconcile();
  EXPECT_NE(pod_of(w, "quick-reward-0-a1-i1"), nullptr);
  EXPECT_EQ(w.job.status.roles[1].restarts, 1);
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  w.place_all();
  w.pods.at("quick-reward-0-a1-i1").deleting = true;
  w.reconcile();
  EXPECT_NE(pod_of(w, "quick-reward-0-a1-i2"), nullptr) << "not only when the first has gone";
  EXPECT_EQ(w.job.status.roles[1].restarts, 2);
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_TRUE(w.violations.empty());
}

TEST(RewardPod, ThatLosesItsNodeIsMadeAgainBesideIt) {
  World w = with_rewards("  health: {nodeNotReadyGraceSeconds: 20}\n");
  w.run();
  w.pods.at("quick-reward-0-a1").node = "node-9";
  w.nodes["node-9"] = NodeState::kNotReady;
  w.reconcile();
  w.now_ms += 100'000;  // no fresh heartbeat holds it back
  w.reconcile();
  EXPECT_NE(pod_of(w, "quick-reward-0-a1-i1"), nullptr);
  EXPECT_EQ(w.job.status.last_failure->reason, kReasonNodeLost);
  EXPECT_EQ(w.job.status.attempt, 1);
  w.reconcile();
  EXPECT_TRUE(w.pods.at("quick-reward-0-a1").deleting);
  EXPECT_TRUE(w.violations.empty());
}

// Rank 0 reports all the time.
void go_on(World& w, int seconds) {
  for (int i = 0; i < seconds; i += 5, w.now_ms += 5'000) {
    w.rendezvous();
    w.reconcile();
  }
}

TEST(RewardPod, ThatLosesItsNodeIsMadeAgainWhateverRank0Says) {
  World w = with_rewards("  health: {nodeNotReadyGraceSeconds: 20}\n");
  w.run();
  w.pods.at("quick-reward-0-a1").node = "node-9";
  w.nodes["node-9"] = NodeState::kNotReady;
  w.rendezvous();
  w.reconcile();
  const Plan p = plan(w.observe(), w.options);
  ASSERT_TRUE(p.requeue_after);
  EXPECT_LE(p.requeue_after->count(), 20'000) << "the look comes when the grace is over";
  go_on(w, 20);
  EXPECT_EQ(pod_of(w, "quick-reward-0-a1-i1"), nullptr) << "19 s, the node may come back";
  go_on(w, 10);
  EXPECT_NE(pod_of(w, "quick-reward-0-a1-i1"), nullptr);
  EXPECT_TRUE(w.pods.at("quick-reward-0-a1").deleting);
  EXPECT_EQ(w.job.status.last_failure->reason, kReasonNodeLost);
  EXPECT_EQ(w.job.status.last_failure->action, kActionReplacePod);
  EXPECT_EQ(w.job.status.roles[1].restarts, 1);
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_TRUE(w.violations.empty());
}

TEST(RewardPod, ThatIsPlacedOnTheLostNodeAgainHasItsWholeGraceThere) {
  World w = with_rewards("  health: {nodeNotReadyGraceSeconds: 20}\n");
  w.run();
  w.pods.at("quick-reward-0-a1").node = "node-9";
  w.nodes["node-9"] = NodeState::kNotReady;
  go_on(w, 30);
  ASSERT_NE(pod_of(w, "quick-reward-0-a1-i1"), nullptr);
  w.pods.at("quick-reward-0-a1-i1").node = "node-9";  // it tolerates everything
  go_on(w, 20);
  EXPECT_EQ(pod_of(w, "quick-reward-0-a1-i2"), nullptr) << "the node may come back for it too";
  go_on(w, 10);
  EXPECT_NE(pod_of(w, "quick-reward-0-a1-i2"), nullptr);
  EXPECT_EQ(w.job.status.attempt, 1);
}

TEST(RewardPod, WhoseLossWouldEndTheAttemptIsHeldByRank0sReports) {
  World ruled = with_rewards(
      "  health: {nodeNotReadyGraceSeconds: 20}\n"
      "  failurePolicy: {rules: [{onPodReasons: [NodeLost], action: Restart}]}\n");
  // Kueue takes no pod beside one that may still run.
  World queued =
      with_rewards("  health: {nodeNotReadyGraceSeconds: 20}\n  queueName: q\n  scheduling: {backend: Kueue}\n");
  queued.options.discovery["kueue.x-k8s.io/v1beta2"] = {"workloads"};
  for (World* w : {&ruled, &queued}) {
    w->run();
    w->pods.at("quick-reward-0-a1").node = "node-9";
    w->nodes["node-9"] = NodeState::kNotReady;
    go_on(*w, 200);
    EXPECT_EQ(w->job.status.phase, phase::kRunning);
    EXPECT_FALSE(w->job.status.last_failure);
    w->now_ms += 61'000;
    w->reconcile();
    EXPECT_EQ(w->job.status.phase, phase::kRestarting);
    EXPECT_EQ(w->job.status.last_failure->reason, kReasonNodeLost);
  }
}

TEST(RewardPod, ThatAQuotaKeepsAwayIsAskedForSeldom) {
  World w = with_rewards();
  w.run();
  w.room = [] { return 0; };
  w.take("quick-reward-0-a1");
  w.reconcile();
  Plan p = plan(w.observe(), w.options);
  expect_asked_seldom(p);
  EXPECT_EQ(p.status.waiting, "QuotaExceeded");
  EXPECT_EQ(find_condition(p.status, "PodsReady")->reason, "QuotaExceeded");
  EXPECT_NE(find_condition(p.status, "PodsReady")->message.find("2 of 3 pods could be made"), std::string::npos);
  EXPECT_EQ(p.status.phase, phase::kRunning);
  World broken = w;
  broken.pods.erase(broken.actor(1));
  EXPECT_TRUE(plan(broken.observe(), broken.options).needs_live) << "a rank that goes meanwhile is a failure";
  w.now_ms += 6000;
  EXPECT_TRUE(plan(w.observe(), w.options).needs_live);
  EXPECT_FALSE(plan(w.observe(w.job, w.pods, true), w.options).actions.empty());
  w.room = {};
  w.reconcile();
  EXPECT_NE(pod_of(w, "quick-reward-0-a1-i1"), nullptr);
  w.place_all();
  w.reconcile();
  EXPECT_EQ(w.condition("PodsReady")->reason, "Ready");
  EXPECT_EQ(w.job.status.waiting, "");
  EXPECT_EQ(w.job.status.attempt, 1);
}

TEST(RewardPod, ARuleDecidesFirst) {
  World w = with_rewards("  failurePolicy: {rules: [{roles: [reward], action: Restart}]}\n");
  w.run();
  w.fail_pod("quick-reward-0-a1", 1);
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRestarting);
  EXPECT_EQ(w.job.status.restarts, 1);
}

TEST(RewardPod, ItsCrashTakesNoTimeFromACheckpoint) {
  World w = with_rewards();
  w.run();
  w.fail_pod("quick-reward-0-a1", 1);
  w.reconcile();
  w.reconcile();
  w.job.spec.suspend = true;
  ++w.job.metadata.generation;
  Observed o = w.observe();
  o.job.status = *plan(o, w.options).decision;
  for (const Action& action : plan(o, w.options).actions) {
    if (action.resource.plural != "pods") continue;
    EXPECT_EQ(action.grace_period_s, -1) << action.name;
  }
}

// ---- generation pods

World generating(const std::string& generation = "replicas: 3, minReplicas: 2", const std::string& more = "") {
  return World(make_job("  model: {source: /m}\n  config: {path: c.yaml}\n  roles: {actor: {}, generation: {" +
                        generation + "}}\n  health: {generationTimeoutSeconds: 60, heartbeatTimeoutSeconds: 100000}\n" +
                        more));
}
const RoleStatus& generation_row(const World& w) { return w.job.status.roles[1]; }

TEST(GenerationPod, TheGangBeginsWithItsCore) {
  World w = generating();
  w.reconcile();
  EXPECT_EQ(w.pods.size(), 4u);
  const AttemptContext context{w.job, 1, {scheduling::BackendKind::kVolcano, "v1beta1"}, w.options.objects};
  EXPECT_EQ(gang_of(context).pods, 3);
  const AttemptContext admitted{w.job, 1, {scheduling::BackendKind::kKueue, "v1beta2"}, w.options.objects};
  EXPECT_EQ(gang_of(admitted).pods, 4) << "a queue admits a number of pods";
  w.place_all();
  w.pods.at("quick-generation-1-a1").scheduled = false;
  w.pods.at("quick-generation-2-a1").scheduled = false;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kQueued) << "one of two that must be there";
  w.pods.at("quick-generation-2-a1").scheduled = true;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kStarting);
  EXPECT_EQ(w.condition("GangScheduled")->message, "3 of 4 pods have a node");
}

TEST(GenerationPod, ThatIsLostInAnyWayIsMadeAgainWithinTheAttempt) {
  World w = generating();
  w.run();
  w.fail_pod("quick-generation-0-a1", 1);
  w.take("quick-generation-1-a1");
  w.pods.at("quick-generation-2-a1").deleting = true;
  for (int i = 0; i < 3; ++i) {
    w.rendezvous();
    w.reconcile();
    w.place_all();
  }
  for (int64_t rank = 0; rank < 3; ++rank) {
    ASSERT_NE(w.newest("generation", rank), nullptr) << rank;
    EXPECT_TRUE(w.newest("generation", rank)->ready) << rank;
    EXPECT_GT(w.newest("generation", rank)->incarnation, 0) << rank;
  }
  EXPECT_EQ(generation_row(w).restarts, 3);
  EXPECT_EQ(generation_row(w).ready, 3);
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_EQ(w.job.status.restarts + w.job.status.free_restarts, 0);
  EXPECT_TRUE(w.violations.empty());
}

TEST(GenerationPod, WhatItsExitCodeSays) {
  World config = generating();
  config.run();
  config.fail_pod("quick-generation-0-a1", 10);
  config.reconcile();
  EXPECT_EQ(config.job.status.phase, phase::kFailed) << "another pod would have the same configuration";
  World node = generating();
  node.run();
  const std::string at = node.pods.at("quick-generation-0-a1").node;
  node.fail_pod("quick-generation-0-a1", 30);
  node.reconcile();
  ASSERT_EQ(node.job.status.avoided_nodes.size(), 1u);
  EXPECT_EQ(node.job.status.avoided_nodes[0].name, at);
  EXPECT_NE(pod_of(node, "quick-generation-0-a1-i1"), nullptr);
  EXPECT_EQ(node.job.status.attempt, 1);
}

TEST(GenerationPod, AMissingKueueChangesNoAffinity) {
  World w = generating("replicas: 3", "  queueName: q\n  scheduling: {backend: Kueue}\n");
  w.options.discovery["kueue.x-k8s.io/v1beta2"] = {"workloads"};
  w.run();
  w.options.discovery.clear();
  w.fail_pod("quick-generation-0-a1", 30);
  w.reconcile();
  EXPECT_EQ(w.condition("Accepted")->reason, "BackendMissing");
  EXPECT_TRUE(w.job.status.avoided_nodes.empty());
  EXPECT_EQ(w.job.status.attempt, 1);
  w.options.discovery["kueue.x-k8s.io/v1beta2"] = {"workloads"};
  w.reconcile();
  EXPECT_TRUE(w.job.status.avoided_nodes.empty()) << "its pod must look like the others of the group";
  EXPECT_NE(pod_of(w, "quick-generation-0-a1-i1"), nullptr);
}

TEST(GenerationPod, TooFewForTooLongEndTheAttempt) {
  World w = generating();
  w.run();
  w.room = [] { return 0; };
  w.take("quick-generation-0-a1");
  for (int i = 0; i < 10; ++i, w.now_ms += 10'000) {
    w.rendezvous();
    w.reconcile();
  }
  EXPECT_EQ(w.job.status.phase, phase::kRunning) << "two are enough";
  w.take("quick-generation-1-a1");
  w.reconcile();
  w.now_ms += 59'000;
  w.rendezvous();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  w.now_ms += 2'000;
  w.rendezvous();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRestarting);
  EXPECT_EQ(w.job.status.last_failure->reason, kReasonTooFew);
  EXPECT_NE(w.job.status.last_failure->message.find("fewer than 2 pods (minReplicas)"), std::string::npos);
  EXPECT_EQ(w.job.status.restarts, 1);
}

TEST(GenerationPod, OneThatNeverStopsCrashingIsGivenUp) {
  World w = generating("replicas: 3", "  failurePolicy: {maxReplacements: 2}\n");
  w.run();
  for (int i = 0; i < 3; ++i) crash(w, "generation", 1);
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_EQ(w.condition("PodsReady")->reason, "PodGivenUp");
  const int64_t made = w.created_total;
  w.now_ms += 1'000'000;
  w.rendezvous();
  w.reconcile();
  EXPECT_EQ(w.created_total, made);
  EXPECT_EQ(w.job.status.attempt, 1);
}

TEST(GenerationPod, MoreAndFewerWhileTheJobRuns) {
  World w = generating();
  w.run();
  EXPECT_EQ(w.job.status.generation->replicas, 3);
  w.scale(5);
  w.reconcile();
  w.place_all();
  w.rendezvous();
  w.reconcile();
  EXPECT_NE(pod_of(w, "quick-generation-4-a1"), nullptr) << "a new place has a first pod";
  EXPECT_EQ(generation_row(w).ready, 5);
  EXPECT_EQ(generation_row(w).restarts, 0);
  EXPECT_EQ(w.job.status.generation->replicas, 5);
  EXPECT_EQ(w.job.status.generation->selector, generation_row(w).selector);
  w.scale(2);
  w.reconcile();
  EXPECT_TRUE(w.pods.at("quick-generation-4-a1").deleting);
  EXPECT_FALSE(w.pods.at("quick-generation-1-a1").deleting);
  w.finish_deletions();
  w.reconcile();
  EXPECT_EQ(w.alive(), 3);
  EXPECT_EQ(generation_row(w).desired, 2);
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_TRUE(w.violations.empty());
}

TEST(GenerationPod, FewerAreOnlyBelievedOfALiveJob) {
  World w = generating();
  w.run();
  Observed o = w.observe();
  o.job.spec.roles.generation->replicas = 2;  // an old copy
  const Plan p = plan(o, w.options);
  EXPECT_TRUE(p.needs_live);
  EXPECT_TRUE(p.actions.empty());
}

}  // namespace
}  // namespace trireme::controller
