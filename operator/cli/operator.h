// Operator: all parts put together, so that a test can run one (or two) inside a process.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "operator/cli/options.h"
#include "operator/controller/reconciler.h"
#include "operator/kube/client_config.h"
#include "operator/kube/http_server.h"
#include "operator/kube/leader_election.h"
#include "operator/scheduling/gang.h"
#include "operator/telemetry/path_probe.h"
#include "operator/telemetry/status_server.h"
#include "operator/webhook/certificates.h"
#include "operator/webhook/webhook_server.h"

namespace trireme::cli {

class Operator final {
 public:
  // Adjusts time-outs and back-offs before the reconciler is made; for tests.
  using Tune = std::function<void(controller::ReconcilerOptions&)>;
  Operator(kube::ClientConfig config, OperatorOptions options, Tune tune = {});
  ~Operator();
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;

  // Runs until `stop` is set; returns 0. A lost lease makes it a standby again, which goes on to serve admission.
  // Throws Error(kUser) for what the user must put right (no CRD), Error(kTimeout) when the first lists do not come.
  int run(const std::atomic<bool>& stop);

  // 0 before run() opened them.
  int metrics_port() const { return metrics_port_; }
  int health_port() const { return health_port_; }
  int status_port() const { return status_port_; }  // with TLS: 0 before there is a certificate
  bool leading() const;
  void write_metrics(const kube::HttpWrite& write);

 private:
  void check_crd();
  void make_reconciler();
  std::shared_ptr<controller::Reconciler> reconciler() const;
  void wait_synced(const std::atomic<bool>& stop);
  void stand_down();
  void say_backend() const;
  void rediscover();
  bool certificate_needed() const { return options_.webhook_port >= 0 || status_tls(); }
  bool status_tls() const { return options_.status_port >= 0 && options_.status_tls; }
  std::string status_service_name() const;
  void start_servers();
  void start_status_server();
  void start_certificates();
  void shut_down();
  std::string leader_status_address();

  OperatorOptions options_;
  std::string identity_;
  kube::Metrics metrics_;
  kube::Client client_;
  kube::Client elector_client_;  // the lease waits for nobody's rate and connections: it would be lost under load
  kube::Client reviewer_;        // TokenReviews: whoever sends tokens must not use up the other's rate and connections
  kube::EventRecorder events_;
  controller::ReportStore reports_;
  Tune tune_;
  scheduling::Discovery discovery_;  // main thread only
  mutable std::mutex reconciler_mutex_;
  std::shared_ptr<controller::Reconciler> reconciler_;  // another one after each lost lease
  std::atomic<bool> lost_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> working_{false};
  std::atomic<bool> synced_once_{false};
  std::atomic<int> metrics_port_{0}, health_port_{0}, status_port_{0};
  std::unique_ptr<kube::LeaderElector> elector_;
  std::string status_url_;  // that trainers are told; empty: none
  std::unique_ptr<telemetry::StatusServer> status_server_;
  std::unique_ptr<telemetry::PathProbe> path_probe_;
  std::unique_ptr<webhook::WebhookServer> webhook_server_;
  std::unique_ptr<webhook::CertificateKeeper> certificates_;
  kube::HealthChecks health_;
  std::unique_ptr<kube::HttpServer> health_server_;
  std::unique_ptr<kube::HttpServer> metrics_server_;
  std::mutex leader_mutex_;
  std::string leader_identity_, leader_address_;
};

// Which gang APIs the cluster serves.
scheduling::Discovery discover(const kube::Client& client);

// Fields of the specification and the status that this operator uses and the installed CRD's schema does not know: the
// API server would drop them without a word. Empty: the CRD is new enough.
std::vector<std::string> missing_crd_fields(const nlohmann::json& crd);

// The whole program; `environment` as in parse_options. Returns the exit code.
int operator_main(const std::vector<std::string>& arguments,
                  const std::function<std::string(const std::string&)>& environment, const std::atomic<bool>& stop);

}  // namespace trireme::cli
