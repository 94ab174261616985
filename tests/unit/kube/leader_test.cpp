#include "operator/kube/leader_election.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/error.h"
#include "operator/kube/metrics.h"
#include "tests/unit/kube/fake_apiserver.h"

namespace trireme::kube {
namespace {

using testing::eventually;
using testing::FakeApiServer;
using testing::Json;

const ObjectKey kLease{"trireme-system", "trireme-operator"};

LeaderOptions options_for(const std::string& identity) {
  LeaderOptions options;
  options.identity = identity;
  options.lease_duration = Milliseconds(2000);  // the API counts whole seconds
  options.renew_deadline = Milliseconds(1200);
  options.retry_period = Milliseconds(100);
  return options;
}

// Long enough that a slow machine never expires it by itself.
LeaderOptions patient(const std::string& identity) {
  LeaderOptions options = options_for(identity);
  options.lease_duration = Milliseconds(600000);
  options.renew_deadline = Milliseconds(300000);
  return options;
}

TEST(LeaseTerm, IsOverForAllOnceItWasForOne) {
  const auto at = [](int s) { return SteadyClock::time_point{} + std::chrono::seconds(s); };
  LeaseTerm term;
  EXPECT_FALSE(term.holds(at(0)));
  EXPECT_FALSE(term.extend(at(10))) << "none has begun";
  term.begin(at(10));
  EXPECT_TRUE(term.holds(at(9)));
  EXPECT_TRUE(term.extend(at(20))) << "answered late, but nobody has asked";
  EXPECT_TRUE(term.holds(at(10)));
  EXPECT_FALSE(term.holds(at(20)));
  EXPECT_FALSE(term.extend(at(30))) << "a worker has put its job down";
  EXPECT_FALSE(term.holds(at(19)));
  term.begin(at(40));
  EXPECT_TRUE(term.holds(at(39)));
}

TEST(LeaderElector, AcquiresRenewsAndReleases) {
  FakeApiServer server;
  Client client(server.config());
  Metrics metrics;
  LeaderOptions options = patient("a");
  options.metrics = &metrics;
  std::atomic<bool> started{false};
  LeaderElector elector(client, options, {[&] { started = true; }, nullptr, nullptr});
  elector.start();
  ASSERT_TRUE(eventually([&] { return elector.is_leader() && started; }));
  EXPECT_EQ(elector.leader(), "a");
  EXPECT_NE(metrics.text().find("leader_election_master_status{name=\"trireme-operator\"} 1"), std::string::npos);
  const int64_t before = server.resource_version();
  ASSERT_TRUE(eventually([&] { return server.resource_version() > before + 2; }));  // renewals
  const Json lease = *server.get(resources::kLeases, kLease);
  EXPECT_EQ(lease["spec"]["holderIdentity"], "a");
  EXPECT_EQ(lease["spec"]["leaseDurationSeconds"], 600);
  EXPECT_TRUE(parse_time(lease["spec"]["renewTime"].get<std::string>()));
  elector.stop();
  EXPECT_FALSE(elector.is_leader());
  EXPECT_EQ((*server.get(resources::kLeases, kLease))["spec"]["holderIdentity"], "");
  EXPECT_NE(metrics.text().find("leader_election_master_status{name=\"trireme-operator\"} 0"), std::string::npos);
}

TEST(LeaderElector, OneOfThreeAndAReleaseHandsOverLongBeforeExpiry) {
  FakeApiServer server;
  Client client(server.config());
  std::vector<std::unique_ptr<LeaderElector>> electors;
  for (int i = 0; i < 3; ++i)
    electors.push_back(std::make_unique<LeaderElector>(client, patient("e" + std::to_string(i)), LeaderCallbacks{}));
  for (auto& elector : electors) elector->start();
  for (int left = 3; left > 0; --left) {
    const auto leaders = [&] {
      int n = 0;
      for (auto& elector : electors) n += elector->is_leader();
      return n;
    };
    ASSERT_TRUE(eventually([&] { return leaders() == 1; }));
    std::this_thread::sleep_for(Milliseconds(100));
    ASSERT_EQ(leaders(), 1);
    const auto leader = std::find_if(electors.begin(), electors.end(), [](auto& e) { return e->is_leader(); });
    (*leader)->stop();
    electors.erase(leader);
  }
}

TEST(LeaderElector, TakesAnExpiredLeaseNotALivingOne) {
  FakeApiServer server;
  // A dead holder whose clock was an hour ahead: only our own clock counts.
  server.put(resources::kLeases, {{"metadata", {{"namespace", kLease.ns}, {"name", kLease.name}}},
                                  {"spec",
                                   {{"holderIdentity", "dead"},
                                    {"leaseDurationSeconds", 1},
                                    {"renewTime", format_micro_time((unix_now_ms() + 3600000) * 1000)},
                                    {"leaseTransitions", 4}}}});
  Client client(server.config());
  std::vector<std::string> seen;
  std::mutex mutex;
  LeaderElector elector(client, patient("b"), {nullptr, nullptr, [&](const std::string& who) {
                                                 std::lock_guard lock(mutex);
                                                 seen.push_back(who);
                                               }});
  const auto begin = SteadyClock::now();
  elector.start();
  ASSERT_TRUE(eventually([&] { return elector.is_leader(); }));
  EXPECT_GE(SteadyClock::now() - begin, Milliseconds(990));
  EXPECT_EQ((*server.get(resources::kLeases, kLease))["spec"]["leaseTransitions"], 5);
  std::lock_guard lock(mutex);
  EXPECT_EQ(seen, (std::vector<std::string>{"dead", "b"}));
}

TEST(LeaderElector, NeverLeadsPastItsRenewDeadline) {
  FakeApiServer server;
  Client client(server.config());
  std::atomic<bool> lost{false};
  LeaderElector elector(client, options_for("a"), {nullptr, [&] { lost = true; }, nullptr});
  elector.start();
  ASSERT_TRUE(eventually([&] { return elector.is_leader(); }));
  server.inject({.method = "PUT", .status = 503, .times = -1});
  server.inject({.method = "GET", .path_part = "/leases/", .status = 503, .times = -1});
  ASSERT_TRUE(eventually([&] { return lost.load(); }));
  EXPECT_FALSE(elector.is_leader());
  // It does not come back by itself, since what it began may not be over.
  server.clear_faults();
  std::this_thread::sleep_for(Milliseconds(300));
  EXPECT_FALSE(elector.is_leader());
  EXPECT_EQ((*server.get(resources::kLeases, kLease))["spec"]["holderIdentity"],
            "a");  // nothing released that was lost
  elector.stand_again();
  ASSERT_TRUE(eventually([&] { return elector.is_leader(); }));
}

TEST(LeaderElector, ASilentServerEndsLeadershipInTime) {
  FakeApiServer server;
  Client client(server.config());
  std::atomic<bool> lost{false};
  LeaderElector elector(client, options_for("a"), {nullptr, [&] { lost = true; }, nullptr});
  elector.start();
  ASSERT_TRUE(eventually([&] { return elector.is_leader(); }));
  server.inject({.path_part = "/leases", .status = 503, .times = -1, .delay = Milliseconds(600000)});
  ASSERT_TRUE(eventually([&] { return lost.load(); }));
  EXPECT_FALSE(elector.is_leader());
}

TEST(LeaderElector, LosesAtOnceWhenAnotherHoldsIt) {
  FakeApiServer server;
  Client client(server.config());
  std::atomic<bool> lost{false};
  LeaderElector elector(client, patient("a"), {nullptr, [&] { lost = true; }, nullptr});
  elector.start();
  ASSERT_TRUE(eventually([&] { return elector.is_leader(); }));
  server.modify(resources::kLeases, kLease, [](Json& j) { j["spec"]["holderIdentity"] = "thief"; });
  ASSERT_TRUE(eventually([&] { return lost.load(); }));
  EXPECT_FALSE(elector.is_leader());
  elector.stand_again();  // for when the thief is gone
  std::this_thread::sleep_for(Milliseconds(300));
  EXPECT_FALSE(elector.is_leader());
  elector.stop();
  EXPECT_EQ((*server.get(resources::kLeases, kLease))["spec"]["holderIdentity"], "thief");
}

TEST(LeaderElector, RidesOverConflictsLostAnswersAndADeletedLease) {
  FakeApiServer server;
  Client client(server.config());
  server.inject({.method = "POST", .path_part = "/leases", .apply_first = true, .cut = true});
  std::atomic<bool> lost{false};
  LeaderElector elector(client, patient("a"), {nullptr, [&] { lost = true; }, nullptr});
  elector.start();
  ASSERT_TRUE(eventually([&] { return elector.is_leader(); }));
  server.inject({.method = "PUT", .status = 500, .times = 2});
  server.inject({.method = "PUT", .apply_first = true, .cut = true, .times = 2});
  server.modify(resources::kLeases, kLease, [](Json& j) { j["metadata"]["labels"] = {{"touched", "yes"}}; });
  const int64_t before = server.resource_version();
  ASSERT_TRUE(eventually([&] { return server.resource_version() > before + 4; }));
  server.erase(resources::kLeases, kLease);
  ASSERT_TRUE(eventually([&] { return server.get(resources::kLeases, kLease).has_value(); }));
  EXPECT_TRUE(elector.is_leader());
  EXPECT_FALSE(lost);
}

TEST(LeaderElector, RefusesTimesThatCannotBeSafe) {
  FakeApiServer server;
  Client client(server.config());
  LeaderOptions options = options_for("a");
  options.renew_deadline = options.lease_duration;
  EXPECT_THROW(LeaderElector(client, options, {}), Error);
  options = options_for("");
  EXPECT_THROW(LeaderElector(client, options, {}), Error);
}

}  // namespace
}  // namespace trireme::kube
