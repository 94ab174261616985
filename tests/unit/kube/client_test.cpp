#include "operator/kube/client.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"
#include "operator/kube/http_server.h"
#include "operator/kube/metrics.h"
#include "tests/unit/kube/fake_apiserver.h"

namespace trireme::kube {
namespace {

using testing::eventually;
using testing::FakeApiServer;
using testing::Json;

Json config_map(const std::string& name, const std::string& value = "1") {
  return {{"metadata", {{"namespace", "ns"}, {"name", name}}}, {"data", {{"k", value}}}};
}

// The error that fn throws; kInvalid with status -1 when it throws none.
ApiError error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const ApiError& e) {
    return e;
  }
  return ApiError(ApiErrorKind::kInvalid, -1, "", "no error");
}

TEST(Client, CreateReadUpdatePatchDelete) {
  FakeApiServer server;
  Client client(server.config());
  const auto& kind = resources::kConfigMaps;
  const ObjectKey key{"ns", "a"};
  const Json created = client.create(kind, config_map("a"));
  EXPECT_EQ(created["kind"], "ConfigMap");
  EXPECT_EQ(error_of([&] { client.create(kind, config_map("a")); }).kind(), ApiErrorKind::kAlreadyExists);
  EXPECT_EQ(client.get(kind, key), created);
  EXPECT_EQ(client.find(kind, {"ns", "b"}), std::nullopt);
  EXPECT_EQ(error_of([&] { client.get(kind, {"ns", "b"}); }).kind(), ApiErrorKind::kNotFound);

  Json changed = created;
  changed["data"]["k"] = "2";
  const Json updated = client.update(kind, changed);
  EXPECT_EQ(updated["data"]["k"], "2");
  const ApiError stale = error_of([&] { client.update(kind, changed); });
  EXPECT_TRUE(stale.conflict());
  EXPECT_FALSE(stale.retryable());
  EXPECT_EQ(stale.reason(), "Conflict");

  EXPECT_EQ(client.patch(kind, key, {{"data", {{"j", "3"}}}})["data"], (Json{{"j", "3"}, {"k", "2"}}));
  EXPECT_EQ(client.patch(kind, key, Json::parse(R"([{"op":"remove","path":"/data/j"}])"), PatchType::kJson)["data"],
            (Json{{"k", "2"}}));
  const Json with_version{{"metadata", {{"resourceVersion", created["metadata"]["resourceVersion"]}}},
                          {"data", {{"k", "9"}}}};
  EXPECT_TRUE(error_of([&] { client.patch(kind, key, with_version); }).conflict());

  DeleteOptions wrong_uid;
  wrong_uid.uid = "another";
  EXPECT_TRUE(error_of([&] { client.remove(kind, key, wrong_uid); }).conflict());
  DeleteOptions right_uid;
  right_uid.uid = created["metadata"]["uid"].get<std::string>();
  EXPECT_TRUE(client.remove(kind, key, right_uid));
  EXPECT_FALSE(client.remove(kind, key));
  const auto deletions = server.requests();
  EXPECT_EQ(Json::parse(deletions.back().body)["propagationPolicy"], "Background");
}

TEST(Client, PostAsksForNoMoreThanItNeeds) {
  FakeApiServer server;
  Client client(server.config());
  const Deadline deadline = client.default_deadline();
  client.post(resources::kConfigMaps, config_map("a"), deadline);
  EXPECT_EQ(client.get(resources::kConfigMaps, {"ns", "a"})["kind"], "ConfigMap");
  EXPECT_EQ(error_of([&] { client.post(resources::kConfigMaps, config_map("a"), deadline); }).kind(),
            ApiErrorKind::kAlreadyExists);
  std::vector<std::string> accepted;
  for (const auto& request : server.requests()) {
    if (request.method == "POST") accepted.push_back(request.accept);
  }
  ASSERT_EQ(accepted.size(), 2u);
  EXPECT_EQ(accepted[0].find("application/json;as=PartialObjectMetadata"), 0u) << accepted[0];
}

TEST(Client, StatusSubresourceAndApply) {
  FakeApiServer server;
  Client client(server.config());
  Json job{{"metadata", {{"namespace", "ns"}, {"name", "j"}}}, {"spec", {{"x", 1}}}};
  client.create(resources::kRlJobs, job);
  client.patch(resources::kRlJobs, {"ns", "j"}, {{"status", {{"phase", "Running"}}}, {"spec", {{"x", 2}}}},
               PatchType::kMerge, "status");
  Json now = client.get(resources::kRlJobs, {"ns", "j"});
  EXPECT_EQ(now["status"]["phase"], "Running");
  EXPECT_EQ(now["spec"]["x"], 1);
  now["spec"]["x"] = 5;
  now["status"]["phase"] = "Lost";
  now = client.update(resources::kRlJobs, now);
  EXPECT_EQ(now["status"]["phase"], "Running");
  EXPECT_EQ(now["metadata"]["generation"], 2);
}

TEST(Client, MistakesOfTheCallerAreNotSent) {
  FakeApiServer server;
  Client client(server.config());
  EXPECT_THROW(client.create(resources::kPods, {{"metadata", {{"name", "a"}}}}), Error);
  EXPECT_THROW(client.create(resources::kPods, Json::array()), Error);
  EXPECT_THROW(client.get(resources::kPods, {"", "a"}), Error);
  EXPECT_TRUE(server.requests().empty());
}

TEST(Client, ListsInPagesAndStreamsItems) {
  FakeApiServer server;
  Client client(server.config());
  for (int i = 0; i < 25; ++i) {
    Json object = config_map("m" + std::to_string(i));
    object["metadata"]["labels"] = {{"parity", i % 2 == 0 ? "even" : "odd"}};
    server.put(resources::kConfigMaps, object);
  }
  ListOptions options;
  options.page_limit = 4;
  EXPECT_EQ(client.list(resources::kConfigMaps, "ns", options).size(), 25u);
  EXPECT_EQ(server.count("GET", "limit=4"), 7);
  EXPECT_TRUE(client.list(resources::kConfigMaps, "other", options).empty());
  options.label_selector = "parity in (odd),parity!=x";
  std::set<std::string> names;
  const std::string version = client.list_each(
      resources::kConfigMaps, "", options,
      [&](std::string_view item) { names.insert(Json::parse(item)["metadata"]["name"]); }, client.default_deadline());
  EXPECT_EQ(names.size(), 12u);
  EXPECT_EQ(version, std::to_string(server.resource_version()));

  // An exception of the callback comes out here, and the client stays usable.
  EXPECT_THROW(client.list_each(
                   resources::kConfigMaps, "", {}, [](std::string_view) { throw std::runtime_error("mine"); },
                   client.default_deadline()),
               std::runtime_error);
  EXPECT_EQ(client.list(resources::kConfigMaps, "ns").size(), 25u);
}

// A server that sends a byte of the header now and then, for ever.
class DrippingServer final {
 public:
  DrippingServer() {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    ::bind(listener_, reinterpret_cast<sockaddr*>(&address), length);
    ::listen(listener_, 4);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] {
      const int peer = ::accept(listener_, nullptr, nullptr);
      const std::string begin = "HTTP/1.1 200 OK\r\nX-Slow: ";
      if (peer < 0 || ::send(peer, begin.data(), begin.size(), MSG_NOSIGNAL) < 0) return;
      while (!stop_ && ::send(peer, "a", 1, MSG_NOSIGNAL) == 1) std::this_thread::sleep_for(Milliseconds(20));
      ::close(peer);
    });
  }
  ~DrippingServer() {
    stop_ = true;
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    ::close(listener_);
  }
  int port() const { return port_; }

 private:
  int listener_ = -1;
  int port_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

TEST(Client, ADrippedHeaderDoesNotOutliveTheDeadline) {
  DrippingServer server;
  ClientConfig config;
  config.scheme = "http";
  config.host = "127.0.0.1";
  config.port = server.port();
  const Client client(config);
  const ApiError e = error_of([&] { client.get(resources::kPods, {"ns", "p"}, Deadline::after(Milliseconds(300))); });
  EXPECT_EQ(e.kind(), ApiErrorKind::kTimeout) << e.what();
}

TEST(Client, ErrorsAreTyped) {
  FakeApiServer server;
  Client client(server.config());
  const auto get = [&] { client.get(resources::kPods, {"ns", "a"}); };
  server.inject({.status = 429, .reason = "TooManyRequests", .retry_after_s = 7});
  ApiError e = error_of(get);
  EXPECT_EQ(e.kind(), ApiErrorKind::kUnavailable);
  EXPECT_EQ(e.status(), 429);
  EXPECT_EQ(e.retry_after(), Milliseconds(7000));
  EXPECT_TRUE(e.retryable());
  const std::vector<std::pair<int, ApiErrorKind>> table{
      {400, ApiErrorKind::kInvalid},    {401, ApiErrorKind::kForbidden}, {403, ApiErrorKind::kForbidden},
      {410, ApiErrorKind::kGone},       {422, ApiErrorKind::kInvalid},   {500, ApiErrorKind::kUnavailable},
      {503, ApiErrorKind::kUnavailable}};
  for (const auto& [status, kind] : table) {
    server.inject({.status = status});
    e = error_of(get);
    EXPECT_EQ(e.kind(), kind) << status;
    EXPECT_NE(std::string(e.what()).find("get pods ns/a"), std::string::npos) << e.what();
  }
  // An answer that is cut is not known to have failed: no second request by itself.
  server.clear_requests();
  server.inject({.method = "POST", .apply_first = true, .cut = true});
  EXPECT_EQ(error_of([&] { client.create(resources::kConfigMaps, config_map("cut")); }).kind(),
            ApiErrorKind::kUnavailable);
  EXPECT_EQ(server.count("POST", ""), 1);
  EXPECT_EQ(error_of([&] { client.create(resources::kConfigMaps, config_map("cut")); }).kind(),
            ApiErrorKind::kAlreadyExists);
}

TEST(ApiErrors, AStrangersAnswerIsBoundedAndValid) {
  const auto what = [](const std::string& body) {
    return std::string(ApiError::from_response("get x", 502, body, std::nullopt).what());
  };
  const std::string hostile = what("\xFF\xFE<html>\n" + std::string(185, 'x') + "\xE2\x82\xAC and more");
  EXPECT_TRUE(is_valid_utf8(hostile)) << "the status that it goes into would never be written";
  EXPECT_EQ(hostile.find('\n'), std::string::npos);
  EXPECT_LE(hostile.size(), 240u);
  const std::string cut = what(std::string(199, 'x') + "\xC3\xA9");
  EXPECT_TRUE(is_valid_utf8(cut));
  const nlohmann::json status = {{"kind", "Status"}, {"reason", std::string(5000, 'r')}, {"message", "no\nroom"}};
  EXPECT_EQ(what(status.dump()), "get x: HTTP 502: no room");
  EXPECT_LE(ApiError::from_response("get x", 502, status.dump(), std::nullopt).reason().size(), 100u);
  EXPECT_LE(what(nlohmann::json{{"message", std::string(100000, 'm')}}.dump()).size(), 1100u);
}

TEST(Client, AnAnswerThatIsNoJsonIsToldOnOneLine) {
  HttpServerOptions options;
  options.address = "127.0.0.1";
  HttpServer proxy(options);
  proxy.handle("GET", "/api/v1/namespaces/ns/pods/a", [](const HttpRequest&) {
    return HttpResponse{200, "<html>\n\xFF"};
  });
  proxy.start();
  ClientConfig config;
  config.scheme = "http";
  config.host = "127.0.0.1";
  config.port = proxy.port();
  const ApiError e = error_of([&] { Client(config).get(resources::kPods, {"ns", "a"}); });
  EXPECT_EQ(std::string(e.what()), "get pods ns/a: the answer is not JSON: <html> ?");
}

TEST(Client, EveryWaitHasADeadline) {
  FakeApiServer server;
  Client client(server.config());
  server.inject({.path_part = "/pods/slow", .status = 500, .delay = Milliseconds(120000)});
  const ApiError e = error_of([&] {
    client.get(resources::kPods, {"ns", "slow"}, Deadline::after(Milliseconds(200)));
  });
  EXPECT_EQ(e.kind(), ApiErrorKind::kTimeout);
  EXPECT_EQ(client.find(resources::kPods, {"ns", "a"}), std::nullopt);

  ClientOptions one;
  one.max_connections = 1;
  Client narrow(server.config(), one);
  server.inject({.path_part = "/pods/held", .status = 500, .delay = Milliseconds(120000)});
  std::thread holder([&] {
    error_of([&] { narrow.get(resources::kPods, {"ns", "held"}, Deadline::after(Milliseconds(60000))); });
  });
  EXPECT_TRUE(eventually([&] { return server.count("GET", "/pods/held") == 1; }));
  EXPECT_EQ(error_of([&] {
              narrow.find(resources::kPods, {"ns", "a"}, Deadline::after(Milliseconds(50)));
            }).kind(),
            ApiErrorKind::kTimeout);
  server.stop();
  holder.join();
  server.start();
  EXPECT_EQ(narrow.find(resources::kPods, {"ns", "a"}), std::nullopt);

  ClientOptions slow;
  slow.qps = 0.001;
  slow.burst = 1;
  Client limited(server.config(), slow);
  EXPECT_EQ(limited.find(resources::kPods, {"ns", "a"}), std::nullopt);
  EXPECT_EQ(error_of([&] { limited.find(resources::kPods, {"ns", "a"}); }).reason(), "RateLimit");

  ClientConfig nowhere = server.config();
  server.stop();
  EXPECT_EQ(error_of([&] { Client(nowhere).get(resources::kPods, {"ns", "a"}); }).kind(), ApiErrorKind::kUnavailable);
}

TEST(Client, SurvivesAServerRestartOnKeptConnections) {
  FakeApiServer server;
  Client client(server.config());
  client.create(resources::kConfigMaps, config_map("a"));
  for (int i = 0; i < 2; ++i) {
    server.stop();
    server.start();
    EXPECT_NO_THROW(client.patch(resources::kConfigMaps, {"ns", "a"}, {{"data", {{"k", std::to_string(i)}}}}));
    EXPECT_NO_THROW(client.create(resources::kConfigMaps, config_map("b" + std::to_string(i))));
  }
}

TEST(Client, ManyThreadsShareThePool) {
  FakeApiServer server;
  Metrics metrics;
  ClientOptions options;
  options.max_connections = 8;
  options.qps = 0;
  options.metrics = &metrics;
  Client client(server.config(), options);
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        try {
          client.create(resources::kConfigMaps, config_map("t" + std::to_string(t) + "-" + std::to_string(i)),
                        Deadline::after(Milliseconds(120000)));
        } catch (const std::exception& e) {
          ADD_FAILURE() << e.what();
          ++failures;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(server.list(resources::kConfigMaps).size(), 320u);
  EXPECT_NE(metrics.text().find("rest_client_requests_total{code=\"201\",host=\"" + server.config().host),
            std::string::npos);
}

TEST(Client, TokenFileIsReadAgainWhenRefused) {
  TemporaryDirectory folder;
  const auto file = folder.path() / "token";
  write_file_atomic(file, "old\n");
  FakeApiServer server({.token = "old"});
  ClientConfig config = server.config();
  config.token.clear();
  config.token_file = file.string();
  Client client(config);
  EXPECT_EQ(client.find(resources::kPods, {"ns", "a"}), std::nullopt);
  server.set_token("new");
  EXPECT_EQ(error_of([&] { client.find(resources::kPods, {"ns", "a"}); }).kind(), ApiErrorKind::kForbidden);
  write_file_atomic(file, "new\n");
  EXPECT_EQ(client.find(resources::kPods, {"ns", "a"}), std::nullopt);
  std::filesystem::remove(file);  // gone for a moment: the token in use stays
  EXPECT_EQ(client.find(resources::kPods, {"ns", "a"}), std::nullopt);
}

struct Pki {
  KeyPair ca = make_ca("cluster CA");
  KeyPair server;
  KeyPair user;
  Pki() {
    LeafOptions options;
    options.common_name = "apiserver";
    options.ip_addresses = {"127.0.0.1"};
    options.dns_names = {"kubernetes.default"};
    server = issue_certificate(ca, options);
    LeafOptions mine;
    mine.common_name = "trireme";
    mine.server = false;
    user = issue_certificate(ca, mine);
  }
};

TEST(ClientTls, VerifiesChainAndNameAndShowsItsCertificate) {
  const Pki pki;
  FakeApiServer server({.tls = pki.server, .client_ca_pem = pki.ca.cert_pem});
  ClientConfig config = server.config();
  EXPECT_THROW(Client{config}, Error);  // no CA
  config.ca_pem = pki.ca.cert_pem;
  EXPECT_EQ(error_of([&] {
              Client(config).find(resources::kPods, {"ns", "a"});
            }).kind(),
            ApiErrorKind::kUnavailable);  // no certificate
  config.client_cert_pem = pki.user.cert_pem;
  config.client_key_pem = pki.user.key_pem;
  {
    Client client(config);
    EXPECT_EQ(client.find(resources::kPods, {"ns", "a"}), std::nullopt);
    client.create(resources::kConfigMaps, config_map("big", std::string(200000, 'x')));
    EXPECT_EQ(client.get(resources::kConfigMaps, {"ns", "big"})["data"]["k"].get<std::string>().size(), 200000u);
  }
  ClientConfig other_ca = config;
  other_ca.ca_pem = make_ca("cluster CA").cert_pem;
  ApiError e = error_of([&] { Client(other_ca).find(resources::kPods, {"ns", "a"}); });
  EXPECT_EQ(e.reason(), "TLS") << e.what();
  ClientConfig name = config;
  name.server_name = "kubernetes.default";
  EXPECT_EQ(Client(name).find(resources::kPods, {"ns", "a"}), std::nullopt);
  name.server_name = "kubernetes.example";
  e = error_of([&] { Client(name).find(resources::kPods, {"ns", "a"}); });
  EXPECT_EQ(e.reason(), "TLS") << e.what();
  ClientConfig broken = config;
  broken.client_key_pem = pki.ca.key_pem;
  EXPECT_THROW(Client{broken}, Error);
}

TEST(ClientTls, CaFileIsReadAgain) {
  const Pki pki;
  TemporaryDirectory folder;
  const auto file = folder.path() / "ca.crt";
  write_file_atomic(file, make_ca("before the rotation").cert_pem);
  FakeApiServer server({.tls = pki.server});
  ClientConfig config = server.config();
  config.ca_file = file.string();
  Client client(config);
  EXPECT_EQ(error_of([&] { client.find(resources::kPods, {"ns", "a"}); }).reason(), "TLS");
  write_file_atomic(file, pki.ca.cert_pem);
  EXPECT_EQ(client.find(resources::kPods, {"ns", "a"}), std::nullopt);
  write_file_atomic(file, "half a fi");  // a broken file does not take away what works
  EXPECT_EQ(client.find(resources::kPods, {"ns", "a"}), std::nullopt);
}

TEST(Client, ReviewsAreAnsweredAndNotStored) {
  FakeApiServer server;
  Client client(server.config());
  server.answer_creates(resources::kTokenReviews, [](const Json& review) {
    return Json{{"status", {{"authenticated", review["spec"]["token"] == "good"}}}};
  });
  const Json review =
      client.create(resources::kTokenReviews, {{"metadata", Json::object()}, {"spec", {{"token", "good"}}}});
  EXPECT_EQ(review["status"]["authenticated"], true);
  EXPECT_TRUE(server.list(resources::kTokenReviews).empty());
}

TEST(ClientStream, CancelEndsAQuietStreamFromAnotherThread) {
  FakeApiServer server({.bookmark_interval = Milliseconds(200000)});
  Client client(server.config());
  for (int i = 0; i < 20; ++i) {  // also before, while and after it connects
    const int before = server.watches_opened();
    Client::Cancel cancel;
    std::thread streamer([&] {
      EXPECT_NO_THROW(client.stream(
          "/api/v1/pods?watch=1&allowWatchBookmarks=true", "watch pods", Milliseconds(60000),
          [](std::string_view) { return true; }, &cancel));
    });
    if (i % 2 == 0) {
      EXPECT_TRUE(eventually([&] { return server.watches_opened() > before; }));
    }
    cancel.stop();
    streamer.join();
  }
  EXPECT_TRUE(eventually([&] { return server.open_watches() == 0; }));
}

TEST(ClientStream, ExceptionsAndEndsComeOut) {
  FakeApiServer server({.bookmark_interval = Milliseconds(10)});
  Client client(server.config());
  const std::string path = "/api/v1/pods?watch=1&allowWatchBookmarks=true";
  // Bookmarks keep the idle time-out from ending a stream that should have ended, so this does.
  const auto run = [&](const std::string& p, const std::function<bool(std::string_view)>& fn) {
    const Deadline deadline = Deadline::after(Milliseconds(60000));
    const auto bounded = [&](std::string_view data) {
      if (!deadline.passed()) return fn(data);
      ADD_FAILURE() << p << ": the stream did not end";
      return false;
    };
    client.stream(p, "watch pods", Milliseconds(60000), bounded, nullptr);
  };
  EXPECT_THROW(run(path, [](std::string_view) -> bool { throw std::logic_error("mine"); }), std::logic_error);
  EXPECT_NO_THROW(run(path, [](std::string_view) { return false; }));
  EXPECT_NO_THROW(run(path + "&timeoutSeconds=1", [](std::string_view) { return true; }));
  EXPECT_EQ(error_of([&] { run("/api/v1/nothings?watch=1", [](std::string_view) { return true; }); }).kind(),
            ApiErrorKind::kNotFound);
  server.inject({.status = 410});
  EXPECT_EQ(error_of([&] { run(path, [](std::string_view) { return true; }); }).kind(), ApiErrorKind::kGone);
  // Cut from the stream itself: open_watches() may still count one of the streams above, whose end the server has not
  // noticed yet, and a cut for that one would come too early for this one.
  const auto cut = [&](std::string_view) {
    server.cut_watches();
    return true;
  };
  EXPECT_EQ(error_of([&] { run(path, cut); }).kind(), ApiErrorKind::kUnavailable);
}

}  // namespace
}  // namespace trireme::kube
