#include "operator/kube/events.h"

#include <prometheus/counter.h>

#include <algorithm>
#include <cstdio>
#include <ctime>

#include "base/log.h"
#include "base/text.h"
#include "operator/kube/metrics.h"

namespace trireme::kube {
namespace {

constexpr size_t kMaxMessage = 1024;

std::string object_identity(const ObjectReference& about) {
  return about.kind + "\x1f" + about.ns + "\x1f" + about.name + "\x1f" + about.uid;
}

// Cuts at a character border.
std::string shortened(const std::string& message) {
  if (message.size() <= kMaxMessage) return message;
  size_t end = kMaxMessage - 3;
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xc0) == 0x80) --end;
  return message.substr(0, end) + "...";
}

std::string format_seconds(int64_t unix_s, const std::string& fraction) {
  const std::time_t time = static_cast<std::time_t>(unix_s);
  std::tm parts{};
  gmtime_r(&time, &parts);
  char text[64];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  return text + fraction + "Z";
}

}  // namespace

int64_t unix_now_ms() {
  return std::chrono::duration_cast<Milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string format_time(int64_t unix_ms) {
  return format_seconds(unix_ms >= 0 ? unix_ms / 1000 : (unix_ms - 999) / 1000, "");
}

std::string format_micro_time(int64_t unix_us) {
  char fraction[16];
  std::snprintf(fraction, sizeof fraction, ".%06d", static_cast<int>(((unix_us % 1000000) + 1000000) % 1000000));
  return format_seconds((unix_us - ((unix_us % 1000000) + 1000000) % 1000000) / 1000000, fraction);
}

std::optional<int64_t> parse_time(std::string_view text) {
  const auto digits = [&](size_t at, size_t count) -> std::optional<int64_t> {
    if (at + count > text.size()) return std::nullopt;
    int64_t value = 0;
    for (size_t i = at; i < at + count; ++i) {
      if (text[i] < '0' || text[i] > '9') return std::nullopt;
      value = value * 10 + (text[i] - '0');
    }
    return value;
  };
  if (text.size() < 20 || text[4] != '-' || text[7] != '-' || (text[10] != 'T' && text[10] != 't') || text[13] != ':' ||
      text[16] != ':')
    return std::nullopt;
  const auto year = digits(0, 4), month = digits(5, 2), day = digits(8, 2), hour = digits(11, 2),
             minute = digits(14, 2), second = digits(17, 2);
  if (!year || !month || !day || !hour || !minute || !second) return std::nullopt;
  if (*month < 1 || *month > 12 || *day < 1 || *day > 31 || *hour > 23 || *minute > 59 || *second > 60)
    return std::nullopt;
  size_t at = 19;
  int64_t milliseconds = 0;
  if (text[at] == '.') {
    ++at;
    int64_t scale = 100;
    const size_t begin = at;
    for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at, scale /= 10)
      milliseconds += (text[at] - '0') * scale;
    if (at == begin) return std::nullopt;
  }
  int64_t offset_s = 0;
  const std::string_view zone = text.substr(at);
  if (zone != "Z" && zone != "z") {
    if (zone.size() != 6 || (zone[0] != '+' && zone[0] != '-') || zone[3] != ':') return std::nullopt;
    const auto hours = digits(at + 1, 2), minutes = digits(at + 4, 2);
    if (!hours || !minutes || *hours > 23 || *minutes > 59) return std::nullopt;
    offset_s = (*hours * 60 + *minutes) * 60 * (zone[0] == '-' ? -1 : 1);
  }
  std::tm parts{};
  parts.tm_year = static_cast<int>(*year) - 1900;
  parts.tm_mon = static_cast<int>(*month) - 1;
  parts.tm_mday = static_cast<int>(*day);
  parts.tm_hour = static_cast<int>(*hour);
  parts.tm_min = static_cast<int>(*minute);
  parts.tm_sec = static_cast<int>(*second);
  return (static_cast<int64_t>(timegm(&parts)) - offset_s) * 1000 + milliseconds;
}

EventRecorder::EventRecorder(const Client& client, EventRecorderOptions options)
    : client_(client), options_(std::move(options)), thread_([this] { run(); }) {}

EventRecorder::~EventRecorder() { stop(); }

void EventRecorder::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

int64_t EventRecorder::dropped() const {
  std::lock_guard lock(mutex_);
  return dropped_;
}

bool EventRecorder::take_token_locked(const ObjectReference& about) {
  const auto now = SteadyClock::now();
  if (buckets_.size() >= options_.max_remembered) buckets_.clear();  // forgetting is the cheap side of bounded
  auto [it, fresh] =
      buckets_.try_emplace(object_identity(about), Bucket{static_cast<double>(options_.burst_per_object), now});
  Bucket& bucket = it->second;
  if (!fresh) {
    const double periods = std::chrono::duration<double>(now - bucket.at).count() * 1000.0 /
                           static_cast<double>(options_.refill_period.count());
    bucket.tokens = std::min<double>(options_.burst_per_object, bucket.tokens + periods);
    bucket.at = now;
  }
  if (bucket.tokens < 1) return false;
  bucket.tokens -= 1;
  return true;
}

void EventRecorder::event(const ObjectReference& about, EventType type, const std::string& reason,
                          const std::string& message) {
  const int64_t now = unix_now_ms();
  Pending pending{about, type, reason, shortened(message), 1, now, now};
  const std::string identity = object_identity(about) + "\x1f" + (type == EventType::kNormal ? "N" : "W") + "\x1f" +
                               reason + "\x1f" + pending.message;
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    const auto waiting = pending_.find(identity);
    if (waiting != pending_.end()) {
      ++waiting->second.count;
      waiting->second.last_unix_ms = now;
      return;
    }
    if (order_.size() >= options_.max_queued || !take_token_locked(about)) {
      ++dropped_;
      if (options_.metrics) {
        options_.metrics
            ->counter("trireme_events_dropped_total", "Kubernetes events that were not sent, to spare the apiserver.")
            .Increment();
      }
      return;
    }
    order_.push_back(identity);
    pending_.emplace(identity, std::move(pending));
  }
  changed_.notify_all();
}

bool EventRecorder::flush(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline.at(), [&] { return stopping_ || (order_.empty() && !sending_); });
}

void EventRecorder::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !order_.empty(); });
    if (stopping_) return;
    const std::string identity = order_.front();
    order_.pop_front();
    Pending pending = std::move(pending_.at(identity));
    pending_.erase(identity);
    sending_ = true;
    lock.unlock();
    bool sent = false;
    for (int attempt = 0; attempt < 3 && !sent; ++attempt) {
      try {
        send(identity, pending);
        sent = true;
      } catch (const ApiError& e) {
        if (!e.retryable()) {
          // A namespace that is being deleted takes no events; nothing is lost that anybody could read.
          log_debug("events", e.what());
          break;
        }
        std::unique_lock waiting(mutex_);
        const Milliseconds pause = std::min(e.retry_after().value_or(Milliseconds(500)), Milliseconds(5000));
        if (changed_.wait_for(waiting, pause, [&] { return stopping_; })) break;
      } catch (const std::exception& e) {
        log_error("events", e.what());
        break;
      }
    }
    lock.lock();
    sending_ = false;
    if (!sent) ++dropped_;
    changed_.notify_all();
  }
}

void EventRecorder::send(const std::string& identity, Pending pending) {
  const auto now = SteadyClock::now();
  const Deadline deadline = Deadline::after(options_.request_timeout);
  const auto known = sent_.find(identity);
  if (known != sent_.end() && now - known->second.at < options_.aggregate_window) {
    Sent& before = known->second;
    const nlohmann::json patch{{"count", before.count + pending.count},
                               {"lastTimestamp", format_time(pending.last_unix_ms)}};
    try {
      client_.patch(resources::kEvents, before.key, patch, PatchType::kMerge, "", deadline);
      before.count += pending.count;
      before.at = now;
      return;
    } catch (const ApiError& e) {
      if (!e.not_found()) throw;  // gone by its own time to live: a new one
    }
  }
  const std::string ns = pending.about.ns.empty() ? "default" : pending.about.ns;
  char suffix[32];
  std::snprintf(suffix, sizeof suffix, ".%llx%04llx", static_cast<unsigned long long>(pending.first_unix_ms),
                static_cast<unsigned long long>((hash64(options_.instance) ^ ++serial_) & 0xffff));
  const std::string name = pending.about.name.substr(0, 200) + suffix;
  nlohmann::json reference{
      {"apiVersion", pending.about.api_version}, {"kind", pending.about.kind}, {"name", pending.about.name}};
  if (!pending.about.ns.empty()) reference["namespace"] = pending.about.ns;
  if (!pending.about.uid.empty()) reference["uid"] = pending.about.uid;
  const nlohmann::json event{{"metadata", {{"namespace", ns}, {"name", name}}},
                             {"involvedObject", reference},
                             {"type", pending.type == EventType::kNormal ? "Normal" : "Warning"},
                             {"reason", pending.reason},
                             {"message", pending.message},
                             {"source", {{"component", options_.component}}},
                             {"reportingComponent", options_.component},
                             {"reportingInstance", options_.instance},
                             {"firstTimestamp", format_time(pending.first_unix_ms)},
                             {"lastTimestamp", format_time(pending.last_unix_ms)},
                             {"count", pending.count}};
  try {
    client_.create(resources::kEvents, event, deadline);
  } catch (const ApiError& e) {
    if (!e.already_exists()) throw;  // ours: the answer to the first try was lost
  }
  if (sent_.size() >= options_.max_remembered) {
    std::erase_if(sent_, [&](const auto& entry) { return now - entry.second.at >= options_.aggregate_window; });
    if (sent_.size() >= options_.max_remembered) sent_.erase(sent_.begin());
  }
  sent_[identity] = {{ns, name}, pending.count, now};
}

}  // namespace trireme::kube
