#include "trainer/telemetry/status_reporter.h"

#include <httplib.h>

#include <cmath>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"
#include "base/url.h"

namespace trireme {
namespace {

Url checked(const std::string& text) {
  Url url = split_url(text);
  if (!url.is_http()) fail_user("status url '" + text + "' is not http(s)://host[:port]/path");
  if (url.path.empty()) url.path = "/";
  return url;
}

}  // namespace

struct StatusReporter::Impl {
  explicit Impl(const StatusOptions& given) : options(given), url(checked(given.url)) {
    thread = std::thread([this] { run(); });
  }

  ~Impl() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    wake.notify_all();
    thread.join();
  }

  void run() {
    std::unique_lock lock(mutex);
    SteadyClock::time_point last_try = SteadyClock::now() - options.heartbeat;
    while (true) {
      // Nothing is said before the first update.
      const auto due = [&] { return last_try + (dirty ? options.min_interval : options.heartbeat); };
      while (!stopping && (version == 0 || SteadyClock::now() < due())) {
        wake.wait_until(lock, version == 0 ? SteadyClock::now() + options.heartbeat : due());
      }
      if (stopping && !dirty) return;
      if (!dirty && !beaten) {
        last_try = SteadyClock::now();
        continue;
      }
      beaten = false;
      const bool last = stopping;
      nlohmann::json body = state;
      const uint64_t version_sent = version;
      lock.unlock();
      body["progress"]["lastHeartbeatTime"] = utc_now();
      const bool ok = post(body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
      lock.lock();
      last_try = SteadyClock::now();
      if (ok && version == version_sent) dirty = false;
      if (last) return;
    }
  }

  bool post(const std::string& body) {
    std::string problem;
    try {
      httplib::Client client(url.origin());
      if (!client.is_valid()) fail_user("'" + url.origin() + "' is no address");
      const auto seconds = options.timeout.count() / 1000;
      const auto micros = options.timeout.count() % 1000 * 1000;
      client.set_connection_timeout(seconds, micros);
      client.set_read_timeout(seconds, micros);
      client.set_write_timeout(seconds, micros);
      client.set_max_timeout(options.timeout);  // the others are for one read each
      if (!options.ca_file.empty()) client.set_ca_cert_path(options.ca_file);
      httplib::Headers headers;
      if (!options.token_file.empty()) {
        headers.emplace("Authorization", "Bearer " + std::string(trim(read_file(options.token_file))));
      }
      const auto response = client.Post(url.path, headers, body, "application/json");
      if (!response) {
        problem = httplib::to_string(response.error());
      } else if (response->status < 200 || response->status >= 300) {
        problem = "HTTP " + std::to_string(response->status);
      }
    } catch (const std::exception& error) {
      problem = error.what();
    }
    if (problem.empty()) {
      ++sent;
      if (in_outage) log_info("telemetry", "status reports reach " + url.origin() + " again");
      in_outage = false;
      return true;
    }
    ++failed;
    if (!in_outage)
      log_warn("telemetry", "cannot report the status to " + options.url + ": " + problem +
                                "; training goes on, the report is tried again");
    in_outage = true;
    return false;
  }

  const StatusOptions options;
  const Url url;
  std::mutex mutex;
  std::condition_variable wake;
  nlohmann::json state = nlohmann::json::object();  // under mutex, as the next three
  uint64_t version = 0;
  bool dirty = false;
  bool beaten = false;
  bool stopping = false;
  bool in_outage = false;  // the thread's
  std::atomic<int64_t> sent{0}, failed{0};
  std::thread thread;
};

StatusReporter::StatusReporter(const StatusOptions& options) : impl_(std::make_unique<Impl>(options)) {}
StatusReporter::~StatusReporter() = default;

void StatusReporter::update(const nlohmann::json& patch) {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->state.merge_patch(patch);
    ++impl_->version;
    impl_->dirty = true;
  }
  impl_->wake.notify_all();
}

void StatusReporter::beat() {
  std::lock_guard lock(impl_->mutex);
  impl_->beaten = true;
}

int64_t StatusReporter::sent() const { return impl_->sent; }
int64_t StatusReporter::failed() const { return impl_->failed; }

nlohmann::json StatusReporter::progress_of(const StepRecord& record) {
  nlohmann::json progress = {
      {"step", record.step}, {"maxSteps", record.max_steps}, {"stepSeconds", record.phases.total_s}};
  for (const Phase phase : all_phases()) progress["phaseSeconds"][to_string(phase)] = record.phases.of(phase);
  const auto copy = [&](const char* to, const char* from) {
    const auto value = record.find(from);
    if (value && std::isfinite(*value)) progress[to] = *value;
  };
  copy("reward", "train/reward");
  copy("responseLength", "train/mean_gen_tokens_per_sample");
  copy("tokensPerSecond", "performance/tokens_per_sec");
  copy("validationAccuracy", "validation/accuracy");
  // SFT has neither.
  copy("trajectoryAge", "train/avg_trajectory_age");
  if (const auto version = record.find("train/weight_version"); version && std::isfinite(*version))
    progress["weightVersion"] = std::llround(*version);
  return progress;
}

}  // namespace trireme
