// Thousands of random lives of a job: faults in random order, generation pods that are told to be more and fewer, an
// operator that dies between writes and starts from old copies. Every life must end in the same state, with no two
// attempts alive at once and nothing created twice.
#include <gtest/gtest.h>

#include "tests/unit/controller/world.h"

namespace trireme::controller {
namespace {

using testing::make_job;
using testing::World;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kLives = 150;
#else
constexpr int kLives = 2000;
#endif

class Life final {
 public:
  // Of every second life the critic has a pod of its own.
  explicit Life(uint64_t seed)
      : random_(seed),
        world_(make_job("  algorithm: PPO\n  model: {source: /m}\n  config: {path: c.yaml}\n  roles: {" +
                        std::string(seed % 2 == 0 ? "critic: {}, " : "") +
                        "actor: {replicas: 2}, reward: {replicas: 1, port: 8000, template: {spec: "
                        "{containers: [{name: reward, image: r}]}}}, generation: {replicas: 2}}\n"
                        "  failurePolicy: {maxRestarts: 1000, maxFreeRestarts: 1000, terminationTimeoutSeconds: 30}\n"
                        "  scheduling: {schedulingTimeoutSeconds: 120}\n"
                        "  health: {heartbeatTimeoutSeconds: 300, startupDeadlineSeconds: 600, "
                        "nodeNotReadyGraceSeconds: 20, generationTimeoutSeconds: 60}\n")) {
    world_.options.release_backoff = Milliseconds(10'000);
    world_.options.objects.network_policies = true;
    world_.room = [this] { return (neighbour_ ? 2 : 1000) - world_.alive(); };
  }

  void run() {
    for (int i = 0; i < 80; ++i) {
      world_.remember();
      world_.now_ms += static_cast<int64_t>(random_() % 8000);
      trouble();
      neighbour();
      kubelets();
      reconcile();
    }
    // The storm is over: everybody does their work.
    world_.job.spec.suspend = false;
    world_.nodes.clear();
    for (int i = 0; i < 400 && !over(); ++i) {
      world_.now_ms += 5000;
      neighbour();
      world_.finish_deletions();
      world_.place_all();
      if (world_.job.status.phase == phase::kRunning) world_.succeed_all();
      world_.rendezvous();
      world_.reconcile();
    }
  }

  void check() const {
    const RLJobStatus& status = world_.job.status;
    EXPECT_EQ(status.phase, phase::kComplete);
    EXPECT_EQ(world_.alive(), 0);
    EXPECT_TRUE(world_.services.empty());
    EXPECT_FALSE(world_.policy);
    for (const std::string& name : seen_)
      EXPECT_EQ(name.find("-critic-"), std::string::npos) << name << " was made again alone";
    ASSERT_NE(world_.condition("Complete"), nullptr);
    EXPECT_EQ(world_.condition("Complete")->status, "True");
    EXPECT_EQ(world_.condition("Running")->status, "False");
    for (const std::string& violation : world_.violations) ADD_FAILURE() << violation;
    int64_t kept_failures = 0;
    for (const auto& [name, pod] : world_.pods)
      kept_failures += pod.phase == PodPhase::kFailed && pod.attempt < status.attempt;
    EXPECT_LE(kept_failures, 1);
  }
  const World& world() const { return world_; }
  int64_t made_again() const { return made_again_; }

 private:
  bool chance(int percent) { return static_cast<int>(random_() % 100) < percent; }
  bool over() {
    return is_terminal(world_.job.status.phase) && world_.services.empty() && !world_.policy && world_.alive() == 0;
  }

  ObservedPod* any_pod() {
    if (world_.pods.empty()) return nullptr;
    auto it = world_.pods.begin();
    std::advance(it, random_() % world_.pods.size());
    return &it->second;
  }

  // Another job that shares the quota holds what ours lacks, and waits for what ours has: it only ends once ours has
  // let everything go.
  void neighbour() {
    if (neighbour_ && world_.alive() == 0) neighbour_ = false;
  }

  void trouble() {
    if (chance(4)) neighbour_ = true;
    if (chance(12)) {
      static const int64_t kCodes[] = {1, 20, 21, 30, 40, 134, 137, 139};
      ObservedPod* pod = any_pod();
      if (pod && pod->phase == PodPhase::kRunning) world_.fail_pod(pod->name, kCodes[random_() % 8]);
    }
    if (chance(6)) {
      ObservedPod* pod = any_pod();
      if (pod && pod->alive()) {
        world_.ever[pod->name] = true;
        if (chance(50)) {
          pod->deleting = true;
          pod->reason = "Preempted";
        } else {
          world_.pods.erase(pod->name);
        }
      }
    }
    if (chance(3))
      world_.nodes["node-" + std::to_string(random_() % 3)] = chance(30) ? NodeState::kGone : NodeState::kNotReady;
    if (chance(20)) world_.nodes.clear();
    if (chance(3)) {
      world_.job.spec.suspend = !world_.job.spec.suspend;
      ++world_.job.metadata.generation;
      world_.job.metadata.resource_version = std::to_string(++world_.version);
    }
    if (chance(5)) world_.scale(1 + static_cast<int64_t>(random_() % 4));
    if (chance(2)) world_.services.clear();
    // Somebody widens the policy, or takes it away.
    if (chance(2) && world_.policy) world_.policy->spec = 1;
    if (chance(2)) world_.policy.reset();
    if (chance(2)) world_.now_ms += 700'000;  // nothing moves for long: hangs, time limits
  }

  void kubelets() {
    if (chance(60)) world_.finish_deletions();
    for (auto& [name, pod] : world_.pods) {
      if (!pod.alive() || pod.deleting) continue;
      if (!pod.scheduled && chance(40)) {
        pod.scheduled = true;
        pod.node = "node-" + std::to_string(random_() % 3);
      }
      if (pod.scheduled && chance(60)) {
        pod.phase = PodPhase::kRunning;
        pod.ready = true;
      }
    }
    if (world_.job.status.phase == phase::kStarting && chance(40)) world_.rendezvous();
    if (world_.job.status.phase == phase::kRunning && chance(80)) world_.rendezvous();
  }

  void reconcile() {
    if (!chance(80)) return;
    const size_t job_lag = chance(30) ? random_() % 6 : 0;
    const size_t pod_lag = chance(30) ? random_() % 6 : 0;
    const bool mortal = chance(30);
    world_.reconcile([&] { return mortal && chance(25); }, job_lag, pod_lag);
    for (const auto& [name, pod] : world_.pods) {
      if (pod.incarnation > 0 && seen_.insert(name).second) ++made_again_;
    }
  }

  std::mt19937_64 random_;
  World world_;
  bool neighbour_ = false;
  std::set<std::string> seen_;
  int64_t made_again_ = 0;
};

TEST(PlanModel, EveryLifeEndsWell) {
  int64_t attempts = 0, restarts = 0, made_again = 0;
  for (int seed = 1; seed <= kLives; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Life life(static_cast<uint64_t>(seed));
    life.run();
    life.check();
    attempts += life.world().job.status.attempt;
    restarts += life.world().job.status.restarts + life.world().job.status.free_restarts;
    made_again += life.made_again();
    if (::testing::Test::HasFailure()) return;
  }
  // The storm was one.
  EXPECT_GT(attempts, 3 * kLives);
  EXPECT_GT(restarts, kLives);
  EXPECT_GT(made_again, kLives);
}

}  // namespace
}  // namespace trireme::controller
