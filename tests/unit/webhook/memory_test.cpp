// How much memory the operator holds while many jobs are made: by hand (JOBS, 2000 by default), the API server in a
// process of its own:
//   TRIREME_JOBS=2000 build/operator/tests/webhook_test --gtest_also_run_disabled_tests --gtest_filter='Memory.*'
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <cstdlib>
#include <fstream>

#include "operator/cli/operator.h"
#include "tests/unit/kube/fake_apiserver.h"

namespace trireme::cli {
namespace {

using kube::testing::FakeApiServer;
using nlohmann::json;
namespace resources = kube::resources;

double status_mib(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key + ":", 0) == 0) return std::atof(line.c_str() + key.size() + 1) / 1024;
  }
  return 0;
}

json crd_that_knows_everything() {
  json properties = {{"spec", {{"properties", json::object()}}}, {"status", {{"properties", json::object()}}}};
  json crd = {{"metadata", {{"name", "rljobs.trireme.dev"}}}};
  const auto set = [&] {
    crd["spec"]["versions"] =
        json::array({{{"name", "v1alpha1"}, {"schema", {{"openAPIV3Schema", {{"properties", properties}}}}}}});
  };
  set();
  for (const std::string& path : missing_crd_fields(crd)) {
    const size_t dot = path.find('.');
    properties[path.substr(0, dot)]["properties"][path.substr(dot + 1)] = {{"type", "object"}};
  }
  set();
  return crd;
}

// The cluster: makes jobs one after another, and its kubelets run every pod.
[[noreturn]] void be_the_cluster(int jobs, int to_parent, int from_parent) {
  FakeApiServer server;
  server.put(resources::kCustomResourceDefinitions, crd_that_knows_everything());
  const int port = server.port();
  if (::write(to_parent, &port, sizeof port) != sizeof port) ::_exit(1);
  char go = 0;
  if (::read(from_parent, &go, 1) != 1) ::_exit(1);
  const json spec = json::parse(R"({"model":{"source":"/m"},"config":{"path":"c.yaml"},)"
                                R"("roles":{"actor":{"replicas":2,"template":{"spec":{"containers":[
         {"name":"trainer","resources":{"requests":{"cpu":"100m"}}}]}}}}})");
  const auto run_pods = [&] {
    for (const json& pod : server.list(resources::kPods)) {
      if (pod.value("status", json::object()).value("phase", "") == "Running") continue;
      server.modify(resources::kPods, {"team", pod["metadata"]["name"]}, [](json& p) {
        p["spec"]["nodeName"] = "node";
        p["status"] = {{"phase", "Running"}, {"conditions", json::array({{{"type", "Ready"}, {"status", "True"}}})}};
      });
    }
  };
  for (int i = 0; i < jobs; ++i) {
    server.put(resources::kRlJobs, {{"apiVersion", "trireme.dev/v1alpha1"},
                                    {"kind", "RLJob"},
                                    {"metadata", {{"namespace", "team"}, {"name", "job-" + std::to_string(i)}}},
                                    {"spec", spec}});
    if (i % 100 == 99) run_pods();
  }
  const Deadline deadline = Deadline::after(Milliseconds(900000));
  const auto running = [&] {
    size_t count = 0;
    for (const json& job : server.list(resources::kRlJobs)) {
      count += job.value("status", json::object()).value("phase", "") == "Running";
    }
    return count == static_cast<size_t>(jobs);
  };
  while (!running() && !deadline.passed()) {
    run_pods();
    std::this_thread::sleep_for(Milliseconds(500));
  }
  const char done = running() ? 'y' : 'n';
  if (::write(to_parent, &done, 1) != 1) ::_exit(1);
  [[maybe_unused]] const ssize_t end = ::read(from_parent, &go, 1);  // until the parent has gone
  ::_exit(0);
}

TEST(Memory, DISABLED_WhileManyJobsAreMade) {
  const char* asked = std::getenv("TRIREME_JOBS");
  const int jobs = asked ? std::atoi(asked) : 2000;
  mallopt(M_ARENA_MAX, 2);  // as main does
  for (const size_t trim_above : {size_t{1} << 40, OperatorOptions().trim_above_bytes}) {
    std::fflush(nullptr);
    const pid_t measured = ::fork();  // a fresh heap for each
    if (measured == 0) {
      int down[2], up[2];
      if (::pipe(down) != 0 || ::pipe(up) != 0) ::_exit(1);
      if (::fork() == 0) {
        ::close(down[1]);  // else it would wait for its own end
        ::close(up[0]);
        be_the_cluster(jobs, up[1], down[0]);
      }
      int port = 0;
      if (::read(up[0], &port, sizeof port) != sizeof port) ::_exit(1);
      kube::ClientConfig config;
      config.scheme = "http";
      config.host = "127.0.0.1";
      config.port = port;
      OperatorOptions options;
      options.address = "127.0.0.1";
      options.metrics_port = options.health_port = options.status_port = options.webhook_port = -1;
      options.leader_elect = options.watch_nodes = false;
      options.trim_above_bytes = trim_above;
      options.log.level = LogLevel::kWarn;
      log_setup(options.log);
      Operator op(config, options);
      std::atomic<bool> stop{false};
      std::thread thread([&] { op.run(stop); });
      while (!op.leading()) std::this_thread::sleep_for(Milliseconds(10));
      const double before = status_mib("VmRSS");
      char done = 'g';
      if (::write(down[1], &done, 1) != 1 || ::read(up[0], &done, 1) != 1) ::_exit(1);
      const struct mallinfo2 heap = mallinfo2();
      std::printf(
          "%d jobs, freed memory back above %.0f MiB: resident %.1f MiB before, %.1f at the most, %.1f after; "
          "heap in use %.1f, free %.1f; all ran: %c\n",
          jobs, static_cast<double>(trim_above) / (1 << 20), before, status_mib("VmHWM"), status_mib("VmRSS"),
          static_cast<double>(heap.uordblks) / (1 << 20), static_cast<double>(heap.fordblks) / (1 << 20), done);
      std::fflush(nullptr);
      stop = true;
      thread.join();
      ::_exit(done == 'y' ? 0 : 1);
    }
    int status = 0;
    ::waitpid(measured, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

}  // namespace
}  // namespace trireme::cli
