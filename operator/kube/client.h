// Client: the Kubernetes REST API over pooled keep-alive connections. Thread-safe; every call has a deadline.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "operator/kube/api_error.h"
#include "operator/kube/client_config.h"
#include "operator/kube/resource.h"

namespace trireme::kube {

class Metrics;

struct ClientOptions {
  int max_connections = 64;  // requests in flight; more callers wait within their deadline (watches do not count)
  double qps = 200;          // token bucket over all requests but watches; <= 0: no limit
  int burst = 400;
  Milliseconds connect_timeout{5000};
  Milliseconds request_timeout{30000};     // deadline of a call that names none
  Milliseconds credential_refresh{60000};  // files of token, CA and certificate are looked at this often
  size_t max_body_bytes = 64u << 20;       // of a buffered answer (not of list_each, which streams)
  std::string user_agent = "trireme-operator";
  Metrics* metrics = nullptr;  // rest_client_*; may be null
};

struct ListOptions {
  std::string label_selector;
  std::string field_selector;
  int64_t page_limit = 500;      // 0: everything in one answer
  std::string resource_version;  // "" newest (consistent), "0" any cached
};

enum class Propagation { kDefault, kBackground, kForeground, kOrphan };

struct DeleteOptions {
  Propagation propagation = Propagation::kBackground;
  std::string uid;                    // precondition; empty: none
  std::string resource_version;       // precondition; empty: none
  int64_t grace_period_seconds = -1;  // < 0: the object's own
};

enum class PatchType { kMerge, kJson };

struct RawResponse {
  int status = 0;
  std::string body;
  std::optional<Milliseconds> retry_after;
};

struct RawRequest {
  std::string method = "GET";
  std::string path;  // with query, already encoded, without the config's prefix
  std::string body;
  std::string content_type = "application/json";
  std::string what;    // names the request in errors, e.g. "get pods ns/name"
  std::string accept;  // "": JSON
};

// Every function throws ApiError. Conflicts are the caller's business; requests that never reached a server because a
// kept connection had died are sent once more on a fresh one (also creates: with fixed names a second answer is
// kAlreadyExists), 429 and 503 with Retry-After and other failures are NOT retried here: the work queue's back-off does
// that.
class Client final {
 public:
  explicit Client(ClientConfig config, ClientOptions options = {});
  ~Client();  // no call may be in progress
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  using Json = nlohmann::json;
  // Deadline of the options from now; what all functions use when no deadline is given.
  Deadline default_deadline() const;

  Json get(const Resource& resource, const ObjectKey& key) const { return get(resource, key, default_deadline()); }
  Json get(const Resource& resource, const ObjectKey& key, const Deadline& deadline) const;
  // get, but nothing instead of kNotFound.
  std::optional<Json> find(const Resource& resource, const ObjectKey& key) const {
    return find(resource, key, default_deadline());
  }
  std::optional<Json> find(const Resource& resource, const ObjectKey& key, const Deadline& deadline) const;

  // All pages, each item parsed whole. For small lists; informers use list_each.
  std::vector<Json> list(const Resource& resource, const std::string& ns, const ListOptions& options = {}) const {
    return list(resource, ns, options, default_deadline());
  }
  std::vector<Json> list(const Resource& resource, const std::string& ns, const ListOptions& options,
                         const Deadline& deadline) const;
  // Streams the items (their JSON text, valid during the call) and returns the list's resourceVersion. A page is never
  // held whole. `on_item` runs on the calling thread; an exception of it ends the list and comes out here. A continue
  // token that expired (410) comes out as kGone after some items may have been seen. `stop` (may be null) is looked at
  // between chunks.
  std::string list_each(const Resource& resource, const std::string& ns, const ListOptions& options,
                        const std::function<void(std::string_view item)>& on_item, const Deadline& deadline,
                        const std::atomic<bool>* stop = nullptr) const;

  // metadata.namespace and name are taken from the object; apiVersion and kind are filled in when missing.
  Json create(const Resource& resource, Json object) const {
    return create(resource, std::move(object), default_deadline());
  }
  Json create(const Resource& resource, Json object, const Deadline& deadline) const;
  // create for who needs no answer: the server is asked for the metadata only, and nothing is parsed.
  void post(const Resource& resource, Json object, const Deadline& deadline) const;
  // PUT with the object's metadata.resourceVersion as precondition (kConflict). subresource: "" or "status".
  Json update(const Resource& resource, Json object, std::string_view subresource = {}) const {
    return update(resource, std::move(object), subresource, default_deadline());
  }
  Json update(const Resource& resource, Json object, std::string_view subresource, const Deadline& deadline) const;
  // A metadata.resourceVersion inside a merge patch is a precondition.
  Json patch(const Resource& resource, const ObjectKey& key, const Json& patch, PatchType type = PatchType::kMerge,
             std::string_view subresource = {}) const {
    return this->patch(resource, key, patch, type, subresource, default_deadline());
  }
  Json patch(const Resource& resource, const ObjectKey& key, const Json& patch, PatchType type,
             std::string_view subresource, const Deadline& deadline) const;
  // False when it was already gone.
  bool remove(const Resource& resource, const ObjectKey& key, const DeleteOptions& options = {}) const {
    return remove(resource, key, options, default_deadline());
  }
  bool remove(const Resource& resource, const ObjectKey& key, const DeleteOptions& options,
              const Deadline& deadline) const;

  // Anything else. Throws only when no answer came (kUnavailable, kTimeout); HTTP statuses are the caller's.
  RawResponse raw(const RawRequest& request, const Deadline& deadline) const;

  // One streaming GET on a connection of its own (watches). `on_data` false ends it. No exception leaves it through the
  // HTTP library: one thrown by on_data ends the stream and is thrown again from here. The stream ends without an error
  // when the server closes it; throws ApiError otherwise (HTTP status other than 200, cut, idle_timeout without a
  // byte). `cancel` (may be null): another thread's stop handle.
  class Cancel final {
   public:
    Cancel();
    ~Cancel();
    Cancel(const Cancel&) = delete;
    Cancel& operator=(const Cancel&) = delete;
    void stop();  // any thread, any number of times; the stream returns within connect_timeout, normally at once
    bool stopped() const;

   private:
    friend class Client;
    struct State;
    std::unique_ptr<State> state_;
  };
  void stream(const std::string& path, const std::string& what, Milliseconds idle_timeout,
              const std::function<bool(std::string_view data)>& on_data, Cancel* cancel) const;

  const ClientConfig& config() const;
  const ClientOptions& options() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme::kube
