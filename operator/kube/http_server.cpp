#include "operator/kube/http_server.h"

#include <httplib.h>

#include <algorithm>
#include <cctype>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "operator/kube/gate.h"
#include "operator/kube/gate_connection.h"
#include "operator/kube/metrics.h"
#include "operator/kube/tls.h"

namespace trireme::kube {
namespace {

// "/a/{b}/c" as a regular expression, with the names of its parts in order.
std::pair<std::string, std::vector<std::string>> compile_route(const std::string& path) {
  std::string pattern;
  std::vector<std::string> names;
  for (size_t i = 0; i < path.size(); ++i) {
    const char c = path[i];
    if (c == '{') {
      const size_t close = path.find('}', i);
      TRIREME_CHECK(close != std::string::npos, "route " + path + " has an open brace");
      names.push_back(path.substr(i + 1, close - i - 1));
      pattern += "([^/]+)";
      i = close;
    } else {
      if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '/') pattern += '\\';
      pattern += c;
    }
  }
  return {pattern, names};
}

// The library without its sockets: parses a request that is whole, finds its handler and writes the answer.
class Router final : public httplib::Server {
 public:
  explicit Router(const HttpServerOptions& options) {
    set_payload_max_length(options.max_body_bytes);
    set_keep_alive_timeout(std::max<time_t>(1, options.keep_alive.count() / 1000));  // only said to the peer
  }
  bool serve(Gate::Exchange& exchange) {
    bool closed = false;
    return process_request(exchange, exchange.peer(), 0, "", 0, false, closed, nullptr) && !closed;
  }
  // Long answers break off when it is closed.
  void open() { svr_sock_ = 0; }
  void close() { svr_sock_ = INVALID_SOCKET; }
};

GateOptions gate_options(const HttpServerOptions& options) {
  GateOptions gate;
  gate.name = options.name;
  gate.address = options.address;
  gate.port = options.port;
  gate.limits.max_body_bytes = options.max_body_bytes;
  gate.threads = options.max_threads;
  gate.max_waiting = options.max_waiting;
  gate.max_connections = options.max_connections;
  gate.max_per_peer = options.max_per_peer;
  gate.max_buffered_bytes = std::max<size_t>(16u << 20, 4 * options.max_body_bytes);
  gate.request_timeout = options.request_timeout;
  gate.keep_alive = options.keep_alive;
  gate.answer_timeout = options.answer_timeout;
  return gate;
}

}  // namespace

class HttpServer::Impl final {
 public:
  explicit Impl(HttpServerOptions options)
      : options_(std::move(options)),
        router_(options_),
        gate_(
            gate_options(options_), [this](Gate::Exchange& exchange) { return router_.serve(exchange); },
            options_.tls ? Gate::FindIdentity([this] { return identity(); }) : nullptr) {
    if (options_.tls) set_certificate(*options_.tls);
  }

  void handle(const std::string& method, const std::string& path, Handler handler) {
    auto [pattern, names] = compile_route(path);
    httplib::Server::Handler wrapped = [this, names = std::move(names), handler = std::move(handler)](
                                           const httplib::Request& request, httplib::Response& response) {
      try {
        HttpRequest in{request.method, request.path, {}, {}, {}, request.body, request.remote_addr};
        for (size_t i = 0; i < names.size(); ++i) in.parameters[names[i]] = request.matches[i + 1].str();
        for (const auto& [name, value] : request.headers) in.headers[to_lower(name)] = value;
        for (const auto& [name, value] : request.params) in.query[name] = value;
        HttpResponse out = handler(in);
        response.status = out.status;
        for (const auto& [name, value] : out.headers) response.set_header(name, value);
        if (out.stream == nullptr) {
          response.set_content(std::move(out.body), out.content_type);
          return;
        }
        response.set_chunked_content_provider(
            out.content_type,
            [this, path = request.path, stream = std::move(out.stream)](size_t, httplib::DataSink& to) {
              try {
                bool there = true;
                stream([&](std::string_view piece) {
                  there = there && (piece.empty() || to.write(piece.data(), piece.size()));
                  return there;
                });
                if (there) to.done();
                return there;
              } catch (const std::exception& e) {
                log_error(options_.name, path + ": " + e.what());
                return false;
              }
            });
      } catch (const std::exception& e) {
        log_error(options_.name, request.method + " " + request.path + ": " + e.what());
        response.status = 500;
        response.set_content("internal error\n", "text/plain; charset=utf-8");
      }
    };
    if (method == "GET") {
      router_.Get(pattern, std::move(wrapped));
    } else if (method == "POST") {
      router_.Post(pattern, std::move(wrapped));
    } else if (method == "PUT") {
      router_.Put(pattern, std::move(wrapped));
    } else if (method == "PATCH") {
      router_.Patch(pattern, std::move(wrapped));
    } else if (method == "DELETE") {
      router_.Delete(pattern, std::move(wrapped));
    } else {
      fail_internal("no such HTTP method: " + method);
    }
  }

  void start() {
    router_.open();
    gate_.start();
  }

  void stop() {
    router_.close();
    gate_.stop();
  }

  void set_certificate(const KeyPair& pair) {
    auto identity = make_identity(pair.cert_pem, pair.key_pem, options_.name + " server");
    std::lock_guard lock(identity_mutex_);
    identity_ = std::move(identity);
  }

  int port() const { return gate_.port(); }

 private:
  std::shared_ptr<const Identity> identity() {
    std::lock_guard lock(identity_mutex_);
    return identity_;
  }

  const HttpServerOptions options_;
  std::mutex identity_mutex_;
  std::shared_ptr<const Identity> identity_;
  Router router_;
  Gate gate_;
};

HttpServer::HttpServer(HttpServerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
HttpServer::~HttpServer() { impl_->stop(); }
void HttpServer::handle(const std::string& method, const std::string& path, Handler handler) {
  impl_->handle(method, path, std::move(handler));
}
void HttpServer::start() { impl_->start(); }
void HttpServer::stop() { impl_->stop(); }
int HttpServer::port() const { return impl_->port(); }
void HttpServer::set_certificate(const KeyPair& pair) { impl_->set_certificate(pair); }

void HealthChecks::add_liveness(const std::string& name, Check check) {
  std::lock_guard lock(mutex_);
  liveness_.emplace_back(name, std::move(check));
}

void HealthChecks::add_readiness(const std::string& name, Check check) {
  std::lock_guard lock(mutex_);
  readiness_.emplace_back(name, std::move(check));
}

HttpResponse HealthChecks::answer(const std::vector<std::pair<std::string, Check>>& checks,
                                  const HttpRequest& request) const {
  std::string lines;
  bool ok = true;
  for (const auto& [name, check] : checks) {
    const auto problem = check();
    if (problem) {
      ok = false;
      lines += "[-]" + name + " failed: " + *problem + "\n";
    } else if (request.query.count("verbose") != 0) {
      lines += "[+]" + name + " ok\n";
    }
  }
  return {ok ? 200 : 500, ok && lines.empty() ? "ok\n" : lines, "text/plain; charset=utf-8", {}};
}

void HealthChecks::install(HttpServer& server) {
  const auto serve = [&](const char* path, const std::vector<std::pair<std::string, Check>>& list) {
    server.handle("GET", path, [this, &list](const HttpRequest& request) {
      std::vector<std::pair<std::string, Check>> checks;
      {
        std::lock_guard lock(mutex_);
        checks = list;
      }
      return answer(checks, request);
    });
  };
  serve("/healthz", liveness_);
  serve("/readyz", readiness_);
}

void install_metrics(HttpServer& server, Metrics& metrics) {
  server.handle("GET", "/metrics", [&metrics](const HttpRequest&) {
    return HttpResponse{200, metrics.text(), Metrics::content_type(), {}};
  });
}

}  // namespace trireme::kube
