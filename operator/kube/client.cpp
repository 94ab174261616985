#include "operator/kube/client.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "operator/kube/connection_pool.h"
#include "operator/kube/json_scan.h"
#include "operator/kube/metrics.h"

namespace trireme::kube {
namespace {

using Json = nlohmann::json;

// Token bucket that lends: a caller takes its token at once and sleeps until it would have been there.
class RateLimiter final {
 public:
  RateLimiter(double qps, int burst)
      : qps_(qps), burst_(std::max(1, burst)), tokens_(burst_), at_(SteadyClock::now()) {}

  bool wait(const Deadline& deadline) {
    if (qps_ <= 0) return true;
    Milliseconds pause{0};
    {
      std::lock_guard lock(mutex_);
      const auto now = SteadyClock::now();
      tokens_ = std::min<double>(burst_, tokens_ + qps_ * std::chrono::duration<double>(now - at_).count());
      at_ = now;
      if (tokens_ < 1) pause = Milliseconds(static_cast<int64_t>((1 - tokens_) / qps_ * 1000) + 1);
      if (pause > deadline.remaining()) return false;
      tokens_ -= 1;
    }
    if (pause > Milliseconds(0)) std::this_thread::sleep_for(pause);
    return true;
  }

 private:
  const double qps_;
  const int burst_;
  std::mutex mutex_;
  double tokens_;
  SteadyClock::time_point at_;
};

std::optional<Milliseconds> retry_after(const httplib::Response& response) {
  const auto seconds = parse_int(response.get_header_value("Retry-After"));
  if (!seconds || *seconds < 0 || *seconds > 3600) return std::nullopt;
  return Milliseconds(*seconds * 1000);
}

ApiError no_answer(const std::string& what, const ClientConfig& config, httplib::Error error,
                   const Deadline* deadline) {
  const std::string untrusted = take_verify_error();
  if (!untrusted.empty()) {
    return ApiError(ApiErrorKind::kUnavailable, 0, "TLS",
                    what + ": the certificate of " + config.url() + " was refused: " + untrusted);
  }
  if (deadline && deadline->passed()) {
    return ApiError(ApiErrorKind::kTimeout, 0, "Timeout",
                    what + ": no answer from " + config.url() + " within the deadline");
  }
  return ApiError(ApiErrorKind::kUnavailable, 0, "Connection",
                  what + ": no answer from " + config.url() + ": " + httplib::to_string(error));
}

}  // namespace

struct Client::Cancel::State {
  std::mutex mutex;
  std::condition_variable left;
  bool stopped = false;
  httplib::ClientImpl* active = nullptr;
  std::thread::id thread;
};

Client::Cancel::Cancel() : state_(std::make_unique<State>()) {}
Client::Cancel::~Cancel() = default;

void Client::Cancel::stop() {
  std::unique_lock lock(state_->mutex);
  state_->stopped = true;
  // A stream between connect and its first read does not notice one shutdown, so it is told again until it has left.
  while (state_->active && state_->thread != std::this_thread::get_id()) {
    state_->active->stop();
    state_->left.wait_for(lock, Milliseconds(20));
  }
}

bool Client::Cancel::stopped() const {
  std::lock_guard lock(state_->mutex);
  return state_->stopped;
}

class Client::Impl final {
 public:
  Impl(ClientConfig config, ClientOptions options)
      : config_(std::move(config)),
        options_(std::move(options)),
        credentials_(config_, options_.credential_refresh),
        pool_(config_, credentials_, options_.max_connections),
        limiter_(options_.qps, options_.burst) {
    const bool v6 = config_.host.find(':') != std::string::npos;
    host_header_ = (v6 ? "[" + config_.host + "]" : config_.host) + ":" + std::to_string(config_.port);
  }

  struct Answer {
    int status = 0;
    std::string body;  // what on_chunk did not take
    std::optional<Milliseconds> retry_after;
  };
  // Gets the chunks of a 200 answer; others are buffered into the Answer. False ends the request (kTimeout or the
  // caller's reason).
  using OnChunk = std::function<void(std::string_view)>;

  Answer send(const RawRequest& request, const Deadline& deadline, const OnChunk& on_chunk,
              const std::atomic<bool>* stop) {
    if (!limiter_.wait(deadline)) {
      throw ApiError(ApiErrorKind::kTimeout, 0, "RateLimit",
                     request.what + ": the client's own request rate is used up");
    }
    bool fresh = false;
    for (int attempt = 0;; ++attempt) {
      std::unique_ptr<Connection> connection = pool_.acquire(deadline, fresh);
      if (!connection) {
        throw ApiError(ApiErrorKind::kTimeout, 0, "Pool",
                       request.what + ": all " + std::to_string(options_.max_connections) +
                           " connections were busy until the deadline");
      }
      const bool reused = connection->reused;
      Outcome outcome = exchange(*connection->http, request, deadline, on_chunk, stop);
      connection->reused = true;
      pool_.release(std::move(connection), outcome.complete);
      if (outcome.exception) std::rethrow_exception(outcome.exception);
      if (outcome.too_big) {
        throw ApiError(ApiErrorKind::kInvalid, outcome.answer.status, "TooBig",
                       request.what + ": the answer is over " + std::to_string(options_.max_body_bytes) + " bytes");
      }
      if (outcome.complete) {
        if (outcome.answer.status == 401 && attempt == 0 && credentials_.refresh_now()) continue;
        return std::move(outcome.answer);
      }
      if (stop && stop->load()) {
        throw ApiError(ApiErrorKind::kUnavailable, 0, "Stopped", request.what + ": stopped");
      }
      // A kept connection that the server had closed: nothing was answered, so ask again on a new one.
      if (reused && !outcome.answered && !fresh && !deadline.passed()) {
        take_verify_error();
        fresh = true;
        continue;
      }
      ApiError error = no_answer(request.what, config_, outcome.error, &deadline);
      if (error.reason() == "TLS" && attempt == 0 && credentials_.refresh_now()) continue;
      throw error;
    }
  }

  void stream(const std::string& path, const std::string& what, Milliseconds idle_timeout,
              const std::function<bool(std::string_view)>& on_data, Cancel* cancel) {
    auto connection = pool_.make();
    httplib::ClientImpl& http = *connection->http;
    set_timeouts(http, options_.connect_timeout, idle_timeout, options_.request_timeout);
    httplib::Request request = make_request({"GET", path, "", "", what});
    int status = 0;
    std::optional<Milliseconds> retry;
    std::string error_body;
    std::exception_ptr exception;
    bool ended_by_caller = false;
    const auto cancelled = [&] { return cancel && cancel->stopped(); };
    request.response_handler = [&](const httplib::Response& response) {
      status = response.status;
      retry = retry_after(response);
      return !cancelled();
    };
    request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
      if (cancelled()) return false;
      try {  // an exception is thrown again when the stream has been taken down
        if (status != 200) {
          if (error_body.size() < kMaxErrorBody) error_body.append(data, size);
          return true;
        }
        ended_by_caller = !on_data(std::string_view(data, size));
        return !ended_by_caller;
      } catch (...) {
        exception = std::current_exception();
        return false;
      }
    };
    if (cancel) {
      std::lock_guard lock(cancel->state_->mutex);
      if (cancel->state_->stopped) return;
      cancel->state_->active = &http;
      cancel->state_->thread = std::this_thread::get_id();
    }
    httplib::Response response;
    httplib::Error error = httplib::Error::Success;
    const Stopwatch watch;
    const bool ok = http.send(request, response, error);
    if (cancel) {
      {
        std::lock_guard lock(cancel->state_->mutex);
        cancel->state_->active = nullptr;
      }
      cancel->state_->left.notify_all();
    }
    count(request.method, status, -1);
    if (exception) std::rethrow_exception(exception);
    if (ended_by_caller || cancelled()) return;
    if (status != 0 && status != 200) {
      if (status == 401) credentials_.refresh_now();
      throw ApiError::from_response(what, status, error_body, retry);
    }
    if (ok) return;
    if (status == 0) {
      ApiError failure = no_answer(what, config_, error, nullptr);
      if (failure.reason() == "TLS") credentials_.refresh_now();
      throw failure;
    }
    if (watch.seconds() * 1000 >= static_cast<double>(idle_timeout.count()) && error == httplib::Error::Read) {
      throw ApiError(ApiErrorKind::kTimeout, 0, "Idle", what + ": the stream was silent for too long or cut");
    }
    throw ApiError(ApiErrorKind::kUnavailable, 0, "Connection",
                   what + ": the stream was cut: " + httplib::to_string(error));
  }

  const ClientConfig config_;
  const ClientOptions options_;

 private:
  static constexpr size_t kMaxErrorBody = 64u << 10;

  struct Outcome {
    Answer answer;
    bool complete = false;  // the whole answer was read; the connection is good
    bool answered = false;  // a status line came
    bool too_big = false;
    httplib::Error error = httplib::Error::Success;
    std::exception_ptr exception;
  };

  httplib::Request make_request(const RawRequest& raw) {
    httplib::Request request;
    request.method = raw.method;
    request.path = config_.path_prefix + raw.path;
    request.body = raw.body;
    request.headers.emplace("Host", host_header_);
    request.headers.emplace("Accept", raw.accept.empty() ? "application/json, */*;q=0.5" : raw.accept);
    request.headers.emplace("User-Agent", options_.user_agent);
    if (!raw.body.empty()) request.headers.emplace("Content-Type", raw.content_type);
    const std::string token = credentials_.token();
    if (!token.empty()) request.headers.emplace("Authorization", "Bearer " + token);
    return request;
  }

  Outcome exchange(httplib::ClientImpl& http, const RawRequest& raw, const Deadline& deadline, const OnChunk& on_chunk,
                   const std::atomic<bool>* stop) {
    Outcome outcome;
    httplib::Request request = make_request(raw);
    request.response_handler = [&](const httplib::Response& response) {
      outcome.answered = true;
      outcome.answer.status = response.status;
      outcome.answer.retry_after = retry_after(response);
      return true;
    };
    request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
      if (deadline.passed() || (stop && stop->load())) return false;
      try {  // see stream()
        if (on_chunk && outcome.answer.status == 200) {
          on_chunk(std::string_view(data, size));
          return true;
        }
        outcome.too_big = outcome.answer.body.size() + size > options_.max_body_bytes;
        if (!outcome.too_big) outcome.answer.body.append(data, size);
        return !outcome.too_big;
      } catch (...) {
        outcome.exception = std::current_exception();
        return false;
      }
    };
    // A little over the deadline, so that a time-out of the library is never taken for a cut connection.
    const Milliseconds left = deadline.remaining() + Milliseconds(10);
    set_timeouts(http, std::min(left, options_.connect_timeout), left, left);
    http.set_max_timeout(left);  // of all reads together: a server that drips would trip none of the others
    request.start_time_ = SteadyClock::now();
    httplib::Response response;
    const Stopwatch watch;
    take_verify_error();
    outcome.complete = http.send(request, response, outcome.error);
    if (outcome.complete && !outcome.answered) {
      outcome.answered = true;
      outcome.answer.status = response.status;
    }
    count(raw.method, outcome.complete ? outcome.answer.status : 0, watch.seconds());
    return outcome;
  }

  void count(const std::string& method, int status, double seconds) {
    if (!options_.metrics) return;
    const std::string code = status == 0 ? "<error>" : std::to_string(status);
    options_.metrics
        ->counter("rest_client_requests_total", "Requests to the apiserver by status code, method and host.",
                  {{"code", code}, {"method", method}, {"host", host_header_}})
        .Increment();
    if (seconds < 0) return;
    static const std::vector<double> kBuckets{0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60};
    options_.metrics
        ->histogram("rest_client_request_duration_seconds", "Length of requests to the apiserver.",
                    {{"verb", method}, {"host", host_header_}}, kBuckets)
        .Observe(seconds);
  }

  Credentials credentials_;
  ConnectionPool pool_;
  RateLimiter limiter_;
  std::string host_header_;
};

namespace {

std::string join_query(std::string path, const std::vector<std::pair<std::string, std::string>>& query) {
  char separator = '?';
  for (const auto& [name, value] : query) {
    if (value.empty()) continue;
    path += separator + name + "=" + url_encode(value);
    separator = '&';
  }
  return path;
}

std::string describe(const char* verb, const Resource& resource, const ObjectKey& key, std::string_view sub = {}) {
  std::string out = std::string(verb) + " " + resource.plural;
  if (!sub.empty()) out += "/" + std::string(sub);
  const std::string name = key.str();
  return name.empty() ? out : out + " " + name;
}

Json parse_answer(const std::string& what, const std::string& body) {
  try {
    return Json::parse(body);
  } catch (const Json::exception&) {
    throw ApiError(ApiErrorKind::kUnavailable, 200, "Malformed",
                   what + ": the answer is not JSON: " + one_line(body, 100));
  }
}

ObjectKey key_of(const Json& object, const Resource& resource) {
  const auto it = object.is_object() ? object.find("metadata") : object.end();
  if (!object.is_object() || it == object.end() || !it->is_object())
    fail_internal(resource.kind + " to send has no metadata");
  ObjectKey key{resource.namespaced ? it->value("namespace", "") : "", it->value("name", "")};
  if (resource.namespaced && key.ns.empty())
    fail_internal(resource.kind + " '" + key.name + "' to send has no namespace");
  return key;
}

void fill_type(Json& object, const Resource& resource) {
  if (!object.contains("apiVersion")) object["apiVersion"] = resource.api_version();
  if (!object.contains("kind")) object["kind"] = resource.kind;
}

}  // namespace

Client::Client(ClientConfig config, ClientOptions options)
    : impl_(std::make_unique<Impl>(std::move(config), std::move(options))) {}
Client::~Client() = default;

const ClientConfig& Client::config() const { return impl_->config_; }
const ClientOptions& Client::options() const { return impl_->options_; }
Deadline Client::default_deadline() const { return Deadline::after(impl_->options_.request_timeout); }

RawResponse Client::raw(const RawRequest& request, const Deadline& deadline) const {
  Impl::Answer answer = impl_->send(request, deadline, nullptr, nullptr);
  return {answer.status, std::move(answer.body), answer.retry_after};
}

namespace {

// Sends, throws on any status that is no success, returns the body.
std::string expect_success(const Client& client, const RawRequest& request, const Deadline& deadline) {
  RawResponse answer = client.raw(request, deadline);
  if (answer.status / 100 != 2)
    throw ApiError::from_response(request.what, answer.status, answer.body, answer.retry_after);
  return std::move(answer.body);
}

Json expect_json(const Client& client, const RawRequest& request, const Deadline& deadline) {
  return parse_answer(request.what, expect_success(client, request, deadline));
}

}  // namespace

Json Client::get(const Resource& resource, const ObjectKey& key, const Deadline& deadline) const {
  return expect_json(*this, {"GET", resource.path(key.ns, key.name), "", "", describe("get", resource, key)}, deadline);
}

std::optional<Json> Client::find(const Resource& resource, const ObjectKey& key, const Deadline& deadline) const {
  try {
    return get(resource, key, deadline);
  } catch (const ApiError& e) {
    if (e.not_found()) return std::nullopt;
    throw;
  }
}

std::string Client::list_each(const Resource& resource, const std::string& ns, const ListOptions& options,
                              const std::function<void(std::string_view)>& on_item, const Deadline& deadline,
                              const std::atomic<bool>* stop) const {
  const std::string what = describe("list", resource, {"", ns.empty() ? "of all namespaces" : "of " + ns});
  std::string next;
  while (true) {
    const std::string path =
        join_query(resource.path(ns), {{"labelSelector", options.label_selector},
                                       {"fieldSelector", options.field_selector},
                                       {"limit", options.page_limit > 0 ? std::to_string(options.page_limit) : ""},
                                       {"resourceVersion", next.empty() ? options.resource_version : ""},
                                       {"continue", next}});
    ListSplitter splitter(on_item);
    Impl::Answer answer = impl_->send(
        {"GET", path, "", "", what}, deadline, [&](std::string_view chunk) { splitter.feed(chunk); }, stop);
    if (answer.status != 200) throw ApiError::from_response(what, answer.status, answer.body, answer.retry_after);
    splitter.finish();
    next = top_level_string(splitter.metadata(), "continue").value_or("");
    if (next.empty()) return top_level_string(splitter.metadata(), "resourceVersion").value_or("");
    if (stop && stop->load()) throw ApiError(ApiErrorKind::kUnavailable, 0, "Stopped", what + ": stopped");
  }
}

std::vector<Json> Client::list(const Resource& resource, const std::string& ns, const ListOptions& options,
                               const Deadline& deadline) const {
  std::vector<Json> items;
  const JsonFields everything;
  list_each(
      resource, ns, options, [&](std::string_view item) { items.push_back(everything.parse(item)); }, deadline);
  return items;
}

Json Client::create(const Resource& resource, Json object, const Deadline& deadline) const {
  const ObjectKey key = key_of(object, resource);
  fill_type(object, resource);
  return expect_json(
      *this, {"POST", resource.path(key.ns), object.dump(), "application/json", describe("create", resource, key)},
      deadline);
}

void Client::post(const Resource& resource, Json object, const Deadline& deadline) const {
  const ObjectKey key = key_of(object, resource);
  fill_type(object, resource);
  expect_success(*this,
                 {"POST", resource.path(key.ns), object.dump(), "application/json", describe("create", resource, key),
                  "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1, application/json;q=0.5"},
                 deadline);
}

Json Client::update(const Resource& resource, Json object, std::string_view subresource,
                    const Deadline& deadline) const {
  const ObjectKey key = key_of(object, resource);
  fill_type(object, resource);
  return expect_json(*this,
                     {"PUT", resource.path(key.ns, key.name, subresource), object.dump(), "application/json",
                      describe("update", resource, key, subresource)},
                     deadline);
}

Json Client::patch(const Resource& resource, const ObjectKey& key, const Json& patch, PatchType type,
                   std::string_view subresource, const Deadline& deadline) const {
  const char* content_type = type == PatchType::kMerge ? "application/merge-patch+json" : "application/json-patch+json";
  return expect_json(*this,
                     {"PATCH", resource.path(key.ns, key.name, subresource), patch.dump(), content_type,
                      describe("patch", resource, key, subresource)},
                     deadline);
}

bool Client::remove(const Resource& resource, const ObjectKey& key, const DeleteOptions& options,
                    const Deadline& deadline) const {
  Json body{{"apiVersion", "v1"}, {"kind", "DeleteOptions"}};
  if (!options.uid.empty()) body["preconditions"]["uid"] = options.uid;
  if (!options.resource_version.empty()) body["preconditions"]["resourceVersion"] = options.resource_version;
  if (options.grace_period_seconds >= 0) body["gracePeriodSeconds"] = options.grace_period_seconds;
  switch (options.propagation) {
    case Propagation::kDefault:
      break;
    case Propagation::kBackground:
      body["propagationPolicy"] = "Background";
      break;
    case Propagation::kForeground:
      body["propagationPolicy"] = "Foreground";
      break;
    case Propagation::kOrphan:
      body["propagationPolicy"] = "Orphan";
      break;
  }
  try {
    expect_success(
        *this,
        {"DELETE", resource.path(key.ns, key.name), body.dump(), "application/json", describe("delete", resource, key)},
        deadline);
    return true;
  } catch (const ApiError& e) {
    if (e.not_found()) return false;
    throw;
  }
}

void Client::stream(const std::string& path, const std::string& what, Milliseconds idle_timeout,
                    const std::function<bool(std::string_view)>& on_data, Cancel* cancel) const {
  impl_->stream(path, what, idle_timeout, on_data, cancel);
}

}  // namespace trireme::kube
