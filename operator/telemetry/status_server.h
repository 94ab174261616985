// StatusServer: takes rank 0's reports, checks that they come from a pod of that job, and hands them to the
// ReportStore.
//
// POST /v1/status/{namespace}/{job}, Authorization: Bearer <projected token of audience trireme.dev/status>
//   {"attempt": 1, "rendezvousDone": true, "stuckRank": 3, "progress": {fields of RLJob status.progress}}
// 204 taken; 400 body; 401 token; 403 another pod; 409 an attempt that is over; 503 with Retry-After: come back.
// A standby passes the request on to the leader, because a Service does not know who leads.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "operator/controller/reconciler.h"
#include "operator/controller/reports.h"
#include "operator/kube/client.h"
#include "operator/kube/http_server.h"
#include "operator/kube/metrics.h"

namespace trireme::telemetry {

struct StatusServerOptions {
  std::string address = "0.0.0.0";
  int port = 0;  // 0: the system chooses
  int max_threads = 64;
  Milliseconds token_lifetime{60000};  // how long a reviewed token is believed
  size_t max_tokens = 20000;
  Milliseconds request_timeout{10000};          // of a TokenReview or a hand-on to the leader
  std::function<bool()> is_leader;              // empty: always
  std::function<std::string()> leader_address;  // "host:port" of the leader's status server, "" unknown
  kube::Metrics* metrics = nullptr;             // may be null
};

// Who a token belongs to, as the API server says.
struct PodIdentity {
  std::string ns;
  std::string pod;
  std::string uid;
};

class StatusServer final {
 public:
  using FindPod = std::function<std::shared_ptr<const controller::CachedPod>(const kube::ObjectKey&)>;
  using FindJob = std::function<std::shared_ptr<const controller::CachedJob>(const kube::ObjectKey&)>;
  StatusServer(const kube::Client& client, controller::ReportStore& reports, FindPod find_pod, FindJob find_job,
               StatusServerOptions options);
  ~StatusServer();
  StatusServer(const StatusServer&) = delete;
  StatusServer& operator=(const StatusServer&) = delete;

  void start();
  void stop();
  int port() const { return server_.port(); }

 private:
  kube::HttpResponse handle(const kube::HttpRequest& request);
  kube::HttpResponse take(const kube::HttpRequest& request);
  kube::HttpResponse pass_on(const kube::HttpRequest& request);
  // Nothing when the API server does not believe the token.
  std::optional<PodIdentity> identify(const std::string& token);

  struct Known {
    std::optional<PodIdentity> identity;
    SteadyClock::time_point until;
  };
  const kube::Client& client_;
  controller::ReportStore& reports_;
  FindPod find_pod_;
  FindJob find_job_;
  StatusServerOptions options_;
  std::mutex mutex_;
  std::map<std::string, Known> tokens_;  // by SHA-256 of the token
  kube::HttpServer server_;
};

struct ParsedReport {
  controller::Report report;
  std::string error;  // not empty: the body is no report
};
ParsedReport parse_report(const std::string& body);

}  // namespace trireme::telemetry
