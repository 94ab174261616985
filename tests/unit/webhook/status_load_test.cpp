// Reports beside peers that are slow and peers that send junk. Reduced in `make test`; all of it with TRIREME_LOAD=1.
#include <gtest/gtest.h>
#include <httplib.h>
#include <sys/resource.h>

#include <cstdlib>
#include <random>

#include "api/runtime.h"
#include "base/text.h"
#include "operator/kube/client_config.h"
#include "operator/telemetry/status_server.h"
#include "tests/unit/kube/fake_apiserver.h"
#include "tests/unit/kube/raw_peer.h"

namespace trireme::telemetry {
namespace {

using kube::testing::FakeApiServer;
using kube::testing::RawPeer;
using nlohmann::json;

constexpr const char* kName = "trireme-status.trireme-system.svc";
constexpr double kHeartbeatS = 10;

struct Sizes {
  int slow = 200, junk = 1000, jobs = 20, rounds = 3;
  double interval_s = 0.5;
};

Sizes sizes() {
  if (!std::getenv("TRIREME_LOAD")) return {};
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  return {1000, 10000, 100, 6, kHeartbeatS};
}

std::string address(int i) { return "127.7." + std::to_string(i / 250) + "." + std::to_string(1 + i % 250); }
std::string job_name(int i) { return "job-" + std::to_string(i); }
std::string pod_of(int i) { return pod_name(job_name(i), "actor", 0, 1); }

std::string token_of(const std::string& pod, const std::string& uid) {
  const json claims = {{"kubernetes.io", {{"namespace", "team"}, {"pod", {{"name", pod}, {"uid", uid}}}}}};
  std::string text = replace_all(replace_all(kube::base64_encode(claims.dump()), "+", "-"), "/", "_");
  while (!text.empty() && text.back() == '=') text.pop_back();
  return "e30." + text + ".sig";
}

class StatusLoad : public ::testing::Test {
 protected:
  StatusLoad() {
    api_.answer_creates(kube::resources::kTokenReviews, [this](const json& review) {
      ++reviews_;
      json answer = review;
      const auto claimed = claimed_identity(review["spec"]["token"]);
      answer["status"] = {{"authenticated", true},
                          {"audiences", json::array({kStatusTokenAudience})},
                          {"user",
                           {{"username", "system:serviceaccount:team:default"},
                            {"extra",
                             {{"authentication.kubernetes.io/pod-name", json::array({claimed->pod})},
                              {"authentication.kubernetes.io/pod-uid", json::array({claimed->uid})}}}}}};
      return answer;
    });
    StatusServerOptions options;
    options.address = "127.0.0.1";
    options.tls = true;
    server_ = std::make_unique<StatusServer>(
        client_, reports_,
        [](const kube::ObjectKey& key) -> std::shared_ptr<const controller::CachedPod> {
          const size_t end = key.name.find("-actor-0-a1");
          if (end == std::string::npos || !starts_with(key.name, "job-")) return nullptr;
          auto pod = std::make_shared<controller::CachedPod>();
          pod->job = key.name.substr(0, end);
          pod->uid = "pod-of-" + pod->job;
          pod->job_uid = hash64("uid-of-" + pod->job);
          pod->owned = true;
          pod->role = "actor";
          pod->rank = 0;
          pod->attempt = 1;
          return pod;
        },
        [](const kube::ObjectKey& key) -> std::shared_ptr<const controller::CachedJob> {
          auto job = std::make_shared<controller::CachedJob>();
          job->uid = "uid-of-" + key.name;
          return job;
        },
        std::move(options));
    kube::LeafOptions leaf;
    leaf.common_name = kName;
    leaf.dns_names = {kName};
    server_->set_certificate(kube::issue_certificate(ca_, leaf));
  }

  // A peer that never gets done, and comes back when it is closed: silence, a drip, half a handshake, an endless body.
  void be_slow(int first, int count) {
    std::vector<std::unique_ptr<RawPeer>> peers(static_cast<size_t>(count));
    while (!stop_) {
      for (int i = 0; i < count && !stop_; ++i) {
        auto& peer = peers[static_cast<size_t>(i)];
        // Half of them share one address.
        if (!peer) peer = std::make_unique<RawPeer>(server_->port(), i % 2 == 0 ? "127.7.250.1" : address(first + i));
        if (i % 4 != 0) peer->send(std::string("\x16\x03\x01", 3), Milliseconds(1));  // the others say nothing
        peer->receive({}, Milliseconds(1));
        if (peer->ended() || !peer->connected()) {
          peer.reset();
          ++closed_;
        }
      }
      std::this_thread::sleep_for(Milliseconds(200));
    }
  }

  void send_junk(int count, int seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    for (int i = 0; i < count && !stop_; ++i) {
      if (i % 2 == 0) {  // no TLS at all
        std::string bytes(1 + random() % 2000, ' ');
        for (char& c : bytes) c = static_cast<char>(random());
        RawPeer(server_->port(), address(2000 + i % 500)).send(bytes, Milliseconds(1000));
      } else {  // well formed, of no job's
        post("job-1", token_of("nobody", std::to_string(random())), std::string(random() % 50000, 'x'), nullptr);
      }
      ++junk_;
    }
  }

  int post(const std::string& job, const std::string& token, const std::string& body, std::string* problem) {
    httplib::SSLClient http(kName, server_->port());
    http.set_hostname_addr_map({{kName, "127.0.0.1"}});
    http.load_ca_cert_store(ca_.cert_pem.data(), ca_.cert_pem.size());
    http.set_connection_timeout(5, 0);
    http.set_read_timeout(5, 0);
    const auto result =
        http.Post("/v1/status/team/" + job, {{"Authorization", "Bearer " + token}}, body, "application/json");
    if (!result && problem) *problem = httplib::to_string(result.error());
    return result ? result->status : -1;
  }

  // Reports as a trainer does: every interval, and again after a second when one was not taken. Returns by how much the
  // worst report was late.
  double report(int job, const Sizes& size) {
    double worst = 0;
    for (int round = 0; round < size.rounds; ++round) {
      const Stopwatch watch;
      const std::string body = json{{"attempt", 1}, {"progress", {{"step", round}, {"maxSteps", size.rounds}}}}.dump();
      std::string problem;
      while (post(job_name(job), token_of(pod_of(job), "pod-of-" + job_name(job)), body, &problem) != 204) {
        ++tried_again_;
        if (watch.seconds() > 6 * kHeartbeatS) return watch.seconds();
        std::this_thread::sleep_for(Milliseconds(1000));
      }
      worst = std::max(worst, watch.seconds());
      const double left = size.interval_s - watch.seconds();
      if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
    }
    return worst;
  }

  std::atomic<int> reviews_{0}, closed_{0}, junk_{0}, tried_again_{0};
  std::atomic<bool> stop_{false};
  const kube::KeyPair ca_ = kube::make_ca("ca");
  FakeApiServer api_;
  kube::Client client_{api_.config()};
  controller::ReportStore reports_;
  std::unique_ptr<StatusServer> server_;
};

TEST_F(StatusLoad, NoReportIsLateBesideSlowPeersAndJunk) {
  const Sizes size = sizes();
  std::vector<std::thread> hostile;
  for (int i = 0; i < 4; ++i) hostile.emplace_back([&, i] { be_slow(i * size.slow / 4, size.slow / 4); });
  for (int i = 0; i < 4; ++i) hostile.emplace_back([&, i] { send_junk(size.junk / 4, i); });
  std::vector<std::thread> jobs;
  std::vector<double> late(static_cast<size_t>(size.jobs), 0);
  for (int i = 0; i < size.jobs; ++i) {
    jobs.emplace_back([&, i] { late[static_cast<size_t>(i)] = report(i, size); });
  }
  for (std::thread& job : jobs) job.join();
  EXPECT_TRUE(kube::testing::eventually([&] { return junk_ == size.junk; }, Milliseconds(300000)));
  stop_ = true;
  for (std::thread& thread : hostile) thread.join();
  const double worst = *std::max_element(late.begin(), late.end());
  std::printf(
      "%d jobs, %d reports each: the latest came after %.2f s (%d tries again); %d slow peers closed %d times, "
      "%d junk requests, %d token reviews\n",
      size.jobs, size.rounds, worst, tried_again_.load(), size.slow, closed_.load(), junk_.load(), reviews_.load());
  EXPECT_LT(worst, kHeartbeatS);
  EXPECT_EQ(reports_.size(), static_cast<size_t>(size.jobs));
  EXPECT_LE(reviews_, 3 * size.jobs) << "junk costs no TokenReview";
}

}  // namespace
}  // namespace trireme::telemetry
