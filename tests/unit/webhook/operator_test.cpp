// The whole operator in this process, against the fake apiserver: flags, start, fail-over, end.
#include "operator/cli/operator.h"

#include <gtest/gtest.h>
#include <httplib.h>
#include <yaml-cpp/yaml.h>

#include "base/error.h"
#include "operator/kube/api_error.h"
#include "tests/unit/kube/fake_apiserver.h"

namespace trireme::cli {
namespace {

using kube::testing::eventually;
using kube::testing::FakeApiServer;
using nlohmann::json;
namespace resources = kube::resources;

std::string no_environment(const std::string&) { return {}; }

TEST(Options, DefaultsFlagsAndEnvironment) {
  ParsedOptions p = parse_options({}, no_environment);
  EXPECT_FALSE(p.exit) << p.message;
  EXPECT_TRUE(p.options.leader_elect);
  EXPECT_EQ(p.options.metrics_port, 8080);
  EXPECT_TRUE(p.options.network_policies);
  EXPECT_TRUE(p.options.do_not_disrupt);
  EXPECT_NE(p.options.scraped_by.find("monitoring"), std::string::npos);
  p = parse_options({"--no-leader-elect", "--workers=3", "--namespace", "team", "--log-format", "json"},
                    [](const std::string& name) {
                      if (name == "TRIREME_OPERATOR_WORKERS") return std::string("5");
                      if (name == "TRIREME_OPERATOR_QPS") return std::string("50");
                      return std::string(name == "POD_NAMESPACE" ? "ops" : "");
                    });
  EXPECT_FALSE(p.exit) << p.message;
  EXPECT_FALSE(p.options.leader_elect);
  EXPECT_EQ(p.options.workers, 3) << "the command line wins";
  EXPECT_EQ(p.options.qps, 50);
  EXPECT_EQ(p.options.watch_namespace, "team");
  EXPECT_EQ(p.options.operator_namespace, "ops");
  EXPECT_EQ(p.options.log.format, LogFormat::kJson);
}

TEST(Options, PeersThatScrape) {
  const std::string peers = R"([{"podSelector":{"matchLabels":{"app":"prometheus"}}}])";
  ParsedOptions p = parse_options({"--scraped-by=" + peers, "--no-do-not-disrupt"}, no_environment);
  EXPECT_FALSE(p.exit) << p.message;
  EXPECT_EQ(p.options.scraped_by, peers);
  EXPECT_FALSE(p.options.do_not_disrupt);
  p = parse_options({"--scraped-by=[]", "--no-network-policies"}, no_environment);
  EXPECT_FALSE(p.exit) << p.message;
  EXPECT_EQ(p.options.scraped_by, "[]");
  EXPECT_FALSE(p.options.network_policies);
  p = parse_options({R"(--scraped-by=[{"podSelector":{"matchLabels":{"a":1}}}])"}, no_environment);
  EXPECT_NE(p.message.find("--scraped-by: peer [0].podSelector.matchLabels.a must be a string"), std::string::npos)
      << p.message;
}

TEST(Options, MistakesAreSaid) {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"--metrics-port=70000"},
                                                    {"--nonsense"},
                                                    {"--log-format=xml"},
                                                    {"--webhook-cert-file=a"},
                                                    {"--scraped-by=monitoring"},
                                                    {R"(--scraped-by=[{"namespace":"monitoring"}])"},
                                                    {"--lease-duration=5", "--renew-deadline=5"}}) {
    const ParsedOptions p = parse_options(arguments, no_environment);
    EXPECT_TRUE(p.exit) << arguments[0];
    EXPECT_NE(p.exit_code, 0);
    EXPECT_FALSE(p.message.empty());
  }
  const ParsedOptions help = parse_options({"--help"}, no_environment);
  EXPECT_TRUE(help.exit);
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_NE(help.message.find("--kubeconfig"), std::string::npos);
}

json crd() {
  // A schema that knows everything, made from what the check asks for.
  json empty = {{"metadata", {{"name", "rljobs.trireme.dev"}}},
                {"spec",
                 {{"versions", json::array({{{"name", "v1alpha1"},
                                             {"schema",
                                              {{"openAPIV3Schema",
                                                {{"properties",
                                                  {{"spec", {{"properties", json::object()}}},
                                                   {"status", {{"properties", json::object()}}}}}}}}}}})}}}};
  for (const std::string& path : missing_crd_fields(empty)) {
    const size_t dot = path.find('.');
    empty["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][path.substr(0, dot)]["properties"]
         [path.substr(dot + 1)] = {{"type", "object"}};
  }
  return empty;
}

TEST(Crd, OutdatedOneIsNoticed) {
  json current = crd();
  EXPECT_TRUE(missing_crd_fields(current).empty());
  current["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"].erase(
      "lastFailure");
  EXPECT_EQ(missing_crd_fields(current), std::vector<std::string>{"status.lastFailure"});
  EXPECT_FALSE(missing_crd_fields(json::object()).empty());
}

json yaml_to_json(const YAML::Node& node) {
  if (node.IsMap()) {
    json out = json::object();
    for (const auto& entry : node) out[entry.first.as<std::string>()] = yaml_to_json(entry.second);
    return out;
  }
  if (node.IsSequence()) {
    json out = json::array();
    for (const auto& entry : node) out.push_back(yaml_to_json(entry));
    return out;
  }
  return node.IsNull() ? json() : json(node.as<std::string>());
}

TEST(Crd, OurOwnIsNewEnough) {
  const char* root = std::getenv("TRIREME_SOURCE_DIR");
  const YAML::Node document = YAML::LoadFile(std::string(root ? root : ".") + "/crds/trireme.dev_rljobs.yaml");
  EXPECT_EQ(missing_crd_fields(yaml_to_json(document)), std::vector<std::string>{});
}

struct Instance {
  std::unique_ptr<Operator> op;
  std::atomic<bool> stop{false};
  std::atomic<int> code{-1};
  std::thread thread;
  std::string error;

  Instance(const FakeApiServer& server, const std::string& name,
           const std::function<void(OperatorOptions&)>& change = {}) {
    OperatorOptions options;
    options.pod_name = name;
    options.address = "127.0.0.1";
    options.metrics_port = options.health_port = options.status_port = options.webhook_port = 0;
    options.workers = 2;
    options.write_threads = 2;
    if (change) change(options);
    op = std::make_unique<Operator>(server.config(), options);
    thread = std::thread([this] {
      try {
        code = op->run(stop);
      } catch (const std::exception& e) {
        error = e.what();
        code = 99;
      }
    });
  }
  ~Instance() { end(); }
  int end() {
    stop = true;
    if (thread.joinable()) thread.join();
    return code;
  }
};

struct Place {
  FakeApiServer server;
  Place() {
    server.put(resources::kCustomResourceDefinitions, crd());
    server.put(resources::kValidatingWebhooks,
               {{"metadata", {{"name", "trireme-validating"}}}, {"webhooks", json::array()}});
    server.put(resources::kMutatingWebhooks,
               {{"metadata", {{"name", "trireme-mutating"}}}, {"webhooks", json::array()}});
  }
  void add_job(const std::string& name) {
    server.put(resources::kRlJobs,
               json::parse(R"({"apiVersion":"trireme.dev/v1alpha1","kind":"RLJob","metadata":{"name":")" + name +
                           R"(","namespace":"team"},"spec":{"model":{"source":"/m"},"config":{"path":"c.yaml"},)"
                           R"("roles":{"actor":{"replicas":2}}}})"));
  }
  size_t pods() const { return server.list(resources::kPods).size(); }
};

int get_status(int port, const std::string& path, std::string* body = nullptr) {
  httplib::Client client("127.0.0.1", port);
  client.set_read_timeout(60, 0);
  const auto result = client.Get(path.c_str());
  if (result && body) *body = result->body;
  return result ? result->status : -1;
}

TEST(Operator, StartsWorksAndEndsGracefully) {
  Place p;
  Instance a(p.server, "op-a");
  ASSERT_TRUE(eventually([&] { return a.op->leading() || a.code >= 0; }));
  ASSERT_EQ(a.code, -1) << a.error;
  p.add_job("quick");
  EXPECT_TRUE(eventually([&] { return p.pods() == 2; }));
  EXPECT_TRUE(eventually([&] { return get_status(a.op->health_port(), "/readyz") == 200; }));
  EXPECT_EQ(get_status(a.op->health_port(), "/healthz"), 200);
  std::string text;
  EXPECT_EQ(get_status(a.op->metrics_port(), "/metrics", &text), 200);
  for (const char* name : {"controller_runtime_reconcile_total", "workqueue_depth", "rest_client_requests_total",
                           "trireme_job_phase", "trireme_informer_objects", "process_resident_memory_bytes",
                           "trireme_crd_outdated 0", "leader_election_master_status"}) {
    EXPECT_NE(text.find(name), std::string::npos) << name;
  }
  EXPECT_TRUE(eventually([&] { return !p.server.list(resources::kEvents, "team").empty(); }));
  EXPECT_EQ(a.end(), 0) << a.error;
  const auto lease = p.server.get(resources::kLeases, {"trireme-system", "trireme-operator"});
  ASSERT_TRUE(lease);
  EXPECT_EQ((*lease)["spec"].value("holderIdentity", ""), "") << "given up at the end";
}

TEST(Operator, StandbyTakesOver) {
  Place p;
  auto a = std::make_unique<Instance>(p.server, "op-a");
  ASSERT_TRUE(eventually([&] { return a->op->leading(); }));
  Instance b(p.server, "op-b");
  ASSERT_TRUE(eventually([&] { return b.op->health_port() > 0 && get_status(b.op->health_port(), "/readyz") == 200; }))
      << "a standby is ready too";
  EXPECT_FALSE(b.op->leading());
  std::string text;
  get_status(b.op->metrics_port(), "/metrics", &text);
  EXPECT_EQ(text.find("trireme_job_phase"), std::string::npos) << "a standby would count every job twice";
  EXPECT_EQ(a->end(), 0);
  ASSERT_TRUE(eventually([&] { return b.op->leading(); }));
  p.add_job("quick");
  EXPECT_TRUE(eventually([&] { return p.pods() == 2; }));
  EXPECT_EQ(b.end(), 0);
}

TEST(Operator, ALostLeaseMakesItAStandbyThatServesOn) {
  Place p;
  Instance a(p.server, "op-a", [](OperatorOptions& o) {
    o.lease_duration_s = 3;
    o.renew_deadline_s = 2;
    o.retry_period_s = 1;
  });
  ASSERT_TRUE(eventually([&] { return a.op->leading(); }));
  p.add_job("before");
  ASSERT_TRUE(eventually([&] { return p.pods() == 2; }));
  ASSERT_TRUE(eventually([&] { return get_status(a.op->health_port(), "/readyz") == 200; }));
  p.server.inject({.path_part = "/leases", .status = 500, .times = -1});
  ASSERT_TRUE(eventually([&] { return !a.op->leading(); }));
  p.add_job("meanwhile");
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(get_status(a.op->health_port(), "/readyz"), 200) << "it would be taken out of the webhook's Service";
    std::this_thread::sleep_for(Milliseconds(50));
  }
  EXPECT_EQ(p.pods(), 2u) << "it does not lead";
  EXPECT_EQ(a.code, -1) << a.error;
  p.server.clear_faults();
  ASSERT_TRUE(eventually([&] { return a.op->leading(); }));
  EXPECT_TRUE(eventually([&] { return p.pods() == 4; })) << "what came meanwhile is found";
  p.add_job("after");
  EXPECT_TRUE(eventually([&] { return p.pods() == 6; }));
  EXPECT_EQ(get_status(a.op->health_port(), "/healthz"), 200);
  EXPECT_EQ(a.end(), 0) << a.error;
}

// Workers that wait for their rate must not keep the lease from being renewed.
TEST(Operator, TheLeaseOutlastsAFloodOfJobs) {
  Place p;
  Instance a(p.server, "op-a", [](OperatorOptions& o) {
    o.lease_duration_s = 6;
    o.renew_deadline_s = 4;
    o.retry_period_s = 1;
    o.workers = o.write_threads = 16;
    o.qps = 5;
    o.burst = 60;
  });
  // A machine that stands still for seconds loses the lease, too, but not every time.
  bool kept = false;
  for (int flood = 0; flood < 5 && !kept; ++flood) {
    ASSERT_TRUE(eventually([&] { return a.op->leading(); })) << a.error;
    for (int i = 0; i < 60; ++i) p.add_job("job" + std::to_string(60 * flood + i));
    kept = !eventually([&] { return !a.op->leading(); }, Milliseconds(6000));
  }
  EXPECT_TRUE(kept) << "its requests waited behind those of the workers";
  // Workers put their jobs down, instead of waiting for their rate.
  p.server.modify(resources::kLeases, {"trireme-system", "trireme-operator"},
                  [](json& lease) { lease["spec"]["holderIdentity"] = "thief"; });
  ASSERT_TRUE(eventually([&] { return !a.op->leading(); }));
  EXPECT_EQ(a.end(), 0) << a.error;
}

// Loses the lease again and again while jobs are made: each gets its pods once.
TEST(Operator, LosesAndTakesTheLeaseManyTimes) {
  Place p;
  Instance a(p.server, "op-a", [](OperatorOptions& o) {
    o.lease_duration_s = 3;
    o.renew_deadline_s = 2;
    o.retry_period_s = 1;
  });
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(eventually([&] { return a.op->leading(); })) << a.error;
    p.add_job("job" + std::to_string(round));
    // A thief takes it, and lets go.
    p.server.modify(resources::kLeases, {"trireme-system", "trireme-operator"}, [](json& lease) {
      lease["spec"]["holderIdentity"] = "thief";
      lease["spec"]["leaseDurationSeconds"] = 1;
    });
    ASSERT_TRUE(eventually([&] { return !a.op->leading(); }));
  }
  EXPECT_TRUE(eventually([&] { return p.pods() == 6; }));
  EXPECT_EQ(a.end(), 0) << a.error;
}

TEST(Operator, AGangSchedulerThatComesLaterIsUsed) {
  Place p;
  Instance a(p.server, "op-a", [](OperatorOptions& o) { o.discovery_interval_s = 1; });
  ASSERT_TRUE(eventually([&] { return a.op->leading(); }));
  const kube::Resource groups{"scheduling.k8s.io", "v1alpha2", "podgroups", "PodGroup", true};
  p.server.serve({"scheduling.k8s.io", "v1alpha2", "workloads", "Workload", true}, false);
  p.server.serve(groups, true);
  // Which of the next looks sees it is open; a job that is made after that has a group.
  int made = 0;
  EXPECT_TRUE(eventually([&] {
    p.add_job("late" + std::to_string(made++));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    return !p.server.list(groups).empty();
  }));
  EXPECT_EQ(a.end(), 0) << a.error;
}

TEST(Operator, MissingCrdIsSaid) {
  FakeApiServer server;
  Instance a(server, "op-a");
  ASSERT_TRUE(eventually([&] { return a.code >= 0; }));
  a.end();
  EXPECT_EQ(a.code, 99);
  EXPECT_NE(a.error.find("kubectl apply"), std::string::npos) << a.error;
}

TEST(Operator, WithoutElectionAndWithoutServers) {
  Place p;
  Instance a(p.server, "op-a", [](OperatorOptions& o) {
    o.leader_elect = false;
    o.metrics_port = o.health_port = o.status_port = o.webhook_port = -1;
  });
  p.add_job("quick");
  EXPECT_TRUE(eventually([&] { return p.pods() == 2; }));
  EXPECT_EQ(a.end(), 0) << a.error;
  EXPECT_TRUE(p.server.list(resources::kLeases).empty());
}

TEST(Discovery, FindsWhatIsServed) {
  FakeApiServer server;
  kube::Client client(server.config());
  EXPECT_TRUE(discover(client).empty());
  server.serve({"scheduling.k8s.io", "v1alpha2", "podgroups", "PodGroup", true}, true);
  server.serve({"scheduling.k8s.io", "v1alpha2", "workloads", "Workload", true}, false);
  const auto found = discover(client);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found.at("scheduling.k8s.io/v1alpha2").size(), 2u);
  server.inject({.path_part = "kueue.x-k8s.io", .status = 503});
  EXPECT_THROW(discover(client), kube::ApiError) << "an API server in trouble is not one without gangs";
}

}  // namespace
}  // namespace trireme::cli
