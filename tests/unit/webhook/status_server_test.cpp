#include "operator/telemetry/status_server.h"

#include <gtest/gtest.h>
#include <httplib.h>

#include "api/runtime.h"
#include "tests/unit/kube/fake_apiserver.h"

namespace trireme::telemetry {
namespace {

using controller::CachedJob;
using controller::CachedPod;
using kube::testing::FakeApiServer;
using nlohmann::json;

// Tokens are "NAMESPACE/POD/UID", or anything else, which nobody believes.
struct Place {
  // Before the servers, whose threads read them.
  std::atomic<int> reviews{0};
  std::atomic<const char*> audience{kStatusTokenAudience};
  std::atomic<int64_t> attempt{2};
  std::atomic<int> rank{0};
  FakeApiServer api;
  kube::Client client{api.config()};
  controller::ReportStore reports;
  std::unique_ptr<StatusServer> server;

  explicit Place(StatusServerOptions options = {}) {
    api.answer_creates(kube::resources::kTokenReviews, [this](const json& review) {
      ++reviews;
      json answer = review;
      const std::vector<std::string> parts = split(review["spec"]["token"].get<std::string>(), '/');
      if (parts.size() != 3) {
        answer["status"] = {{"authenticated", false}};
        return answer;
      }
      answer["status"] = {{"authenticated", true},
                          {"audiences", json::array({audience.load()})},
                          {"user",
                           {{"username", "system:serviceaccount:" + parts[0] + ":default"},
                            {"extra",
                             {{"authentication.kubernetes.io/pod-name", json::array({parts[1]})},
                              {"authentication.kubernetes.io/pod-uid", json::array({parts[2]})}}}}}};
      return answer;
    });
    options.address = "127.0.0.1";
    server = std::make_unique<StatusServer>(
        client, reports,
        [this](const kube::ObjectKey& key) -> std::shared_ptr<const CachedPod> {
          if (key.name != "quick-actor-0-a2" || key.ns != "team") return nullptr;
          auto pod = std::make_shared<CachedPod>();
          pod->uid = "pod-uid";
          pod->job = "quick";
          pod->role = "actor";
          pod->rank = rank;
          pod->attempt = static_cast<int32_t>(attempt);
          return pod;
        },
        [](const kube::ObjectKey& key) -> std::shared_ptr<const CachedJob> {
          if (key.name != "quick" && key.name != "other") return nullptr;
          auto job = std::make_shared<CachedJob>();
          job->uid = "job-uid";
          return job;
        },
        std::move(options));
    server->start();
  }
  int post(const std::string& token, const std::string& body, const std::string& path = "/v1/status/team/quick") {
    httplib::Client http("127.0.0.1", server->port());
    http.set_read_timeout(60, 0);
    httplib::Headers headers;
    if (!token.empty()) headers.emplace("Authorization", "Bearer " + token);
    const auto result = http.Post(path.c_str(), headers, body, "application/json");
    return result ? result->status : -1;
  }
};

constexpr const char* kToken = "team/quick-actor-0-a2/pod-uid";
constexpr const char* kBody =
    R"({"attempt":2,"rendezvousDone":true,"progress":{"step":7,"maxSteps":10,"phase":"training","reward":0.25}})";

TEST(StatusServer, TakesTheReportOfRankZero) {
  Place p;
  EXPECT_EQ(p.post(kToken, kBody), 204);
  const auto report = p.reports.get({"team", "quick"}, "job-uid");
  ASSERT_TRUE(report);
  EXPECT_TRUE(report->rendezvous_done);
  EXPECT_EQ(report->progress.step, 7);
  EXPECT_EQ(report->progress.reward, 0.25);
  EXPECT_EQ(p.post(kToken, kBody), 204);
  EXPECT_EQ(p.reviews, 1) << "a token is reviewed once a minute, not once a report";
}

TEST(StatusServer, BelievesOnlyThePodItself) {
  Place p;
  EXPECT_EQ(p.post("", kBody), 401);
  EXPECT_EQ(p.post("nonsense", kBody), 401);
  EXPECT_EQ(p.post("else/quick-actor-0-a2/pod-uid", kBody), 403) << "another namespace";
  EXPECT_EQ(p.post("team/quick-actor-0-a2/older-uid", kBody), 403) << "an earlier pod of that name";
  EXPECT_EQ(p.post(kToken, kBody, "/v1/status/team/other"), 403) << "another job";
  EXPECT_EQ(p.post("team/unknown/pod-uid", kBody), 503) << "the informer may be behind";
  EXPECT_EQ(p.post(kToken, R"({"attempt":1})"), 403) << "not the attempt of this pod";
  p.rank = 1;
  EXPECT_EQ(p.post(kToken, kBody), 403) << "not rank 0";
  EXPECT_EQ(p.reports.size(), 0u);
}

TEST(StatusServer, TokenOfAnotherAudienceIsNone) {
  Place p;
  p.audience = "https://kubernetes.default.svc";
  EXPECT_EQ(p.post(kToken, kBody), 401);
}

TEST(StatusServer, HostileBodiesAreRefused) {
  Place p;
  for (const char* body : {"", "{", "[]", "null", "{\"attempt\":0}", "{\"attempt\":\"2\"}", "{\"attempt\":1e999}",
                           "{\"attempt\":18446744073709551615}", "{\"attempt\":2,\"rendezvousDone\":\"yes\"}",
                           "{\"attempt\":2,\"progress\":[1]}", "{\"attempt\":2,\"progress\":{\"step\":\"x\"}}",
                           "{\"attempt\":2,\"stuckRank\":1.5}"}) {
    EXPECT_EQ(p.post(kToken, body), 400) << body;
  }
  EXPECT_EQ(p.post(kToken, std::string(1 << 20, ' ')), 413);
  EXPECT_EQ(p.reports.size(), 0u);
}

TEST(StatusServer, ApiServerDownIsTryAgain) {
  Place p;
  p.api.inject({.method = "POST", .path_part = "tokenreviews", .status = 503});
  EXPECT_EQ(p.post(kToken, kBody), 503);
  EXPECT_EQ(p.post(kToken, kBody), 204);
}

TEST(StatusServer, OldAttemptsDoNotComeBack) {
  Place p;
  EXPECT_EQ(p.post(kToken, kBody), 204);
  p.attempt = 1;
  EXPECT_EQ(p.post(kToken, R"({"attempt":1})"), 409);
  EXPECT_EQ(p.reports.get({"team", "quick"}, "job-uid")->attempt, 2);
}

TEST(StatusServer, StandbyPassesOn) {
  Place leader;
  const std::string address = "127.0.0.1:" + std::to_string(leader.server->port());
  Place standby({.is_leader = [] { return false; }, .leader_address = [&] { return address; }});
  EXPECT_EQ(standby.post(kToken, kBody), 204);
  EXPECT_EQ(standby.post("nonsense", kBody), 401);
  EXPECT_EQ(leader.reports.size(), 1u);
  EXPECT_EQ(standby.reports.size(), 0u);
  // Two standbys that each take the other for the leader do not play ping-pong.
  std::atomic<int> first{0}, second{0};
  const auto at = [](int port) { return "127.0.0.1:" + std::to_string(port); };
  Place a({.is_leader = [] { return false; }, .leader_address = [&] { return at(second); }});
  Place b({.is_leader = [] { return false; }, .leader_address = [&] { return at(first); }});
  first = a.server->port();
  second = b.server->port();
  EXPECT_EQ(a.post(kToken, kBody), 503);
}

TEST(ReportStore, RendezvousDoesNotComeUndone) {
  controller::ReportStore store;
  int urgent = 0;
  store.set_listener([&](const kube::ObjectKey&, bool u) { urgent += u; });
  controller::Report report;
  report.attempt = 1;
  EXPECT_TRUE(store.put({"n", "j"}, "u", report));
  report.rendezvous_done = true;
  EXPECT_TRUE(store.put({"n", "j"}, "u", report));
  report.rendezvous_done = false;
  EXPECT_TRUE(store.put({"n", "j"}, "u", report));
  EXPECT_TRUE(store.get({"n", "j"}, "u")->rendezvous_done);
  EXPECT_FALSE(store.get({"n", "j"}, "other incarnation"));
  report.attempt = 2;
  EXPECT_TRUE(store.put({"n", "j"}, "u", report));
  EXPECT_FALSE(store.get({"n", "j"}, "u")->rendezvous_done);
  EXPECT_GE(urgent, 3);
}

}  // namespace
}  // namespace trireme::telemetry
