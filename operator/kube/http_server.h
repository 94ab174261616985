// HttpServer: small HTTP or HTTPS server for health, metrics, the webhook and status pushes; certificates can be
// swapped live.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "operator/kube/certificates.h"

namespace trireme::kube {

class Metrics;

struct HttpRequest {
  std::string method;
  std::string path;
  std::map<std::string, std::string> parameters;  // of the route's {name} parts
  std::map<std::string, std::string> headers;     // names in lower case
  std::map<std::string, std::string> query;
  std::string body;
  std::string remote_address;
};

using HttpWrite = std::function<bool(std::string_view piece)>;

struct HttpResponse {
  int status = 200;
  std::string body;
  std::string content_type = "text/plain; charset=utf-8";
  std::map<std::string, std::string> headers;
  // Instead of body, where it would be large: called once on the server's thread, writes the content piece by piece.
  // Ends early when write returns false: nobody listens any more. Throws: the client sees the content break off.
  std::function<void(const HttpWrite& write)> stream;
};

struct HttpServerOptions {
  std::string name = "http";  // in log lines
  std::string address = "0.0.0.0";
  int port = 0;                // 0: the system chooses, see port()
  std::optional<KeyPair> tls;  // set: HTTPS
  size_t max_body_bytes = 3u << 20;
  int max_threads = 8;                  // requests answered at once; a connection that sends or waits holds none
  size_t max_waiting = 256;             // whole requests that wait for a thread; more get 503
  size_t max_connections = 1024;        // more: the one that has made us wait longest is closed
  size_t max_per_peer = 64;             // likewise, of one address
  Milliseconds request_timeout{10000};  // for a request to come whole
  Milliseconds keep_alive{5000};        // between two requests of a connection
  Milliseconds answer_timeout{30000};   // for handler and peer to be done with an answer
};

// Requests come in whole or not at all: those whose body has no length, is compressed or too long are refused before it
// is read (request_scan.h), and who sends slowly holds no thread (gate.h).
class HttpServer final {
 public:
  using Handler = std::function<HttpResponse(const HttpRequest&)>;

  explicit HttpServer(HttpServerOptions options);
  ~HttpServer();  // stops
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // Before start(). path: "/metrics" or "/v1/namespaces/{ns}/jobs/{name}". Handlers run on the server's threads; an
  // exception becomes 500 and a log line. method: GET, POST, PUT, PATCH or DELETE.
  void handle(const std::string& method, const std::string& path, Handler handler);
  // Binds and serves; returns when connections are accepted. Throws Error(kIo) naming address and port.
  void start();
  void stop();
  int port() const;
  // New handshakes use these; throws Error(kData) and changes nothing when they do not parse or belong together.
  void set_certificate(const KeyPair& pair);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// /healthz and /readyz from named checks, as controller-runtime: 200 "ok" or 500 with one line per failed check;
// "?verbose" lists all.
class HealthChecks final {
 public:
  using Check = std::function<std::optional<std::string>()>;  // nothing: fine; else why not
  void add_liveness(const std::string& name, Check check);
  void add_readiness(const std::string& name, Check check);
  void install(HttpServer& server);  // this object must outlive the server

 private:
  HttpResponse answer(const std::vector<std::pair<std::string, Check>>& checks, const HttpRequest& request) const;
  mutable std::mutex mutex_;
  std::vector<std::pair<std::string, Check>> liveness_;
  std::vector<std::pair<std::string, Check>> readiness_;
};

// GET /metrics.
void install_metrics(HttpServer& server, Metrics& metrics);

}  // namespace trireme::kube
