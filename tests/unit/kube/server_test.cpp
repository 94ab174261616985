// HttpServer, HealthChecks and EventRecorder.
#include <gtest/gtest.h>

#include <thread>

#include "base/error.h"
#include "operator/kube/client.h"
#include "operator/kube/events.h"
#include "operator/kube/http_server.h"
#include "operator/kube/metrics.h"
#include "tests/unit/kube/fake_apiserver.h"

namespace trireme::kube {
namespace {

using testing::eventually;
using testing::FakeApiServer;
using testing::Json;

const Deadline kLong() { return Deadline::after(Milliseconds(60000)); }

ClientConfig config_for(const HttpServer& server, const std::string& ca_pem = "") {
  ClientConfig config;
  config.scheme = ca_pem.empty() ? "http" : "https";
  config.host = "127.0.0.1";
  config.port = server.port();
  config.ca_pem = ca_pem;
  return config;
}

HttpServerOptions local() {
  HttpServerOptions options;
  options.address = "127.0.0.1";
  options.keep_alive = Milliseconds(1000);
  return options;
}

RawResponse ask(const ClientConfig& config, const std::string& method, const std::string& path,
                const std::string& body = "") {
  return Client(config).raw({method, path, body, "application/json", "test"}, kLong());
}

TEST(HttpServer, RoutesParametersAndFailures) {
  HttpServer server(local());
  server.handle("POST", "/v1/namespaces/{ns}/jobs/{name}/status", [](const HttpRequest& r) {
    return HttpResponse{201,
                        r.parameters.at("ns") + "|" + r.parameters.at("name") + "|" + r.query.at("q") + "|" +
                            r.headers.at("content-type") + "|" + r.body,
                        "text/plain",
                        {{"X-Extra", "1"}}};
  });
  server.handle("GET", "/a.b", [](const HttpRequest&) -> HttpResponse { throw std::runtime_error("secret detail"); });
  server.start();
  const ClientConfig config = config_for(server);
  RawResponse r = ask(config, "POST", "/v1/namespaces/n1/jobs/j%201/status?q=x", "body");
  EXPECT_EQ(r.status, 201);
  EXPECT_EQ(r.body, "n1|j 1|x|application/json|body");
  EXPECT_EQ(ask(config, "POST", "/v1/namespaces/n1/jobs/a/b/status?q=x", "b").status, 404);
  r = ask(config, "GET", "/a.b");
  EXPECT_EQ(r.status, 500);
  EXPECT_EQ(r.body.find("secret"), std::string::npos);
  EXPECT_EQ(ask(config, "GET", "/axb").status, 404);
}

TEST(HttpServer, ContentInPieces) {
  HttpServer server(local());
  server.handle("GET", "/pieces", [](const HttpRequest&) {
    HttpResponse response;
    response.stream = [](const HttpWrite& write) {
      for (int i = 0; i < 1000 && write(std::string(997, static_cast<char>('a' + i % 26))); ++i) write("");
    };
    return response;
  });
  server.handle("GET", "/broken", [](const HttpRequest&) {
    HttpResponse response;
    response.stream = [](const HttpWrite& write) {
      write("half");
      throw std::runtime_error("no more");
    };
    return response;
  });
  server.start();
  const ClientConfig config = config_for(server);
  const RawResponse r = ask(config, "GET", "/pieces");
  EXPECT_EQ(r.status, 200);
  ASSERT_EQ(r.body.size(), 997'000u);
  EXPECT_EQ(r.body[0], 'a');
  EXPECT_EQ(r.body[997 * 27], 'b');
  EXPECT_ANY_THROW(ask(config, "GET", "/broken"));  // not taken for all of it
  EXPECT_EQ(ask(config, "GET", "/pieces").body.size(), 997'000u);
}

TEST(HttpServer, BodyLimitManyConnectionsTakenPort) {
  HttpServerOptions options = local();
  options.max_body_bytes = 1000;
  options.max_threads = 4;
  HttpServer server(options);
  server.handle("POST", "/", [](const HttpRequest& r) { return HttpResponse{200, std::to_string(r.body.size())}; });
  server.start();
  const ClientConfig config = config_for(server);
  EXPECT_EQ(ask(config, "POST", "/", std::string(1000, 'x')).body, "1000");
  EXPECT_EQ(ask(config, "POST", "/", std::string(1001, 'x')).status, 413);
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int i = 0; i < 30; ++i) {
    threads.emplace_back([&] { good += ask(config, "POST", "/", "abc").body == "3"; });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 30);
  options.port = server.port();
  HttpServer second(options);
  second.handle("GET", "/", [](const HttpRequest&) { return HttpResponse{}; });
  server.stop();
  EXPECT_NO_THROW(second.start());
  HttpServerOptions bad = local();
  bad.address = "203.0.113.77";  // not ours
  EXPECT_THROW(HttpServer(bad).start(), Error);
}

TEST(HttpServer, CertificatesAreSwappedLive) {
  const KeyPair ca = make_ca("a");
  const KeyPair new_ca = make_ca("b");
  LeafOptions leaf;
  leaf.common_name = "webhook";
  leaf.ip_addresses = {"127.0.0.1"};
  HttpServerOptions options = local();
  options.tls = issue_certificate(ca, leaf);
  HttpServer server(options);
  server.handle("GET", "/", [](const HttpRequest&) { return HttpResponse{200, "hello"}; });
  server.start();
  EXPECT_EQ(ask(config_for(server, ca.cert_pem), "GET", "/").body, "hello");
  EXPECT_THROW(ask(config_for(server, new_ca.cert_pem), "GET", "/"), ApiError);
  EXPECT_THROW(server.set_certificate({"junk", "junk"}), Error);
  EXPECT_EQ(ask(config_for(server, ca.cert_pem), "GET", "/").body, "hello");
  server.set_certificate(issue_certificate(new_ca, leaf));
  EXPECT_EQ(ask(config_for(server, new_ca.cert_pem), "GET", "/").body, "hello");
  EXPECT_THROW(ask(config_for(server, ca.cert_pem), "GET", "/"), ApiError);
}

TEST(HttpServer, StopBeforeAndTwiceAreHarmless) {
  HttpServer never(local());
  never.stop();
  HttpServer server(local());
  server.start();
  server.stop();
  server.stop();
}

TEST(HealthChecks, AndMetrics) {
  Metrics metrics;
  HealthChecks health;
  std::atomic<bool> synced{false};
  health.add_liveness("workers", [] { return std::nullopt; });
  health.add_readiness("informers", [&]() -> std::optional<std::string> {
    if (synced) return std::nullopt;
    return "pods are not listed yet";
  });
  HttpServer server(local());
  health.install(server);
  install_metrics(server, metrics);
  server.start();
  const ClientConfig config = config_for(server);
  EXPECT_EQ(ask(config, "GET", "/healthz").body, "ok\n");
  RawResponse r = ask(config, "GET", "/readyz");
  EXPECT_EQ(r.status, 500);
  EXPECT_EQ(r.body, "[-]informers failed: pods are not listed yet\n");
  synced = true;
  EXPECT_EQ(ask(config, "GET", "/readyz?verbose").body, "[+]informers ok\n");
  metrics.counter("x_total", "help").Increment();
  EXPECT_NE(ask(config, "GET", "/metrics").body.find("# TYPE x_total counter\nx_total 1"), std::string::npos);
}

ObjectReference job_reference(const std::string& name = "job") {
  return {"trireme.dev/v1alpha1", "RLJob", "ns", name, "uid-" + name};
}

TEST(EventRecorder, SendsAndCountsRepeats) {
  FakeApiServer server;
  Client client(server.config());
  EventRecorder recorder(client, {.instance = "pod-1"});
  recorder.event(job_reference(), EventType::kNormal, "Started", "attempt 1");
  ASSERT_TRUE(recorder.flush(kLong()));
  for (int i = 0; i < 3; ++i) recorder.event(job_reference(), EventType::kNormal, "Started", "attempt 1");
  recorder.event(job_reference(), EventType::kWarning, "Failed", std::string(2000, 'x') + "\xc3\xa9");
  recorder.event({"v1", "Node", "", "node-1", "u"}, EventType::kWarning, "Lost", "gone");
  ASSERT_TRUE(recorder.flush(kLong()));
  const auto events = server.list(resources::kEvents);
  ASSERT_EQ(events.size(), 3u);
  std::map<std::string, Json> by_reason;
  for (const Json& event : events) by_reason[event["reason"]] = event;
  const Json& started = by_reason["Started"];
  EXPECT_EQ(started["count"], 4);
  EXPECT_EQ(started["type"], "Normal");
  EXPECT_EQ(started["involvedObject"]["uid"], "uid-job");
  EXPECT_EQ(started["source"]["component"], "trireme-operator");
  EXPECT_EQ(started["reportingInstance"], "pod-1");
  EXPECT_TRUE(parse_time(started["lastTimestamp"].get<std::string>()));
  EXPECT_EQ(by_reason["Failed"]["message"].get<std::string>().size(), 1024u);
  EXPECT_EQ(by_reason["Lost"]["metadata"]["namespace"], "default");
  // An Event that the server forgot becomes a new one.
  server.erase(resources::kEvents, {"ns", started["metadata"]["name"]});
  recorder.event(job_reference(), EventType::kNormal, "Started", "attempt 1");
  ASSERT_TRUE(recorder.flush(kLong()));
  EXPECT_EQ(server.list(resources::kEvents, "ns").size(), 2u);
}

TEST(EventRecorder, FloodsAreDroppedAndFaultsDoNotStopIt) {
  FakeApiServer server;
  Client client(server.config());
  Metrics metrics;
  EventRecorderOptions options;
  options.burst_per_object = 5;
  options.metrics = &metrics;
  EventRecorder recorder(client, options);
  for (int i = 0; i < 50; ++i) recorder.event(job_reference(), EventType::kNormal, "Noise", std::to_string(i));
  recorder.event(job_reference("other"), EventType::kNormal, "Quiet", "x");
  ASSERT_TRUE(recorder.flush(kLong()));
  EXPECT_EQ(server.list(resources::kEvents).size(), 6u);
  EXPECT_EQ(recorder.dropped(), 45);
  EXPECT_NE(metrics.text().find("trireme_events_dropped_total 45"), std::string::npos);
  server.inject({.method = "POST", .status = 403});  // refused: given up
  server.inject({.method = "POST", .path_part = "", .status = 503});
  recorder.event(job_reference("third"), EventType::kNormal, "A", "x");
  recorder.event(job_reference("third"), EventType::kNormal, "B", "x");  // 503, then sent
  ASSERT_TRUE(recorder.flush(kLong()));
  EXPECT_EQ(server.list(resources::kEvents).size(), 7u);
  server.inject({.method = "POST", .status = 503, .times = -1});
  recorder.event(job_reference("fourth"), EventType::kNormal, "C", "x");
  recorder.stop();  // does not wait for a server that is ill
  recorder.event(job_reference("fourth"), EventType::kNormal, "D", "x");
}

}  // namespace
}  // namespace trireme::kube
