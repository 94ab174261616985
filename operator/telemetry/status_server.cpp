#include "operator/telemetry/status_server.h"

#include <httplib.h>
#include <openssl/evp.h>

#include "api/runtime.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "operator/controller/observed.h"
#include "operator/kube/api_error.h"

namespace trireme::telemetry {
namespace {

using kube::HttpRequest;
using kube::HttpResponse;
using nlohmann::json;

constexpr size_t kMaxBodyBytes = 64 << 10;
constexpr size_t kMaxTokenBytes = 8 << 10;
constexpr const char* kForwarded = "x-trireme-forwarded";
constexpr const char* kServiceAccountPrefix = "system:serviceaccount:";
constexpr const char* kUnproven = "it is not proven that this comes from rank 0 of such a job and attempt";

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

std::string text_of(const json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return object.is_object() && found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

const json& member(const json& object, const char* key) {
  static const json kNothing;
  const auto found = object.is_object() ? object.find(key) : object.end();
  return object.is_object() && found != object.end() ? *found : kNothing;
}

// A certificate names the status Service; the leader is reached by its pod's address.
std::unique_ptr<httplib::ClientImpl> client_of_leader(const std::string& address, const StatusServerOptions& options) {
  const size_t colon = address.rfind(':');
  const auto port = colon == std::string::npos ? std::nullopt : parse_int(address.substr(colon + 1));
  if (!port || *port < 1 || *port > 65535) return nullptr;
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  if (!options.tls) return std::make_unique<httplib::ClientImpl>(host, static_cast<int>(*port));
  auto client = std::make_unique<httplib::SSLClient>(options.tls_name, static_cast<int>(*port));
  client->set_hostname_addr_map({{options.tls_name, host}});
  const std::string ca = options.ca_pem ? options.ca_pem() : "";
  if (!ca.empty()) client->load_ca_cert_store(ca.data(), ca.size());
  return client;
}

// One of a bounded number of places, while it lives.
class Place final {
 public:
  Place(std::atomic<int>& taken, int most) : taken_(taken), got_(taken.fetch_add(1) < most) {}
  ~Place() { --taken_; }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  bool got() const { return got_; }

 private:
  std::atomic<int>& taken_;
  const bool got_;
};

}  // namespace

std::optional<PodIdentity> claimed_identity(const std::string& token) {
  // What else stands in a token, in a part that is not read here either, would be found out later, and by another
  // answer.
  constexpr std::string_view kBesides = "-_.=";
  for (const char c : token) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && kBesides.find(c) == std::string_view::npos)
      return std::nullopt;
  }
  const std::vector<std::string> parts = split(token, '.');
  if (parts.size() != 3 || token.size() > kMaxTokenBytes) return std::nullopt;
  std::string claims = replace_all(replace_all(parts[1], "-", "+"), "_", "/");
  claims.append((4 - claims.size() % 4) % 4, '=');
  const auto decoded = kube::base64_decode(claims);
  if (!decoded) return std::nullopt;
  json document;
  try {
    document = parse_json_bounded(*decoded, "token");
  } catch (const Error&) {
    return std::nullopt;
  }
  const json& cluster = member(document, "kubernetes.io");
  const json& pod = member(cluster, "pod");
  PodIdentity identity{text_of(cluster, "namespace"), text_of(pod, "name"), text_of(pod, "uid")};
  if (identity.ns.empty() || identity.pod.empty() || identity.uid.empty()) return std::nullopt;
  return identity;
}

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

StatusServer::StatusServer(const kube::Client& reviewer, controller::ReportStore& reports, FindPod find_pod,
                           FindJob find_job, StatusServerOptions options)
    : reviewer_(reviewer),
      reports_(reports),
      find_pod_(std::move(find_pod)),
      find_job_(std::move(find_job)),
      options_(std::move(options)),
      shares_(options_.review_share) {}

StatusServer::~StatusServer() { stop(); }

void StatusServer::start() {
  if (!options_.tls) serve(std::nullopt);
}

void StatusServer::set_certificate(const kube::KeyPair& pair) {
  std::lock_guard lock(server_mutex_);
  if (!options_.tls || stopped_) return;
  if (server_) {
    server_->set_certificate(pair);
  } else {
    serve(pair);
  }
}

void StatusServer::serve(std::optional<kube::KeyPair> certificate) {
  kube::HttpServerOptions options;
  options.name = "status";
  options.address = options_.address;
  options.port = options_.port;
  options.tls = std::move(certificate);
  options.max_threads = options_.max_threads;
  options.max_body_bytes = kMaxBodyBytes;
  auto server = std::make_unique<kube::HttpServer>(std::move(options));
  server->handle("POST", "/v1/status/{namespace}/{job}",
                 [this](const HttpRequest& request) { return handle(request); });
  server->start();
  server_ = std::move(server);
}

void StatusServer::stop() {
  std::lock_guard lock(server_mutex_);
  stopped_ = true;
  if (server_) server_->stop();
}

int StatusServer::port() const {
  std::lock_guard lock(server_mutex_);
  return server_ ? server_->port() : 0;
}

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
  const kube::ObjectKey job{request.parameters.at("namespace"), request.parameters.at("job")};
  const ParsedReport parsed = parse_report(request.body);
  std::string job_uid;
  if (const std::string why = unproven(request, job, parsed, job_uid); !why.empty()) {
    log_debug("status", "a report on " + job.ns + "/" + job.name + " is refused: " + why);
    return answer(403, kUnproven);
  }
  if (!parsed.error.empty()) return answer(400, parsed.error);
  if (!reports_.put(job, job_uid, parsed.report)) return answer(409, "this attempt is over");
  return answer(204, "");
}

// What costs nothing comes first: a TokenReview is asked for only when everything else is right.
std::string StatusServer::unproven(const HttpRequest& request, const kube::ObjectKey& job, const ParsedReport& parsed,
                                   std::string& job_uid) {
  const auto header = request.headers.find("authorization");
  if (header == request.headers.end() || !starts_with(header->second, "Bearer ")) return "it has no bearer token";
  const std::string token = header->second.substr(7);
  const std::optional<PodIdentity> claimed = claimed_identity(token);
  if (!claimed) return "its token is no service account token of a pod";
  if (std::string why = misfit(*claimed, job, parsed, job_uid); !why.empty()) return why;
  Reviewed reviewed;
  try {
    reviewed = identify(token, claimed->uid);
  } catch (const std::exception& e) {
    if (const auto more = failed_reviews_.due()) log_warn("status", std::string("token review: ") + e.what() + *more);
    reports_.turned_away();
    return "its token cannot be checked now";
  }
  if (reviewed.crowded_out) {
    reports_.crowded_out(job, job_uid);
    return "its token is one of too many in its pod's name";
  }
  if (!reviewed.identity) return "its token is not valid for this audience";
  return *reviewed.identity == *claimed ? "" : "its token is another pod's";
}

std::string StatusServer::misfit(const PodIdentity& claimed, const kube::ObjectKey& job_key, const ParsedReport& parsed,
                                 std::string& job_uid) const {
  const auto pod = find_pod_({claimed.ns, claimed.pod});
  const auto job = find_job_(job_key);
  if (claimed.ns != job_key.ns) return "the pod is of another namespace";
  if (!pod || !job) return "the pod or the job is not known here yet";
  if (pod->uid != claimed.uid || pod->job != job_key.name || pod->job_uid != hash64(job->uid) || !pod->owned)
    return "the pod is none of this job's";
  if (pod->role != "actor" || pod->rank != 0) return "only rank 0 of the actor reports";
  // A body that cannot be read names none; whose token is proven is told so.
  if (parsed.error.empty() && pod->attempt != parsed.report.attempt)
    return "the pod is of another attempt than it says";
  if (claimed.pod != pod_name(job_key.name, "actor", 0, pod->attempt)) return "the pod does not have rank 0's name";
  job_uid = job->uid;
  return "";
}

HttpResponse StatusServer::pass_on(const HttpRequest& request) {
  if (request.headers.count(kForwarded) > 0) return answer(503, "the leader is changing");
  const std::string address = options_.leader_address ? options_.leader_address() : "";
  if (address.empty()) return answer(503, "no leader is known");
  const std::unique_ptr<httplib::ClientImpl> leader = client_of_leader(address, options_);
  if (!leader) return answer(503, "no leader is known");
  const time_t seconds = options_.request_timeout.count() / 1000;
  leader->set_connection_timeout(std::min<time_t>(seconds, 3), 0);
  leader->set_read_timeout(seconds, 0);
  leader->set_write_timeout(seconds, 0);
  httplib::Headers headers = {{kForwarded, "1"}};
  if (const auto found = request.headers.find("authorization"); found != request.headers.end()) {
    headers.emplace("Authorization", found->second);
  }
  const auto result = leader->Post(request.path, headers, request.body, "application/json");
  if (!result) return answer(503, "the leader does not answer");
  HttpResponse response = answer(result->status, "");
  response.body = result->body;
  return response;
}

StatusServer::Reviewed StatusServer::identify(const std::string& token, const std::string& pod_uid) {
  const std::string digest = sha256(token);
  const auto now = SteadyClock::now();
  {
    std::lock_guard lock(mutex_);
    const auto known = tokens_.find(digest);
    if (known != tokens_.end() && known->second.until > now) return {known->second.identity};
    // Junk in a pod's name does not keep the pod's own token, once it was believed, from being believed again.
    const bool believed = known != tokens_.end() && known->second.identity;
    if (!shares_.take(believed ? digest : pod_uid, now)) return {std::nullopt, /*crowded_out=*/true};
  }
  const Place place(reviews_, options_.max_reviews);
  if (!place.got())
    throw kube::ApiError(kube::ApiErrorKind::kTimeout, 0, "Busy", "too many tokens are being checked already");
  std::optional<PodIdentity> identity = review(token);
  std::lock_guard lock(mutex_);
  // Junk goes first: a token that was believed has a share of its own.
  for (const bool junk : {true, false}) {
    if (tokens_.size() >= options_.max_tokens)
      std::erase_if(tokens_, [&](const auto& e) { return e.second.until <= now && junk == !e.second.identity; });
  }
  if (tokens_.size() >= options_.max_tokens) tokens_.clear();
  tokens_[digest] = {identity, now + options_.token_lifetime};
  return {identity};
}

std::optional<PodIdentity> StatusServer::review(const std::string& token) const {
  const json review =
      reviewer_.create(kube::resources::kTokenReviews,
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
  return identity;
}

}  // namespace trireme::telemetry
