// The planner among neighbours: quotas, silent nodes, lost reports, images that are not there.
#include <gtest/gtest.h>

#include <thread>

#include "operator/controller/failure.h"
#include "operator/controller/objects.h"
#include "operator/controller/reports.h"
#include "tests/unit/controller/world.h"

namespace trireme::controller {
namespace {

using testing::count_events;
using testing::expect_asked_seldom;
using testing::kTwoPods;
using testing::make_job;
using testing::pod_of;
using testing::reconcile_and_hear;
using testing::World;

World two_pods(const std::string& more = "") { return World(make_job(std::string(kTwoPods) + more)); }
// ---- quotas

TEST(Quota, AGangThatIsHalfThereIsReleased) {
  World w = two_pods("  scheduling: {schedulingTimeoutSeconds: 20}\n");
  w.room = [&] { return 1 - w.alive(); };
  reconcile_and_hear(w);
  EXPECT_EQ(w.pods.size(), 1u);
  w.place_all();  // one pod is there, and it has a node: all that exist are placed
  w.now_ms += 1000;
  reconcile_and_hear(w);
  EXPECT_EQ(w.job.status.waiting, "QuotaExceeded");
  EXPECT_EQ(w.condition("GangScheduled")->reason, "QuotaExceeded");
  EXPECT_NE(w.condition("GangScheduled")->message.find("1 of 2 pods could be made"), std::string::npos);
  w.now_ms += 21'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kPending);
  EXPECT_EQ(w.condition("GangScheduled")->reason, "SchedulingTimeout");
  w.finish_deletions();
  w.reconcile();
  EXPECT_EQ(w.alive(), 0) << "the place is free for others";
  EXPECT_EQ(w.job.status.restarts + w.job.status.free_restarts, 0);
}

TEST(Quota, TwoJobsThatFitOneAfterTheOtherBothEnd) {
  const std::string four =
      "  model: {source: /m}\n  config: {path: c.yaml}\n  roles: {actor: {replicas: 4}}\n"
      "  scheduling: {schedulingTimeoutSeconds: 20}\n";
  World a(make_job(four, "a")), b(make_job(four, "b"));
  a.room = b.room = [&] { return 6 - a.alive() - b.alive(); };
  // Side by side: each gets three of its four.
  for (World* w : {&a, &b}) {
    w->room = [&] { return 3 - w->alive(); };
    w->reconcile();
    w->room = a.room;
  }
  a.room = b.room = [&] { return 6 - a.alive() - b.alive(); };
  for (int i = 0; i < 600 && !(is_terminal(a.job.status.phase) && is_terminal(b.job.status.phase)); ++i) {
    for (World* w : {&a, &b}) {
      w->now_ms += 1000;
      w->finish_deletions();
      w->place_all();
      if (w->job.status.phase == phase::kRunning) w->succeed_all();
      if (w->job.status.phase == phase::kStarting) w->rendezvous();
      w->reconcile();
    }
  }
  for (const World* w : {&a, &b}) {
    EXPECT_EQ(w->job.status.phase, phase::kComplete) << w->job.metadata.name;
    EXPECT_EQ(w->job.status.restarts + w->job.status.free_restarts, 0);
    EXPECT_TRUE(w->violations.empty());
  }
}

TEST(Quota, ARankThatGaveUpWaitingForTheOthersIsNoRestart) {
  World w = two_pods();
  w.room = [&] { return 1 - w.alive(); };
  w.reconcile();
  w.place_all();
  w.fail_pod(w.actor(0), 20);
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kPending);
  EXPECT_EQ(w.job.status.restarts + w.job.status.free_restarts, 0);
  EXPECT_NE(w.condition("GangScheduled")->message.find("before every pod had a node"), std::string::npos);
}

TEST(Quota, IsAskedAgainSeldom) {
  World w = two_pods();
  w.room = [&] { return 1 - w.alive(); };
  w.reconcile();
  Plan p = plan(w.observe(), w.options);
  expect_asked_seldom(p);
  w.now_ms += 6000;
  p = plan(w.observe(w.job, w.pods, true), w.options);
  EXPECT_FALSE(p.actions.empty());
}

TEST(Quota, PodsInAQueueThatCannotAllBeMadeAreReleased) {
  World w = two_pods("  scheduling: {schedulingTimeoutSeconds: 60, backend: Kueue}\n  queueName: team\n");
  w.options.discovery["kueue.x-k8s.io/v1beta2"] = {"workloads"};
  w.room = [&] { return 1 - w.alive(); };
  w.reconcile();
  for (auto& [name, pod] : w.pods) pod.gated = true;  // Kueue admits whole groups only
  w.reconcile();
  w.now_ms += 61'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kPending);
}

// ---- reports

TEST(Reports, WhereNoneAreTakenReadinessDecides) {
  World w = two_pods("  health: {heartbeatTimeoutSeconds: 20, startupDeadlineSeconds: 20}\n");
  w.options.objects.status_url.clear();
  w.reconcile();
  w.place_all();
  w.reconcile();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  for (int hour = 0; hour < 48; ++hour, w.now_ms += 3'600'000) w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_EQ(w.condition("Progressing")->status, "Unknown");
  EXPECT_EQ(w.condition("Progressing")->reason, "ReportsOff");
  w.succeed_all();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kComplete);
}

TEST(Reports, ThatNeverComeDoNotEndAHealthyRun) {
  World w = two_pods("  health: {heartbeatTimeoutSeconds: 20, startupDeadlineSeconds: 20}\n");
  w.reconcile();
  w.place_all();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kStarting);
  w.now_ms += 21'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_EQ(w.condition("Progressing")->reason, "NoReports");
  EXPECT_NE(w.condition("Progressing")->message.find("http://status:8090"), std::string::npos);
  EXPECT_EQ(count_events(w, "NoReports"), 1);
  for (int i = 0; i < 48; ++i, w.now_ms += 3'600'000) w.reconcile();
  EXPECT_EQ(w.job.status.attempt, 1);
  // Once they come, silence means something again.
  w.rendezvous();
  w.reconcile();
  EXPECT_EQ(w.condition("Running")->reason, "RendezvousDone");
  EXPECT_EQ(w.condition("Progressing")->status, "True");
  w.now_ms += 21'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.last_failure->reason, kReasonHung);
}

TEST(Reports, PodsThatAreNotReadyStillHaveADeadline) {
  World w = two_pods("  health: {startupDeadlineSeconds: 20}\n");
  w.options.objects.status_url.clear();
  w.reconcile();
  w.place_all();
  w.pods.at(w.actor(1)).ready = false;
  w.reconcile();
  w.now_ms += 21'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.last_failure->reason, kReasonStartup);
}

TEST(Reports, SilenceOfAllJobsIsTheOperatorsOwn) {
  World w = two_pods("  health: {heartbeatTimeoutSeconds: 100}\n");
  w.run();
  w.now_ms += 3'600'000;
  Observed o = w.observe();
  o.reports_out = true;
  Plan p = plan(o, w.options);
  EXPECT_FALSE(p.decision);
  EXPECT_EQ(find_condition(p.status, "Progressing")->reason, "ReportsLost");
  o.reports_out = false;
  o.reports_back_for = Milliseconds(99'000);
  EXPECT_FALSE(plan(o, w.options).decision) << "the limit begins anew";
  o.reports_back_for = Milliseconds(101'000);
  p = plan(o, w.options);
  ASSERT_TRUE(p.decision);
  EXPECT_EQ(p.decision->last_failure->reason, kReasonHung);
  EXPECT_EQ(p.decision->last_failure->log_tail, "") << "the operator's words are no log";
  EXPECT_NE(p.decision->last_failure->message.find("no heartbeat for 3600 s"), std::string::npos);
}

// The path is cut under two runs with limits of 20 s; the other one's last report came 8 s later.
TEST(Reports, NobodyHangsUntilAnotherIsHeard) {
  World w = two_pods("  health: {heartbeatTimeoutSeconds: 20}\n");
  w.run();
  w.now_ms += 21'000;
  Observed o = w.observe();
  o.reports_quiet_for = Milliseconds(13'000);
  const Plan p = plan(o, w.options);
  EXPECT_FALSE(p.decision) << "it may be the path";
  ASSERT_TRUE(p.requeue_after);
  EXPECT_LE(*p.requeue_after, Milliseconds(2000)) << "and that shows soon";
  o.reports_quiet_for = Milliseconds(5'000);
  EXPECT_TRUE(plan(o, w.options).decision) << "the other one was heard when this one's report was overdue";
  o.reports_quiet_for = Milliseconds(0);
  EXPECT_TRUE(plan(o, w.options).decision) << "there is no other";
}

// All jobs hang at once, or the only other one has ended: nobody will be heard again.
TEST(Reports, TheDoubtAboutASilenceOfAllEnds) {
  World w = two_pods("  health: {heartbeatTimeoutSeconds: 20, phaseTimeoutSeconds: {checkpoint: 2}}\n");
  w.run();
  const auto decides = [&](bool out, int silent_s, int served_s, int back_s = 1'000'000) {
    World later = w;
    later.now_ms += silent_s * 1000;
    Observed o = later.observe();
    o.reports_out = out;
    o.reports_quiet_for = Milliseconds(silent_s * 1000 - 1000);
    o.reports_served_for = Milliseconds(served_s * 1000);
    o.reports_back_for = Milliseconds(back_s * 1000);
    const Plan p = plan(o, w.options);
    EXPECT_TRUE(p.decision || p.requeue_after) << "it is looked at again";
    return p.decision ? p.decision->last_failure->message : std::string();
  };
  for (const bool out : {false, true}) {
    EXPECT_EQ(decides(out, 79, 1000), "") << "not before four limits";
    EXPECT_EQ(decides(out, 1000, 79), "") << "during all of which reports would have been taken";
    EXPECT_EQ(decides(out, 1000, 0), "") << "nothing answers at our own address";
    EXPECT_EQ(decides(out, 1000, 1000, 79), "") << "limits begin anew after an outage";
    const std::string why = decides(out, 81, 90);
    EXPECT_NE(why.find("no heartbeat for 81 s"), std::string::npos) << why;
    EXPECT_NE(why.find("no other job is heard either, but this operator has been ready to take reports for 90 s"),
              std::string::npos)
        << why;
  }
  w.report->progress.phase = "checkpoint";
  EXPECT_EQ(decides(true, 59, 1000), "") << "trainers speak every 10 s, however short the limit is";
  EXPECT_NE(decides(true, 61, 1000), "");
}

TEST(Reports, TheDoubtSaysWhenItEnds) {
  World w = two_pods("  health: {heartbeatTimeoutSeconds: 100}\n");
  w.run();
  w.now_ms += 390'000;
  Observed o = w.observe();
  o.reports_out = true;
  const Plan p = plan(o, w.options);
  EXPECT_NE(find_condition(p.status, "Progressing")->message.find("silence of 400 s"), std::string::npos);
}

// Trainers verify the status server with the CA that their attempt was made with, for as long as it lives.
TEST(Reports, SilenceUnderAnotherCaIsNoHang) {
  World w = two_pods("  health: {heartbeatTimeoutSeconds: 20}\n");
  std::string ca = "OLD";
  w.options.objects.status_ca = [&] { return ca; };
  w.run();
  ca = "NEW";
  w.now_ms += 15'000;
  w.reconcile();
  EXPECT_EQ(w.condition("Progressing")->reason, "Reporting") << "a connection of before may still stand";
  w.now_ms += 6000;
  reconcile_and_hear(w);
  EXPECT_EQ(w.condition("Progressing")->status, "Unknown");
  EXPECT_EQ(w.condition("Progressing")->reason, "CaChanged");
  EXPECT_NE(w.condition("Progressing")->message.find("suspend and resume"), std::string::npos);
  for (int hour = 0; hour < 48; ++hour, w.now_ms += 3'600'000) reconcile_and_hear(w);
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_EQ(w.job.status.restarts, 0);
  EXPECT_EQ(count_events(w, "CaChanged"), 1);
  Observed o = w.observe();
  o.reports_out = true;
  EXPECT_EQ(find_condition(plan(o, w.options).status, "Progressing")->reason, "CaChanged")
      << "it does not end by itself";
  w.rendezvous();
  w.reconcile();
  EXPECT_EQ(w.condition("Progressing")->reason, "Reporting");
  ca = "OLD";  // the Secret was put back
  w.now_ms += 21'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.last_failure->reason, kReasonHung);
}

TEST(Reports, ANewLeaderWithAnotherCaRestartsNobody) {
  World w = two_pods("  health: {heartbeatTimeoutSeconds: 20}\n");
  std::string ca = "OLD";
  w.options.objects.status_ca = [&] { return ca; };
  w.run();
  ca = "NEW";
  w.report.reset();
  w.ages = Ages();
  w.reconcile();
  w.now_ms += 3'600'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_EQ(w.condition("Progressing")->reason, "CaChanged");
}

TEST(Reports, AStartUnderAnotherCaSaysSo) {
  World w = two_pods("  health: {startupDeadlineSeconds: 20}\n");
  std::string ca = "OLD";
  w.options.objects.status_ca = [&] { return ca; };
  w.reconcile();
  w.place_all();
  w.reconcile();
  ca = "NEW";
  w.now_ms += 21'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_EQ(w.condition("Progressing")->reason, "CaChanged");
  EXPECT_EQ(count_events(w, "CaChanged"), 1);
}

TEST(Health, ActionEventCoversTheStart) {
  World w = two_pods("  health: {startupDeadlineSeconds: 100, action: Event}\n");
  w.reconcile();
  w.place_all();
  w.pods.at(w.actor(1)).ready = false;
  w.reconcile();
  w.now_ms += 101'000;
  for (int i = 0; i < 5; ++i, w.now_ms += 1000) w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kStarting);
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_EQ(w.condition("Progressing")->reason, kReasonStartup);
  EXPECT_EQ(count_events(w, kReasonStartup), 1);
  w.rendezvous();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
}

// ---- nodes

TEST(Nodes, GraceIsAField) {
  World w = two_pods("  health: {nodeNotReadyGraceSeconds: 20}\n");
  w.run();
  w.nodes[w.pods.at(w.actor(1)).node] = NodeState::kNotReady;
  w.reconcile();
  w.now_ms += 65'000;  // no heartbeat any more
  w.reconcile();
  EXPECT_EQ(w.job.status.last_failure->reason, kReasonNodeLost);
}

TEST(Nodes, AFreshHeartbeatHoldsTheLossBack) {
  World w = two_pods("  health: {nodeNotReadyGraceSeconds: 20}\n");
  w.run();
  w.nodes[w.pods.at(w.actor(1)).node] = NodeState::kNotReady;
  for (int i = 0; i < 60; ++i, w.now_ms += 10'000) {
    w.rendezvous();
    w.reconcile();
  }
  EXPECT_EQ(w.job.status.phase, phase::kRunning) << "a kubelet is silent, the ranks are not";
  w.now_ms += 61'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.last_failure->reason, kReasonNodeLost);
}

TEST(Nodes, ManyAtOnceAreTheClustersTrouble) {
  World w = two_pods("  health: {nodeNotReadyGraceSeconds: 20, heartbeatTimeoutSeconds: 1000000}\n");
  w.run();
  w.nodes[w.pods.at(w.actor(1)).node] = NodeState::kNotReady;
  w.reconcile();
  w.now_ms += 600'000;
  Observed o = w.observe();
  o.nodes_in_doubt = true;
  EXPECT_FALSE(plan(o, w.options).decision);
  o.nodes_in_doubt = false;
  EXPECT_TRUE(plan(o, w.options).decision);
}

TEST(Nodes, OneThatRefusesItsPodIsAvoided) {
  for (const auto& [reason, deleting, avoided] :
       {std::tuple{"Evicted", false, true}, {"AdmissionRejected", false, true}, {"Evicted", true, false}}) {
    World w = two_pods();
    w.run();
    w.now_ms += 100'000;
    const std::string node = w.pods.at(w.actor(1)).node;
    w.fail_pod(w.actor(1), 137, reason);
    w.pods.at(w.actor(1)).deleting = deleting;  // evicted over the API: a drain, and the node is cordoned
    w.reconcile();
    EXPECT_EQ(w.job.status.free_restarts, 1);
    ASSERT_EQ(w.job.status.avoided_nodes.size(), avoided ? 1u : 0u) << reason;
    if (!avoided) continue;
    EXPECT_EQ(w.job.status.avoided_nodes[0].name, node);
    EXPECT_LE(*kube::parse_time(w.job.status.avoided_nodes[0].until) - w.now_ms, 3'600'000);
  }
}

// ---- images and configuration

TEST(Start, AnImageThatIsNotThereFailsTheJobWithinMinutes) {
  World w = two_pods();
  w.reconcile();
  for (auto& [name, pod] : w.pods) {
    pod.scheduled = true;
    pod.node = "node-1";
    pod.waiting = "ErrImagePull";
    pod.message = "ErrImagePull: no such image: registry/typo:1";
  }
  reconcile_and_hear(w);
  reconcile_and_hear(w);
  EXPECT_EQ(w.job.status.phase, phase::kStarting);
  EXPECT_EQ(w.job.status.waiting, "ErrImagePull");
  EXPECT_EQ(w.condition("PodsReady")->reason, "ErrImagePull");
  EXPECT_NE(w.condition("PodsReady")->message.find("quick-actor-0-a1: ErrImagePull: no such image"), std::string::npos);
  w.now_ms += 60'000;
  reconcile_and_hear(w);
  EXPECT_EQ(count_events(w, "ErrImagePull"), 1);
  EXPECT_EQ(w.job.status.phase, phase::kStarting) << "a registry may be away for a moment";
  w.now_ms += 61'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kFailed);
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_EQ(w.job.status.last_failure->reason, "ErrImagePull");
  EXPECT_NE(w.job.status.last_failure->message.find("no such image: registry/typo:1"), std::string::npos);
  EXPECT_EQ(w.job.status.last_failure->log_tail, "");
}

TEST(Start, ReasonsFollowRulesAndHistory) {
  const auto outcome = [](const std::string& waiting, const std::string& more, bool trained, int64_t wait_ms) {
    World w = two_pods(more);
    if (trained) {
      w.run();
      w.reconcile();
      w.fail_pod(w.actor(0), 1);
      w.reconcile();
      w.finish_deletions();
      w.reconcile();
    } else {
      w.reconcile();
    }
    w.place_all();
    for (auto& [name, pod] : w.pods) {
      if (!pod.alive()) continue;
      pod.ready = false;
      pod.phase = PodPhase::kPending;
      pod.waiting = waiting;
      pod.message = waiting + ": why";
    }
    w.reconcile();
    w.now_ms += wait_ms;
    w.reconcile();
    return w.job.status;
  };
  EXPECT_EQ(outcome("InvalidImageName", "", false, 0).phase, phase::kFailed) << "nobody mends a name";
  EXPECT_EQ(outcome("CreateContainerConfigError", "", false, 100'000).phase, phase::kStarting);
  EXPECT_EQ(outcome("CreateContainerConfigError", "", false, 121'000).phase, phase::kFailed);
  EXPECT_EQ(outcome("ErrImagePull", "  failurePolicy: {rules: [{onPodReasons: [ErrImagePull], action: Restart}]}\n",
                    false, 121'000)
                .restarts,
            1);
  const RLJobStatus trained = outcome("ErrImagePull", "", true, 121'000);
  EXPECT_EQ(trained.phase, phase::kRestarting) << "the image could be had before";
  EXPECT_EQ(trained.free_restarts, 1);
}

// ---- back-off, bounds, deadlines

TEST(FreeRestarts, WaitLongerEachTimeAndAreBounded) {
  World w = two_pods("  failurePolicy: {maxFreeRestarts: 4}\n");
  std::vector<int64_t> waits;
  while (waits.size() < 10) {
    for (int i = 0; i < 1000 && w.job.status.phase != phase::kStarting; ++i) {
      w.finish_deletions();
      w.reconcile();
      w.place_all();
      w.reconcile();
      w.now_ms += 1000;
    }
    w.fail_pod(w.actor(0), 143, "Preempted");
    w.reconcile();
    if (w.job.status.phase == phase::kFailed) break;
    waits.push_back(*kube::parse_time(w.job.status.attempt_start_time) - w.now_ms);
  }
  EXPECT_EQ(w.job.status.phase, phase::kFailed);
  EXPECT_EQ(w.condition("Failed")->reason, "FreeRestartsExhausted");
  EXPECT_EQ(w.job.status.last_failure->reason, "Preempted");
  ASSERT_EQ(waits.size(), 4u);
  for (size_t i = 1; i < waits.size(); ++i) EXPECT_GT(waits[i], waits[i - 1]);
}

TEST(FreeRestarts, AJobThatGetsOnMayBePreemptedForEver) {
  World w = two_pods("  failurePolicy: {maxFreeRestarts: 2}\n");
  for (int i = 0; i < 10; ++i) {
    w.now_ms += 400'000;
    w.finish_deletions();
    w.run();  // each attempt reports a step more
    ASSERT_EQ(w.job.status.phase, phase::kRunning) << i;
    w.reconcile();
    w.fail_pod(w.actor(0), 143, "Preempted");
    w.reconcile();
    ASSERT_EQ(w.job.status.phase, phase::kRestarting) << i;
    EXPECT_EQ(w.job.status.free_streak, 1);
  }
}

TEST(Deadline, CountsFromAdmission) {
  World w = two_pods("  activeDeadlineSeconds: 100\n  scheduling: {schedulingTimeoutSeconds: 0}\n");
  w.reconcile();
  w.now_ms += 86'400'000;  // in a queue
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kQueued);
  w.run();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  EXPECT_FALSE(w.job.status.admitted_time.empty());
  w.now_ms += 99'000;
  w.rendezvous();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  w.now_ms += 2'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kFailed);
  EXPECT_EQ(w.job.status.last_failure->reason, "DeadlineExceeded");
}

// ---- sidecars

TEST(Sidecar, DoesNotKeepADoneJobFromEnding) {
  World w = two_pods();
  w.run();
  for (auto& [name, pod] : w.pods) pod.main_exit = 0;  // the pods go on
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kComplete);
  w.reconcile();
  w.finish_deletions();
  EXPECT_EQ(w.alive(), 0);
}

TEST(Sidecar, DoesNotHideAFailure) {
  World w = two_pods();
  w.run();
  ObservedPod& pod = w.pods.at(w.actor(1));
  pod.main_exit = pod.exit_code = 1;
  pod.reason = "Error";
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRestarting);
  EXPECT_EQ(w.job.status.last_failure->exit_code, 1);
}

// ---- the status

TEST(Status, OfAnEndedJobDoesNotWait) {
  World done = two_pods();
  done.run();
  done.succeed_all();
  done.reconcile();
  World failed = two_pods("  activeDeadlineSeconds: 10\n");
  failed.run();
  failed.now_ms += 11'000;
  failed.reconcile();
  for (World* w : {&done, &failed}) {
    w->reconcile();
    for (const Condition& c : w->job.status.conditions) {
      EXPECT_NE(c.reason, "Waiting") << c.type;
      EXPECT_EQ(c.message.find("pods are ready"), std::string::npos) << c.type;
    }
    EXPECT_EQ(w->condition("PodsReady")->status, "False");
    EXPECT_EQ(w->job.status.waiting, "");
  }
  EXPECT_EQ(failed.job.status.last_failure->reason, "DeadlineExceeded");
}

TEST(Status, RendezvousIsOfThePresentAttempt) {
  World w = two_pods();
  w.run();
  EXPECT_EQ(w.job.status.rendezvous->master, "quick-actor-0.quick-a1");
  w.fail_pod(w.actor(1), 1);
  w.reconcile();
  EXPECT_EQ(w.job.status.rendezvous->master, "quick-actor-0.quick-a2");
  w.finish_deletions();
  w.run();
  w.job.status.attempt = 1;  // somebody took the status back
  w.reconcile();
  EXPECT_EQ(w.job.status.attempt, 2);
  EXPECT_EQ(w.job.status.rendezvous->topology_config_map, "quick-topology-a2");
}

TEST(Status, CountsThePodsThatAreWanted) {
  World w = two_pods("  scheduling: {schedulingTimeoutSeconds: 0}\n");
  w.room = [&] { return 1 - w.alive(); };
  w.reconcile();
  w.place_all();
  w.reconcile();
  EXPECT_EQ(w.condition("PodsReady")->status, "False");
  EXPECT_NE(w.condition("PodsReady")->message.find("1 of 2"), std::string::npos);
  EXPECT_EQ(w.condition("GangScheduled")->status, "False");
}

// ---- Kueue

World queued_job() {
  World w = two_pods("  scheduling: {backend: Kueue}\n  queueName: team\n");
  w.options.discovery["kueue.x-k8s.io/v1beta2"] = {"workloads"};
  return w;
}
// Deletions of Workloads once the decision that is due has been written.
std::vector<std::string> given_up(const World& w, const std::map<int64_t, ObservedService>& services) {
  World copy = w;
  Observed o = copy.observe();
  o.services = services;
  if (const Plan p = plan(o, w.options); p.decision) o.job.status = *p.decision;
  std::vector<std::string> names;
  for (const Action& action : plan(o, w.options).actions) {
    if (action.resource.plural == "workloads") names.push_back(action.name);
  }
  return names;
}
using Names = std::vector<std::string>;

TEST(Kueue, ARestartKeepsTheGroupAndItsQuota) {
  World w = queued_job();
  w.run();
  w.fail_pod(w.actor(1), 1);
  EXPECT_EQ(given_up(w, {{1, ObservedService{}}}), Names{});
  w.reconcile();
  EXPECT_EQ(w.job.status.reservation, "quick-a1");
  for (auto& [name, pod] : w.pods) {
    if (pod.alive()) w.fail_pod(name, 143);
  }
  w.reconcile();
  ASSERT_EQ(w.job.status.phase, phase::kQueued);
  const scheduling::Backend backend{scheduling::BackendKind::kKueue, "v1beta2"};
  const AttemptContext context{w.job, 2, backend, w.options.objects};
  const Json made = pod(context, "actor", 0);
  EXPECT_EQ(made["metadata"]["name"], "quick-actor-0-a2");
  EXPECT_EQ(made["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"], "quick-a1");
  EXPECT_FALSE(made["metadata"]["annotations"].contains("kueue.x-k8s.io/retriable-in-group"));
  EXPECT_EQ(headless_service(context)["metadata"]["labels"][kLabelGang], "quick-a1");
  w.run();
  ASSERT_EQ(w.job.status.phase, phase::kRunning);
  w.succeed_all();
  EXPECT_EQ(given_up(w, {{2, ObservedService{"", "quick-a1"}}}), Names{"quick-a1"}) << "at the end it goes";
}

TEST(Kueue, TakesASecondPodOnlyWhenTheFirstHasEnded) {
  World w(
      make_job("  model: {source: /m}\n  config: {path: c.yaml}\n  queueName: team\n"
               "  roles: {actor: {}, generation: {replicas: 2}}\n  scheduling: {backend: Kueue}\n"));
  w.options.discovery["kueue.x-k8s.io/v1beta2"] = {"workloads"};
  w.run();
  w.pods.at("quick-generation-0-a1").deleting = true;
  w.rendezvous();
  w.reconcile();
  EXPECT_EQ(w.pods.size(), 3u);
  w.fail_pod("quick-generation-0-a1", 143);  // its finalizer keeps it
  w.rendezvous();
  w.reconcile();
  EXPECT_NE(pod_of(w, "quick-generation-0-a1-i1"), nullptr);
  EXPECT_EQ(w.job.status.attempt, 1);
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
}

TEST(Kueue, WhatItWouldNotTakeBackGivesTheQuotaUp) {
  World evicted = queued_job();  // Kueue itself took the pods away
  evicted.run();
  evicted.pods.at(evicted.actor(1)).deleting = true;
  EXPECT_EQ(given_up(evicted, {{1, ObservedService{}}}), Names{"quick-a1"});
  evicted.reconcile();
  EXPECT_EQ(evicted.job.status.reservation, "");

  World avoids = queued_job();  // another affinity is another kind of pod to it
  avoids.run();
  avoids.fail_pod(avoids.actor(1), 30);
  EXPECT_EQ(given_up(avoids, {{1, ObservedService{}}}), Names{"quick-a1"});

  World mixed = queued_job();  // one that ended well is counted for good
  mixed.run();
  mixed.fail_pod(mixed.actor(0), 1);
  mixed.reconcile();
  EXPECT_EQ(mixed.job.status.reservation, "quick-a1");
  mixed.pods.at("quick-actor-1-a1").phase = PodPhase::kSucceeded;
  EXPECT_EQ(given_up(mixed, {{1, ObservedService{}}}), Names{"quick-a1"});
  mixed.reconcile();
  EXPECT_EQ(mixed.job.status.reservation, "");
  EXPECT_EQ(mixed.job.status.attempt, 2);
}

}  // namespace
}  // namespace trireme::controller
