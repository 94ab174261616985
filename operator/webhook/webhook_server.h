// WebhookServer: POST /validate and /default over TLS, answered by the pure functions of admission.h.
#pragma once

#include <memory>
#include <string>

#include "operator/kube/http_server.h"
#include "operator/kube/metrics.h"
#include "operator/webhook/admission.h"

namespace trireme::webhook {

struct WebhookServerOptions {
  std::string address = "0.0.0.0";
  int port = 0;  // 0: the system chooses
  DefaultingOptions defaulting;
  kube::Metrics* metrics = nullptr;  // may be null
};

class WebhookServer final {
 public:
  explicit WebhookServer(WebhookServerOptions options);
  ~WebhookServer();
  WebhookServer(const WebhookServer&) = delete;
  WebhookServer& operator=(const WebhookServer&) = delete;

  // The first certificate starts the server (throws Error(kIo) when the port is taken); later ones replace it.
  void set_certificate(const kube::KeyPair& pair);
  void stop();
  int port() const;  // 0 before the first certificate

 private:
  kube::HttpResponse answer(const char* kind, const AdmissionAnswer& answer);
  WebhookServerOptions options_;
  mutable std::mutex mutex_;
  std::unique_ptr<kube::HttpServer> server_;
};

}  // namespace trireme::webhook
