#include "operator/controller/plan.h"

#include <gtest/gtest.h>

#include "operator/controller/failure.h"
#include "tests/unit/controller/world.h"

namespace trireme::controller {
namespace {

using testing::kTwoPods;
using testing::make_job;
using testing::World;

World two_pods(const std::string& more = "") { return World(make_job(std::string(kTwoPods) + more)); }

TEST(Plan, HappyPathWalksThePhases) {
  World w = two_pods();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kQueued);
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_EQ(w.pods.size(), 2u);
  EXPECT_EQ(w.services, std::set<int64_t>{1});
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kQueued) << "no pod has a node yet";
  w.place_all();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kStarting);
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kStarting) << "pods that run are not a job that runs";
  w.rendezvous();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_EQ(w.condition("Running")->status, "True");
  w.reconcile();
  ASSERT_TRUE(w.job.status.progress);
  EXPECT_EQ(w.job.status.progress->step, 1);
  ASSERT_EQ(w.job.status.roles.size(), 1u);
  EXPECT_EQ(w.job.status.roles[0].ready, 2);
  w.succeed_all();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kComplete);
  EXPECT_FALSE(w.job.status.completion_time.empty());
  w.reconcile();
  EXPECT_TRUE(w.services.empty());
  EXPECT_EQ(w.pods.size(), 2u) << "what ended well keeps its logs";
  EXPECT_EQ(w.created_total, 2);
  EXPECT_TRUE(w.violations.empty());
}

TEST(Plan, ReportOfAnotherAttemptIsNotARendezvous) {
  World w = two_pods();
  w.reconcile();
  w.place_all();
  w.reconcile();
  w.rendezvous();
  w.report->attempt = 7;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kStarting);
}

TEST(Plan, FailureRestartsAfterOldPodsAreGone) {
  World w = two_pods();
  w.run();
  w.fail_pod(w.actor(1), 1);
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRestarting);
  EXPECT_EQ(w.job.status.attempt, 2);
  EXPECT_EQ(w.job.status.restarts, 1);
  ASSERT_TRUE(w.job.status.last_failure);
  EXPECT_EQ(w.job.status.last_failure->pod, "quick-actor-1-a1");
  EXPECT_EQ(w.job.status.last_failure->exit_code, 1);
  EXPECT_EQ(w.job.status.last_failure->log_tail, "last words of quick-actor-1-a1");
  EXPECT_TRUE(w.pods.at("quick-actor-0-a1").deleting);
  w.reconcile();
  EXPECT_EQ(w.created_total, 2) << "the old attempt still lives";
  w.finish_deletions();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kQueued);
  EXPECT_EQ(w.created_total, 4);
  EXPECT_EQ(w.services, std::set<int64_t>{2});
  EXPECT_EQ(w.pods.count("quick-actor-1-a1"), 1u) << "the first failed pod is kept";
  EXPECT_TRUE(w.violations.empty());
}

struct FailureCase {
  const char* name;
  int64_t exit_code;
  const char* reason;
  const char* more_spec;
  const char* phase;
  int64_t restarts;
  int64_t free_restarts;
  size_t avoided;
};

class Failures : public ::testing::TestWithParam<FailureCase> {};

TEST_P(Failures, FollowsThePolicy) {
  const FailureCase& c = GetParam();
  World w = two_pods(c.more_spec);
  w.run();
  w.now_ms += 100'000;
  w.fail_pod(w.actor(1), c.exit_code, c.reason);
  w.reconcile();
  w.now_ms += 61'000;  // echoes settle, and nobody else is to blame
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, c.phase);
  EXPECT_EQ(w.job.status.restarts, c.restarts);
  EXPECT_EQ(w.job.status.free_restarts, c.free_restarts);
  EXPECT_EQ(w.job.status.avoided_nodes.size(), c.avoided);
}

INSTANTIATE_TEST_SUITE_P(
    Table, Failures,
    ::testing::Values(
        FailureCase{"plain", 1, "Error", "", phase::kRestarting, 1, 0, 0},
        FailureCase{"config", 10, "Error", "", phase::kFailed, 0, 0, 0},
        FailureCase{"communication", 20, "Error", "", phase::kRestarting, 1, 0, 0},
        FailureCase{"nan", 21, "Error", "", phase::kRestarting, 1, 0, 0},
        FailureCase{"node_fault", 30, "Error", "", phase::kRestarting, 1, 0, 1},
        FailureCase{"checkpointed", 40, "Error", "", phase::kRestarting, 0, 1, 0},
        FailureCase{"oom", 137, "OOMKilled", "", phase::kRestarting, 1, 0, 0},
        FailureCase{"preempted", 143, "Preempted", "", phase::kRestarting, 0, 1, 0},
        FailureCase{"evicted", 137, "Evicted", "", phase::kRestarting, 0, 1, 1},
        FailureCase{"node_lost", 137, "NodeLost", "", phase::kRestarting, 0, 1, 0},
        FailureCase{"rule_code", 7, "Error", "  failurePolicy: {rules: [{onExitCodes: [7], action: FailJob}]}\n",
                    phase::kFailed, 0, 0, 0},
        FailureCase{"rule_signal", 139, "Error", "  failurePolicy: {rules: [{onSignals: [11], action: RestartFree}]}\n",
                    phase::kRestarting, 0, 1, 0},
        FailureCase{"rule_reason", 137, "OOMKilled",
                    "  failurePolicy: {rules: [{onPodReasons: [OOMKilled], action: FailJob}]}\n", phase::kFailed, 0, 0,
                    0},
        FailureCase{"first_match", 7, "Error",
                    "  failurePolicy: {rules: [{onExitCodes: [7], action: AvoidNodeAndRestart}, {action: FailJob}]}\n",
                    phase::kRestarting, 1, 0, 1},
        FailureCase{"no_budget", 1, "Error", "  failurePolicy: {maxRestarts: 0}\n", phase::kFailed, 0, 0, 0},
        FailureCase{"free_without_budget", 143, "Preempted", "  failurePolicy: {maxRestarts: 0}\n", phase::kRestarting,
                    0, 1, 0}),
    [](const auto& info) { return info.param.name; });

TEST(Plan, EchoesWaitForTheirCause) {
  World w = two_pods();
  w.run();
  w.fail_pod(w.actor(0), 20);
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  w.now_ms += 500;
  w.fail_pod(w.actor(1), 30);
  w.reconcile();
  ASSERT_TRUE(w.job.status.last_failure);
  EXPECT_EQ(w.job.status.last_failure->rank, 1);
  EXPECT_EQ(w.job.status.last_failure->exit_code, 30);
}

TEST(Plan, ANodesDeathIsNotBlamedOnItsPeers) {
  // The peer's connection breaks at once; that the node is gone is known much later.
  World w = two_pods();
  w.run();
  w.now_ms += 100'000;
  w.fail_pod(w.actor(0), 20);
  w.reconcile();
  w.now_ms += 15'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning) << "the other actor has not ended";
  w.nodes[w.pods.at(w.actor(1)).node] = NodeState::kNotReady;
  w.reconcile();
  w.now_ms += 11'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRestarting);
  EXPECT_EQ(w.job.status.last_failure->reason, "NodeLost");
  EXPECT_EQ(w.job.status.last_failure->rank, 1);
  EXPECT_EQ(w.job.status.free_restarts, 1);
  EXPECT_EQ(w.job.status.restarts, 0);
}

TEST(Plan, OnlyWhoCanStillSaveGetsTheTimeForIt) {
  for (const auto& [reason, code, grace] :
       {std::tuple{"Error", 1, 30}, {"OOMKilled", 137, 30}, {"Preempted", 143, -1}, {"Error", 40, -1}}) {
    World w = two_pods();
    w.run();
    w.now_ms += 100'000;
    w.fail_pod(w.actor(1), code, reason);
    Observed o = w.observe();
    for (ObservedPod& pod : o.pods) pod.ended_for = Milliseconds(pod.ended() ? 120'000 : 0);
    const Plan decided = plan(o, PlanOptions{});
    ASSERT_TRUE(decided.decision) << reason;
    o.job.status = *decided.decision;
    const Plan next = plan(o, PlanOptions{});
    const auto removal = std::find_if(next.actions.begin(), next.actions.end(),
                                      [&](const Action& a) { return a.name == w.pods.begin()->first; });
    ASSERT_NE(removal, next.actions.end()) << reason;
    EXPECT_EQ(removal->grace_period_s, grace) << reason;
  }
}

TEST(Plan, EchoesAloneSettleQuickly) {
  World w = two_pods();
  w.run();
  w.now_ms += 100'000;
  w.fail_pod(w.actor(0), 20);
  w.fail_pod(w.actor(1), 20);
  w.reconcile();
  w.now_ms += 3'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.attempt, 2);
  EXPECT_EQ(w.job.status.restarts, 1);
}

TEST(Plan, BudgetRunsOutAndBacksOff) {
  World w = two_pods("  failurePolicy: {maxRestarts: 3}\n");
  std::vector<int64_t> waits;
  for (int i = 0; i < 4; ++i) {
    while (w.job.status.phase != phase::kRunning) {
      w.finish_deletions();
      w.reconcile();
      w.place_all();
      w.reconcile();
      w.rendezvous();
      w.reconcile();
      w.now_ms += 1000;
    }
    w.fail_pod(w.actor(0), 1);
    w.reconcile();
    if (w.job.status.phase == phase::kFailed) break;
    waits.push_back(*kube::parse_time(w.job.status.attempt_start_time) - w.now_ms);
  }
  EXPECT_EQ(w.job.status.phase, phase::kFailed);
  EXPECT_EQ(w.condition("Failed")->reason, "RestartBudgetExhausted");
  EXPECT_EQ(w.job.status.restarts, 3);
  EXPECT_EQ(w.job.status.attempt, 4);
  ASSERT_EQ(waits.size(), 3u);
  EXPECT_LE(waits[0], 0);
  EXPECT_GT(waits[1], 8'000);
  EXPECT_GT(waits[2], waits[1] + 5'000);
  w.reconcile();
  w.finish_deletions();
  EXPECT_EQ(w.alive(), 0);
  EXPECT_TRUE(w.violations.empty());
}

TEST(Plan, GoodStepsForgiveRestarts) {
  World w = two_pods("  failurePolicy: {maxRestarts: 1, restartWindowSteps: 10}\n");
  w.run();
  w.reconcile();
  w.fail_pod(w.actor(0), 1);
  w.reconcile();
  EXPECT_EQ(w.job.status.budget_used, 1);
  w.finish_deletions();
  w.run();
  w.report->progress.step = 50;
  w.reconcile();
  w.fail_pod(w.actor(0), 1);
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRestarting);
  EXPECT_EQ(w.job.status.budget_used, 1);
  EXPECT_EQ(w.job.status.restarts, 2);
}

TEST(Plan, DeletedPodRestartsForFree) {
  World w = two_pods();
  w.run();
  w.pods.erase(w.actor(1));
  w.ever[w.actor(1)] = true;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRestarting);
  EXPECT_EQ(w.job.status.free_restarts, 1);
  EXPECT_EQ(w.job.status.last_failure->reason, kReasonDeleted);
}

TEST(Plan, PodTakenAwayBeforeTheGangIsCompleteIsMadeAgain) {
  World w = two_pods();
  w.reconcile();
  w.ever[w.actor(1)] = true;
  w.pods.erase(w.actor(1));
  w.reconcile();
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_EQ(w.pods.size(), 2u);
  EXPECT_TRUE(w.violations.empty());
}

TEST(Plan, LostNodeRestartsForFreeAndItsPodGoesWithTheNode) {
  World w = two_pods("  failurePolicy: {terminationTimeoutSeconds: 30}\n");
  w.run();
  const std::string node = w.pods.at(w.actor(1)).node;
  w.nodes[node] = NodeState::kNotReady;
  const std::string lost = w.actor(1);
  w.reconcile();
  w.now_ms += 290'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning) << "Kubernetes itself evicts after five minutes";
  w.now_ms += 20'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRestarting);
  EXPECT_EQ(w.job.status.free_restarts, 1);
  EXPECT_EQ(w.job.status.last_failure->reason, kReasonNodeLost);
  EXPECT_EQ(w.job.status.last_failure->node, node);
  std::erase_if(w.pods, [&](const auto& e) { return e.second.deleting && e.first != lost; });
  w.reconcile();
  w.now_ms += 86'400'000;
  w.reconcile();
  ASSERT_NE(w.condition("Terminating"), nullptr);
  EXPECT_EQ(w.pods.count(lost), 1u) << "its kubelet is silent, and may run it still";
  EXPECT_EQ(w.condition("Terminating")->status, "True");
  EXPECT_NE(w.condition("Terminating")->message.find(lost + " on node " + node), std::string::npos);
  EXPECT_EQ(w.job.status.waiting, "PodNotGone");
  EXPECT_EQ(w.created_total, 2);
  w.nodes[node] = NodeState::kGone;  // or tainted out-of-service
  w.reconcile();
  EXPECT_EQ(w.pods.count(lost), 0u);
  w.reconcile();
  EXPECT_EQ(w.condition("Terminating")->status, "False");
  EXPECT_EQ(w.job.status.phase, phase::kQueued);
  EXPECT_TRUE(w.violations.empty());
}

TEST(Plan, ANodeThatIsNotClearIsAskedAboutAgain) {
  World w = two_pods();
  w.run();
  Observed o = w.observe();
  o.pods[0].node_state = NodeState::kUnknown;
  o.pods[0].node_unclear = true;
  const Plan p = plan(o, w.options);
  EXPECT_FALSE(p.decision);
  ASSERT_TRUE(p.requeue_after);
  EXPECT_LE(*p.requeue_after, Milliseconds(10000)) << "no news may ever come of it";
}

TEST(Plan, PodStuckOnAGoodNodeIsNeverForced) {
  World w = two_pods("  failurePolicy: {terminationTimeoutSeconds: 30}\n");
  w.run();
  w.fail_pod(w.actor(1), 1);
  w.reconcile();
  w.now_ms += 3'600'000;
  w.reconcile();
  EXPECT_EQ(w.pods.count("quick-actor-0-a1"), 1u);
  EXPECT_EQ(w.created_total, 2);
}

TEST(Plan, GangThatCannotBePlacedIsReleased) {
  World w = two_pods("  scheduling: {schedulingTimeoutSeconds: 60}\n");
  w.reconcile();
  ObservedPod& placed = w.pods.at(w.actor(0));
  placed.node = "node-0";
  placed.scheduled = true;
  w.pods.at(w.actor(1)).message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.";
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kQueued);
  w.now_ms += 61'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kPending);
  EXPECT_EQ(w.job.status.attempt, 2);
  EXPECT_EQ(w.job.status.restarts, 0);
  EXPECT_EQ(w.condition("GangScheduled")->reason, "SchedulingTimeout");
  EXPECT_NE(w.condition("GangScheduled")->message.find("Insufficient"), std::string::npos);
  w.finish_deletions();
  w.reconcile();
  EXPECT_EQ(w.alive(), 0) << "everything was given back";
  EXPECT_EQ(w.created_total, 2) << "not at once again";
  w.now_ms += 91'000;
  w.reconcile();
  EXPECT_EQ(w.created_total, 4);
  EXPECT_TRUE(w.violations.empty());
}

TEST(Plan, WaitingInAQueueHasNoTimeLimit) {
  World w = two_pods("  scheduling: {schedulingTimeoutSeconds: 60, backend: Kueue}\n  queueName: team\n");
  w.options.discovery["kueue.x-k8s.io/v1beta2"] = {"workloads"};
  w.reconcile();
  for (auto& [name, pod] : w.pods) pod.gated = true;
  w.reconcile();
  w.now_ms += 86'400'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kQueued);
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_EQ(w.condition("Admitted")->status, "False");
  for (auto& [name, pod] : w.pods) pod.gated = false;
  w.place_all();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kStarting);
  EXPECT_EQ(w.condition("Admitted")->status, "True");
}

TEST(Plan, HangRestartsAndNamesTheRank) {
  World w = two_pods("  health: {heartbeatTimeoutSeconds: 100, phaseTimeoutSeconds: {generation: 1000}}\n");
  w.run();
  w.now_ms += 99'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  w.report->progress.phase = "generation";
  w.now_ms += 500'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning) << "this phase may take longer";
  w.report->stuck_rank = 1;
  w.now_ms += 500'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRestarting);
  EXPECT_EQ(w.job.status.last_failure->reason, kReasonHung);
  EXPECT_EQ(w.job.status.last_failure->rank, 1);
  EXPECT_NE(w.job.status.last_failure->message.find("; rank 1 is late"), std::string::npos);
}

TEST(Plan, ALateRankOfASplitModelIsNamedWithItsPlace) {
  World w(
      make_job("  algorithm: GRPO\n"
               "  model: {source: /models/tiny}\n"
               "  config: {path: configs/quickstart.yaml}\n"
               "  health: {heartbeatTimeoutSeconds: 100}\n"
               "  roles: {actor: {replicas: 2, processesPerPod: 4, parallelism: {tp: 2, pp: 2}}}\n"));
  w.run();
  w.report->stuck_rank = 7;
  w.now_ms += 200'000;
  w.reconcile();
  ASSERT_TRUE(w.job.status.last_failure.has_value());
  EXPECT_EQ(w.job.status.last_failure->rank, 7);
  EXPECT_NE(w.job.status.last_failure->message.find("; rank 7 (tp 1, pp 1, dp 1) is late"), std::string::npos)
      << w.job.status.last_failure->message;
}

TEST(Plan, HangMayOnlyTell) {
  World w = two_pods("  health: {heartbeatTimeoutSeconds: 100, action: Event}\n");
  w.run();
  w.now_ms += 101'000;
  for (int i = 0; i < 5; ++i, w.now_ms += 1000) w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_EQ(w.condition("Progressing")->status, "False");
  EXPECT_EQ(std::count_if(w.events.begin(), w.events.end(), [](const EventNote& e) { return e.reason == kReasonHung; }),
            1);
  w.rendezvous();
  w.reconcile();
  EXPECT_EQ(w.condition("Progressing")->status, "True");
}

TEST(Plan, StartupHasADeadline) {
  World w = two_pods("  health: {startupDeadlineSeconds: 100}\n");
  w.reconcile();
  w.place_all();
  w.pods.at(w.actor(1)).ready = false;
  w.pods.at(w.actor(1)).message = "ImagePullBackOff: no such image";
  w.reconcile();
  w.now_ms += 101'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRestarting);
  EXPECT_EQ(w.job.status.last_failure->reason, kReasonStartup);
  EXPECT_NE(w.job.status.last_failure->message.find("ImagePullBackOff"), std::string::npos);
  EXPECT_EQ(w.job.status.last_failure->log_tail, "");
}

TEST(Plan, SuspendAndResume) {
  World w = two_pods();
  w.run();
  w.job.spec.suspend = true;
  ++w.job.metadata.generation;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kSuspended);
  EXPECT_EQ(w.condition("Suspended")->status, "True");
  EXPECT_TRUE(w.pods.at("quick-actor-0-a1").deleting);
  w.job.spec.suspend = false;
  ++w.job.metadata.generation;
  w.reconcile();
  EXPECT_EQ(w.job.status.attempt, 2);
  EXPECT_EQ(w.created_total, 2) << "the suspended pods still live";
  w.finish_deletions();
  w.run();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_EQ(w.job.status.restarts, 0);
  EXPECT_EQ(w.condition("Suspended")->status, "False");
  EXPECT_TRUE(w.violations.empty());
}

TEST(Plan, BornSuspendedMakesNothing) {
  World w = two_pods("  suspend: true\n");
  for (int i = 0; i < 3; ++i) w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kSuspended);
  EXPECT_EQ(w.created_total, 0);
  EXPECT_TRUE(w.services.empty());
}

TEST(Plan, SomebodyElsesJobIsLeftAlone) {
  World w = two_pods("  managedBy: kueue.x-k8s.io/multikueue\n");
  w.reconcile();
  EXPECT_TRUE(w.job.status.phase.empty());
  EXPECT_EQ(w.created_total, 0);
}

TEST(Plan, DeletedJobIsLeftToTheGarbageCollector) {
  World w = two_pods();
  w.run();
  w.job.metadata.deletion_timestamp = "2026-01-01T00:00:00Z";
  w.pods.erase(w.actor(1));
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_EQ(w.created_total, 2);
}

TEST(Plan, TtlDeletesTheJob) {
  World w = two_pods("  ttlSecondsAfterFinished: 60\n");
  w.run();
  w.succeed_all();
  w.reconcile();
  Plan p = plan(w.observe(), w.options);
  ASSERT_TRUE(p.requeue_after);
  EXPECT_LE(p.requeue_after->count(), 60'000);
  w.now_ms += 61'000;
  p = plan(w.observe(), w.options);
  const bool deletes = std::any_of(p.actions.begin(), p.actions.end(), [&](const Action& a) {
    return a.resource.plural == "rljobs" && a.uid == w.job.metadata.uid;
  });
  EXPECT_TRUE(deletes);
}

TEST(Plan, DeadlineFailsTheJob) {
  World w = two_pods("  activeDeadlineSeconds: 100\n");
  w.run();
  w.now_ms += 101'000;
  w.rendezvous();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kFailed);
  EXPECT_EQ(w.condition("Failed")->reason, "DeadlineExceeded");
}

TEST(Plan, ClockSetBackHarmsNothing) {
  World w = two_pods("  activeDeadlineSeconds: 100\n");
  w.run();
  w.fail_pod(w.actor(0), 1);
  w.reconcile();
  w.finish_deletions();
  w.now_ms -= 86'400'000;
  w.run();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_EQ(w.job.status.attempt, 2);
}

TEST(Plan, InvalidJobIsRefusedUntilItChanges) {
  World w(make_job(
      "  model: {source: /m}\n  config: {path: c.yaml}\n  roles: {actor: {replicas: 2, parallelism: {pp: 3}}}\n"));
  for (int i = 0; i < 3; ++i) w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kPending);
  EXPECT_EQ(w.job.status.attempt, 0);
  EXPECT_EQ(w.condition("Accepted")->status, "False");
  EXPECT_EQ(w.events.size(), 1u);
  EXPECT_EQ(w.created_total, 0);
  w.job.spec.roles.actor->parallelism.pp = 1;
  ++w.job.metadata.generation;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kQueued);
  EXPECT_EQ(w.condition("Accepted")->status, "True");
  EXPECT_EQ(w.created_total, 2);
}

TEST(Plan, WhatAnOlderOperatorRefusedIsAskedAgain) {
  World w = two_pods();
  w.job.status.phase = phase::kPending;
  w.job.status.observed_generation = w.job.metadata.generation;
  set_condition(w.job.status, "Accepted", "False", "Invalid", "spec.roles.critic: is not supported yet", w.now_ms);
  Observed copy = w.observe();
  copy.as_stored = false;
  const Plan p = plan(copy, w.options);
  EXPECT_FALSE(p.decision) << "what of it could not be read is not known";
  EXPECT_EQ(p.status.waiting, "Invalid");
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kQueued);
  EXPECT_EQ(w.condition("Accepted")->status, "True");
  EXPECT_EQ(w.created_total, 2);
}

TEST(Plan, RunningJobEditedIntoNonsenseRunsOn) {
  World w = two_pods();
  w.run();
  w.job.spec.roles.actor.reset();
  ++w.job.metadata.generation;
  for (int i = 0; i < 3; ++i) w.reconcile();
  EXPECT_EQ(w.alive(), 2);
  EXPECT_EQ(w.condition("Accepted")->reason, "Invalid");
}

TEST(Plan, AJobTooLargeThatWasAcceptedOnceGetsNoAttempt) {
  World w = two_pods();
  w.run();
  const int64_t created = w.created_total;
  w.job.spec.roles.actor->pod_template = {{"metadata", {{"annotations", {{"a", std::string(300000, 'x')}}}}}};
  for (int i = 0; i < 3; ++i) w.reconcile();
  EXPECT_EQ(w.condition("Accepted")->status, "True") << "what runs goes on";
  for (const char* phase : {phase::kPending, phase::kQueued, phase::kRestarting}) {
    w.pods.clear();
    w.job.status.phase = phase;
    for (int i = 0; i < 3; ++i) w.reconcile();
    EXPECT_EQ(w.created_total, created) << phase;
    EXPECT_EQ(w.condition("Accepted")->reason, "Invalid") << phase;
    EXPECT_NE(w.condition("Accepted")->message.find("bytes long as JSON; at most 262144 are allowed"),
              std::string::npos);
    set_condition(w.job.status, "Accepted", "True", "Accepted", "", w.now_ms);
  }
}

TEST(Plan, MissingBackendIsSaidAndWaitedFor) {
  World w = two_pods("  scheduling: {backend: Volcano}\n");
  w.reconcile();
  EXPECT_EQ(w.condition("Accepted")->reason, "BackendMissing");
  EXPECT_EQ(w.created_total, 0);
  w.options.discovery["scheduling.volcano.sh/v1beta1"] = {"podgroups"};
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kQueued);
}

TEST(Plan, ABackendThatIsMissingLaterIsWaitedForToo) {
  const scheduling::Discovery volcano = {{"scheduling.volcano.sh/v1beta1", {"podgroups"}}};
  World w = two_pods("  scheduling: {backend: Volcano}\n");
  w.options.discovery = volcano;
  w.run();
  w.options.discovery.clear();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning) << "what runs needs none";
  EXPECT_EQ(w.condition("Accepted")->status, "True");
  w.fail_pod(w.actor(1), 1);
  w.reconcile();
  w.finish_deletions();
  for (int i = 0; i < 3; ++i) {
    w.now_ms += 60'000;
    w.reconcile();
    EXPECT_EQ(w.created_total, 2) << "pods of a gang without the gang";
    EXPECT_EQ(w.job.status.phase, phase::kRestarting);
    EXPECT_EQ(w.job.status.waiting, "BackendMissing");
    EXPECT_EQ(w.condition("Accepted")->reason, "BackendMissing");
    EXPECT_EQ(w.services.count(1), 1u) << "the gang that it stands for could not be removed";
  }
  const std::string said = to_json(w.job).dump();
  w.now_ms += 60'000;
  w.reconcile();
  EXPECT_EQ(to_json(w.job).dump(), said) << "it is said once";
  w.options.discovery = volcano;
  w.reconcile();
  w.reconcile();
  EXPECT_EQ(w.condition("Accepted")->status, "True");
  EXPECT_EQ(w.job.status.phase, phase::kQueued);
  EXPECT_EQ(w.created_total, 4);
  EXPECT_EQ(w.services.count(1), 0u);
  EXPECT_TRUE(w.violations.empty());
}

TEST(Plan, AGangThatLostItsBackendIsNotFilledUp) {
  World w = two_pods("  scheduling: {backend: Volcano}\n");
  w.options.discovery["scheduling.volcano.sh/v1beta1"] = {"podgroups"};
  w.reconcile();
  ASSERT_EQ(w.created_total, 2);
  w.take(w.actor(1));
  w.options.discovery.clear();
  w.reconcile();
  EXPECT_EQ(w.created_total, 2);
  EXPECT_EQ(w.job.status.phase, phase::kQueued);
  EXPECT_EQ(w.job.status.waiting, "BackendMissing");
}

TEST(Plan, RejectedPodsFailOrWait) {
  World w = two_pods("  scheduling: {schedulingTimeoutSeconds: 60}\n");
  w.job.status.phase = phase::kQueued;
  w.job.status.attempt = 1;
  w.job.status.observed_generation = 1;
  Observed o = w.observe(w.job, w.pods, true);
  o.rejection = "exceeded quota";
  Plan p = plan(o, w.options);
  EXPECT_FALSE(p.decision);
  EXPECT_FALSE(p.actions.empty()) << "quota may come back";
  o.unplaced_for = Milliseconds(61'000);
  p = plan(o, w.options);
  ASSERT_TRUE(p.decision);
  EXPECT_EQ(p.decision->phase, phase::kPending);
  o.rejection_final = true;
  p = plan(o, w.options);
  ASSERT_TRUE(p.decision);
  EXPECT_EQ(p.decision->phase, phase::kFailed);
}

TEST(Plan, ClaimOfOneWriterForSeveralPodsIsAWarning) {
  World w = two_pods();
  w.job.spec.roles.actor->pod_template =
      Json::parse(R"({"spec":{"containers":[{"name":"trainer"}],)"
                  R"("volumes":[{"name":"w","persistentVolumeClaim":{"claimName":"out"}}]}})");
  w.reconcile();
  Observed o = w.observe();
  o.claim_modes["out"] = {"ReadWriteOnce"};
  Plan p = plan(o, w.options);
  EXPECT_EQ(find_condition(p.status, "Accepted")->reason, "ClaimNotShared");
  ASSERT_EQ(p.events.size(), 1u);
  EXPECT_NE(p.events[0].message.find("but 2 pods (actor) mount it"), std::string::npos) << p.events[0].message;
  o.claim_modes["out"] = {"ReadWriteMany"};
  p = plan(o, w.options);
  EXPECT_EQ(find_condition(p.status, "Accepted")->reason, "Accepted");
  // One pod of each of two roles.
  o.claim_modes["out"] = {"ReadWriteOnce"};
  o.job.spec.algorithm = Algorithm::kPpo;
  o.job.spec.roles.actor->replicas = 1;
  o.job.spec.roles.critic = o.job.spec.roles.actor;
  p = plan(o, w.options);
  ASSERT_EQ(find_condition(p.status, "Accepted")->reason, "ClaimNotShared");
  EXPECT_NE(find_condition(p.status, "Accepted")->message.find("2 pods (actor, critic)"), std::string::npos);
}

TEST(Plan, StatusTakenBackIsRepaired) {
  World w = two_pods();
  w.run();
  w.job.status = {};
  w.reconcile();
  EXPECT_EQ(w.job.status.attempt, 1);
  w.reconcile();
  EXPECT_EQ(w.created_total, 2);
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_TRUE(w.violations.empty());
}

TEST(Plan, OldCopiesDecideNothing) {
  World w = two_pods();
  w.run();
  w.remember();
  const RLJob before = w.job;
  w.pods.erase(w.actor(1));
  // The cache says that a pod of attempt 1 is missing; so does the server: a restart. But when only the cache says so,
  // none.
  std::map<std::string, ObservedPod> partial = w.pods;
  w.pods[w.actor(1)] = w.old_pods.back().at(w.actor(1));
  const Plan p = plan(w.observe(before, partial, false), w.options);
  EXPECT_TRUE(p.needs_live);
  EXPECT_FALSE(p.decision);
  const Plan live = plan(w.observe(w.job, w.pods, true), w.options);
  EXPECT_FALSE(live.decision);
}

TEST(Plan, ServiceIsNotMadeAgainFromAnOldCopyOfTheJob) {
  World w = two_pods();
  w.run();
  w.services.clear();
  const Plan p = plan(w.observe(), w.options);
  EXPECT_TRUE(p.needs_live);
  EXPECT_TRUE(p.actions.empty());
}

TEST(Plan, ServiceDeletedByHandComesBack) {
  World w = two_pods();
  w.run();
  w.services.clear();
  w.reconcile();
  EXPECT_EQ(w.services, std::set<int64_t>{1});
}

TEST(Plan, OtherActorsMayEndALittleLater) {
  World w = two_pods();
  w.run();
  w.pods.at(w.actor(0)).phase = PodPhase::kSucceeded;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  w.now_ms += 61'000;
  w.rendezvous();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kComplete);
  w.finish_deletions();
  EXPECT_EQ(w.alive(), 0);
}

TEST(Failure, ARankThatDeletionEndedBeforeItsLoopHasNotFailed) {
  ObservedPod pod;
  pod.phase = PodPhase::kFailed;
  pod.exit_code = 143;
  EXPECT_EQ(pod_failure(pod, Milliseconds(0), Milliseconds(0))->reason, "Error");
  pod.deleting = true;
  EXPECT_EQ(pod_failure(pod, Milliseconds(0), Milliseconds(0))->reason, kReasonDeleted);
  pod.exit_code = 10;
  EXPECT_EQ(pod_failure(pod, Milliseconds(0), Milliseconds(0))->reason, "Error");
}

TEST(Failure, SignalFromExitCode) {
  ObservedPod pod;
  pod.exit_code = 137;
  EXPECT_EQ(signal_of(pod), 9);
  pod.exit_code = 255;
  EXPECT_FALSE(signal_of(pod));
  pod.signal = 11;
  EXPECT_EQ(signal_of(pod), 11);
}

}  // namespace
}  // namespace trireme::controller
