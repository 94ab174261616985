#include "operator/webhook/webhook_server.h"

namespace trireme::webhook {
namespace {

// The old object and the new one, each within the 1.5 MiB that etcd takes, and what is said around them.
constexpr size_t kMaxReviewBytes = 4u << 20;

}  // namespace

WebhookServer::WebhookServer(WebhookServerOptions options) : options_(std::move(options)) {}
WebhookServer::~WebhookServer() { stop(); }

void WebhookServer::set_certificate(const kube::KeyPair& pair) {
  std::lock_guard lock(mutex_);
  if (server_) {
    server_->set_certificate(pair);
    return;
  }
  kube::HttpServerOptions options;
  options.name = "webhook";
  options.address = options_.address;
  options.port = options_.port;
  options.tls = pair;
  options.max_body_bytes = kMaxReviewBytes;
  options.max_threads = 1;  // a review takes milliseconds, and while it lasts its trees; README.md has the sum
  auto server = std::make_unique<kube::HttpServer>(std::move(options));
  server->handle("POST", "/validate", [this](const kube::HttpRequest& request) {
    return answer("validate", review_validating(request.body));
  });
  server->handle("POST", "/default", [this](const kube::HttpRequest& request) {
    return answer("default", review_defaulting(request.body, options_.defaulting));
  });
  server->start();
  server_ = std::move(server);
}

kube::HttpResponse WebhookServer::answer(const char* kind, const AdmissionAnswer& answer) {
  if (options_.metrics) {
    const char* result = answer.http_status != 200 ? "error" : answer.allowed ? "allowed" : "denied";
    options_.metrics
        ->counter("trireme_admission_requests_total", "Admission requests, by webhook and result.",
                  {{"webhook", kind}, {"result", result}})
        .Increment();
  }
  kube::HttpResponse response;
  response.status = answer.http_status;
  response.body = answer.body;
  if (answer.http_status == 200) response.content_type = "application/json";
  return response;
}

void WebhookServer::stop() {
  std::lock_guard lock(mutex_);
  if (server_) server_->stop();
}

int WebhookServer::port() const {
  std::lock_guard lock(mutex_);
  return server_ ? server_->port() : 0;
}

}  // namespace trireme::webhook
