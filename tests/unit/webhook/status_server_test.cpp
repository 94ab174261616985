#include "operator/telemetry/status_server.h"

#include <gtest/gtest.h>
#include <httplib.h>

#include "api/runtime.h"
#include "base/fs.h"
#include "base/text.h"
#include "operator/kube/client_config.h"
#include "tests/unit/kube/fake_apiserver.h"
#include "trainer/telemetry/status_reporter.h"

namespace trireme::telemetry {
namespace {

using controller::CachedJob;
using controller::CachedPod;
using kube::testing::FakeApiServer;
using nlohmann::json;

// As the API server makes them, but for the signature: `seal` "good" is believed.
std::string token_of(const std::string& ns, const std::string& pod, const std::string& uid,
                     const std::string& seal = "good") {
  const json claims = {{"aud", json::array({kStatusTokenAudience})},
                       {"kubernetes.io", {{"namespace", ns}, {"pod", {{"name", pod}, {"uid", uid}}}}},
                       {"sub", "system:serviceaccount:" + ns + ":default"}};
  std::string text = replace_all(replace_all(kube::base64_encode(claims.dump()), "+", "-"), "/", "_");
  while (!text.empty() && text.back() == '=') text.pop_back();
  return "eyJhbGciOiJSUzI1NiJ9." + text + "." + seal;
}

struct Place {
  // Before the servers, whose threads read them.
  std::atomic<int> reviews{0};
  std::atomic<bool> hold{false};  // reviews get no answer
  std::atomic<const char*> audience{kStatusTokenAudience};
  std::atomic<int64_t> attempt{2};
  std::atomic<int> rank{0};
  std::atomic<const char*> job_uid{"job-uid"};  // on the pod
  FakeApiServer api;
  kube::Client client{api.config()};
  controller::ReportStore reports;
  std::unique_ptr<StatusServer> server;

  explicit Place(StatusServerOptions options = {}) {
    api.answer_creates(kube::resources::kTokenReviews, [this](const json& review) {
      while (hold) std::this_thread::sleep_for(Milliseconds(1));
      ++reviews;
      json answer = review;
      const std::string token = review["spec"]["token"];
      const auto claimed = claimed_identity(token);
      if (!claimed || !(ends_with(token, ".good") || ends_with(token, ".liar"))) {
        answer["status"] = {{"authenticated", false}};
        return answer;
      }
      const std::string pod = ends_with(token, ".liar") ? "somebody-else" : claimed->pod;
      answer["status"] = {{"authenticated", true},
                          {"audiences", json::array({audience.load()})},
                          {"user",
                           {{"username", "system:serviceaccount:" + claimed->ns + ":default"},
                            {"extra",
                             {{"authentication.kubernetes.io/pod-name", json::array({pod})},
                              {"authentication.kubernetes.io/pod-uid", json::array({claimed->uid})}}}}}};
      return answer;
    });
    options.address = "127.0.0.1";
    server = std::make_unique<StatusServer>(
        client, reports,
        [this](const kube::ObjectKey& key) -> std::shared_ptr<const CachedPod> {
          const bool other = key.name == "other-actor-0-a2";
          const bool known = key.name == "quick-actor-0-a1" || key.name == "quick-actor-0-a2" || key.name == "copy";
          if (!(known || other) || key.ns != "team") return nullptr;
          auto pod = std::make_shared<CachedPod>();
          pod->uid = other ? "other-uid" : "pod-uid";
          pod->job = other ? "other" : "quick";
          pod->job_uid = hash64(job_uid.load());
          pod->owned = true;
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
    return answer(token, body, path).first;
  }
  // Status and body.
  std::pair<int, std::string> answer(const std::string& token, const std::string& body,
                                     const std::string& path = "/v1/status/team/quick") {
    httplib::Client http("127.0.0.1", server->port());
    http.set_read_timeout(60, 0);
    httplib::Headers headers;
    if (!token.empty()) headers.emplace("Authorization", "Bearer " + token);
    const auto result = http.Post(path.c_str(), headers, body, "application/json");
    if (!result) return {-1, ""};
    return {result->status, result->body};
  }
};

const std::string kToken = token_of("team", "quick-actor-0-a2", "pod-uid");
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
  EXPECT_EQ(p.post("", kBody), 403);
  EXPECT_EQ(p.post("nonsense", kBody), 403);
  EXPECT_EQ(p.post("a.b.c", kBody), 403);
  EXPECT_EQ(p.post(token_of("else", "quick-actor-0-a2", "pod-uid"), kBody), 403) << "another namespace";
  EXPECT_EQ(p.post(token_of("team", "quick-actor-0-a2", "older-uid"), kBody), 403) << "an earlier pod of that name";
  EXPECT_EQ(p.post(token_of("team", "copy", "pod-uid"), kBody), 403) << "its labels under another name";
  EXPECT_EQ(p.post(kToken, kBody, "/v1/status/team/other"), 403) << "another job";
  EXPECT_EQ(p.post(token_of("team", "unknown", "pod-uid"), kBody), 403) << "the informer may be behind";
  EXPECT_EQ(p.post(kToken, R"({"attempt":1})"), 403) << "not the attempt of this pod";
  p.rank = 1;
  EXPECT_EQ(p.post(kToken, kBody), 403) << "not rank 0";
  p.rank = 0;
  p.job_uid = "an earlier job of that name";
  EXPECT_EQ(p.post(kToken, kBody), 403) << "another job's uid";
  p.job_uid = "job-uid";
  EXPECT_EQ(p.reviews, 0) << "none of these is worth a TokenReview";
  EXPECT_EQ(p.post(token_of("team", "quick-actor-0-a2", "pod-uid", "forged"), kBody), 403);
  EXPECT_EQ(p.post(token_of("team", "quick-actor-0-a2", "pod-uid", "liar"), kBody), 403) << "the review names another";
  EXPECT_EQ(p.reviews, 2);
  EXPECT_EQ(p.reports.size(), 0u);
}

// Else anybody in the cluster could ask which jobs and pods there are, in whatever namespace.
TEST(StatusServer, WithoutAProvenTokenAllRefusalsAreOne) {
  Place p;
  const auto refusal = p.answer("", kBody);
  EXPECT_EQ(refusal.first, 403);
  const auto forged = [](const std::string& ns, const std::string& pod, const std::string& uid) {
    return token_of(ns, pod, uid, "forged");
  };
  const std::string right = forged("team", "quick-actor-0-a2", "pod-uid");
  const std::string missing = "/v1/status/team/missing", far = "/v1/status/nowhere/quick";
  EXPECT_EQ(p.answer("nonsense", kBody), refusal);
  EXPECT_EQ(p.answer(right, kBody), refusal) << "everything is there but the proof";
  EXPECT_EQ(p.answer(right, kBody, missing), refusal) << "no such job";
  EXPECT_EQ(p.answer(right, kBody, far), refusal) << "no such namespace";
  EXPECT_EQ(p.answer(right, R"({"attempt":1})"), refusal) << "another attempt";
  EXPECT_EQ(p.answer(right, "{"), refusal) << "no report";
  EXPECT_EQ(p.answer(right, "{", missing), refusal);
  EXPECT_EQ(p.answer(forged("team", "missing-actor-0-a2", "pod-uid"), kBody), refusal) << "no such pod";
  EXPECT_EQ(p.answer(forged("team", "quick-actor-0-a2", "other-uid"), kBody), refusal) << "another pod of the name";
  EXPECT_EQ(p.answer(token_of("team", "quick-actor-0-a2", "pod-uid", "liar"), kBody), refusal);
  EXPECT_EQ(p.answer(token_of("team", "quick-actor-0-a2", "pod-uid", "\xff"), kBody), refusal) << "no token at all";
  p.rank = 1;
  EXPECT_EQ(p.answer(right, kBody), refusal) << "a pod that does not report";
  p.rank = 0;
  p.api.inject({.method = "POST", .path_part = "tokenreviews", .status = 503});
  EXPECT_EQ(p.answer(forged("team", "quick-actor-0-a1", "pod-uid"), R"({"attempt":2})"), refusal);
  EXPECT_EQ(p.answer(kToken, kBody), refusal) << "the API server does not say whose the token is";
  EXPECT_EQ(p.post(kToken, kBody), 204);
  EXPECT_EQ(p.answer(kToken, "{").first, 400) << "who has proven it is told";
}

TEST(StatusServer, ClaimsOfATokenAreReadWithCare) {
  const auto identity = claimed_identity(kToken);
  ASSERT_TRUE(identity);
  EXPECT_EQ(identity->ns, "team");
  EXPECT_EQ(identity->pod, "quick-actor-0-a2");
  EXPECT_EQ(identity->uid, "pod-uid");
  for (const std::string& token :
       {std::string(), std::string("."), std::string(".."), std::string("a.b"), std::string("a.!.c"),
        "a." + kube::base64_encode("[]") + ".c", "a." + kube::base64_encode("{\"kubernetes.io\":3}") + ".c",
        "a." + kube::base64_encode("{\"kubernetes.io\":{\"namespace\":\"n\",\"pod\":{\"name\":1}}}") + ".c",
        token_of("team", "", "u"), token_of("team", "p", "u") + std::string(10000, 'x')}) {
    EXPECT_FALSE(claimed_identity(token)) << token.substr(0, 80);
  }
}

TEST(StatusServer, ReviewsThatHangLeaveThreadsForTokensThatAreKnown) {
  Place p({.max_threads = 4, .max_reviews = 2, .request_timeout = Milliseconds(20000)});
  EXPECT_EQ(p.post(kToken, kBody), 204);
  p.hold = true;
  std::vector<std::thread> others;
  std::atomic<int> refused{0};
  for (int i = 0; i < 8; ++i) {
    others.emplace_back([&, i] {
      refused += p.post(token_of("team", "quick-actor-0-a2", "pod-uid", "x" + std::to_string(i)), kBody) == 403;
    });
  }
  EXPECT_TRUE(kube::testing::eventually([&] { return refused == 6; })) << "two reviews hang, more are not begun";
  EXPECT_EQ(p.reviews, 1);
  EXPECT_EQ(p.post(kToken, kBody), 204);
  p.hold = false;
  for (std::thread& thread : others) thread.join();
  EXPECT_EQ(refused, 8);
  EXPECT_EQ(p.reviews, 3);
}

TEST(StatusServer, JunkInAPodsNameUsesUpThatPodsReviewsOnly) {
  StatusServerOptions options;
  options.token_lifetime = Milliseconds(0);  // each report needs a review
  options.review_share = {.per_second = 1e-6, .burst = 3};
  Place p(std::move(options));
  EXPECT_EQ(p.post(kToken, kBody), 204);
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(p.post(token_of("team", "quick-actor-0-a2", "pod-uid", "junk" + std::to_string(i)), kBody), 403);
  }
  EXPECT_EQ(p.reviews, 3) << "one pod's junk costs no more than its share";
  std::this_thread::sleep_for(Milliseconds(50));
  const auto before = SteadyClock::now();
  EXPECT_EQ(p.post(token_of("team", "quick-actor-0-a2", "pod-uid", "more"), kBody), 403);
  const auto age = p.reports.get({"team", "quick"}, "job-uid")->age;
  EXPECT_LE(age, SteadyClock::now() - before) << "nor does the job look silent";
  const std::string other = token_of("team", "other-actor-0-a2", "other-uid");
  EXPECT_EQ(p.post(other, kBody, "/v1/status/team/other"), 204) << "others are reviewed still";
  EXPECT_EQ(p.post(kToken, kBody), 204) << "and a token of its own that was believed before";
  EXPECT_EQ(p.reviews, 5);
  EXPECT_GT(p.reports.path(Milliseconds(60000), 0, {.answers_for = Milliseconds(3'600'000)}).served_for.count(), 0)
      << "none of that is an outage of ours";
}

TEST(StatusServer, TokenOfAnotherAudienceIsNone) {
  Place p;
  p.audience = "https://kubernetes.default.svc";
  EXPECT_EQ(p.post(kToken, kBody), 403);
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

TEST(StatusServer, ServesTlsOnceItHasACertificate) {
  const kube::KeyPair ca = kube::make_ca("ca");
  kube::LeafOptions leaf;
  leaf.common_name = "trireme-status.trireme-system.svc";
  leaf.dns_names = {leaf.common_name};
  const auto options = [&](std::function<bool()> is_leader, std::function<std::string()> address) {
    StatusServerOptions o;
    o.tls = true;
    o.is_leader = std::move(is_leader);
    o.leader_address = std::move(address);
    o.tls_name = leaf.common_name;
    o.ca_pem = [&ca] { return ca.cert_pem; };
    return o;
  };
  Place leader(options([] { return true; }, {}));
  EXPECT_EQ(leader.server->port(), 0) << "nothing in the clear meanwhile";
  leader.server->set_certificate(kube::issue_certificate(ca, leaf));
  Place standby(options([] { return false; }, [&] { return "127.0.0.1:" + std::to_string(leader.server->port()); }));
  standby.server->set_certificate(kube::issue_certificate(ca, leaf));
  const auto post = [&](const Place& place, const std::string& authority) {
    httplib::SSLClient http(leaf.common_name, place.server->port());
    http.set_hostname_addr_map({{leaf.common_name, "127.0.0.1"}});
    http.load_ca_cert_store(authority.data(), authority.size());
    http.set_read_timeout(60, 0);
    const auto result =
        http.Post("/v1/status/team/quick", {{"Authorization", "Bearer " + kToken}}, kBody, "application/json");
    return result ? result->status : -1;
  };
  EXPECT_EQ(post(leader, ca.cert_pem), 204);
  EXPECT_EQ(post(leader, kube::make_ca("other").cert_pem), -1);
  EXPECT_EQ(post(standby, ca.cert_pem), 204) << "handed on to the leader, over TLS too";
  EXPECT_EQ(standby.reports.size(), 0u);
  leader.server->set_certificate(kube::issue_certificate(kube::make_ca("other"), leaf));
  EXPECT_EQ(post(standby, ca.cert_pem), 503) << "a leader that cannot prove who it is gets no token";
}

// The trainer's side, with the files that a pod gets.
TEST(StatusServer, TheTrainersReporterPushesOverTlsAndVerifies) {
  const kube::KeyPair ca = kube::make_ca("ca");
  kube::LeafOptions leaf;
  leaf.common_name = "localhost";
  leaf.dns_names = {"localhost"};
  StatusServerOptions options;
  options.tls = true;
  Place p(options);
  p.server->set_certificate(kube::issue_certificate(ca, leaf));
  TemporaryDirectory dir;
  write_file_atomic(dir.path() / "token", kToken + "\n");
  write_file_atomic(dir.path() / "ca.crt", ca.cert_pem);
  write_file_atomic(dir.path() / "other.crt", kube::make_ca("other").cert_pem);
  trireme::StatusOptions reporter;
  reporter.url = "https://localhost:" + std::to_string(p.server->port()) + "/v1/status/team/quick";
  reporter.token_file = dir.path() / "token";
  reporter.timeout = Milliseconds(30000);
  reporter.min_interval = Milliseconds(50);
  reporter.ca_file = dir.path() / "other.crt";
  {
    trireme::StatusReporter wary(reporter);
    wary.update(json::parse(kBody));
    EXPECT_TRUE(kube::testing::eventually([&] { return wary.failed() > 0; }));
    EXPECT_EQ(wary.sent(), 0);
  }
  EXPECT_EQ(p.reports.size(), 0u) << "whoever cannot prove to be the operator gets no token";
  reporter.ca_file = dir.path() / "ca.crt";
  trireme::StatusReporter trusting(reporter);
  trusting.update(json::parse(kBody));
  EXPECT_TRUE(kube::testing::eventually([&] { return trusting.sent() > 0; }));
  EXPECT_EQ(p.reports.size(), 1u);
}

TEST(StatusServer, ReviewsThatFailAreALineInTheLogAndNotOneEach) {
  Place p;
  p.api.inject({.method = "POST", .path_part = "tokenreviews", .status = 503, .times = -1});
  testing::internal::CaptureStderr();
  const Stopwatch watch;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(p.post(kToken, kBody), 403);
  const double took = watch.seconds();
  const std::string log = testing::internal::GetCapturedStderr();
  int lines = 0;
  for (size_t at = log.find("token review: "); at != std::string::npos; at = log.find("token review: ", at + 1))
    ++lines;
  EXPECT_GE(lines, 1) << log;
  EXPECT_LE(lines, 1 + static_cast<int>(took / 10)) << log;
}

TEST(StatusServer, ApiServerDownIsTryAgain) {
  Place p;
  p.api.inject({.method = "POST", .path_part = "tokenreviews", .status = 503});
  std::this_thread::sleep_for(Milliseconds(20));
  const auto before = SteadyClock::now();
  EXPECT_EQ(p.post(kToken, kBody), 403);
  const auto served = p.reports.path(Milliseconds(60000), 0, {.answers_for = Milliseconds(3'600'000)}).served_for;
  EXPECT_LE(served, SteadyClock::now() - before) << "silence that follows is ours";
  EXPECT_EQ(p.post(kToken, kBody), 204);
}

TEST(StatusServer, OldAttemptsDoNotComeBack) {
  Place p;
  EXPECT_EQ(p.post(kToken, kBody), 204);
  p.attempt = 1;
  EXPECT_EQ(p.post(token_of("team", "quick-actor-0-a1", "pod-uid"), R"({"attempt":1})"), 409);
  EXPECT_EQ(p.reports.get({"team", "quick"}, "job-uid")->attempt, 2);
}

TEST(StatusServer, StandbyPassesOn) {
  Place leader;
  const std::string address = "127.0.0.1:" + std::to_string(leader.server->port());
  Place standby({.is_leader = [] { return false; }, .leader_address = [&] { return address; }});
  EXPECT_EQ(standby.post(kToken, kBody), 204);
  EXPECT_EQ(standby.post("nonsense", kBody), 403);
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
