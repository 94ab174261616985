// EventRecorder: core/v1 Events about objects, sent by a thread of its own; repeats raise a count, floods are dropped.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "base/clock.h"
#include "operator/kube/client.h"

namespace trireme::kube {

struct ObjectReference {
  std::string api_version;
  std::string kind;
  std::string ns;  // "" for cluster-scoped objects (their events go to "default")
  std::string name;
  std::string uid;
};

enum class EventType { kNormal, kWarning };

struct EventRecorderOptions {
  std::string component = "trireme-operator";
  std::string instance;                   // reportingInstance: the pod's name
  size_t max_queued = 1000;               // more are dropped and counted
  size_t max_remembered = 4096;           // events whose count can still be raised
  Milliseconds aggregate_window{360000};  // a repeat later than this is a new Event
  int burst_per_object = 25;              // token bucket per object ...
  Milliseconds refill_period{300000};     // ... one token back per period
  Milliseconds request_timeout{10000};
  Metrics* metrics = nullptr;  // trireme_events_dropped_total
};

class EventRecorder final {
 public:
  EventRecorder(const Client& client, EventRecorderOptions options = {});
  ~EventRecorder();  // stops without a flush
  EventRecorder(const EventRecorder&) = delete;
  EventRecorder& operator=(const EventRecorder&) = delete;

  // Never blocks, never throws for the API's sake. reason is CamelCase; a message over 1024 bytes is cut.
  void event(const ObjectReference& about, EventType type, const std::string& reason, const std::string& message);
  // True when everything recorded so far was sent (or given up) before the deadline.
  bool flush(const Deadline& deadline);
  void stop();
  int64_t dropped() const;

 private:
  struct Pending {
    ObjectReference about;
    EventType type;
    std::string reason;
    std::string message;
    int64_t count = 1;  // repeats that arrived while it waited
    int64_t first_unix_ms = 0;
    int64_t last_unix_ms = 0;
  };
  struct Sent {
    ObjectKey key;
    int64_t count = 0;
    SteadyClock::time_point at;
  };
  struct Bucket {
    double tokens = 0;
    SteadyClock::time_point at;
  };
  void run();
  void send(const std::string& identity, Pending pending);
  bool take_token_locked(const ObjectReference& about);

  const Client& client_;
  EventRecorderOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  bool sending_ = false;
  int64_t dropped_ = 0;
  std::deque<std::string> order_;                     // identities in order of arrival
  std::unordered_map<std::string, Pending> pending_;  // by identity
  std::unordered_map<std::string, Bucket> buckets_;   // by object
  std::unordered_map<std::string, Sent> sent_;        // sender thread only
  uint64_t serial_ = 0;
  std::thread thread_;
};

// RFC 3339: "2026-01-02T03:04:05Z" and, for MicroTime fields, "...05.123456Z".
std::string format_time(int64_t unix_ms);
std::string format_micro_time(int64_t unix_us);
// Milliseconds since 1970 of either form (fractions and offsets allowed), nothing when it is no such time.
std::optional<int64_t> parse_time(std::string_view text);
int64_t unix_now_ms();

}  // namespace trireme::kube
