#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>

#include <atomic>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "trainer/trackers/mlflow.h"
#include "trainer/trackers/tracker.h"

namespace trireme {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TrackerQueueOptions quick() {
  TrackerQueueOptions options;
  options.retry = Milliseconds(5);
  options.end_timeout = Milliseconds(20000);
  return options;
}

struct Seen {
  std::mutex mutex;
  std::vector<int64_t> steps;
  int begun = 0, ended = 0;
  bool succeeded = false;
};

class Recorder final : public Tracker {
 public:
  Recorder(Seen& seen, int failures) : seen_(seen), failures_(failures) {}
  const char* name() const override { return "recorder"; }
  void begin(const TrackedRun&) override {
    const std::lock_guard lock(seen_.mutex);
    ++seen_.begun;
  }
  void log(const TrackedStep& step) override {
    if (failures_-- > 0) fail_io("not now");
    const std::lock_guard lock(seen_.mutex);
    seen_.steps.push_back(step.step);
  }
  void end(bool succeeded) override {
    const std::lock_guard lock(seen_.mutex);
    ++seen_.ended;
    seen_.succeeded = succeeded;
  }

 private:
  Seen& seen_;
  int failures_;
};

// Waits in log() until let go: a server that takes a connection and never answers.
class Stuck final : public Tracker {
 public:
  explicit Stuck(std::shared_ptr<std::atomic<bool>> go) : go_(std::move(go)) {}
  const char* name() const override { return "stuck"; }
  void begin(const TrackedRun&) override {}
  void log(const TrackedStep&) override {
    while (!*go_) std::this_thread::sleep_for(Milliseconds(2));
  }
  void end(bool) override {}

 private:
  std::shared_ptr<std::atomic<bool>> go_;
};

std::vector<std::unique_ptr<Tracker>> list_of(std::unique_ptr<Tracker> first, std::unique_ptr<Tracker> second = {}) {
  std::vector<std::unique_ptr<Tracker>> list;
  list.push_back(std::move(first));
  if (second) list.push_back(std::move(second));
  return list;
}

TEST(TrackerQueue, WhatFailsIsTriedAgainInOrder) {
  Seen seen;
  TrackerQueue queue(list_of(std::make_unique<Recorder>(seen, 3)), {}, quick());
  for (int64_t step = 1; step <= 4; ++step) queue.log(step, {{"x", 1}});
  queue.end(true);
  EXPECT_THAT(seen.steps, ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(seen.begun, 1);
  EXPECT_EQ(seen.ended, 1);
  EXPECT_TRUE(seen.succeeded);
}

TEST(TrackerQueue, ARunThatThrewIsNoSuccess) {
  Seen seen;
  { TrackerQueue queue(list_of(std::make_unique<Recorder>(seen, 0)), {}, quick()); }
  EXPECT_EQ(seen.ended, 1);
  EXPECT_FALSE(seen.succeeded);
}

TEST(TrackerQueue, OneThatHangsHoldsUpNeitherTheCallerNorTheOthers) {
  Seen seen;
  const auto go = std::make_shared<std::atomic<bool>>(false);
  TrackerQueueOptions options = quick();
  options.end_timeout = Milliseconds(100);
  options.most_waiting = 3;
  TrackerQueue queue(list_of(std::make_unique<Stuck>(go), std::make_unique<Recorder>(seen, 0)), {}, options);
  for (int64_t step = 1; step <= 3; ++step) queue.log(step, {{"x", 1}});
  const auto wait_for = [&](size_t steps) {
    const auto recorded = [&] {
      const std::lock_guard lock(seen.mutex);
      return seen.steps.size();
    };
    for (int tries = 0; tries < 60000 && recorded() < steps; ++tries) std::this_thread::sleep_for(Milliseconds(1));
  };
  wait_for(3);
  queue.log(4, {{"x", 1}});  // the stuck one's oldest goes
  wait_for(4);
  queue.end(true);  // returns although one never ends
  *go = true;
  const std::lock_guard lock(seen.mutex);
  EXPECT_THAT(seen.steps, ElementsAre(1, 2, 3, 4));
}

// What a tracking server is asked, with the answers of MLflow's REST API.
class FakeMlflow final {
 public:
  FakeMlflow() {
    server_.Get("/api/2.0/mlflow/experiments/get-by-name",
                [this](const httplib::Request& request, httplib::Response& r) {
                  note("get " + request.get_param_value("experiment_name"));
                  r.status = 404;
                  r.set_content("{\"error_code\": \"RESOURCE_DOES_NOT_EXIST\"}", "application/json");
                });
    server_.Post(R"(/api/2.0/mlflow/(.+))", [this](const httplib::Request& request, httplib::Response& r) {
      authorization = request.get_header_value("Authorization");
      const std::string path = request.matches[1];
      if (refuse > 0) {
        --refuse;
        r.status = 503;
        return;
      }
      const auto body = nlohmann::json::parse(request.body);
      nlohmann::json answer = nlohmann::json::object();
      if (path == "experiments/create") answer = {{"experiment_id", "12"}};
      if (path == "runs/create") {
        EXPECT_EQ(body["experiment_id"], "12");
        answer = {{"run", {{"info", {{"run_id", "r1"}}}}}};
      }
      note(path + (body.contains("status") ? " " + body["status"].get<std::string>() : ""));
      const std::lock_guard lock(mutex_);
      for (const auto& metric : body.value("metrics", nlohmann::json::array()))
        metrics[metric["key"]][metric["step"]] = metric["value"];
      for (const auto& param : body.value("params", nlohmann::json::array())) params[param["key"]] = param["value"];
      r.set_content(answer.dump(), "application/json");
    });
    port_ = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::sleep_for(Milliseconds(1));
  }
  ~FakeMlflow() {
    server_.stop();
    thread_.join();
  }
  MlflowOptions options(const std::filesystem::path& folder) const {
    MlflowOptions options;
    options.tracking_uri = "http://127.0.0.1:" + std::to_string(port_) + "/";
    options.experiment_name = "sums & more";
    options.run_name = "first";
    options.state_file = folder / "mlflow_run.json";
    options.token = "secret";
    return options;
  }
  std::vector<std::string> calls() {
    const std::lock_guard lock(mutex_);
    return calls_;
  }

  std::map<std::string, std::map<int64_t, double>> metrics;
  std::map<std::string, std::string> params;
  std::string authorization;
  std::atomic<int> refuse{0};

 private:
  void note(const std::string& call) {
    const std::lock_guard lock(mutex_);
    calls_.push_back(call);
  }

  httplib::Server server_;
  int port_ = 0;
  std::thread thread_;
  std::mutex mutex_;
  std::vector<std::string> calls_;
};

TEST(Mlflow, ARunIsCreatedFilledAndEnded) {
  FakeMlflow server;
  TemporaryDirectory folder;
  nlohmann::json config = {{"policy", {{"model_name", "m"}, {"lr", 0.5}}}};
  for (int k = 0; k < 150; ++k) config["many"]["k" + std::to_string(k)] = k;  // over two requests
  server.refuse = 2;  // an outage at the beginning costs nothing
  {
    TrackerQueue queue(list_of(make_mlflow(server.options(folder.path()))), {config, 0}, quick());
    queue.log(1, {{"train/reward", 0.5}});
    queue.log(2, {{"train/reward", 0.75}});
    queue.end(true);
  }
  EXPECT_EQ(server.metrics["train/reward"], (std::map<int64_t, double>{{1, 0.5}, {2, 0.75}}));
  EXPECT_EQ(server.params["policy.model_name"], "m");
  EXPECT_EQ(server.params["policy.lr"], "0.5");
  EXPECT_EQ(server.params.size(), 152U);
  EXPECT_EQ(server.authorization, "Bearer secret");
  EXPECT_EQ(server.calls().front(), "get sums & more");
  EXPECT_EQ(server.calls().back(), "runs/update FINISHED");
}

TEST(Mlflow, AResumedRunGoesOnInTheSameRun) {
  FakeMlflow server;
  TemporaryDirectory folder;
  { TrackerQueue queue(list_of(make_mlflow(server.options(folder.path()))), {{}, 0}, quick()); }
  TrackerQueue queue(list_of(make_mlflow(server.options(folder.path()))), {{}, 5}, quick());
  queue.log(6, {{"x", 1}});
  queue.end(true);
  int created = 0;
  for (const std::string& call : server.calls()) created += call == "runs/create";
  EXPECT_EQ(created, 1);
  EXPECT_THAT(server.calls(), testing::Contains("runs/update FAILED"));
  EXPECT_THAT(server.calls(), testing::Contains("runs/update RUNNING"));
}

TEST(Mlflow, AddressesThatAreNoneAreRefused) {
  const auto refusal = [](const std::string& uri) -> std::string {
    MlflowOptions options;
    options.tracking_uri = uri;
    try {
      make_mlflow(options);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUser);
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(refusal(""), HasSubstr("MLFLOW_TRACKING_URI"));
  EXPECT_THAT(refusal("mlruns"), HasSubstr("'mlruns' is not http"));
  EXPECT_THAT(refusal("http://me:word@host"), HasSubstr("MLFLOW_TRACKING_PASSWORD"));
}

}  // namespace
}  // namespace trireme
