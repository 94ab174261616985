// http: POST {"requests": [{prompt, response, gold, extra, truncated}, ...]}, answered by {"rewards": [number | null,
// ...]}; null is a failure of that one response. Refused connections, 429 and 5xx are tried again, other statuses are
// not.
#include <httplib.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/url.h"
#include "trainer/rewards/http_headers.h"
#include "trainer/rewards/reward_types.h"

namespace trireme {
namespace {

constexpr size_t kMaxReplyBytes = 16 << 20;
constexpr Milliseconds kMaxConnect{5000};

// Stops a client at a deadline or on cancel: httplib's own time limits are per read, and a slow drip never trips them.
class Watchdog final {
 public:
  Watchdog(httplib::Client& client, const Deadline& deadline, const std::atomic<bool>& cancelled)
      : thread_([this, &client, deadline, &cancelled] {
          std::unique_lock lock(mutex_);
          while (!done_) {
            if (deadline.passed() || cancelled) {
              lock.unlock();
              client.stop();  // again and again: it may have been between two sockets
              lock.lock();
            }
            wake_.wait_for(lock, std::min(Milliseconds(50), deadline.remaining() + Milliseconds(1)));
          }
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool done_ = false;
  std::thread thread_;  // last: it uses the members above
};

class HttpReward final : public Reward {
 public:
  explicit HttpReward(const RewardOptions& options)
      : name_(options.name.empty() ? options.type : options.name),
        url_(options.url.substr(0, options.url.find('?'))),
        ca_file_(options.ca_file),
        headers_(options.headers, options.environment),
        max_batch_(options.max_batch),
        max_attempts_(options.max_attempts) {
    const Url url = split_url(options.url);
    origin_ = url.origin();
    path_ = url.path.empty() || url.path.front() == '?' ? "/" + url.path : url.path;
    if (url.names_user())
      fail_user("reward '" + name_ + "': url must not hold a user or password; send them in a header");
    if (!url.is_http()) fail_user("reward '" + name_ + "': url '" + url_ + "' is not http(s)://host[:port]/path");
    if (!ca_file_.empty() && (url.scheme != "https" || !std::ifstream(ca_file_)))
      fail_user("reward '" + name_ + "': ca_file " + ca_file_ + " needs an https url and must be readable");
    if (max_batch_ < 1 || max_attempts_ < 1)
      fail_user("reward '" + name_ + "': max_batch and max_attempts must be at least 1");
  }
  const std::string& name() const override { return name_; }

  void cancel() noexcept override {
    cancelled_ = true;
    wake_.notify_all();
  }

  std::vector<RewardResult> score(const std::vector<RewardRequest>& requests, const Deadline& deadline) override {
    std::vector<RewardResult> results;
    for (size_t from = 0; from < requests.size(); from += static_cast<size_t>(max_batch_)) {
      const size_t to = std::min(requests.size(), from + static_cast<size_t>(max_batch_));
      post(requests, from, to, deadline, results);
    }
    return results;
  }

 private:
  void post(const std::vector<RewardRequest>& requests, size_t from, size_t to, const Deadline& deadline,
            std::vector<RewardResult>& results) {
    nlohmann::json body = {{"requests", nlohmann::json::array()}};
    for (size_t k = from; k < to; ++k) body["requests"].push_back(request_json(requests[k]));
    const std::string text = request_line(body);
    std::string problem;
    bool again = false;
    for (int attempt = 1;; ++attempt) {
      again = false;
      const std::optional<std::string> reply = send(text, deadline, problem, again);
      if (reply && take(*reply, to - from, results, problem)) return;
      if (!again || attempt >= max_attempts_ || !pause(Milliseconds(100 << std::min(attempt, 6)), deadline)) break;
    }
    RewardResult failed = failed_result(headers_.redact(url_ + ": " + problem));
    failed.hopeless = !again && !cancelled_ && !deadline.passed();
    results.insert(results.end(), to - from, failed);
  }

  // The body of a 200, or nothing and why; `again`: another try may help.
  std::optional<std::string> send(const std::string& text, const Deadline& deadline, std::string& problem,
                                  bool& again) {
    if (cancelled_ || deadline.passed()) {
      problem = cancelled_ ? "cancelled" : "no time left";
      return std::nullopt;
    }
    httplib::Request request;
    try {
      for (const auto& [name, value] : headers_.values()) request.set_header(name, value);
    } catch (const Error& error) {
      problem = error.what();
      again = true;  // a token that is being renewed may be missing for a moment
      return std::nullopt;
    }
    httplib::Client client(origin_);
    if (!client.is_valid()) {
      problem = "'" + origin_ + "' is no address";
      return std::nullopt;
    }
    if (!ca_file_.empty()) client.set_ca_cert_path(ca_file_);
    const auto limit = deadline.remaining() + Milliseconds(1000);  // the watchdog comes first
    client.set_connection_timeout(
        std::min(limit, kMaxConnect));  // stop() does not reach a connection that is being made
    client.set_read_timeout(limit);
    client.set_write_timeout(limit);
    client.set_keep_alive(false);
    std::string reply;
    request.method = "POST";
    request.path = path_;
    request.body = text;
    request.set_header("Content-Type", "application/json");
    bool too_long = false;
    request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
      too_long = reply.size() + size > kMaxReplyBytes;
      if (too_long) return false;
      reply.append(data, size);
      return true;
    };
    const httplib::Result result = [&] {
      const Watchdog watchdog(client, deadline, cancelled_);
      return client.send(request);
    }();
    if (!result) {
      problem = cancelled_          ? "cancelled"
                : deadline.passed() ? "no answer within the time limit"
                : too_long          ? "the answer is longer than 16 MiB"
                                    : httplib::to_string(result.error());
      again = !too_long && result.error() != httplib::Error::SSLServerVerification &&
              result.error() != httplib::Error::SSLLoadingCerts;
      return std::nullopt;
    }
    if (result->status != 200) {
      problem = "status " + std::to_string(result->status);
      again = result->status == 408 || result->status == 429 || result->status >= 500;
      return std::nullopt;
    }
    return reply;
  }

  static bool take(const std::string& reply, size_t count, std::vector<RewardResult>& results, std::string& problem) {
    const nlohmann::json parsed = nlohmann::json::parse(reply, nullptr, false);
    if (!parsed.is_object() || !parsed.contains("rewards") || !parsed["rewards"].is_array()) {
      problem = "answered '" + reply.substr(0, 80) + "' instead of {\"rewards\": [...]}";
      return false;
    }
    const nlohmann::json& rewards = parsed["rewards"];
    if (rewards.size() != count) {
      problem = "answered " + std::to_string(rewards.size()) + " rewards for " + std::to_string(count) + " responses";
      return false;
    }
    for (const nlohmann::json& reward : rewards) {
      if (reward.is_number() && std::isfinite(reward.get<double>()))
        results.push_back({.reward = reward.get<double>()});
      else
        results.push_back({.failed = true, .error = "the service gave no reward for this response", .declined = true});
    }
    return true;
  }

  // Waits before another try; false when there is no time for it.
  bool pause(Milliseconds duration, const Deadline& deadline) {
    std::unique_lock lock(mutex_);
    wake_.wait_for(lock, std::min(duration, deadline.remaining()), [&] { return cancelled_.load(); });
    return !cancelled_ && !deadline.passed();
  }

  std::string name_, url_;  // url_: for messages, without a query, which may hold a key
  std::string origin_, path_, ca_file_;
  HttpHeaders headers_;
  int64_t max_batch_, max_attempts_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace

std::unique_ptr<Reward> make_http_reward(const RewardOptions& options) { return std::make_unique<HttpReward>(options); }

}  // namespace trireme
