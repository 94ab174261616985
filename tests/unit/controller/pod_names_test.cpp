#include "operator/controller/pod_names.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "api/runtime.h"
#include "tests/unit/controller/cluster.h"

namespace trireme::controller {
namespace {

using Names = std::optional<std::vector<std::string>>;

RLJob job_of(int64_t replicas, int64_t attempt, int64_t generation = 1, const std::string& uid = "uid") {
  std::vector<Issue> issues;
  RLJob job = rljob_from_json(testing::job_object("j"), issues, {.strict = false});
  job.metadata.uid = uid;
  job.metadata.generation = generation;
  job.spec.roles.actor->replicas = replicas;
  job.status.attempt = attempt;
  return job;
}

ObservedPod pod_of(const RLJob& job, int64_t rank, int64_t attempt) {
  ObservedPod pod;
  pod.name = pod_name(job.metadata.name, "actor", rank, attempt);
  pod.role = "actor";
  pod.rank = rank;
  pod.attempt = attempt;
  return pod;
}

TEST(PodNames, OnlyAListTellsWhatThereWasBeforeUs) {
  PodNames names;
  EXPECT_EQ(names.ask(job_of(2, 1), {}), std::nullopt);
  names.saw(job_of(2, 1), {});
  EXPECT_EQ(names.ask(job_of(2, 1), {}), (Names{{"j-actor-0-a1", "j-actor-1-a1"}}));
}

TEST(PodNames, AFirstAttemptOfOursHasNoPredecessors) {
  PodNames names;
  names.begin(job_of(2, 1));
  EXPECT_EQ(names.ask(job_of(2, 1), {}), (Names{{"j-actor-0-a1", "j-actor-1-a1"}}));
  EXPECT_EQ(names.ask(job_of(2, 1), {"j-other", "j-actor-0-a1"}), (Names{{"j-actor-0-a1", "j-actor-1-a1", "j-other"}}));
}

TEST(PodNames, EveryRoleIsAskedFor) {
  RLJob job = job_of(1, 1);
  job.spec.roles.reward = *job.spec.roles.actor;
  PodNames names;
  names.begin(job);
  EXPECT_EQ(names.ask(job, {}), (Names{{"j-actor-0-a1", "j-reward-0-a1"}}));
}

TEST(PodNames, AttemptsAreAskedForUntilALookShowsNoneOfTheirPods) {
  PodNames names;
  names.begin(job_of(1, 1));
  const Names all = {{"j-actor-0-a1", "j-actor-0-a2", "j-actor-0-a3"}};
  EXPECT_EQ(names.ask(job_of(1, 3), {}), all) << "nobody looked while it was suspended";
  names.saw(job_of(1, 3), {pod_of(job_of(1, 3), 0, 1)});
  EXPECT_EQ(names.ask(job_of(1, 3), {}), all);
  names.saw(job_of(1, 3), {});
  EXPECT_EQ(names.ask(job_of(1, 3), {}), (Names{{"j-actor-0-a2", "j-actor-0-a3"}})) << "the last one always";
}

TEST(PodNames, WhatMayHaveHadOtherNamesIsListed) {
  const auto known = [] {
    PodNames names;
    names.saw(job_of(2, 3), {});
    return names;
  };
  EXPECT_TRUE(known().ask(job_of(2, 3), {}));
  EXPECT_EQ(known().ask(job_of(2, 3, 2), {}), std::nullopt) << "another specification";
  EXPECT_EQ(known().ask(job_of(2, 3, 1, "other"), {}), std::nullopt) << "another job of that name";
  EXPECT_EQ(known().ask(job_of(2, 2), {}), std::nullopt) << "the status was taken back";
  PodNames names = known();
  names.begin(job_of(2, 1));
  EXPECT_EQ(names.ask(job_of(2, 1), {}), std::nullopt) << "to nothing";
  const RLJob job = job_of(2, 3);
  ObservedPod renamed = pod_of(job, 0, 3);
  renamed.name = "copy";
  for (const ObservedPod& pod : {pod_of(job, 0, 4), pod_of(job, 2, 3), renamed}) {
    names = known();
    names.saw(job, {pod});
    EXPECT_EQ(names.ask(job, {}), std::nullopt) << pod.name;
  }
}

TEST(PodNames, APodThatIsMadeAgainHasANameThatOnlyAListTells) {
  RLJob job = job_of(1, 1);
  PodNames names;
  names.begin(job);
  ASSERT_TRUE(names.ask(job, {}));
  job.status.roles = {RoleStatus{.name = "reward", .restarts = 1}};
  EXPECT_EQ(names.ask(job, {}), std::nullopt);
  names.wrote(job.status);
  job.status.roles[0].restarts = 0;
  for (int64_t attempt = 2; attempt <= 3; ++attempt) {
    job.status.attempt = attempt;
    EXPECT_EQ(names.ask(job, {}), std::nullopt) << "attempt 1 is asked for still";
    names.saw(job, {});
  }
  EXPECT_EQ(names.ask(job, {}), (Names{{"j-actor-0-a2", "j-actor-0-a3"}}));
  // A process that begins later knows less.
  job.spec.roles.reward = *job.spec.roles.actor;
  PodNames late;
  late.saw(job, {});
  EXPECT_EQ(late.ask(job, {}), std::nullopt);
  job.status.attempt = 4;
  late.saw(job, {});
  EXPECT_TRUE(late.ask(job, {}));
}

TEST(PodNames, LargeGangsAreListed) {
  const auto asks = [](int64_t replicas, int64_t attempt, size_t cached = 0) {
    PodNames names;
    names.begin(job_of(replicas, 1));
    std::vector<std::string> more;
    for (size_t i = 0; i < cached; ++i) more.push_back("copy-" + std::to_string(i));
    return names.ask(job_of(replicas, attempt), more).has_value();
  };
  EXPECT_TRUE(asks(32, 3));
  EXPECT_FALSE(asks(33, 3));
  EXPECT_TRUE(asks(PodNames::kMost, 1));
  EXPECT_FALSE(asks(PodNames::kMost, 1, 1));
  EXPECT_FALSE(asks(PodNames::kMost + 1, 1));
  EXPECT_FALSE(asks(int64_t{1} << 62, 1));
  EXPECT_FALSE(asks(-1, 1));
  EXPECT_FALSE(asks(1, int64_t{1} << 62));
}

// Lives of a job with attempts that nobody looked at, other sizes, statuses taken back, creates that take effect late,
// pods that are made again and operators that start anew. Whatever the cache knows, a look by name sees what a list
// would.
TEST(PodNames, ALookByNameSeesWhatAListWould) {
  int by_name = 0, by_list = 0, found = 0;
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto chance = [&](uint32_t percent) { return random() % 100 < percent; };
    PodNames names;
    RLJob job = job_of(1 + random() % 4, 1);
    job.spec.roles.reward = *job.spec.roles.actor;
    job.spec.roles.reward->replicas = 1;
    job.status.roles = {RoleStatus{.name = "reward"}};
    names.begin(job);
    std::map<std::string, ObservedPod> pods;
    std::optional<ObservedPod> late;  // a create whose answer was lost
    for (int step = 0; step < 30; ++step) {
      const uint32_t what = random() % 100;
      if (what < 20) {
        ++job.status.attempt;
        job.status.roles[0].restarts = 0;
        names.wrote(job.status);
      } else if (what < 25) {
        job.spec.roles.actor->replicas = 1 + random() % 4;
        ++job.metadata.generation;
        late.reset();
      } else if (what < 28) {
        job.status.attempt = 1 + random() % job.status.attempt;
        job.status.roles[0].restarts = 0;
        late.reset();
      } else if (what < 31) {
        names = PodNames();
      } else if (what < 55 && !pods.empty()) {
        pods.erase(std::next(pods.begin(), random() % pods.size()));
      } else if (late && late->attempt + 1 >= job.status.attempt) {
        pods[late->name] = *late;
        late.reset();
      }
      std::vector<std::string> cached;
      for (const auto& [name, pod] : pods) {
        if (chance(30)) cached.push_back(name);
      }
      if (chance(30)) cached.push_back("j-actor-0-a1");  // gone, but the cache has not heard of it
      if (!chance(60)) continue;
      const Names asked = names.ask(job, cached);
      const std::set<std::string> get =
          asked ? std::set<std::string>(asked->begin(), asked->end()) : std::set<std::string>();
      std::vector<ObservedPod> seen;
      for (const auto& [name, pod] : pods) {
        if (!asked || get.count(name) > 0) seen.push_back(pod);
      }
      ASSERT_EQ(seen.size(), pods.size()) << "attempt " << job.status.attempt << ", step " << step;
      ++(asked ? by_name : by_list);
      if (asked) found += static_cast<int>(seen.size());
      names.saw(job, seen);
      for (const WantedPod& wanted : wanted_pods(job, job.status.attempt)) {
        if (chance(50)) continue;
        ObservedPod pod = pod_of(job, wanted.rank, job.status.attempt);
        pod.role = wanted.role;
        pod.name = wanted.name;
        if (wanted.role == "reward" && chance(4)) {
          pod.incarnation = ++job.status.roles[0].restarts;
          names.wrote(job.status);
          pod.name = pod_name(job.metadata.name, pod.role, pod.rank, pod.attempt, pod.incarnation);
        }
        if (chance(20)) {
          late = pod;
        } else {
          pods[pod.name] = pod;
        }
      }
    }
  }
  EXPECT_GT(by_name, 8000);
  EXPECT_GT(by_list, 1000);
  EXPECT_GT(found, 8000);
}

}  // namespace
}  // namespace trireme::controller
