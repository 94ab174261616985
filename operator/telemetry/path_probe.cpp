#include "operator/telemetry/path_probe.h"

#include <httplib.h>

#include "base/log.h"
#include "base/url.h"

namespace trireme::telemetry {

void PathAnswers::note(bool answered, SteadyClock::time_point now) {
  failures_ = answered ? 0 : failures_ + 1;
  if (failures_ >= 2) last_.reset();
  if (!answered) return;
  if (!last_ || now - *last_ > patience_) since_ = now;
  last_ = now;
}

controller::OwnPath PathAnswers::at(SteadyClock::time_point now) const {
  controller::OwnPath path{.broken = failures_ >= 2};
  if (last_ && now - *last_ <= patience_) path.answers_for = std::chrono::duration_cast<Milliseconds>(now - since_);
  return path;
}

PathProbe::PathProbe(const std::string& url, Milliseconds interval, Milliseconds timeout)
    : origin_(split_url(url).origin()),
      interval_(interval),
      timeout_(timeout),
      answers_(3 * (interval + timeout)),
      thread_([this] { run(); }) {}

PathProbe::~PathProbe() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void PathProbe::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    const bool answered = answers();
    lock.lock();
    const bool was_broken = answers_.at(SteadyClock::now()).broken;
    answers_.note(answered, SteadyClock::now());
    const bool broken = answers_.at(SteadyClock::now()).broken;
    if (broken && !was_broken)
      log_warn("status", "nothing answers at " + origin_ + ", where trainers report: no job counts as hung meanwhile");
    if (!broken && was_broken) log_info("status", "reports can reach " + origin_ + " again");
    wake_.wait_for(lock, interval_, [this] { return stopping_; });
  }
}

controller::OwnPath PathProbe::found() const {
  std::lock_guard lock(mutex_);
  return answers_.at(SteadyClock::now());
}

bool PathProbe::answers() const {
  try {
    httplib::Client client(origin_);
    if (!client.is_valid()) return false;  // no address that anybody could be reached at
    const time_t seconds = timeout_.count() / 1000;
    const time_t micros = timeout_.count() % 1000 * 1000;
    client.set_connection_timeout(seconds, micros);
    client.set_read_timeout(seconds, micros);
    client.set_write_timeout(seconds, micros);
    client.enable_server_certificate_verification(false);
    return static_cast<bool>(client.Get("/healthz"));
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace trireme::telemetry
