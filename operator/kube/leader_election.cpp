#include "operator/kube/leader_election.h"

#include <prometheus/gauge.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "operator/kube/events.h"
#include "operator/kube/metrics.h"

namespace trireme::kube {
namespace {

std::string text_of(const nlohmann::json& object, const char* key) {
  const auto it = object.is_object() ? object.find(key) : object.end();
  return object.is_object() && it != object.end() && it->is_string() ? it->get<std::string>() : std::string();
}

int64_t integer_of(const nlohmann::json& object, const char* key, int64_t fallback) {
  const auto it = object.is_object() ? object.find(key) : object.end();
  return object.is_object() && it != object.end() && it->is_number_integer() ? it->get<int64_t>() : fallback;
}

}  // namespace

// Tells the elector that the Lease changed; what it says now is read from the server.
class LeaderElector::LeaseWatch final : private ReflectorSink {
 public:
  LeaseWatch(const Client& client, const LeaderOptions& options, std::function<void()> on_news)
      : on_news_(std::move(on_news)) {
    ReflectorOptions reflector;
    reflector.resource = resources::kLeases;
    reflector.ns = options.lease_namespace;
    reflector.field_selector = "metadata.name=" + options.lease_name;
    reflector_ = std::make_unique<Reflector>(client, reflector, static_cast<ReflectorSink&>(*this));
    reflector_->start();
  }

 private:
  void list_started() override {}
  void list_item(std::string_view) override {}
  void list_finished(const std::string&) override { on_news_(); }
  void event(WatchEventType, std::string_view) override { on_news_(); }
  std::function<void()> on_news_;
  std::unique_ptr<Reflector> reflector_;
};

LeaderElector::LeaderElector(const Client& client, LeaderOptions options, LeaderCallbacks callbacks)
    : client_(client), options_(std::move(options)), callbacks_(std::move(callbacks)) {
  if (options_.identity.empty()) fail_user("leader election needs an identity");
  if (options_.lease_duration <= options_.renew_deadline || options_.renew_deadline <= options_.retry_period) {
    fail_user("leader election needs lease duration > renew deadline > retry period");
  }
  set_leading(false);
}

LeaderElector::~LeaderElector() { stop(); }

void LeaderElector::start() {
  TRIREME_CHECK(!thread_.joinable(), "a leader elector starts once");
  thread_ = std::thread([this] { run(); });
}

void LeaderElector::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void LeaderElector::stand_again() {
  {
    std::lock_guard lock(mutex_);
    out_ = false;
  }
  changed_.notify_all();
}

bool LeaderElector::is_leader() const { return leading_.load() && term_.holds(SteadyClock::now()); }

std::string LeaderElector::leader() const {
  std::lock_guard lock(mutex_);
  return holder_;
}

void LeaderElector::set_leading(bool leading) {
  leading_ = leading;
  if (options_.metrics) {
    options_.metrics
        ->gauge("leader_election_master_status", "1 while this process holds the lease.",
                {{"name", options_.lease_name}})
        .Set(leading ? 1 : 0);
  }
}

bool LeaderElector::wait_until(SteadyClock::time_point at, bool wake_on_news) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, at, [&] { return stopping_ || (wake_on_news && news_ != seen_news_); });
  return !stopping_;
}

// Notes when the Lease's content changed, by our clock: its own times are another machine's.
void LeaderElector::observe(const nlohmann::json& lease) {
  lease_ = lease;
  const nlohmann::json& spec = lease.contains("spec") ? lease["spec"] : nlohmann::json::object();
  const std::string text = spec.dump();
  if (text != observed_spec_) {
    observed_spec_ = text;
    observed_at_ = SteadyClock::now();
  }
  const int64_t seconds = integer_of(spec, "leaseDurationSeconds", options_.lease_duration.count() / 1000);
  observed_duration_ = Milliseconds(std::clamp<int64_t>(seconds, 0, 3600) * 1000);
  const std::string holder = text_of(spec, "holderIdentity");
  bool is_new = false;
  {
    std::lock_guard lock(mutex_);
    is_new = holder != holder_;
    holder_ = holder;
  }
  if (is_new && !holder.empty() && callbacks_.on_new_leader) callbacks_.on_new_leader(holder);
}

bool LeaderElector::try_acquire_or_renew(const Deadline& deadline) {
  const ObjectKey key{options_.lease_namespace, options_.lease_name};
  const bool renewing = leading_.load();
  if (!renewing || lease_.is_null()) {
    const auto found = client_.find(resources::kLeases, key, deadline);
    if (found) {
      observe(*found);
    } else {
      lease_ = nullptr;
    }
  }
  const auto sent = SteadyClock::now();
  const int64_t now_us = unix_now_ms() * 1000;
  const int64_t seconds = std::max<int64_t>(1, (options_.lease_duration.count() + 999) / 1000);
  nlohmann::json written;
  if (lease_.is_null()) {
    nlohmann::json lease{{"metadata", {{"namespace", key.ns}, {"name", key.name}}},
                         {"spec",
                          {{"holderIdentity", options_.identity},
                           {"leaseDurationSeconds", seconds},
                           {"acquireTime", format_micro_time(now_us)},
                           {"renewTime", format_micro_time(now_us)},
                           {"leaseTransitions", 0}}}};
    written = client_.create(resources::kLeases, std::move(lease), deadline);
  } else {
    nlohmann::json lease = lease_;
    nlohmann::json& spec = lease["spec"];
    if (!spec.is_object()) spec = nlohmann::json::object();
    const std::string holder = text_of(spec, "holderIdentity");
    if (holder != options_.identity) {
      if (renewing) return false;
      const bool expired = SteadyClock::now() >= observed_at_ + observed_duration_;
      if (!holder.empty() && !expired) return false;
      spec["acquireTime"] = format_micro_time(now_us);
      spec["leaseTransitions"] = integer_of(spec, "leaseTransitions", 0) + 1;
    }
    spec["holderIdentity"] = options_.identity;
    spec["leaseDurationSeconds"] = seconds;
    spec["renewTime"] = format_micro_time(now_us);
    written = client_.update(resources::kLeases, std::move(lease), "", deadline);
  }
  const auto until = sent + options_.renew_deadline;
  const bool held = !renewing || term_.extend(until);
  if (!renewing) term_.begin(until);
  observe(written);
  return held;
}

void LeaderElector::release() {
  nlohmann::json lease = lease_;
  lease["spec"]["holderIdentity"] = "";
  lease["spec"]["leaseDurationSeconds"] = 1;
  lease["spec"]["renewTime"] = format_micro_time(unix_now_ms() * 1000);
  try {
    client_.update(resources::kLeases, std::move(lease), "", Deadline::after(options_.renew_deadline));
    log_info("leader", options_.identity + " gave the lease " + options_.lease_name + " up");
  } catch (const std::exception& e) {
    log_warn("leader", std::string("the lease could not be given up, it will expire: ") + e.what());
  }
}

std::optional<bool> LeaderElector::try_once(const Deadline& deadline) {
  try {
    return try_acquire_or_renew(deadline);
  } catch (const ApiError& e) {
    lease_ = nullptr;  // read it again before the next write
    if (e.conflict() || e.already_exists()) return std::nullopt;
    log_warn("leader", e.what());
  } catch (const std::exception& e) {
    lease_ = nullptr;
    log_error("leader", e.what());
  }
  return std::nullopt;
}

void LeaderElector::run() {
  while (campaign() && lead()) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopping_ || !out_; });
    if (stopping_) return;
    lease_ = nullptr;
  }
}

bool LeaderElector::campaign() {
  // Standby: the watch tells of changes; without news, try when the lease expires or the period is over.
  watch_ = std::make_unique<LeaseWatch>(client_, options_, [this] {
    {
      std::lock_guard lock(mutex_);
      ++news_;
    }
    changed_.notify_all();
  });
  bool acquired = false;
  while (!acquired) {
    {
      std::lock_guard lock(mutex_);
      if (stopping_) break;
      seen_news_ = news_;
    }
    acquired = try_once(Deadline::after(options_.renew_deadline)).value_or(false);
    if (acquired) break;
    auto next = SteadyClock::now() + options_.retry_period;
    if (!lease_.is_null()) next = std::min(next, observed_at_ + observed_duration_);
    next = std::max(next, SteadyClock::now() + Milliseconds(10));
    if (!wait_until(next, true)) break;
    // A lost race or a chatty lease must not become a busy loop against the server.
    if (!wait_until(SteadyClock::now() + Milliseconds(50), false)) break;
  }
  watch_.reset();
  return acquired;
}

bool LeaderElector::lead() {
  set_leading(true);
  log_info("leader", options_.identity + " leads by lease " + options_.lease_name);
  if (callbacks_.on_started_leading) callbacks_.on_started_leading();
  bool lost = false;
  auto next = SteadyClock::now() + options_.retry_period;
  while (!lost) {
    const SteadyClock::time_point valid_until = term_.until();
    if (!wait_until(std::min(next, valid_until), false)) break;
    if (SteadyClock::now() >= valid_until) {
      lost = true;
      break;
    }
    // One request must not use up the time in which another could still succeed.
    const auto half = std::min(valid_until, SteadyClock::now() + options_.renew_deadline / 2);
    const std::optional<bool> renewed = try_once(Deadline(half));
    if (renewed && !*renewed) lost = true;
    next = SteadyClock::now() + (renewed ? options_.retry_period : std::min(options_.retry_period, Milliseconds(500)));
  }
  const bool held = is_leader();
  set_leading(false);
  if (lost) {
    log_error("leader", options_.identity + " lost the lease " + options_.lease_name);
    {
      std::lock_guard lock(mutex_);
      out_ = true;
    }
    if (callbacks_.on_lost) callbacks_.on_lost();
  } else if (held && options_.release_on_stop && !lease_.is_null()) {
    release();
  }
  return lost;
}

}  // namespace trireme::kube
