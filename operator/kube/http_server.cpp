#include "operator/kube/http_server.h"

#include <httplib.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "operator/kube/metrics.h"
#include "operator/kube/task_queue.h"
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

}  // namespace

class HttpServer::Impl final {
 public:
  explicit Impl(HttpServerOptions options) : options_(std::move(options)) {
    if (options_.tls) {
      set_certificate(*options_.tls);
      server_ = std::make_unique<httplib::SSLServer>([this](SSL_CTX& context) {
        SSL_CTX_set_min_proto_version(&context, TLS1_2_VERSION);
        SSL_CTX_set_cert_cb(&context, &Impl::on_handshake, this);
        return true;
      });
      if (!server_->is_valid()) fail_internal("a TLS context could not be made: " + openssl_error());
    } else {
      server_ = std::make_unique<httplib::Server>();
    }
    server_->new_task_queue = [n = options_.max_threads] { return new ElasticTaskQueue(n); };  // the library deletes it
    server_->set_payload_max_length(options_.max_body_bytes);
    server_->set_tcp_nodelay(true);
    server_->set_read_timeout(options_.read_timeout);
    server_->set_write_timeout(options_.write_timeout);
    server_->set_keep_alive_timeout(std::max<time_t>(1, options_.keep_alive.count() / 1000));
    server_->set_keep_alive_max_count(10000);
    server_->set_socket_options([this](socket_t socket) {
      const int on = 1;
      setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
      listener_ = socket;
    });
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
      server_->Get(pattern, std::move(wrapped));
    } else if (method == "POST") {
      server_->Post(pattern, std::move(wrapped));
    } else if (method == "PUT") {
      server_->Put(pattern, std::move(wrapped));
    } else if (method == "PATCH") {
      server_->Patch(pattern, std::move(wrapped));
    } else if (method == "DELETE") {
      server_->Delete(pattern, std::move(wrapped));
    } else {
      fail_internal("no such HTTP method: " + method);
    }
  }

  void start(const Deadline& deadline) {
    TRIREME_CHECK(!thread_.joinable(), "an HTTP server starts once");
    const std::string where = options_.address + ":" + std::to_string(options_.port);
    if (options_.port == 0) {
      port_ = server_->bind_to_any_port(options_.address);
    } else {
      port_ = server_->bind_to_port(options_.address, options_.port) ? options_.port : -1;
    }
    if (port_ <= 0)
      fail_io("the " + options_.name + " server cannot listen on " + where + ": the port is taken or not allowed");
    ::listen(listener_, 512);  // the library's backlog of 5 loses connections in a burst
    thread_ = std::thread([this] {
      server_->listen_after_bind();
      ended_ = true;
    });
    while (!server_->is_running() && !ended_.load()) {
      if (deadline.passed()) fail_timeout("the " + options_.name + " server did not start on " + where);
      std::this_thread::sleep_for(Milliseconds(1));
    }
    log_debug(options_.name, "listening on " + options_.address + ":" + std::to_string(port_));
  }

  void stop() {
    if (!thread_.joinable()) return;
    while (!ended_.load()) {  // stop() does nothing while the loop is not running yet
      if (server_->is_running()) server_->stop();
      std::this_thread::sleep_for(Milliseconds(1));
    }
    thread_.join();
  }

  void set_certificate(const KeyPair& pair) {
    auto identity = make_identity(pair.cert_pem, pair.key_pem, options_.name + " server");
    std::lock_guard lock(identity_mutex_);
    identity_ = std::move(identity);
  }

  int port() const { return port_; }

 private:
  static int on_handshake(SSL* ssl, void* self) {
    std::shared_ptr<const Identity> identity;
    {
      auto* impl = static_cast<Impl*>(self);
      std::lock_guard lock(impl->identity_mutex_);
      identity = impl->identity_;
    }
    return use_identity(ssl, *identity) ? 1 : 0;
  }

  const HttpServerOptions options_;
  std::mutex identity_mutex_;
  std::shared_ptr<const Identity> identity_;
  std::unique_ptr<httplib::Server> server_;
  socket_t listener_ = INVALID_SOCKET;
  std::thread thread_;
  std::atomic<bool> ended_{false};
  int port_ = 0;
};

HttpServer::HttpServer(HttpServerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
HttpServer::~HttpServer() { impl_->stop(); }
void HttpServer::handle(const std::string& method, const std::string& path, Handler handler) {
  impl_->handle(method, path, std::move(handler));
}
void HttpServer::start(const Deadline& deadline) { impl_->start(deadline); }
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
