// StatusServer: takes rank 0's reports, checks that they come from a pod of that job, and hands them to the
// ReportStore.
//
// POST /v1/status/{namespace}/{job}, Authorization: Bearer <projected token of audience trireme.dev/status>, over TLS
//   {"attempt": 1, "rendezvousDone": true, "stuckRank": 3, "progress": {fields of RLJob status.progress}}
// 204 taken; 400 body; 409 an attempt that is over; 503 with Retry-After: no leader is known, come back.
// 403, one text, whatever else is wrong or missing: before the token is proven nobody is told what there is.
// A standby passes the request on to the leader, because a Service does not know who leads.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/log_limit.h"
#include "operator/controller/reconciler.h"
#include "operator/controller/reports.h"
#include "operator/kube/client.h"
#include "operator/kube/http_server.h"
#include "operator/kube/metrics.h"
#include "operator/telemetry/review_shares.h"

namespace trireme::telemetry {

struct StatusServerOptions {
  std::string address = "0.0.0.0";
  int port = 0;      // 0: the system chooses
  bool tls = false;  // serve nothing before set_certificate, then HTTPS
  int max_threads = 16;
  int max_reviews = 8;  // TokenReviews at once, fewer than threads: a token that is known never waits for one
  ReviewShareOptions review_share;     // of one pod, by the uid that a token claims
  Milliseconds token_lifetime{60000};  // how long a reviewed token is believed
  size_t max_tokens = 20000;
  Milliseconds request_timeout{10000};          // of a TokenReview or a hand-on to the leader
  std::function<bool()> is_leader;              // empty: always
  std::function<std::string()> leader_address;  // "host:port" of the leader's status server, "" unknown
  std::string tls_name;                         // with tls: what the leader's certificate is for
  std::function<std::string()> ca_pem;          // with tls: who issued it; empty: the system's authorities
  kube::Metrics* metrics = nullptr;             // may be null
};

// Whose token it is.
struct PodIdentity {
  bool operator==(const PodIdentity&) const = default;
  std::string ns;
  std::string pod;
  std::string uid;
};
// What a service account token says of itself, unproven; nothing where it names no pod. Pure.
std::optional<PodIdentity> claimed_identity(const std::string& token);

struct ParsedReport {
  controller::Report report;
  std::string error;  // not empty: the body is no report
};
ParsedReport parse_report(const std::string& body);

class StatusServer final {
 public:
  using FindPod = std::function<std::shared_ptr<const controller::CachedPod>(const kube::ObjectKey&)>;
  using FindJob = std::function<std::shared_ptr<const controller::CachedJob>(const kube::ObjectKey&)>;
  // `reviewer` asks for TokenReviews and should be nobody else's: who sends tokens must not use up the rate and the
  // connections of the reconciler.
  StatusServer(const kube::Client& reviewer, controller::ReportStore& reports, FindPod find_pod, FindJob find_job,
               StatusServerOptions options);
  ~StatusServer();
  StatusServer(const StatusServer&) = delete;
  StatusServer& operator=(const StatusServer&) = delete;

  void start();  // with tls: waits for the first certificate
  // The first one starts a server with tls; later ones replace it.
  void set_certificate(const kube::KeyPair& pair);
  void stop();
  int port() const;  // 0 before it listens

 private:
  kube::HttpResponse handle(const kube::HttpRequest& request);
  kube::HttpResponse take(const kube::HttpRequest& request);
  kube::HttpResponse pass_on(const kube::HttpRequest& request);
  void serve(std::optional<kube::KeyPair> certificate);
  // Why it is not proven that this comes from rank 0 of the job; empty: it is, and `job_uid` is the job's.
  std::string unproven(const kube::HttpRequest& request, const kube::ObjectKey& job, const ParsedReport& parsed,
                       std::string& job_uid);
  // Why this pod may not report on this job, from what the informers know; empty: it may.
  std::string misfit(const PodIdentity& claimed, const kube::ObjectKey& job, const ParsedReport& parsed,
                     std::string& job_uid) const;
  // Nothing when the API server does not believe the token, or is not asked because too many came in the name of this
  // pod. Throws ApiError.
  struct Reviewed {
    std::optional<PodIdentity> identity;
    bool crowded_out = false;  // not looked at: too many tokens in the pod's name
  };
  Reviewed identify(const std::string& token, const std::string& pod_uid);
  std::optional<PodIdentity> review(const std::string& token) const;

  struct Known {
    std::optional<PodIdentity> identity;
    SteadyClock::time_point until;
  };
  const kube::Client& reviewer_;
  controller::ReportStore& reports_;
  FindPod find_pod_;
  FindJob find_job_;
  StatusServerOptions options_;
  std::mutex mutex_;
  std::map<std::string, Known> tokens_;  // by SHA-256 of the token
  ReviewShares shares_;                  // by pod uid, or SHA-256 of a token that was believed before
  std::atomic<int> reviews_{0};
  LogLimit failed_reviews_{Milliseconds(10000)};  // so often each job reports
  mutable std::mutex server_mutex_;
  bool stopped_ = false;
  std::unique_ptr<kube::HttpServer> server_;
};

}  // namespace trireme::telemetry
