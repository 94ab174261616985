// Pods of a critic: ranks of the job as the actor's, so that losing one ends the attempt.
#include <gtest/gtest.h>

#include "operator/controller/failure.h"
#include "operator/controller/objects.h"
#include "tests/unit/controller/world.h"

namespace trireme::controller {
namespace {

using testing::make_job;
using testing::pod_of;
using testing::World;

// One actor pod and two of the critic.
World valued(const std::string& more = "") {
  return World(
      make_job("  algorithm: PPO\n  model: {source: /m}\n  config: {path: c.yaml}\n"
               "  roles: {actor: {}, critic: {replicas: 2, processesPerPod: 2}}\n" +
               more));
}
std::string critic(const World& w, int64_t rank) {
  return pod_name(w.job.metadata.name, "critic", rank, w.job.status.attempt);
}

TEST(CriticPod, IsOfTheGangsCore) {
  World w = valued();
  w.reconcile();
  EXPECT_EQ(w.pods.size(), 3u);
  for (const auto kind : {scheduling::BackendKind::kVolcano, scheduling::BackendKind::kKueue}) {
    const AttemptContext context{w.job, 1, {kind, "v1beta2"}, w.options.objects};
    EXPECT_EQ(gang_of(context).pods, 3);
  }
  w.place_all();
  w.pods.at(critic(w, 1)).scheduled = false;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kQueued);
  EXPECT_EQ(w.condition("GangScheduled")->message, "2 of 3 pods have a node");
  w.place_all();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kStarting);
  w.rendezvous();
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning);
  ASSERT_EQ(w.job.status.roles.size(), 2u);
  EXPECT_EQ(w.job.status.roles[1].name, "critic");
  EXPECT_EQ(w.job.status.roles[1].desired, 2);
  EXPECT_EQ(w.job.status.roles[1].world_size, 4);
}

TEST(CriticPod, ThatIsLostEndsTheAttemptAsAnActors) {
  const auto after = [](const std::function<void(World&)>& happens) {
    World w = valued();
    w.run();
    happens(w);
    w.reconcile();
    EXPECT_EQ(w.job.status.phase, phase::kRestarting);
    EXPECT_EQ(w.job.status.last_failure->role, "critic");
    EXPECT_EQ(w.job.status.last_failure->rank, 1);
    EXPECT_EQ(w.job.status.attempt, 2);
    w.reconcile();
    w.finish_deletions();
    w.now_ms += 60'000;
    w.reconcile();
    EXPECT_EQ(w.alive(), 3);
    for (int64_t rank : {0, 1}) EXPECT_NE(pod_of(w, critic(w, rank)), nullptr);
    EXPECT_TRUE(w.violations.empty());
    return w.job.status;
  };
  RLJobStatus status = after([](World& w) { w.fail_pod(critic(w, 1), 137); });
  EXPECT_EQ(status.restarts, 1);
  EXPECT_EQ(status.last_failure->signal, 9);
  status = after([](World& w) { w.take(critic(w, 1)); });
  EXPECT_EQ(status.restarts, 0) << "it was deleted";
  EXPECT_EQ(status.free_restarts, 1);
  status = after([](World& w) { w.fail_pod(critic(w, 1), 30); });
  EXPECT_EQ(status.avoided_nodes.size(), 1u);
  World config = valued();
  config.run();
  config.fail_pod(critic(config, 0), 10);
  config.reconcile();
  EXPECT_EQ(config.job.status.phase, phase::kFailed);
}

TEST(CriticPod, WhatTheActorLostIsNotBlamedOnTheActor) {
  World w = valued();
  w.run();
  w.now_ms += 100'000;
  w.fail_pod(w.actor(0), 20);
  w.reconcile();
  w.now_ms += 15'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning) << "the critic's pods have not ended";
  w.nodes[w.pods.at(critic(w, 1)).node] = NodeState::kNotReady;
  w.reconcile();
  w.now_ms += 11'000;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRestarting);
  EXPECT_EQ(w.job.status.last_failure->reason, kReasonNodeLost);
  EXPECT_EQ(w.job.status.last_failure->role, "critic");
  EXPECT_EQ(w.job.status.restarts, 0);
}

TEST(CriticPod, TheJobEndsWhenBothHave) {
  World w = valued();
  w.run();
  w.pods.at(w.actor(0)).phase = PodPhase::kSucceeded;
  w.pods.at(critic(w, 0)).phase = PodPhase::kSucceeded;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kRunning) << "a critic's rank writes its last checkpoint";
  w.pods.at(critic(w, 1)).phase = PodPhase::kSucceeded;
  w.reconcile();
  EXPECT_EQ(w.job.status.phase, phase::kComplete);
  EXPECT_EQ(w.job.status.roles[1].succeeded, 2);
}

}  // namespace
}  // namespace trireme::controller
