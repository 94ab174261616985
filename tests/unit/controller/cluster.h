// A reconciler against the fake apiserver, with a thread that plays scheduler, kubelets and trainers and watches that
// no two attempts of a job are ever alive at once.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "api/runtime.h"
#include "operator/controller/reconciler.h"
#include "tests/unit/kube/fake_apiserver.h"

namespace trireme::controller::testing {

using kube::ObjectKey;
using kube::testing::eventually;
using kube::testing::FakeApiServer;
namespace resources = kube::resources;

inline ReconcilerOptions fast_options() {
  ReconcilerOptions o;
  o.workers = 2;
  o.write_threads = 4;
  o.status_interval = Milliseconds(20);
  o.progress_interval = Milliseconds(20);
  o.pod_debounce = Milliseconds(2);
  o.pods_a_get = 0;  // live looks by name even among few pods
  o.queue_backoff_max = Milliseconds(200);
  o.reflector.backoff_min = Milliseconds(5);
  o.reflector.backoff_max = Milliseconds(100);
  o.plan.settle = Milliseconds(20);
  o.plan.cause_wait = Milliseconds(200);
  o.plan.fresh_heartbeat = Milliseconds(100);
  o.plan.start_grace = Milliseconds(300);
  o.plan.objects.status_url = "http://status:8090";
  o.plan.objects.network_policies = true;
  o.unknown_node = Milliseconds(50);
  o.node_answer = Milliseconds(20);
  o.refusal_min = Milliseconds(20);
  o.refusal_max = Milliseconds(100);
  o.least_silence = Milliseconds(100);
  o.plan.backoff_base = Milliseconds(10);
  o.plan.release_backoff = Milliseconds(10);
  o.plan.completion_grace = Milliseconds(2000);
  return o;
}

inline Json job_object(const std::string& name, const std::string& more_spec = "") {
  const RLJob job = parse_rljob(
      "apiVersion: trireme.dev/v1alpha1\nkind: RLJob\nmetadata: {name: " + name +
          ", namespace: team}\nspec:\n  model: {source: /models/tiny}\n  config: {path: configs/quickstart.yaml}\n"
          "  roles: {actor: {replicas: 2}}\n" +
          more_spec,
      "test");
  return to_json(job);
}

class Cluster final {
 public:
  Cluster() : server({.graceful_pods = true}), client(server.config(), {.qps = 0}) {
    for (int i = 0; i < 3; ++i) put_node(i, true);
    world_ = std::thread([this] { live(); });
  }
  ~Cluster() {
    stop_operator();
    stopping_ = true;
    world_.join();
  }

  void put_node(int i, bool ready) {
    server.put(
        resources::kNodes,
        {{"metadata", {{"name", "node-" + std::to_string(i)}}},
         {"status", {{"conditions", Json::array({{{"type", "Ready"}, {"status", ready ? "True" : "Unknown"}}})}}}});
  }
  ObjectKey add_job(const std::string& name, const std::string& more_spec = "") {
    server.put(resources::kRlJobs, job_object(name, more_spec));
    return {"team", name};
  }
  // What the next operators may write: after that many writes they are as good as dead. < 0: no limit.
  void start_operator(int writes = -1, ReconcilerOptions options = fast_options()) {
    auto left = std::make_shared<std::atomic<int>>(writes);
    options.metrics = &metrics;
    if (writes >= 0) options.may_write = [left] { return left->fetch_sub(1) > 0; };
    budget_ = writes < 0 ? nullptr : left;
    reports = std::make_unique<ReportStore>(Milliseconds(100));
    op = std::make_unique<Reconciler>(client, std::move(options), *reports);
    op->start_informers();
    if (!op->wait_synced(Deadline::after(Milliseconds(60000)))) throw std::runtime_error("no sync");
    op->start_workers();
    alive_ = true;
  }
  // The writes of a mortal operator are used up.
  bool is_dead() const { return budget_ && budget_->load() < 0; }
  void stop_operator() {
    alive_ = false;
    std::lock_guard lock(operator_mutex_);
    if (op) op->stop();
    op.reset();
    reports.reset();
  }

  Json job(const ObjectKey& key) const { return server.get(resources::kRlJobs, key).value_or(Json()); }
  std::string phase(const ObjectKey& key) const {
    const Json j = job(key);
    return j.is_object() && j.contains("status") ? j["status"].value("phase", "") : "";
  }
  int64_t attempt(const ObjectKey& key) const {
    const Json j = job(key);
    return j.is_object() && j.contains("status") ? j["status"].value("attempt", int64_t{0}) : 0;
  }
  bool wait_phase(const ObjectKey& key, const std::string& wanted) {
    return eventually([&] { return phase(key) == wanted; });
  }
  std::vector<Json> pods() const { return server.list(resources::kPods); }
  size_t alive_pods() const {
    size_t n = 0;
    for (const Json& p : pods()) n += is_alive(p);
    return n;
  }
  // Everything of a job that has ended is gone but its ended pods.
  bool clean() const {
    return alive_pods() == 0 && server.list(resources::kServices).empty() &&
           server.list(resources::kConfigMaps).empty();
  }
  Json policy(const std::string& job) const {
    return server.get(resources::kNetworkPolicies, {"team", network_policy_name(job)}).value_or(Json());
  }
  bool no_policies() const { return server.list(resources::kNetworkPolicies).empty(); }
  // Names of pods that were created more than once.
  std::vector<std::string> created_twice() const {
    std::map<std::string, int> count;
    for (const auto& request : server.requests()) {
      if (request.method == "POST" && request.status == 201 && kube::testing::Json::accept(request.body) &&
          ends_with(request.path, "/pods")) {
        ++count[Json::parse(request.body)["metadata"]["name"].get<std::string>()];
      }
    }
    std::vector<std::string> twice;
    for (const auto& [name, n] : count) {
      if (n > 1) twice.push_back(name);
    }
    return twice;
  }
  std::vector<std::string> violations() const {
    std::lock_guard lock(violations_mutex_);
    return violations_;
  }
  void fail_pod(const std::string& name, int exit_code) {
    server.modify(resources::kPods, {"team", name}, [&](Json& pod) {
      pod["status"]["phase"] = "Failed";
      pod["status"]["containerStatuses"] = Json::array(
          {{{"name", "trainer"},
            {"state", {{"terminated", {{"exitCode", exit_code}, {"reason", "Error"}, {"message", "last words"}}}}}}});
    });
  }

  FakeApiServer server;
  kube::Metrics metrics;
  kube::Client client;
  std::unique_ptr<ReportStore> reports;
  std::unique_ptr<Reconciler> op;
  // What the world does by itself:
  std::atomic<bool> kubelets{true};       // pods get nodes and run; deleted ones go
  std::atomic<bool> trainers{true};       // rank 0 reports once all pods of an attempt run
  std::atomic<bool> trainers_end{false};  // attempts that run succeed
  std::atomic<int> fail_first{0};         // so many attempts fail once they run

 private:
  static std::string phase_of(const Json& pod) {  // a pod that a test puts there may have no status
    return pod.contains("status") ? pod["status"].value("phase", "") : "";
  }
  static bool is_alive(const Json& pod) {
    const std::string p = phase_of(pod);
    return p != "Failed" && p != "Succeeded";
  }

  void live() {
    while (!stopping_) {
      const std::vector<Json> all = pods();
      std::map<std::string, std::map<int64_t, std::vector<Json>>> by_job;
      for (const Json& pod : all) {
        const Json labels = pod["metadata"].value("labels", Json::object());  // a foreign pod may have none
        if (!labels.contains(kLabelJob)) continue;
        by_job[labels[kLabelJob]][std::stoll(labels[kLabelAttempt].get<std::string>())].push_back(pod);
      }
      for (const auto& [job_name, attempts] : by_job) {
        std::set<int64_t> alive;
        for (const auto& [number, members] : attempts) {
          for (const Json& pod : members) {
            if (is_alive(pod)) alive.insert(number);
          }
        }
        if (alive.size() > 1) {
          std::lock_guard lock(violations_mutex_);
          violations_.push_back("two attempts of " + job_name + " are alive");
        }
        if (kubelets) play_kubelet(attempts);
        if (!alive.empty()) play_trainer(job_name, *alive.begin(), attempts.at(*alive.begin()));
      }
      std::this_thread::sleep_for(Milliseconds(3));
    }
  }
  void play_kubelet(const std::map<int64_t, std::vector<Json>>& attempts) {
    int n = 0;
    for (const auto& [number, members] : attempts) {
      for (const Json& pod : members) {
        const ObjectKey key{"team", pod["metadata"]["name"]};
        if (pod["metadata"].contains("deletionTimestamp")) {
          server.erase(resources::kPods, key);
        } else if (phase_of(pod) == "Pending") {
          const std::string node = "node-" + std::to_string(n++ % 3);
          server.modify(resources::kPods, key, [&](Json& p) {
            p["spec"]["nodeName"] = node;
            p["status"] = {{"phase", "Running"},
                           {"conditions", Json::array({{{"type", "Ready"}, {"status", "True"}}})}};
          });
        }
      }
    }
  }
  void play_trainer(const std::string& job_name, int64_t number, const std::vector<Json>& members) {
    if (!trainers || members.size() < 2) return;
    for (const Json& pod : members) {
      const bool rank = pod["metadata"]["labels"].value(kLabelRole, "") == "actor";
      if (!rank && phase_of(pod) == "Failed") continue;
      if (phase_of(pod) != "Running" || pod["metadata"].contains("deletionTimestamp")) return;
    }
    const ObjectKey key{"team", job_name};
    const Json object = job(key);
    if (!object.is_object() || !object.contains("status")) return;
    if (alive_) {
      std::lock_guard lock(operator_mutex_);
      if (reports) {
        Report report;
        report.attempt = number;
        report.rendezvous_done = true;
        report.progress.step = ++steps_;
        report.progress.max_steps = 1000;
        report.progress.phase = "training";
        report.progress.reward = 0.5;
        reports->put(key, object["metadata"]["uid"], report);
      }
    }
    if (object["status"].value("phase", "") != phase::kRunning ||
        object["status"].value("attempt", int64_t{0}) != number)
      return;
    if (fail_first > 0) {
      --fail_first;
      fail_pod(pod_name(job_name, "actor", 1, number), 1);
    } else if (trainers_end) {
      for (const Json& pod : members) {
        server.modify(resources::kPods, {"team", pod["metadata"]["name"]}, [](Json& p) {
          p["status"] = {{"phase", "Succeeded"}};
        });
      }
    }
  }

  std::shared_ptr<std::atomic<int>> budget_;
  std::atomic<bool> alive_{false};
  std::mutex operator_mutex_;
  std::atomic<bool> stopping_{false};
  int64_t steps_ = 0;
  mutable std::mutex violations_mutex_;
  std::vector<std::string> violations_;
  std::thread world_;
};

}  // namespace trireme::controller::testing
