#include "operator/telemetry/status_server.h"

#include <httplib.h>
#include <openssl/evp.h>

#include "api/runtime.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "operator/kube/api_error.h"

namespace trireme::telemetry {
namespace {

using kube::HttpRequest;
using kube::HttpResponse;
using nlohmann::json;

constexpr size_t kMaxBodyBytes = 64 << 10;
constexpr size_t kMaxTokenBytes = 16 << 10;
constexpr const char* kForwarded = "x-trireme-forwarded";
constexpr const char* kServiceAccountPrefix = "system:serviceaccount:";

HttpResponse answer(int status, const std::string& message) {
  HttpResponse response;
  response.status = status;
  response.body = message.empty() ? "" : message + "\n";
  if (status == 503) response.headers["Retry-After"] = "1";
  return response;
}

std::string sha256(const std::string& text) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  if (EVP_Digest(text.data(), text.size(), digest, &size, EVP_sha256(), nullptr) != 1) fail_internal("SHA-256 failed");
  return std::string(reinterpret_cast<const char*>(digest), size);
}

std::string first_text(const json& extra, const char* key) {
  if (!extra.is_object() || !extra.contains(key) || !extra[key].is_array() || extra[key].empty()) return {};
  return extra[key][0].is_string() ? extra[key][0].get<std::string>() : std::string();
}

kube::HttpServerOptions server_options(const StatusServerOptions& options) {
  kube::HttpServerOptions server;
  server.name = "status";
  server.address = options.address;
  server.port = options.port;
  server.max_threads = options.max_threads;
  server.max_body_bytes = kMaxBodyBytes;
  return server;
}

}  // namespace

ParsedReport parse_report(const std::string& body) {
  ParsedReport parsed;
  json document;
  try {
    document = parse_json_bounded(body, "status report");
  } catch (const Error& e) {
    parsed.error = e.what();
    return parsed;
  }
  if (!document.is_object()) {
    parsed.error = "the report is no JSON object";
    return parsed;
  }
  auto integer = [&](const char* key) -> std::optional<int64_t> {
    const auto found = document.find(key);
    if (found == document.end() || found->is_null()) return std::nullopt;
    if (found->is_number_integer() && !(found->is_number_unsigned() && found->get<uint64_t>() > INT64_MAX))
      return found->get<int64_t>();
    parsed.error = std::string("'") + key + "' is no integer";
    return std::nullopt;
  };
  const auto attempt = integer("attempt");
  if (parsed.error.empty() && (!attempt || *attempt < 1)) parsed.error = "'attempt' is missing or not positive";
  parsed.report.attempt = attempt.value_or(0);
  parsed.report.stuck_rank = integer("stuckRank");
  if (const auto done = document.find("rendezvousDone"); done != document.end()) {
    if (done->is_boolean()) {
      parsed.report.rendezvous_done = done->get<bool>();
    } else {
      parsed.error = "'rendezvousDone' is no boolean";
    }
  }
  if (const auto progress = document.find("progress"); progress != document.end() && parsed.error.empty()) {
    // The same reader, and so the same limits, as of the status it will become.
    std::vector<Issue> issues;
    const RLJob job = rljob_from_json({{"apiVersion", kApiVersion},
                                       {"kind", kRLJobKind},
                                       {"metadata", {{"name", "report"}}},
                                       {"status", {{"progress", *progress}}}},
                                      issues, {.strict = false});
    for (const Issue& issue : issues) {
      if (starts_with(issue.path, "status")) parsed.error = issue.path + ": " + issue.message;
    }
    if (job.status.progress) parsed.report.progress = *job.status.progress;
  }
  return parsed;
}

StatusServer::StatusServer(const kube::Client& client, controller::ReportStore& reports, FindPod find_pod,
                           FindJob find_job, StatusServerOptions options)
    : client_(client),
      reports_(reports),
      find_pod_(std::move(find_pod)),
      find_job_(std::move(find_job)),
      options_(std::move(options)),
      server_(server_options(options_)) {
  server_.handle("POST", "/v1/status/{namespace}/{job}",
                 [this](const HttpRequest& request) { return handle(request); });
}

StatusServer::~StatusServer() { stop(); }
void StatusServer::start() { server_.start(); }
void StatusServer::stop() { server_.stop(); }

HttpResponse StatusServer::handle(const HttpRequest& request) {
  HttpResponse response = options_.is_leader && !options_.is_leader() ? pass_on(request) : take(request);
  if (options_.metrics) {
    options_.metrics
        ->counter("trireme_status_reports_total", "Status reports received, by answer.",
                  {{"code", std::to_string(response.status)}})
        .Increment();
  }
  return response;
}

HttpResponse StatusServer::take(const HttpRequest& request) {
  const kube::ObjectKey job_key{request.parameters.at("namespace"), request.parameters.at("job")};
  const auto header = request.headers.find("authorization");
  if (header == request.headers.end() || !starts_with(header->second, "Bearer ") ||
      header->second.size() > kMaxTokenBytes) {
    return answer(401, "a bearer token is needed");
  }
  const ParsedReport parsed = parse_report(request.body);
  if (!parsed.error.empty()) return answer(400, parsed.error);

  std::optional<PodIdentity> identity;
  try {
    identity = identify(header->second.substr(7));
  } catch (const kube::ApiError& e) {
    log_warn("status", std::string("token review: ") + e.what());
    return answer(503, "the token cannot be checked now");
  }
  if (!identity) return answer(401, "the token is not valid for this audience or names no pod");
  if (identity->ns != job_key.ns) return answer(403, "the pod is of another namespace");
  const auto pod = find_pod_({identity->ns, identity->pod});
  const auto job = find_job_(job_key);
  if (!pod || !job) return answer(503, "the pod or the job is not known here yet");
  if (pod->uid != identity->uid || pod->job != job_key.name) return answer(403, "the pod is none of this job's");
  if (pod->role != "actor" || pod->rank != 0) return answer(403, "only rank 0 of the actor reports");
  if (pod->attempt != parsed.report.attempt) return answer(403, "the pod is of another attempt than it says");
  if (!reports_.put(job_key, job->uid, parsed.report)) return answer(409, "this attempt is over");
  return answer(204, "");
}

HttpResponse StatusServer::pass_on(const HttpRequest& request) {
  if (request.headers.count(kForwarded) > 0) return answer(503, "the leader is changing");
  const std::string address = options_.leader_address ? options_.leader_address() : "";
  if (address.empty()) return answer(503, "no leader is known");
  httplib::Client leader("http://" + address);
  const time_t seconds = options_.request_timeout.count() / 1000;
  leader.set_connection_timeout(std::min<time_t>(seconds, 3), 0);
  leader.set_read_timeout(seconds, 0);
  leader.set_write_timeout(seconds, 0);
  httplib::Headers headers = {{kForwarded, "1"}};
  if (const auto found = request.headers.find("authorization"); found != request.headers.end()) {
    headers.emplace("Authorization", found->second);
  }
  const auto result = leader.Post(request.path, headers, request.body, "application/json");
  if (!result) return answer(503, "the leader does not answer");
  HttpResponse response = answer(result->status, "");
  response.body = result->body;
  return response;
}

std::optional<PodIdentity> StatusServer::identify(const std::string& token) {
  const std::string digest = sha256(token);
  const auto now = SteadyClock::now();
  {
    std::lock_guard lock(mutex_);
    const auto known = tokens_.find(digest);
    if (known != tokens_.end() && known->second.until > now) return known->second.identity;
  }
  const json review = client_.create(kube::resources::kTokenReviews,
                                     {{"apiVersion", "authentication.k8s.io/v1"},
                                      {"kind", "TokenReview"},
                                      {"metadata", json::object()},
                                      {"spec", {{"token", token}, {"audiences", json::array({kStatusTokenAudience})}}}},
                                     Deadline::after(options_.request_timeout));
  std::optional<PodIdentity> identity;
  const json status = review.value("status", json::object());
  const json audiences = status.value("audiences", json::array());
  const bool for_us = std::find(audiences.begin(), audiences.end(), json(kStatusTokenAudience)) != audiences.end();
  if (status.value("authenticated", false) && for_us) {
    const json user = status.value("user", json::object());
    const std::string name = user.value("username", std::string());
    const json extra = user.value("extra", json::object());
    PodIdentity found;
    found.pod = first_text(extra, "authentication.kubernetes.io/pod-name");
    found.uid = first_text(extra, "authentication.kubernetes.io/pod-uid");
    if (starts_with(name, kServiceAccountPrefix)) {
      found.ns = split(name.substr(std::string(kServiceAccountPrefix).size()), ':').front();
    }
    if (!found.pod.empty() && !found.uid.empty() && !found.ns.empty()) identity = std::move(found);
  }
  std::lock_guard lock(mutex_);
  if (tokens_.size() >= options_.max_tokens)
    std::erase_if(tokens_, [&](const auto& entry) { return entry.second.until <= now; });
  if (tokens_.size() >= options_.max_tokens) tokens_.clear();
  tokens_[digest] = {identity, now + options_.token_lifetime};
  return identity;
}

}  // namespace trireme::telemetry
