// Reflector: keeps telling a sink what the apiserver holds of one resource: list in pages, watch, list again on 410.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "base/clock.h"
#include "operator/kube/client.h"
#include "operator/kube/metrics.h"

namespace trireme::kube {

enum class WatchEventType { kAdded, kModified, kDeleted };

struct ReflectorOptions {
  Resource resource;
  std::string ns;  // "" all namespaces
  std::string label_selector;
  std::string field_selector;
  int64_t page_limit = 500;
  Milliseconds list_timeout{120000};   // one whole list
  Milliseconds watch_timeout{290000};  // asked of the server (timeoutSeconds); the watch then starts again where it was
  Milliseconds backoff_min{200};       // after a failure; doubles with jitter, back to the minimum after a good watch
  Milliseconds backoff_max{30000};
  size_t max_object_bytes = 16u << 20;
  Metrics* metrics = nullptr;  // rljob_watch_reconnects_total, may be null
};

// Called on the reflector's thread only. Exceptions are logged and make the reflector list again after a back-off.
class ReflectorSink {
 public:
  virtual ~ReflectorSink() = default;
  virtual void list_started() = 0;
  virtual void list_item(std::string_view object) = 0;                  // JSON text, valid during the call
  virtual void list_finished(const std::string& resource_version) = 0;  // objects not seen since list_started are gone
  virtual void event(WatchEventType type, std::string_view object) = 0;
};

class Reflector final {
 public:
  Reflector(const Client& client, ReflectorOptions options, ReflectorSink& sink);
  ~Reflector();  // stops
  Reflector(const Reflector&) = delete;
  Reflector& operator=(const Reflector&) = delete;

  void start();
  // Any thread but the reflector's own; returns when the thread has ended (a connect in progress may hold it
  // connect_timeout).
  void stop();
  // Counters for tests and metrics.
  int64_t lists() const { return lists_.load(); }
  int64_t watches() const { return watches_.load(); }

 private:
  void run();
  prometheus::Counter& ended(const std::string& why) const;
  void list();
  enum class WatchEnd { kContinue, kRelist };
  WatchEnd watch();
  bool sleep(Milliseconds duration);  // false when stopped

  const Client& client_;
  ReflectorOptions options_;
  ReflectorSink& sink_;
  std::string resource_version_;
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> lists_{0};
  std::atomic<int64_t> watches_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::unique_ptr<Client::Cancel> cancel_;  // fixed for the life of the thread
  std::thread thread_;
};

}  // namespace trireme::kube
