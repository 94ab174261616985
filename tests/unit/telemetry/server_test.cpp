// MetricsServer and StatusReporter over real sockets on loopback.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>

#include <condition_variable>
#include <fstream>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "trainer/telemetry/metrics_server.h"
#include "trainer/telemetry/status_reporter.h"

namespace trireme {
namespace {

using testing::HasSubstr;
using testing::Not;

StepRecord record(int64_t step) {
  StepRecord r;
  r.step = step;
  r.max_steps = 20;
  r.phases.total_s = 4;
  r.phases.seconds[static_cast<size_t>(Phase::kGeneration)] = 3;
  r.phases.seconds[static_cast<size_t>(Phase::kIdle)] = 1;
  r.train = {{"reward", 0.25},
             {"mean_gen_tokens_per_sample", 12.5},
             {"grad_norm", 2},
             {"loss", -0.5},
             {"logprob_mismatch_tokens", 0},
             {"total_num_tokens", 100},
             {"weight_version", 6},
             {"avg_trajectory_age", 0.5},
             {"optimizer_steps", 12},
             {"moe/expert_load_max", 2.5},
             {"moe/unused_experts", 4},
             {"moe/router_entropy", 1.5}};
  r.critic = {{"loss", 0.75}, {"explained_var", -0.25}};
  r.performance = {{"tokens_per_sec", 250},
                   {"ledger_groups_leased", 3},
                   {"ledger_groups_complete", 1},
                   {"weight_transfer_seconds", 0.25}};
  return r;
}

std::string get(int port, const std::string& path, int* status = nullptr) {
  httplib::Client client("127.0.0.1", port);
  const auto response = client.Get(path);
  if (!response) return "no answer: " + httplib::to_string(response.error());
  if (status) *status = response->status;
  return response->body;
}

MetricsOptions loopback(int port = 0) {
  MetricsOptions options;
  options.address = "127.0.0.1";
  options.port = port;
  options.rank = 3;
  return options;
}

TEST(MetricsServer, ServesStepsAndPhases) {
  MetricsServer server(loopback());
  ASSERT_GT(server.port(), 0);
  server.observe(record(1));
  server.observe(record(2));
  server.count_reward_failures(5);
  server.set_checkpoint_step(2);
  server.set_engines(2, 1);
  const std::string text = get(server.port(), "/metrics");
  for (const char* line : {"trireme_step{rank=\"3\"} 2\n",
                           "trireme_max_steps{rank=\"3\"} 20\n",
                           "trireme_step_seconds_count{rank=\"3\"} 2\n",
                           "trireme_step_seconds_sum{rank=\"3\"} 8\n",
                           "trireme_last_step_seconds{rank=\"3\"} 4\n",
                           "trireme_phase_seconds_sum{rank=\"3\",phase=\"generation\"} 6\n",
                           "trireme_phase_seconds_bucket{rank=\"3\",phase=\"generation\",le=\"2.5\"} 0\n",
                           "trireme_phase_seconds_bucket{rank=\"3\",phase=\"generation\",le=\"5\"} 2\n",
                           "trireme_last_phase_seconds{rank=\"3\",phase=\"generation\"} 3\n",
                           "trireme_last_phase_seconds{rank=\"3\",phase=\"checkpoint\"} 0\n",
                           "trireme_reward_mean{rank=\"3\"} 0.25\n",
                           "trireme_response_length_mean{rank=\"3\"} 12.5\n",
                           "trireme_tokens_per_second{rank=\"3\"} 250\n",
                           "trireme_grad_norm{rank=\"3\"} 2\n",
                           "trireme_loss{rank=\"3\"} -0.5\n",
                           "trireme_logprob_mismatch_tokens{rank=\"3\"} 0\n",
                           "trireme_reward_failures_total{rank=\"3\"} 5\n",
                           "trireme_tokens_total{rank=\"3\"} 200\n",
                           "trireme_checkpoint_step{rank=\"3\"} 2\n",
                           "trireme_weight_version{rank=\"3\"} 6\n",
                           "trireme_trajectory_age{rank=\"3\"} 0.5\n",
                           "trireme_optimizer_steps{rank=\"3\"} 12\n",
                           "trireme_ledger_groups{rank=\"3\",state=\"leased\"} 3\n",
                           "trireme_ledger_groups{rank=\"3\",state=\"complete\"} 1\n",
                           "trireme_critic_loss{rank=\"3\"} 0.75\n",
                           "trireme_critic_explained_variance{rank=\"3\"} -0.25\n",
                           "trireme_expert_load_max{rank=\"3\"} 2.5\n",
                           "trireme_unused_experts{rank=\"3\"} 4\n",
                           "trireme_router_entropy{rank=\"3\"} 1.5\n",
                           "trireme_engines{rank=\"3\",state=\"live\"} 2\n",
                           "trireme_engines{rank=\"3\",state=\"lost\"} 1\n",
                           "trireme_weight_transfer_seconds{rank=\"3\"} 0.25\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  EXPECT_THAT(text, Not(HasSubstr("trireme_validation_accuracy{")));  // no value yet: no series
  StepRecord validated = record(3);
  validated.validation["accuracy"] = 0.875;
  server.observe(validated);
  EXPECT_THAT(server.scrape(), HasSubstr("trireme_validation_accuracy{rank=\"3\"} 0.875"));
  server.observe(record(4));
  EXPECT_THAT(server.scrape(),
              HasSubstr("trireme_validation_accuracy{rank=\"3\"} 0.875"));  // the last validation's stays
}

TEST(MetricsServer, PortInUseIsAClearError) {
  MetricsServer first(loopback());
  try {
    MetricsServer second(loopback(first.port()));
    FAIL() << "two servers on one port";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_THAT(error.what(), HasSubstr("127.0.0.1:" + std::to_string(first.port()) + ": the port is in use"));
  }
  EXPECT_THAT(get(first.port(), "/healthz"), "ok\n");
}

TEST(MetricsServer, PortIsFreeAfterwards) {
  int port = 0;
  {
    MetricsServer server(loopback());
    port = server.port();
    EXPECT_EQ(get(port, "/healthz"), "ok\n");
  }
  EXPECT_NO_THROW(MetricsServer(loopback(port)));
}

TEST(MetricsServer, HealthNamesAStall) {
  MetricsOptions options = loopback();
  options.stall_s = 1e-9;  // any time is too long
  MetricsServer server(options);
  int status = 0;
  EXPECT_THAT(get(server.port(), "/healthz", &status), HasSubstr("no progress for"));
  EXPECT_EQ(status, 503);
  options.stall_s = 1e6;
  MetricsServer patient(options);
  EXPECT_THAT(get(patient.port(), "/healthz", &status), "ok\n");
  EXPECT_EQ(status, 200);
}

// An operator that remembers what it was told and can be told to refuse.
class Receiver {
 public:
  Receiver() {
    server_.Post("/v1/status/ns/job", [this](const httplib::Request& request, httplib::Response& response) {
      std::lock_guard lock(mutex_);
      if (refuse_) {
        response.status = 503;
        ++refused_;
      } else {
        bodies_.push_back(nlohmann::json::parse(request.body));
        tokens_.push_back(request.get_header_value("Authorization"));
      }
      changed_.notify_all();
    });
    port_ = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::yield();
  }
  ~Receiver() {
    server_.stop();
    thread_.join();
  }
  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_) + "/v1/status/ns/job"; }
  void refuse(bool value) {
    std::lock_guard lock(mutex_);
    refuse_ = value;
  }
  template <class Done>
  bool wait(Done done) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), [&] { return done(*this); });
  }
  // Under wait() only.
  std::vector<nlohmann::json> bodies_;
  std::vector<std::string> tokens_;
  int refused_ = 0;

 private:
  httplib::Server server_;
  int port_ = 0;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool refuse_ = false;
};

StatusOptions quick(const std::string& url) {
  StatusOptions options;
  options.url = url;
  options.min_interval = Milliseconds(1);
  options.heartbeat = Milliseconds(20);
  return options;
}

TEST(StatusReporter, SendsMergedStateWithTheTokenOfNow) {
  TemporaryDirectory folder;
  const auto token = folder.path() / "token";
  std::ofstream(token) << "first\n";
  Receiver receiver;
  StatusOptions options = quick(receiver.url());
  options.token_file = token;
  StatusReporter reporter(options);
  reporter.update({{"attempt", 2}, {"rendezvousDone", true}});
  reporter.update_step(record(7));
  reporter.update_phase(Phase::kTraining);
  ASSERT_TRUE(receiver.wait(
      [](Receiver& r) { return !r.bodies_.empty() && r.bodies_.back()["progress"].value("phase", "") == "training"; }));
  receiver.wait([](Receiver& r) {
    const auto& body = r.bodies_.back();
    EXPECT_EQ(body["attempt"], 2);
    EXPECT_EQ(body["rendezvousDone"], true);
    EXPECT_EQ(body["progress"]["step"], 7);
    EXPECT_EQ(body["progress"]["maxSteps"], 20);
    EXPECT_EQ(body["progress"]["stepSeconds"], 4);
    EXPECT_EQ(body["progress"]["phaseSeconds"]["generation"], 3);
    EXPECT_EQ(body["progress"]["reward"], 0.25);
    EXPECT_EQ(body["progress"]["responseLength"], 12.5);
    EXPECT_EQ(body["progress"]["tokensPerSecond"], 250);
    EXPECT_EQ(body["progress"]["weightVersion"], 6);
    EXPECT_EQ(body["progress"]["trajectoryAge"], 0.5);
    EXPECT_EQ(body["progress"]["lastHeartbeatTime"].get<std::string>().size(), 20u);
    EXPECT_EQ(r.tokens_.back(), "Bearer first");
    return true;
  });
  write_file_atomic(token, "second");
  reporter.beat();  // a heartbeat, with no update
  EXPECT_TRUE(receiver.wait([](Receiver& r) { return r.tokens_.back() == "Bearer second"; }));
}

TEST(StatusReporter, FallsSilentWithoutASignOfLife) {
  Receiver receiver;
  StatusReporter reporter(quick(receiver.url()));
  for (int n = 1; n <= 3; ++n) {
    reporter.update({{"n", n}});
    ASSERT_TRUE(receiver.wait([n](Receiver& r) { return !r.bodies_.empty() && r.bodies_.back()["n"] == n; }));
    std::this_thread::sleep_for(Milliseconds(100));  // five heartbeats long
  }
  receiver.wait([](Receiver& r) {
    EXPECT_EQ(r.bodies_.size(), 3u);
    return true;
  });
}

TEST(StatusReporter, ChangesAreSentTogether) {
  Receiver receiver;
  StatusOptions options = quick(receiver.url());
  options.min_interval = options.heartbeat = Milliseconds(3600 * 1000);
  {
    StatusReporter reporter(options);
    reporter.update({{"n", 0}});
    ASSERT_TRUE(receiver.wait([](Receiver& r) { return r.bodies_.size() == 1; }));
    for (int i = 1; i <= 1000; ++i) reporter.update({{"n", i}});
  }  // the end sends what is unsent
  receiver.wait([](Receiver& r) {
    EXPECT_LE(r.bodies_.size(), 3u);  // the first may go out before or after the first of the thousand
    EXPECT_EQ(r.bodies_.back()["n"], 1000);
    return true;
  });
}

TEST(StatusReporter, AnOutageLosesNothingAndFailsNothing) {
  Receiver receiver;
  receiver.refuse(true);
  StatusReporter reporter(quick(receiver.url()));
  reporter.update({{"n", 1}});
  ASSERT_TRUE(receiver.wait([](Receiver& r) { return r.refused_ >= 3; }));
  EXPECT_EQ(reporter.sent(), 0);
  EXPECT_GE(reporter.failed(), 2);
  receiver.refuse(false);
  EXPECT_TRUE(receiver.wait([](Receiver& r) { return !r.bodies_.empty() && r.bodies_.back()["n"] == 1; }));
}

TEST(StatusReporter, NobodyThereOrNoTokenIsOnlyCounted) {
  StatusOptions options = quick("http://127.0.0.1:1/x");
  options.token_file = "/no/such/token";
  StatusReporter reporter(options);
  reporter.update({{"n", 1}});
  const Deadline deadline = Deadline::after(Milliseconds(60000));
  while (reporter.failed() == 0 && !deadline.passed()) std::this_thread::sleep_for(Milliseconds(1));
  EXPECT_GT(reporter.failed(), 0);
}

TEST(StatusReporter, UrlsAreChecked) {
  for (const char* url : {"", "operator:8080", "ftp://a/b", "http://", "https:///x"}) {
    EXPECT_THROW(StatusReporter(StatusOptions{.url = url}), Error) << url;
  }
}

}  // namespace
}  // namespace trireme
