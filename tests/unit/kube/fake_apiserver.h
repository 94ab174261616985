// FakeApiServer: an apiserver in this process for tests, generic over kinds, with the faults a real one has.
//
// Real behaviour kept: one rising resourceVersion, optimistic locking (409), AlreadyExists, status subresource (a write
// to the main path does not touch status and the other way round), generation, finalizers, owner-reference cascade,
// label and field selectors, paged lists with continue tokens, watches with bookmarks and 410, no new version for a
// write that changes nothing. Not kept: schemas, field ownership, server-side apply, strategic merge, auth beyond
// one token. The test plays kubelet, scheduler and users through put(), modify() and erase().
//
//   FakeApiServer server;                      // or FakeApiServer server({.token = "t"});
//   Client client(server.config());            // declare the client after the server: it is then destroyed first
//   server.inject({.method = "POST", .path_part = "/pods", .status = 503, .times = 2});
#pragma once

#include <httplib.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/text.h"
#include "operator/kube/certificates.h"
#include "operator/kube/client_config.h"
#include "operator/kube/events.h"
#include "operator/kube/resource.h"
#include "operator/kube/tls.h"
#include "tests/unit/kube/fake_store.h"
#include "tests/unit/kube/fake_types.h"
#include "tests/unit/kube/task_queue.h"

namespace trireme::kube::testing {

class FakeApiServer final : FakeStore {
 public:
  explicit FakeApiServer(FakeOptions options = {}) : FakeStore(options.graceful_pods), options_(std::move(options)) {
    for (const Resource& r :
         {resources::kPods, resources::kNodes, resources::kPersistentVolumeClaims, resources::kRlJobs})
      serve(r, true);
    for (const Resource& r : {resources::kServices, resources::kConfigMaps, resources::kSecrets, resources::kEvents,
                              resources::kLeases, resources::kNetworkPolicies, resources::kCustomResourceDefinitions,
                              resources::kValidatingWebhooks, resources::kMutatingWebhooks})
      serve(r, false);
    start();
  }
  ~FakeApiServer() { stop(); }
  FakeApiServer(const FakeApiServer&) = delete;
  FakeApiServer& operator=(const FakeApiServer&) = delete;

  // How a client reaches it (with TLS: no CA and no certificate filled in).
  ClientConfig config() const {
    ClientConfig c;
    c.scheme = options_.tls ? "https" : "http";
    c.host = "127.0.0.1";
    c.port = port_;
    c.token = options_.token;
    return c;
  }
  int port() const { return port_; }

  // Kinds
  void serve(const Resource& resource, bool status_subresource) {
    std::lock_guard lock(mutex_);
    kinds_[kind_id(resource)] = {resource, status_subresource};
  }
  // The kind is not there any more (404), as when its CRD was never installed.
  void unserve(const Resource& resource) {
    std::lock_guard lock(mutex_);
    kinds_.erase(kind_id(resource));
  }
  // POSTs of this kind are answered by the function and not stored (TokenReview).
  void answer_creates(const Resource& resource, std::function<Json(const Json&)> answer) {
    serve(resource, false);
    std::lock_guard lock(mutex_);
    reviewers_[kind_id(resource)] = std::move(answer);
  }

  // What clients create or change of this kind goes through the function, as through a mutating webhook.
  void admit(const Resource& resource, std::function<void(Json&)> change) {
    std::lock_guard lock(mutex_);
    admission_[kind_id(resource)] = std::move(change);
  }

  // A quota: so many pods of a namespace that have not ended; more are refused with 403.
  void limit_pods(const std::string& ns, size_t most) {
    std::lock_guard lock(mutex_);
    pod_limits_[ns] = most;
  }

  // The store, as somebody else in the cluster
  // --------------------------------------------------------------------------------- Creates or replaces the whole
  // object, status too. Returns it as stored.
  Json put(const Resource& resource, Json object) {
    std::lock_guard lock(mutex_);
    const ObjectKey key{resource.namespaced ? object.at("metadata").value("namespace", "") : "",
                        object.at("metadata").value("name", "")};
    Json* old = find_locked(kind_id(resource), key);
    if (!old) return insert_locked(resource, key, std::move(object));
    for (const char* field : {"uid", "creationTimestamp"}) object["metadata"][field] = (*old)["metadata"][field];
    return replace_locked(resource, key, std::move(object));
  }
  std::optional<Json> get(const Resource& resource, const ObjectKey& key) const {
    std::lock_guard lock(mutex_);
    const Json* found = const_cast<FakeApiServer*>(this)->find_locked(kind_id(resource), key);
    return found ? std::optional<Json>(*found) : std::nullopt;
  }
  // Of one namespace or ("") of all, ordered by key.
  std::vector<Json> list(const Resource& resource, const std::string& ns = "") const {
    std::lock_guard lock(mutex_);
    std::vector<Json> out;
    const auto it = store_.find(kind_id(resource));
    if (it == store_.end()) return out;
    for (const auto& [key, object] : it->second) {
      if (ns.empty() || key.ns == ns) out.push_back(object);
    }
    return out;
  }
  // False when there is no such object. The change must not touch names.
  bool modify(const Resource& resource, const ObjectKey& key, const std::function<void(Json&)>& change) {
    std::lock_guard lock(mutex_);
    Json* found = find_locked(kind_id(resource), key);
    if (!found) return false;
    Json copy = *found;
    change(copy);
    replace_locked(resource, key, std::move(copy));
    return true;
  }
  // Gone at once, whatever its finalizers; dependents by owner reference go too.
  bool erase(const Resource& resource, const ObjectKey& key) {
    std::lock_guard lock(mutex_);
    return erase_locked(resource, key);
  }
  int64_t resource_version() const {
    std::lock_guard lock(mutex_);
    return version_;
  }

  // Faults
  void inject(Fault fault) {
    std::lock_guard lock(mutex_);
    faults_.push_back(std::move(fault));
  }
  void clear_faults() {
    std::lock_guard lock(mutex_);
    faults_.clear();
  }
  // Ends every open watch in the middle of a line.
  void cut_watches() {
    std::lock_guard lock(mutex_);
    ++cut_epoch_;
    changed_.notify_all();
  }
  // Older resourceVersions and continue tokens get 410 from now on, open watches an ERROR event.
  void expire_history() {
    std::lock_guard lock(mutex_);
    log_.clear();
    oldest_ = version_ + 1;
    ++expire_epoch_;
    changed_.notify_all();
  }
  // Writes raw bytes into every open watch of the kind, e.g. half a line or no JSON.
  void write_to_watches(const Resource& resource, const std::string& bytes) {
    std::lock_guard lock(mutex_);
    raw_writes_.push_back({kind_id(resource), bytes});
    changed_.notify_all();
  }
  // Refuses new connections and ends open ones until start() (the store stays): an apiserver restart. The port stays.
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (!thread_.joinable()) return;
    // Once, and only when its loop runs: before that it does nothing, and a second time it asserts.
    for (bool told = false; !ended_.load(); std::this_thread::sleep_for(Milliseconds(1))) {
      if (told || !server_->is_running()) continue;
      server_->stop();
      told = true;
    }
    thread_.join();
    server_.reset();
  }
  void start() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = false;
    }
    ended_ = false;
    make_server();
    if (port_ == 0 && options_.port == 0) {
      port_ = server_->bind_to_any_port("127.0.0.1");
    } else {
      if (port_ == 0) port_ = options_.port;
      if (!eventually([&] { return server_->bind_to_port("127.0.0.1", port_); }))
        throw std::runtime_error("fake apiserver: bind");
    }
    thread_ = std::thread([this] {
      server_->listen_after_bind();
      ended_ = true;
    });
    if (!eventually([&] { return server_->is_running(); })) throw std::runtime_error("fake apiserver: start");
  }
  void set_token(const std::string& token) {
    std::lock_guard lock(mutex_);
    options_.token = token;
  }

  // What was asked
  std::vector<RecordedRequest> requests() const {
    std::lock_guard lock(mutex_);
    return requests_;
  }
  int count(const std::string& method, const std::string& path_part) const {
    std::lock_guard lock(mutex_);
    int n = 0;
    for (const RecordedRequest& r : requests_)
      n += r.method == method && (r.path + "?" + r.query).find(path_part) != std::string::npos;
    return n;
  }
  void clear_requests() {
    std::lock_guard lock(mutex_);
    requests_.clear();
  }
  // Called before each request is carried out, on the server's thread without its lock (e.g. to stop the operator at a
  // write).
  void set_observer(std::function<void(const RecordedRequest&)> observer) {
    std::lock_guard lock(mutex_);
    observer_ = std::move(observer);
  }
  // A watch that its client closed or that was cut counts until the server's thread has noticed. To wait for a new
  // watch, wait for watches_opened(), which only grows; faults of this server reach every watch it counts.
  int open_watches() const { return open_watches_.load(); }
  int watches_opened() const { return watches_opened_.load(); }

 private:
  struct RawWrite {
    std::string kind;
    std::string bytes;
  };
  struct Target {
    Kind kind;
    std::string id;
    std::string ns, name, sub;
  };
  // HTTP
  void make_server() {
    if (options_.tls) {
      identity_ = make_identity(options_.tls->cert_pem, options_.tls->key_pem, "fake apiserver");
      server_ = std::make_unique<httplib::SSLServer>([this](httplib::tls::ctx_t made) {
        SSL_CTX* context = static_cast<SSL_CTX*>(made);
        SSL_CTX_use_certificate(context, identity_->certificate.get());
        SSL_CTX_use_PrivateKey(context, identity_->key.get());
        if (!options_.client_ca_pem.empty()) {
          SSL_CTX_set_cert_store(context, make_store(options_.client_ca_pem, "client CA").release());
          SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
        }
        return true;
      });
    } else {
      server_ = std::make_unique<httplib::Server>();
    }
    server_->new_task_queue = [] { return new ElasticTaskQueue(512); };
    server_->set_tcp_nodelay(true);
    server_->set_keep_alive_timeout(1);  // stop() waits for idle kept connections this long
    server_->set_keep_alive_max_count(1000000);
    server_->set_socket_options([](socket_t socket) {
      const int on = 1;
      setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    });
    const auto handler = [this](const httplib::Request& request, httplib::Response& response) {
      handle(request, response);
    };
    server_->Get(".*", handler);
    server_->Post(".*", handler);
    server_->Put(".*", handler);
    server_->Patch(".*", handler);
    server_->Delete(".*", handler);
  }

  struct Answer {
    int status = 200;
    std::string body;
    std::string content_type = "application/json";
  };
  static Answer json_answer(int status, const Json& body) { return {status, body.dump(), "application/json"}; }
  static Answer failure(int status, const std::string& reason, const std::string& message) {
    return json_answer(status, {{"kind", "Status"},
                                {"apiVersion", "v1"},
                                {"metadata", Json::object()},
                                {"status", "Failure"},
                                {"reason", reason},
                                {"message", message},
                                {"code", status}});
  }

  void handle(const httplib::Request& request, httplib::Response& response) {
    RecordedRequest record;
    record.method = request.method;
    record.path = request.path;
    Params params;
    for (const auto& [name, value] : request.params) params[name] = value;
    for (const auto& [name, value] : params) record.query += (record.query.empty() ? "" : "&") + name + "=" + value;
    record.body = request.body;
    record.content_type = request.get_header_value("Content-Type");
    record.authorization = request.get_header_value("Authorization");
    record.accept = request.get_header_value("Accept");

    std::optional<Fault> fault;
    size_t index = 0;
    std::string token;
    std::function<void(const RecordedRequest&)> observer;
    {
      std::lock_guard lock(mutex_);
      index = requests_.size();
      requests_.push_back(record);
      token = options_.token;
      observer = observer_;
      for (auto it = faults_.begin(); it != faults_.end(); ++it) {
        if (it->times == 0 || (!it->method.empty() && it->method != record.method)) continue;
        if ((record.path + "?" + record.query).find(it->path_part) == std::string::npos) continue;
        fault = *it;
        if (it->times > 0 && --it->times == 0) faults_.erase(it);
        break;
      }
    }
    if (observer) observer(record);
    Answer answer;
    const bool is_watch = record.method == "GET" && (params.count("watch") != 0);
    if (fault && fault->delay > Milliseconds(0)) {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, fault->delay, [&] { return stopping_; });
    }
    if (!token.empty() && record.authorization != "Bearer " + token) {
      answer = failure(401, "Unauthorized", "Unauthorized");
    } else if (fault && !fault->apply_first && (fault->cut || fault->status != 0)) {
      answer = failure(fault->status, fault->reason, "injected fault");
    } else if (is_watch && !fault) {
      if (serve_watch(record.path, params, response)) {
        finish(index, 200);
        return;
      }
      answer = failure(404, "NotFound", "no such resource");
    } else {
      try {
        answer = carry_out(record, params);
      } catch (const std::exception& e) {
        answer = failure(400, "BadRequest", e.what());
      }
      if (fault && fault->status != 0) answer = failure(fault->status, fault->reason, "injected fault");
    }
    if (fault && fault->retry_after_s >= 0) response.set_header("Retry-After", std::to_string(fault->retry_after_s));
    finish(index, answer.status);
    if (fault && fault->cut) {
      response.set_content_provider(1000, "application/json", [](size_t, size_t, httplib::DataSink& sink) {
        sink.write("{\"ki", 4);
        return false;
      });
      return;
    }
    response.status = answer.status;
    response.set_content(std::move(answer.body), answer.content_type);
  }
  void finish(size_t index, int status) {
    std::lock_guard lock(mutex_);
    if (index < requests_.size()) requests_[index].status = status;
  }

  std::optional<Target> parse_path(const std::string& path) const {
    for (const auto& [id, kind] : kinds_) {
      const std::string base = kind.resource.group_path();
      if (path.compare(0, base.size() + 1, base + "/") != 0) continue;
      std::vector<std::string> parts = split(std::string_view(path).substr(base.size() + 1), '/');
      Target target{kind, id, "", "", ""};
      if (parts.size() >= 3 && parts[0] == "namespaces" && kind.resource.namespaced) {
        target.ns = parts[1];
        parts.erase(parts.begin(), parts.begin() + 2);
      }
      if (parts.empty() || parts.size() > 3 || parts[0] != kind.resource.plural) continue;
      if (parts.size() > 1) target.name = parts[1];
      if (parts.size() > 2) target.sub = parts[2];
      return target;
    }
    return std::nullopt;
  }

  Answer carry_out(const RecordedRequest& request, const Params& params) {
    std::lock_guard lock(mutex_);
    if (request.method == "GET") {
      Json entries = Json::array();
      for (const auto& [id, kind] : kinds_) {
        if (kind.resource.group_path() == request.path)
          entries.push_back(
              {{"name", kind.resource.plural}, {"kind", kind.resource.kind}, {"namespaced", kind.resource.namespaced}});
      }
      if (!entries.empty()) return json_answer(200, {{"kind", "APIResourceList"}, {"resources", entries}});
    }
    const auto target = parse_path(request.path);
    if (!target) return failure(404, "NotFound", "the server could not find the requested resource");
    const Resource& resource = target->kind.resource;
    const ObjectKey key{target->ns, target->name};
    if (request.method == "POST" && target->name.empty()) return create_locked(*target, request);
    if (request.method == "GET" && target->name.empty()) return list_locked(*target, params);
    if (target->name.empty()) return failure(405, "MethodNotAllowed", "not allowed on a collection");
    Json* found = find_locked(target->id, key);
    if (!found) return failure(404, "NotFound", resource.plural + " \"" + target->name + "\" not found");
    if (request.method == "GET") return json_answer(200, *found);
    if (request.method == "DELETE") return delete_request_locked(*target, *found, request);
    const Json body = Json::parse(request.body);
    Json proposed;
    if (request.method == "PUT") {
      proposed = body;
    } else if (starts_with(request.content_type, "application/json-patch")) {
      proposed = found->patch(body);
    } else {
      proposed = *found;
      proposed.merge_patch(body);
    }
    if (!proposed.is_object() || !proposed.contains("metadata")) return failure(422, "Invalid", "no metadata");
    const std::string wanted = proposed["metadata"].value("resourceVersion", "");
    if (!wanted.empty() && wanted != found->at("metadata").value("resourceVersion", "")) {
      return failure(409, "Conflict", "the object has been modified; please apply your changes to the latest version");
    }
    const std::string uid = proposed["metadata"].value("uid", "");
    if (!uid.empty() && uid != found->at("metadata").value("uid", "")) return failure(409, "Conflict", "uid mismatch");
    Json next;
    if (target->sub == "status") {
      next = *found;
      if (proposed.contains("status")) {
        next["status"] = proposed["status"];
      } else {
        next.erase("status");
      }
    } else {
      next = proposed;
      if (target->kind.status_subresource) {
        next.erase("status");
        if (found->contains("status")) next["status"] = (*found)["status"];
      }
      for (const char* field : {"uid", "creationTimestamp", "deletionTimestamp", "name", "namespace"}) {
        if (found->at("metadata").contains(field)) next["metadata"][field] = found->at("metadata")[field];
      }
      for (const char* field : {"kind", "apiVersion"}) next[field] = (*found)[field];
      admit_locked(target->id, next);
    }
    return json_answer(200, replace_locked(resource, key, std::move(next)));
  }

  Answer create_locked(const Target& target, const RecordedRequest& request) {
    const Resource& resource = target.kind.resource;
    Json object = Json::parse(request.body);
    if (const auto it = reviewers_.find(target.id); it != reviewers_.end()) return json_answer(201, it->second(object));
    if (!object.is_object()) return failure(400, "BadRequest", "not an object");
    if (object.value("kind", resource.kind) != resource.kind ||
        object.value("apiVersion", resource.api_version()) != resource.api_version())
      return failure(400, "BadRequest", "kind or apiVersion does not match the path");
    Json& metadata = object["metadata"];
    std::string name = metadata.value("name", target.name);
    if (name.empty() && metadata.contains("generateName"))
      name = metadata["generateName"].get<std::string>() + std::to_string(10000 + ++generated_);
    if (name.empty() || name.size() > 253) return failure(422, "Invalid", "metadata.name is missing or too long");
    if (resource.namespaced && metadata.value("namespace", target.ns) != target.ns)
      return failure(400, "BadRequest", "namespace mismatch");
    if (resource.namespaced) metadata["namespace"] = target.ns;
    if (!metadata.value("resourceVersion", "").empty())
      return failure(400, "BadRequest", "resourceVersion should not be set on objects to be created");
    const ObjectKey key{target.ns, name};
    if (find_locked(target.id, key))
      return failure(409, "AlreadyExists", resource.plural + " \"" + name + "\" already exists");
    if (resource.kind == "Pod" && quota_is_used_locked(key.ns)) {
      const std::string most = std::to_string(pod_limits_[key.ns]);
      return failure(403, "Forbidden",
                     "pods \"" + name + "\" is forbidden: exceeded quota: team, requested: pods=1, used: pods=" + most +
                         ", limited: pods=" + most);
    }
    if (target.kind.status_subresource) object.erase("status");
    if (resource.kind == "Pod") object["status"] = {{"phase", "Pending"}};
    admit_locked(target.id, object);
    const Json made = insert_locked(resource, key, std::move(object));
    // The garbage collector's other half: what is made for an owner that has gone.
    for (const Json& owner : made["metadata"].value("ownerReferences", Json::array())) {
      if (collected_.count(owner.value("uid", "")) > 0) delete_locked(resource, key);
    }
    return json_answer(201, made);
  }

  void admit_locked(const std::string& kind, Json& object) {
    if (const auto it = admission_.find(kind); it != admission_.end()) it->second(object);
  }

  bool quota_is_used_locked(const std::string& ns) {
    const auto limit = pod_limits_.find(ns);
    if (limit == pod_limits_.end()) return false;
    size_t used = 0;
    for (const auto& [key, pod] : store_[kind_id(resources::kPods)]) {
      const std::string phase = pod.value("status", Json::object()).value("phase", "");
      used += key.ns == ns && phase != "Succeeded" && phase != "Failed";
    }
    return used >= limit->second;
  }

  Answer delete_request_locked(const Target& target, const Json& found, const RecordedRequest& request) {
    const Json body = request.body.empty() ? Json::object() : Json::parse(request.body);
    const Json conditions = body.value("preconditions", Json::object());
    for (const char* field : {"uid", "resourceVersion"}) {
      if (conditions.contains(field) && conditions[field] != found["metadata"][field])
        return failure(409, "Conflict", "precondition failed");
    }
    const Json copy = found;
    const ObjectKey key{target.ns, target.name};
    if (target.kind.resource.kind == "Pod" && body.value("gracePeriodSeconds", int64_t{-1}) == 0) {
      erase_locked(target.kind.resource, key);
    } else {
      delete_locked(target.kind.resource, key);
    }
    return json_answer(200, copy);
  }

  Answer list_locked(const Target& target, const Params& params) {
    const auto param = [&](const char* name) {
      const auto it = params.find(name);
      return it == params.end() ? std::string() : it->second;
    };
    const size_t limit = static_cast<size_t>(parse_int(param("limit")).value_or(0));
    ObjectKey after;
    int64_t version = version_;
    if (const std::string token = param("continue"); !token.empty()) {  // "epoch|version|ns/name"
      const auto parts = split(base64_decode(token).value_or(""), '|');
      if (parts.size() != 3) return failure(400, "BadRequest", "continue token");
      if (parse_int(parts[0]) != expire_epoch_)
        return failure(410, "Expired", "The provided continue parameter is too old");
      version = parse_int(parts[1]).value_or(0);
      const size_t slash = parts[2].find('/');
      after = {parts[2].substr(0, slash), parts[2].substr(slash + 1)};
    }
    Json items = Json::array();
    std::string next;
    const std::map<ObjectKey, Json>& objects = store_[target.id];
    for (auto it = after.name.empty() ? objects.begin() : objects.upper_bound(after); it != objects.end(); ++it) {
      if (!selected(it->second, it->first, target.ns, params)) continue;
      if (limit > 0 && items.size() == limit) {
        next = base64_encode(std::to_string(expire_epoch_) + "|" + std::to_string(version) + "|" + after.ns + "/" +
                             after.name);
        break;
      }
      after = it->first;
      items.push_back(it->second);
      items.back().erase("kind");  // items of a list carry no type
      items.back().erase("apiVersion");
    }
    Json metadata{{"resourceVersion", std::to_string(version)}};
    if (!next.empty()) metadata["continue"] = next;
    return json_answer(200, {{"kind", target.kind.resource.kind + "List"},
                             {"apiVersion", target.kind.resource.api_version()},
                             {"metadata", metadata},
                             {"items", items}});
  }

  // One open watch; used by one server thread.
  struct WatchState {
    Target target;
    Params params;
    int64_t version = 0;
    int64_t cut_epoch = 0;
    int64_t expire_epoch = 0;
    size_t raw_seen = 0;
    bool gone = false;
    bool bookmarks = false;
    SteadyClock::time_point ends, next_bookmark;
  };

  bool serve_watch(const std::string& path, const Params& params, httplib::Response& response) {
    auto state = std::make_shared<WatchState>();
    {
      std::lock_guard lock(mutex_);
      const auto target = parse_path(path);
      if (!target) return false;
      state->target = *target;
      state->params = params;
      const auto value = [&](const char* name) { return params.count(name) != 0 ? params.at(name) : std::string(); };
      state->version = parse_int(value("resourceVersion")).value_or(version_);
      state->gone = state->version + 1 < oldest_;
      state->bookmarks = value("allowWatchBookmarks") == "true";
      state->cut_epoch = cut_epoch_;
      state->expire_epoch = expire_epoch_;
      state->raw_seen = raw_writes_.size();
      state->ends = SteadyClock::now() + std::chrono::seconds(parse_int(value("timeoutSeconds")).value_or(1800));
      state->next_bookmark = SteadyClock::now() + options_.bookmark_interval;
      ++open_watches_;
      ++watches_opened_;
    }
    response.set_chunked_content_provider(
        "application/json", [this, state](size_t, httplib::DataSink& sink) { return pump(*state, sink); },
        [this](bool) { --open_watches_; });
    return true;
  }

  static std::string line(const std::string& type, const Json& object) {
    return Json{{"type", type}, {"object", object}}.dump() + "\n";
  }

  // Sends what is new; false cuts the connection.
  bool pump(WatchState& state, httplib::DataSink& sink) {
    std::string out;
    bool cut = false;
    bool end = false;
    {
      std::unique_lock lock(mutex_);
      const auto news = [&] {
        return stopping_ || state.gone || version_ > state.version || cut_epoch_ != state.cut_epoch ||
               expire_epoch_ != state.expire_epoch || raw_writes_.size() > state.raw_seen;
      };
      changed_.wait_for(lock, Milliseconds(20), news);
      if (state.gone || expire_epoch_ != state.expire_epoch) {
        out = line("ERROR",
                   {{"kind", "Status"}, {"code", 410}, {"reason", "Expired"}, {"message", "too old resource version"}});
        end = true;
      } else {
        for (const LogEntry& entry : log_) {
          if (entry.version <= state.version || entry.kind != state.target.id) continue;
          const bool before = entry.old_object && selected(*entry.old_object, entry.key, state.target.ns, state.params);
          const bool after = entry.new_object && selected(*entry.new_object, entry.key, state.target.ns, state.params);
          if (after) {
            out += line(before ? "MODIFIED" : "ADDED", *entry.new_object);
          } else if (before) {
            out += line("DELETED", entry.last ? *entry.last : *entry.new_object);
          }
        }
        state.version = std::max(state.version, version_);
        for (; state.raw_seen < raw_writes_.size(); ++state.raw_seen) {
          if (raw_writes_[state.raw_seen].kind == state.target.id) out += raw_writes_[state.raw_seen].bytes;
        }
        if (state.bookmarks && SteadyClock::now() >= state.next_bookmark) {
          state.next_bookmark = SteadyClock::now() + options_.bookmark_interval;
          out += line("BOOKMARK", {{"kind", state.target.kind.resource.kind},
                                   {"apiVersion", state.target.kind.resource.api_version()},
                                   {"metadata", {{"resourceVersion", std::to_string(state.version)}}}});
        }
        if (cut_epoch_ != state.cut_epoch) {
          out += "{\"type\":\"MODIFIED\",\"object\":{\"metadata\":{\"name\":\"cu";
          cut = true;
        }
        end = SteadyClock::now() >= state.ends;
        if (stopping_) cut = true;
      }
    }
    if (!out.empty() && !sink.write(out.data(), out.size())) return false;
    if (cut) return false;
    if (end) sink.done();
    return sink.is_writable();
  }

  FakeOptions options_;
  std::map<std::string, std::function<Json(const Json&)>> reviewers_;
  std::map<std::string, std::function<void(Json&)>> admission_;
  std::map<std::string, size_t> pod_limits_;
  std::vector<RawWrite> raw_writes_;
  std::vector<Fault> faults_;
  std::vector<RecordedRequest> requests_;
  std::function<void(const RecordedRequest&)> observer_;
  int64_t oldest_ = 0;  // first version whose event is still known
  int64_t cut_epoch_ = 0;
  int64_t expire_epoch_ = 0;
  uint64_t generated_ = 0;
  bool stopping_ = false;
  std::atomic<int> open_watches_{0};
  std::atomic<int> watches_opened_{0};
  std::atomic<bool> ended_{false};
  std::shared_ptr<const Identity> identity_;
  std::unique_ptr<httplib::Server> server_;
  std::thread thread_;
  int port_ = 0;
};

}  // namespace trireme::kube::testing
